"""Weights from trainers to engines on real gloo ranks: same or other ranks, any sizes."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import groups_that_end, run_ranks
from tiny_models import CHARS, save_qwen3, save_tokenizer

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.strict_nccl]


def save_moe(folder: Path) -> Path:
    """Untied, four experts; transformers keeps the experts of a layer in one tensor."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=len(CHARS), hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_experts=4, num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, eos_token_id=2,
        bos_token_id=1, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


class Case(NamedTuple):
    """Who trains and who samples: global ranks, FSDP degree, tensor parallelism, and what."""

    actor: list[int]
    rollout: list[int]
    model: str
    fsdp: int = -1
    tp: int = 1
    engine: str = "hf"
    slot: int = 1 << 20
    dtype: str = "bfloat16"
    quantization: str | None = None
    in_place: bool = True  # False: as on a GPU that weights leave between pushes


class Trainer:
    """What a sync needs of a TrainEngine: FSDP2's shards, of a model that each rank reads."""

    def __init__(self, folder: str, topology: Any) -> None:
        from rollout_checks import load_hf
        from torch.distributed.fsdp import fully_shard

        self.model = load_hf(Path(folder))
        fully_shard(self.model, mesh=topology.mesh["dp", "fsdp"])
        self.pretrained = [self.model.config]

    def named_shards(self) -> dict[str, Any]:
        from spmdrl.weights.checkpoint_names import checkpoint_parts
        from spmdrl.weights.shards import shards_by_part

        parts = checkpoint_parts(self.model.config)
        return shards_by_part(dict(self.model.named_parameters()), parts)


def sync_on(topology: Any, tuples: list[tuple]) -> list[dict[str, Any]]:
    """What `pushed_twice` finds for each case."""
    results = []
    for values in tuples:
        with groups_that_end():
            results.append(pushed_twice(Case(*values)))
    return results


def pushed_twice(case: Case) -> dict[str, Any]:
    """Changes the weights, pushes them and proves them, twice; planned and moved bytes."""
    from spmdrl.config import RolloutConfig, TrainConfig, WeightsConfig
    from spmdrl.distributed.collectives import level_group_count
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.rollout.base import WeightMismatch
    from spmdrl.rollout.hf.engine import HfEngine
    from spmdrl.rollout.vllm.engine import VllmEngine
    from spmdrl.training import weight_sync as sync
    from spmdrl.weights import plan
    from spmdrl.weights.bucket_messages import Binder
    from spmdrl.weights.transfer import gathered

    engines: dict[str, Any] = {"vllm": VllmEngine, "hf": HfEngine}
    cpu = torch.device("cpu")
    degrees = train_degrees(TrainConfig(fsdp=case.fsdp))
    actor_ranks = Topology.build(cpu, case.actor, **degrees)
    rollout_ranks = Topology.build(cpu, case.rollout, dp=-1, tp=case.tp)
    actor = rollout = None
    if actor_ranks.here:
        actor = Trainer(case.model, actor_ranks)
    settings: Any = {"dtype": case.dtype, "quantization": case.quantization}
    config = RolloutConfig(kv_cache_mib=16, tensor_parallel=case.tp, **settings)
    if rollout_ranks.here:
        rollout = engines[case.engine](case.model, config, 64, rollout_ranks)
    level_group_count()  # an engine makes groups on its own ranks
    sync.slot_bytes = lambda bucket, device, case=case: case.slot
    weights = sync.WeightSync(
        actor,
        actor_ranks,
        rollout,
        rollout_ranks,
        case.dtype,
        WeightsConfig(check=True),
    )
    for transfer in weights.transfers:
        transfer.in_place = case.in_place
    stats, planned, bound, kept = [], [], [], 0
    for step in range(3):
        if actor is not None:
            change(actor, step)
        if step == 1:
            move(actor, rollout, MOVED if case.in_place else "")
        with calls_of(plan, "make_transfer_plan") as plans, calls_of(Binder, "bind") as binds:
            stats.append(weights.push())  # and checks them
            kept += sum(len(t.buckets) + len(t.slots) for t in weights.transfers)
            if actor is not None:
                for _ in gathered(actor.named_shards(), weights.dtype, 1 << 20, actor_ranks):
                    pass
        planned.append(len(plans))
        in_push = {id(b) for transfer in weights.transfers for b in transfer.plan.buckets}
        bound.append(sum(id(bucket) in in_push for bucket in binds))
    if actor is not None:
        change(actor, 3)
    noticed = False
    try:
        weights.check()
    except WeightMismatch:
        noticed = True
    found = {
        "planned": [s.planned_bytes for s in stats], "moved": [s.moved_bytes for s in stats],
        "opaque": stats[0].opaque_bytes, "noticed": noticed, "plan": weights.describe(),
        "costs": [transfer.plan.cost for transfer in weights.transfers],
        "plans": planned, "bound": bound, "kept": kept,
        "buckets": sum(len(transfer.plan.buckets) for transfer in weights.transfers),
        "refused": refuses_infinity(weights) if case.quantization else "",
    }  # fmt: skip
    if rollout is not None:
        rollout.shutdown()
    return found


