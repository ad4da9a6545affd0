"""What spmdrl reads of vLLM's internals: a test that fails names what has moved.

The engine is a real one, of a tiny model on a CPU.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spmdrl.config import LoraConfig, RolloutConfig
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import process_groups
from spmdrl.engines.fsdp.optimizers import zero_moment
from spmdrl.rollout.base import Request, SamplingParams, WeightMismatch
from spmdrl.rollout.vllm import compat
from spmdrl.rollout.vllm.core import executor_of, keep_compiled_code_apart
from spmdrl.rollout.vllm.derived_weights import check_derived, mark_derived, renew_derived
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.rollout.vllm.plain_tensors import plain_tensors
from spmdrl.rollout.vllm.streams import EngineStream

pytestmark = pytest.mark.vllm

CONFIG = RolloutConfig(max_num_seqs=4, kv_cache_mib=16)


@pytest.fixture(scope="module")
def engine(topology: Topology, qwen3: Path) -> Iterator[VllmEngine]:
    made = VllmEngine(str(qwen3), CONFIG, 64, topology, lora=LoraConfig(rank=4))
    yield made
    made.shutdown()


# ---- building and driving an engine


def test_vllm_still_shuts_down_part_by_part_and_leaves_torchs_groups(
    topology: Topology, qwen3: Path
) -> None:
    """The first test of the file: no other engine may stand, since engines share vLLM's groups."""
    groups = process_groups()
    alone = VllmEngine(str(qwen3), CONFIG, 64, topology)
    from vllm.distributed import parallel_state

    assert parallel_state._WORLD is not None
    core = alone.core
    alone.shutdown()  # by compat.shutdown and compat.destroy_groups
    assert parallel_state._WORLD is parallel_state._NODE_COUNT is None
    assert core.scheduler.get_num_unfinished_requests() == 0
    assert process_groups() == groups
    torch.distributed.barrier(group=topology.group)


def test_vllm_still_has_its_engine_core_in_v1_engine_core(engine: VllmEngine) -> None:
    assert compat.has_engine()  # as there is one
    compat.import_engine()
    from vllm.v1.engine.core import EngineCore

    assert type(engine.core) is EngineCore  # compat.engine_core made it


def test_vllm_engine_core_still_has_the_methods_that_we_call(engine: VllmEngine) -> None:
    given: dict[str, tuple[Any, ...]] = {
        "abort_requests": (["1"],), "collective_rpc": ("reload_weights",),
        "reset_encoder_cache": (), "reset_prefix_cache": (), "sleep": (), "wake_up": (["weights"],),
    }  # fmt: skip
    options = {
        "collective_rpc": {"kwargs": {}}, "reset_prefix_cache": {"reset_running_requests": True},
        "sleep": {"level": 2},
    }  # fmt: skip
    assert set(given) == set(compat.ENGINE_METHODS)
    for name, arguments in given.items():
        method = getattr(engine.core, name)
        inspect.signature(method).bind(*arguments, **options.get(name, {}))  # raises TypeError


