"""Advantage estimators: what each says is its docstring, `ESTIMATORS` at the end is all of them.

One that looks at outcomes sees one row per sample of the whole step, from all ranks, since a group
(the samples of one prompt) may be spread over ranks: f(outcomes, *, options) -> (n,) float64, a
number for all tokens of a sample. One that looks at tokens sees this rank's packed tokens, and all
outcomes: f(tokens, *, options) -> (num_tokens,) float32. The options are what algo.advantage_args
may set, see options.py.

R is the reward of a sample (less its KL penalty where that belongs to the reward), g its group,
mu_g and sigma_g the mean and unbiased standard deviation over the group's valid samples. An invalid
sample has no say in any statistic and gets 0; so does a group of one, before any whitening.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from spmdrl_kernels import scan
from torch import Tensor

from spmdrl.algo.options import Positive, UnitInterval, given_options, option_values
from spmdrl.algo.own_functions import checked_advantage, name_of
from spmdrl.config import AlgoConfig
from spmdrl.segments import lengths_to_cu_seqlens, segment_expand, segment_sum

EPS = 1e-6  # beside the standard deviation of a group or of the step
PRIME_BETA = 0.05  # of the implicit process reward
NO_KEYS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Outcomes:
    """Every sample of the step, of all ranks, ordered by (group, index). (n,) float64 each.

    A group of four, the third without a valid reward:
        groups [0, 0, 0, 0]   scores [1, 0, 0, 1]   valid [1, 1, 0, 1]   -> mean 2/3
    """

    groups: Tensor  # (n,) int64
    scores: Tensor  # R, 0 where not valid
    valid: Tensor  # 1 or 0
    lengths: Tensor  # unmasked tokens
    greedy_rewards: Tensor  # of the greedy answer to the same prompt, 0 where there is none
    reward_components: Tensor  # (n, num_keys), in the order of gdpo's reward_keys
    process: Tensor  # mean over tokens of log pi_prm - log pi_ref, 0 without a prm


@dataclass(frozen=True)
class Tokens:
    """This rank's packed tokens: (num_tokens,) float32, 0 where masked; None: not computed."""

    # of the step: R's at the last unmasked token, but of a turn's own (rewards.per_turn) at the
    # last of that turn; less any KL on each
    rewards: Tensor
    mask: Tensor
    seq_lens: Tensor  # (num_seqs,) int64
    outcomes: Outcomes
    rows: Tensor  # (num_seqs,) int64: which rows of `outcomes` these sequences are
    values: Tensor | None = None
    logprobs: Tensor | None = None  # of the policy that the step starts from
    pi_squared: Tensor | None = None
    process: Tensor | None = None  # log pi_prm - log pi_ref of each token
    weights: Tensor | None = None  # of a rollout correction with a level
    group_sums: Tensor | None = None  # of optimal_token_baseline, over all ranks

    def own(self, of_outcomes: Tensor) -> Tensor:
        """(n,) of all samples -> (num_tokens,) float32 of these tokens."""
        return segment_expand(of_outcomes[self.rows].float(), self.seq_lens)


# ---- outcomes


def grpo(o: Outcomes, *, scale: Literal["group", "batch"] = "group") -> Tensor:
    """(R - mu_g) / (sigma_g + 1e-6). Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.

    With scale "batch" sigma is that of all rewards of the step. Source: arXiv 2508.08221; without a
    sigma it is `dr_grpo`.
    """
    return centred(o.scores, o) / divisor(o.scores, o, scale)


def dr_grpo(o: Outcomes) -> Tensor:
    """R - mu_g. Source: arXiv 2503.20783."""
    return centred(o.scores, o)


def grpo_passk(o: Outcomes, *, scale: Literal["group", "none"] = "group") -> Tensor:
    """(R_1 - R_2) / (sigma_g + 1e-6) for the best sample of a group, 0 for the others.

    Of equally good ones none has an advantage over the next. With scale "none" nothing is divided.
    Source: arXiv 2503.19595; see also PKPO, arXiv 2505.15201.
    """
    slots, count = group_slots(o)
    best, second = torch.full((2, len(count)), -torch.inf, dtype=torch.float64)
    ranked = torch.where(o.valid > 0, o.scores, -torch.inf)
    best = best.scatter_reduce(0, slots, ranked, "amax")
    is_best = (ranked == best[slots]) & (o.valid > 0)
    several = torch.zeros_like(count).index_add_(0, slots, is_best.double()) > 1
    others = torch.where(is_best, -torch.inf, ranked)
    second = torch.where(several, best, second.scatter_reduce(0, slots, others, "amax"))
    lead = torch.where(count > 1, best - second, 0.0)[slots]
    return torch.where(is_best & (count[slots] > 1), lead / divisor(o.scores, o, scale), 0.0)


