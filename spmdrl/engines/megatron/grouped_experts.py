"""The experts of a Megatron layer, with one grouped product per matrix and no loop over them.

megatron-core 0.16.1 groups products by packages that need CUDA (grouped_gemm, TransformerEngine)
and then keeps all experts in one parameter. Here each expert's parameters are those of
megatron-core's SequentialMLP, under its names, so that weight sync, checkpoints, exports, Muon and
adapters see no difference. Only the products are computed together, by torch's grouped_mm.

To be imported after cpu_shim.install(), as it imports megatron.core.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

ALIGNMENT = 16  # bytes: what the rows of a matrix are multiples of in the kernels for GPUs
CAPABILITY = (8, 0)  # of the first CUDA GPUs with these kernels


class GroupedExperts(SequentialMLP):
    """The experts that lie on this rank, computed together where that is possible.

    They are computed one after the other where their layers have adapters, where there is one
    expert or no token, and on GPUs where the kernels do not take the dtype or the width.
    """

    def forward(
        self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """Returns the experts' outputs, (tokens, hidden), each times its probability, and no bias
        that the caller would have to add.

        rows: (tokens, hidden), ordered by expert; tokens_per_expert: (experts here,) int64;
        probs: (tokens,) float32.
        """
        first, second = self.local_experts[0].linear_fc1, self.local_experts[0].linear_fc2
        if (
            len(self.local_experts) == 1
            or len(rows) == 0
            or any(has_adapters(expert) for expert in self.local_experts)
            or not can_group(rows, first.weight, second.weight)
        ):
            output, _ = super().forward(rows, tokens_per_expert, probs)
            return output, None
        counts = tokens_per_expert.to(rows.device)
        output, bias = MlpOfAll(self.local_experts, counts, len(rows))(rows, probs)
        if bias is not None:
            output = (output + bias * probs.unsqueeze(-1)).to(output.dtype)
        return output, None


def has_adapters(expert: Any) -> bool:
    """Says whether lora.py hangs adapters on a linear layer of this MLP."""
    return hasattr(expert.linear_fc1, "adapters") or hasattr(expert.linear_fc2, "adapters")


def can_group(rows: Tensor, *weights: Tensor) -> bool:
    """Says whether grouped_mm takes these: on a CPU everything; on a GPU bfloat16, from compute
    capability 8.0 on, and matrices whose rows are multiples of 16 bytes.

    rows: (tokens, in); weights: of one expert, (out, in) each.
    """
    if rows.device.type == "cpu":
        return True
    sizes = {size for weight in weights for size in weight.shape}
    return (
        all(tensor.dtype == torch.bfloat16 for tensor in (rows, *weights))
        and not any(size * rows.element_size() % ALIGNMENT for size in sizes)
        and (
            torch.version.hip is not None
            or torch.cuda.get_device_capability(rows.device) >= CAPABILITY
        )
    )


class MlpOfAll:
    """megatron-core's MLP with the linear layers of all experts of a rank.

    The forward pass is MLP's own, so that activation, limits and probabilities are those of one
    expert. The bias of the second layer is returned for each token, (tokens, hidden), or as None.
    """

    def __init__(self, experts: Any, counts: Tensor, num_rows: int) -> None:
        """experts: MLPs of one kind; counts: (experts,) int64, tokens of each, on their device;
        num_rows: of all, which the device need not be asked for."""
        self.config, self.activation_func = experts[0].config, experts[0].activation_func
        self.linear_fc1 = LinearOfAll([expert.linear_fc1 for expert in experts], counts, num_rows)
        self.second = LinearOfAll([expert.linear_fc2 for expert in experts], counts, num_rows)

    def __call__(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        output, _ = MLP.forward(self, rows, per_token_scale=probs)
        return output, self.second.bias_of_rows()

    def linear_fc2(self, rows: Tensor) -> tuple[Tensor, None]:
        # MLP would take a bias for one that all tokens have
        return self.second.products(rows), None


class LinearOfAll:
    """A linear layer of each of a rank's experts, for rows that are ordered by expert."""

    def __init__(self, layers: list[Any], counts: Tensor, num_rows: int) -> None:
        self.weights = [layer.weight for layer in layers]  # (out, in) each
        self.biases = [] if layers[0].bias is None else [layer.bias for layer in layers]
        self.counts, self.num_rows = counts, num_rows
        self.ends = counts.cumsum(0).to(torch.int32)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the products, (tokens, out), and the bias due to each of them, or None."""
        return self.products(rows), self.bias_of_rows()

    def products(self, rows: Tensor) -> Tensor:
        found: Tensor = GroupedProduct.apply(rows, self.ends, *self.weights)
        return found

    def bias_of_rows(self) -> Tensor | None:
        if not self.biases:
            return None
        each = torch.stack(self.biases)
        return each.repeat_interleave(self.counts, dim=0, output_size=self.num_rows)


class GroupedProduct(torch.autograd.Function):
    """rows (tokens, in), ends (experts,) int32, weights (out, in) of each -> (tokens, out).

    The weights are stacked for the product and again in the backward pass, so that no second copy
    of a model's experts is kept between the two.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return grouped_mm(rows, torch.stack(weights).mT, offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        of_rows = None
        of_weights: tuple[Tensor | None, ...] = (None,) * len(weights)
        if ctx.needs_input_grad[0]:
            of_rows = grouped_mm(grad, torch.stack(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            found = grouped_mm(grad.mT, rows, offs=ends)
            # of an expert without tokens, whatever a kernel leaves there
            found.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
            of_weights = found.unbind()
        return of_rows, None, *of_weights
