"""The slow truth: the maths of docs/algorithms.md as plain loops in float64.

Nothing here is shared with the library. Advantages, weights and metrics are Python floats;
losses are scalar float64 tensors, so that autograd of the reference gives reference gradients.
A row is as long as its trajectory's mask (prompt + response) and is 0 where the policy did not
choose the token. An invalid trajectory has no policy tokens and is in no group.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

Rows = list[list[float]]
LossRows = list[list[Tensor]]
Token = tuple[int, int]  # (trajectory, place in its mask)


@dataclass
class Trajectory:
    group: int
    valid: bool
    reward: float  # R, of the whole sample
    mask: list[int]  # over prompt + response; 1 = chosen by the policy
    rewards: list[float] = field(default_factory=list)  # per token
    values: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # old ones; the trainer's
    rollout: list[float] = field(default_factory=list)  # the rollout engine's logprobs
    process: list[float] = field(default_factory=list)  # PRIME: implicit reward per token
    pi2: list[float] = field(default_factory=list)  # sum over the vocabulary of pi^2
    prompt_len: int = 0
    keys: dict[str, float] = field(default_factory=dict)  # several rewards of one sample
    greedy: float | None = None  # reward of the greedy answer to the same prompt


# ---- Helpers


def policy_tokens(tr: Trajectory) -> list[int]:
    """Places of the tokens that the policy chose; none in an invalid trajectory."""
    if not tr.valid:
        return []
    return [t for t in range(len(tr.mask)) if tr.mask[t] == 1]


def all_tokens(trs: list[Trajectory]) -> list[Token]:
    """(i, t) of every policy token of the batch, in order."""
    return [(i, t) for i in range(len(trs)) for t in policy_tokens(trs[i])]


def groups(trs: list[Trajectory]) -> dict[int, list[int]]:
    """Group id -> the places in the batch of its valid members."""
    out: dict[int, list[int]] = {}
    for i, tr in enumerate(trs):
        if tr.valid:
            out.setdefault(tr.group, []).append(i)
    return out


def mean(xs: Iterable[float]) -> float:
    xs = list(xs)
    return math.fsum(xs) / len(xs) if xs else 0.0


def variance(xs: list[float]) -> float:
    """Unbiased; 0 for one number or none."""
    if len(xs) < 2:
        return 0.0
    mu = mean(xs)
    return math.fsum((x - mu) ** 2 for x in xs) / (len(xs) - 1)


def zeros(trs: list[Trajectory]) -> Rows:
    return [[0.0] * len(tr.mask) for tr in trs]


def broadcast(trs: list[Trajectory], scalars: list[float]) -> Rows:
    """A sample's number on each of its policy tokens."""
    out = zeros(trs)
    for i, t in all_tokens(trs):
        out[i][t] = scalars[i]
    return out


def group_scores(trs: list[Trajectory], score: Callable[[int, list[int]], float]) -> list[float]:
    """score(i, members) of each valid sample; 0 in a group of one and for invalid samples."""
    out = [0.0] * len(trs)
    for members in groups(trs).values():
        if len(members) > 1:
            for i in members:
                out[i] = score(i, members)
    return out


def whitened(trs: list[Trajectory], rows: Rows) -> Rows:
    """W: (x - mean) / (sqrt(unbiased variance) + 1e-8) over all policy tokens of the batch."""
    xs = [rows[i][t] for i, t in all_tokens(trs)]
    mu, sigma = mean(xs), math.sqrt(variance(xs))
    out = zeros(trs)
    for i, t in all_tokens(trs):
        out[i][t] = (rows[i][t] - mu) / (sigma + 1e-8)
    return out


def whitened_samples(trs: list[Trajectory], scores: list[float]) -> Rows:
    """W of one number per sample, over the valid samples, each of which counts once."""
    valid = [x for x, tr in zip(scores, trs, strict=True) if tr.valid]
    mu, sigma = mean(valid), math.sqrt(variance(valid))
    return broadcast(trs, [(x - mu) / (sigma + 1e-8) for x in scores])


def returns_to_go(tr: Trajectory, rewards: list[float], gamma: float) -> list[float]:
    """G_t = sum_{s>=t} gamma^(s-t) r_s, where s-t counts policy tokens."""
    out = [0.0] * len(tr.mask)
    tokens = policy_tokens(tr)
    for k in range(len(tokens)):
        for n in range(k, len(tokens)):
            out[tokens[k]] += gamma ** (n - k) * rewards[tokens[n]]
    return out


# ---- Advantages


