"""The endpoint in a rank, with an engine behind it and the clients that agents bring. One round of
the scheduler has a trajectory for each case.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from agent_models import save_calling_model

sys.path.insert(0, str(Path(__file__).parent))
from agent_cases import AGENTS, CASES

from spmdrl.config import (
    AgentConfig,
    ConfigError,
    DataConfig,
    LoraConfig,
    PpoConfig,
    RolloutConfig,
    ServeConfig,
    TrainConfig,
)
from spmdrl.distributed.topology import Topology
from spmdrl.rewards.workers.worker import Reply
from spmdrl.rollout.agents.endpoint import Endpoint
from spmdrl.rollout.agents.pool import AgentPool, AgentTask, Running
from spmdrl.rollout.agents.requests import ApiError
from spmdrl.rollout.agents.samples import NO_TURN, from_json, to_json, training_rows
from spmdrl.rollout.agents.server import EndpointServer, listen
from spmdrl.rollout.agents.session import Session
from spmdrl.rollout.agents.trajectory import Trajectory
from spmdrl.rollout.base import Completion, Request
from spmdrl.rollout.hf.engine import HfEngine
from spmdrl.rollout.sampling import questions_of, sample_questions, training_params
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.types import Prompt, Sample

TEMPERATURE = 0.25  # at which the model says what it knows by heart
CONFIG = PpoConfig(
    model="-", data=DataConfig(train="-", max_prompt_tokens=100), reward="agent", agent=AGENTS,
    rollout=RolloutConfig(
        engine="hf", n=1, max_tokens=100, dtype="float32", temperature=TEMPERATURE
    ),
    agents=AgentConfig(timeout_s=100, max_turns=9), serve=ServeConfig(max_body_mib=1),
    # which adapter is named by a request; this engine has none
    actor=TrainConfig(lora=LoraConfig(by_source={"async": "a", "*": "b"})),
)  # fmt: skip


PARAMS = training_params(CONFIG.rollout)

pytestmark = pytest.mark.engine


@dataclass
class Round:
    samples: dict[str, Sample]  # by case
    engine: HfEngine
    pool: AgentPool
    asked: list[Request]  # of the engine

    def output(self, case: str) -> Any:
        sample = self.samples[case]
        assert sample.invalid is None, sample.invalid
        return sample.agent_output


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Round]:
    torch.set_num_threads(1)
    model = save_calling_model(tmp_path_factory.mktemp("model"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/pg", rank=0, world_size=1)
        alone = Topology.build(torch.device("cpu"), dp=1, tp=1)
        engine = HfEngine(str(model), CONFIG.rollout, 200, alone)
        pool = AgentPool(CONFIG, tokenizer, 0, 1, "the key", len(tokenizer))
        asked, add = list[Request](), engine.add
        engine.add = lambda requests, params: asked.extend(requests) or add(requests, params)
        try:
            prompts = [
                (i, Prompt(i, [5], "async", "t", "p", {"case": case}))
                for i, case in enumerate(CASES)
            ]
            questions = questions_of(prompts, 1, run_seed=0, step=1)
            others = [(i, Prompt(i, [5], n, "t", "hi")) for i, n in enumerate(AGENTS, len(CASES))]
            questions += questions_of(others[1:], 2, run_seed=0, step=1)
            samples, left = sample_questions(
                Scheduler(engine, alone), questions, training_params(CONFIG.rollout),
                tokenizer=tokenizer, by_agents=True, agents=pool,
            )  # fmt: skip
            assert not left and not pool.running and not pool.ended
            names = [*CASES, *AGENTS]
            played = {f"{names[s.group]} {s.index}".removesuffix(" 0"): s for s in samples}
            yield Round(played, engine, pool, asked)
        finally:
            pool.close()
            engine.shutdown()
            dist.destroy_process_group()


def test_openai_chat_has_tools_streams_choices_seeds_stops_and_logprobs(played: Round) -> None:
    out = played.output("openai_chat")
    assert out["call"] == out["streamed_call"] == ["add", {"a": 2, "b": 3}]
    assert out["finish"] == ["tool_calls", "stop"] and out["answer"] == "it is 5"
    assert "".join(token for token, _ in out["logprobs"]) == "it is 5<eos>"
    assert all(-0.5 < logprob <= 0 for _, logprob in out["logprobs"])
    assert out["streamed"] == "good day to you" and out["usage"] == 16
    assert [text for text, _, _ in out["both"]] == ["good"] * 2
    assert all(finish == "length" and len(ids) == 4 for _, finish, ids in out["both"])
    assert out["seeded"] == ["good "] * 2
    assert out["models"] == ["policy"] * 2


def test_anthropic_messages_has_tools_and_streams(played: Round) -> None:
    out = played.output("anthropic")
    assert out["call"] == out["streamed_call"] == ["add", {"a": 2, "b": 3}]
    assert out["answer"] == "it is 5" and out["usage"] == 8 and out["counted"] == len("uhi:")
    assert out["stops"] == ["tool_use", "end_turn", "max_tokens", "tool_use"]
    assert out["streamed"] == "good"
    assert out["cut"] == ["stop_sequence", "day", "good "]


def test_openai_responses_goes_on_by_id_or_by_items(played: Round) -> None:
    out = played.output("responses")
    assert out["call"] == ["add", {"a": 2, "b": 3}]
    assert out["answer"] == out["again"] == "it is 5"
    assert out["kinds"][0] == "response.created" and out["kinds"][-1] == "response.completed"
    assert "response.output_text.delta" in out["kinds"]
    # instructions are of one request, and what the developer says stays
    prompts = ["sbe|sd|uhi|:", "sd|uhi|:|uhi|:", "sshort|sd|uhi|:|uhi|:|uhi|:"]
    assert out["prompts"] == [len(p.replace("|", "")) + 2 * i for i, p in enumerate(prompts)]
    rows = played.samples["responses"].rows  # the second request for the same is a fork
    assert [row.num_turns for row in rows][:2] == [2, 1]
    # the item that goes on by id names the call alone
    told = [m for row in rows for m in row.messages if m["role"] == "tool"]
    assert [message["name"] for message in told] == ["add"]


def test_a_call_names_the_adapter_of_its_data_source(played: Round) -> None:
    counts = [sum(request.adapter == i for request in played.asked) for i in (0, 1)]
    others = [s for s in played.samples.values() if s.prompt.data_source != "async"]
    assert counts[0] > counts[1] == sum(sample.num_turns for sample in others) > 0


def test_texts_go_on_with_the_tokens_that_were_sampled(played: Round) -> None:
    assert played.output("texts") == ["good", " day", "uhi:good day", "good day to you"]
    rows = played.samples["texts"].rows
    assert [(row.num_turns, sum(row.loss_mask)) for row in rows] == [(1, 8), (1, 4), (1, 16)]


REFUSED = {
    "unknown model": (404, "model_not_found"), "no messages": (400, "missing_field"),
    "empty": (400, "invalid_messages"), "a role that is a number": (400, "invalid_messages"),
    "an image": (400, "unsupported_content"), "a format": (400, "unsupported_field"),
    "a forced call": (400, "unsupported_field"), "a bias": (400, "unsupported_field"),
    "too many": (400, "invalid_value"), "no tokens": (400, "invalid_value"),
    "an answer begun": (400, "invalid_messages"), "many stops": (400, "invalid_value"),
    "a prompt that is too long": (400, "context_length_exceeded"),
    "wrong key": (401, "invalid_api_key"), "no key": (401, "invalid_api_key"),
    "no JSON": (400, "invalid_json"), "a list": (400, "invalid_json"),
    "huge": (413, "body_too_large"), "unknown trajectory": (404, "unknown_trajectory"),
    "no trajectory": (404, "no_trajectory"), "anthropic": (400, None),
    "many turns": (400, "too_many_turns"), "a template": (400, "unsupported_field"),
    "a huge token": (400, "invalid_value"), "the best": (400, "unsupported_field"),
    "an echo with logprobs": (400, "unsupported_field"),
    "several responses": (400, "unsupported_field"),
    "half a character in UTF-16": (400, "invalid_json"),
    "a huge text": (400, "context_length_exceeded"),
    "no such path": (404, "unknown_path"), "another method": (405, "unknown_path"),
    "another model": (404, "model_not_found"),
}  # fmt: skip


def test_what_cannot_be_answered_is_refused_with_a_status_and_a_reason(played: Round) -> None:
    out = played.output("errors")
    # how deep JSON may be depends on the imports of the process; what is read is a long prompt
    status, code, *_ = out.pop("deep arguments")
    assert status == 400 and code in ("invalid_messages", "context_length_exceeded")
    assert {name: tuple(found[:2]) for name, found in out.items()} == REFUSED
    # one had half a character, one another key beside its own
    assert out["many turns"][2] == CONFIG.agents.max_turns - 2
    # its end alone was encoded, which is too long: all of it would hold up other agents
    assert int(out["a huge text"][2].split()[-1]) < 20_000
    assert "max_tokens is required" in out["anthropic"][2]
    assert "serve.max_body_mib=1 MiB" in out["huge"][2]


def test_what_nobody_has_waited_for_is_no_row(played: Round) -> None:
    assert played.output("hangs_up") == "good day to you"
    assert [row.response for row in played.samples["hangs_up"].rows] == ["good day to you"]


def test_sub_agents_have_rows_of_their_own(played: Round) -> None:
    sample = played.samples["sub_agents"]
    assert sorted(row.num_turns for row in sample.rows) == [1, 1, 2] and sample.num_turns == 4
    sample.reward, sample.group, sample.index = 2.0, 5, 3
    rows = training_rows([sample], n=4)
    assert [row.index for row in rows] == [3, 7, 11] and {row.reward for row in rows} == {2.0}
    assert {row.group for row in rows} == {5}


def test_turns_have_rewards_by_the_ids_of_their_answers(played: Round) -> None:
    sample = played.samples["sub_agents"]
    rewards = sample.agent_output["turns"]
    assert sorted(rewards) == [0.0, 0.25, 0.5, 3.0]
    of_rows = [[rewards[i] for i in row.turn_numbers] for row in sample.rows]
    assert sorted(of_rows) == [[0.0], [0.25], [0.5, 3.0]]
    wrong = played.samples["rewards_another"]
    assert "a reward for 'chatcmpl-5', which it was not answered" in (wrong.invalid or "")


def test_an_agent_that_fails_or_never_asks_makes_an_invalid_sample(played: Round) -> None:
    fails, silent = played.samples["fails"], played.samples["never_asks"]
    assert "LookupError: no such thing" in (fails.invalid or "")
    assert silent.invalid == NO_TURN and silent.agent_output == 1.0
    assert training_rows([fails, silent], n=1) == []


def test_each_source_has_its_agent_a_function_that_blocks_or_a_program(played: Round) -> None:
    assert played.output("plain") == {"score": 0.5, "said": "good day to you"}
    (row,) = played.samples["plain"].rows
    assert row.num_turns == 2
    failed = played.samples["plain 1"]  # what it was answered is no row of the batch
    assert "LookupError: behind two turns" in (failed.invalid or "") and failed.num_turns == 2
    assert training_rows([failed], n=1) == []
    for name in ("program", "program 1"):
        out = played.output(name)
        assert (out["score"], out["said"]) == (1, "good day to you")
        assert [row.response for row in played.samples[name].rows] == [out["said"]]


def test_a_trajectory_that_is_over_answers_no_more(played: Round) -> None:
    url, key = played.output("leaves_its_key")["told"]
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    for path in ("chat/completions", "messages"):
        answer = httpx.post(
            f"{url}/{path}", json=body | {"max_tokens": 2}, headers={"x-api-key": key}, timeout=10
        )
        assert answer.status_code == 410 and "is over" in answer.json()["error"]["message"]
    health = httpx.get(url.partition("/t/")[0] + "/health", timeout=10).json()
    assert health == {"trajectories": 0, "requests": 0}


def test_a_call_outlives_a_push_of_weights_and_the_end_of_a_round(played: Round) -> None:
    """It goes on behind what there is of its answer, and its tokens are of the weights that chose
    them; the agent sees one answer.
    """
    whole = played.samples["asks_long"]
    (row,) = whole.rows
    assert len(row.response_ids) > 9, "too short to be interrupted"
    prompts = [(0, replace(whole.prompt, id=list(CASES).index("asks_long")))]
    questions = questions_of(prompts, 1, run_seed=0, step=1)
    engine, pool, steps = played.engine, played.pool, []
    step = engine.step

    def counted() -> Any:
        steps.append(engine.num_running)
        return step()

    def push() -> None:
        engine.forget_prefixes()
        engine.policy_version += 1

    engine.step = counted  # type: ignore[method-assign]
    alone = Scheduler(engine, engine.topology)
    given: dict[str, Any] = {"tokenizer": None, "by_agents": True, "agents": pool}
    try:
        none, left = sample_questions(
            alone, questions, PARAMS, until=lambda: len(steps) > 3, **given
        )
        assert not none and len(left) == 1 and left[0].home == 0
        assert pool.running, "the agent waits for the next round"
        push()
        pushes = iter([False, True])
        (sample,), _ = sample_questions(
            alone, left, PARAMS, load_weights=push, **given,
            new_weights=lambda: len(steps) > 7 and next(pushes, False),
        )  # fmt: skip
    finally:
        engine.step = step  # type: ignore[method-assign]
    assert sample.response_ids == row.response_ids and sample.invalid is None
    assert sample.agent_output == whole.agent_output
    versions = sample.rows[0].policy_version
    assert versions == sorted(versions) and set(versions) == {0, 1, 2}


def test_every_row_has_the_log_probabilities_of_the_model(played: Round) -> None:
    """Computed anew from its tokens: nothing was shifted, lost or encoded again."""
    num_rows = 0
    for sample in played.samples.values():
        for row in sample.rows:
            ids = torch.tensor([*row.prompt.token_ids, *row.response_ids])
            with torch.no_grad():
                logits = played.engine.model(input_ids=ids[None]).logits[0, :-1]
            logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            own = logprobs[len(row.prompt.token_ids) - 1 :] * torch.tensor(row.loss_mask)
            assert own.tolist() == pytest.approx(row.rollout_logprobs, abs=1e-4)
            assert len(row.loss_mask) == len(row.policy_version) == len(row.response_ids)
            num_rows += 1
    assert num_rows > 20


def test_a_trajectory_is_the_same_behind_a_checkpoint(played: Round) -> None:
    for sample in played.samples.values():
        sample.reward = None
        again = from_json(to_json(sample), sample.prompt, sample.group, sample.index)
        assert [row.response_ids for row in again.rows] == [r.response_ids for r in sample.rows]
        assert [row.prompt.token_ids for row in again.rows] == [
            row.prompt.token_ids for row in sample.rows
        ]
        assert (again.response_ids, again.messages, again.invalid, again.agent_output) == (
            sample.response_ids, sample.messages, sample.invalid, sample.agent_output,
        )  # fmt: skip


def test_more_requests_than_an_endpoint_answers_at_a_time_are_refused() -> None:
    endpoint = Endpoint(ServeConfig(max_requests=1), "policy", "the key")
    endpoint.num_requests = 1

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=endpoint.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/v1/chat/completions", json={})

    answer = asyncio.run(ask())
    assert answer.status_code == 429 and "serve.max_requests=1" in answer.text
    assert endpoint.num_requests == 1


def begun(pool: AgentPool, task: AgentTask, versions: list[int], **fields: Any) -> Future[Any]:
    """Has an agent at work that has been answered by these weights; returns what it waits for."""
    trajectory, future = Trajectory(f"{task.seed}", task.seed), Future[Any]()
    session = Session(trajectory, PARAMS, pool.encoders, pool.queue, pool.limits, "policy")
    draft = trajectory.draft_tokens([5], str)
    answer = Completion([6] * len(versions), [-1.0] * len(versions), "stop", versions)
    trajectory.commit(draft, answer, {"role": "assistant", "content": "x"})
    pool.server.post(pool.server.endpoint.begin, session)
    pool.running[task.address] = Running(session, future, **fields)
    return future


def test_nothing_is_added_to_a_trajectory_that_is_closed(played: Round) -> None:
    task = task_of("never_asks", 301)
    begun(played.pool, task, [1])
    session = played.pool.running[task.address].session
    before = deepcopy(session.trajectory.rows)
    draft = session.trajectory.draft_tokens([5, 6], str)
    played.pool.end(task.address)  # while an answer is on its way to the endpoint
    with pytest.raises(ApiError, match="is over") as refused:
        session.commit(draft, [Completion([7], [-1.0], "stop", [1])],
                       [{"role": "assistant", "content": "x"}])  # fmt: skip
    assert refused.value.status == 410 and session.trajectory.rows == before


def test_an_id_is_of_one_trajectory_alone(played: Round) -> None:
    endpoint, pool = Endpoint(ServeConfig(), "policy", "the key"), played.pool
    first, second = (
        Session(Trajectory("x", 1), PARAMS, pool.encoders, pool.queue, pool.limits, "policy")
        for _ in range(2)
    )
    endpoint.begin(first)
    with pytest.raises(ValueError, match="there is a trajectory 'x' already"):
        endpoint.begin(second)
    endpoint.end("x")
    with pytest.raises(ValueError, match="there is a trajectory 'x' already"):
        endpoint.begin(second)


def test_engines_take_the_port_and_those_behind_it() -> None:
    with closing(listen("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config, servers = ServeConfig(port=port), []
    try:
        for engine in range(2):
            endpoint = Endpoint(config, "policy", "the key")
            servers.append(EndpointServer(config, endpoint, engine))
            url = f"http://127.0.0.1:{port + engine}"
            assert servers[-1].url == url and httpx.get(f"{url}/health").status_code == 200
        with pytest.raises(ConfigError, match=rf"cannot listen at port {port + 1} of it"):
            EndpointServer(config, Endpoint(config, "policy", "the key"), 1)
    finally:
        for server in servers:
            server.close()


def task_of(case: str, seed: int) -> AgentTask:
    return AgentTask(Prompt(0, [5], "async", "t", "p", {"case": case}), 0, seed)


def test_a_trajectory_of_old_weights_is_given_up(
    played: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = replace(CONFIG.agents, max_staleness=1)
    monkeypatch.setattr(played.pool, "config", replace(CONFIG, agents=agents))
    old, young = task_of("never_asks", 101), task_of("never_asks", 102)
    ends = [begun(played.pool, old, [3, 5]), begun(played.pool, young, [4])]
    played.pool.drop_stale(4)
    assert len(played.pool.running) == 2
    played.pool.drop_stale(5)
    assert [*played.pool.running] == [young.address]
    assert [end.cancelled() for end in ends] == [True, False]
    played.pool.end(young.address)


def test_an_agent_that_was_late_for_a_step_begins_anew_without_a_retry(played: Round) -> None:
    pool = played.pool
    for seed, paused in ((201, True), (202, False)):
        task = task_of("never_asks", seed)
        begun(pool, task, [1], paused=paused).set_result(Reply(None, "timed out after 1 s"))
        assert pool.collect(task, PARAMS) is not paused
        if not paused:
            assert pool.take(task).reply.error == "timed out after 1 s"
            continue
        end = time.monotonic() + 60
        while not pool.collect(task, PARAMS):
            assert time.monotonic() < end
            time.sleep(0.05)
        ended = pool.take(task)
        assert ended.reply.value == 1.0 and not ended.trajectory.rows
