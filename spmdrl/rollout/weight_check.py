"""Proof that an engine's model on this rank holds given weights: every element, bit by bit.

Where a tensor must lie is worked out from shapes, head counts and the rank alone. vLLM's weight
loaders are not asked: their mistakes are what this is to find.

    given                     held by tensor-parallel rank r
    q_proj, k_proj, v_proj    rows of qkv_proj: its heads of each, one after the other; where there
                              are fewer KV heads than ranks, neighbours hold the same one
    gate_proj, up_proj        rows of gate_up_proj: the r-th part of each
    embed_tokens, lm_head     rows r * n .. (r + 1) * n; what lies beyond the vocabulary is padding
    o_proj, down_proj, ...    the r-th part of the axis that is shorter here than there
    norms, router             all of it
    experts.E.gate_proj, w1   rows of expert E of w13_weight (experts, rows, hidden): its r-th part
    experts.E.up_proj, w3     the same in the second half of w13_weight's rows
    experts.E.down_proj, w2   expert E of w2_weight (experts, hidden, columns): the r-th columns
    the same, whole experts   with n on a rank: all of expert E, as r's number E - r * n
    weight_scale_inv          as the weight in FP8 that it scales, a row for each 128 rows
    visual.*.qkv, wqkv        rows of its heads of each third; Qwen2-VL's: the r-th part

transformers' own models hold all of it; their w13_weight and w2_weight are called gate_up_proj and
down_proj. Models with a vision tower call their language model's weights in ways of their own: here
these go by the names of a language model alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from spmdrl_kernels.fp8 import BLOCK
from torch import Tensor, nn

from spmdrl.rollout.base import WeightMismatch
from spmdrl.rollout.engine_names import kept_form, own_name, paired_rows, spellings
from spmdrl.weights.buffers import persistent_buffers
from spmdrl.weights.engine_layout import ByName

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
# of models that do not say it: SGLang's, in whose loaders it stands
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# what some checkpoints have fused too
FUSED_THERE = ("gate_up_proj", "qkv_proj", "input_linear", "c_attn")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def given_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that a trainer gives: all but those that the engine makes of others."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        if not getattr(parameter, "is_derived", False):
            yield name, parameter


@torch.no_grad()
def clear_weights(model: nn.Module) -> None:
    """Overwrites the weights of a model that was built without them by NaN, which a checked
    trainer never sends: `require_written` then finds what a push has left out.
    """
    for _, parameter in given_parameters(model):
        if parameter.is_floating_point():  # those of a model that is quantised may not be
            parameter.fill_(float("nan"))


@torch.no_grad()
def require_written(model: nn.Module, tp_rank: int) -> None:
    """Raises WeightMismatch naming the weights that were not filled after `clear_weights`. Rows
    that pad a vocabulary become 0.
    """
    left: list[str] = []
    for name, parameter in given_parameters(model):
        wide = parameter.element_size() > 1
        unwritten = parameter.isnan() if wide else parameter.float().isnan()
        count = int(unwritten.sum())
        if count > padding_of(model, name, tp_rank):
            left.append(f"{name} ({count} of {parameter.numel()} elements)")
        elif count:
            parameter[unwritten] = 0
    if left:
        raise WeightMismatch(
            f"the engine was built without the model's weights, and the first push has not filled "
            f"{len(left)} of its tensors: {', '.join(left[:5])}. The trainer has no such weights, "
            "or sends NaN for them: this model cannot be sampled from with this rollout.engine"
        )


@dataclass(frozen=True)
class ExpectedSlice:
    """A part of an engine parameter and what must stand there; both of one shape."""

    parameter: str
    held: Tensor
    expected: Tensor


def compare_weights(
    model: nn.Module, weights: Iterator[tuple[str, Tensor]], tp_rank: int, tp_size: int
) -> int:
    """Compares each (Hugging Face name, full tensor) with its place in `model`.

    A tensor is cast to the engine's dtype first. Returns the number of tensors compared. Raises
    WeightMismatch where one differs or has no place, and where an element of the model was not
    compared, padding of the vocabulary excepted.
    """
    parameters = {
        own_name(name): parameter
        for name, parameter in given_parameters(model, remove_duplicate=False)
    }
    unproven = {
        p.data_ptr(): p.numel() - padding_of(model, n, tp_rank) for n, p in parameters.items()
    }
    check_tied_head(model, parameters)
    buffers = {own_name(name): buffer for name, buffer in persistent_buffers(model).items()}
    compared: set[int] = set()
    count = 0
    for name, tensor in weights:
        place = find_place(model, buffers | parameters, name, tensor, tp_rank, tp_size)
        compare(name, place)
        count += 1
        mine = place.parameter in parameters  # else it is a buffer
        if mine and place.held.data_ptr() not in compared:  # a tied lm_head may be given twice
            compared.add(place.held.data_ptr())
            unproven[parameters[place.parameter].data_ptr()] -= place.held.numel()
    for name, parameter in parameters.items():
        missing = unproven[parameter.data_ptr()]
        if missing:
            raise WeightMismatch(
                f"none of the {count} tensors accounts for {missing} of the {parameter.numel()} "
                f"elements of the engine's {name}"
            )
    return count


def compare_by_name(by_name: ByName, weights: Iterator[tuple[str, Tensor]]) -> int:
    """Compares full tensors with an engine's model of full tensors, by the names of a checkpoint.

    Returns how many. Raises WeightMismatch where one differs in a bit or in its shape, has no place
    in the model, or was not given.
    """
    count = 0
    try:
        for name, tensor in weights:
            owner, held = by_name.find(name)
            if held.shape != tensor.shape:
                raise WeightMismatch(f"{name} is of shape {tuple(tensor.shape)}, not {held.shape}")
            compare(name, ExpectedSlice(owner, held, tensor))
            count += 1
        by_name.require_all()
    except ValueError as error:
        raise WeightMismatch(
            f"no tensor accounts for a parameter, or has no place: {error}"
        ) from error
    return count


def compare(name: str, place: ExpectedSlice) -> None:
    """Equal bits: NaN equals NaN, and -0 does not equal 0."""
    held = torch.atleast_1d(place.held.contiguous())
    expected = place.expected.detach().to(device=held.device, dtype=held.dtype).contiguous()
    expected = torch.atleast_1d(expected)
    differs = held.view(torch.uint8) != expected.view(torch.uint8)
    differs = differs.view(*held.shape, held.element_size()).any(-1)
    if differs.any():
        first = tuple(int(i) for i in differs.nonzero()[0])
        raise WeightMismatch(
            f"{name} differs from the engine's {place.parameter} in {int(differs.sum())} of "
            f"{held.numel()} elements; at {first}: given {float(expected[first])!r}, "
            f"held {float(held[first])!r}"
        )


def find_place(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    name: str,
    tensor: Tensor,
    tp_rank: int,
    tp_size: int,
) -> ExpectedSlice:
    """Raises WeightMismatch where the engine has no parameter for `name` or not of its shape."""
    for spelling in spellings(model, name):
        place = place_of(model, parameters, spelling, name, tensor, tp_rank, tp_size)
        if place is not None:
            break
    else:
        raise WeightMismatch(f"{name} has no place in the engine that can be proven")
    if place.held.shape != place.expected.shape:
        raise WeightMismatch(
            f"{name} of shape {tuple(tensor.shape)} leaves {tuple(place.expected.shape)} for "
            f"{tuple(place.held.shape)} of the engine's {place.parameter}"
        )
    return place


def place_of(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    spelling: str,
    name: str,
    tensor: Tensor,
    tp_rank: int,
    tp_size: int,
) -> ExpectedSlice | None:
    """Returns where a weight must be if the engine calls it `spelling`, alone or as a part of what
    is fused; None where it has no such parameter. name: the checkpoint's.
    """
    owner, _, kind = spelling.rpartition(".")
    prefix, _, leaf = owner.rpartition(".")
    expert = EXPERT.fullmatch(spelling)
    if spelling in parameters:
        held = parameters[spelling].data
        tensor = kept_form(name, spelling, tensor, held)
        if tp_size > 1 and leaf in ("conv1d", "in_proj") and held.shape != tensor.shape:
            mixer, module = module_of(model, prefix), module_of(model, owner)
            sizes = outputs_of_mixer(mixer, module, leaf, len(tensor), tp_size)
            return ExpectedSlice(spelling, held, rank_outputs(tensor, sizes, tp_rank, tp_size))
        halved = hasattr(model, "permute_qk_weight_for_rotary") or ".input_linear." in name
        halved |= ".language_model." in name
        if spelling.endswith("w13_weight") and halved:  # gpt-oss has gate and up by turns
            if len(held) < len(tensor):  # whole experts on each rank
                tensor, tp_rank, tp_size = tensor[tp_rank * len(held) :][: len(held)], 0, 1
            return ExpectedSlice(spelling, held, halves_of(tensor, tp_rank, tp_size))
        if tp_size > 1 and leaf in FUSED_THERE and held.shape != tensor.shape:
            fused_sizes = outputs_of_fused(module_of(model, owner), len(tensor), tp_size)
            expected = rank_outputs(tensor, fused_sizes, tp_rank, tp_size)
            return ExpectedSlice(spelling, held, expected)
        if spelling.endswith("experts.w2_bias") and held.shape == tensor.shape and tp_rank > 0:
            tensor = torch.zeros_like(tensor)  # the ranks' products are added up, a bias once
        by_heads = leaf in ("qkv", "wqkv") and hasattr(module_of(model, owner), "num_kv_heads")
        cut = thirds if by_heads else split
        return ExpectedSlice(spelling, *cut(held, tensor, tp_rank, tp_size))
    if expert is not None:
        stack, number, leaf = expert.groups()
        return find_expert(parameters, stack, int(number), leaf, tensor, tp_rank, tp_size)
    fused, parts = fused_module(model, leaf)
    parameter = f"{prefix}.{fused}.{kind}"
    if parameter not in parameters:
        return None
    module = module_of(model, f"{prefix}.{fused}")
    if getattr(module, "tp_size", tp_size) == 1:  # every rank has all of it
        tp_rank, tp_size = 0, 1
    unit = BLOCK if kind == "weight_scale_inv" else 1
    held = parameters[parameter].data
    several = outputs_of(module, parts, leaf, len(tensor) * unit)
    if several is not None:
        sizes = module.output_sizes
        cut_out = several_outputs(held, tensor, sizes, several, tp_rank, tp_size)
        return ExpectedSlice(parameter, *cut_out)
    if hasattr(module, "head_size"):
        tensor = paired_rows(model, name, tensor, module.head_size)
    start, rows, part = rows_in_fused(module, parts.index(leaf), tensor, tp_rank, tp_size, unit)
    return ExpectedSlice(parameter, held[start : start + rows], tensor[part : part + rows])


def module_of(model: nn.Module, name: str) -> Any:
    """Returns the module by the name that its own model has for it."""
    inside = name.replace("model.", "model.language_model.", 1)
    for spelling in (name, f"language_model.{name}", inside, f"model.{name}"):
        with suppress(AttributeError):
            return model.get_submodule(spelling)
    raise KeyError(name)


def find_expert(
    parameters: Mapping[str, Tensor],
    stack: str,
    number: int,
    leaf: str,
    tensor: Tensor,
    rank: int,
    size: int,
) -> ExpectedSlice | None:
    """stack: what comes before the number of the expert in its name. Returns None where the engine
    has no such experts.
    """
    of_down = leaf in DOWN
    fused = "w2_weight" if of_down else "w13_weight"
    names = [
        f"{stack}.routed_experts.{fused}",
        f"{stack}.{fused}",  # SGLang's
        f"{stack.replace('.block_sparse_moe.', '.mlp.')}.{DOWN[0] if of_down else 'gate_up_proj'}",
    ]
    found = [name for name in names if name in parameters]
    known = leaf in (*GATE, *UP, *DOWN)
    if not known or not found:
        return None
    stacked, axis = parameters[found[0]].data, int(of_down)
    if is_spread(stacked[0], tensor, axis, size):
        owner, number = divmod(number, len(stacked))
        if owner >= size:
            return None
        if owner != rank:
            return ExpectedSlice(found[0], stacked[:0], stacked[:0])  # nothing of it is here
        rank, size = 0, 1
    elif number >= len(stacked):
        return None
    held = stacked[number]
    width = tensor.shape[axis] // size
    if not of_down:  # the gate's rows, then those of the up projection
        half = len(held) // 2
        held = held[half:] if leaf in UP else held[:half]
    return ExpectedSlice(found[0], held, tensor.narrow(axis, rank * width, width))


def is_spread(expert: Tensor, tensor: Tensor, axis: int, size: int) -> bool:
    """Says whether an engine of several ranks holds an expert whole. expert: as one rank has it, of
    gate and up both; tensor: a full one; axis: that other engines cut.
    """
    full = tensor.shape[axis] * (1 if axis else 2)
    return size > 1 and expert.shape[axis] == full


def split(parameter: Tensor, tensor: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """(what is held, what must be held) of a tensor that is not fused with others.

    The axis on which the shapes differ is the sharded one. Ranks hold equal parts of a vocabulary
    that was padded at its end, so the last ones may hold fewer rows of it than they have.
    """
    for axis, (local, full) in enumerate(zip(parameter.shape, tensor.shape, strict=False)):
        if local != full and full <= local * size:
            start = min(rank * local, full)
            num = min(local, full - start)
            return parameter.narrow(axis, 0, num), tensor.narrow(axis, start, num)
    return parameter, tensor


def thirds(parameter: Tensor, tensor: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Splits queries, keys and values that the checkpoint has in one tensor."""
    rows = len(tensor) // 3 // size
    return parameter, torch.cat([part[rank * rows :][:rows] for part in tensor.chunk(3)])


