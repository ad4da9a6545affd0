"""The routed experts that engines return are those of a plain forward pass of the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_calls
from rollout_checks import INSTALLED, engine_class, push_in_place
from tiny_megatron_models import save_model
from tiny_models import CHARS, save_tokenizer

from spmdrl.config import RolloutConfig
from spmdrl.data.packing import pack_samples
from spmdrl.data.routing import Routing
from spmdrl.rollout.answer_codec import pack, resume, unpack
from spmdrl.rollout.base import Answer, Completion, Request, SamplingParams
from spmdrl.types import Prompt, Sample

CONFIG = RolloutConfig(dtype="float32", max_num_seqs=6, kv_cache_mib=1)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
NUM_PROMPT = 70  # two whole blocks of vLLM's prefix cache, and a part of one
SIZES = {"num_experts": 8, "vocab_size": len(CHARS), "eos_token_id": 2, "bos_token_id": 1,
         "pad_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape."""
    found = []
    for number in range(2):
        path = tmp_path_factory.mktemp("experts")
        save_model("qwen3_moe normalised", path, **SIZES, initializer_range=0.02 + number)
        save_tokenizer(path)
        found.append(path)
    other = load(found[1])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    other.save_pretrained(found[1])
    return found


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def plain_routing(model: Any, ids: list[int]) -> np.ndarray:
    """(num_tokens, num_moe_layers, top_k), of one sequence by itself, by hooks on its routers."""
    found: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda m, a, out: found.append(out[2])) for gate in gates]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