def test_vllm_still_asks_its_executor_for_distributed_args(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    made: Any = compat.rank_executor("spmdrl:somewhere", 3, 1)
    assert issubclass(made, ExecutorWithExternalLauncher)
    assert made._distributed_args(None) == ("spmdrl:somewhere", 3, 1)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert ExecutorWithExternalLauncher._distributed_args(None)[1:] == (5, 2)
    assert "self._distributed_args()" in inspect.getsource(UniProcExecutor._init_executor)


def test_vllm_still_registers_architectures_by_their_classes() -> None:
    from vllm.model_executor.models import ModelRegistry

    compat.load_architecture("Qwen2ForCausalLM")
    entry = ModelRegistry.models["Qwen2ForCausalLM"]
    assert type(entry).__name__ == "_RegisteredModel"  # imported, and not to be inspected
    assert entry.load_model_cls().__name__ == "Qwen2ForCausalLM"
    compat.load_architecture("NoSuchModel")
    assert "NoSuchModel" not in ModelRegistry.models


def test_vllm_still_takes_a_loader_that_leaves_buffers(engine: VllmEngine) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    config = LoadConfig(load_format=compat.blank_format())
    layer = nn.Linear(2, 3)
    layer.weight.data.fill_(7)
    layer.register_buffer("scale", torch.ones(2))
    model_config = engine.core.vllm_config.model_config
    get_model_loader(config).load_weights(layer, model_config)
    assert 0 < layer.weight.abs().max() < 1 and torch.equal(layer.scale, torch.ones(2))


def test_vllm_still_keeps_its_world_group_in_parallel_state(engine: VllmEngine) -> None:
    from vllm.distributed import parallel_state

    assert parallel_state.get_world_group() is parallel_state._WORLD
    assert parallel_state._NODE_COUNT == 1


def test_vllm_still_has_a_runner_with_model_cache_and_sampler(engine: VllmEngine) -> None:
    runner = compat.model_runner(engine.core)
    assert isinstance(runner.get_model(), nn.Module)
    assert all(isinstance(cache, torch.Tensor) for cache in runner.kv_caches)
    assert callable(runner.sampler.topk_topp_sampler.forward)


def test_vllm_still_schedules_and_steps_requests_as_we_drive_it(engine: VllmEngine) -> None:
    from vllm import SamplingParams as VllmSamplingParams

    assert not compat.has_work(engine.core) and compat.num_running(engine.core) == 0
    params = VllmSamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, logprobs=0)
    asked = compat.engine_request(900, [5, 6, 7], params, engine.slots and engine.slots.requests[0])
    assert (asked.request_id, asked.prompt_token_ids) == ("900", [5, 6, 7])
    engine.noise.seeds["900"] = 1
    compat.add_request(engine.core, asked)
    assert compat.has_work(engine.core)
    tokens, logprobs, running = [], [], set()
    while compat.has_work(engine.core):
        for output in compat.step(engine.core):
            assert output.request_id == "900"
            tokens += output.new_token_ids
            logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        running.add(compat.num_running(engine.core))
    assert len(tokens) == len(logprobs) == 2 and max(logprobs) < 0 and running == {0, 1}
    compat.step_without_outputs(engine.core)
    assert compat.step(engine.core) == []


def test_vllm_still_looks_for_stop_strings_token_by_token(engine: VllmEngine, qwen3: Path) -> None:
    from transformers import AutoTokenizer
    from vllm import SamplingParams as VllmSamplingParams

    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    ids = tokenizer.encode("12+34", add_special_tokens=False)
    params = VllmSamplingParams(stop=["+"], detokenize=True, max_tokens=8)
    found = compat.detokenizer(tokenizer, compat.engine_request(0, [5], params, None))
    stops = [found.update([token], stop_terminated=False) for token in ids]
    plus = next(i for i in range(len(ids)) if "+" in tokenizer.decode(ids[: i + 1]))
    assert [stop is not None for stop in stops[: plus + 1]] == [False] * plus + [True]


