"""Turns rewards and logprobs into what the losses need: corrections, advantages, weights.

The functions of algo/ are pure; here their global statistics are agreed over all ranks. Every
function is collective over `topology` and takes this rank's Batch of each mini-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.algo.advantages import (
    Outcomes,
    Tokens,
    token_baseline_sums,
    token_moments,
    token_positions,
    token_rewards,
    whiten,
)
from spmdrl.algo.algorithm import Algorithm
from spmdrl.algo.correction import (
    correction_weights,
    mismatch_metrics,
    mismatch_sums,
    rejection_keep,
    weight_moments,
)
from spmdrl.algo.demonstrations import demonstrated_mask, sampled_mask
from spmdrl.algo.kl import above_cut
from spmdrl.algo.losses import (
    SELECTION_OPTIONS,
    loss_of,
    loss_options,
    seq_mean_token_mean,
    trained_mask,
)
from spmdrl.algo.objectives import has_cut, kl_estimator_of
from spmdrl.algo.selection import (
    clip_cov_candidates,
    covariance_moments,
    covariances,
    draw,
    filter_weights,
    token_lottery,
)
from spmdrl.config import AlgoConfig, PpoConfig
from spmdrl.data.packing import address_order, concatenate
from spmdrl.distributed.collectives import all_gather_rows, kth_largest
from spmdrl.distributed.topology import Topology
from spmdrl.segments import segment_expand, segment_sum
from spmdrl.types import Batch

ENTROPY_STEP = 2.0**-10  # nats: what is nearer counts as equal where entropy chooses tokens


def summed(values: Tensor, topology: Topology) -> Tensor:
    """The sum of `values` over all ranks, in place."""
    dist.all_reduce(values, group=topology.group)
    return values


# ---- rollout correction


def add_correction(
    batches: list[Batch], algo: AlgoConfig, topology: Topology
) -> dict[str, float]:  # fmt: skip
    """Sets kept_mask, the tokens that passed all tests, and policy_weights where a level is chosen.

    The ratio is that of the policy the step starts from to the engine that sampled. Demonstrations,
    which no engine has sampled, are kept and have no part in it.
    """
    config = algo.correction
    all_weights, parts = [], torch.zeros(10, dtype=torch.float64)
    moments = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        assert batch.old_logprobs is not None
        mask, lens = sampled_mask(batch), batch.seq_lens
        log_ratio = (batch.old_logprobs - batch.rollout_logprobs) * mask
        keep = rejection_keep(log_ratio, mask, lens, config.reject)
        weights = mask.clone()
        if config.level != "off":
            weights = correction_weights(log_ratio, mask, lens, config)
            moments += weight_moments(weights, mask, lens, config.level)
        parts += mismatch_sums(log_ratio, weights * keep, keep, mask, lens)
        batch.kept_mask = keep + demonstrated_mask(batch)
        all_weights.append(weights)
    total, number = summed(moments, topology).tolist()
    scale = number / total if config.normalize and total > 0 else 1.0
    if config.level != "off":
        for batch, weights in zip(batches, all_weights, strict=True):
            batch.policy_weights = weights * scale
    return mismatch_metrics(summed(parts, topology))


# ---- advantages


@dataclass(frozen=True)
class SampleTable:
    """A row for every sample of the step, of all ranks: what the statistics are made of."""

    outcomes: Outcomes
    rows: Tensor  # (num_seqs,) int64: which rows are this rank's, mini-batch after mini-batch
    mini: Tensor  # (n,) int64: its mini-batch
    num_kept: Tensor  # (n,) float64: tokens that are trained on
    rewards: Tensor  # (n,) float64: before any KL is taken off
    kl: Tensor  # (n,) float64: sum over its tokens, where the KL belongs to the reward


def add_advantages(
    batches: list[Batch],
    config: PpoConfig,
    algorithm: Algorithm,
    kl_coef: float,
    topology: Topology,
) -> dict[str, float]:
    """Sets advantages, loss_weights and, with a critic, returns; metrics of the advantages.

    Statistics (of a group, of whitening, of the loss's divisor) are over all ranks' samples.
    """
    algo, estimator = config.algo, algorithm.estimator
    whole = concatenate(batches)
    if algo.reward_clip is not None:
        whole = replace(whole, rewards=whole.rewards.clamp(*algo.reward_clip))
    kl = process = torch.zeros_like(whole.loss_mask)
    in_reward = algo.kl_coef != 0 and algo.kl_in == "reward"
    if in_reward:
        kl = kl_penalty(whole, algo)
    if whole.prm_logprobs is not None:
        process = process_log_ratio(whole)
    mini = torch.repeat_interleave(
        torch.arange(len(batches)), torch.tensor([batch.num_seqs for batch in batches])
    )
    coefs = algo.reward_coef, kl_coef
    trajectories = config.rollout.n if config.agent is not None else None
    table = gather_samples(whole, mini, kl, process, coefs, topology, trajectories)
    returns = None
    if estimator.sees == "outcomes":
        advantages, moments = advantages_of_outcomes(whole, table, algorithm, algo)
    else:
        tokens = tokens_of(whole, kl, process, coefs, table)
        advantages, returns, moments = advantages_of_tokens(tokens, algorithm, topology)
    metrics = moment_metrics(moments)
    metrics["advantage/all_zero"] = float(none_differs(metrics, estimator.whiten))
    if estimator.whiten and algo.whiten_over == "tokens":
        advantages = whiten(advantages, whole.loss_mask, moments)
    sizes = [batch.num_tokens for batch in batches]
    for i, (batch, part) in enumerate(zip(batches, advantages.split(sizes), strict=True)):
        batch.advantages = part
        batch.returns = None if returns is None else returns.split(sizes)[i]
    add_loss_weights(batches, table, config, algorithm, topology)
    if in_reward:
        num_tokens = table.outcomes.lengths.sum().clamp(min=1)
        metrics["reward/kl"] = float(table.kl.sum() / num_tokens)
        if has_cut(algo):
            metrics["reward/kl_cut"] = float(num_cut(whole, algo, topology) / num_tokens)
    return metrics


def advantages_of_outcomes(
    batch: Batch, table: SampleTable, algorithm: Algorithm, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    """Returns the advantage of each token of this rank, (num_tokens,), that of its sample, and
    `token_moments` of all ranks' before any whitening over tokens.
    """
    valid, lengths = table.outcomes.valid, table.outcomes.lengths
    per_sample = algorithm.advantage(table.outcomes) * valid
    moments = sample_moments(per_sample, lengths)
    if algorithm.estimator.whiten and algo.whiten_over == "samples":
        per_sample = whiten(per_sample, valid, sample_moments(per_sample, valid))
    own = segment_expand(per_sample[table.rows].float(), batch.seq_lens)
    return own * batch.loss_mask, moments


def advantages_of_tokens(
    tokens: Tokens, algorithm: Algorithm, topology: Topology
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the advantages, with a critic the returns, (num_tokens,) each, and `token_moments` of
    all ranks' advantages. Collective.
    """
    if algorithm.estimator.token_sums:
        tokens = with_group_sums(tokens, algorithm.estimator.by_turn, topology)
    advantages, returns = algorithm.advantage(tokens), None
    if algorithm.estimator.critic:
        advantages, returns = advantages
    return advantages, returns, summed(token_moments(advantages, tokens.mask), topology)


def gather_samples(
    batch: Batch, mini: Tensor, kl: Tensor, process: Tensor, coefs: tuple[float, float],
    topology: Topology, n: int | None = None,
) -> SampleTable:  # fmt: skip
    """The only exchange that most estimators need: a dozen numbers per sample.

    mini: (num_seqs,) int64, the mini-batch of each; kl, process: (num_tokens,); coefs: of reward
    and KL. n: samples of a prompt, where agents have made them: sequences whose indices differ by
    multiples of n are one trajectory, and one sample here; None: each sequence is one.
    """
    turns = torch.zeros_like(kl) if batch.turn_rewards is None else batch.turn_rewards
    lengths, kept_lengths, kl, process, turns = (
        segment_sum(x.double(), batch.seq_lens)
        for x in (batch.loss_mask, trained_mask(batch), kl, process, turns)
    )
    columns = [
        batch.groups, batch.indices, batch.rewards, batch.valid, lengths, kept_lengths, kl,
        process / lengths.clamp(min=1), batch.greedy_rewards, mini, turns,
        *batch.reward_components.unbind(1),
    ]  # fmt: skip
    tables = all_gather_rows(torch.stack([c.double() for c in columns], dim=1), topology)
    first = sum(len(t) for t in tables[: topology.rank])
    everyone = torch.cat(tables)
    order = address_order(everyone[:, :2])
    samples = torch.arange(len(order))  # of each sequence, in that order
    if n is not None:
        order = trajectory_order(everyone[:, :2], n)
        everyone, samples = by_trajectory(everyone, order, n)
    else:
        everyone = everyone[order]
    groups, _, rewards, valid, lengths, kept_lengths, kl, process, greedy, mini, _ = everyone[
        :, :NUM_COLUMNS
    ].T.contiguous()
    reward_coef, kl_coef = coefs
    outcomes = Outcomes(
        groups=groups.long(), scores=(reward_coef * rewards - kl_coef * kl) * valid, valid=valid,
        lengths=lengths, greedy_rewards=reward_coef * greedy,
        reward_components=everyone[:, NUM_COLUMNS:], process=process,
    )  # fmt: skip
    rows = samples[torch.argsort(order)[first : first + batch.num_seqs]]
    return SampleTable(outcomes, rows, mini.long(), kept_lengths, rewards, kl)


NUM_COLUMNS, REWARDS, TURNS = 11, 2, 10  # of the table of sequences, without reward components
SUMMED_COLUMNS = (4, 5, 6, TURNS)  # those that are sums over tokens


def trajectory_order(addresses: Tensor, n: int) -> Tensor:
    """Order of sequences by group, trajectory and row. addresses: (num_seqs, 2) of group, index."""
    groups, indices = addresses.unbind(1)
    row = torch.div(indices, n, rounding_mode="floor")
    most = int(row.max()) + 1 if len(row) else 1
    return address_order(torch.stack([groups, (indices % n) * most + row], dim=1))


def by_trajectory(table: Tensor, order: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(a row per trajectory, the trajectory of each sequence in that order).

    Rows of a trajectory have its reward and the like in common; what is summed over tokens is
    summed over them. The rewards of turns are part of their row's reward, and all of them are part
    of the trajectory's. table: (num_seqs, num_columns) float64; order: of trajectory_order.
    """
    ordered = table[order]
    keys = torch.stack([ordered[:, 0], ordered[:, 1] % n], dim=1)
    found, slots = keys.unique_consecutive(dim=0, return_inverse=True)
    sums = torch.zeros(len(found), table.shape[1], dtype=table.dtype)
    sums.index_add_(0, slots, ordered)
    firsts = torch.searchsorted(slots, torch.arange(len(found)))
    result = ordered[firsts]
    columns = torch.tensor(SUMMED_COLUMNS)
    result[:, REWARDS] += sums[:, TURNS] - result[:, TURNS]
    result[:, columns] = sums[:, columns]
    return result, slots


def kl_penalty(batch: Batch, algo: AlgoConfig) -> Tensor:
    """(num_tokens,): the KL of each unmasked token, where it belongs to the reward."""
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    return kl_estimator_of(algo)(batch.old_logprobs, batch.ref_logprobs) * batch.loss_mask


def num_cut(batch: Batch, algo: AlgoConfig, topology: Topology) -> Tensor:
    """Unmasked tokens of all ranks whose KL in the reward is above the cut of k3. Collective."""
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    above = above_cut(batch.old_logprobs, batch.ref_logprobs, algo.kl_cut) * batch.loss_mask
    return summed(above.sum(dtype=torch.float64), topology)


def process_log_ratio(batch: Batch) -> Tensor:
    """(num_tokens,): log pi_prm - log pi_ref of each unmasked token.

    Times beta it is the implicit process reward. Source: PRIME, arXiv 2502.01456, eq. 3.
    """
    assert batch.prm_logprobs is not None and batch.ref_logprobs is not None
    return (batch.prm_logprobs - batch.ref_logprobs) * batch.loss_mask


def tokens_of(
    batch: Batch, kl: Tensor, process: Tensor, coefs: tuple[float, float], table: SampleTable
) -> Tokens:
    rewards, penalty = coefs[0] * batch.rewards, coefs[1] * kl
    turns = None if batch.turn_rewards is None else coefs[0] * batch.turn_rewards
    return Tokens(
        rewards=token_rewards(rewards, batch.loss_mask, batch.seq_lens, penalty, turns),
        mask=batch.loss_mask, seq_lens=batch.seq_lens, outcomes=table.outcomes, rows=table.rows,
        values=batch.values, logprobs=batch.old_logprobs, pi_squared=batch.pi_squared,
        process=process, weights=batch.policy_weights,
    )  # fmt: skip


def with_group_sums(tokens: Tokens, by_turn: bool, topology: Topology) -> Tokens:
    positions = token_positions(tokens.mask, tokens.seq_lens, by_turn)[tokens.mask > 0]
    width = torch.tensor([int(positions.max()) + 1 if len(positions) else 1])
    dist.all_reduce(width, dist.ReduceOp.MAX, group=topology.group)
    sums = token_baseline_sums(tokens, by_turn, int(width))
    return replace(tokens, group_sums=summed(sums, topology))


def sample_moments(advantages: Tensor, lengths: Tensor) -> Tensor:
    """Returns `token_moments` of (n,) advantages that stand on all tokens of their sample."""
    return torch.stack([lengths, lengths * advantages, lengths * advantages**2]).sum(1)


def moment_metrics(moments: Tensor) -> dict[str, float]:
    """Returns mean and standard deviation of the advantages before any whitening."""
    count, total, squares = moments.tolist()
    mean = total / max(count, 1)
    std = max(squares / max(count, 1) - mean**2, 0.0) ** 0.5
    return {"advantage/mean": mean, "advantage/std": std, "rollout/loss_tokens": count}


def none_differs(metrics: dict[str, float], whitened: bool) -> bool:
    """Whether all advantages are 0 when they are learnt from, by their mean and std before any
    whitening, which makes 0 of advantages that are all the same."""
    mean, std = metrics["advantage/mean"], metrics["advantage/std"]
    return std == 0 and (whitened or mean == 0)


# ---- weights of a mini-batch


def add_loss_weights(
    batches: list[Batch],
    table: SampleTable,
    config: PpoConfig,
    algorithm: Algorithm,
    topology: Topology,
) -> None:
    """Sets loss_weights and, where they are asked for, nll_weights and the top-entropy mask."""
    algo = config.algo
    norm_length = algo.norm_length or config.rollout.max_tokens
    for i, batch in enumerate(batches):
        mine = (table.mini == i).double()
        counted = mine if algo.seq_mean_over == "all" else (table.num_kept > 0) * mine
        counts = torch.stack([(table.num_kept * mine).sum(), counted.sum()])
        batch.loss_weights = algorithm.aggregate(
            trained_mask(batch), batch.seq_lens, counts, norm_length
        )
        if algo.positive_nll_coef:
            positive = table.outcomes.lengths * (table.rewards > 0)
            right = torch.repeat_interleave((batch.rewards > 0).float(), batch.seq_lens)
            total = float((positive * mine).sum().clamp(min=1))
            batch.nll_weights = right * batch.loss_mask / total
        if algo.top_entropy_fraction < 1:
            choose_top_entropy(batch, algo.top_entropy_fraction * float(counts[0]), topology)
    if config.agent is not None and algorithm.aggregate is seq_mean_token_mean:
        weigh_by_trajectory(batches, table)


def weigh_by_trajectory(batches: list[Batch], table: SampleTable) -> None:
    """Makes the mean over a row's tokens that over the tokens of its whole trajectory."""
    samples = table.rows.split([batch.num_seqs for batch in batches])
    for batch, rows in zip(batches, samples, strict=True):
        assert batch.loss_weights is not None
        own = segment_sum(trained_mask(batch).double(), batch.seq_lens)
        share = own / table.num_kept[rows].clamp(min=1)
        batch.loss_weights *= segment_expand(share.float(), batch.seq_lens)


def choose_top_entropy(batch: Batch, count: float, topology: Topology) -> None:
    """Leaves weights of the policy loss to the `count` tokens of the mini-batch, over all ranks,
    at which the policy was least certain. Collective.
    """
    assert batch.old_entropy is not None
    # tokens of equal context have equal entropies but for rounding, which must not choose
    steps = (batch.old_entropy.double() / ENTROPY_STEP).round()
    top = largest(steps, math.ceil(count), batch, topology)
    weights = batch.policy_weights
    batch.policy_weights = top if weights is None else top * weights


def largest(
    values: Tensor, count: int, batch: Batch, topology: Topology, draw: Tensor | None = None
) -> Tensor:
    """(num_tokens,) float32: 1 on the `count` tokens of the mini-batch with the largest values.

    Of equal values those with the higher ticket of `draw`, in 0..1, are taken; without tickets all
    of them are. Only tokens that are trained on are chosen from.
    """
    kept = trained_mask(batch)
    values = torch.where(kept > 0, values, -torch.inf)
    cut = kth_largest(values, max(count, 1), topology)
    chosen = (values >= cut) & (kept > 0)
    if draw is not None:
        above, tied = chosen & (values > cut), chosen & (values == cut)
        numbers = summed(torch.stack([above.sum(), tied.sum()]), topology)
        if int(numbers.sum()) > max(count, 1):
            tickets = torch.where(tied, draw, -torch.inf)
            least = kth_largest(tickets, max(count, 1) - int(numbers[0]), topology)
            chosen = above | (tied & (tickets >= least))
    return chosen.float()


def select_tokens(
    batch: Batch, logprobs: Tensor, config: PpoConfig, step: int, update: int, topology: Topology
) -> Tensor:
    """(num_tokens,) float32: 1 on the tokens that clip_cov or kl_cov act on in this update.

    logprobs: of the policy at hand. kl_cov takes the cov_fraction of highest covariance, clip_cov
    draws as many from those between cov_low and cov_high.
    """
    assert batch.advantages is not None and batch.old_logprobs is not None
    algo, mask = config.algo, trained_mask(batch)
    options = loss_options(algo)
    moments = covariance_moments(logprobs, batch.advantages, mask)
    covariance = covariances(logprobs, batch.advantages, mask, summed(moments, topology))
    count = max(int(options["cov_fraction"] * float(moments[0])), 1)
    tickets = token_lottery(batch, config.seed, step, update)
    if loss_of(algo).selects == "highest":
        return largest(covariance, count, batch, topology, tickets)
    ratio = (logprobs - batch.old_logprobs).exp()
    bounds = tuple(options[name] for name in SELECTION_OPTIONS["drawn"][1:])
    candidates = clip_cov_candidates(covariance, ratio, batch.advantages, bounds)
    tickets = torch.where(candidates, tickets, -torch.inf)
    return largest(tickets, count, batch, topology) * candidates


# ---- PF-PPO


def resample(batch: Batch, config: PpoConfig, step: int, topology: Topology) -> tuple[Batch, float]:
    """Draws as many sequences as the step sampled, by reward and with replacement (PF-PPO's
    filter). Collective.

    One that is drawn k times is there k times. The draw is of the step's samples and those that are
    replayed, on all ranks; the second result is how many different ones were drawn.
    """
    algo = config.algo
    assert algo.sample_filter is not None
    columns = [batch.groups.double(), batch.indices.double(), batch.rewards, batch.valid.double()]
    tables = all_gather_rows(torch.stack(columns, dim=1), topology)
    everyone = torch.cat(tables)
    order = address_order(everyone[:, :2])
    groups, _, rewards, valid = everyone[order].unbind(1)
    weights = filter_weights(rewards, valid, algo.sample_filter, algo.filter_power)
    new = int((groups % (1 + algo.replay_steps) == 0).sum())  # replay.ReplayBuffer.mix
    first = sum(len(t) for t in tables[: topology.rank])
    rows = torch.argsort(order)[first : first + batch.num_seqs]
    all_times = draw(weights, new, config.seed, step)
    times = all_times[rows]
    copies = torch.repeat_interleave(torch.arange(batch.num_seqs), times)
    drawn = batch.select(copies.tolist())
    before = torch.arange(len(copies)) - torch.repeat_interleave(times.cumsum(0) - times, times)
    drawn.indices = drawn.indices + config.rollout.n * before  # of the k-th copy
    return drawn, float((all_times > 0).sum())