def same(found: np.ndarray, wanted: np.ndarray) -> float:
    """The part of the choices of `wanted` that are in `found`: 1 but for rounding."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found[..., None] == wanted[..., None, :]).any(-1).mean()) if len(wanted) else 1.0


def requests() -> list[Request]:
    """Nine answers to three prompts; the first prompts are of one beginning."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(4, len(CHARS), (3, NUM_PROMPT), generator=draw)
    rows[1, :40] = rows[0, :40]
    return [Request(rows[i // 3].tolist(), seed=i) for i in range(9)]


def answers_of(topology: Any, name: str, folders: list[Path], tp: int) -> dict[str, Any]:
    """What an engine answers: at once; and with a push and a move amid the answers."""
    from spmdrl.distributed.topology import Topology

    torch.set_num_threads(1)
    config = replace(CONFIG, engine=name, tensor_parallel=tp)
    if name == "vllm":  # prompts in parts, and too few blocks for all that run: some start anew
        config = replace(config, engine_args={"max_num_batched_tokens": 48})
    ranks = Topology.build(topology.device, dp=topology.world // tp, tp=tp)
    engine = engine_class(name)(str(folders[0]), config, 128, ranks, return_routed_experts=True)
    whole = engine.generate(requests(), PARAMS)
    ids = engine.add(requests(), PARAMS)
    ended: dict[int, Completion] = {}
    for _ in range(24):
        ended.update(engine.step())
    weights = {n: t.detach() for n, t in load(folders[1]).state_dict().items()}
    push_in_place(engine, weights)
    engine.finish_load()
    engine.policy_version = 1
    for _ in range(8):  # some go on in the engine
        ended.update(engine.step())
    left = [id for id in ids if id not in ended]
    aborted = engine.abort(left)
    begun = []
    for id, part in zip(left, aborted, strict=True):
        request = requests()[ids.index(id)]
        begun.append(replace(
            request, response_ids=part.token_ids, logprobs=part.logprobs, versions=part.versions,
            routed_experts=part.routed_experts,
        ))  # fmt: skip
    resumed = engine.generate(begun, PARAMS)
    ended |= dict(zip(left, resumed, strict=True))
    engine.shutdown()
    return {"whole": whole, "moved": [ended[id] for id in ids]}


CASES = [("hf", 1), *((("vllm", 1), ("vllm", 2)) if "vllm" in INSTALLED else ())]


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.parametrize(("name", "tp"), CASES)
def test_an_engine_returns_the_experts_of_each_token(name, tp, folders):
    """Of prompts that share blocks too, of parts of prompts, of answers that started anew; and of
    answers that other weights or another request have gone on with, those of the weights that chose
    the next token. vLLM on a CPU has them by compat.return_experts."""
    old, new = map(load, folders)
    for found in run_calls(tp, [(answers_of, (name, folders, tp))])[0]:
        mean = []
        for request, answer in zip(requests(), found["whole"], strict=True):
            wanted = plain_routing(old, [*request.prompt_ids, *answer.token_ids[:-1]])
            assert answer.routed_experts.dtype == np.uint8
            mean.append(same(answer.routed_experts, wanted))
        assert min(mean) > 0.99 and np.mean(mean) > 0.999
        changed = []
        for request, answer in zip(requests(), found["moved"], strict=True):
            assert len(answer.token_ids) == PARAMS.max_tokens
            ids = [*request.prompt_ids, *answer.token_ids[:-1]]
            # the token at i was chosen by the pass that computed the one before it
            num_old = answer.versions.count(0)
            of_old = NUM_PROMPT + num_old - 1 if num_old else 0
            by_old, by_new = plain_routing(old, ids), plain_routing(new, ids)
            assert answer.versions == sorted(answer.versions)
            assert same(answer.routed_experts[:of_old], by_old[:of_old]) > 0.99
            assert same(answer.routed_experts[of_old:], by_new[of_old:]) > 0.99
            changed.append(same(by_old, by_new))
        assert np.mean(changed) < 0.97  # or it would not be seen whose they are


def test_experts_travel_with_answers_and_cost_nothing_without() -> None:
    draw = np.random.default_rng(0)
    plain = {3: Completion([5, 6], [-0.5, -1.0], "stop", [0, 0]), 7: Completion([], [], "abort")}
    assert len(pack(plain)) == 4 * (2 + 3 * 2 + 3 * 2)
    for dtype, rows in ((np.uint8, 5), (np.int16, 3)):
        experts = draw.integers(0, 250, (rows, 3, 2)).astype(dtype)
        given = plain | {3: replace(plain[3], routed_experts=experts)}
        found = unpack(pack(given))
        assert found == plain and found[7].routed_experts is None
        assert found[3].routed_experts.dtype == dtype
        assert np.array_equal(found[3].routed_experts, experts)
        resumed = resume(Request([1, 2], seed=0), found[3])
        assert resumed.num_routed == rows
        answer = Answer.begin(resumed, PARAMS)
        answer.add_routed(np.zeros((2, 3, 2), dtype), rows)  # known already
        answer.add_routed(np.ones((2, 3, 2), dtype), rows + 1)
        whole = answer.completion().routed_experts
        wanted = np.concatenate([experts, np.ones((1, 3, 2), dtype)])
        assert np.array_equal(whole, wanted) and whole.dtype == dtype


def test_packed_samples_have_the_experts_that_are_known() -> None:
    def sample(rows: int, mask: list[int], invalid: str | None = None) -> Sample:
        experts = np.full((rows, 2, 2), rows, np.uint8)
        return Sample(
            Prompt(0, [1, 2], "", None, ""), 0, 0, [3, 4, 5], [0.0] * 3, mask, [0] * 3, "stop",
            invalid=invalid, routed_experts=experts if rows else None,
        )  # fmt: skip

    samples = [sample(4, [1, 1, 1]), sample(3, [1, 1, 0]), sample(0, [1, 1, 1], "failed")]
    routing = Routing(2, 2, 300)
    batch = pack_samples(samples, routing=routing)
    assert batch.routed_experts.dtype == torch.int16
    first = batch.routed_experts[:, 0].tolist()
    assert first == [[4, 4]] * 4 + [[0, 1]] + [[3, 3]] * 3 + [[0, 1]] * 7
    picked = batch.select([1, 0]).routed_experts
    assert torch.equal(picked, torch.cat([batch.routed_experts[5:10], batch.routed_experts[:5]]))
    assert pack_samples(samples).routed_experts is None
    with pytest.raises(AssertionError):  # the last token's experts are missing
        pack_samples([sample(3, [1, 1, 1])], routing=routing)
