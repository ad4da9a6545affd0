"""The optimizers of engine fsdp: AdamW, AdamW with 8-bit moments, Muon. Their state is sharded as
the weights are, by the weights' names, and is there before the first step, so it can be saved."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from transformers import PreTrainedModel

from spmdrl.config import ConfigError, OptimConfig, TrainConfig, require
from spmdrl.distributed.env import show_package
from spmdrl.distributed.placement import is_frozen
from spmdrl.engines.fsdp.model import decoder_layers
from spmdrl.engines.fsdp.muon import Cuts, Muon, hidden_matrices
from spmdrl.weights.checkpoint_names import Parts
from spmdrl.weights.shards import local

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam
LABELS = {"adamw": "Adam", "adamw8bit": "8-bit Adam", "muon": "Muon"}
MOST_BLOCK, LEAST_BLOCK = 256, 32  # elements that share a scale
LEAST_NUMEL = 4096  # smaller weights keep float32 moments, as in bitsandbytes and torchao


class Optimizer:
    """One optimizer or two over the weights of a model, as an engine drives them."""

    def __init__(
        self, name: str, weights: Mapping[str, Tensor], parts: list[torch.optim.Optimizer],
        owned: bool = True,
    ) -> None:  # fmt: skip
        """owned: learning rates are ours to set, and not those of another program's schedule."""
        self.name, self.weights, self.parts, self.owned = name, weights, parts, owned
        self.on_cpu = all(p.device.type == "cpu" for p in weights.values())

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return {p: state for part in self.parts for p, state in part.state.items()}

    def set_lr(self, lr: float) -> float:
        """Returns the learning rate of the step to come: this one, or what the other program has
        set, the largest of its groups.
        """
        groups = [group for part in self.parts for group in part.param_groups]
        if not self.owned:
            return max(float(group["lr"]) for group in groups)
        for group in groups:
            if isinstance(group["lr"], Tensor):  # torchao's, so that a new rate compiles nothing
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        return lr

    def step(self) -> None:
        # torchao compiles its step, which on a CPU takes seconds and wants a C++ compiler
        with torch.compiler.set_stance("force_eager") if self.on_cpu else nullcontext():
            for part in self.parts:
                part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def move(self, device: torch.device) -> None:
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim > 0:
                    state[name] = value.to(device)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the state by a weight's name, for torch.distributed.checkpoint, which loads them
        in place.
        """
        state = self.state
        return {name: self._stored(p, state[p]) for name, p in self.weights.items()}

    def _stored(self, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        moments = {name: value for name, value in state.items() if name != "step"}
        block = block_of(p.shape) if self.name == "adamw8bit" else None
        if block is None:
            return moments
        return {name: codes_and_scales(value, p, block) for name, value in moments.items()}

    def set_step(self, num_updates: int) -> None:
        """Sets the number of steps for Adam's bias correction, which is not stored."""
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(num_updates)


def build_optimizer(
    weights: Mapping[str, Tensor], config: OptimConfig, hidden: Mapping[str, Cuts],
    compute: torch.dtype,
) -> Optimizer:  # fmt: skip
    """weights: sharded; hidden: muon.hidden_matrices; compute: what Muon multiplies matrices in.

    Weight decay is on matrices only, not on norms and biases.
    """
    everything = list(weights.values())
    if config.name == "adamw":
        return Optimizer(config.name, weights, [adamw_of(everything, config)])
    if config.name == "adamw8bit":
        return Optimizer(config.name, weights, [adamw_8bit(everything, config)])
    matrices = [(p, hidden[name]) for name, p in weights.items() if name in hidden]
    rest = [p for name, p in weights.items() if name not in hidden]
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        parts.append(Muon(matrices, config.lr, config.muon_momentum, config.weight_decay, compute))
    if rest:
        parts.append(adamw_of(rest, config))
    return Optimizer(config.name, weights, parts)