def gdpo(
    o: Outcomes, *,
    reward_keys: Mapping[str, float] = NO_KEYS, scale: Literal["group", "none"] = "group",
) -> Tensor:  # fmt: skip
    """sum_k weight_k GRPO(reward key k); then whitened. Source: GDPO, arXiv 2601.05242.

    reward_keys: what the reward function returns -> weight, in the order of reward_components. With
    scale "none" a key's values are less their mean, and not divided.
    """
    keys = zip(reward_keys.values(), o.reward_components.unbind(1), strict=True)
    return torch.stack([w * centred(x, o) / divisor(x, o, scale) for w, x in keys]).sum(0)


def rloo(o: Outcomes, *, normalize: bool = False) -> Tensor:
    """R - mean of the others' R = n / (n - 1) (R - mu_g). Source: arXiv 2402.14740.

    normalize: then less their mean and divided by their standard deviation, over the step's valid
    samples. Source: TRL's RLOOTrainer, normalize_advantages.
    """
    advantages = leave_one_out(o.scores, o)
    if not normalize:
        return advantages
    return whiten(advantages, o.valid, token_moments(advantages, o.valid))


def opo(o: Outcomes) -> Tensor:
    """R - sum_g(len R) / sum_g len. Source: arXiv 2505.23585."""
    weights = o.lengths * o.valid
    baseline = group_sum(weights * o.scores, o) / group_sum(weights, o).clamp(min=1)
    alone = (group_sum(o.valid, o) < 2) | (group_sum(weights, o) == 0)
    return torch.where(alone, 0.0, o.scores - baseline) * o.valid


def gpg(o: Outcomes) -> Tensor:
    """alpha (R - mu_g), alpha = samples / samples with a reward that is not 0, over the step.

    Source: arXiv 2504.02546, with the alpha that its implementations have.
    """
    rewarded = ((o.scores != 0) & (o.valid > 0)).sum().clamp(min=1)
    return o.valid.sum() / rewarded * centred(o.scores, o)


def win_rate(o: Outcomes) -> Tensor:
    """Share of the group's other samples that it beats, a tie counting half, less 1/2.

    An estimate of P(y beats the policy | x) - 1/2 of SPPO, arXiv 2405.00675.
    """
    slots, count = group_slots(o)
    members = torch.bincount(slots)
    place = torch.arange(len(slots)) - (members.cumsum(0) - members)[slots]  # rows are by group
    table = torch.zeros(len(members), int(members.max()) if len(members) else 0).double()
    there = table.clone()
    table[slots, place], there[slots, place] = o.scores, o.valid
    above = torch.sign(table[:, :, None] - table[:, None, :]) * there[:, None, :]
    wins_less_losses = above.sum(2)[slots, place]
    return wins_less_losses / (count[slots] - 1).clamp(min=1) / 2 * o.valid


# ---- tokens


