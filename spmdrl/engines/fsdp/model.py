"""Hugging Face models as the engine wants them: packed tokens in, one number per token out.

A model is built as an empty shell, whose shards are then read from its files (sharded_loading.py).
Files that cannot be read in part are read whole by rank 0, which hands out the shards, so that no
more than one rank ever holds a full copy.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
import torch.nn as nn
from safetensors import SafetensorError
from spmdrl_kernels.lm_head import lm_head_logprobs
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from spmdrl.config import ConfigError
from spmdrl.data.images import ImageInputs
from spmdrl.engines.fsdp import attention
from spmdrl.engines.fsdp.packed_rows import Packing
from spmdrl.engines.policy_head import head_results
from spmdrl.hub.hf_folder import (
    auto_class,
    check_files,
    language_config,
    load_hf_config,
    sees_images,
    towers,
    whole_config,
)
from spmdrl.hub.language_model import KEY_MAPPING
from spmdrl.hub.remote_code import UNREADABLE, reason_of
from spmdrl.hub.transformers_compat import set_attention_name, undivided_layers
from spmdrl.hub.vision_families import FAMILIES

logger = logging.getLogger(__name__)

# What modules call noise beside their dropouts. Phi-MoE's router_jitter_noise is a threshold, which
# also counts without noise.
NOISE = ("layerdrop", "input_jitter_noise", "jitter_noise")


class TokenPolicy(nn.Module):
    """A causal language model: log-probability and entropy of chosen tokens."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.lm_head_logprobs = lm_head_logprobs  # strict.py has another
        text = hf.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.logit_factor = logit_factor(text)

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, packing: Packing, states: Tensor,
        targets: Tensor, temperature: float, pi_squared: bool = False,
        scene: ImageInputs | None = None, top_k: int = 0, ids: Tensor | None = None,
        support: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """token_ids, position_ids: (num_tokens,); states, targets: (n,) positions, token ids.

        Returns logprobs, entropy and the sum of squared probabilities (0 unless `pi_squared`), (n,)
        float32 each: of targets[i] as what follows on token states[i]. With top_k or ids, (n, k),
        there is in place of the third what policy_head.head_results says, which takes support.
        """
        hidden = backbone_hidden(self.hf, token_ids, position_ids, packing, scene)
        head: Any = self.hf.get_output_embeddings()
        return head_results(
            chosen_states(hidden, states), head.weight, targets, temperature / self.logit_factor,
            pi_squared, top_k, ids, support, self.lm_head_logprobs,
            bias=getattr(head, "bias", None), softcap=self.softcap,
        )  # fmt: skip


def logit_factor(text: Any) -> float:
    """Returns by what a model multiplies its logits: the same as a temperature of 1 / factor.

    Granite and MiniCPM call logits_scaling what they divide by, HyperCLOVA what it multiplies by.
    """
    factor = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        factor *= getattr(text, name, None) or 1.0
    scaling = getattr(text, "logits_scaling", None) or 1.0
    return factor * scaling if text.model_type.startswith("hyperclovax") else factor / scaling


class TokenValue(nn.Module):
    """A language model's backbone with a scalar head: V(tokens before t). The head starts at 0."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        hf.set_output_embeddings(None)
        hf.config.tie_word_embeddings = False
        self.value_head = nn.Linear(hf.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, packing: Packing, states: Tensor,
        scene: ImageInputs | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns (n,) float32 values of the states after tokens `states`. A value of 100 that is
        rounded to bfloat16 would be off by up to 0.25: the head's product is float32.
        """
        hidden = backbone_hidden(self.hf, token_ids, position_ids, packing, scene)
        weight, bias = self.value_head.weight.float(), self.value_head.bias.float()
        values = linear(chosen_states(hidden, states).float(), weight, bias)
        return values.squeeze(-1).clone()  # of a view FSDP2 would warn


class TokenReward(nn.Module):
    """A sequence classifier with one output, asked at any token."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, packing: Packing, states: Tensor,
        scene: ImageInputs | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns (n,) float32: its output of what ends with tokens `states`."""
        hidden = backbone_hidden(self.hf, token_ids, position_ids, packing, scene)
        head: Any = self.hf.score  # (1, hidden_size): in float32, or near rewards would be equal
        scores = hidden[states].float() @ head.weight[0].float()
        return scores if head.bias is None else scores + head.bias.float()


