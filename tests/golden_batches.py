"""Random ragged batches for the golden tests: as Trajectories of the reference and as a Batch.

They have prompts, tool tokens in the middle, groups of one, groups of equal rewards, invalid
samples and empty responses.
"""

from __future__ import annotations

import random

import torch
from reference import Trajectory, policy_tokens
from torch import Tensor

from spmdrl.data.packing import empty_batch
from spmdrl.types import Batch

GROUP_SIZES = (4, 1, 3, 4, 2, 5)


def random_trajectories(seed: int, binary: bool = False) -> list[Trajectory]:
    """Nineteen samples of six groups; rewards in 0..1, of two values or of many."""
    rng = random.Random(seed)
    out = []
    for group, size in enumerate(GROUP_SIZES):
        same = rng.random() if group == 3 else None  # a group whose rewards are all equal
        for _ in range(size):
            out.append(trajectory(rng, group, same, binary))
    out[5].mask = [0] * len(out[5].mask)  # an empty response
    for i in rng.sample(range(8, len(out)), 3):
        out[i].valid = False
    for tr in out:
        settle(tr)
    return out


def trajectory(rng: random.Random, group: int, same: float | None, binary: bool) -> Trajectory:
    prompt, length = rng.randint(1, 4), rng.randint(1, 12)
    n = prompt + length
    mask = [0] * prompt + [1] + [int(rng.random() > 0.3) for _ in range(length - 1)]
    reward = float(rng.random() > 0.5) if binary else rng.choice([0.0, 1.0, rng.random()])
    noise = lambda scale=1.0: [rng.gauss(0, scale) for _ in range(n)]  # noqa: E731
    logprobs = [-abs(x) - 0.01 for x in noise(2.0)]
    return Trajectory(
        group=group, valid=True, reward=reward if same is None else same, mask=mask,
        prompt_len=prompt, values=noise(), logprobs=logprobs,
        rollout=[min(p + e, -1e-3) for p, e in zip(logprobs, noise(0.3), strict=True)],
        process=noise(0.1), pi2=[rng.random() for _ in range(n)], greedy=float(group % 3) / 2,
        keys={"format": rng.random(), "correct": float(rng.random() > 0.5)},
    )  # fmt: skip


def settle(tr: Trajectory) -> None:
    """Puts the reward on the last policy token and zeros on masked ones."""
    tr.rewards = [0.0] * len(tr.mask)
    chosen = policy_tokens(tr)
    if chosen:
        tr.rewards[chosen[-1]] = tr.reward
    for name in ("values", "logprobs", "rollout", "process", "pi2"):
        row = getattr(tr, name)
        setattr(tr, name, [x if t in set(chosen) else 0.0 for t, x in enumerate(row)])


def batch_of(trs: list[Trajectory]) -> Batch:
    """In order; `index` is the number of the sample in its group."""
    batch = empty_batch(torch.tensor([len(tr.mask) for tr in trs]), num_keys=2)
    seen: dict[int, int] = {}
    batch.groups = torch.tensor([tr.group for tr in trs])
    for i, tr in enumerate(trs):
        batch.indices[i] = seen.setdefault(tr.group, 0)
        seen[tr.group] += 1
    batch.valid = torch.tensor([float(tr.valid) for tr in trs])
    batch.rewards = torch.tensor([tr.reward if tr.valid else 0.0 for tr in trs]).double()
    batch.greedy_rewards = torch.tensor([tr.greedy or 0.0 for tr in trs]).double()
    batch.reward_components = torch.tensor(
        [[tr.keys["format"], tr.keys["correct"]] for tr in trs]
    ).double()
    batch.loss_mask = flat([[float(m and tr.valid) for m in tr.mask] for tr in trs])
    for name, field in (
        ("values", "values"), ("old_logprobs", "logprobs"), ("rollout_logprobs", "rollout"),
        ("pi_squared", "pi2"),
    ):  # fmt: skip
        setattr(batch, name, flat([getattr(tr, field) for tr in trs]) * batch.loss_mask)
    # the implicit process reward is beta (log pi_phi - log pi_ref), with beta 0.05
    batch.ref_logprobs = flat([tr.rollout for tr in trs]) * batch.loss_mask
    process = flat([tr.process for tr in trs]) / 0.05
    batch.prm_logprobs = (batch.ref_logprobs + process) * batch.loss_mask
    return batch


def flat(rows: list[list[float]]) -> Tensor:
    """(num_tokens,) float32."""
    return torch.tensor([x for row in rows for x in row], dtype=torch.float32)