def gae_of_one(tr: Trajectory, gamma: float, lam: float) -> list[float]:
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}.

    t+1 is the next policy token; V and A behind the last one are 0 (Schulman 2015, 1506.02438).
    """
    out = [0.0] * len(tr.mask)
    next_value, next_adv = 0.0, 0.0
    for t in reversed(policy_tokens(tr)):
        delta = tr.rewards[t] + gamma * next_value - tr.values[t]
        out[t] = delta + gamma * lam * next_adv
        next_value, next_adv = tr.values[t], out[t]
    return out


def gae(
    trs: list[Trajectory],
    gamma: float,
    lam_actor: float,
    lam_critic: float | None = None,
    alpha: float | None = None,
    whiten: bool = True,
) -> tuple[Rows, Rows]:
    """(A with lambda_actor, then W; returns = A with lambda_critic + V, before W).

    alpha: lambda_actor = max(0, 1 - 1 / (alpha len)), len = policy tokens (VAPO, 2504.05118).
    """
    advantages, returns = zeros(trs), zeros(trs)
    for i, tr in enumerate(trs):
        tokens = policy_tokens(tr)
        lam = lam_actor
        if alpha is not None and tokens:
            lam = max(0.0, 1.0 - 1.0 / (alpha * len(tokens)))
        advantages[i] = gae_of_one(tr, gamma, lam)
        critic = gae_of_one(tr, gamma, lam_actor if lam_critic is None else lam_critic)
        for t in tokens:
            returns[i][t] = critic[t] + tr.values[t]
    return (whitened(trs, advantages) if whiten else advantages), returns


def grpo(trs: list[Trajectory]) -> Rows:
    """A = (R - mu_g) / (sigma_g + 1e-6) (GRPO, 2402.03300)."""

    def score(i: int, members: list[int]) -> float:
        rewards = [trs[j].reward for j in members]
        return (trs[i].reward - mean(rewards)) / (math.sqrt(variance(rewards)) + 1e-6)

    return broadcast(trs, group_scores(trs, score))


def grpo_over_batch(trs: list[Trajectory]) -> Rows:
    """A = (R - mu_g) / (sigma + 1e-6), sigma over the rewards of the whole batch (2508.08221)."""
    sigma = math.sqrt(variance([tr.reward for tr in trs if tr.valid]))
    return [[x / (sigma + 1e-6) for x in row] for row in dr_grpo(trs)]


def dr_grpo(trs: list[Trajectory]) -> Rows:
    """A = R - mu_g (Dr. GRPO, 2503.20783)."""

    def score(i: int, members: list[int]) -> float:
        return trs[i].reward - mean(trs[j].reward for j in members)

    return broadcast(trs, group_scores(trs, score))


def grpo_passk(trs: list[Trajectory], divide: bool = True) -> Rows:
    """A of the best sample (first of ties) = (R_1 - R_2) / (sigma_g + 1e-6), others 0.

    2505.15201 family. divide: by the standard deviation.
    """

    def score(i: int, members: list[int]) -> float:
        rewards = [trs[j].reward for j in members]
        best = members[rewards.index(max(rewards))]
        if i != best:
            return 0.0
        first, second = sorted(rewards, reverse=True)[:2]
        return (first - second) / (math.sqrt(variance(rewards)) + 1e-6 if divide else 1.0)

    return broadcast(trs, group_scores(trs, score))


def gdpo(
    trs: list[Trajectory], weights: dict[str, float], over: str = "tokens", divide: bool = True
) -> Rows:
    """A = W(sum_k w_k (R_k - mu_gk) / (sigma_gk + 1e-6)): each reward key normalised alone.

    over: "samples": W is over the valid samples, each of which counts once. divide: by sigma_gk.
    """

    def score(i: int, members: list[int]) -> float:
        out = 0.0
        for key, weight in weights.items():
            rewards = [trs[j].keys[key] for j in members]
            sigma = math.sqrt(variance(rewards)) + 1e-6 if divide else 1.0
            out += weight * (trs[i].keys[key] - mean(rewards)) / sigma
        return out

    scores = group_scores(trs, score)
    if over == "samples":
        return whitened_samples(trs, scores)
    return whitened(trs, broadcast(trs, scores))


def reinforce(trs: list[Trajectory], gamma: float) -> Rows:
    """A = sum_{s>=t} gamma^(s-t) r_s (REINFORCE, Williams 1992)."""
    return [returns_to_go(tr, tr.rewards, gamma) for tr in trs]


def reinforce_plus_plus(trs: list[Trajectory], gamma: float) -> Rows:
    """A = W(sum_{s>=t} gamma^(s-t) r_s) (REINFORCE++, 2501.03262)."""
    return whitened(trs, [returns_to_go(tr, tr.rewards, gamma) for tr in trs])


def reinforce_plus_plus_baseline(trs: list[Trajectory]) -> Rows:
    """A = W(R - mu_g on every token) (REINFORCE++-baseline, 2501.03262)."""
    return whitened(trs, dr_grpo(trs))


def remax(trs: list[Trajectory], gamma: float) -> Rows:
    """A_t = sum_{s>=t} gamma^(s-t) r_s - R(greedy answer) (ReMax, 2310.10505)."""
    out = [returns_to_go(tr, tr.rewards, gamma) for tr in trs]
    for i, t in all_tokens(trs):
        greedy = trs[i].greedy
        assert greedy is not None
        out[i][t] -= greedy
    return out


def rloo(trs: list[Trajectory], normalize: bool = False) -> Rows:
    """A = R - mean of the others' R = n/(n-1) (R - mu_g) (RLOO, 2402.14740).

    normalize: W of these over the batch's valid samples (TRL's RLOOTrainer).
    """

    def score(i: int, members: list[int]) -> float:
        return trs[i].reward - mean(trs[j].reward for j in members if j != i)

    scores = group_scores(trs, score)
    return whitened_samples(trs, scores) if normalize else broadcast(trs, scores)


def opo(trs: list[Trajectory]) -> Rows:
    """A = R - sum_g(len R) / sum_g len, len = policy tokens (OPO, 2505.23585)."""

    def score(i: int, members: list[int]) -> float:
        lengths = [len(policy_tokens(trs[j])) for j in members]
        if sum(lengths) == 0:
            return 0.0
        weighted = [n * trs[j].reward for n, j in zip(lengths, members, strict=True)]
        return trs[i].reward - math.fsum(weighted) / sum(lengths)

    return broadcast(trs, group_scores(trs, score))


def gpg(trs: list[Trajectory]) -> Rows:
    """A = alpha (R - mu_g), alpha = samples / samples with reward != 0 (GPG, 2504.02546).

    Counted over the valid samples of the whole batch; the divisor is at least 1.
    """
    valid = [tr for tr in trs if tr.valid]
    alpha = len(valid) / max(1, sum(tr.reward != 0 for tr in valid))
    return [[alpha * a for a in row] for row in dr_grpo(trs)]


def otb_positions(tr: Trajectory, by_turn: bool) -> dict[int, int]:
    """Position -> place in the mask: offset from the prompt's end, or count of policy tokens."""
    tokens = policy_tokens(tr)
    if by_turn:
        return dict(enumerate(tokens))
    return {t - tr.prompt_len: t for t in tokens}