class AdamW(torch.optim.AdamW):
    """torch's AdamW on the shards that this rank holds.

    A weight's step needs no other weight, so a DTensor has nothing to add to it. It would look for
    a sharding of each operation on each shape, for seconds in a process's first step, and ask
    Python before each one later.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            shards = [local(p) for p in params]
            adamw(
                shards,
                [local(p.grad) for p in params if p.grad is not None],
                exp_avgs=[local(state["exp_avg"]) for state in states],
                exp_avg_sqs=[local(state["exp_avg_sq"]) for state in states],
                max_exp_avg_sqs=[],
                state_steps=[state["step"] for state in states],
                foreach=False,  # it would hold the weights' sizes once more
                fused=any(shard.is_cuda for shard in shards),  # one kernel for many weights
                amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip


def adamw_of(params: list[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    groups = decay_groups(params, config.weight_decay)
    optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    for p in params:  # what the first step would make
        moments = {key: like_shard(torch.zeros_like(local(p)), p, p.shape) for key in MOMENTS}
        # where the weight is: the fused kernel of GPUs reads it
        optimizer.state[p] = {"step": torch.zeros((), device=local(p).device), **moments}
    return optimizer


def adamw_8bit(params: list[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    """torchao's AdamW8bit (Dettmers et al. 2021, arXiv 2110.02861) with blocks of our own.

    torchao cuts a shard into blocks from end to end, so that results depend on the number of ranks
    and a checkpoint fits no other. Here a block lies within a row of the weight.
    """
    show_package("torchao.optim")
    from torchao.optim import AdamW8bit  # takes a second

    groups = decay_groups(params, config.weight_decay)
    optimizer = AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    for p in params:
        moments = {key: zero_moment(p, signed=key == "exp_avg") for key in MOMENTS}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def decay_groups(params: list[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Groups the weights by their decay, and by their mesh (experts have their own): torch steps on
    those of a group together, which may not be of several meshes.
    """
    groups: dict[tuple[float, Any], list[Tensor]] = {}
    for p in params:
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        groups.setdefault((weight_decay if p.ndim >= 2 else 0.0, mesh), []).append(p)
    return [{"params": some, "weight_decay": decay} for (decay, _), some in groups.items()]


def block_of(shape: Sequence[int]) -> int | None:
    """Returns how many elements share a scale: the largest divisor of a row's up to 256; None:
    float32.
    """
    row = prod(shape[1:])
    if prod(shape) < LEAST_NUMEL:
        return None
    most = max(n for n in range(1, MOST_BLOCK + 1) if row % n == 0)
    return most if most >= LEAST_BLOCK else None


def zero_moment(p: Tensor, signed: bool) -> Tensor:
    """Sharded as the weight: codes of 8 bits and a scale per block, where its shape allows it."""
    from torchao.optim.subclass_8bit import OptimState8bit

    block, mine = block_of(p.shape), local(p)
    if block is None or mine.numel() == 0:
        return torch.zeros_like(p, requires_grad=False)
    zeros = OptimState8bit.zeros(mine.shape, signed, block, mine.device, dtype=p.dtype)
    return like_shard(zeros, p, p.shape)


def codes_and_scales(moment: Tensor, p: Tensor, block: int) -> dict[str, Tensor]:
    """The memory of an 8-bit moment as two tensors that are cut by rows, as the weight is.

    codes: p.shape, uint8; scales: (p.shape[0], blocks of a row) float32.
    """
    held, blocks = local(moment), prod(p.shape[1:]) // block
    if held.numel() == 0:  # more ranks than rows
        codes, scales = held.to(torch.uint8), held.new_empty(0, blocks)
    else:
        codes, scales = held.codes, held.scale.view(len(held), blocks)  # type: ignore[attr-defined]
    return {
        "codes": like_shard(codes, p, p.shape),
        "scales": like_shard(scales, p, torch.Size((p.shape[0], blocks))),
    }