@contextmanager
def calls_of(owner: Any, name: str) -> Iterator[list[Any]]:
    """Notes the last argument of every call of a function, which is called as ever."""
    real, seen = getattr(owner, name), []

    def counted(*args: Any) -> Any:
        seen.append(args[-1])
        return real(*args)

    setattr(owner, name, counted)
    try:
        yield seen
    finally:
        setattr(owner, name, real)


def refuses_infinity(weights: Any) -> str:
    """One rank's shard is no longer finite: what each rank says to a push."""
    if torch.distributed.get_rank() == 0 and weights.actor is not None:
        with torch.no_grad():
            _, tensor = weights.shards(weights.weights)["model.layers.1.mlp.down_proj.weight"][-1]
            tensor[-1, 3] = -torch.inf
    if not weights.topology.here:
        return ""
    try:
        weights.push()
    except ValueError as error:
        return str(error)
    return "pushed"


@torch.no_grad()
def change(actor: Any, seed: int) -> None:
    """Every element, by an amount that depends on its place but not on who holds it."""
    for parameter in actor.model.parameters():
        local = parameter.to_local()
        local.mul_(-1.0).add_(0.01 * (seed + 1))


MOVED = "layers.1.post_attention_layernorm.weight"


@torch.no_grad()
def move(actor: Any, rollout: Any, suffix: str) -> None:
    """Weights with this end of their name lie elsewhere from here on; what was there is spoilt."""
    models = [model for model in (actor and actor.model, getattr(rollout, "model", None)) if model]
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith(suffix):
                local = getattr(parameter, "_local_tensor", parameter)
                old = local.data
                local.data = old.clone()
                old.fill_(torch.nan)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_moe(tmp_path_factory.mktemp("moe")))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Untied; no size is divisible by 2 or 3 where that can be helped."""
    folder = tmp_path_factory.mktemp("odd")
    sizes = {"hidden_size": 35, "intermediate_size": 77, "tie_word_embeddings": False}
    return str(save_qwen3(folder, num_attention_heads=5, num_key_value_heads=5, **sizes))


def prove(world: int, cases: list[Case], timeout_s: float = 70) -> list[list[dict[str, Any]]]:
    results = run_ranks(world, sync_on, [tuple(case) for case in cases], timeout_s=timeout_s)
    for case, *ranks in zip(cases, *results, strict=True):
        for rank, result in enumerate(ranks):
            assert result["planned"] == result["moved"], (case, rank)
            assert result["noticed"] == (rank in case.rollout), (case, rank)
            assert result["opaque"] == 0, case
            # a push, its check and an export plan what is new to them, once; views that were made
            # for a push serve the next one, unless tensors have moved or are to leave
            assert result["plans"][1:] == [0, 0], (case, rank)
            assert result["bound"][2] == (0 if case.in_place else result["buckets"]), (case, rank)
            assert bool(result["kept"]) == (case.in_place and result["buckets"] > 0), (case, rank)
        costs = ranks[case.actor[0]]["costs"]
        moved = sum(result["moved"][0] for result in ranks)
        assert moved == sum(cost.handed + cost.gathered for cost in costs), case
    return results


def test_one_rank(qwen3: Path, odd: str) -> None:
    (results,) = prove(1, [Case([0], [0], str(qwen3)), Case([0], [0], odd)])
    assert all(result["moved"] == [0, 0, 0] for result in results)


def test_two_ranks(qwen3: Path, odd: str, moe: str) -> None:
    tied = str(qwen3)
    cases = [
        Case([0, 1], [0, 1], tied),
        Case([0, 1], [0, 1], tied, slot=300),  # every row on its own
        Case([0, 1], [0, 1], odd, slot=3000),
        Case([0, 1], [0, 1], odd, slot=3000, in_place=False),
        Case([0, 1], [0, 1], odd, fsdp=1),
        Case([0], [1], tied),
        Case([1], [0], odd, slot=3000),
        Case([0, 1], [1], odd),
        Case([1], [0, 1], odd),
        # tied and tp=2: test_four_ranks
        Case([0, 1], [0, 1], moe, engine="vllm", slot=5000, dtype="float32"),
        Case([0], [0, 1], moe, engine="vllm", tp=2),
        Case([0, 1], [1], moe),
    ]
    prove(2, cases)


def test_three_ranks(qwen3: Path, odd: str) -> None:
    tied = str(qwen3)
    cases = [
        Case([0, 1, 2], [0, 1, 2], tied),
        Case([0, 1, 2], [0, 1, 2], odd, slot=3000),
        Case([0, 1], [2], tied),
        Case([2], [0, 1], odd),
        Case([0, 1], [1, 2], tied),
        Case([0, 2], [1], odd, fsdp=1),
    ]
    prove(3, cases)


def test_four_ranks(qwen3: Path, odd: str) -> None:
    tied, four = str(qwen3), [0, 1, 2, 3]
    cases = [
        Case([0, 1], [2, 3], tied),
        Case(four, four, tied, fsdp=2),
        Case([0, 1], four, odd),
        Case(four, four, tied, fsdp=2, engine="vllm", tp=2),  # two engines with the same halves
        Case(four, [0, 3], odd, fsdp=2),
    ]
    prove(4, cases)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For FP8: blocks that shards end within, and half ones at the edge of the hidden size."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 160, "intermediate_size": 256, "head_dim": 128, **heads}
    return str(save_qwen3(tmp_path_factory.mktemp("wide"), **sizes))


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM multiplies FP8 with AMX tiles"
)
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [([0, 1], [0, 1], 1, 1 << 20), ([0], [1], 1, 200_000)]),
        (2, [([0, 1], [0, 1], 2, 200_000)]),
        (3, [([0, 1, 2], [1, 2], 2, 200_000)]),
    ],
)  # fmt: skip
def test_what_goes_to_an_fp8_engine_is_the_whole_matrix_quantised(
    wide: str, world: int, cases: list[tuple]
) -> None:
    """Every rank's check quantises full float32 matrices, and compares bit by bit."""
    given = [
        Case(actor, rollout, wide, tp=tp, slot=slot, engine="vllm", quantization="fp8")
        for actor, rollout, tp, slot in cases
    ]
    for case, *ranks in zip(given, *prove(world, given, 120), strict=True):
        plain, fp8 = ranks[0]["costs"]
        # the embedding, tied, and the norms; all the rest is a byte each
        assert fp8.handed + fp8.gathered > 8 * (plain.handed + plain.gathered), case
        assert fp8.busiest <= 2 * 2 * 7 * 256 * 160, case
        for result in ranks:
            assert "model.layers.1.mlp.down_proj.weight" in result["refused"], case


