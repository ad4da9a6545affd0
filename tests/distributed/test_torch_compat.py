"""What spmdrl reads of torch's internals: a test that fails names what torch has moved."""

import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from spmdrl_kernels.torch_compat import copy_tensors_, onednn_linear
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from spmdrl.distributed import torch_compat


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[Any]:
    """The default group, of this process alone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Operators(torch_compat.TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


# ---- process groups and the store


def test_torch_still_gives_the_store_of_the_default_group() -> None:
    connection = torch_compat.default_store().clone()
    connection.set("torch_compat", "said")
    assert torch_compat.default_store().get("torch_compat") == b"said"


def test_torch_still_tells_the_errors_of_nccl(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is a stand-in, as torch for CPUs has none; groups of gloo are asked nothing."""
    errors = torch_compat.ErrorType
    assert {"SUCCESS", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"} <= {*errors.__members__}
    assert torch_compat.nccl_errors() == []
    failed, well = group_of_nccl(errors.COMM_ERROR), group_of_nccl(errors.SUCCESS)
    ranks = dist.distributed_c10d._world.pg_group_ranks
    monkeypatch.setitem(ranks, failed, {4: 0, 6: 1})
    monkeypatch.setattr(torch_compat, "process_groups", lambda: [world, well, failed])
    assert torch_compat.nccl_errors() == ["COMM_ERROR in the group of ranks 4, 6"]


def test_torch_still_says_what_it_wraps_to_find_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: the wrapper's error would look like that of a lost store."""
    level, refused = dist.get_debug_level(), "does not support getError"
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        wrapper: Any = dist.new_group([0])._get_backend(torch.device("cpu"))
    finally:
        dist.set_debug_level(level)
    with pytest.raises(RuntimeError, match=refused):
        wrapper.get_error()
    assert isinstance(wrapper.wrapped_pg, dist.ProcessGroupGloo)
    group = group_of_nccl(torch_compat.ErrorType.SUCCESS)
    before = Mock(spec=type(wrapper), wrapped_pg=group._get_backend(torch.device("cuda")))
    before.name.return_value, before.get_error.side_effect = "nccl", RuntimeError(refused)
    monkeypatch.setattr(group, "_get_backend", lambda device: before)
    monkeypatch.setattr(torch_compat, "process_groups", lambda: [group])
    assert torch_compat.nccl_errors() == []


def group_of_nccl(error: Any) -> Any:
    """A stand-in for a group of "cpu:gloo,cuda:nccl"."""
    backends = {
        "cuda": Mock(**{"name.return_value": "nccl", "get_error.return_value": error}),
        "cpu": dist.group.WORLD,
    }
    return Mock(
        _device_types=[torch.device(kind) for kind in backends],
        _get_backend=lambda device: backends[device.type],
    )


def test_torch_still_lists_its_process_groups_in_pg_map() -> None:
    before = torch_compat.process_groups()
    made = dist.new_group([0], backend="gloo")
    assert torch_compat.process_groups() == [*before, made]
    dist.destroy_process_group(made)
    assert torch_compat.process_groups() == before


def test_torch_still_names_groups_by_its_group_count() -> None:
    first = torch_compat.group_count()
    torch_compat.set_group_count(first + 40)
    made = dist.new_group([0], backend="gloo")
    assert made.group_name == str(first + 40)
    assert torch_compat.group_count() == first + 41
    dist.destroy_process_group(made)


def test_torch_still_lets_another_group_be_the_default_one(world: Any) -> None:
    made = dist.new_group([0], backend="gloo")
    assert torch_compat.default_group() is world
    torch_compat.set_default_group(made)
    assert torch_compat.default_group() is dist.group.WORLD is made
    torch_compat.set_default_group(world)
    assert dist.group.WORLD is world
    dist.destroy_process_group(made)


def test_torch_still_keeps_a_groups_timeout_in_its_backends_options() -> None:
    made = dist.new_group([0], backend="gloo", timeout=timedelta(seconds=77))
    assert torch_compat.timeout_of(made) == timedelta(seconds=77)
    dist.destroy_process_group(made)


def test_torch_still_reads_the_default_time_limits_when_a_group_is_made() -> None:
    with torch_compat.default_time_limit(timedelta(seconds=77)):
        made = dist.new_group([0], backend="gloo")
    later = dist.new_group([0], backend="gloo")
    assert torch_compat.timeout_of(made) == timedelta(seconds=77)
    assert torch_compat.timeout_of(later) == timedelta(minutes=30)
    for group in (made, later):
        dist.destroy_process_group(group)


def test_torch_still_lets_a_group_be_unbound_from_its_device(world: Any) -> None:
    device = torch.device("cuda", 0)
    world.bound_device_id = device
    try:
        with torch_compat.unbound_default_group():
            assert world.bound_device_id is None
            made = dist.new_group([0], backend="gloo")  # bound, it would be split off
        assert world.bound_device_id == device
    finally:
        world.bound_device_id = None
    dist.destroy_process_group(made)


def test_torch_still_makes_meshes_over_groups_that_exist(world: Any) -> None:
    inner = dist.new_group([0], backend="gloo")
    mesh = torch_compat.mesh_of_groups("cpu", torch.tensor([[0]]), ("dp", "tp"), [world, inner])
    assert mesh.get_group("dp") is world and mesh.get_group("tp") is inner
    assert mesh["tp"].get_group() is inner
    before = torch_compat.process_groups()
    elsewhere = torch_compat.mesh_of_groups("cpu", torch.tensor([[3, 4]]), ("dp", "tp"), [])
    assert elsewhere.mesh.tolist() == [[3, 4]] and elsewhere.shape == (1, 2)
    assert torch_compat.process_groups() == before
    dist.destroy_process_group(inner)


def test_torch_still_computes_the_part_of_a_dtensor_from_mesh_and_placements() -> None:
    found = torch_compat.local_shape_and_offset((6, 4), DeviceMesh("cpu", [0]), [Shard(0)])
    assert found == ((6, 4), (0, 0))


# ---- tensors, modules, optimizers


def test_torch_still_tells_storages_apart_by_cdata() -> None:
    tensor, on_meta = torch.ones(4, 4), torch.ones(4, 4, device="meta")
    number = torch_compat.storage_id(tensor)
    assert torch_compat.storage_id(tensor[1:].T) == number
    assert torch_compat.storage_id(tensor.clone()) != number
    tensor.untyped_storage().resize_(0)
    assert torch_compat.storage_id(tensor) == number
    assert torch_compat.storage_id(on_meta[2]) == torch_compat.storage_id(on_meta) != number


def test_torch_still_shows_a_dispatch_mode_every_operator() -> None:
    with Operators() as seen:
        torch.ones(2).clone()
    assert "aten::clone" in seen.names


def test_torch_still_calls_its_products_by_the_names_that_we_keep() -> None:
    query = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)
    with Operators() as seen:
        torch.ones(2, 3) @ torch.ones(3, 2)
        linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4))
        torch.bmm(torch.ones(1, 2, 3), torch.ones(1, 3, 2))
        onednn_linear(torch.ones(2, 3), torch.ones(4, 3), None)
        scaled_dot_product_attention(query, query, query, is_causal=True)
    assert seen.names & torch_compat.PRODUCTS == {
        "aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }  # fmt: skip


def test_torch_still_has_the_products_that_are_computed_on_gpus_alone() -> None:
    from torch.nn.attention import varlen  # noqa: F401  registers torch_attn::_varlen_attn

    of_torch = {name for name in torch_compat.PRODUCTS if not name.startswith("flash_attn::")}
    for namespace, name in (name.split("::") for name in of_torch):
        assert hasattr(getattr(torch.ops, namespace), name), name


def test_torch_still_has_flash_attention_whose_backward_pass_takes_an_output_and_a_sum() -> None:
    """`varlen_forward` and `varlen_backward` run on GPUs alone: here their arguments are looked at,
    and tests/gpu/test_gpu.py runs them.
    """
    from torch.nn.attention import varlen  # noqa: F401  registers both operators

    schemas = {
        torch_compat.varlen_forward: torch.ops.torch_attn._varlen_attn,
        torch_compat.varlen_backward: torch.ops.torch_attn._varlen_attn_backward,
    }
    taken = [[a.name for a in op.default._schema.arguments] for op in schemas.values()]
    common = ["cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal"]
    assert taken[0][:11] == ["query", "key", "value", *common, "scale", "window_size", "enable_gqa"]
    assert taken[1] == ["grad_out", "query", "key", "value", "out", "lse", *common, "rng_state",
                        "scale", "window_size"]  # fmt: skip


def test_torch_still_keeps_parameters_and_children_in_dicts_of_a_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    ones, plain = nn.Parameter(torch.ones(2, 2)), nn.Identity()
    torch_compat.set_parameter(module[0], "weight", ones)
    assert module[0].weight is ones and dict(module.named_parameters())["0.weight"] is ones
    torch_compat.set_child(module, "0", plain)
    assert module[0] is plain


def test_torch_still_lets_a_copy_of_a_module_have_other_parameters_and_children() -> None:
    module, x = nn.RMSNorm(2), torch.tensor([1.0, 3.0])
    doubled = {"weight": nn.Parameter(torch.full((2,), 2.0))}
    probe = torch_compat.copy_with(module, parameters=doubled)
    assert torch.equal(probe(x), 2 * module(x)) and torch.equal(module.weight, torch.ones(2))
    outer = nn.Sequential(module, module)
    probe = torch_compat.copy_with(outer, children={"1": nn.Softmax(dim=-1)})
    assert torch.equal(probe(x), module(x).softmax(-1)) and outer[1] is module


def test_torch_still_has_adam_as_a_function_of_lists() -> None:
    weight, grad = nn.Parameter(torch.ones(3)), torch.tensor([1.0, -2.0, 0.5])
    other = weight.detach().clone()
    weight.grad = grad.clone()
    torch.optim.AdamW([weight], lr=0.1, weight_decay=0.3).step()
    torch_compat.adam_(
        params=[other], grads=[grad], exp_avgs=[torch.zeros(3)], exp_avg_sqs=[torch.zeros(3)],
        max_exp_avg_sqs=[], state_steps=[torch.tensor(0.0)], foreach=False, amsgrad=False,
        beta1=0.9, beta2=0.999, lr=0.1, weight_decay=0.3, eps=1e-8, maximize=False,
        decoupled_weight_decay=True,
    )  # fmt: skip
    torch.testing.assert_close(other, weight.detach())


def test_torch_still_knows_whether_the_processor_has_amx_tiles() -> None:
    assert torch_compat.has_amx_tiles() == ("amx_tile" in Path("/proc/cpuinfo").read_text())


def test_torch_still_writes_the_index_of_a_checkpoint_with_the_same_private_names(
    tmp_path: Path,
) -> None:
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    found = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    with Path(tmp_path, ".metadata").open("rb") as file:
        Recorder(file).load()
    private = {(module, name) for module, name in found if name.startswith("_")}
    assert private == torch_compat.CHECKPOINT_INDEX_NAMES


def test_torch_still_has_a_place_in_a_file_for_each_stored_value(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    [info] = dcp.FileSystemReader(tmp_path).read_metadata().storage_data.values()
    place = info.relative_path, info.offset, info.length
    assert torch_compat.storage_info(*place) == info


# ---- activation checkpointing


@pytest.mark.parametrize("selective", [False, True])
def test_torch_still_lets_a_layer_compute_beside_its_checkpointing(selective: bool) -> None:
    first = True

    def layer(x: torch.Tensor) -> torch.Tensor:
        nonlocal first
        if first:
            first = False
            with torch_compat.beside_checkpointing(), torch.enable_grad():
                inner = x.detach().requires_grad_()
                torch.autograd.grad((inner @ inner).sin().sum(), inner)
        return ((x @ x).sin() @ x).sum()

    x = torch.randn(3, 3, requires_grad=True)
    (want,) = torch.autograd.grad(((x @ x).sin() @ x).sum(), x)
    products = [torch.ops.aten.mm.default]
    settings = {"context_fn": lambda: create_selective_checkpoint_contexts(products)}
    out = checkpoint(layer, x, use_reentrant=False, **(settings if selective else {}))
    torch.testing.assert_close(torch.autograd.grad(out, x)[0], want)


# ---- operators that the kernels call


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_torch_still_has_onednns_linear_as_an_operator() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(onednn_linear(x, weight, bias), linear(x, weight, bias))
    torch.testing.assert_close(onednn_linear(x, weight, None), linear(x, weight))


def test_torch_still_copies_lists_of_tensors_at_once() -> None:
    to = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    copy_tensors_(to, [torch.ones(2), torch.full((3,), 2.0)])
    assert [t.tolist() for t in to] == [[1, 1], [2, 2, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_still_keeps_gradients_that_were_not_reduced_in_its_fsdp_params(dtype: Any) -> None:
    """Those of compute in float32 in the parameter, those that are summed in a wider dtype beside
    it; after `forget_pass` neither is in the next gradient."""
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = nn.Linear(3, 2, bias=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    x = torch.ones(1, 3)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model(x).float().sum().backward()
        if not last:
            torch_compat.forget_pass(model)
    weight: Any = model.weight
    assert torch.equal(weight.grad.full_tensor(), torch.ones(2, 3))


def test_torch_still_says_how_an_fsdp_unit_computes_and_divides() -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    assert torch_compat.fsdp_settings(model) == (policy, [None])
    model.set_gradient_divide_factor(3.0)
    assert torch_compat.fsdp_settings(model) == (policy, [3.0])
    torch_compat.forget_pass(model)  # before the first pass there is none
    assert model(torch.ones(1, 3)).dtype == torch.float32


def test_torch_still_marks_modules_that_are_compiled_in_place() -> None:
    module = nn.Linear(3, 2)
    assert not torch_compat.is_compiled(module)
    module.compile()
    assert torch_compat.is_compiled(module)
