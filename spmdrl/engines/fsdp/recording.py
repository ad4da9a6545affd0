"""Records a pass of a transformers model: its modules, attention functions, routers, rotations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from spmdrl_kernels.lm_head import lm_head_logprobs
from torch import Tensor, nn
from transformers import AttentionInterface

from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.model import backbone, logit_factor
from spmdrl.engines.fsdp.router_replay import ChosenExperts, router_classes
from spmdrl.engines.recorded_pass import (
    FINAL,
    PassRecorder,
    RecordedPass,
    Rotation,
    floats_in,
    module_hooks,
)
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.transformers_compat import attention_name
from spmdrl.types import Batch


def record_pass(engine: Any, batch: Batch, rows: Tensor, temperature: float) -> RecordedPass:
    """TrainEngine.record_pass of an FsdpEngine. Log-probabilities are 0 where the token behind a
    row is masked.
    """
    recorder = PassRecorder(batch.num_tokens, rows)
    with recording(engine.module.hf, recorder):
        stats = engine.logprobs(batch, temperature)
    found = recorder.recorded(DTYPES[engine.config.dtype])
    found.logprobs = stats.logprobs[rows + 1]
    return found


@contextmanager
def recording(hf: Any, recorder: PassRecorder) -> Iterator[None]:
    """Meanwhile the recorder takes what one pass over one sequence computes.

    Beside modules, by their paths in `hf`: attention functions as `<path of the layer>.attn`, and
    the last hidden states. The pass is given one row of tokens, (1, num_tokens).
    """
    with ExitStack() as hooks:
        hooks.enter_context(module_hooks(hf, recorder, partial(rows_of, recorder.num_tokens)))
        hooks.enter_context(attention_hooks(hf, recorder))
        hooks.enter_context(router_hooks(hf, recorder))
        hooks.enter_context(rotation_hooks(hf, recorder))
        hooks.enter_context(replaced_forward(backbone(hf), partial(keep_final, recorder)))
        yield


def rows_of(num_tokens: int, tensor: Tensor) -> Tensor | None:
    """(1, num_tokens, ...) or (num_tokens, ...) -> (num_tokens, ...); None for other shapes."""
    if tensor.ndim >= 3 and tensor.shape[:2] == (1, num_tokens):
        return tensor[0]
    return tensor if tensor.ndim >= 2 and len(tensor) == num_tokens else None


@contextmanager
def attention_hooks(hf: Any, recorder: PassRecorder) -> Iterator[None]:
    """Meanwhile the model's attention function is called through one that records."""
    name, functions = attention_name(hf.config.get_text_config()), AttentionInterface()
    if name is None or name not in functions:  # "eager": each model's own
        yield
        return
    function: Any = functions[name]
    paths = {id(module): path for path, module in hf.named_modules()}

    def recorded(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        path = f"{paths.get(id(module), type(module).__name__)}.attn"
        for i, tensor in enumerate((query, key, value)):  # (1, heads, num_tokens, size)
            recorder.take(path, f"in{i}", tensor[0].transpose(0, 1))
        scale = kwargs.get("scaling")
        recorder.scales[path] = query.shape[-1] ** -0.5 if scale is None else float(scale)
        found = function(module, query, key, value, *args, **kwargs)
        recorder.take(path, "out", found[0][0])
        return found

    AttentionInterface.register(name, recorded)
    try:
        yield
    finally:
        AttentionInterface.register(name, function)


@contextmanager
def router_hooks(hf: Any, recorder: PassRecorder) -> Iterator[None]:
    """Meanwhile the recorder takes which experts each router chooses. A model whose routing is not
    known (router_replay.py) is left as it is.
    """

    def route(path: str, number: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with ChosenExperts(number, None) as mode:
            result = forward(*args, **kwargs)
        if mode.chosen is not None:
            recorder.take_experts(path, mode.chosen.flatten(0, -2))
        return result

    numbers = routers_of(hf)
    with ExitStack() as changes:
        for path, module in hf.named_modules():
            number = numbers.get(type(module).__name__)
            if number is not None:
                changes.enter_context(replaced_forward(module, partial(route, path, number)))
        yield


def keep_final(recorder: PassRecorder, forward: Any, *args: Any, **kwargs: Any) -> Any:
    out = forward(*args, **kwargs)
    recorder.take(FINAL, "out", out.last_hidden_state[0])
    return out


@contextmanager
def replaced_forward(module: Any, around: Any) -> Iterator[None]:
    """Meanwhile the module runs around(its own forward, ...). A class that vLLM has run itself,
    by transformers' code, is called past its hooks.
    """
    own = vars(module).get("forward")
    module.forward = partial(around, module.forward)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def routers_of(hf: Any) -> dict[str, int]:
    """Returns router_replay.router_classes; {} without experts, or where the routing is unknown."""
    if not any(type(m).__name__.endswith("Experts") for m in hf.modules()):
        return {}
    try:
        return router_classes(hf.config)
    except ConfigError:
        return {}


@contextmanager
def rotation_hooks(hf: Any, recorder: PassRecorder) -> Iterator[None]:
    """Meanwhile the recorder takes the cosines and sines that rotary embeddings return."""

    def after(module: nn.Module, args: Any, output: Any) -> None:
        tables = floats_in(output) if isinstance(output, tuple) else []
        found = [rows for t in tables if (rows := rows_of(recorder.num_tokens, t)) is not None]
        if len(found) == 2 and found[0].ndim == 2:
            recorder.rotations.append(Rotation(*(by_pairs(t.detach()) for t in found)))

    handles = [
        m.register_forward_hook(after)
        for m in hf.modules()
        if "RotaryEmbedding" in type(m).__name__
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def by_pairs(table: Tensor) -> Tensor:
    """(num_tokens, size) -> (num_tokens, pairs) float32 on the CPU. Most models have a number for
    both of a pair: in two halves, or side by side.
    """
    half = table.shape[1] // 2
    for first, second in ((table[:, :half], table[:, half:]), (table[:, ::2], table[:, 1::2])):
        if torch.equal(first, second):
            return first.float().cpu()
    return table.float().cpu()


@torch.no_grad()
def logprobs_of_states(hf: Any, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """states: (n, hidden_size), what the LM head is given; targets: (n,) token ids -> (n,) float32
    log-probabilities at this temperature.
    """
    head, text = hf.get_output_embeddings(), hf.config.get_text_config()
    weight = head.weight
    found = lm_head_logprobs(
        states.to(weight), weight, targets.to(weight.device), temperature / logit_factor(text),
        bias=getattr(head, "bias", None), softcap=getattr(text, "final_logit_softcapping", None),
    )  # fmt: skip
    return found[0].float().cpu()
