"""Shrinks a model's config to layers of a tiny width, at least one of each kind.

What the layers compute stays: their kinds and order, activation, norms, rotary embeddings, routing,
biases, scaling. What only makes them large becomes small. A model of the result has about a
million parameters, so that a CPU tries in a second what the large one would do.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from spmdrl.hub.remote_code import UNREADABLE

# What a model's code may raise where it meets sizes or inputs that it was not made for.
FAILURES = (*UNREADABLE, RuntimeError, AssertionError, StopIteration)
VOCAB = 256
HEADS, HEAD_DIM = 4, 32  # vLLM's kernels for CPUs take no head below 32
LINEAR_DIM = 128  # of a head of linear attention, as vLLM's kernels have it
HIDDEN = HEADS * HEAD_DIM
ROPE_DIM = 64  # of multi-head latent attention: the part of a head that is rotated
LATENT = 512  # what a token keeps there; vLLM's kernels take no other width with it than 512 + 64
INSIDE = 2 * HIDDEN  # of a Mamba layer

# By the name of a field: the most that it may be. None and 0, which turn something off, stay.
LARGEST: dict[str, int] = {
    # widths
    "hidden_size": HIDDEN, "d_model": HIDDEN, "n_embd": HIDDEN, "word_embed_proj_dim": HIDDEN,
    "block_dim": HIDDEN, "conv_dim": HIDDEN, "conv_dim_out": HIDDEN,
    "intermediate_size": 128, "intermediate_size_mlp": 128, "ffn_hidden_size": 128, "n_inner": 128,
    "ffn_dim": 128, "block_ff_dim": 128, "prefix_dense_intermediate_size": 128,
    "shared_intermediate_size": 64, "moe_intermediate_size": 64, "expert_ffn_hidden_size": 64,
    "shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "hidden_size_per_layer_input": 32, "laurel_rank": 16, "moe_latent_size": 32, "adapter_rank": 16,
    # heads
    "num_attention_heads": HEADS, "n_head": HEADS, "swa_num_attention_heads": HEADS,
    "num_query_groups": HEADS, "head_dim": HEAD_DIM, "kv_channels": HEAD_DIM,
    "swa_head_dim": HEAD_DIM, "swa_v_head_dim": HEAD_DIM, "global_head_dim": HEAD_DIM,
    # multi-head latent attention
    "q_lora_rank": 48, "kv_lora_rank": LATENT, "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": ROPE_DIM, "qk_head_dim": HEAD_DIM + ROPE_DIM, "v_head_dim": HEAD_DIM,
    "o_lora_rank": 32, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 2 * ROPE_DIM,
    # experts
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "top_k_experts": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_num_shared_experts": 1, "n_group": 2, "num_expert_group": 2, "topk_group": 1,
    "zero_expert_num": 2,
    # layers with a state between tokens
    "linear_key_head_dim": LINEAR_DIM, "linear_value_head_dim": LINEAR_DIM,
    "linear_head_dim": LINEAR_DIM, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_num_heads": 2,
    "mamba_d_ssm": INSIDE, "mamba_d_state": 16, "ssm_state_size": 16, "mamba_dt_rank": 8,
    "mamba_n_groups": 1, "mamba_ngroups": 1, "n_groups": 1, "mamba_chunk_size": 16,
    "chunk_size": 16, "block_size": 16,
    # how far a token sees
    "sliding_window": 16, "attention_chunk_size": 32, "index_topk": 16,
}  # fmt: skip
# The field of the heads' number, and of the width of each: their product is INSIDE.
MAMBA_HEADS = {
    "mamba_n_heads": "mamba_d_head", "mamba_num_heads": "mamba_head_dim",
    "n_mamba_heads": "mamba_headdim",
}  # fmt: skip
KV_HEADS = {  # of each field, which counts the queries' heads
    "num_key_value_heads": "num_attention_heads",
    "num_global_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "num_kv_heads": "num_attention_heads",
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
LAYER_NUMBERS = (
    "attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids", "mlp_only_layers", "moe_layers",
)  # fmt: skip
KINDS = ("layer_types", "layers_block_type")  # some configs work them out
VOCABS = ("vocab_size", "vocab_size_per_layer_input")


def tiny_config(
    config: PreTrainedConfig, shell: PreTrainedModel | None = None, vocab: int = VOCAB
) -> PreTrainedConfig:
    """Returns the config of a tiny model of the same kind; `config` stays as it is.

    shell: the large model on the meta device, by which kinds of layers are told from each other;
    None: by the config alone. vocab: how many tokens the tiny one has.
    """
    text = config.get_text_config()
    small = tiny_text(text, shell, vocab)
    if text is config:
        return type(config).from_dict(small)
    whole = config.to_dict()
    inside = next(name for name, value in vars(config).items() if value is text)
    whole[inside] = small
    keep_tokens_inside(whole, vocab)
    return type(config).from_dict(whole)


def tiny_text(text: Any, shell: PreTrainedModel | None, vocab: int) -> dict[str, Any]:
    """Returns the config of a tiny language model as a dictionary."""
    old = text.to_dict()
    made = copy.deepcopy(old)
    cut_layers(made, text, layers_needed(text, shell))
    lower(made, times=1)
    for layer in (made.get("per_layer_config") or {}).values():
        lower(layer, times=2)  # so that it differs from the others as it did
    for name, queries in KV_HEADS.items():
        if old.get(name):
            groups = max(1, (old.get(queries) or old[name]) // old[name])
            made[name] = max(min(2, old[name]), made.get(queries, HEADS) // groups)
    if old.get("head_dim") is not None and old["head_dim"] == old.get("qk_rope_head_dim"):
        made["head_dim"] = made["qk_rope_head_dim"]  # of latent attention: the rotated part
    for number, width in MAMBA_HEADS.items():
        if old.get(number):
            made[number], made[width] = INSIDE // HEAD_DIM, HEAD_DIM
    scale_rotary(made)
    keep_tokens_inside(made, vocab)
    return made


def lower(config: dict[str, Any], times: int) -> None:
    """Lowers what is above `times` the most that it may be."""
    for name, most in LARGEST.items():
        value = config.get(name)
        if isinstance(value, list):
            config[name] = [min(entry, times * most) for entry in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            config[name] = min(value, times * most)


# ---- layers


def layers_needed(text: Any, shell: PreTrainedModel | None) -> int:
    """Counts the first layers among which there is one of each kind; at least 2."""
    count = num_layers_of(text)
    kinds = [tuple(entry) for entry in zip(*lists_of_layers(text, count).values(), strict=True)]
    kinds = kinds or [()] * count
    if shell is not None:
        modules = decoder_layers_of(shell, count)
        kinds = [(kind, signature(layer)) for kind, layer in zip(kinds, modules, strict=True)]
    seen, needed = set(), 0
    for number, kind in enumerate(kinds):
        if kind not in seen:
            seen.add(kind)
            needed = number + 1
    return min(count, max(2, needed))


def num_layers_of(text: Any) -> int:
    return next(getattr(text, name) for name in LAYERS if getattr(text, name, None))


def lists_of_layers(text: Any, count: int) -> dict[str, list[Any]]:
    """Returns the fields that have an entry for each of `count` layers."""
    names = {*vars(text), *KINDS}
    found = {}
    for name in sorted(names):
        value = getattr(text, name, None) if name in KINDS else vars(text)[name]
        if name in LAYER_NUMBERS or not isinstance(value, list) or len(value) != count:
            continue
        if not isinstance(value[0], dict):
            found[name] = [tuple(v) if isinstance(v, list) else v for v in value]
    return found


def decoder_layers_of(shell: PreTrainedModel, count: int) -> list[nn.Module]:
    """Returns the modules of the first list of so many in the model: its layers. Where there is
    none, all layers count as alike.
    """
    for module in shell.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return [nn.Identity()] * count


def signature(layer: nn.Module) -> tuple[Any, ...]:
    """Tells what a layer is made of."""
    return tuple((name, type(module).__name__) for name, module in layer.named_modules())


def cut_layers(config: dict[str, Any], text: Any, num_layers: int) -> None:
    """Leaves the first layers. text: the config that `config` was made of."""
    count = num_layers_of(text)
    for name in {*lists_of_layers(text, count)} & {*config}:
        config[name] = config[name][:num_layers]
    for name in LAYER_NUMBERS:
        if config.get(name) is not None:
            config[name] = [number for number in config[name] if number < num_layers]
    for name in LAYERS:
        if name in config:
            config[name] = num_layers
    if config.get("num_kv_shared_layers"):  # the last layers, which have no keys of their own
        own = count - config["num_kv_shared_layers"]
        config["num_kv_shared_layers"] = max(0, num_layers - own)
    if config.get("per_layer_config"):
        overrides = config["per_layer_config"].items()
        config["per_layer_config"] = {n: o for n, o in overrides if int(n) < num_layers}


# ---- rotary embeddings and tokens


def scale_rotary(config: dict[str, Any]) -> None:
    """Cuts what has an entry for each pair of rotated numbers of a head."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        pairs = int(HEAD_DIM * (part.get("partial_rotary_factor") or 1.0)) // 2
        for name in ("long_factor", "short_factor"):
            if name in part:
                part[name] = list(part[name])[:pairs]
        sections = part.get("mrope_section")
        if sections:
            small = [max(1, size * pairs // sum(sections)) for size in sections]
            small[0] += pairs - sum(small)
            part["mrope_section"] = small


def keep_tokens_inside(config: dict[str, Any], vocab: int) -> None:
    """Gives the config so many tokens; ids of tokens that it then has not become lower ones."""
    for name in VOCABS:
        if isinstance(config.get(name), int):
            config[name] = vocab
    ids = sorted(name for name in config if name.endswith("token_id"))
    for place, name in enumerate(ids):
        value = config[name]
        if isinstance(value, list):
            config[name] = [min(id, vocab - 1 - place) for id in value]
        elif isinstance(value, int) and value >= vocab:
            config[name] = vocab - 1 - place
