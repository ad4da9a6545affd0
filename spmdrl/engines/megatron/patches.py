"""Patches what megatron-core 0.16.1 needs on any device where TransformerEngine and Apex are
missing.

Does nothing where they are.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from spmdrl.distributed.torch_compat import adam_


def install(adam: bool = True) -> None:
    """Idempotent. adam: also what optimizers are made of; not in a program that has its own."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    # the router reads a name that only an import of TransformerEngine defines
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    # says that TransformerEngine exists although its names are None
    mla: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    mla.HAVE_TE = False
    if adam and importlib.util.find_spec("apex") is None:
        use_fused_adam()


def use_fused_adam() -> None:
    """The distributed optimizer's checkpoints work only with Apex's or TransformerEngine's Adam."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    sharded: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer.Adam = sharded.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    sharded.HAVE_APEX_OR_TE = sharded.USING_APEX_OPTIMIZER = True


class FusedAdam(torch.optim.Optimizer):
    """Stands in for Apex's FusedAdam: `step` is kept in the parameter group, not per tensor."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, adam_w_mode: bool = True,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            on_gpu = any(p.is_cuda for p in params)
            adam_(
                params=params, grads=[p.grad for p in params],
                exp_avgs=[self.state[p]["exp_avg"] for p in params],
                exp_avg_sqs=[self.state[p]["exp_avg_sq"] for p in params], max_exp_avg_sqs=[],
                state_steps=[torch.tensor(group["step"] - 1.0) for _ in params], foreach=on_gpu,
                amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                decoupled_weight_decay=group["adam_w_mode"],
            )  # fmt: skip
