"""What is asked of a teacher's endpoint and read from its answers, and what is refused; with a
stand-in of vLLM's server.
"""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import torch
from teacher_server import standing_in
from tiny_models import CHARS, save_qwen3
from transformers import AutoTokenizer

from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    DataConfig,
    DistillationConfig,
    PpoConfig,
    RolloutConfig,
    TeacherEndpoint,
)
from spmdrl.data.packing import empty_batch
from spmdrl.training import teacher_endpoint
from spmdrl.training.teacher_endpoint import (
    EndpointClient,
    EndpointError,
    Refused,
    check_endpoint,
    endpoint_lines,
    endpoint_logprobs,
)

VOCAB = 40
SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 1, "initializer_range": 0.15}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny_models.CHARS", CHARS[:VOCAB])
        save_qwen3(path / "own", **SMALL)
        patch.setattr("tiny_models.CHARS", [*CHARS[:7], CHARS[8], CHARS[7], *CHARS[9:VOCAB]])
        save_qwen3(path / "other", **SMALL)
        save_qwen3(path / "wide", **SMALL | {"vocab_size": VOCAB + 8})
    return path


@pytest.fixture(scope="module")
def server(models):
    with standing_in(models / "own") as found:
        yield found


@pytest.fixture(autouse=True)
def at_once(monkeypatch, server):
    """No waiting between two tries."""
    monkeypatch.setattr(teacher_endpoint, "FIRST_WAIT_S", 0.01)
    server.busy, server.delay_s = 0, 0.0


def client_of(server, **options):
    return EndpointClient(TeacherEndpoint(server.url, "teach", **{"retries": 0} | options))


def batch_of():
    """Two sequences with an answer of two tokens each, and one that is masked."""
    batch = empty_batch(torch.tensor([6, 5, 3]))
    batch.token_ids = torch.tensor([4, 14, 5, 17, 8, 2, 5, 14, 5, 17, 2, 9, 9, 9])
    batch.loss_mask = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0], dtype=torch.float32)
    return batch


def test_what_is_read_is_what_the_model_says(server):
    batch, answered = batch_of(), []
    server.asked.clear()
    stats = endpoint_logprobs(client_of(server), batch, 5, VOCAB, lambda: answered.append(1))
    assert sorted(len(asked["prompt"]) for asked in server.asked) == [5, 6]  # nothing to learn: 3
    assert len(answered) == 2 and stats.top_ids.dtype == torch.int32
    with torch.no_grad():
        for first, end in ((0, 6), (6, 11)):
            ids = batch.token_ids[first:end]
            logits = server.model(ids[None]).logits[0].log_softmax(-1)
            for t in range(first, end):
                if not batch.loss_mask[t]:
                    assert not stats.top_logprobs[t].any() and stats.logprobs[t] == 0
                    continue
                right = logits[t - first - 1]
                best = right.topk(5)
                assert stats.top_ids[t].tolist() == best.indices.tolist()
                torch.testing.assert_close(stats.top_logprobs[t], best.values.float())
                torch.testing.assert_close(stats.logprobs[t], right[batch.token_ids[t]].float())
    alone = endpoint_logprobs(client_of(server), batch, 0, VOCAB)
    assert alone.top_ids is None and torch.equal(alone.logprobs, stats.logprobs)
    none = endpoint_logprobs(client_of(server), batch.select([]), 5, VOCAB)
    assert none.top_ids.shape == (0, 5)