def gae(
    t: Tokens, *, gamma: UnitInterval = 1.0, lam: UnitInterval = 1.0,
    lam_critic: UnitInterval | None = None, lam_alpha: Positive | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantages of the actor, then whitened, and returns of the critic, A + V.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1}.
    A masked token (prompt, tool) is skipped: t + 1 is the next token that the policy chose; V after
    the last is 0. Source: Schulman 2015, arXiv 1506.02438.
    lam_critic decouples the critic's lambda; lam_alpha makes the actor's 1 - 1 / (lam_alpha length)
    of the answer, at least 0. Source: VAPO, arXiv 2504.05118, section 4.
    """
    assert t.values is not None
    cu_seqlens = lengths_to_cu_seqlens(t.seq_lens)
    lengths = segment_sum(t.mask, t.seq_lens).double()
    of_actor = torch.full_like(lengths, lam)
    if lam_alpha is not None:
        of_actor = (1 - 1 / (lam_alpha * lengths.clamp(min=1))).clamp(min=0)
    of_critic = torch.full_like(lengths, lam if lam_critic is None else lam_critic)
    inputs = (t.rewards, t.values, t.mask, cu_seqlens, gamma)
    advantages, returns = scan.gae(*inputs, of_actor)
    if not torch.equal(of_actor, of_critic):
        _, returns = scan.gae(*inputs, of_critic)
    return advantages, returns


def reinforce(t: Tokens, *, gamma: UnitInterval = 1.0) -> Tensor:
    """Discounted return-to-go, sum_{s >= t} gamma^(s - t) r_s. Source: Williams 1992,
    doi 10.1007/BF00992696. With gamma 0, and the KL to a teacher for its only reward, it is
    on-policy distillation: docs/distillation.md."""
    return scan.returns_to_go(t.rewards, t.mask, lengths_to_cu_seqlens(t.seq_lens), gamma)


def remax(t: Tokens, *, gamma: UnitInterval = 1.0) -> Tensor:
    """Return-to-go less the reward of the greedy answer. Source: arXiv 2310.10505."""
    return (reinforce(t, gamma=gamma) - t.own(t.outcomes.greedy_rewards)) * t.mask


def prime(t: Tokens, *, gamma: UnitInterval = 1.0, beta: Positive = PRIME_BETA) -> Tensor:
    """sum_{s >= t} gamma^(s - t) (r_s - LOO of the mean r) + R - LOO of R.

    r is the implicit process reward beta (log pi_phi - log pi_ref), LOO the mean over the other
    samples of the group. Source: PRIME, arXiv 2502.01456, eq. 5.
    """
    assert t.process is not None
    o = t.outcomes
    baseline = o.process - leave_one_out(o.process, o)  # mean of the others' mean
    process = beta * (t.process - t.own(baseline)) * t.mask
    to_go = scan.returns_to_go(process, t.mask, lengths_to_cu_seqlens(t.seq_lens), gamma)
    in_company = t.own((group_sum(o.valid, o) > 1) * o.valid)
    return (to_go + t.own(leave_one_out(o.scores, o))) * in_company * t.mask


def optimal_token_baseline(t: Tokens, *, zero_tail: bool = False) -> Tensor:
    """G_t - B_t, B_t = sum_g G_t W_t / sum_g W_t over the group's samples that reach position t.

    W_t = sum_{j <= t} w_j^2 (1 - 2 pi_j + sum_v pi(v)^2) is the energy of the scores up to t, with
    w_j the weight of a rollout correction or 1, G_t the undiscounted return-to-go. t.group_sums
    holds the two sums and the number of samples, (size, 3).
    With zero_tail B_t is 0 where only one sample of the group still goes on, else there A = 0.
    Source: https://richardli.xyz/optimal-token-baseline (2025).
    """
    return _token_baseline(t, zero_tail, by_turn=False)


def tir_optimal_token_baseline(t: Tokens, *, zero_tail: bool = False) -> Tensor:
    """The multi-turn form: positions count the policy's own tokens, tool tokens left out."""
    return _token_baseline(t, zero_tail, by_turn=True)


