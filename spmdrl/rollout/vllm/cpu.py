"""Sets up what vLLM needs on a CPU and not on a GPU. Nothing here is called where the device is
CUDA.

Changes to vLLM are made around one construction and taken back, or on one object of one engine.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from spmdrl_kernels.linear import linear
from torch import Tensor, nn

from spmdrl.config import ConfigError
from spmdrl.rollout.base import WeightMismatch
from spmdrl.rollout.draw import support_of
from spmdrl.rollout.rng import mix
from spmdrl.rollout.vllm import compat

FP8_ROWS = 5  # from so many on, a row of a product in FP8 does not depend on the others
NOT_TO_BE_READ = ("llvmlite.binding.ffi",)  # its `lib` answers __dict__ with a function


def unlink_shared_memory() -> None:
    """Unlinks the shared memory of the tensor-parallel groups that were built: all ranks have
    mapped it, and keep it so.

    vLLM would leave its names in /dev/shm behind, 4 MiB for each rank. To be called before the
    environment is what it was: VLLM_DIST_IDENT, by which vLLM names the memory, is vLLM's own.
    """
    mine = os.environ.get("VLLM_DIST_IDENT")
    for path in Path("/dev/shm").glob(f"{glob.escape(mine)}-*-cpushm_*") if mine else ():
        path.unlink(missing_ok=True)


@contextmanager
def patched_construction() -> Iterator[None]:
    """While an engine is built: linear layers and experts keep their weights.

    vLLM would repack each weight for its GEMM and free the original. An update in place then has
    nothing to write to, or writes what is not read in the order it is written; and a tied lm_head
    goes on using the packed copy of the old embedding.
    The worker binds the process's memory to one NUMA node: not so, the trainer lives in it too.
    And it replaces `torch.set_num_threads` by a no-op: taken back.
    It reads vars() of everything in every module, which fails on a module that numba imports.
    """
    from vllm.model_executor.kernels.linear.scaled_mm import cpu as kernels
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts: Any = cpu_moe.CPUUnquantizedExperts
    process_experts = experts.process_weights_after_loading
    classes: Any = (kernels.CPUFp8BlockScaledMMKernel, kernels.CPUFp8W8A8BlockScaledMMKernel)
    pack, set_num_threads = utils.dispatch_cpu_unquantized_gemm, torch.set_num_threads
    library = compat.cpu_operators()
    compat.use_unpacked_convolutions()
    bind_memory = library.init_cpu_memory_env

    def keep(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.ndim == 3 and weight.shape[1] == 1:  # of a convolution, which stays as it is too
            return
        if weight.is_meta or weight.ndim != 2:
            pack(layer, remove_weight)
        else:
            layer.cpu_linear = linear_by_row

    fp8 = {kernel: kernel.process_weights_after_loading for kernel in classes}
    utils.dispatch_cpu_unquantized_gemm = keep
    experts.process_weights_after_loading = keep_experts
    for kernel in fp8:
        kernel.process_weights_after_loading = keep_fp8
    library.init_cpu_memory_env = lambda nodes: None
    of_numba = {name: sys.modules.pop(name) for name in NOT_TO_BE_READ if name in sys.modules}
    try:
        yield
    finally:
        unlink_shared_memory()
        utils.dispatch_cpu_unquantized_gemm = pack
        experts.process_weights_after_loading = process_experts
        for kernel, process in fp8.items():
            kernel.process_weights_after_loading = process
        library.init_cpu_memory_env = bind_memory
        torch.set_num_threads = set_num_threads
        sys.modules.update(of_numba)


def linear_by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, (..., in) -> (..., out), each row the same bits whatever the others are.

    oneDNN's products are so from two rows on; a single one takes another path, so it gets company.
    """
    if x.ndim != 2:
        return linear_by_row(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
    if x.shape[0] == 1:
        return linear(x.expand(2, -1).contiguous(), weight, bias)[:1]
    return linear(x, weight, bias)


def keep_fp8(kernel: Any, layer: Any) -> None:
    """Stands in for a block FP8 kernel's process_weights_after_loading.

    The layer keeps its weight as (out, in) and its scales; the product packs it as it goes. vLLM
    has the flag for layers whose weight somebody else reads too.
    """
    compat.keep_unpacked(layer)
    product = kernel.apply_weights

    def by_row(layer: Any, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Fewer than five rows would take another path and get other bits."""
        missing = FP8_ROWS - x.shape[0]
        if missing <= 0 or x.ndim != 2:
            return product(layer, x, bias, **kwargs)
        return product(layer, nn.functional.pad(x, (0, 0, 0, missing)), bias, **kwargs)[:-missing]

    kernel.apply_weights = by_row


def keep_experts(kernel: Any, layer: Any) -> None:
    """Stands in for process_weights_after_loading of a layer's experts.

    The layer keeps w13_weight and w2_weight as they are written, so that they can be written again
    and compared. vLLM's kernel reads copies in an order of its own, which `repack_experts` renews.
    """
    whole_layer = layer.expert_map is None  # else other ranks have experts of it
    if whole_layer and compat.use_zentorch(kernel, layer):  # AMD's reads the weights as they are
        return
    product, kernel.packed = kernel.apply, []

    def from_copies(**kwargs: Any) -> None:
        chosen = {} if whole_layer else own_experts(**kwargs)
        product(**{**kwargs, **chosen, "w1": kernel.packed[0], "w2": kernel.packed[1]})

    kernel.apply = from_copies
    kernel.process_weights_after_loading = partial(repack, kernel)
    repack(kernel, layer)


def own_experts(
    expert_map: Tensor, topk_ids: Tensor, topk_weights: Tensor, **_: Any
) -> dict[str, Tensor]:
    """Returns the choices of tokens by this rank's experts, 0 its first; those of other ranks'
    experts have weight 0. vLLM's kernel for CPUs does not look at the map.

    expert_map: of each expert of the layer its number here, -1 where another rank has it.
    """
    number = expert_map[topk_ids]
    return {
        "topk_ids": number.clamp(min=0).to(topk_ids.dtype),
        "topk_weights": topk_weights.masked_fill(number < 0, 0.0),
    }


def repack(kernel: Any, layer: Any) -> None:
    weights = [padded_experts(kernel, layer, name) for name in ("w13_weight", "w2_weight")]
    kernel.packed = kernel.packed or [torch.empty_like(weight) for weight in weights]
    for weight, copy in zip(weights, kernel.packed, strict=True):
        compat.pack_experts(weight, copy, kernel)


def padded_experts(kernel: Any, layer: Any, name: str) -> Tensor:
    """(experts, 2 * width, hidden) or (experts, hidden, width), with zeros up to the kernel's unit
    of the width."""
    weight = getattr(layer, name).data
    width = layer.w2_weight.shape[-1]
    missing = compat.padded_width(kernel) - width
    if not missing:
        return weight
    if kernel.w1_bias is not None:
        raise ConfigError(
            f"rollout.engine='vllm' on a CPU: experts with a bias and {width} columns on a rank, "
            "which would be padded, are not supported; use rollout.engine='hf'"
        )
    if name == "w2_weight":
        return nn.functional.pad(weight, (0, missing))
    halves = weight.unflatten(1, (2, width))  # gate and up
    return nn.functional.pad(halves, (0, 0, 0, missing)).flatten(1, 2)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(name, kernel, layer) of the experts that have copies."""
    for name, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(kernel.fused_experts, "packed"):
            yield name, kernel.fused_experts, layer


def repack_experts(model: nn.Module) -> None:
    for _, kernel, layer in experts_of(model):
        repack(kernel, layer)


def check_experts(model: nn.Module) -> None:
    """Raises WeightMismatch where experts are computed from other than the layer's weights."""
    for name, kernel, layer in experts_of(model):
        used = [copy.clone() for copy in kernel.packed]
        repack(kernel, layer)
        if not all(map(torch.equal, used, kernel.packed)):
            raise WeightMismatch(f"the experts of {name} are computed from older weights")


class AddressedNoise:
    """Sampling noise made from (seed of the request, length of its sequence), in one operation.

    vLLM keeps a torch.Generator per request instead: a Python call per row and step, and an error
    ("CPU Generator does not use offset") where a prompt is prefilled in more than one chunk.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.seeds: dict[str, int] = {}  # by request id, of those that go on
        self.row_ids: list[str] = []
        self.row_seeds = torch.empty(0, dtype=torch.int64)
        # (width,) by request id, as draw.support_of gives them: of those whose ids are recorded,
        # that of the token which was drawn last
        self.supports: dict[str, np.ndarray] = {}
        self.num_drafted: Tensor | int = 0  # by row, tokens behind its sequence that are proposed
        self.log_softmax = partial(torch.log_softmax, dim=-1)  # strict.py has another
        runner.sampler.topk_topp_sampler.forward = self.draw

    def draw(
        self, logits: Tensor, generators: Any, top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """logits: (num_seqs, vocab) float32 -> tokens (num_seqs,), logprobs (num_seqs, vocab).

        Stands in for TopKTopPSampler.forward. Row i belongs to the i-th request of the batch.
        """
        logits = compat.mask_top_k_top_p(logits, top_k, top_p)
        logprobs = self.log_softmax(logits.float())
        if self.supports:
            self.note_supports(logprobs)
        tokens = compat.gumbel_argmax(logits, mix(self.addresses() + self.num_drafted))
        return tokens, logprobs

    def note_supports(self, logprobs: Tensor) -> None:
        ids = self.runner.input_batch.req_ids
        rows = [row for row, id in enumerate(ids) if id in self.supports]
        if not rows:
            return
        width = len(self.supports[ids[rows[0]]])
        found = support_of(logprobs[rows], width).numpy()
        self.supports |= {ids[row]: support for row, support in zip(rows, found, strict=True)}

    def addresses(self) -> Tensor:
        """Returns the address of the noise of each request's next token, (num_seqs,) int64. That of
        the k-th token behind it is larger by k.
        """
        batch = self.runner.input_batch
        if batch.req_ids != self.row_ids:
            self.row_ids = list(batch.req_ids)
            self.row_seeds = mix(torch.tensor([self.seeds[id] for id in self.row_ids]))
        return self.row_seeds + torch.from_numpy(batch.num_tokens_no_spec[: len(self.row_ids)])


def gather_only_sampled(runner: Any) -> None:
    """Replaces, on this engine's sampler, a top-k of zero and the rank of the sampled token by
    nothing: vLLM computes both per step, the rank through torch.compile (6 s at first use)."""

    def gather(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        assert num_logprobs == 0
        ids = token_ids.unsqueeze(-1)  # (num_seqs, 1)
        ranks = torch.zeros_like(token_ids)
        return compat.logprobs_tensors(ids.to(torch.int32), logprobs.gather(-1, ids), ranks)

    runner.sampler.gather_logprobs = gather
