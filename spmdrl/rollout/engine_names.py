"""Names that engines give to the weights of a checkpoint, and the forms in which they keep some of
them.

weight_check.py looks here for the parameter that must hold a weight. Where an engine computes with
a weight when it loads it, what it must hold is worked out here again, not by the engine's loader.

    checkpoint                              engine
    mamba.A_log                             mamba.A: -e^A_log in float32
    conv1d.weight (channels, 1, width)      (channels, width)
    experts.gate_up_proj (experts, in, out) w13_weight (experts, out, in): gpt-oss, Llama 4
    q_proj, k_proj of Llama 4               rows of a head in pairs: see `paired_rows`
    input_linear, output_linear, router     w13_weight, w2_weight and gate of Granite's experts
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from spmdrl.weights.checkpoint_names import STACKED

# parts of names that an engine spells in another way, where its model does not say so itself
SPELLINGS = (
    (".block_sparse_moe.", ".mlp."),  # transformers' own Mixtral
    (".moe_statics.", ".gate."),  # Ernie 4.5
    (".router.layer.", ".gate."),  # Granite
    (".input_linear.weight", ".experts.routed_experts.w13_weight"),
    (".output_linear.weight", ".experts.routed_experts.w2_weight"),
    (".experts.gate_up_proj", ".experts.routed_experts.w13_weight"),  # Llama 4
    (".experts.down_proj", ".experts.routed_experts.w2_weight"),
    (".experts.w13_", ".experts.routed_experts.w13_"),  # gpt-oss, after its own table of names
    (".experts.w2_", ".experts.routed_experts.w2_"),
    (".A_log", ".A"),
    (".gate.e_score_correction_bias", ".e_score_correction_bias"),  # EXAONE
    (".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias"),  # LFM2-MoE
    (".mlp.gate.", ".mlp.router."),  # Phi-MoE
    (".mlp.gate.", ".mlp.experts.gate."),  # what vLLM makes of transformers' own code
    ("model.embed_", "model.self_decoder.embed_"),  # Gemma 3n
    ("model.per_layer_", "model.self_decoder.per_layer_"),
    ("model.altup_", "model.self_decoder.altup_"),
    ("gpt_neox.", "model."),
    ("backbone.", "model."),  # Nemotron-H in transformers
    ("embed_out.", "lm_head."),
)


# GPT-2's, which are (in, out) in checkpoints
TRANSPOSED = tuple(f".{n}.weight" for n in ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"))


def own_name(name: str) -> str:
    """model.language_model.layers.0, language_model.model.layers.0: both are model.layers.0."""
    return name.replace("language_model.", "", 1).replace("model.visual.", "visual.", 1)


def spellings(model: Any, name: str) -> Iterator[str]:
    """Yields what an engine's model may call a weight of a checkpoint, the likeliest first."""
    names = [own_name(name)]
    told = by_own_table(model, name)
    if told is not None:
        names.append(own_name(told))
    for first in names:  # which grows: a name may differ in several parts
        names += [
            other
            for part, spelt in SPELLINGS
            if part in first and (other := first.replace(part, spelt, 1)) not in names
        ]
    yield from names


def by_own_table(model: Any, name: str) -> str | None:
    """Returns the name by the table of names that vLLM's model has; None without one, and for what
    the model leaves out.
    """
    table = getattr(model, "hf_to_vllm_mapper", None)
    if table is None:
        return None
    for part, other in table.orig_to_new_substr.items():
        if part in name:
            if other is None:
                return None
            name = name.replace(part, other, 1)
    for part, other in table.orig_to_new_prefix.items():
        if name.startswith(part):
            return None if other is None else other + name.removeprefix(part)
    for part, other in table.orig_to_new_suffix.items():
        if name.endswith(part):
            return None if other is None else name.removesuffix(part) + other
    return name


def kept_form(name: str, parameter: str, tensor: Tensor, held: Tensor) -> Tensor:
    """Returns a checkpoint's tensor in the form in which the engine's parameter keeps it.

    name: the checkpoint's; parameter: the engine's, whose memory is `held`.
    """
    if parameter.endswith(".A") and name.endswith(".A_log"):
        return -tensor.float().exp()
    stacked = name.endswith(STACKED)
    if stacked and parameter.endswith(("w13_weight", "w2_weight")):
        return tensor.transpose(1, 2)
    if tensor.ndim == 2 and name.endswith(TRANSPOSED):
        return tensor.T
    if tensor.ndim == 3 and held.ndim == 2 and tensor.shape[1] == 1:
        return tensor[:, 0]
    if tensor.ndim == 2 and held.ndim == 1 and len(tensor) == 1:  # Ernie's bias of experts
        return tensor[0]
    return tensor


def paired_rows(model: Any, name: str, tensor: Tensor, head_size: int) -> Tensor:
    """Returns the rows of a query or key projection as the engine keeps them. Llama 4's are of a
    head with its rotated pairs side by side; vLLM keeps the halves of the pairs one after another.
    """
    if not hasattr(model, "permute_qk_weight_for_rotary") or tensor.ndim != 2:
        return tensor
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    heads = tensor.view(-1, head_size // 2, 2, tensor.shape[1])
    return heads.transpose(1, 2).reshape(tensor.shape)
