"""The same samples on any number of ranks, and weights that reach every shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_calls
from rollout_checks import ENGINE_PARAMS
from tiny_models import CHARS, save_qwen3

pytestmark = [pytest.mark.ranks, pytest.mark.strict_nccl]

BUILT_FOR_GPUS = "sglang" if torch.cuda.is_available() else ""  # and not for these ranks
WITH_TP = [param for param in ENGINE_PARAMS if param not in ("hf", BUILT_FOR_GPUS)]

NUM_PROMPTS, SAMPLES = 5, 2


def _sample(topology: Any, cases: list[tuple[str, int]], folder: str) -> list[Any]:
    """Per (engine, tp): {(group, index): (token ids, logprobs)} of this rank's samples."""
    from rollout_checks import engine_class
    from transformers import AutoTokenizer

    from spmdrl.config import RolloutConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.base import SamplingParams
    from spmdrl.rollout.sampling import questions_of, sample_questions
    from spmdrl.rollout.scheduler import Scheduler
    from spmdrl.types import Prompt

    tokenizer = AutoTokenizer.from_pretrained(folder)
    params = SamplingParams(temperature=1.0, max_tokens=24)
    prompts = [
        (g, Prompt(id=10 + g, token_ids=[5 + g] * (1 + g), data_source="", ground_truth=None,
                   text=""))
        for g in range(NUM_PROMPTS)
    ]  # fmt: skip
    questions = questions_of(prompts, SAMPLES, run_seed=0, step=3)
    result = []
    for name, tp in cases:
        ranks = Topology.build(torch.device("cpu"), dp=-1, tp=tp)
        config = RolloutConfig(dtype="float32", max_num_seqs=8, kv_cache_mib=16, tensor_parallel=tp)
        engine = engine_class(name)(folder, config, 64, ranks)
        scheduler = Scheduler(engine, ranks)
        samples, _ = sample_questions(scheduler, questions, params, tokenizer=tokenizer)
        engine.shutdown()
        result.append({(s.group, s.index): (s.response_ids, s.rollout_logprobs) for s in samples})
    return result


@pytest.fixture(scope="module", params=WITH_TP)
def name(request: pytest.FixtureRequest) -> str:
    """Of an engine with tensor parallelism that is installed."""
    return str(request.param)


@pytest.fixture(scope="module")
def on_two(name: str, qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What _sample and _update give on two ranks.

    Updates are of tied weights; untied ones with a KV head that both ranks hold; biases and a tied
    odd vocabulary.
    """
    from rollout_checks import save_family

    folder = tmp_path_factory.mktemp("updates")
    kv_heads = 2 if name == "sglang" else 1  # on a CPU it pads heads instead, which we refuse
    save_qwen3(folder / "tied")
    save_qwen3(folder / "untied", tie_word_embeddings=False, num_key_value_heads=kv_heads)
    save_family("qwen2", folder / "biases", kv_heads)
    assert len(CHARS) % 64  # so that the vocabulary is padded, on the last rank only
    folders = [str(folder / case) for case in ("tied", "untied", "biases")]
    engines = [(name, 1), ("hf", 1), (name, 2)]
    return run_calls(2, [(_sample, (engines, str(qwen3))), (_update, (name, folders))])


def test_samples_do_not_depend_on_the_number_of_ranks(name: str, qwen3: Path, on_two: list) -> None:
    ((alone,),) = run_calls(1, [(_sample, ([(name, 1), ("hf", 1)], str(qwen3)))])
    first, second = on_two[0]
    assert not second[2]  # the leader of a tensor-parallel group returns the samples
    for a, b, expected in zip(first, second, [*alone, alone[0]], strict=True):
        together = a | b
        assert together.keys() == expected.keys()
        for address, (token_ids, logprobs) in expected.items():
            assert together[address][0] == token_ids
            assert together[address][1] == pytest.approx(logprobs, abs=1e-5)


def _update(topology: Any, name: str, folders: list[str]) -> list[float]:
    """Worst logprob error after an update; raises where a flipped element is not found."""
    from rollout_checks import (
        engine_class,
        flip_every_parameter,
        load_hf,
        push_in_place,
        rng_states,
        worst_error,
    )

    from spmdrl.config import RolloutConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.base import SamplingParams

    ranks = Topology.build(torch.device("cpu"), dp=1, tp=2)
    config = RolloutConfig(dtype="float32", max_num_seqs=16, kv_cache_mib=16, tensor_parallel=2)
    params = SamplingParams(temperature=1.0, max_tokens=12)
    errors = []
    for folder in folders:
        states = rng_states()
        engine = engine_class(name)(folder, config, 64, ranks)
        assert rng_states() == states
        model = load_hf(Path(folder))
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
        if name == "vllm" and hasattr(torch.ops._C, "init_shm_manager"):  # built for AVX-512 alone
            maps = Path("/proc/self/maps").read_text().splitlines()
            shared = [line for line in maps if "cpushm" in line]
            assert shared and all(line.endswith("(deleted)") for line in shared), shared
        push_in_place(engine, dict(model.named_parameters()))
        errors.append(worst_error(engine, model, params, n=6))
        engine.sleep()
        engine.wake()
        errors.append(worst_error(engine, model, params, n=6))
        flip_every_parameter(engine, dict(model.named_parameters()))
        engine.shutdown()
        torch.distributed.barrier()
    return errors


def test_new_weights_reach_every_shard(on_two: list) -> None:
    for errors in on_two[1]:
        assert len(errors) == 6
        assert max(errors) < 1e-5