def rows_in_fused(
    module: Any, part: int, tensor: Tensor, rank: int, size: int, unit: int
) -> tuple[int, int, int]:
    """(first row in the fused parameter, number of rows, first row in the full tensor).

    unit: rows of the weight per row of the tensor, more than one where it holds blocks' scales.
    """
    if hasattr(module, "num_kv_heads"):
        kv_rows = module.num_kv_heads * module.head_size // unit
        rows = [module.num_heads * module.head_size // unit, kv_rows, kv_rows]
        ranks_per_part = [1, *[max(1, size * kv_rows // len(tensor))] * 2]
    else:
        rows = [-(-full // size // unit) for full in module.output_sizes]
        ranks_per_part = [1] * len(rows)
    return sum(rows[:part]), rows[part], rank // ranks_per_part[part] * rows[part]


def outputs_of(module: Any, parts: list[str], leaf: str, rows: int) -> tuple[int, int] | None:
    """Returns which outputs of a fused layer, first and behind the last, one tensor of the
    checkpoint is, where there are more of them than tensors: in_proj_qkvz has four outputs, and
    in_proj_qkv is the first three. None: every tensor is one output.
    """
    sizes = getattr(module, "output_sizes", None) or []
    if hasattr(module, "num_kv_heads") or len(sizes) <= len(parts):
        return None
    spans = [(i, j) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1)]
    fit = [span for span in spans if sum(sizes[slice(*span)]) == rows]
    if leaf == parts[0]:
        fit = [span for span in fit if span[0] == 0]
    elif leaf == parts[-1]:
        fit = [span for span in fit if span[1] == len(sizes)]
    return fit[0] if len(fit) == 1 else None


def several_outputs(
    held: Tensor, tensor: Tensor, sizes: list[int], span: tuple[int, int], rank: int, size: int
) -> tuple[Tensor, Tensor]:
    """(what is held, what must be held) of outputs span[0] to span[1]: of each the rank's part."""
    first, last = span
    own = [rows // size for rows in sizes]
    start = sum(own[:first])
    outputs = tensor.split(sizes[first:last])
    mine = [output[rank * n :][:n] for output, n in zip(outputs, own[first:last], strict=True)]
    return held[start : start + sum(own[first:last])], torch.cat(mine)


def outputs_of_mixer(
    mixer: Any, module: Any, leaf: str, rows: int, size: int
) -> list[tuple[int, int]]:
    """Returns (rows, ranks that share them) of each output of a recurrent layer's projection or
    convolution, whose weight has so many rows.

    A gated delta net's convolution has queries, keys and values. Mamba 2's projection has the gate,
    the inputs, two matrices of the groups and the heads; its convolution all but gate and heads. A
    group that cannot be shared is there on every rank. module: the layer of `mixer` called `leaf`.
    """
    if hasattr(mixer, "key_dim"):
        return [(mixer.key_dim, size), (mixer.key_dim, size), (mixer.value_dim, size)]
    if not hasattr(mixer, "ssm_state_size"):
        return outputs_of_fused(module, rows, size)
    inside, heads = mixer.intermediate_size, mixer.num_heads
    gate = [(inside, size)] if leaf == "in_proj" else []
    last = [(heads, size)] if leaf == "in_proj" else []
    group = (rows - inside * (1 + len(gate)) - heads * len(last)) // 2
    shared = size if group // mixer.ssm_state_size % size == 0 else 1
    return [*gate, (inside, size), (group, shared), (group, shared), *last]


def outputs_of_fused(module: Any, rows: int, size: int) -> list[tuple[int, int]]:
    """Returns (rows, ranks that share them) of each output of a layer that a checkpoint has fused
    too. Where there are fewer key-value heads than ranks, neighbours have the same one.
    """
    if not hasattr(module, "num_kv_heads"):
        return [(output, size) for output in getattr(module, "output_sizes", [rows])]
    queries = module.total_num_heads * module.head_size
    keys = module.total_num_kv_heads * module.head_size
    shared = min(size, module.total_num_kv_heads)
    return [(queries, size), (keys, shared), (keys, shared)]


def rank_outputs(tensor: Tensor, outputs: list[tuple[int, int]], rank: int, size: int) -> Tensor:
    """Returns a rank's rows of each output, one output after the other."""
    parts = tensor.split([rows for rows, _ in outputs])
    return torch.cat([
        part[rank * ranks // size * (rows // ranks) :][: rows // ranks]
        for part, (rows, ranks) in zip(parts, outputs, strict=True)
    ])  # fmt: skip


def halves_of(tensor: Tensor, rank: int, size: int) -> Tensor:
    """(experts, 2 * width, hidden), gate and up: a rank's rows of each half."""
    halves = tensor.unflatten(1, (2, size, -1))
    return halves[:, :, rank].flatten(1, 2)


def fused_module(model: Any, leaf: str) -> tuple[str, list[str]]:
    """("qkv_proj", ["q_proj", "k_proj", "v_proj"]) for "k_proj"; ("", []) where it is not fused."""
    for owner in (model, getattr(model, "language_model", None)):
        for fused, parts in getattr(owner, "packed_modules_mapping", FUSED).items():
            if leaf in parts:
                return fused, parts
    return "", []


def padding_of(model: nn.Module, name: str, tp_rank: int) -> int:
    """Elements of a parameter that stand for no token: rows beyond the vocabulary."""
    module = module_of(model, name.rpartition(".")[0])
    if not hasattr(module, "org_vocab_size") or not name.endswith((".weight", ".bias")):
        return 0
    local = module.num_embeddings_per_partition
    first = tp_rank * local
    held = min(max(module.org_vocab_size - first, 0), local)
    return (local - held) * (module.embedding_dim if name.endswith(".weight") else 1)


def check_tied_head(model: Any, parameters: dict[str, nn.Parameter]) -> None:
    """A tied head that became a copy would go stale at the next update."""
    head, embedding = parameters.get("lm_head.weight"), parameters.get("model.embed_tokens.weight")
    tied = getattr(model.config, "tie_word_embeddings", False)
    if head is None or embedding is None or not tied:
        return
    if head.data_ptr() != embedding.data_ptr():
        raise WeightMismatch("lm_head.weight is tied, but the engine holds a copy of its own")
