"""Gives megatron-core's gated delta net packed sequences, and a form that runs without its kernels.

A gated delta net (arXiv 2412.06464; Qwen3-Next, Qwen3.5) carries a state from token to token.
megatron-core's layer takes no packed sequences, and no CPU: it is built with flash-linear-attention
alone. This one has its parameters and its checkpoints, and computes as engine fsdp does: sequences
of like length are right-padded rows of a batch, so that no state goes from one sequence into the
next, and the functions are transformers', which take the kernels of flash-linear-attention and
causal-conv1d where these are installed.

Imported by functions alone, as megatron-core is.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from spmdrl.engines.fsdp.packed_rows import Pad, PaddedGroup, Unpad
from spmdrl.engines.megatron.splits import delta_sizes
from spmdrl.hub.transformers_compat import gated_delta_functions


def delta_net_spec() -> ModuleSpec:
    """Returns what stands in a layer in the place of its attention."""
    parts = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=HeadNorm, out_proj=RowParallelLinear
    )
    return ModuleSpec(module=PackedDeltaNet, submodules=parts)


class HeadNorm(nn.Module):
    """RMSNorm of each head, with one weight for all heads.

    Each tensor rank has heads of its own: the weight's gradient is summed over them here, whether
    tokens are cut over them or not.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()  # on a CPU by cpu_shim.scope()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = mappings.copy_to_tensor_model_parallel_region(self.weight)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(x.dtype)


class PackedDeltaNet(gated_delta_net.GatedDeltaNet):
    """megatron-core's GatedDeltaNet over packed sequences; see the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # it refuses to be built without kernels that this forward does without
        with mock.patch.object(gated_delta_net, "HAVE_FLA", True):
            super().__init__(*args, **kwargs)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None,
        packed_seq_params: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """hidden_states: (tokens of this tensor rank, 1, hidden_size) -> the same."""
        layout = getattr(packed_seq_params, "layout", None)
        if layout is None:
            raise ValueError("give the model packed_seq_params that packed_params() made")
        rows = self.in_proj(hidden_states)[0].squeeze(1)  # (all tokens, in_proj_dim / ranks)
        outs = [self._padded(rows, group) for group in layout.groups]
        return self.out_proj(sum(outs[1:], start=outs[0])[:, None])

    def _padded(self, rows: Tensor, group: PaddedGroup) -> Tensor:
        """Returns (tokens, value heads of this rank * d), 0 for the tokens of other groups."""
        padded = Pad.apply(rows, group)  # (num_seqs, length, in_proj_dim / ranks)
        qkv, gate, beta, alpha = padded.split(self._widths(), -1)
        values = self._delta_rule(qkv, beta, alpha)  # (num_seqs, length, heads, d)
        gate = gate.unflatten(-1, (-1, self.value_head_dim))
        out = (self.out_norm(values) * silu(gate.float())).to(values.dtype)
        return Unpad.apply(out.flatten(2), group, len(rows))

    def _widths(self) -> list[int]:
        sizes = {name: size // self.tp_size for name, size in delta_sizes(self.config).items()}
        return [sizes["q"] + sizes["k"] + sizes["v"], sizes["z"], sizes["b"], sizes["a"]]

    def _delta_rule(self, qkv: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        convolve, delta_rule = gated_delta_functions()
        keys = self.qk_dim // self.tp_size
        mixed = convolve(
            qkv.transpose(1, 2), self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu"
        )
        query, key, value = mixed.transpose(1, 2).split(
            [keys, keys, self.v_dim // self.tp_size], -1
        )
        query, key = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (query, key))
        times = self.num_value_heads // self.num_key_heads
        if times > 1:
            query, key = (x.repeat_interleave(times, dim=2) for x in (query, key))
        values, _ = delta_rule(
            query, key, value.unflatten(-1, (-1, self.value_head_dim)),
            g=-self.A_log.float().exp() * softplus(alpha.float() + self.dt_bias),
            beta=beta.sigmoid(), initial_state=None, output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return values
