"""What the Megatron engine reads of megatron-core's internals: a test that fails names what has
moved.
"""

import inspect
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from spmdrl.checkpoint.safe_load import ShardReader
from spmdrl.config import ConfigError, OptimConfig
from spmdrl.engines.megatron import checkpoint, compat, cpu_shim, patches

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module", autouse=True)
def parallel_state(topology: Any) -> Iterator[Any]:
    """megatron-core's, with the groups of this process alone."""
    cpu_shim.install()
    from megatron.core import parallel_state

    with cpu_shim.scope():
        parallel_state.initialize_model_parallel()
        yield parallel_state
        parallel_state.destroy_model_parallel()


def sharded(value: torch.Tensor) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {"weight": ShardedTensor.from_rank_offsets("all.weight", value), "note": 7}


def test_megatron_still_keeps_its_groups_in_globals_in_capitals(parallel_state: Any) -> None:
    standing = compat.parallel_globals()
    group = parallel_state.get_tensor_model_parallel_group()
    assert standing["_TENSOR_MODEL_PARALLEL_GROUP"] is group
    compat.set_parallel_globals(compat.blank_parallel_globals())
    assert not parallel_state.model_parallel_is_initialized()
    compat.set_parallel_globals(standing)
    assert parallel_state.get_tensor_model_parallel_group() is group


def test_megatron_still_initializes_from_blank_globals(parallel_state: Any) -> None:
    standing = compat.parallel_globals()
    try:
        compat.set_parallel_globals(compat.blank_parallel_globals())
        parallel_state.initialize_model_parallel()
        made = compat.parallel_globals()
        assert made.keys() == standing.keys()
        assert {n for n, v in made.items() if v is None} == {
            n for n, v in standing.items() if v is None
        }
        parallel_state.destroy_model_parallel()
    finally:
        compat.set_parallel_globals(standing)


def test_megatron_still_splits_a_state_into_shards_and_what_is_common() -> None:
    ready, planner, common = compat.split_state(sharded(torch.arange(4.0)))
    assert list(ready) == ["all.weight"] and common == {"note": 7}
    planner.set_up_planner(ready, None, True)
    plan = planner.create_local_plan()
    assert [item.index.fqn for item in plan.items] == ["all.weight"]
    assert torch.equal(planner.resolve_data(plan.items[0]), torch.arange(4.0))


def test_megatron_still_stores_parts_that_are_no_regular_grid(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    def parts(value: torch.Tensor) -> dict[str, Any]:
        spans = {"a": (0, 1), "b": (1, 4)}
        return {
            key: compat.shard_of("all.b", value[slice(*span)], (4, 2), (span[0], 0), (0, 0, 0))
            for key, span in spans.items()
        }

    value = torch.arange(8.0).view(4, 2)
    dist_checkpointing.save(parts(value), str(tmp_path))
    found = dist_checkpointing.load(parts(torch.zeros(4, 2)), str(tmp_path))
    assert torch.equal(torch.cat([found["a"], found["b"]]), value)
    stored = ShardReader(str(tmp_path)).read_metadata().state_dict_metadata["all.b"]
    assert tuple(stored.size) == (4, 2)


def test_megatron_still_says_where_a_distributed_optimizers_shards_are() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from spmdrl.engines.megatron.optimizer import build_optimizer
    from spmdrl.engines.megatron.parts import trained

    patches.install()
    config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)
    chunk = trained(nn.Linear(3, 2), config, first=True)
    (part,) = compat.optimizer_parts(build_optimizer([chunk], config, OptimConfig(lr=0.5)))
    found = list(compat.own_shards(part))
    assert {id(parameter) for parameter, _, _ in found} == {id(p) for p in chunk.parameters()}
    for parameter, shard, settings in found:
        assert torch.equal(shard, parameter.flatten()) and settings["lr"] == 0.5
        assert compat.range_of(part, parameter) == (0, parameter.numel())