def like_shard(held: Tensor, p: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of the whole shape, cut as `p` is, of which this rank holds `held`."""
    if not isinstance(p, DTensor):
        return held
    stride = [prod(shape[i + 1 :]) for i in range(len(shape))]
    whole = DTensor.from_local(
        held, p.device_mesh, p.placements, run_check=False, shape=shape, stride=tuple(stride)
    )
    # what is offloaded was taken to the mesh's device just now
    return whole if whole.device == held.device else whole.to(held.device)


def state_bytes(model: PreTrainedModel, parts: Parts, name: str) -> float:
    """Returns the bytes that the optimizer `name` keeps of all weights of a model."""
    hidden = hidden_matrices(model, decoder_layers(model), parts) if name == "muon" else {}
    return sum(
        p.numel() * bytes_per_element(p.shape, name, weight in hidden)
        for weight, p in model.named_parameters()
    )


def bytes_per_element(shape: Sequence[int], name: str, is_hidden: bool) -> float:
    block = block_of(shape) if name == "adamw8bit" else None
    if block is not None:
        return 2 * (1 + 4 / block)
    return 4.0 if is_hidden else 8.0


def check_optimizer(name: str, role: TrainConfig) -> None:
    """Checks that what the role keeps beside its weights is honoured with its other options."""
    optim, default = role.optim, OptimConfig()
    require(0 <= role.ema < 1, f"{name}.ema={role.ema} must be in [0, 1); 0: no average")
    require(
        optim.name in LABELS, f"{name}.optim.name={optim.name!r}: use one of {', '.join(LABELS)}"
    )
    require(
        role.ema == 0 or name == "actor",
        f"{name}.ema={role.ema} has no effect: an average is kept to be exported, and of a run's "
        "models the actor alone is",
    )
    require(
        not is_frozen(name) or optim.name == default.name,
        f"{name}.optim.name={optim.name!r} has no effect: it is not trained",
    )
    require(
        role.engine == "fsdp" or optim.name != "adamw8bit",
        f"{name}.optim.name='adamw8bit' does not go with {name}.engine='megatron', whose "
        "distributed optimizer has no 8-bit moments: use engine 'fsdp', or optim.name='adamw' or "
        "'muon'",
    )
    require(
        optim.name == "muon" or optim.muon_momentum == default.muon_momentum,
        f"{name}.optim.muon_momentum={optim.muon_momentum} has no effect with {name}.optim.name="
        f"{optim.name!r}: it is of 'muon'",
    )
    if optim.name == "adamw8bit":
        show_package("torchao.optim")
    require(
        optim.name != "adamw8bit" or importlib.util.find_spec("torchao") is not None,
        f"{name}.optim.name='adamw8bit', but torchao is not installed: pip install torchao",
    )


def check_same_optimizer(folder: Path, stored: Iterable[str], optimizer: Optimizer) -> None:
    """Raises ConfigError where a checkpoint's keys are of another optimizer than this run's."""
    mine: set[str] = set()
    for moments in optimizer.state_dict().values():
        for key, value in moments.items():
            mine |= set(value) if isinstance(value, dict) else {key}
    theirs = {key.rpartition(".")[2] for key in stored if key.startswith("moments.")}
    require_same_optimizer(folder, optimizer_of(theirs), optimizer_of(mine))


def require_same_optimizer(folder: Path, wrote: str, reads: str) -> None:
    if wrote != reads:
        raise ConfigError(
            f"{folder} was written with optim.name={wrote!r}, and this run has {reads!r}: set "
            f"optim.name={wrote!r}, or export the weights (python -m spmdrl.export) and start a "
            "run from that model"
        )


def optimizer_of(kept: set[str]) -> str:
    """Names the optimizer by the names of what it keeps of the weights. One that found nothing to
    keep in its own way is AdamW.
    """
    if "codes" in kept:
        return "adamw8bit"
    return "muon" if "momentum" in kept else "adamw"