def otb_weights(tr: Trajectory, correction: list[float] | None) -> list[float]:
    """W_t = sum_{j<=t} c_j^2 (1 - 2 pi_j + sum_v pi_j(v)^2) over policy tokens.

    c_j is the weight of a rollout correction, 1 without one.
    """
    out, w = [0.0] * len(tr.mask), 0.0
    for t in policy_tokens(tr):
        c = 1.0 if correction is None else correction[t]
        w += c * c * (1.0 - 2.0 * math.exp(tr.logprobs[t]) + tr.pi2[t])
        out[t] = w
    return out


def optimal_token_baseline(
    trs: list[Trajectory],
    by_turn: bool = False,
    zero_tail: bool = False,
    corrections: Rows | None = None,
) -> Rows:
    """A_t = G_t - B_t, B_t = sum_g G_t W_t / (sum_g W_t + 1e-8) at the same position.

    The sums run over the members with a policy token there. zero_tail: B_t = 0 behind the end
    of the second longest member (where only the longest one is left).
    """
    to_go = [returns_to_go(tr, tr.rewards, 1.0) for tr in trs]
    weights = [
        otb_weights(tr, None if corrections is None else corrections[i]) for i, tr in enumerate(trs)
    ]
    places = [otb_positions(tr, by_turn) for tr in trs]
    out = zeros(trs)
    for members in groups(trs).values():
        if len(members) < 2:
            continue
        ends = sorted(max(places[i], default=-1) for i in members)
        for i in members:
            for position, t in places[i].items():
                here = [(j, places[j][position]) for j in members if position in places[j]]
                above = math.fsum(to_go[j][s] * weights[j][s] for j, s in here)
                baseline = above / (math.fsum(weights[j][s] for j, s in here) + 1e-8)
                if zero_tail and position > ends[-2]:
                    baseline = 0.0
                out[i][t] = to_go[i][t] - baseline
    return out


def prime(trs: list[Trajectory], gamma: float) -> Rows:
    """A_t = sum_{s>=t} gamma^(s-t) (p_s - loo mean of p) + R - loo mean of R (2502.01456).

    loo = over the other valid members; a member's p is its mean over tokens, 0 without tokens.
    """
    means = [mean(tr.process[t] for t in policy_tokens(tr)) for tr in trs]
    out = zeros(trs)
    for members in groups(trs).values():
        if len(members) < 2:
            continue
        for i in members:
            tr, others = trs[i], [j for j in members if j != i]
            loo = mean(means[j] for j in others)
            outcome = tr.reward - mean(trs[j].reward for j in others)
            process = returns_to_go(tr, [p - loo for p in tr.process], gamma)
            for t in policy_tokens(tr):
                out[i][t] = process[t] + outcome
    return out


