"""Tries a kind of model before its weights are loaded: a tiny copy of its layers (tiny_config.py)
computes sequences one by one, as transformers does, and then packed in one row, as engine fsdp
does. What would fail, or mix sequences, in a run's first step does so here within a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.attention import NAME
from spmdrl.engines.fsdp.model import TokenPolicy, without_noise
from spmdrl.engines.fsdp.packed_rows import Packing
from spmdrl.engines.fsdp.per_sequence_layers import run_per_sequence
from spmdrl.hub.hf_folder import meta_model
from spmdrl.hub.tiny_config import FAILURES, LAYERS, VOCAB, tiny_config

LENGTHS = (37, 5, 20, 64, 2)  # beyond a window, a chunk and a block of the tiny layers, and below
# What a packed pass may differ by: a log-probability; a gradient, as a part of its largest entry.
# Right ones differ by 1e-5 and 1e-3 at most on CPUs, wrong ones by 2e-3 or more. On a GPU products
# are rounded more.
LIMITS = {"cpu": (1e-4, 1e-2), "cuda": (1e-3, 5e-2)}
MOST_PARAMETERS = 50_000_000  # of a copy; one has about a million


@dataclass(frozen=True)
class Trial:
    """Says how far the packed pass of a tiny model is from transformers' own, one by one."""

    logprobs: float  # the largest difference of a log-probability
    gradients: float  # the largest of a gradient, as a part of the gradient's largest entry
    num_layers: int  # that were tried


class CannotShrink(Exception):
    """transformers cannot build or run a tiny copy of the model: nothing is known of it."""


def try_packing(hf: PreTrainedConfig) -> Trial:
    """Tries the kind of model of a config. Raises CannotShrink, and ConfigError where the packed
    pass fails or differs: engine fsdp cannot train such a model. It is tried on this process's GPU
    where there is one, since packages with kernels of such layers run there alone.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny: Any = tiny_copy(hf)
    tiny.to(device)
    sequences, wanted = random_sequences(device)
    named = {name: p for name, p in tiny.named_parameters() if p.requires_grad}
    try:
        tiny.eval()
        apart = logprobs_one_by_one(tiny, sequences)
        gradients = gradients_of(apart, wanted, named)
    except FAILURES as error:
        raise CannotShrink(f"a tiny copy fails in transformers: {first_line(error)}") from error
    tiny.train()  # as the engine has it
    run_per_sequence(tiny)
    tiny.set_attn_implementation(NAME)
    kind = f"engine 'fsdp' cannot train model type {hf.model_type!r}"
    try:
        packed = logprobs_packed(tiny, sequences)
        found = gradients_of(packed, wanted, named)
    except FAILURES as error:
        raise ConfigError(
            f"{kind}: a tiny copy of its layers fails on packed sequences: {first_line(error)}"
        ) from error
    worst = max(gradients, key=lambda name: relative(found[name], gradients[name]))
    difference = float((packed - apart).detach().abs().max())
    layers = next(getattr(tiny.config, n) for n in LAYERS if getattr(tiny.config, n, None))
    trial = Trial(difference, relative(found[worst], gradients[worst]), layers)
    most_logprob, most_gradient = LIMITS[device.type]
    if not (trial.logprobs <= most_logprob and trial.gradients <= most_gradient):
        raise ConfigError(
            f"{kind}: on packed sequences the log-probabilities of a tiny copy of its layers "
            f"differ by {trial.logprobs:.2g} from those of each sequence alone, and the gradient "
            f"of {worst} by {trial.gradients:.2g} of itself: its layers mix what is packed, or "
            "compute something else in training"
        )
    return trial


def tiny_copy(hf: PreTrainedConfig) -> PreTrainedModel:
    """Returns a tiny model with random weights and VOCAB tokens. The process's own random numbers
    stay as they are. Raises CannotShrink.
    """
    text = hf.get_text_config()
    try:
        config = tiny_config(text, meta_model(text, AutoModelForCausalLM))
        size = sum(p.numel() for p in meta_model(config, AutoModelForCausalLM).parameters())
        if size > MOST_PARAMETERS:
            raise CannotShrink(f"a tiny copy would have {size:,} parameters")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tiny = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
            for parameter in tiny.parameters():  # zeros and ones would hide what they are for
                if parameter.ndim < 2:
                    parameter.data += 0.1 * torch.randn_like(parameter)
    except FAILURES as error:
        raise CannotShrink(f"a tiny copy cannot be built: {first_line(error)}") from error
    without_noise(tiny)
    return tiny


def random_sequences(device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Returns random sequences of LENGTHS, and a weight for each log-probability of their tokens.
    They are the same on each device.
    """
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]
    weights = torch.randn(sum(LENGTHS) - len(LENGTHS), generator=generator)
    return [tokens.to(device) for tokens in sequences], weights.to(device)


def logprobs_one_by_one(model: Any, sequences: list[Tensor]) -> Tensor:
    """(n,) log-probabilities of every token but a sequence's first."""
    found = []
    for tokens in sequences:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0])
    return torch.cat(found)


def logprobs_packed(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """Computes them of one packed row."""
    lens = torch.tensor([len(tokens) for tokens in sequences])
    row = torch.cat(sequences)
    positions = torch.cat([torch.arange(int(n)) for n in lens]).to(row.device)
    last = torch.zeros(len(row), dtype=torch.bool)
    last[lens.cumsum(0) - 1] = True
    states = (~last).nonzero().flatten().to(row.device)
    packing = Packing.build(lens, row.device)
    policy = TokenPolicy(model)
    return policy(row, positions, packing, states, row[states + 1], temperature=1.0)[0]


def gradients_of(logprobs: Tensor, weights: Tensor, named: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of the weighted sum of log-probabilities; 0 for what has no part in it."""
    grads = torch.autograd.grad((logprobs * weights).sum(), list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if grad is None else grad
        for (name, parameter), grad in zip(named.items(), grads, strict=True)
    }


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / (wanted.abs().max() + 1e-3))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
