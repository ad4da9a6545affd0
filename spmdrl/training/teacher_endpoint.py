"""A teacher behind vLLM's OpenAI-compatible server: the log-probabilities of a prompt's tokens.

    POST <url>/completions  {"prompt": [ids], "prompt_logprobs": k, "max_tokens": 1, ...}
    ->  choices[0].prompt_logprobs[t]: {"<id>": {"logprob": -0.3, "rank": 1, ...}, ...}

has the k likeliest tokens in the place of token t, and token t itself. They are of the model's own
distribution, at temperature 1. `POST /detokenize` says what the server's tokenizer means by an id.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from spmdrl.config import ConfigError, PpoConfig, TeacherEndpoint
from spmdrl.distributed.phases import Phases
from spmdrl.distributed.placement import TEACHERS
from spmdrl.distributed.topology import Topology
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.types import Batch, PolicyStats

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # before a request is sent again
BUSY = (408, 409, 425, 429, 500, 502, 503, 504)  # answers after which it is
MOST_WORDS = 400  # of what a server says, in an error
IDS_AT_ONCE = 8192  # of /detokenize


class EndpointError(RuntimeError):
    """A server did not answer, or not as vLLM does."""


class Refused(EndpointError):
    """A server has understood the request and does not do it."""


class EndpointClient:
    """Asks one server. Several threads may call it at the same time."""

    def __init__(self, config: TeacherEndpoint) -> None:
        """Raises ConfigError where the environment has no key."""
        self.config, self.url = config, config.url.rstrip("/")
        self.headers = {"Content-Type": "application/json"}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise ConfigError(
                    f"teachers: api_key_env={config.api_key_env!r} is not set in the environment"
                )
            self.headers["Authorization"] = f"Bearer {key}"

    @property
    def root(self) -> str:
        """The server's address, without the version of its API."""
        return self.url.removesuffix("/v1")

    def ask(self, url: str, asked: dict[str, Any] | None = None, retries: int = 0) -> Any:
        """Returns the JSON that the server answers; a GET where nothing is asked. A request that
        did not get through is sent again. Raises EndpointError; Refused for what is not to be sent
        again.
        """
        wait_s = FIRST_WAIT_S
        for attempt in range(retries + 1):
            try:
                return self.ask_once(url, asked)
            except Refused:
                raise
            except EndpointError:
                if attempt == retries:
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise AssertionError("unreachable")

    def ask_once(self, url: str, asked: dict[str, Any] | None) -> Any:
        data = None if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(url, data, self.headers)
        try:
            with urllib.request.urlopen(request, timeout=self.config.timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:MOST_WORDS]
            kind = EndpointError if error.code in BUSY else Refused
            raise kind(f"{url} answers {error.code}: {words}") from error
        except (OSError, HTTPException) as error:  # no connection, one that broke, or too late
            raise EndpointError(f"{url}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise EndpointError(f"{url} answers no JSON: {error}") from error

    def prompt_logprobs(self, ids: Sequence[int], top_k: int, retries: int) -> list[Any]:
        """Returns what the server says of the place of each token: {id: {"logprob": ...}}; None of
        the first. Raises EndpointError.
        """
        asked = {
            "model": self.config.model, "prompt": list(ids), "prompt_logprobs": top_k,
            "max_tokens": 1, "temperature": 1.0, "add_special_tokens": False,
        }  # fmt: skip
        told = self.ask(f"{self.url}/completions", asked, retries)
        try:
            found = told["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError) as error:
            found, told = None, f"{type(error).__name__} {error} in {str(told)[:MOST_WORDS]}"
        if not isinstance(found, list) or len(found) != len(ids):
            raise Refused(
                f"{self.url}/completions gave no prompt_logprobs of {len(ids)} tokens, as vLLM's "
                f"server does: {str(told)[:MOST_WORDS]}"
            )
        return found

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, by the server's tokenizer. Raises EndpointError."""
        asked = {"model": self.config.model, "tokens": list(ids)}
        told = self.ask(f"{self.root}/detokenize", asked, self.config.retries)
        text = told.get("prompt") if isinstance(told, dict) else None
        if not isinstance(text, str):
            raise Refused(f"{self.root}/detokenize gave no text: {str(told)[:MOST_WORDS]}")
        return text


# ---- what is learnt from


def endpoint_logprobs(
    client: EndpointClient, batch: Batch, top_k: int, vocab_size: int,
    answered: Callable[[], None] = lambda: None,
) -> PolicyStats:  # fmt: skip
    """Asks the server about each sequence; of its unmasked tokens as an engine's `logprobs`.

    answered: called after each sequence. Raises EndpointError. The entropy is 0: nobody knows it.
    """
    columns = max(top_k, 1)
    stats = PolicyStats(
        torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens),
        top_logprobs=torch.zeros(batch.num_tokens, columns),
        top_ids=torch.zeros(batch.num_tokens, columns, dtype=torch.int32),
    )  # fmt: skip
    bounds = batch.cu_seqlens.tolist()
    learnt = [i for i in range(batch.num_seqs) if batch.loss_mask[bounds[i] : bounds[i + 1]].any()]
    parts = [batch.token_ids[bounds[i] : bounds[i + 1]].tolist() for i in learnt]

    def ask(ids: list[int]) -> list[Any]:
        return client.prompt_logprobs(ids, columns, client.config.retries)

    with ThreadPoolExecutor(client.config.max_concurrent) as pool:
        try:
            for i, ids, found in zip(learnt, parts, pool.map(ask, parts), strict=True):
                fill(stats, batch, bounds[i], ids, found, vocab_size)
                answered()
        except EndpointError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return stats if top_k else stats._replace(top_logprobs=None, top_ids=None)


def fill(
    stats: PolicyStats, batch: Batch, start: int, ids: list[int], found: list[Any], vocab_size: int
) -> None:  # fmt: skip
    """Puts what a server said of a sequence, whose first token is `start` of the batch, into its
    places. Raises Refused for what cannot be of this vocabulary.
    """
    assert stats.top_ids is not None and stats.top_logprobs is not None
    top_k = stats.top_ids.shape[1]
    for t, token in enumerate(ids):
        if not batch.loss_mask[start + t]:
            continue
        told = {int(key): float(each["logprob"]) for key, each in (found[t] or {}).items()}
        best = sorted(told, key=lambda key: -told[key])[:top_k]
        if token not in told or len(best) < top_k or max(best) >= vocab_size:
            raise Refused(
                f"the teacher's server was asked about token {token} and its {top_k} likeliest of "
                f"{vocab_size} tokens, and told of {sorted(told)[-8:]}: it has another vocabulary"
            )
        stats.logprobs[start + t] = told[token]
        stats.top_ids[start + t] = torch.tensor(best, dtype=torch.int32)
        stats.top_logprobs[start + t] = torch.tensor([told[key] for key in best])


# ---- before a run


def check_endpoint(
    client: EndpointClient, where: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int,
    top_k: int, longest: int,
) -> None:  # fmt: skip
    """Raises ConfigError where a server has not got the model, has another vocabulary, names fewer
    tokens, or takes shorter sequences than the run needs; EndpointError where it does not answer.

    where: of the config. longest: tokens of a sequence.
    """
    config = client.config
    told = client.ask(f"{client.url}/models", retries=config.retries)
    served = {each["id"]: each for each in told["data"]}
    if config.model not in served:
        raise ConfigError(f"{where}.model={config.model!r}: {client.url} has {[*served]}")
    most = served[config.model].get("max_model_len")
    if most is not None and longest + 1 > most:
        raise ConfigError(
            f"{where}: a prompt and its answer have up to {longest} tokens, and the server needs "
            f"room for one more, but its max_model_len is {most}"
        )
    try:
        client.prompt_logprobs([0, vocab_size - 1], top_k, config.retries)
    except Refused as error:
        raise ConfigError(
            f"{where} refuses token {vocab_size - 1} with prompt_logprobs={top_k}: {error}. The "
            "teacher must have the model's vocabulary, and vLLM names at most --max-logprobs "
            "tokens (20 unless set)"
        ) from error
    try:
        client.prompt_logprobs([0, vocab_size], 1, config.retries)
    except Refused:
        pass
    else:
        raise ConfigError(
            f"{where} knows a token {vocab_size}, and the model has {vocab_size} tokens: "
            "distributions are compared over the same tokens, choose a teacher of its family"
        )
    check_texts(client, where, tokenizer)


def check_texts(client: EndpointClient, where: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError, with the first difference, where an id stands for another text."""
    ids = sorted(tokenizer.get_vocab().values())
    for first in range(0, len(ids), IDS_AT_ONCE):
        part = ids[first : first + IDS_AT_ONCE]
        if client.text_of(part) == tokenizer.decode(part):
            continue
        while len(part) > 1:  # the first half that differs
            half = part[: len(part) // 2]
            differs = client.text_of(half) != tokenizer.decode(half)
            part = half if differs else part[len(part) // 2 :]
        raise ConfigError(
            f"{where} has another tokenizer than the model: id {part[0]} is "
            f"{client.text_of(part)!r} there and {str(tokenizer.decode(part))!r} here. "
            "Distillation compares distributions over the same tokens: choose a teacher of the "
            "model's family"
        )


def endpoints_of(config: PpoConfig) -> dict[str, TeacherEndpoint]:
    """Returns the endpoints of a run, by the names that teachers' roles would have."""
    return {
        f"{TEACHERS}{source}": teacher
        for source, teacher in config.teachers.items()
        if isinstance(teacher, TeacherEndpoint)
    }


def check_endpoints(config: PpoConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Asks every endpoint of a run as `check_endpoint` does. Raises ConfigError, EndpointError."""
    text, distillation = load_hf_config(config.model).get_text_config(), config.algo.distillation
    data = config.data
    prompt = data.max_prompt_tokens if data.hint_key is None else data.max_hint_prompt_tokens
    for name, endpoint in endpoints_of(config).items():
        check_endpoint(
            EndpointClient(endpoint), name, tokenizer, text.vocab_size,
            1 if distillation is None else distillation.topk, prompt + config.rollout.max_tokens,
        )  # fmt: skip


def connect_teachers(
    config: PpoConfig, tokenizer: PreTrainedTokenizerBase, actor: Topology, phases: Phases
) -> dict[str, EndpointClient]:
    """Returns what asks the endpoints of a run, on the actor's ranks; the first of them checks
    them. Collective over these. Raises ConfigError on all of them.
    """
    found = endpoints_of(config)
    if not found or not actor.here:
        return {}
    with phases("build teachers", actor):
        clients = {name: EndpointClient(endpoint) for name, endpoint in found.items()}
        if actor.rank == 0:
            check_endpoints(config, tokenizer)
    return clients


def endpoint_lines(config: PpoConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the lines of a dry run, for which no endpoint needs to answer. Raises ConfigError
    where one does, and is no teacher of this run.
    """
    found = endpoints_of(config)
    if not found:
        return []
    try:
        check_endpoints(config, tokenizer)
    except EndpointError as error:
        return [f"a teacher's endpoint does not answer as vLLM's server yet: {error}"]
    return [f"{', '.join(found)}: endpoints that answer, with the model's tokens"]