def memory_on(topology: Any, cases: list[tuple]) -> list[tuple[int, int]]:
    """(bytes by which the process grew at its fullest, bytes of a bucket) of each case's push."""
    from transformers import Qwen3Config

    from spmdrl.config import WeightsConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.training import weight_sync as sync
    from spmdrl.weights import transfer as reshard
    from spmdrl.weights.engine_layout import layout_by_name

    class Held:
        """A trainer (float32 row shards) or, with dp and tp, an engine of big matrices."""

        has_weights = True

        def __init__(self, ranks: Any, dtype: torch.dtype, split: int) -> None:
            sizes = [(1024 // split, 2048)] * 12
            self.model = torch.nn.Module()
            for i, size in enumerate(sizes):
                weight = torch.nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
                self.model.register_parameter(f"w{i}", weight)
            self.ranks = ranks
            self.pretrained = [Qwen3Config()]

        def named_shards(self) -> dict[str, Any]:
            from torch.distributed.tensor import DTensor, Shard

            from spmdrl.weights.shards import shards_of

            mesh = self.ranks.mesh["fsdp"]
            return {
                name: shards_of(DTensor.from_local(p, mesh, [Shard(0)]))
                for name, p in self.model.named_parameters()
            }

        def layout(self, shapes: Any) -> Any:
            return layout_by_name(self.model, shapes)

        def finish_load(self, running: bool = False) -> None:
            pass

    results = []
    for actor, rollout, bucket, dtype in cases:
        cpu = torch.device("cpu")
        actor_ranks = Topology.build(cpu, actor, dp=1, fsdp=-1)
        rollout_ranks = Topology.build(cpu, rollout, dp=-1, tp=1)
        trainer = Held(actor_ranks, torch.float32, len(actor)) if actor_ranks.here else None
        engine = Held(rollout_ranks, getattr(torch, dtype), 1) if rollout_ranks.here else None
        sync.slot_bytes = lambda num_bytes, device: num_bytes // reshard.SLOTS
        weights: Any = sync.WeightSync(
            trainer, actor_ranks, engine, rollout_ranks, "bfloat16", WeightsConfig(bucket >> 20)
        )
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not to be used again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = resident("VmHWM")
        weights.push()
        results.append((resident("VmHWM") - before, bucket))
        del weights, trainer, engine
        gc.collect()  # they hold each other
    return results


def resident(field: str) -> int:
    """Bytes of this process that are in memory: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak")
def test_a_sync_takes_at_most_one_bucket_and_one_tensor() -> None:
    """The model is 48 MiB in bfloat16, a tensor 4 MiB; gloo's and malloc's needs are included.

    It travels in bfloat16: an engine of that type is received into, one in float32 copied into.
    """
    both = [0, 1]
    cases = [
        (both, both, 8 << 20, "float32"),
        (both, both, 16 << 20, "float32"),
        ([0], [1], 8 << 20, "float32"),
        ([0], [1], 8 << 20, "bfloat16"),
        ([1], both, 8 << 20, "float32"),
        ([1], both, 8 << 20, "bfloat16"),
    ]
    too_large = (both, both, 64 << 20, "float32")
    # one more at first: code that runs for the first time takes memory too
    for _, *results in run_ranks(2, memory_on, [cases[0], *cases, too_large], timeout_s=90):
        for case, (grown, bucket) in zip(cases, results, strict=False):
            assert grown <= bucket + (4 << 20), case
        assert results[-1][0] > 12 << 20  # the measure sees a bucket that is too large