def test_vllm_still_reads_the_weights_of_a_folder(engine: VllmEngine, qwen3: Path) -> None:
    from safetensors.torch import load_file

    found = dict(compat.weights_on_disk(engine.core.vllm_config.model_config, engine.model))
    stored = load_file(qwen3 / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


# ---- sampling


def test_vllm_still_masks_by_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    kept = compat.mask_top_k_top_p(logits.clone(), torch.tensor([2]), None)
    assert kept.tolist() == [[-float("inf"), -float("inf"), 2.0, 3.0]]
    kept = compat.mask_top_k_top_p(logits.clone(), None, torch.tensor([0.1]))
    assert kept.isfinite().tolist() == [[False, False, False, True]]


def test_vllm_still_draws_tokens_by_a_generator_for_each_row() -> None:
    def draws() -> torch.Tensor:
        generators = {i: torch.Generator().manual_seed(i) for i in range(64)}
        return compat.draw_tokens(torch.tensor([[0.0, 0.5, 0.5]]).repeat(64, 1), generators, False)

    assert torch.equal(draws(), draws()) and set(draws().tolist()) == {1, 2}


def test_vllm_still_decides_on_drafts_by_functions_of_its_rejection_sampler() -> None:
    """Called by name in RejectionSampler.forward; test_speculative.py runs an engine so."""
    from vllm.v1.sample import rejection_sampler as module

    own = module.rejection_sample, module.expand_batch_to_tokens
    forward = inspect.getsource(module.RejectionSampler.forward)
    assert "rejection_sample(" in forward and "apply_sampling_constraints(" in forward
    assert "expand_batch_to_tokens(" in inspect.getsource(module.apply_sampling_constraints)
    with compat.rejection_sampling_by(torch.add, torch.sub):
        assert (module.rejection_sample, module.expand_batch_to_tokens) == (torch.add, torch.sub)
    assert (module.rejection_sample, module.expand_batch_to_tokens) == own


def test_vllm_still_keeps_a_draft_model_in_the_runners_drafter(engine: VllmEngine) -> None:
    """test_speculative.py has an engine whose draft model proposes what its files would say."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    assert "get_model(" in inspect.getsource(DraftModelProposer._get_model)
    read: list[str] = []
    model: Any = nn.Module()
    model.load_weights = lambda weights: read.extend(name for name, _ in weights)
    runner = SimpleNamespace(drafter=SimpleNamespace(model=model))
    worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    drafts = SimpleNamespace(draft_model_config=engine.core.vllm_config.model_config)
    compat.read_draft_model(
        SimpleNamespace(
            model_executor=worker, vllm_config=SimpleNamespace(speculative_config=drafts)
        )
    )
    assert "model.embed_tokens.weight" in read


def test_vllm_still_gives_logprobs_as_ids_values_and_ranks() -> None:
    ids, values, ranks = torch.tensor([[3]]), torch.tensor([[-0.5]]), torch.tensor([0])
    found = compat.logprobs_tensors(ids, values, ranks)
    assert found.logprob_token_ids is ids and found.logprobs is values
    assert found.selected_token_ranks is ranks


# ---- adapters and FP8


def test_vllm_still_keeps_its_adapters_in_the_runners_lora_manager(engine: VllmEngine) -> None:
    manager = compat.adapter_manager(compat.model_runner(engine.core))
    layers = list(manager.modules.values())
    assert layers and all(isinstance(layer, compat.adapter_layer_class()) for layer in layers)
    assert all(isinstance(layer.base_layer, nn.Module) for layer in layers)
    qkv = next(name for name in manager.packed_modules if name.endswith("qkv_proj"))
    assert [name.rpartition(".")[2] for name in manager.packed_modules[qkv]] == [
        "q_proj", "k_proj", "v_proj",
    ]  # fmt: skip
    asked = compat.adapter_request("policy", 1)
    assert (asked.lora_name, asked.lora_int_id) == ("policy", 1)


def test_vllm_still_fills_parameters_of_its_own_classes(engine: VllmEngine) -> None:
    plain: Any = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
    plain.weight_loader = lambda parameter, weight: None
    assert not compat.is_loadable(plain)
    for make in (compat.loadable_weight, compat.loadable_scales):
        made = make(plain)
        assert compat.is_loadable(made) and made.data_ptr() == plain.data_ptr()
        made.load_row_parallel_weight(torch.ones(4, 2))
        assert torch.equal(plain, torch.ones(4, 2))
        plain.data.zero_()
        made.load_column_parallel_weight(torch.ones(4, 2))
        assert torch.equal(plain, torch.ones(4, 2))
        plain.data.zero_()


# ---- images


def test_vllm_still_asks_its_registry_for_a_processor() -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    own = object()
    with compat.replaced_processor(own):
        assert MULTIMODAL_REGISTRY.create_processor(None) is own
    text_only = SimpleNamespace(is_multimodal_model=False, served_model_name="tiny", model="tiny")
    with pytest.raises(ValueError, match="tiny is not a multimodal model"):
        MULTIMODAL_REGISTRY.create_processor(text_only)


def test_vllm_still_cuts_pixels_into_one_item_for_each_image() -> None:
    grids = torch.tensor([[1, 2, 2], [1, 2, 4]])
    pixels = torch.randn(12, 6)
    values = {"pixel_values": pixels, "image_grid_thw": grids}
    items = compat.vision_items("image", values, flat={"pixel_values": grids.prod(-1)})
    found = [item.get_data() for item in items]
    assert torch.equal(found[0]["pixel_values"], pixels[:4])
    assert torch.equal(found[1]["pixel_values"], pixels[4:])
    assert torch.equal(found[1]["image_grid_thw"], grids[1])
    is_image = torch.ones(4, dtype=torch.bool)
    feature = compat.vision_feature("image", items[0], "digest", 3, is_image)
    assert (feature.data, feature.modality, feature.identifier) == (items[0], "image", "digest")
    assert (feature.mm_position.offset, feature.mm_position.length) == (3, 4)
    assert feature.mm_position.is_embed is None
    is_image[1] = False
    feature = compat.vision_feature("image", items[0], "digest", 3, is_image)
    assert torch.equal(feature.mm_position.is_embed, is_image)


# ---- operators and kernels of vLLM on a CPU

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's build for CPUs has these")


@on_cpu
def test_vllm_still_binds_memory_by_an_operator_of_its_library() -> None:
    assert callable(compat.cpu_operators().init_cpu_memory_env)


@on_cpu
def test_vllm_still_draws_by_gumbel_noise_from_seeds() -> None:
    compat.cpu_operators()
    logits, seeds = torch.tensor([[0.0, 0.0, -1e9]]).repeat(64, 1), torch.arange(64)
    drawn = compat.gumbel_argmax(logits, seeds)
    assert torch.equal(drawn, compat.gumbel_argmax(logits, seeds))
    assert set(drawn.tolist()) == {0, 1}
    assert torch.equal(drawn[5:6], compat.gumbel_argmax(logits[:1], seeds[5:6]))


@on_cpu
def test_vllm_still_packs_experts_by_an_operator_of_its_library() -> None:
    compat.cpu_operators()
    weight = torch.randn(2, 64, 64, dtype=torch.bfloat16)
    packed = torch.zeros_like(weight)
    compat.pack_experts(weight, packed, SimpleNamespace(isa="vec"))
    assert not torch.equal(packed, weight)
    assert torch.equal(packed.flatten().sort().values, weight.flatten().sort().values)


@on_cpu
def test_vllm_still_pads_experts_and_asks_for_zentorch_per_layer() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    class Kernel:
        moe_config = SimpleNamespace(intermediate_size_per_partition=33, activation=None)
        _use_zentorch = True
        _intermediate_alignment = staticmethod(lambda: 32)
        _padded_intermediate_size = classmethod(
            cpu_moe.CPUUnquantizedExperts._padded_intermediate_size.__func__
        )

    kernel = Kernel()
    assert compat.padded_width(kernel) == 64
    assert not compat.use_zentorch(kernel, nn.Module()) and kernel._use_zentorch is False
    reads_it = inspect.getsource(cpu_moe.CPUUnquantizedExperts.apply)
    assert "self._use_zentorch" in reads_it


@on_cpu
def test_vllm_still_leaves_a_weight_unpacked_where_its_layer_says_so() -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    layer = nn.Module()
    compat.keep_unpacked(layer)
    (name,) = vars(layer).keys() - vars(nn.Module()).keys()
    for kernel in (cpu.CPUFp8BlockScaledMMKernel, cpu.CPUFp8W8A8BlockScaledMMKernel):
        assert f'getattr(layer, "{name}", False)' in inspect.getsource(kernel)


# ---- parsers of tool calls


def test_vllm_still_has_its_tool_parsers_by_name(qwen3: Path) -> None:
    from transformers import AutoTokenizer

    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    parsers, asked = compat.tool_parsers(), compat.tool_request([add])
    assert "pythonic" in parsers.list_registered()
    with pytest.raises(KeyError):
        parsers.get_tool_parser("no such parser")
    parser = parsers.get_tool_parser("pythonic")(AutoTokenizer.from_pretrained(qwen3))
    found = parser.extract_tool_calls("[add(a=1)]", asked)
    assert [call.function.name for call in found.tool_calls] == ["add"]


# ---- families of models


def test_vllm_still_changes_transformers_classes_in_one_method() -> None:
    """Afterwards instances can be made and called that know nothing of vLLM."""
    from vllm.model_executor.models.transformers import base

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    before, kind = Model(), Model.__init__
    with compat.kept_transformers_classes():
        base.Base._decorate_cls_for_torch_compile(
            SimpleNamespace(), cls=Model, dynamic_arg_dims={"x": 0}, enable_if=lambda config: True,
            is_encoder=False,
        )  # fmt: skip
        assert Model.__init__ is not kind
    assert [float(model(torch.ones(1))) for model in (before, Model())] == [2.0, 2.0]


def test_vllm_still_keeps_its_environment_rotary_tables_and_workspace_for_all_engines(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is built beside another reads its own environment, and has its own tables and
    workspace.
    """
    from vllm import envs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.v1.worker import workspace

    envs.enable_envs_cache()  # as every engine does when it stands
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "one,two")
    assert envs.VLLM_DISABLED_KERNELS != ["one", "two"]
    with set_current_vllm_config(engine.core.vllm_config):
        table = get_rope(16, 64)
        assert get_rope(16, 64) is table
        compat.begin_engine()
        assert get_rope(16, 64) is not table
    assert envs.VLLM_DISABLED_KERNELS == ["one", "two"]

    monkeypatch.setattr(workspace, "_manager", "of the engine that was built last")
    executor: Any = object.__new__(compat.rank_executor("spmdrl:x", 0, 0))
    executor.driver_worker = SimpleNamespace(used=lambda: workspace._manager)
    executor.own_workspace, executor.own_stream = "its own", EngineStream()
    assert executor.collective_rpc("used", single_value=True) == "its own"


