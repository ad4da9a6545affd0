"""Keeps what the modules of a model compute in one pass over one sequence, by forward hooks.

A model gives its modules' results in its own form, and a pass may come in pieces. `PassRecorder`
takes both apart; whoever registers the hooks says which rows of a tensor are which tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FINAL = ""  # the path under which the last hidden states are kept, those that the LM head is given
MOST_INPUTS = 3  # an attention layer's queries, keys and values


class ModuleRecord(NamedTuple):
    """Holds what one module was given and what it returned; (num_rows, width) each, on the CPU.

    vLLM's layers hand on a residual beside hidden states, and most of them mean the sum of both.
    `plain` has the hidden states alone, for those that mean these: given, and returned.
    """

    inputs: list[Tensor]
    output: Tensor
    plain: tuple[Tensor, Tensor] | None = None


class Rotation(NamedTuple):
    """Holds cosines and sines of rotary embeddings, (num_tokens, pairs) float32 each."""

    cos: Tensor
    sin: Tensor


@dataclass
class RecordedPass:
    """One pass of a model over a sequence. Rows are those of the tokens that were asked for."""

    rows: Tensor  # (num_rows,) int64, ascending: places in the sequence
    records: dict[str, ModuleRecord]  # by the module's path, in the order in which they ended
    dtype: torch.dtype  # of the computation
    # (num_rows,) float32: of the token behind each row; None: not known on this rank
    logprobs: Tensor | None = None
    # by the path of a router: (num_tokens, top_k) int64, the experts of every token
    experts: dict[str, Tensor] = field(default_factory=dict)
    rotations: list[Rotation] = field(default_factory=list)  # those that the model has
    # by the path of an attention layer: what its scores are multiplied by
    scales: dict[str, float] = field(default_factory=dict)
    # names of modules that stand for several of a checkpoint's: qkv_proj for q_proj, k_proj, v_proj
    fused: dict[str, list[str]] = field(default_factory=dict)


class PassRecorder:
    """Collects rows of tensors while a model runs over `num_tokens` tokens."""

    def __init__(self, num_tokens: int, rows: Tensor) -> None:
        self.num_tokens, self.rows = num_tokens, rows
        self.pieces: dict[tuple[str, str], list[Tensor]] = {}
        self.seen: dict[tuple[str, str], int] = {}  # tokens so far
        self.order: dict[str, None] = {}  # paths, in the order in which their modules ended
        self.experts: dict[str, list[Tensor]] = {}
        self.rotations: list[Rotation] = []
        self.scales: dict[str, float] = {}

    def take(self, path: str, slot: str, tensor: Tensor) -> None:
        """Keeps the wanted rows of the next tokens. tensor: (n, ...). slot: "in0", "in1", "in2",
        "out"; of (hidden states, residual) also "residual" of a norm and "plain" of a layer.
        """
        key = path, slot
        first = self.seen.get(key, 0)
        self.seen[key] = first + len(tensor)
        inside = (self.rows >= first) & (self.rows < first + len(tensor))
        chosen = (self.rows[inside] - first).to(tensor.device)
        picked = tensor.detach().index_select(0, chosen).flatten(1).cpu()
        self.pieces.setdefault(key, []).append(picked)
        if slot == "out":
            self.order.setdefault(path)

    def take_experts(self, path: str, chosen: Tensor) -> None:
        """chosen: (n, top_k) of the next tokens."""
        self.experts.setdefault(path, []).append(chosen.detach().long().cpu())

    def joined(self, path: str, slot: str) -> Tensor | None:
        """Returns (num_rows, width); None where the rows were not those of the tokens, once each.
        An engine that schedules ahead may compute one token more.
        """
        seen = self.seen.get((path, slot), 0)
        if not self.num_tokens <= seen <= self.num_tokens + 1:
            return None
        return torch.cat(self.pieces[path, slot])

    def records(self) -> dict[str, ModuleRecord]:
        found: dict[str, ModuleRecord] = {}
        for path in self.order:
            output, plain = self.joined(path, "out"), self.joined(path, "plain")
            inputs = [self.joined(path, f"in{i}") for i in range(MOST_INPUTS)]
            given = [tensor for tensor in inputs if tensor is not None]
            normed = self.joined(path, "residual")
            if output is None:
                continue
            if normed is not None:
                given = [normed]
            if plain is None or not given:
                found[path] = ModuleRecord(given, output)
            else:
                summed = given[0] + given[1] if len(given) == 2 else given[0]
                found[path] = ModuleRecord([summed], output, (given[0], plain))
        return found

    def recorded(self, dtype: torch.dtype) -> RecordedPass:
        """Raises RuntimeError where the pass was not over the tokens that were asked for."""
        records = self.records()
        if FINAL not in records:
            raise RuntimeError(
                f"a pass over {self.num_tokens} tokens gave last hidden states of "
                f"{self.seen.get((FINAL, 'out'), 0)}: its modules cannot be compared"
            )
        experts = {path: torch.cat(parts) for path, parts in self.experts.items()}
        return RecordedPass(
            self.rows, records, dtype, rotations=self.rotations, scales=self.scales,
            experts={p: t[: self.num_tokens] for p, t in experts.items()},
        )  # fmt: skip


def floats_in(values: Any) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


@contextmanager
def module_hooks(
    model: nn.Module, recorder: PassRecorder, rows_of: Callable[[Tensor], Tensor | None]
) -> Iterator[None]:
    """Meanwhile the recorder takes what each module below `model` is given and returns.

    rows_of: (n, ...), a row for each token, of a tensor in the model's form; None where it has no
    such rows. Modules of rotary embeddings are left out: a model's layers share one.
    """

    def before(path: str, args: Any, kwargs: Any) -> None:
        given = [rows_of(tensor) for tensor in floats_in([*args, *kwargs.values()])]
        shown = [rows for rows in given if rows is not None][:MOST_INPUTS]
        for i, rows in enumerate(shown):
            recorder.take(path, f"in{i}", rows)

    def after(path: str, module: nn.Module, output: Any) -> None:
        parts = floats_in(output) if isinstance(output, tuple) else floats_in([output])
        if not parts or (rows := rows_of(parts[0])) is None:
            return
        if len(parts) == 2 == len(output) and parts[0].shape == parts[1].shape:
            if next(module.children(), None) is None:  # a norm, and what it has normed
                recorder.take(path, "residual", parts[1])
            else:
                recorder.take(path, "plain", rows)
                rows = rows + parts[1]
        recorder.take(path, "out", rows)

    handles = []
    for path, module in model.named_modules():
        if path and "Rotary" not in type(module).__name__:
            handles += [
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: before(path, args, kwargs), with_kwargs=True
                ),
                module.register_forward_hook(
                    lambda module, _, output, path=path: after(path, module, output)
                ),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
