"""Another program's causal language model as a policy, for the duration of our passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from spmdrl.engines.fsdp import attention
from spmdrl.engines.fsdp.model import TokenPolicy, noise_of
from spmdrl.engines.fsdp.optimizers import Optimizer
from spmdrl.hub.transformers_compat import attention_name, set_attention_name


@dataclass
class HostedPolicy:
    """A host's model in the place of a TokenPolicy.

    A policy reads hidden states and the head's weight. FSDP2 gathers weights in hooks around the
    forward of a unit, and the host's outermost unit is its model. So `module` calls the host's
    model, whose forward is the policy's while `driven` is active.
    """

    hf: PreTrainedModel
    optimizer: Optimizer  # around the host's
    loss_scale: float  # by what the host's sharding divides gradients
    attention: str = attention.NAME  # of packed sequences, as transformers knows it
    module: TokenPolicy = field(init=False)

    def __post_init__(self) -> None:
        self.module = TokenPolicy(self.hf)
        self.own_forward = self.module.forward
        self.module.forward = self.hf.__call__  # type: ignore[method-assign]

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        """Runs TokenPolicy.forward. A head that is a unit of its own is not called: it is gathered
        here, and FSDP2 reduces its gradients at the end of the backward pass.
        """
        head = self.hf.get_output_embeddings()
        if isinstance(head, FSDPModule):
            head.unshard()
        return self.own_forward(*args)

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Around our passes: packed attention, no noise, and training mode, in which activation
        checkpointing works. Afterwards all of it is as the host has it.
        """
        with ExitStack() as undo:
            for part in self.hf.modules():
                changed(undo, part, "training", True)
            for part, name, _ in noise_of(self.hf):
                changed(undo, part, name, 0.0)
            for config in configs_of(self.hf):
                undo.callback(set_attention_name, config, attention_name(config))
                set_attention_name(config, self.attention)
            own = vars(self.hf)
            if "forward" in own:  # the host has wrapped it
                undo.callback(setattr, self.hf, "forward", own["forward"])
            else:
                undo.callback(delattr, self.hf, "forward")
            self.hf.forward = self.forward
            yield


def changed(undo: ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Sets an attribute until `undo` is closed."""
    before = getattr(module, name)
    if before != value:
        undo.callback(setattr, module, name, before)
        setattr(module, name, value)


def configs_of(hf: nn.Module) -> list[PreTrainedConfig]:
    """Returns the configs by which the model's modules find their attention, each once."""
    found = (getattr(module, "config", None) for module in hf.modules())
    return list({id(c): c for c in found if isinstance(c, PreTrainedConfig)}.values())
