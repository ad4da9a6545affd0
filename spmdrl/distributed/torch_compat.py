"""The private APIs of torch and torch.distributed that spmdrl reads, each behind one function.

Checked with torch 2.13.0. When torch moves, tests/distributed/test_torch_compat.py says
which of these broke;
tests/test_private_apis.py keeps private names of torch out of every other module. The launcher's
are in elastic_compat.py, and those of the kernels, which import nothing of spmdrl, in
kernels/spmdrl_kernels/torch_compat.py.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._C._distributed_c10d import ErrorType, _ProcessGroupWrapper
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# A base class for modes that see every operator (torch.utils._python_dispatch); documented as an
# extension point, but under a private name.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

# namespace::operator of the products whose results are worth their memory, as the dispatcher calls
# them; those that are not installed never come by
PRODUCTS = frozenset({
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm",
    "aten::_scaled_mm", "mkldnn::_linear_pointwise",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn", "flash_attn::_flash_attn_varlen_forward",
})  # fmt: skip
VARLEN = "torch.nn.attention.varlen"  # registers the operators torch_attn::
# (module, name) of the private names that the pickled index of torch.distributed.checkpoint holds
CHECKPOINT_INDEX_NAMES = frozenset({
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
})  # fmt: skip


# ---- process groups and the store


@contextmanager
def beside_checkpointing() -> Iterator[None]:
    """Meanwhile activation checkpointing sees nothing of what is computed.

    Inside a checkpointed layer it would count the tensors that are saved for a backward pass, and
    "selective" keeps the products for its recomputation. Uses _disable_current_modes.
    """
    as_it_is = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with as_it_is, _disable_current_modes():
        yield


def default_store() -> Any:
    """Returns the store by which the ranks met. Calls on one connection to it block each other: who
    waits in it takes a `clone()`. Reads distributed_c10d._get_default_store.
    """
    return c10d._get_default_store()


def process_groups() -> list[dist.ProcessGroup]:
    """Returns this process's groups, in the order in which they were made. Reads
    distributed_c10d._world.pg_map.
    """
    return list(c10d._world.pg_map)


def nccl_errors() -> list[str]:
    """Returns in words which of this process's NCCL communicators have failed, and how (TIMEOUT,
    COMM_ERROR, REMOTE_ERROR); [] while all are well. Reads ProcessGroup._device_types and
    _get_backend, and ProcessGroupNCCL.get_error, which torch's own watchdog of NCCL sets. With
    TORCH_DISTRIBUTED_DEBUG=DETAIL a _ProcessGroupWrapper of the same name, whose get_error raises,
    stands before that: reads its wrapped_pg.
    """
    found = []
    for group in process_groups():
        for device in (kind for kind in group._device_types if kind.type == "cuda"):
            backend = group._get_backend(device)  # gloo, in a group without NCCL
            if isinstance(backend, _ProcessGroupWrapper):
                backend = backend.wrapped_pg
            error = backend.get_error() if backend.name() == "nccl" else ErrorType.SUCCESS
            if error != ErrorType.SUCCESS:
                ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
                found.append(f"{error.name} in the group of ranks {ranks}")
    return found


def group_count() -> int:
    """Returns the counter by which torch names the next process group. Reads
    distributed_c10d._world.group_count.
    """
    return c10d._world.group_count


def set_group_count(count: int) -> None:
    """Sets the counter by which torch names the next process group. Writes
    distributed_c10d._world.group_count.
    """
    c10d._world.group_count = count


def default_group() -> dist.ProcessGroup:
    """Returns the group that torch.distributed takes where none is given. Reads
    distributed_c10d._get_default_group.
    """
    return c10d._get_default_group()


def set_default_group(group: dist.ProcessGroup) -> None:
    """Makes the group the one that torch.distributed takes where none is given, and numbers its
    ranks from 0. Calls distributed_c10d._update_default_pg.
    """
    c10d._update_default_pg(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns how long a collective of the group may take. Reads ProcessGroup._device_types and
    _get_backend, and the backend's options._timeout.
    """
    device = "cpu" if torch.device("cpu") in group._device_types else "cuda"
    return group._get_backend(torch.device(device)).options._timeout


@contextmanager
def default_time_limit(limit: timedelta) -> Iterator[None]:
    """Meanwhile a process group that is made without a time limit gets this one, in place of
    torch's 10 minutes for NCCL and 30 for gloo: libraries give none. Writes
    distributed_c10d.default_pg_timeout and default_pg_nccl_timeout.
    """
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit
    try:
        yield
    finally:
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