def win_rate(trs: list[Trajectory]) -> Rows:
    """A = share of the other members beaten (a tie is half a win) - 1/2 (SPPO, 2405.00675)."""

    def score(i: int, members: list[int]) -> float:
        wins = 0.0
        for j in members:
            if j != i and trs[i].reward > trs[j].reward:
                wins += 1.0
            if j != i and trs[i].reward == trs[j].reward:
                wins += 0.5
        return wins / (len(members) - 1) - 0.5

    return broadcast(trs, group_scores(trs, score))


# ---- Policy losses


def scalar(x: float = 0.0) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def total(xs: Iterable[Tensor]) -> Tensor:
    out = scalar()
    for x in xs:
        out = out + x
    return out


def on_tokens(trs: list[Trajectory], loss: Callable[[int, int], Tensor]) -> LossRows:
    """loss(i, t) on the policy tokens, 0 elsewhere."""
    out = [[scalar() for _ in tr.mask] for tr in trs]
    for i, t in all_tokens(trs):
        out[i][t] = loss(i, t)
    return out


def on_sequences(trs: list[Trajectory], loss: Callable[[int], Tensor]) -> LossRows:
    """loss(i) on each policy token of sequence i, 0 elsewhere."""
    once = {i: loss(i) for i in range(len(trs)) if policy_tokens(trs[i])}
    return on_tokens(trs, lambda i, t: once[i])


def log_ratios(new: LossRows, trs: list[Trajectory], i: int) -> list[Tensor]:
    """log r_t = new - old logprob of the policy tokens of sequence i."""
    return [new[i][t] - trs[i].logprobs[t] for t in policy_tokens(trs[i])]


def ratio(new: LossRows, trs: list[Trajectory], i: int, t: int) -> Tensor:
    return torch.exp(new[i][t] - trs[i].logprobs[t])


def clipped_pair(r: Tensor, a: float, low: float, high: float) -> Tensor:
    """max(-A r, -A clip(r, 1-low, 1+high))."""
    plain = -a * r
    clipped = -a * torch.clamp(r, 1.0 - low, 1.0 + high)
    return plain if plain.item() >= clipped.item() else clipped