class Stream:
    """Stands in for a CUDA stream; notes what it waits for."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: "Stream") -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


def test_vllm_still_leaves_a_stream_of_its_own_to_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call to an engine is on the stream that vLLM has left after the one before, behind what
    the caller's stream was given; afterwards the caller's is current again, behind the engine's.
    Streams of a GPU are played by objects.
    """
    from vllm.utils import torch_utils
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert "torch.cuda.set_stream(new_stream)" in inspect.getsource(torch_utils.current_stream)
    runner: Any = GPUModelRunner.main_stream  # kept from a runner's first step on
    assert "torch.cuda.current_stream" in inspect.getsource(runner.func)
    notes: list[str] = []
    callers, engines, others = (Stream(name, notes) for name in ("caller", "engine", "other"))
    now = [callers]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: now.__setitem__(0, stream))

    def build(self: Any) -> None:
        notes.append(f"built on {now[0].name}")
        torch.cuda.set_stream(engines)  # type: ignore[arg-type]

    def call(self: Any, method: str) -> str:
        if method == "fail":
            raise RuntimeError("out of memory")
        return now[0].name

    monkeypatch.setattr(ExecutorWithExternalLauncher, "_init_executor", build)
    monkeypatch.setattr(UniProcExecutor, "collective_rpc", call)
    executor: Any = object.__new__(compat.rank_executor("spmdrl:x", 0, 0))
    executor._init_executor()
    assert now == [callers] and notes == ["built on caller", "caller waits for engine"]
    notes.clear()
    assert executor.collective_rpc("execute_model") == "engine"
    assert now == [callers] and notes == ["engine waits for caller", "caller waits for engine"]
    now[0] = others  # a program that calls from a stream of its own
    with pytest.raises(RuntimeError, match="out of memory"):
        executor.collective_rpc("fail")
    assert now == [others] and notes[2:] == ["engine waits for other", "other waits for engine"]
    now[0] = engines
    executor.collective_rpc("execute_model")
    assert now == [engines] and len(notes) == 4  # nothing to wait for