@contextmanager
def unbound_default_group() -> Iterator[None]:
    """Meanwhile new groups are made apart from the default group, also where a host's program has
    bound that to a device (`init_process_group(device_id=...)`).

    Of a bound group torch splits the communicators of new groups, which every rank must call; the
    members of a gloo group do not, so the ranks outside of it would wait for ever
    (pytorch#145376). Writes ProcessGroup.bound_device_id.
    """
    group = c10d._get_default_group()
    device = group.bound_device_id
    if device is None:
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def mesh_of_groups(
    device_type: str, ranks: Tensor, names: tuple[str, ...], groups: Sequence[Any]
) -> DeviceMesh:
    """Returns a mesh over process groups that exist.

    ranks: of the job, one axis for each name. groups: this rank's group along each axis; not read
    on a rank outside of `ranks`. Calls DeviceMesh with _init_backend=False there, which makes no
    groups; elsewhere DeviceMesh.from_group.
    """
    if dist.get_rank() in ranks:
        return DeviceMesh.from_group(list(groups), device_type, ranks, mesh_dim_names=names)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def local_shape_and_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's part of a DTensor and where in the full tensor it begins.
    Calls torch.distributed.tensor._utils.compute_local_shape_and_global_offset.
    """
    return compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)


def storage_info(path: str, offset: int, length: int) -> Any:
    """Returns what the index of torch.distributed.checkpoint says of where a value is stored:
    `length` bytes from `offset` on in the file. Makes a checkpoint.filesystem._StorageInfo.
    """
    return filesystem._StorageInfo(path, offset, length)


# ---- tensors, modules, optimizers


def storage_id(tensor: Tensor) -> int:
    """Returns a number that tensors have in common if and only if they share a storage; it stays
    where a storage is emptied and filled again, and tensors on "meta" have one too. Reads
    UntypedStorage._cdata.
    """
    return tensor.untyped_storage()._cdata


def set_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    """Puts a parameter in the place of another without a check of its class. Writes
    nn.Module._parameters.
    """
    module._parameters[name] = parameter


def set_child(module: nn.Module, name: str, child: nn.Module) -> None:
    """Puts a module in the place of another; its parent's __setattr__ is not asked. Writes
    nn.Module._modules.
    """
    module._modules[name] = child


def copy_with(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter] | None = None,
    children: Mapping[str, nn.Module] | None = None,
) -> Any:
    """Returns a copy of the module with other parameters (these alone), or with some of its
    children replaced; the module keeps its own. Writes nn.Module._parameters and _modules of the
    copy.
    """
    made = copy.copy(module)
    if parameters is not None:
        made._parameters = dict(parameters)
    if children is not None:
        made._modules = {**module._modules, **children}
    return made


def forget_pass(root: Any) -> None:
    """Brings an FSDP2 root back to where a pass can begin, after an exception within one: weights
    are shards, and no gradients of earlier micro-batches are left. Clears
    FSDPParam.unsharded_accumulated_grad and the gradient of FSDPParam._unsharded_param, which
    reset_iter_state says to discard and does not in torch 2.13. Reads FSDPState._is_root, which is
    None before the first pass: then there is nothing to forget, and reset_iter_state would fail.
    """
    if root._get_fsdp_state()._is_root is None:
        return
    root.reset_iter_state()
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for held in group.fsdp_params:
                    held.unsharded_accumulated_grad = None
                    if hasattr(held, "_unsharded_param"):  # from the first gather on
                        held._unsharded_param.grad = None


def fsdp_settings(unit: FSDPModule) -> tuple[MixedPrecisionPolicy, list[float | None]]:
    """Returns the mixed precision of an FSDP2 unit, and by what it divides the gradients of each of
    its groups of parameters (None: by the number of ranks). Reads FSDPState._mp_policy and
    FSDPParamGroup.gradient_divide_factor.
    """
    state = unit._get_fsdp_state()
    return state._mp_policy, [g.gradient_divide_factor for g in state._fsdp_param_groups]


def is_compiled(module: nn.Module) -> bool:
    """Returns whether module.compile() was called. Reads nn.Module._compiled_call_impl."""
    return module._compiled_call_impl is not None


def adam_(**settings: Any) -> None:
    """Does Adam's step in place on lists of tensors, with the arguments of torch.optim.Adam's
    functional form. Calls torch.optim._functional.adam.
    """
    torch.optim._functional.adam(**settings)


def has_amx_tiles() -> bool:
    """Returns whether the processor has AMX tiles. Calls torch.cpu._is_amx_tile_supported."""
    return torch.cpu._is_amx_tile_supported()


# ---- flash attention over sequences of any length


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, row: Any, scale: float | None, window: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output, log-sum-exp (heads, queries) in float32 and the state that the backward pass
    wants. Calls torch.ops.torch_attn._varlen_attn, as torch.nn.attention.varlen.varlen_attn does.

    q: (queries, heads, d); k, v: (keys, kv_heads, d); row: where the sequences begin, a VarlenRow;
    window: tokens that a query sees to its left, -1 for all, and to its right.
    """
    importlib.import_module(VARLEN)
    return torch.ops.torch_attn._varlen_attn(
        q, k, v, row.cu_queries, row.cu_keys, row.max_queries, row.max_keys, window == (-1, 0),
        scale, list(window), q.shape[1] != k.shape[1],
    )  # fmt: skip


def varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Tensor,
    row: Any, scale: float | None, window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v. Calls torch.ops.torch_attn._varlen_attn_backward, which
    makes the probabilities anew from `lse`.
    """
    importlib.import_module(VARLEN)
    return torch.ops.torch_attn._varlen_attn_backward(
        grad, q, k, v, out, lse, row.cu_queries, row.cu_keys, row.max_queries, row.max_keys,
        window == (-1, 0), state, scale, list(window),
    )  # fmt: skip