def test_megatron_still_asks_a_bucket_group_about_each_gradient() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from spmdrl.engines.megatron.parts import trained

    patches.install()
    config = TransformerConfig(
        num_layers=1, hidden_size=2, num_attention_heads=1, calculate_per_token_loss=True
    )
    with cpu_shim.scope():
        chunk = trained(nn.Linear(3, 2), config, first=True, reduces=True)
        (group,) = chunk.bucket_groups
        found: list[Any] = []
        compat.call_when_ready(group, found.append)
        for _ in range(2):  # its count of gradients in a first batch would start the second's
            chunk.zero_grad_buffer()
            with chunk.no_sync():
                chunk(torch.ones(1, 3)).sum().backward()
            assert found == []
            chunk(torch.ones(1, 3)).sum().backward()
            assert {id(p) for p in found} == {id(p) for p in chunk.parameters()}
            assert group.grad_reduce_handle is None
            group.start_grad_sync()
            assert group.grad_reduce_handle is not None
            chunk.finish_grad_sync()
            assert group.grad_reduce_handle is None
            assert all(p.main_grad.eq(2.0).all() for p in chunk.parameters())
            found.clear()


def test_megatron_still_clips_some_of_a_distributed_optimizers_gradients_by_their_norm() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from spmdrl.engines.megatron.optimizer import build_optimizer
    from spmdrl.engines.megatron.parts import trained

    patches.install()
    with cpu_shim.scope():
        config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)
        chunk = trained(nn.Linear(3, 2), config, first=True)
        optimizer = build_optimizer([chunk], config, OptimConfig(weight_decay=0.0), clips=False)
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(1.0)
        optimizer.prepare_grads()
        (part,) = compat.optimizer_parts(optimizer)
        bias, weight = sorted((shard for _, shard, _ in compat.own_shards(part)), key=len)
        with compat.without_gradients([weight]):
            assert optimizer.get_grad_norm() == pytest.approx(2**0.5)
        compat.clip_gradients([bias], 0.5, 2**0.5)
        compat.clip_gradients([], 0.5, 2.0)
        assert optimizer.prepare_grads() is False  # its step begins so, and keeps what was scaled
        assert float(bias.grad.norm()) == pytest.approx(0.5)
        assert weight.grad.tolist() == [1.0] * 6
        optimizer.step()
        assert weight.grad.tolist() == [1.0] * 6


def test_megatron_still_knows_a_checkpoint_by_its_metadata_file(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    assert not dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path))
    compat.write_format(tmp_path, "torch_dist", 1)
    assert dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path))


def test_megatron_still_asks_get_filesystem_reader_for_its_reader(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(sharded(torch.arange(4.0)), str(tmp_path))
    folders: list[str] = []

    def reader_of(folder: str) -> FileSystemReader:
        folders.append(folder)
        return FileSystemReader(folder)

    with compat.reading_with(reader_of):
        found = dist_checkpointing.load(sharded(torch.zeros(4)), str(tmp_path))
    assert set(folders) == {str(tmp_path)} and torch.equal(found["weight"], torch.arange(4.0))
    folders.clear()
    dist_checkpointing.load(sharded(torch.zeros(4)), str(tmp_path))
    assert not folders


def test_what_megatrons_own_save_wrote_is_read_without_running_what_is_in_it(
    tmp_path: Path,
) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(sharded(torch.arange(4.0)), str(tmp_path))
    with compat.reading_with(ShardReader):
        found = dist_checkpointing.load(sharded(torch.zeros(4)), str(tmp_path))
    assert torch.equal(found["weight"], torch.arange(4.0)) and found["note"] == 7
    index = Path(tmp_path, ".metadata")
    with index.open("rb") as file:
        metadata = pickle.load(file)
    assert metadata.all_local_plans  # of torch's planner
    metadata.all_local_plans[0] = replace(metadata.all_local_plans[0], planner_data=os.getcwd)
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=r"it names posix\.getcwd"):
        ShardReader(str(tmp_path)).read_metadata()


def test_a_checkpoint_of_another_megatron_program_is_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(sharded(torch.arange(4.0)), str(tmp_path))
    with pytest.raises(ConfigError, match=r"another program wrote.*save_hf_weights"):
        checkpoint.load(SimpleNamespace(), tmp_path, None)


def test_megatron_still_makes_a_parameter_of_the_shards_that_a_factory_builds() -> None:
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    entry = sharded(torch.empty(4, 2, device="meta"))["weight"]
    assert compat.filled(entry, lambda shard: shard.local_shape) == (4, 2)
    factory = apply_swiglu_sharded_factory(entry, ())
    parts = compat.filled(
        factory, lambda shard: torch.full(shard.local_shape, float(shard.global_offset[0]))
    )
    assert parts[:, 0].tolist() == [0, 0, 2, 2]