def ppo_loss(
    new: LossRows,
    trs: list[Trajectory],
    adv: Rows,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossRows:
    """max(-A r, -A clip(r, 1-low, 1+high)); for A < 0 at most -A c.

    PPO, 1707.06347; dual clip, 1912.09729.
    """

    def loss(i: int, t: int) -> Tensor:
        a = adv[i][t]
        value = clipped_pair(ratio(new, trs, i, t), a, clip_low, clip_high)
        if dual_clip is not None and a < 0 and value.item() > -a * dual_clip:
            return scalar(-a * dual_clip)
        return value

    return on_tokens(trs, loss)


def gspo_loss(
    new: LossRows, trs: list[Trajectory], adv: Rows, clip_low: float, clip_high: float
) -> LossRows:
    """PPO's pair with s_it = sg[s_i] pi/sg[pi], s_i = exp(mean_t log r_t).

    GSPO-token, 2507.18071.
    """

    def loss(i: int, t: int) -> Tensor:
        logs = [x.item() for x in log_ratios(new, trs, i)]
        s = math.exp(mean(logs)) * torch.exp(new[i][t] - new[i][t].detach())
        return clipped_pair(s, adv[i][t], clip_low, clip_high)

    return on_tokens(trs, loss)


def cispo_loss(
    new: LossRows, trs: list[Trajectory], adv: Rows, clip_low: float, clip_high: float
) -> LossRows:
    """-sg[clip(r, 1-low, 1+high)] A log pi (CISPO, 2506.13585)."""

    def loss(i: int, t: int) -> Tensor:
        r = ratio(new, trs, i, t).item()
        return -min(max(r, 1.0 - clip_low), 1.0 + clip_high) * adv[i][t] * new[i][t]

    return on_tokens(trs, loss)


def sapo_loss(
    new: LossRows, trs: list[Trajectory], adv: Rows, tau_pos: float, tau_neg: float
) -> LossRows:
    """-A sigmoid(tau (r - 1)) 4/tau, tau = tau_pos if A > 0 else tau_neg (SAPO, 2511.20347)."""

    def loss(i: int, t: int) -> Tensor:
        tau = tau_pos if adv[i][t] > 0 else tau_neg
        gate = 1.0 / (1.0 + torch.exp(-tau * (ratio(new, trs, i, t) - 1.0)))
        return -adv[i][t] * gate * 4.0 / tau

    return on_tokens(trs, loss)


def luspo(
    new: LossRows, trs: list[Trajectory], adv: Rows, clip_low: float, clip_high: float
) -> Tensor:
    """Mean over sequences of |o| max(-A s, -A clip(s, 1-low, 1+high)), s = exp(mean_t log r_t).

    |o| is the number of the sequence's tokens; one without any is not counted (2602.05261).
    """
    terms = []
    for i, tr in enumerate(trs):
        logs = log_ratios(new, trs, i)
        if logs:
            s = torch.exp(total(logs) / len(logs))
            a = adv[i][policy_tokens(tr)[0]]
            terms.append(len(logs) * clipped_pair(s, a, clip_low, clip_high))
    return total(terms) / len(terms)


def vespo_loss(
    new: LossRows, trs: list[Trajectory], adv: Rows, k: tuple[float, float],
    decay: tuple[float, float],
) -> LossRows:  # fmt: skip
    """-sg[W^k e^(lambda (1 - W))] A log pi, W = prod_t r_t of the sequence (VESPO, 2602.10693).

    k, decay: (of A >= 0, of A < 0); decay is lambda.
    """

    def loss(i: int, t: int) -> Tensor:
        w = 1.0
        for x in log_ratios(new, trs, i):
            w *= math.exp(x.item())
        sign = 0 if adv[i][t] >= 0 else 1
        phi = w ** k[sign] * math.exp(decay[sign] * (1.0 - w))
        return -phi * adv[i][t] * new[i][t]

    return on_tokens(trs, loss)


def gpg_loss(new: LossRows, trs: list[Trajectory], adv: Rows) -> LossRows:
    """-A log pi (GPG, 2504.02546)."""
    return on_tokens(trs, lambda i, t: -adv[i][t] * new[i][t])


def reinforce_loss(
    new: LossRows, trs: list[Trajectory], adv: Rows, weights: Rows | None = None
) -> LossRows:
    """-sg[w] A log pi (Williams 1992); w are plain floats, 1 by default."""

    def loss(i: int, t: int) -> Tensor:
        w = 1.0 if weights is None else weights[i][t]
        return -w * adv[i][t] * new[i][t]

    return on_tokens(trs, loss)


def clip_cov_loss(
    new: LossRows,
    trs: list[Trajectory],
    adv: Rows,
    clip_low: float,
    clip_high: float,
    selected: set[Token],
) -> LossRows:
    """PPO's pair, 0 (no gradient) on the selected tokens (Clip-Cov, 2505.22617)."""

    def loss(i: int, t: int) -> Tensor:
        if (i, t) in selected:
            return scalar()
        return clipped_pair(ratio(new, trs, i, t), adv[i][t], clip_low, clip_high)

    return on_tokens(trs, loss)


def kl_cov_loss(
    new: LossRows, trs: list[Trajectory], adv: Rows, coef: float, selected: set[Token]
) -> LossRows:
    """-A r, plus coef |log r| on the selected tokens (KL-Cov, 2505.22617)."""

    def loss(i: int, t: int) -> Tensor:
        value = -adv[i][t] * ratio(new, trs, i, t)
        if (i, t) in selected:
            value = value + coef * torch.abs(new[i][t] - trs[i].logprobs[t])
        return value

    return on_tokens(trs, loss)


def geo_mean_loss(
    new: LossRows, trs: list[Trajectory], adv: Rows, clip_low: float, clip_high: float
) -> LossRows:
    """-A_i exp(mean_t c_t), A_i = mean_t A_t (GMPO, 2507.20673).

    c_t = min(log r_t, clip_high) if A_i > 0, else max(log r_t, -clip_low): the pessimistic one
    of log r and its clip to [-clip_low, clip_high].
    """

    def loss(i: int) -> Tensor:
        a = mean(adv[i][t] for t in policy_tokens(trs[i]))
        logs = log_ratios(new, trs, i)
        if a > 0:
            clipped = [torch.clamp(x, max=clip_high) for x in logs]
        else:
            clipped = [torch.clamp(x, min=-clip_low) for x in logs]
        return -a * torch.exp(total(clipped) / len(clipped))

    return on_sequences(trs, loss)


def sequence_product_loss(
    new: LossRows, trs: list[Trajectory], adv: Rows, clip_low: float, clip_high: float
) -> LossRows:
    """PPO's pair with S_i = prod_t r_t and A_i = mean_t A_t (2402.14740)."""

    def loss(i: int) -> Tensor:
        a = mean(adv[i][t] for t in policy_tokens(trs[i]))
        return clipped_pair(torch.exp(total(log_ratios(new, trs, i))), a, clip_low, clip_high)

    return on_sequences(trs, loss)


def dppo_loss(
    new: LossRows,
    trs: list[Trajectory],
    adv: Rows,
    clip_low: float,
    clip_high: float,
    cap: float,
    distance: Callable[[float, float], float],
) -> LossRows:
    """-A M sg[min(r, cap)] with gradient -A M min(r, cap) d log pi (DPPO, 2602.04879).

    M = 0 if A > 0, pi > old and distance > clip_high; or A <= 0, pi < old, distance > clip_low.
    """

    def loss(i: int, t: int) -> Tensor:
        a, old, now = adv[i][t], trs[i].logprobs[t], new[i][t].item()
        far = distance(math.exp(old), math.exp(now))
        if a > 0 and now > old and far > clip_high:
            return scalar()
        if a <= 0 and now < old and far > clip_low:
            return scalar()
        r = min(math.exp(now - old), cap)
        return -a * r * torch.exp(new[i][t] - new[i][t].detach())

    return on_tokens(trs, loss)


def bernoulli_tv(p: float, q: float) -> float:
    """TV(p, q) = |p - q|."""
    return abs(p - q)


def bernoulli_kl(p: float, q: float) -> float:
    """KL(p || q) = p log(p/q) + (1-p) log((1-p)/(1-q))."""
    out = 0.0
    for a, b in ((p, q), (1.0 - p, 1.0 - q)):
        if a > 0:
            out += a * math.log(a / b) if b > 0 else math.inf
    return out


dppo_tv_loss = partial(dppo_loss, distance=bernoulli_tv)
dppo_kl_loss = partial(dppo_loss, distance=bernoulli_kl)  # of old from new


def dro_loss(new: LossRows, trs: list[Trajectory], adv: Rows, beta: float) -> LossRows:
    """-(A log pi - beta/2 log^2 r) (DRO, 2405.19107)."""

    def loss(i: int, t: int) -> Tensor:
        log_r = new[i][t] - trs[i].logprobs[t]
        return -(adv[i][t] * new[i][t] - beta / 2.0 * log_r * log_r)

    return on_tokens(trs, loss)


def sppo_loss(new: LossRows, trs: list[Trajectory], adv: Rows, beta: float) -> LossRows:
    """(beta sum_t log r_t - A_i)^2, A_i = win rate - 1/2 of the sequence (SPPO, 2405.00675)."""

    def loss(i: int) -> Tensor:
        a = adv[i][policy_tokens(trs[i])[0]]
        error = beta * total(log_ratios(new, trs, i)) - a
        return error * error

    return on_sequences(trs, loss)


def cov_values(new: Rows, adv: Rows, trs: list[Trajectory]) -> dict[Token, float]:
    """cov = (log pi - mean log pi) (A - mean A), means over the batch's policy tokens.

    Entropy mechanism, 2505.22617.
    """
    tokens = all_tokens(trs)
    mean_logp = mean(new[i][t] for i, t in tokens)
    mean_adv = mean(adv[i][t] for i, t in tokens)
    return {(i, t): (new[i][t] - mean_logp) * (adv[i][t] - mean_adv) for i, t in tokens}


def clip_cov_candidates(
    cov: dict[Token, float], lb: float, ub: float, clipped: set[Token]
) -> set[Token]:
    """Tokens with lb <= cov <= ub that PPO's clip has not already taken (2505.22617)."""
    return {token for token, c in cov.items() if lb <= c <= ub and token not in clipped}


def kl_cov_selection(cov: dict[Token, float], share: float) -> set[Token]:
    """The max(1, int(share N)) tokens of largest covariance, first of ties (2505.22617)."""
    count = max(1, int(share * len(cov)))
    ranked = sorted(cov, key=lambda token: (-cov[token], token))
    return set(ranked[:count])


# ---- Aggregation, value loss, KL, entropy, length


def aggregate(
    name: str, losses: LossRows, trs: list[Trajectory], norm_length: float | None = None
) -> Tensor:
    """Sums over policy tokens; sequences without any do not count; 0 for no tokens at all."""
    seqs = [[losses[i][t] for t in policy_tokens(tr)] for i, tr in enumerate(trs)]
    seqs = [seq for seq in seqs if seq]
    if not seqs:
        return scalar()
    everything = total(x for seq in seqs for x in seq)
    if name == "token_sum":
        return everything
    if name == "token_mean":
        return everything / sum(len(seq) for seq in seqs)
    if name == "seq_mean_token_sum":
        return everything / len(seqs)
    if name == "seq_mean_token_mean":
        return total(total(seq) / len(seq) for seq in seqs) / len(seqs)
    if name == "seq_mean_token_sum_norm":
        assert norm_length is not None
        return total(total(seq) / norm_length for seq in seqs) / len(seqs)
    raise ValueError(name)


def value_loss(values: LossRows, trs: list[Trajectory], returns: Rows, clip: float) -> LossRows:
    """1/2 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2), V_old = tr.values.

    PPO's reference implementation.
    """

    def loss(i: int, t: int) -> Tensor:
        v, old, g = values[i][t], trs[i].values[t], returns[i][t]
        plain = (v - g) ** 2
        clipped = (torch.clamp(v, old - clip, old + clip) - g) ** 2
        return 0.5 * (plain if plain.item() >= clipped.item() else clipped)

    return on_tokens(trs, loss)


def kl(name: str, logp: Tensor, ref: float) -> Tensor:
    """Estimators of KL(pi || ref) from one sample (Schulman, joschu.net/blog/kl-approx.html).

    k1 = log(pi/ref); abs = |k1|; k2 = k1^2 / 2; k3 = ref/pi - 1 - log(ref/pi).
    name+ = the value of name with the gradient of k2.
    """
    d = logp - ref
    k2 = d * d / 2.0
    if name.endswith("+"):
        return kl(name[:-1], logp, ref).detach() + k2 - k2.detach()
    if name == "k1":
        return d
    if name == "abs":
        return torch.abs(d)
    if name == "k2":
        return k2
    if name == "k3":
        return torch.exp(-d) - 1.0 + d
    raise ValueError(name)


def adaptive_kl(coef: float, seen: float, target: float, n: int, horizon: float) -> float:
    """coef (1 + clip(seen/target - 1, -0.2, 0.2) n/horizon) (Ziegler 2019, 1909.08593)."""
    error = min(max(seen / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * n / horizon)


def adaptive_entropy(coef: float, entropy: float, target: float, delta: float) -> float:
    """c_{k+1} = c_k + delta if e_k < target else c_k - delta, at least 0.

    Skywork-OR1, 2505.22312.
    """
    return max(0.0, coef + delta if entropy < target else coef - delta)


def used_entropy_coef(coef: float, entropy: float, target: float) -> float:
    """alpha_k = c_k 1{e_k <= target} (Skywork-OR1, 2505.22312)."""
    return coef if entropy <= target else 0.0


def overlong_penalty(length: int, l_max: int, l_cache: int, factor: float = 1.0) -> float:
    """Soft overlong punishment times factor (DAPO, 2503.14476 eq. 13).

    0 up to l_max - l_cache, ((l_max - l_cache) - length) / l_cache up to l_max, -1 beyond.
    """
    if length <= l_max - l_cache:
        return 0.0
    if length <= l_max:
        return factor * ((l_max - l_cache) - length) / l_cache
    return -factor


def top_entropy_mask(entropies: Rows, trs: list[Trajectory], fraction: float) -> list[list[int]]:
    """1 on the ceil(fraction N) policy tokens of largest entropy, first of ties (2506.01939)."""
    tokens = all_tokens(trs)
    ranked = sorted(tokens, key=lambda token: (-entropies[token[0]][token[1]], token))
    out = [[0] * len(tr.mask) for tr in trs]
    for i, t in ranked[: math.ceil(fraction * len(tokens))]:
        out[i][t] = 1
    return out


# ---- Rollout correction


def mismatch(tr: Trajectory) -> list[float]:
    """log rho_t = trainer - rollout logprob of the policy tokens."""
    return [tr.logprobs[t] - tr.rollout[t] for t in policy_tokens(tr)]


def off_policy_masked(
    new: Rows, trs: list[Trajectory], adv: Rows, threshold: float
) -> list[list[bool]]:
    """True where A < 0 and mean_t log(pi_rollout / pi_new) > threshold (DeepSeek-V3.2,
    2512.02556)."""
    out = [[False] * len(tr.mask) for tr in trs]
    for i, tr in enumerate(trs):
        drift = mean(tr.rollout[t] - new[i][t] for t in policy_tokens(tr))
        for t in policy_tokens(tr):
            out[i][t] = adv[i][t] < 0 and drift > threshold
    return out


def rho_of(tr: Trajectory, level: str) -> list[float]:
    """rho of each policy token: its own, the product, or the geometric mean of its sequence."""
    logs = mismatch(tr)
    if level == "token":
        return [math.exp(x) for x in logs]
    if level == "sequence":
        return [math.exp(math.fsum(logs))] * len(logs)
    if level == "geometric":
        return [math.exp(mean(logs))] * len(logs)
    raise ValueError(level)


def rollout_weights(
    trs: list[Trajectory],
    level: str,
    mode: str,
    low: float,
    high: float,
    normalize: bool = False,
) -> Rows:
    """truncate: min(rho, high) (TIS); mask: rho if low <= rho <= high else 0 (IcePop).

    normalize: divided by the mean over policy tokens (level token) or over sequences.
    """
    out, counted = zeros(trs), []
    for i, tr in enumerate(trs):
        tokens = policy_tokens(tr)
        for t, rho in zip(tokens, rho_of(tr, level), strict=True):
            if mode == "truncate":
                out[i][t] = min(rho, high)
            else:
                assert mode == "mask"
                out[i][t] = rho if low <= rho <= high else 0.0
        counted += [out[i][t] for t in (tokens if level == "token" else tokens[:1])]
    if normalize and mean(counted) > 0:
        out = [[w / mean(counted) for w in row] for row in out]
    return out


def divergence(kind: str, log_rho: float) -> float:
    """k2 = log^2 rho / 2; k3 = rho - 1 - log rho."""
    if kind == "k2":
        return 0.5 * log_rho**2
    assert kind == "k3"
    return math.exp(log_rho) - 1.0 - log_rho


def passes(name: str, bound: float | tuple[float, float], logs: list[float]) -> list[bool]:
    """The verdict of one test on each policy token of a sequence."""
    scope, kind = name.rsplit("_", 1)
    if kind == "k1":
        low, high = bound
        values = logs
    else:
        values = [divergence(kind, x) for x in logs]
    if scope == "seq_sum":
        values = [math.fsum(values)] * len(logs)
    elif scope == "seq_mean":
        values = [mean(values)] * len(logs)
    elif scope == "seq_max":
        assert kind != "k1"
        values = [max(values)] * len(logs)
    else:
        assert scope == "token"
    if kind == "k1":
        return [low <= math.exp(x) <= high for x in values]
    return [x <= bound for x in values]


def reject(trs: list[Trajectory], tests: dict[str, float | tuple[float, float]]) -> list[list[int]]:
    """1 on the policy tokens that pass all tests; a failed sequence loses all its tokens.

    k1: the ratio rho (the token's, the product, the geometric mean) lies in [low, high];
    k2, k3: the token's, or the sum, mean or max over the sequence, is at most the bound.
    """
    out = [[0] * len(tr.mask) for tr in trs]
    for i, tr in enumerate(trs):
        tokens = policy_tokens(tr)
        if not tokens:
            continue
        verdicts = [passes(name, bound, mismatch(tr)) for name, bound in tests.items()]
        for k, t in enumerate(tokens):
            out[i][t] = int(all(verdict[k] for verdict in verdicts))
    return out


def mismatch_metrics(trs: list[Trajectory], weights: Rows | None = None) -> dict[str, float]:
    """kl, k3, ppl_ratio, chi2_token, chi2_seq of rho = trainer/rollout, ess of the weights.

    ess = (sum w)^2 / (n sum w^2) over policy tokens; w = the tokens' rho unless given.
    """
    seqs = [mismatch(tr) for tr in trs if policy_tokens(tr)]
    logs = [x for seq in seqs for x in seq]
    w = [math.exp(x) for x in logs]
    if weights is not None:
        w = [weights[i][t] for i, t in all_tokens(trs)]
    squares = math.fsum(x * x for x in w)
    return {
        "kl": mean(-x for x in logs),
        "k3": mean(math.exp(x) - 1.0 - x for x in logs),
        "ppl_ratio": mean(math.exp(-mean(seq)) for seq in seqs),
        "chi2_token": mean(math.exp(x) ** 2 - 1.0 for x in logs),
        "chi2_seq": mean(math.exp(math.fsum(seq)) ** 2 - 1.0 for seq in seqs),
        "ess": math.fsum(w) ** 2 / (len(w) * squares) if squares > 0 else 0.0,
    }


# ---- Filters and further losses


def pf_ppo_weights(trs: list[Trajectory], mode: str, power: float = 1.0) -> list[float]:
    """Sampling weight of each sample, 0 for invalid ones (PF-PPO, 2409.06957).

    pow: |R|^p; max_min: 1 for the best and the worst, 0 for others; max_random: 0.4 for the
    best, 0.1 for others. Best and worst of the batch's valid samples, all of those that tie.
    """
    out = [0.0] * len(trs)
    valid = [i for i in range(len(trs)) if trs[i].valid]
    if not valid:
        return out
    best = max(trs[i].reward for i in valid)
    worst = min(trs[i].reward for i in valid)
    for i in valid:
        if mode == "pow":
            out[i] = abs(trs[i].reward) ** power
        elif mode == "max_min":
            out[i] = 1.0 if trs[i].reward in (best, worst) else 0.0
        else:
            assert mode == "max_random"
            out[i] = 0.4 if trs[i].reward == best else 0.1
    return out


def prime_cross_entropy(
    process: LossRows, trs: list[Trajectory], labels: list[float]
) -> list[Tensor]:
    """-(y log p + (1-y) log(1-p)), p = sigmoid(sum_t process_t), one per sample (2502.01456).

    0 for an invalid sample; an empty valid one has p = 1/2.
    """
    out = []
    for i, tr in enumerate(trs):
        x, y = total(process[i][t] for t in policy_tokens(tr)), labels[i]
        log_p = torch.nn.functional.logsigmoid(x)
        log_not_p = torch.nn.functional.logsigmoid(-x)
        out.append(-(y * log_p + (1.0 - y) * log_not_p) if tr.valid else scalar())
    return out


def positive_nll(new: LossRows, trs: list[Trajectory]) -> Tensor:
    """Mean of -log pi over the policy tokens of samples with reward > 0 (VAPO, 2504.05118)."""
    tokens = [(i, t) for i, t in all_tokens(trs) if trs[i].reward > 0]
    return total(-new[i][t] for i, t in tokens) / max(1, len(tokens))


def mixed_groups(trs: list[Trajectory]) -> set[int]:
    """Groups whose valid rewards are not all equal (dynamic sampling, DAPO 2503.14476)."""
    out = set()
    for group, members in groups(trs).items():
        if len({trs[i].reward for i in members}) > 1:
            out.add(group)
    return out
