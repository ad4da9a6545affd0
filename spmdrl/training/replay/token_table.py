"""One sample of a replayed step, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.demonstrations import are_demonstrations
from spmdrl.algo.objectives import policy_objective
from spmdrl.engines.fsdp.token_gradients import TokenGradients
from spmdrl.training.logs.sample_tokens import SampleRecorder, places, token_texts
from spmdrl.training.roles import Roles
from spmdrl.types import Batch

Row = dict[str, Any]


@dataclass(frozen=True)
class TokenTable:
    """The tokens behind the prompt, with a row for each."""

    prompt_id: int
    reward: float
    valid: bool
    rows: list[Row]
    grad_norm: float | None = None  # of the last update with the sample, where it was measured


def token_table(
    roles: Roles, batches: list[Batch], recorder: SampleRecorder, address: tuple[int, int],
    coefs: tuple[float, float], measured: TokenGradients | None = None,
) -> TokenTable | None:  # fmt: skip
    """Makes the table of a sample from what its step has computed; None where another rank has it.

    address: its group and index in the step. coefs: of the KL and of the entropy in this step.
    measured: what its tokens add to the gradient.
    """
    stride = 1 + roles.config.algo.replay_steps
    wanted = frozenset({(address[0] * stride, address[1])})
    for batch in batches:
        for found, tokens in places(batch.groups, batch.indices, batch.cu_seqlens, wanted):
            seq = int((batch.cu_seqlens == tokens.start).nonzero()[-1])
            own = batch.select([seq]).to(torch.device("cpu"))
            last = recorder.logprobs().get(found)
            rows = token_rows(roles, own, last, coefs, measured)
            valid = bool(own.valid[0] > 0)
            norm = None if measured is None else measured.whole
            return TokenTable(int(own.prompts[0]), float(own.rewards[0]), valid, rows, norm)
    return None


def token_rows(
    roles: Roles, own: Batch, last: Tensor | None, coefs: tuple[float, float],
    measured: TokenGradients | None,
) -> list[Row]:  # fmt: skip
    """own: the sample alone. last: (num_tokens,) log-probabilities in the step's last update; None:
    it had none.
    """
    first = int((own.rollout_logprobs != 0).nonzero()[:1].sum())
    first = int((own.loss_mask > 0).nonzero()[0]) if bool(own.loss_mask.any()) else first
    is_given = bool(are_demonstrations(own).any())  # no engine has sampled it, nothing weighs it
    columns: dict[str, Tensor | None] = {
        "engine": None if is_given else own.rollout_logprobs,
        "ref": own.ref_logprobs,
        "trainer": last if own.old_logprobs is None else own.old_logprobs,
        "update": None if own.old_logprobs is None else last,
        "value": own.values,
        "advantage": own.advantages,
        "mask": own.loss_mask,
        "weight": None if is_given else own.policy_weights,
    }
    old = columns["trainer"]
    if last is not None and old is not None:
        columns["ratio"] = (last - old).exp()
        columns |= gradients(roles, own, last, coefs)
    if measured is not None:
        for name, values in (("grad_norm", measured.norms), ("grad_share", measured.shares)):
            column = torch.zeros(own.num_tokens, dtype=torch.float64)
            column[measured.positions] = torch.tensor(values, dtype=torch.float64)
            columns[name] = column
    texts = token_texts(roles.tokenizer, own.token_ids[first:].tolist())
    shown = {
        name: values[first:].tolist() for name, values in columns.items() if values is not None
    }
    ids = own.token_ids[first:].tolist()
    return [
        {"position": i, "id": ids[i], "text": text, **{n: v[i] for n, v in shown.items()}}
        for i, text in enumerate(texts)
    ]


def gradients(
    roles: Roles, own: Batch, last: Tensor, coefs: tuple[float, float]
) -> dict[str, Tensor]:
    """gradient: d loss / d log-probability of each token in the last update, by the loss function
    that the update had; clip: 1 on tokens that are trained on, have an advantage, and nothing of
    the policy loss moves.

    The gradient of the step is the sum over tokens of this number times the gradient of the
    token's log-probability. With distillation that of the divergence comes on top, which goes
    through other tokens' log-probabilities.
    """
    algo = replace(roles.config.algo, distillation=None)
    whole = gradient_of(policy_objective(algo, *coefs), own, last)
    of_policy = gradient_of(policy_objective(algo, 0.0, 0.0), own, last)
    assert own.advantages is not None and own.loss_weights is not None
    moved = (own.loss_weights != 0) & (own.advantages != 0)
    return {"clip": (moved & (of_policy == 0)).float(), "gradient": whole}


def gradient_of(objective: Any, own: Batch, logprobs: Tensor) -> Tensor:
    """(num_tokens,): the derivative of the loss by the log-probabilities."""
    at = logprobs.clone().requires_grad_()
    loss, _ = objective(at, torch.zeros_like(logprobs), own)
    (found,) = torch.autograd.grad(loss, at)
    return torch.as_tensor(found)