def test_megatron_still_chains_its_optimizers_and_marks_stubs() -> None:
    from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    config = OptimizerConfig(optimizer="adam", lr=0.1)
    adam = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    real, stub = (FP32Optimizer(inner, config, lambda: None) for inner in (adam, None))
    assert compat.optimizer_parts(real) == [real] and compat.optimizer_parts(stub) == []
    assert compat.optimizer_parts(ChainedOptimizer([real, stub])) == [real]
    plain = SimpleNamespace()
    assert compat.optimizer_parts(plain) == [plain]


def test_megatron_still_replays_experts_by_router_replay() -> None:
    """In a forward pass those that it was told last, in layers that are computed again those of the
    pass whose turn it is, and none where it is told to forget them."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    replay = RouterReplay()
    scores = torch.rand(3, 4)
    told = [torch.tensor([[i], [1], [2]]) for i in range(2)]

    def choice() -> torch.Tensor:
        chosen: torch.Tensor = replay.get_replay_topk(
            scores, 1, default_compute_topk=lambda s, k, *_, **__: torch.topk(s, k)
        )[1]
        return chosen

    for experts in told:
        compat.replay_forward(replay, experts)
        assert torch.equal(choice(), experts)
        compat.replay_backward(replay, wanted=True)
    assert all(torch.equal(choice(), experts) for experts in told)
    compat.replay_forward(replay, told[0])
    compat.replay_backward(replay, wanted=False)
    assert replay.replay_backward_list == []
    compat.forget_experts(replay)
    assert torch.equal(choice(), scores.topk(1).indices)
    assert compat.router_replays(nn.Linear(1, 1)) == []
    assert RouterReplay.global_router_replay_instances == []


@pytest.mark.parametrize("mended", [False, True])
def test_megatron_still_cannot_checkpoint_a_layer_that_is_given_packed_sequences(
    mended: bool,
) -> None:
    """Of multi-token prediction: when the first case passes, checkpoint_mtp_layer can go."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    class Layer(MultiTokenPredictionLayer):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.config = SimpleNamespace(
                fp8=None, recompute_method="uniform", recompute_num_layers=1,
                distribute_saved_activations=False,
            )  # fmt: skip

    layer, seen = Layer(), []

    def forward(
        hidden_states: torch.Tensor, context: None, packed_seq_params: PackedSeqParams
    ) -> torch.Tensor:
        seen.append((context, packed_seq_params.max_seqlen_q))
        return hidden_states**2

    states = torch.tensor([1.0, 3.0], requires_grad=True)
    inputs = {
        "hidden_states": states, "context": None,
        "packed_seq_params": PackedSeqParams(max_seqlen_q=7),
    }  # fmt: skip
    if not mended:
        with pytest.raises(TypeError, match="save_for_backward"):
            layer._checkpointed_forward(forward, **inputs)
        return
    compat.checkpoint_mtp_layer(layer)
    layer._checkpointed_forward(forward, **inputs).sum().backward()
    assert seen == [(None, 7)] * 2  # a second time for the gradient
    assert states.grad is not None and states.grad.tolist() == [2.0, 6.0]


def test_megatron_still_gathers_the_optimizers_state_on_one_rank_where_it_is_asked_to() -> None:
    """A host's program may have no gloo groups: then it is called as megatron-core calls it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    own = inspect.signature(DistributedOptimizer.get_parameter_state_dp_zero).parameters
    assert {"use_gloo_comm", "empty_data", "return_on_all_ranks"} <= {*own}
    as_called = {"use_gloo_comm": False, "empty_data": False, "return_on_all_ranks": True}
    to_save = as_called | {"use_gloo_comm": True, "return_on_all_ranks": False}
    for group, wanted in (("gloo", to_save), (None, as_called)):
        part = SimpleNamespace(buffers=[], data_parallel_group_gloo=group)
        gather = Mock(return_value=None)
        assert checkpoint._state_with_padding(part, gather, set(), **as_called) is None
        gather.assert_called_once_with(**wanted)