def test_a_request_that_does_not_get_through_is_sent_again(server, monkeypatch):
    batch = batch_of().select([0])
    server.busy = 2
    stats = endpoint_logprobs(client_of(server, retries=2), batch, 5, VOCAB)
    assert stats.top_logprobs.any() and server.busy == 0
    server.busy = 2
    with pytest.raises(EndpointError, match="answers 503"):
        endpoint_logprobs(client_of(server, retries=1), batch, 5, VOCAB)
    server.busy, server.delay_s = 0, 0.5
    with pytest.raises(EndpointError, match="timed out"):
        endpoint_logprobs(client_of(server, timeout_s=0.1), batch, 5, VOCAB)
    server.delay_s, server.busy = 0.0, 1
    batch.token_ids[0] = VOCAB
    with pytest.raises(Refused, match="out of vocabulary"):  # which another try would not change
        endpoint_logprobs(client_of(server, retries=1), batch, 5, VOCAB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = TeacherEndpoint(f"http://127.0.0.1:{free.getsockname()[1]}/v1", "teach", retries=1)
    with pytest.raises(EndpointError, match="refused"):
        endpoint_logprobs(EndpointClient(nobody), batch_of(), 5, VOCAB)


def test_a_key_is_sent_and_must_be_there(server, monkeypatch):
    monkeypatch.setenv("TEACHERS_KEY", "abc")
    server.keys.clear()
    endpoint_logprobs(client_of(server, api_key_env="TEACHERS_KEY"), batch_of(), 5, VOCAB)
    assert server.keys == {"Bearer abc"}
    with pytest.raises(ConfigError, match="api_key_env='NOT_THERE' is not set"):
        client_of(server, api_key_env="NOT_THERE")


def check(models, server, model="teach", top_k=5, longest=63, own="own", vocab_size=VOCAB):
    client = client_of(server)
    client.config = replace(client.config, model=model)
    tokenizer = AutoTokenizer.from_pretrained(models / own)
    check_endpoint(client, "teachers.sums", tokenizer, vocab_size, top_k, longest)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "else"}, r"teachers\.sums\.model='else': .* has \['teach'\]"),
        ({"longest": 64}, "up to 64 tokens, .* but its max_model_len is 64"),
        ({"top_k": 65}, "prompt_logprobs=65: .*at most --max-logprobs"),
        ({"vocab_size": VOCAB + 1}, "refuses token 40 .*must have the model's vocabulary"),
        ({"vocab_size": VOCAB - 1, "top_k": 5}, "knows a token 39, and the model has 39 tokens"),
        ({"own": "other"}, "another tokenizer than the model: id 7 is '3' there and '4' here"),
    ],
)
def test_another_model_is_refused(models, server, settings, words):
    check(models, server)
    with pytest.raises(ConfigError, match=words):
        check(models, server, **settings)


def test_answers_of_another_kind_are_refused(server, monkeypatch):
    batch = batch_of().select([0])
    with pytest.raises(Refused, match="it has another vocabulary"):
        endpoint_logprobs(client_of(server), batch, 5, vocab_size=6)
    whole = server.completion
    monkeypatch.setattr(server, "completion", lambda asked: (200, {"choices": [{"text": "1"}]}))
    with pytest.raises(Refused, match=r"no prompt_logprobs of 6 tokens.*KeyError"):
        endpoint_logprobs(client_of(server), batch, 5, VOCAB)
    monkeypatch.setattr(server, "completion", lambda asked: whole(asked | {"prompt_logprobs": 3}))
    with pytest.raises(Refused, match="its 5 likeliest"):
        endpoint_logprobs(client_of(server), batch, 5, VOCAB)


def test_a_dry_run_needs_no_server_but_sees_a_wrong_one(models, server):
    def config_of(url):
        return PpoConfig(
            str(models / "own"), DataConfig("t", max_prompt_tokens=16), "gsm8k",
            algo=AlgoConfig(distillation=DistillationConfig(topk=8)),
            rollout=RolloutConfig(max_tokens=16),
            teachers={"*": TeacherEndpoint(url, "teach", retries=0)},
        )  # fmt: skip

    tokenizer = AutoTokenizer.from_pretrained(models / "own")
    (line,) = endpoint_lines(config_of(server.url), tokenizer)
    assert line == "teachers.*: endpoints that answer, with the model's tokens"
    (line,) = endpoint_lines(config_of("http://127.0.0.1:9/v1"), tokenizer)
    assert "does not answer as vLLM's server yet: http://127.0.0.1:9/v1/models" in line
    with pytest.raises(ConfigError, match="another tokenizer"):
        endpoint_lines(config_of(server.url), AutoTokenizer.from_pretrained(models / "other"))
    with standing_in(models / "wide") as wide, pytest.raises(ConfigError, match="knows a token 40"):
        endpoint_lines(config_of(wide.url), tokenizer)


@pytest.mark.vllm
def test_request_and_answer_are_of_vllms_protocol(server):
    """The stand-in is held to the classes that vLLM's own server reads and writes."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, DetokenizeResponse

    server.asked.clear()
    endpoint_logprobs(client_of(server), batch_of().select([0]), 5, VOCAB)
    (asked,) = server.asked
    request = CompletionRequest.model_validate(asked)
    assert request.prompt == asked["prompt"] and request.prompt_logprobs == 5
    assert not request.model_extra  # every field that is sent is one that the server knows
    _, told = server.completion(asked)
    choice = CompletionResponse.model_validate(told).choices[0]
    assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == 6
    assert all(5 <= len(place) <= 6 for place in choice.prompt_logprobs[1:])
    DetokenizeRequest.model_validate({"model": "teach", "tokens": [1, 2]})
    _, told = server.answer("/detokenize", {"tokens": [4, 5]})
    assert DetokenizeResponse.model_validate(told).prompt == "01"
