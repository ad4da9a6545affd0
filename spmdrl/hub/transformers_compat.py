"""The private APIs of transformers that spmdrl reads, each behind one function.

Checked with transformers 5.19.0. When transformers moves, tests/hub/test_transformers_compat.py
says which of these broke.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import _get_resolved_checkpoint_files


def model_class(auto: Any, config_class: type[PreTrainedConfig]) -> Any:
    """Returns the class that an auto class (AutoModelForCausalLM) makes of such a config; None
    where it knows none, and a tuple where there are several. Reads its _model_mapping.
    """
    return auto._model_mapping.get(config_class, None)


def has_model_class(auto: Any, config_class: type[PreTrainedConfig]) -> bool:
    """Returns whether an auto class knows a model for such a config. Reads its _model_mapping."""
    return config_class in auto._model_mapping


@contextmanager
def kept_config_classes() -> Iterator[None]:
    """Has AutoConfig know afterwards what it knows now: vLLM registers classes of its own for some
    model types. Reads and writes the _extra_content of CONFIG_MAPPING.
    """
    registered: Any = CONFIG_MAPPING._extra_content
    kept = dict(registered)
    try:
        yield
    finally:
        registered.clear()
        registered.update(kept)


def takes_attention_functions(model_class: Any) -> bool:
    """Returns whether the layers of a model class call an attention function that may be
    exchanged. Reads its _supports_attention_backend.
    """
    return bool(model_class._supports_attention_backend)


def attention_name(config: PreTrainedConfig) -> str | None:
    """Returns the name of the attention function that a model uses. Reads the config's
    _attn_implementation.
    """
    return config._attn_implementation


def set_attention_name(config: Any, name: str | None) -> None:
    """Sets the attention function of a part of a model, its vision tower say, by that part's
    config; the rest keeps its own. Writes the config's _attn_implementation.
    """
    config._attn_implementation = name


def undivided_layers(model: PreTrainedModel) -> set[str]:
    """Returns the class names of the layers that a model declares as not to be split: its repeated
    blocks. Reads its _no_split_modules.
    """
    return set(model._no_split_modules or ())


def checkpoint_files(model: str, config: PreTrainedConfig) -> list[str]:
    """Returns the paths of the weight files that from_pretrained reads of a folder or hub id; it
    downloads those of a hub id. Raises OSError where there are none. Calls
    modeling_utils._get_resolved_checkpoint_files.
    """
    files, _ = _get_resolved_checkpoint_files(
        pretrained_model_name_or_path=model, variant=None, gguf_file=None, use_safetensors=None,
        user_agent=None, is_remote_code=False,
        transformers_explicit_filename=getattr(config, "transformers_weights", None),
    )  # fmt: skip
    return list(files or ())


def keeps_float32(model: PreTrainedModel) -> bool:
    """Returns whether a model keeps some of its weights in float32 when it is loaded in another
    dtype. Reads its _keep_in_fp32_modules and _keep_in_fp32_modules_strict.
    """
    return bool(model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict)


def is_stateful(model_class: Any) -> bool:
    """Returns whether the layers of a model class carry a state from token to token. Reads its
    _is_stateful.
    """
    return bool(getattr(model_class, "_is_stateful", False))


def apply_expert_gate(experts: Any, gate_up: Any) -> Any:
    """Returns what a module of stacked experts makes of (rows, 2 * width) gates and ups before it
    projects them down, (rows, width): act(gate) * up, or the model's own. Calls its _apply_gate.
    """
    return experts._apply_gate(gate_up)


def declared_routers(model: Any) -> list[tuple[Any, int]]:
    """Returns the modules whose output has a router's scores, in their order in the model, and
    where in it these are, as transformers declares them for output_router_logits. Reads the
    _can_record_outputs of a model and of the models in it.
    """
    found: dict[int, tuple[Any, int]] = {}
    for part in model.modules():
        recorder = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if recorder is None:
            continue
        inside = f".{recorder.layer_name}." if recorder.layer_name else "."
        for name, module in part.named_modules():
            if isinstance(module, recorder.target_class) and inside in f".{name}.":
                found[id(module)] = module, recorder.index
    return list(found.values())


def gated_delta_functions() -> tuple[Any, Any]:
    """Returns the causal convolution and the gated delta rule of Qwen3.5's layers: those of
    causal-conv1d and flash-linear-attention where these are installed, else torch's. Reads
    causal_conv1d_fn and torch_chunk_gated_delta_rule of models.qwen3_5.modeling_qwen3_5.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5.causal_conv1d_fn, modeling_qwen3_5.torch_chunk_gated_delta_rule
