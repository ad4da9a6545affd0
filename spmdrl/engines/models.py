"""Hugging Face models as the engine wants them: packed tokens in, one number per token out.

A model is built whole on rank 0 and as an empty shell elsewhere; the engine then hands out the
shards, so that no more than one rank ever holds a full copy.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import torch.nn as nn
from huggingface_hub import constants, try_to_load_from_cache
from spmdrl_kernels.linear import use_fast_linear
from spmdrl_kernels.lm_head import lm_head_logprobs
from spmdrl_kernels.norm import use_fast_rms_norm
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from spmdrl.config import ConfigError
from spmdrl.engines import attention
from spmdrl.safe_load import refused


class TokenPolicy(nn.Module):
    """A causal language model: log-probability and entropy of chosen tokens."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        text = hf.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        for name in ("logit_scale", "logits_scaling"):
            if getattr(text, name, None) not in (None, 1.0):
                raise ConfigError(f"model {hf.config.name_or_path}: {name} is not supported")

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, packing: attention.Packing, rows: Tensor,
        temperature: float, pi_squared: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """token_ids, position_ids: (num_tokens,); rows: (n,) positions of the chosen tokens.

        Returns logprobs, entropy and the sum of squared probabilities (0 unless `pi_squared`), (n,)
        float32 each: of token rows[i] given all before it.
        """
        hidden = backbone_hidden(self.hf, token_ids, position_ids, packing)
        head: Any = self.hf.get_output_embeddings()
        return lm_head_logprobs(
            hidden[rows - 1], head.weight, token_ids[rows], temperature,
            bias=getattr(head, "bias", None), softcap=self.softcap, pi_squared=pi_squared,
        )  # fmt: skip


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
        self, token_ids: Tensor, position_ids: Tensor, packing: attention.Packing, rows: Tensor
    ) -> Tensor:
        """Returns (n,) float32 values of the states in which tokens `rows` were chosen."""
        hidden = backbone_hidden(self.hf, token_ids, position_ids, packing)
        return self.value_head(hidden[rows - 1]).float().squeeze(-1)


def backbone_hidden(
    hf: PreTrainedModel, token_ids: Tensor, position_ids: Tensor, packing: attention.Packing
) -> Tensor:
    """Last hidden state of every token: (num_tokens, hidden_size)."""
    out = hf.base_model(
        input_ids=token_ids[None], position_ids=position_ids[None], attention_mask=None,
        use_cache=False, packing=packing,
    )  # fmt: skip
    return out.last_hidden_state[0]


def load_hf_config(model: str) -> PreTrainedConfig:
    """Raises ConfigError where there is no such model."""
    if Path(model).is_dir() and not Path(model, "config.json").is_file():
        raise ConfigError(
            f"model: {model!r} has no config.json; is it a Hugging Face model folder?"
        )
    if not Path(model).exists() and (model.startswith(("/", ".", "~")) or model.count("/") != 1):
        raise ConfigError(f"model: no such folder: {model!r} (and not a hub id like owner/name)")
    if not Path(model).is_dir() and not on_hub(model):
        raise ConfigError(
            f"model: {model!r} is no folder here, is not cached, and the hub cannot be reached"
        )
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model: {model!r} is no folder here and cannot be had from the hub: {reason}"
        ) from error


def on_hub(model: str) -> bool:
    """Whether there is any use in asking the hub; transformers would try for half a minute."""
    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def build_model(model: str, full: bool, fast_cpu: bool) -> PreTrainedModel:
    """A float32 causal language model on the CPU; `full` False gives uninitialised weights.

    fast_cpu: it will also compute there, in float32, so its layers become those that are fast.
    """
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention.NAME}
    if full:
        with refused(Path(model)):
            hf = AutoModelForCausalLM.from_pretrained(model, **settings)
    else:
        with no_init_weights():
            hf = AutoModelForCausalLM.from_config(load_hf_config(model), **settings)
        hf.tie_weights()
    without_dropout(hf)
    if fast_cpu:
        use_fast_linear(hf)
        use_fast_rms_norm(hf)
    return hf.train()  # activation checkpointing only works in train mode


def without_dropout(hf: PreTrainedModel) -> None:
    """Old and new logprobs must differ by the update alone, so dropout is off in every pass."""
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, by the class names the model declares as not to be split."""
    names = set(hf._no_split_modules or ())
    layers = [m for m in hf.modules() if type(m).__name__ in names]
    if not layers:
        raise ConfigError(f"{type(hf).__name__} does not say which modules are its layers")
    return layers