def test_vllm_still_notes_what_memory_it_has_taken_for_what(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.device_allocator import AllocationData, cumem, sleep_mode_backend
    from vllm.v1.worker.gpu_worker import Worker

    allocator = cumem.CuMemAllocator()  # which on a CPU takes no memory
    monkeypatch.setattr(cumem, "cumem_available", True)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    for address, size, tag in ((0x1000, 64, "weights"), (0x2000, 32, "runtime")):
        allocator.current_tag = tag
        allocator._python_malloc_callback((0, size, address, 7))
    assert isinstance(allocator.pointer_to_data[0x1000], AllocationData)
    assert compat.memory_of_weights() == [(0x1000, 64)]
    assert 'tag="weights"' in inspect.getsource(Worker.load_model)
    dropped = inspect.getsource(sleep_mode_backend.CuMemBackend.suspend)
    assert 'offload_tags: tuple[str, ...] = ("runtime", "cudagraph")' in dropped


def test_only_plain_tensors_in_memory_that_is_dropped_are_kept() -> None:
    """Not parameters, not what lies elsewhere, not torchao's, which are made of other tensors."""
    weight = nn.Parameter(torch.ones(4))
    elsewhere, inside = torch.ones(8), torch.arange(16.0)
    made_of_others: Any = zero_moment(torch.ones(64, 64), signed=True)
    model = nn.Linear(1, 1)
    model.weight, model.parts = weight, {"of": [inside[:4], (inside[4:], elsewhere)]}  # type: ignore[assignment]
    model.moment = made_of_others
    runner = SimpleNamespace(get_model=lambda: model)
    memory = [(t.data_ptr(), t.nbytes) for t in (weight, inside)]
    (found,) = plain_tensors(runner, memory)
    assert found.data_ptr() == inside.data_ptr() and len(found) == inside.nbytes
    with pytest.raises(RuntimeError, match="data pointer"):
        made_of_others.untyped_storage().data_ptr()


def test_vllm_still_files_compiled_code_by_the_rank_within_an_engine(
    topology: Topology, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does so by the GPU as well, core.keep_compiled_code_apart may go."""
    from vllm.compilation import decorators

    source = inspect.getsource(decorators)
    assert 'f"rank_{rank}_{dp_rank}"' in source and "envs.VLLM_CACHE_ROOT" in source
    group = topology.mesh.get_group("tp")
    assert executor_of(group, torch.device("cuda:3"))[1] == 3
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    compat.begin_engine()
    keep_compiled_code_apart(3)
    assert compat.cache_root() == "/cache/gpu_3"


def test_vllm_still_gives_passes_of_llm_more_tokens_than_nobodys() -> None:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    args = SimpleNamespace(create_engine_config=lambda usage: usage)
    assert compat.engine_config(args, on_cpu=False) is UsageContext.LLM_CLASS
    assert compat.engine_config(args, on_cpu=True) is None
    source = inspect.getsource(EngineArgs.get_batch_defaults)
    assert "UsageContext.LLM_CLASS: 16384" in source and "70 * GiB_bytes" in source


def test_vllm_still_renews_the_copies_of_attention_sinks_in_place() -> None:
    """Of FlashInfer and b12x, which cannot be imported without a GPU: their source is read, and a
    backend with the same attributes stands in.
    """
    import vllm

    for name in ("flashinfer", "b12x"):
        path = Path(vllm.__file__).parent / "v1/attention/backends" / f"{name}.py"
        assert "self.sinks.copy_(source_sinks)" in path.read_text()

    class Backend:
        def __init__(self, sinks: nn.Parameter) -> None:
            self._sinks_source, self.sinks = sinks, sinks.float()

        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            self.sinks.copy_(self._sinks_source)

    layer: Any = nn.Linear(2, 2)
    layer.sinks = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
    layer.impl = Backend(layer.sinks)
    model, kept = nn.Sequential(layer), layer.impl.sinks
    assert compat.copies_sinks(layer) and not compat.copies_sinks(nn.Linear(2, 2))
    assert mark_derived(model) and not mark_derived(nn.Sequential(nn.Linear(2, 2)))
    layer.sinks.copy_(torch.full((4,), 3.0))  # a push
    with pytest.raises(WeightMismatch, match=r"0\.sinks was made of older weights"):
        check_derived(model, torch.bfloat16)
    layer.sinks.copy_(torch.full((4,), 5.0))
    renew_derived(model, torch.bfloat16)
    check_derived(model, torch.bfloat16)
    assert layer.impl.sinks is kept and kept.tolist() == [5.0] * 4


def test_vllm_still_makes_its_latent_products_of_one_weight() -> None:
    source = inspect.getsource(compat.latent_attention_class().process_weights_after_loading)
    assert "prefer_copy=True" in source  # into the memory of the old ones
    layer = SimpleNamespace(W_UV=1, W_UK_T=2, W_K=None)
    assert compat.absorbed_weights(layer) == ["W_UV", "W_UK_T"]
    assert all(f'"{name}"' in source for name in ("W_UV", "W_UK_T", "W_K_scale", "W_V_scale"))


def test_vllm_still_convolves_by_two_functions_that_may_be_given_an_unpacked_weight() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    compat.use_unpacked_convolutions()
    for function in (gdn_attention._causal_conv1d_fwd_cpu, gdn_attention._causal_conv1d_update_cpu):
        assert function.reads_unpacked
        own = inspect.signature(function).parameters["own"].default
        assert {"weight", "is_weight_packed"} <= {*inspect.signature(own).parameters}


def test_vllm_still_says_which_models_it_runs_by_transformers_code() -> None:
    assert compat.runs_transformers_code("Olmo2ForCausalLM")
    assert compat.runs_transformers_code("NoSuchForCausalLM")
    assert not compat.runs_transformers_code("Qwen3ForCausalLM")


# ---- routed experts


def test_vllm_still_has_the_connector_that_returns_routed_experts() -> None:
    """What it returns: tests/rollout/test_routed_experts.py."""
    import vllm.v1.outputs
    from vllm import EngineArgs, SamplingParams
    from vllm.distributed.aux_output_connector import worker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    kind: Any = worker.AuxOutputWorkerConnector
    names = ("begin_step", "prepare_output", "process_output", "close")
    assert all(hasattr(kind, name) for name in names)
    inspect.signature(worker.PendingAuxOutput.enqueue_cpu_copy).bind(None, [1], [0])
    inspect.signature(GPUModelRunner.execute_model).bind(None, None)
    inspect.signature(GPUModelRunner.sample_tokens).bind(None, None)
    fields = vars(vllm.v1.outputs.ModelRunnerOutput)["__dataclass_fields__"]
    assert "aux_output_connector_output" in fields
    assert SamplingParams().routed_experts_prompt_start == 0
    assert not inspect.signature(EngineArgs).parameters["enable_return_routed_experts"].default
    before = worker.get_tp_group
    with compat.every_rank_returns_experts():
        assert worker.get_tp_group().is_first_rank
    assert worker.get_tp_group is before


def test_vllm_still_numbers_its_layers_with_experts(engine: VllmEngine) -> None:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    assert compat.expert_layers(engine.model) == []
    assert "layer_id" in inspect.getsource(MoERunner)


def test_vllm_still_lets_others_hear_which_experts_a_router_chooses(engine: VllmEngine) -> None:
    """training/test_mismatch.py hears those of a model that has some."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    heard: list[str] = []
    with compat.watched_routers(engine.model, lambda path, chosen: heard.append(path)):
        engine.generate([Request([5, 6], seed=1)], SamplingParams(max_tokens=1))
    assert not heard
    assert "self.capture_fn(topk_ids)" in inspect.getsource(BaseRouter)
    assert "self.router" in inspect.getsource(MoERunner)


# ---- the tokens that sampling left


def test_vllm_still_returns_sampling_masks_as_the_kept_ids_of_each_token() -> None:
    """Its second model runner does, on GPUs: the numbers here are vLLM's own objects, on a CPU."""
    from vllm import EngineArgs
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    ids = torch.tensor([[3, 8, 0], [5, 0, 0], [0, 0, 0]], dtype=torch.int32)
    bits = torch.zeros(3, 2, dtype=torch.uint8)
    bits[2] = torch.tensor([0b10110000, 0b11])  # more than the row of ids has room for
    made = SamplingMaskTensors(ids, bits, torch.tensor([2, 1, 5], dtype=torch.int32), 10).tolists()
    found = [
        compat.returned_supports(
            EngineCoreOutput("1", [7] * count, new_sampling_mask=made.slice_request(row, count))
        )
        for row, count in ((0, 1), (2, 1), (0, 3))
    ]
    want = [[[3, 8]], [[4, 5, 7, 8, 9]], [[3, 8], [5], [4, 5, 7, 8, 9]]]
    assert [[ids.tolist() for ids in tokens] for tokens in found] == want
    assert found[2][0].dtype == np.int32
    assert not inspect.signature(EngineArgs).parameters["return_sampling_mask"].default
    called = inspect.getsource(sampler.Sampler.__call__)
    assert "if self.return_sampling_mask:" in called and "processed_logits" in called
    own = SimpleNamespace(return_sampling_mask=True)
    runner = SimpleNamespace(
        driver_worker=SimpleNamespace(model_runner=SimpleNamespace(sampler=own))
    )
    compat.return_supports(SimpleNamespace(model_executor=runner), False)
    assert own.return_sampling_mask is False


def test_vllm_still_keeps_the_scale_of_scores_and_a_table_of_rotations(engine: VllmEngine) -> None:
    scales = compat.attention_scales(engine.model)
    assert scales.keys() == {f"model.layers.{i}.self_attn.attn" for i in range(2)}
    assert set(scales.values()) == {32**-0.5}
    (table,) = compat.rotary_tables(engine.model)
    angle = torch.tensor(7 * 10_000 ** (-3 / 16))  # of position 7, the fourth of 16 pairs
    assert table.shape[1] == 32
    found = table[7, [3, 16 + 3]].float()
    assert torch.allclose(found, torch.stack([angle.cos(), angle.sin()]), atol=1e-2)


def test_vllm_still_runs_a_step_by_execute_model_and_sample_tokens(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connector is a stand-in: the model has no experts."""
    from vllm.distributed.aux_output_connector import worker

    seen: list[Any] = []

    def prepare_output(batch: Any) -> Any:
        starts, bounds = batch.num_computed_tokens_np, batch.query_start_loc_np
        seen.append((starts.tolist(), bounds.tolist()))
        return SimpleNamespace(
            enqueue_cpu_copy=lambda sampled, rejected: seen.append(sampled.tolist()),
            process_output=dict,
        )

    connector = SimpleNamespace(
        begin_step=lambda metadata: None, prepare_output=prepare_output, close=lambda: None
    )
    monkeypatch.setattr(worker, "get_aux_output_connector", lambda *args: connector)
    compat.return_experts(engine.core)
    engine.generate([Request([5, 6, 7], seed=1)], SamplingParams(max_tokens=2, ignore_eos=True))
    assert seen == [([0], [0, 3]), [1], ([3], [0, 1]), [1]]
    for name in ("execute_model", "sample_tokens", "aux_output_connector"):
        delattr(engine.runner, name)