# by the kind of an engine
HEADS: dict[str, type[nn.Module]] = {
    "policy": TokenPolicy, "value": TokenValue, "reward": TokenReward,
}  # fmt: skip


def backbone_hidden(
    hf: PreTrainedModel, token_ids: Tensor, position_ids: Tensor, packing: Packing,
    scene: ImageInputs | None = None,
) -> Tensor:  # fmt: skip
    """Last hidden state of every token: (num_tokens, hidden_size)."""
    seen: dict[str, Any] = {"position_ids": position_ids[None]}
    if scene is not None:
        place_images(hf, scene.is_image[None], scene.own)
        packing = replace(packing, ahead=scene.ahead)
        seen |= scene.pixels
        if scene.positions is not None:
            seen["position_ids"] = scene.positions[:, None]
    elif sees_images(hf.config):
        place_images(hf, torch.zeros_like(token_ids, dtype=torch.bool)[None])
    out = backbone(hf)(
        input_ids=token_ids[None], attention_mask=None, use_cache=False, packing=packing, **seen
    )  # fmt: skip
    return out.last_hidden_state.squeeze(0)


def backbone(hf: Any) -> nn.Module:
    """Returns the model without its head. Llama 4's own `base_model` is the model itself."""
    return hf.model if hf.base_model is hf else hf.base_model


def chosen_states(hidden: Tensor, states: Tensor) -> Tensor:
    """(num_tokens, hidden_size) -> (n, hidden_size). The answers to a prompt ask for the state of
    its last token each: such gradients are added in float32, also of states in half precision.
    """
    if hidden.dtype in (torch.bfloat16, torch.float16):
        return _ChosenStates.apply(hidden, states)
    return hidden[states]


class _ChosenStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, states: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        ctx.shape = hidden.shape
        return hidden[states]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (states,), (grad,) = ctx.saved_tensors, grads
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        total.index_put_((states,), grad.float(), accumulate=True)
        return total.to(grad.dtype), None


def place_images(hf: PreTrainedModel, is_image: Tensor, own: slice | None = None) -> None:
    """Makes the model put its images at these tokens, (rows, tokens) bool, in its next passes.

    own: which of the vectors that the tower makes belong there; None: all of them. The model would
    look for the placeholder's id, which a policy may well write into an answer.
    """
    family = FAMILIES[hf.config.model_type]
    base: Any = hf.base_model
    mask = is_image if family.flat else is_image[..., None]
    masks = (mask, *[torch.zeros_like(mask)] * (family.masks - 1))
    base.get_placeholder_mask = lambda *args, **kwargs: masks if len(masks) > 1 else mask
    if own is None:
        vars(base).pop("get_image_features", None)
    else:
        base.get_image_features = lambda *args, **kwargs: vectors_of(
            type(base).get_image_features(base, *args, **kwargs), own
        )


def vectors_of(out: Any, own: slice) -> Any:
    """Leaves these of the vectors in what a model's get_image_features returns: those of all images
    in a row, for Qwen3-VL in several layers.
    """
    found = out.pooler_output
    one = isinstance(found, Tensor)
    chosen = (found.flatten(0, -2) if one else torch.cat(list(found)))[own]
    out.pooler_output = chosen if one else (chosen,)
    if getattr(out, "deepstack_features", None) is not None:
        out.deepstack_features = [
            (torch.cat(list(layer))[own],) for layer in out.deepstack_features
        ]  # fmt: skip
    return out


def build_model(
    model: str, full: bool, has_head: bool = True, auto: Any = None,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:  # fmt: skip
    """A float32 model on the CPU; `full` False gives uninitialised weights.

    has_head False: weights of the output embedding, or of a classifier's score, are not needed.
    auto: transformers' class that finds the model's; None: of language models. config: None: the
    one of the model's folder. Raises ConfigError.
    """
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention.NAME}
    if full:
        given = {} if config is None else {"config": config}
        hf = load_model(model, has_head, auto, **settings, **given)
        require_finite(hf, model)
    else:
        config = config or load_hf_config(model)
        with no_init_weights():
            hf = (auto or auto_class(config)).from_config(config, **settings)
        hf.tie_weights()
    without_noise(hf)
    if sees_images(hf.config):  # the tower's is neither packed nor causal
        for tower in towers(hf):
            for module in tower.modules():
                if isinstance(module, PreTrainedModel):
                    set_attention_name(module.config, "sdpa")
    return hf.train()  # activation checkpointing only works in train mode


