"""From rewards and logprobs to what the losses need: corrections, advantages, weights.

The functions of algo/ are pure; here their global statistics are agreed over all ranks. Every
function is collective over `topology` and takes this rank's Batch of each mini-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.algo.advantages import (
    Outcomes,
    Tokens,
    estimator_of,
    token_baseline_sums,
    token_moments,
    token_positions,
    token_rewards,
    whiten,
)
from spmdrl.algo.correction import (
    correction_weights,
    mismatch_metrics,
    mismatch_sums,
    rejection_keep,
    weight_moments,
)
from spmdrl.algo.losses import (
    kl_estimator_of,
    loss_counts,
    loss_weights,
    process_reward,
    seq_mean_token_mean,
)
from spmdrl.algo.selection import (
    clip_cov_candidates,
    covariance_moments,
    covariances,
    draw,
    filter_weights,
    token_lottery,
)
from spmdrl.collectives import all_gather_rows, kth_largest, sum_over_ranks
from spmdrl.config import AlgoConfig, PpoConfig
from spmdrl.packing import address_order, concatenate
from spmdrl.topology import Topology
from spmdrl.types import Batch, segment_sum


def summed(values: Tensor, topology: Topology) -> Tensor:
    """The sum of `values` over all ranks, in place."""
    dist.all_reduce(values, group=topology.group)
    return values


# ---- rollout correction


def add_correction(
    batches: list[Batch], algo: AlgoConfig, topology: Topology
) -> tuple[list[Tensor], dict[str, float]]:
    """Sets policy_weights where a correction is on; returns what may be trained on, and metrics.

    The first is (num_tokens,) per batch: the loss mask without the tokens that failed a test. The
    ratio is that of the policy the step starts from to the engine that sampled.
    """
    config = algo.correction
    kept, all_weights, parts = [], [], torch.zeros(10, dtype=torch.float64)
    moments = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        assert batch.old_logprobs is not None
        mask, lens = batch.loss_mask, batch.seq_lens
        log_ratio = (batch.old_logprobs - batch.rollout_logprobs) * mask
        keep = rejection_keep(log_ratio, mask, lens, config.reject)
        weights = mask.clone()
        if config.level != "off":
            weights = correction_weights(log_ratio, mask, lens, config)
            moments += weight_moments(weights, mask, lens, config.level)
        parts += mismatch_sums(log_ratio, weights, keep, mask, lens)
        kept.append(keep)
        all_weights.append(weights)
    total, number = summed(moments, topology).tolist()
    scale = number / total if config.normalize and total > 0 else 1.0
    if config.level != "off":
        for batch, weights in zip(batches, all_weights, strict=True):
            batch.policy_weights = weights * scale
    return kept, mismatch_metrics(summed(parts, topology))


# ---- advantages


def add_advantages(
    batches: list[Batch], config: PpoConfig, kl_coef: float, kept: list[Tensor], step: int,
    topology: Topology,
) -> tuple[list[Batch], dict[str, float]]:  # fmt: skip
    """The batches with advantages, loss_weights and, with a critic, returns.

    Statistics (of a group, of whitening, of the loss's divisor) are over all ranks' samples. Where
    a filter is on, samples that it did not draw are left out.
    """
    algo = config.algo
    estimator = estimator_of(algo)
    whole = concatenate(batches)
    outcomes, rows, kl = gather_outcomes(whole, algo, kl_coef, topology)
    tokens = tokens_of(whole, algo, outcomes, rows, kl_coef)
    if estimator.token_sums:
        tokens = with_group_sums(tokens, algo.advantage == "tir_optimal_token_baseline", topology)
    returns = None
    if estimator.sees == "outcomes":
        advantages = tokens.own(estimator(outcomes, algo)) * whole.loss_mask
    elif estimator.critic:
        advantages, returns = estimator(tokens, algo)
    else:
        advantages = estimator(tokens, algo)
    if estimator.whiten:
        moments = summed(token_moments(advantages, whole.loss_mask), topology)
        advantages = whiten(advantages, whole.loss_mask, moments)
    metrics = advantage_metrics(advantages, whole.loss_mask, topology)
    if algo.kl_coef and algo.kl_in == "reward":
        metrics["reward/kl"] = kl
    drawn = torch.ones(whole.num_seqs)
    if algo.sample_filter is not None:
        drawn = draw_samples(outcomes, rows, config, step)
        metrics["filter/kept"] = sum_over_ranks(float((drawn > 0).sum()), topology)
    sizes, counts = [b.num_tokens for b in batches], [b.num_seqs for b in batches]
    for i, (batch, part) in enumerate(zip(batches, advantages.split(sizes), strict=True)):
        batch.advantages = part
        batch.multiplicity = drawn.split(counts)[i]
        if returns is not None:
            batch.returns = returns.split(sizes)[i]
        add_loss_weights(batch, kept[i], config, topology)
    if algo.sample_filter is not None:
        batches = [
            batch.select(part.nonzero().flatten().tolist())
            for batch, part in zip(batches, drawn.split(counts), strict=True)
        ]
    return batches, metrics


def gather_outcomes(
    batch: Batch, algo: AlgoConfig, kl_coef: float, topology: Topology
) -> tuple[Outcomes, Tensor, float]:
    """All ranks' samples in order of (group, index), which rows are `batch`'s, and the mean KL."""
    kl = kl_penalty(batch, algo)
    lengths = segment_sum(batch.loss_mask.double(), batch.seq_lens)
    own_kl = segment_sum(kl.double(), batch.seq_lens)
    process = torch.zeros_like(lengths)
    if batch.prm_logprobs is not None:
        process = segment_sum(process_rewards(batch, algo).double(), batch.seq_lens)
    columns = [
        batch.groups, batch.indices, batch.rewards - kl_coef * own_kl, batch.valid, lengths,
        batch.greedy, process / lengths.clamp(min=1), own_kl, *batch.keys.unbind(1),
    ]  # fmt: skip
    tables = all_gather_rows(torch.stack([c.double() for c in columns], dim=1), topology)
    everyone = torch.cat(tables)
    order = address_order(everyone[:, :2])
    first = sum(len(t) for t in tables[: topology.rank])
    rows = torch.argsort(order)[first : first + batch.num_seqs]
    c = everyone[order].unbind(1)
    outcomes = Outcomes(
        groups=c[0].long(), scores=c[2] * c[3], valid=c[3], lengths=c[4], greedy=c[5],
        process=c[6], keys=everyone[order][:, 8:],
    )  # fmt: skip
    return outcomes, rows, float(c[7].sum() / c[4].sum().clamp(min=1))


def kl_penalty(batch: Batch, algo: AlgoConfig) -> Tensor:
    """(num_tokens,): the KL of each unmasked token where it belongs to the reward, else 0."""
    if not algo.kl_coef or algo.kl_in != "reward":
        return torch.zeros_like(batch.loss_mask)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    return kl_estimator_of(algo)(batch.old_logprobs, batch.ref_logprobs) * batch.loss_mask


def process_rewards(batch: Batch, algo: AlgoConfig) -> Tensor:
    assert batch.prm_logprobs is not None and batch.ref_logprobs is not None
    reward = process_reward(batch.prm_logprobs, batch.ref_logprobs, algo.prime_beta)
    return reward * batch.loss_mask


def tokens_of(
    batch: Batch, algo: AlgoConfig, outcomes: Outcomes, rows: Tensor, kl_coef: float
) -> Tokens:
    penalty = kl_coef * kl_penalty(batch, algo)
    return Tokens(
        rewards=token_rewards(batch.rewards, batch.loss_mask, batch.seq_lens, penalty),
        mask=batch.loss_mask, seq_lens=batch.seq_lens, outcomes=outcomes, rows=rows,
        values=batch.values, logprobs=batch.old_logprobs, pi_squared=batch.pi_squared,
        process=None if batch.prm_logprobs is None else process_rewards(batch, algo),
    )  # fmt: skip


def with_group_sums(tokens: Tokens, by_turn: bool, topology: Topology) -> Tokens:
    positions = token_positions(tokens.mask, tokens.seq_lens, by_turn)[tokens.mask > 0]
    width = torch.tensor([int(positions.max()) + 1 if len(positions) else 1])
    dist.all_reduce(width, dist.ReduceOp.MAX, group=topology.group)
    sums = token_baseline_sums(tokens, by_turn, int(width))
    return replace(tokens, group_sums=summed(sums, topology))


def draw_samples(o: Outcomes, rows: Tensor, config: PpoConfig, step: int) -> Tensor:
    """(num_seqs,) float32: how often each of this rank's samples was drawn for training."""
    assert config.algo.sample_filter is not None
    weights = filter_weights(o.scores, o.valid, config.algo.sample_filter, config.algo.filter_power)
    new = int((o.groups % (1 + config.algo.replay_steps) == 0).sum())  # replay.ReplayBuffer.mix
    return draw(weights, new, config.seed, step)[rows].float()


def advantage_metrics(advantages: Tensor, mask: Tensor, topology: Topology) -> dict[str, float]:
    count, total, squares = summed(token_moments(advantages, mask), topology).tolist()
    mean = total / max(count, 1)
    std = max(squares / max(count, 1) - mean**2, 0.0) ** 0.5
    return {"advantage/mean": mean, "advantage/std": std, "rollout/loss_tokens": count}


# ---- weights of a mini-batch


def add_loss_weights(batch: Batch, kept: Tensor, config: PpoConfig, topology: Topology) -> None:
    """Sets loss_weights and, where they are asked for, nll_weights and the top-entropy mask."""
    algo, lens = config.algo, batch.seq_lens
    counts = summed(loss_counts(kept, lens, batch.multiplicity), topology)
    norm_length = algo.norm_length or config.rollout.max_tokens
    batch.loss_weights = loss_weights(kept, lens, counts, algo, norm_length, batch.multiplicity)
    if algo.positive_nll_coef:
        positive = torch.repeat_interleave(batch.rewards > 0, lens) * batch.loss_mask
        total = sum_over_ranks(float(positive.sum(dtype=torch.float64)), topology)
        batch.nll_weights = positive / max(total, 1.0)
    if algo.top_entropy_fraction < 1:
        top = top_entropy(batch, algo.top_entropy_fraction, topology)
        batch.policy_weights = top if batch.policy_weights is None else top * batch.policy_weights


def top_entropy(batch: Batch, fraction: float, topology: Topology) -> Tensor:
    """(num_tokens,) float32: 1 on the given fraction of the mini-batch's tokens, least sure first.

    Source: arXiv 2506.01939, eq. 5. The entropy is that of the policy the step starts from.
    """
    assert batch.old_entropy is not None
    entropy = torch.where(batch.loss_mask > 0, batch.old_entropy.double(), -torch.inf)
    count = sum_over_ranks(float(batch.loss_mask.sum(dtype=torch.float64)), topology)
    cut = kth_largest(entropy, max(math.ceil(fraction * count), 1), topology)
    return (entropy >= cut).float() * batch.loss_mask


def with_outcome_weights(batch: Batch, topology: Topology) -> Batch:
    """For the process reward model: every sample of the mini-batch weighs the same.

    Raises ValueError where a reward is no label.
    """
    rewards = batch.rewards[batch.valid > 0]
    if len(rewards) and not 0 <= float(rewards.min()) <= float(rewards.max()) <= 1:
        raise ValueError(
            f"advantage='prime' takes rewards as labels in 0..1, got {float(rewards.min()):g} .. "
            f"{float(rewards.max()):g}"
        )
    counts = summed(loss_counts(batch.loss_mask, batch.seq_lens), topology)
    weights = seq_mean_token_mean(batch.loss_mask, batch.seq_lens, counts, 1)
    return replace(batch, loss_weights=weights)


def select_tokens(
    batch: Batch, logprobs: Tensor, config: PpoConfig, step: int, update: int, topology: Topology
) -> Tensor:
    """(num_tokens,) float32: 1 on the tokens that clip_cov or kl_cov act on in this update.

    logprobs: of the policy at hand. kl_cov takes the cov_fraction of highest covariance, clip_cov
    draws as many from those between cov_low and cov_high.
    """
    assert batch.advantages is not None and batch.old_logprobs is not None
    algo, mask = config.algo, batch.loss_mask
    moments = covariance_moments(logprobs, batch.advantages, mask)
    covariance = covariances(logprobs, batch.advantages, mask, summed(moments, topology))
    count = max(int(algo.cov_fraction * float(moments[0])), 1)
    if algo.policy_loss == "kl_cov":
        cut = kth_largest(covariance, count, topology)
        return (covariance >= cut).float() * mask
    ratio = (logprobs - batch.old_logprobs).exp()
    bounds = (algo.cov_low, algo.cov_high, algo.clip_low, algo.clip_high)
    candidates = clip_cov_candidates(covariance, ratio, batch.advantages, bounds)
    tickets = token_lottery(batch, config.seed, step, update)
    tickets = torch.where(candidates & (mask > 0), tickets, -torch.inf)
    cut = kth_largest(tickets, count, topology)
    return (tickets >= cut).float() * candidates * mask
