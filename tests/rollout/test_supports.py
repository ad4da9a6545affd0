"""The token ids that engines say were left when a token was drawn (rollout.keep_sampling_mask)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_calls
from rollout_checks import EOS, INSTALLED, engine_class, load_hf
from tiny_models import CHARS, save_qwen3

from spmdrl.config import RolloutConfig
from spmdrl.data.packing import pack_samples
from spmdrl.rollout.answer_codec import pack, resume, unpack
from spmdrl.rollout.base import Completion, Request
from spmdrl.rollout.draw import support_of
from spmdrl.rollout.multi_turn.conversation import with_reply
from spmdrl.rollout.sampling import (
    SampleRequest,
    as_sample,
    completion_of,
    greedy_params,
    training_params,
)
from spmdrl.training.replay.rerun import forget_rewards
from spmdrl.types import Prompt

CONFIG = RolloutConfig(
    dtype="float32", max_num_seqs=4, kv_cache_mib=1, temperature=0.8, top_k=12, top_p=0.9,
    min_p=0.02, min_tokens=6, max_tokens=24, keep_sampling_mask=True,
)  # fmt: skip
PARAMS = training_params(CONFIG)
NUM_PROMPT = 70
WIDTH = 24


def requests() -> list[Request]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(4, len(CHARS), (3, NUM_PROMPT), generator=draw)
    return [Request(rows[i // 3].tolist(), seed=i) for i in range(9)]


def answers_of(topology: Any, name: str, folder: Path, tp: int) -> list[list[Completion]]:
    """Answers at once; others that are begun, moved and gone on with; and greedy ones."""
    from spmdrl.distributed.topology import Topology

    torch.set_num_threads(1)
    config = replace(CONFIG, engine=name, tensor_parallel=tp)
    if name == "vllm":  # prompts in parts, and too few blocks for all that run: some start anew
        config = replace(config, engine_args={"max_num_batched_tokens": 48})
    ranks = Topology.build(topology.device, dp=topology.world // tp, tp=tp)
    engine = engine_class(name)(str(folder), config, 128, ranks)
    at_once = engine.generate(requests(), PARAMS)
    ids = engine.add(requests(), PARAMS)
    greedy = engine.add(requests()[:2], greedy_params(config))  # beside those that are recorded
    ended: dict[int, Completion] = {}
    for _ in range(14):
        ended.update(engine.step())
    left = [id for id in ids if id not in ended]
    begun = dict(zip(left, engine.abort(left), strict=True))
    begun = {id: unpack(pack({0: part}))[0] for id, part in begun.items()}
    while not set(greedy) <= set(ended):
        ended.update(engine.step())
    again = [resume(requests()[ids.index(id)], begun[id]) for id in left]
    ended |= dict(zip(left, engine.generate(again, PARAMS), strict=True))
    engine.shutdown()
    assert any(part.token_ids for part in begun.values())
    return [at_once, [ended[id] for id in ids], [ended[id] for id in greedy]]


def kept_by_loops(logits: list[float], num_before: int) -> set[int]:
    """The ids that are left of a distribution, one rule after the other."""
    weights = {v: math.exp(z / PARAMS.temperature) for v, z in enumerate(logits)}
    if num_before < PARAMS.min_tokens:
        del weights[EOS]
    most = max(weights.values())
    weights = {v: w for v, w in weights.items() if w >= PARAMS.min_p * most}
    order = sorted(weights, key=lambda v: -weights[v])[: PARAMS.top_k]
    total, mass, kept = sum(weights[v] for v in order), 0.0, set()
    for v in order:
        if mass < PARAMS.top_p * total:
            kept.add(v)
            mass += weights[v]
    return kept


CASES = [("hf", 1), *((("vllm", 2),) if "vllm" in INSTALLED else ())]


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.parametrize(("name", "tp"), CASES)
def test_an_engine_says_what_was_left_and_its_logprobs_are_of_that(name, tp, tmp_path):
    """Also of answers that were moved, which go on as if they had not been."""
    model = load_hf(save_qwen3(tmp_path, initializer_range=0.2))
    by_rank = run_calls(tp, [(answers_of, (name, tmp_path, tp))])[0]
    at_once, moved, greedy = by_rank[0]
    assert all(answer.support_ids is None for answer in greedy)
    sizes: list[int] = []
    for request, answer, other in zip(requests(), at_once, moved, strict=True):
        count = len(answer.token_ids)
        assert count >= 6
        assert answer.token_ids == other.token_ids
        assert np.array_equal(answer.support_ids, other.support_ids)
        assert answer.support_ids.shape == (count, WIDTH) and answer.support_ids.dtype == np.int32
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt_ids, *answer.token_ids]])).logits[0]
        for t, token in enumerate(answer.token_ids):
            row = logits[NUM_PROMPT - 1 + t].double() / PARAMS.temperature
            ids = answer.support_ids[t].tolist()
            kept = [v for v in ids if v >= 0]
            assert ids == [*sorted(kept), *[-1] * (WIDTH - len(kept))] and token in kept
            assert set(kept) == kept_by_loops((row * PARAMS.temperature).tolist(), t)
            wanted = float(row[token] - row[kept].logsumexp(0))
            assert answer.logprobs[t] == pytest.approx(wanted, abs=2e-5)
            sizes.append(len(kept))
    assert len(set(sizes)) > 4  # or one width would do
    assert all(np.array_equal(a.support_ids, b.support_ids)
               for a, b in zip(at_once, by_rank[-1][0], strict=True))  # fmt: skip


def test_supports_have_a_row_for_each_token_and_room_for_equal_logits() -> None:
    cut = float("-inf")
    logprobs = torch.tensor([[cut, -1.0, cut, -0.5], [-1.0, -1.0, -1.0, -1.0], [cut, cut, 0, cut]])
    assert support_of(logprobs, 3).tolist() == [[1, 3, -1], [-1, -1, -1], [2, -1, -1]]
    assert training_params(replace(CONFIG, keep_sampling_mask=False)).support_width == 0


def test_supports_travel_with_answers_and_a_reply_has_none() -> None:
    rows = np.array([[5, 9], [6, -1]], np.int32)
    plain = {3: Completion([5, 6], [-0.5, 0.0], "stop", [0, 0]), 7: Completion([], [], "abort")}
    experts = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    for others in ({}, {"routed_experts": experts}):
        given = plain | {3: replace(plain[3], support_ids=rows, **others)}
        found = unpack(pack(given))
        assert found == plain and found[7].support_ids is None
        assert np.array_equal(found[3].support_ids, rows)
        assert (found[3].routed_experts is None) == (not others)
        assert not others or np.array_equal(found[3].routed_experts, experts)
        assert np.array_equal(resume(Request([1], 0), found[3]).begun().support_ids, rows)
    assert with_reply(rows, 2).tolist() == [[5, 9], [6, -1], [-1, -1], [-1, -1]]
    assert with_reply(None, 2) is None


def test_samples_without_a_support_for_each_token_are_invalid() -> None:
    answer = Completion(
        [5, 6, 9], [-0.5, 0.0, 0.0], "stop", [0, -1, 0], ["[]"],
        support_ids=np.array([[5, 9], [-1, -1], [9, -1]], np.int32),
    )  # fmt: skip
    answer = replace(answer, replies=['[{"role": "tool", "content": "6"}]'])
    question = SampleRequest(Prompt(0, [7, 8], "s", None, "p"), 0, 0, 0)
    good = as_sample(question, answer, ["a", "b"])
    assert good.invalid is None
    assert np.array_equal(completion_of(good).support_ids, answer.support_ids)
    batch = pack_samples([good], support_width=2)
    assert batch.support_ids.tolist() == [[-1, -1], [-1, -1], [5, 9], [-1, -1], [9, -1]]
    lost = replace(answer, support_ids=np.array([[5, 9], [-1, -1], [-1, -1]], np.int32))
    bad = as_sample(question, lost, ["a", "b"])
    forget_rewards(bad)  # to be scored anew
    assert "1 tokens were drawn among more than 2 ids" in bad.invalid
    batch = pack_samples([bad, good], support_width=2)
    assert batch.loss_mask[:5].sum() == 0 and batch.support_ids[:5].eq(-1).all()
    wrong = replace(answer, support_ids=np.array([[4, 9], [-1, -1], [9, -1]], np.int32))
    with pytest.raises(AssertionError, match="not among those"):
        pack_samples([as_sample(question, wrong, ["a", "b"])], support_width=2)