def load_model(
    model: str, has_head: bool = True, auto: Any = None, **settings: Any
) -> PreTrainedModel:  # fmt: skip
    """A model with the weights of its files, all of them.

    Raises ConfigError for a file that is damaged, and for tensors that the files lack or have in
    another shape, which transformers would draw at random; what is left over is reported. Files
    other than safetensors are read with weights_only, which runs no code of theirs.
    """
    if Path(model).is_dir():
        check_files(Path(model))
    whole = whole_config(model)
    config = language_config(whole)
    auto = auto or auto_class(config)
    if config is not whole:
        settings = {"config": config, "key_mapping": KEY_MAPPING} | settings
    try:
        loaded: Any = auto.from_pretrained(
            model, output_loading_info=True, ignore_mismatched_sizes=True,
            trust_remote_code=False, **settings,
        )  # fmt: skip
    except (*UNREADABLE, SafetensorError, PickleError) as error:
        raise ConfigError(f"model: {model!r} cannot be loaded: {reason_of(error)}") from error
    hf, found = loaded
    require_loadable(model, found, () if has_head else output_names(hf))
    report_unused(model, found)
    return hf


def require_loadable(model: str, found: dict[str, Any], head: Sequence[str]) -> None:
    """Raises ConfigError where a model's files lack tensors, or have them in another shape.

    found: what from_pretrained has found; head: names that the files need not have.
    """
    missing = sorted(name for name in found["missing_keys"] if name not in head)
    for problem, names in (
        ("its weight files lack", missing),
        ("config.json and its weight files differ in the shape of",
         sorted(f"{name} ({list(there)} in the files, {list(here)} by the config)"
                for name, there, here in found["mismatched_keys"])),
    ):  # fmt: skip
        if names:
            raise ConfigError(
                f"model: {model!r}: {problem} {some_of(names)}. Are all files of it there?"
            )


def report_unused(model: str, found: dict[str, Any]) -> None:
    if found["unexpected_keys"]:
        logger.warning(
            "model: %r: the model has no use for %s, found in its weight files",
            *(model, some_of(sorted(found["unexpected_keys"]))),
        )


def blank(model: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model with weights of any value: only its config is read."""
    config = load_hf_config(model)
    with no_init_weights():
        hf = auto_class(config).from_config(config, dtype=dtype)
    hf.tie_weights()
    return hf


def output_names(hf: PreTrainedModel) -> list[str]:
    """Returns the names of the parameters of the output embedding, or of a classifier's score."""
    head = hf.get_output_embeddings() or getattr(hf, "score", None)
    mine = {id(p) for p in head.parameters()} if head is not None else set()
    return [n for n, p in hf.named_parameters(remove_duplicate=False) if id(p) in mine]


def require_finite(hf: PreTrainedModel, model: str) -> None:
    for name, parameter in hf.named_parameters():
        # the sum alone would do, but for weights whose finite sum overflows
        if not parameter.sum().isfinite() and not parameter.isfinite().all():
            raise ConfigError(f"model: {model!r}: {name} has values that are not finite numbers")


def require_given(named: Iterable[str], given: Collection[str]) -> None:
    """Raises ConfigError where a weight is in neither, but for a value head and adapters."""
    left = sorted(
        name for name in named
        if name not in given and not name.startswith("value_head.") and ".lora_" not in name
    )  # fmt: skip
    if left:
        raise ConfigError(f"the model that it is to start from has no weights for {some_of(left)}")


def some_of(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def without_noise(hf: PreTrainedModel) -> None:
    """Turns off dropout, the dropping of layers and the noise of routers in every pass: old and new
    logprobs must differ by the update alone.
    """
    for module, name, _ in noise_of(hf):
        setattr(module, name, 0.0)


def noise_of(hf: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Returns where a model's noise is: module, attribute, value."""
    return [
        (module, name, value)
        for module in hf.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and (name in NOISE or "dropout" in name or (name == "p" and isinstance(module, nn.Dropout)))
    ]


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, by the class names the model declares as not to be split."""
    names = undivided_layers(hf)
    layers = [m for m in hf.modules() if type(m).__name__ in names]
    if not layers:
        raise ConfigError(f"{type(hf).__name__} does not say which modules are its layers")
    return layers