def _token_baseline(t: Tokens, zero_tail: bool, by_turn: bool) -> Tensor:
    assert t.group_sums is not None
    slots = token_slots(t, by_turn, len(t.group_sums) // num_groups(t.outcomes))
    weighted, weights, members = t.group_sums[slots].unbind(1)
    baseline = weighted / (weights + 1e-8)
    if zero_tail:
        baseline = torch.where(members > 1, baseline, 0.0)
    to_go = scan.returns_to_go(t.rewards, t.mask, lengths_to_cu_seqlens(t.seq_lens), 1.0)
    in_company = t.own((group_sum(t.outcomes.valid, t.outcomes) > 1).double())
    return (to_go - baseline).float() * in_company * t.mask


def token_baseline_sums(t: Tokens, by_turn: bool, width: int) -> Tensor:
    """(num_groups * width, 3) float64: this rank's sums of G W, of W, and of samples.

    width: positions that the longest answer of all ranks has. To be added up over ranks.
    """
    assert t.logprobs is not None and t.pi_squared is not None
    cu_seqlens = lengths_to_cu_seqlens(t.seq_lens)
    energy = (1 - 2 * t.logprobs.exp() + t.pi_squared).double()
    if t.weights is not None:
        energy = energy * t.weights.double() ** 2
    weights = scan.running_sum(energy, t.mask, cu_seqlens)
    to_go = scan.returns_to_go(t.rewards, t.mask, cu_seqlens, 1.0)
    rows = torch.stack([to_go * weights, weights, torch.ones_like(weights)], 1) * t.mask[:, None]
    table = torch.zeros(num_groups(t.outcomes) * width, 3, dtype=torch.float64)
    return table.index_add_(0, token_slots(t, by_turn, width), rows.double())


def token_slots(t: Tokens, by_turn: bool, width: int) -> Tensor:
    """(num_tokens,) int64: row of the table of `token_baseline_sums`, for unmasked tokens."""
    slots, _ = group_slots(t.outcomes)
    group = segment_expand(slots[t.rows], t.seq_lens)
    return group * width + token_positions(t.mask, t.seq_lens, by_turn).clamp(min=0, max=width - 1)


def token_positions(mask: Tensor, seq_lens: Tensor, by_turn: bool) -> Tensor:
    """(num_tokens,) int64: 0 at a sequence's first unmasked token.

    by_turn: counts unmasked tokens only; else every token after it. Negative in a prompt.
    """
    seq = torch.repeat_interleave(torch.arange(len(seq_lens)), seq_lens)
    step = mask.long() if by_turn else torch.ones_like(mask, dtype=torch.int64)
    count = step.cumsum(0)
    chosen = mask.nonzero().flatten()
    first = torch.full((len(seq_lens),), len(mask)).scatter_reduce(0, seq[chosen], chosen, "amin")
    return count - count[first.clamp(max=max(len(mask) - 1, 0))][seq] if len(mask) else count


# ---- statistics


def group_slots(o: Outcomes) -> tuple[Tensor, Tensor]:
    """(n,) int64 number of each sample's group, from 0, and (num_groups,) valid samples of it."""
    _, slots = torch.unique(o.groups, return_inverse=True)
    size = int(slots.max()) + 1 if len(slots) else 0
    return slots, torch.zeros(size, dtype=torch.float64).index_add_(0, slots, o.valid)


def num_groups(o: Outcomes) -> int:
    return max(len(group_slots(o)[1]), 1)


def group_sum(x: Tensor, o: Outcomes) -> Tensor:
    """(n,): the sum of (n,) `x` over each sample's group."""
    slots, count = group_slots(o)
    return torch.zeros_like(count).index_add_(0, slots, x)[slots]


def centred(x: Tensor, o: Outcomes) -> Tensor:
    """x - its group's mean over valid samples; 0 for invalid ones and in groups of one."""
    count = group_sum(o.valid, o)
    mean = group_sum(x * o.valid, o) / count.clamp(min=1)
    return torch.where(count > 1, (x - mean) * o.valid, 0.0)


def group_std(x: Tensor, o: Outcomes) -> Tensor:
    """(n,) unbiased standard deviation of x over each sample's group."""
    degrees = (group_sum(o.valid, o) - 1).clamp(min=1)
    return (group_sum(centred(x, o) ** 2, o) / degrees).sqrt()


def batch_std(x: Tensor, o: Outcomes) -> Tensor:
    """() unbiased standard deviation of x over all valid samples of the step."""
    kept = x[o.valid > 0]
    return kept.std() if len(kept) > 1 else x.new_zeros(())


def divisor(x: Tensor, o: Outcomes, scale: str) -> Tensor:
    """(n,) or (): what advantages are divided by; 1 where scale is "none"."""
    if scale == "none":
        return x.new_ones(())
    return (group_std(x, o) if scale == "group" else batch_std(x, o)) + EPS


def leave_one_out(x: Tensor, o: Outcomes) -> Tensor:
    """x - the mean over the other valid samples of its group."""
    count = group_sum(o.valid, o)
    return centred(x, o) * count / (count - 1).clamp(min=1)


def whiten(advantages: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Zero mean and unit variance over all unmasked tokens of the step, on all ranks.

    moments: (3,) float64, the sums of 1, A and A^2 over these tokens (see `token_moments`).
    """
    count, total, squares = moments.tolist()
    mean = total / max(count, 1)
    variance = (squares - count * mean**2) / max(count - 1, 1)
    return (advantages - mean) * mask / (max(variance, 0.0) ** 0.5 + 1e-8)


def token_moments(values: Tensor, mask: Tensor) -> Tensor:
    """(3,) float64: sums of 1, x and x^2 over unmasked tokens; add up over ranks, then `whiten`."""
    kept = values[mask.bool()].double()
    return torch.stack([kept.new_tensor(len(kept)), kept.sum(), (kept**2).sum()])


def token_rewards(
    rewards: Tensor, mask: Tensor, seq_lens: Tensor, penalty: Tensor, turns: Tensor | None = None
) -> Tensor:
    """(num_tokens,): (num_seqs,) rewards on the last unmasked token, less the penalty on each.

    turns: (num_tokens,), the part of the rewards that stands on tokens of its own.
    """
    if turns is not None:
        rewards = rewards - segment_sum(turns, seq_lens)
    order = torch.arange(len(mask), dtype=torch.float64) + 1
    ends = torch.segment_reduce(mask.double() * order, "max", lengths=seq_lens, unsafe=True)
    at_end = (mask > 0) & (order == segment_expand(ends, seq_lens))
    placed = torch.where(at_end, segment_expand(rewards, seq_lens), 0.0) - penalty * mask
    return placed if turns is None else placed + turns


@dataclass(frozen=True)
class Estimator:
    """A function of outcomes or of tokens, and what the step must do around it.

    Your own: algo.advantage=my_function for one of outcomes, or an Estimator for the rest.
    """

    function: Callable[..., Any]
    sees: str = "outcomes"  # or "tokens"
    whiten: bool = False  # over all unmasked tokens of the step
    groups: bool = False  # compares the samples of one prompt: rollout.n must be above 1
    critic: bool = False
    needs_greedy: bool = False  # needs the greedy answer to each prompt
    prm: bool = False
    token_sums: bool = False  # needs `token_baseline_sums`
    by_turn: bool = False  # whose positions count the policy's own tokens
    aggregation: str = "token_mean"  # that goes with it by default

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)


ESTIMATORS = {
    "grpo": Estimator(grpo, groups=True),
    "gae": Estimator(gae, "tokens", whiten=True, critic=True),
    "dr_grpo": Estimator(dr_grpo, groups=True, aggregation="seq_mean_token_sum_norm"),
    "grpo_passk": Estimator(grpo_passk, groups=True),
    "gdpo": Estimator(gdpo, groups=True, whiten=True),
    "reinforce": Estimator(reinforce, "tokens"),
    "reinforce_plus_plus": Estimator(reinforce, "tokens", whiten=True),  # arXiv 2501.03262
    "reinforce_plus_plus_baseline": Estimator(dr_grpo, groups=True, whiten=True),
    "remax": Estimator(remax, "tokens", needs_greedy=True),
    "rloo": Estimator(rloo, groups=True),
    "opo": Estimator(opo, groups=True),
    "gpg": Estimator(gpg, groups=True),
    "optimal_token_baseline": Estimator(
        optimal_token_baseline, "tokens", groups=True, token_sums=True
    ),
    "tir_optimal_token_baseline": Estimator(
        tir_optimal_token_baseline, "tokens", groups=True, token_sums=True, by_turn=True
    ),
    "prime": Estimator(prime, "tokens", groups=True, prm=True),
    "win_rate": Estimator(win_rate, groups=True),
}


def estimator_of(algo: AlgoConfig) -> Estimator:
    """Returns the estimator that the config names. A user's plain function becomes one that sees
    outcomes only.
    """
    if isinstance(algo.advantage, str):
        return ESTIMATORS[algo.advantage]
    return algo.advantage if isinstance(algo.advantage, Estimator) else Estimator(algo.advantage)


def advantage_of(algo: AlgoConfig) -> Callable[[Any], Any]:
    """Returns the estimator as f(outcomes) or f(tokens), with the options of the config."""
    estimator = estimator_of(algo)
    function = estimator.function
    given = partial(function, **given_options(function, algo.advantage_args))
    if isinstance(algo.advantage, str):
        return given
    return checked_advantage(given, name_of(function), estimator.sees, estimator.critic)


def advantage_options(algo: AlgoConfig) -> dict[str, Any]:
    """Returns the value of every option of the config's estimator."""
    return option_values(estimator_of(algo).function, algo.advantage_args)


def reward_keys_of(algo: AlgoConfig) -> tuple[str, ...]:
    """Returns which values of the reward function the estimator reads, in the order of
    Outcomes.reward_components; none where it has no option `reward_keys` that maps them to weights.
    """
    keys = advantage_options(algo).get("reward_keys")
    return tuple(keys) if isinstance(keys, Mapping) else ()


def asked_keys_of(algo: AlgoConfig) -> tuple[str, ...]:
    """Returns which values of the reward function a run reads: those of the estimator, and that by
    which dynamic sampling compares the answers to a prompt.
    """
    metric = algo.dynamic_sampling_metric
    return reward_keys_of(algo) if metric is None else (*reward_keys_of(algo), metric)
