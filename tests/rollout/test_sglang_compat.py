"""What spmdrl uses of SGLang's internals: a test that fails names what has moved.

The engine is a real one, of a tiny model. Runs where SGLang is installed, in an environment of its
own; test_sglang_signatures.py checks the same calls everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_checks import INSTALLED, engine_class, push_in_place, worst_error
from safetensors.torch import load_file
from tiny_megatron_models import save_model

from spmdrl.config import RolloutConfig
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import process_groups
from spmdrl.rollout.base import SamplingParams
from spmdrl.rollout.sglang import compat

pytestmark = pytest.mark.skipif("sglang" not in INSTALLED, reason="needs SGLang, and a GPU")

CONFIG = RolloutConfig(dtype="float32", max_num_seqs=4, kv_cache_mib=16)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_weights_of_other_families_are_pushed_in_place(
    family: str, topology: Topology, tmp_path: Path
) -> None:
    """The first test of the file: no other engine may stand. Experts; an own head."""
    sizes = {"qwen3_moe": {"moe_intermediate_size": 64}, "llama": {"intermediate_size": 128}}
    model = save_model(family, tmp_path, **sizes[family]).eval()  # SGLang pads others on a CPU
    stored = load_file(tmp_path / "model.safetensors")
    made = engine_class("sglang")(str(tmp_path), CONFIG, 64, topology)
    try:
        assert made.check_weights(iter(stored.items())) == len(stored)
        away = worst_error(made, model, SamplingParams(max_tokens=12), n=6)
        assert away < (1e-2 if made.device.type == "cuda" else 1e-5)
        new = {name: tensor + 0.02 for name, tensor in stored.items()}
        push_in_place(made, new)
        assert made.check_weights(iter(new.items())) == len(stored)
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def engine(topology: Topology, qwen3: Path) -> Iterator[Any]:
    """compat.import_engine, server_args and build_scheduler made its scheduler."""
    from spmdrl.rollout.sglang.engine import SglangEngine

    groups = process_groups()
    made = SglangEngine(str(qwen3), CONFIG, 64, topology)
    yield made
    parallel_state: Any = sys.modules["sglang.srt.distributed.parallel_state"]
    assert parallel_state._WORLD is not None
    made.shutdown()  # by compat.shutdown and compat.destroy_groups
    assert parallel_state._WORLD is None and process_groups() == groups


@pytest.fixture
def scheduler(engine: Any) -> Iterator[Any]:
    """Draws token 7 at every place."""
    compat.replace_draws(engine.scheduler, lambda logits: torch.full((len(logits),), 7))
    yield engine.scheduler
    compat.replace_draws(engine.scheduler, engine.draw)


def step(scheduler: Any) -> list[str]:
    batch = compat.next_batch(scheduler)
    result = None if batch is None else compat.forward(scheduler, batch)
    compat.finish_batch(scheduler, batch, result)
    return [] if batch is None else compat.row_names(batch)


def test_sglang_still_builds_a_scheduler_without_sockets(engine: Any) -> None:
    scheduler = engine.scheduler
    assert type(scheduler).__mro__[1].__module__ == "sglang.srt.managers.scheduler"
    assert isinstance(compat.model_of(scheduler), torch.nn.Module)
    assert compat.most_tokens(scheduler) > 64
    caches = compat.kv_caches(scheduler)
    assert len(caches) == 2 * 2 and all(isinstance(cache, torch.Tensor) for cache in caches)
    assert compat.is_idle(scheduler)


@torch.no_grad()
def test_sglang_still_steps_requests_as_we_drive_it(scheduler: Any) -> None:
    first = compat.add_request(scheduler, "0001", [5, 6, 7], 3)
    second = compat.add_request(scheduler, "0002", [5, 6], 9)
    assert compat.num_waiting(scheduler) == 2 and compat.takes_token(first)
    assert step(scheduler) == ["0001", "0002"] and compat.num_waiting(scheduler) == 0
    compat.end_request(second)  # with the token of the next pass
    step(scheduler)
    assert list(second.output_ids) == [7, 7] and second.finished()
    assert step(scheduler) == ["0001"] and list(first.output_ids) == [7, 7, 7]
    step(scheduler)
    assert compat.is_idle(scheduler)
    with pytest.raises(ValueError, match="would end them after"):
        compat.add_request(scheduler, "0003", [5, 6], 10**6)
    compat.abort_request(scheduler, "0003")
    assert compat.is_idle(scheduler)


@torch.no_grad()
def test_sglang_still_computes_running_requests_anew(scheduler: Any) -> None:
    request = compat.add_request(scheduler, "0004", [5, 6, 7], 4)
    step(scheduler)
    assert compat.forget_prefixes(scheduler) and compat.num_waiting(scheduler) == 1
    while not compat.is_idle(scheduler):
        step(scheduler)
    assert list(request.output_ids) == [7] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose memory is released")
def test_sglang_still_releases_its_memory(engine: Any) -> None:
    """engine.build called compat.use_memory_saver_in_process, since CONFIG.sleep is on."""
    free = torch.cuda.mem_get_info()[0]
    compat.release_memory(engine.scheduler)
    assert torch.cuda.mem_get_info()[0] - free > 0.8 * CONFIG.kv_cache_mib * 2**20
    compat.resume_memory(engine.scheduler, ["weights", "kv_cache"])
