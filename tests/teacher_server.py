"""A stand-in of vLLM's OpenAI-compatible server, as far as teachers behind endpoints ask it.

It has a model of transformers in float64 behind /v1/models, /v1/completions and /detokenize.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class StandIn(ThreadingHTTPServer):
    """Serves one model as "teach"."""

    daemon_threads = True

    def __init__(self, folder: Path, max_logprobs: int = 64, max_model_len: int = 64) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.max_logprobs, self.max_model_len = max_logprobs, max_model_len
        self.lock = threading.Lock()
        self.asked: list[dict[str, Any]] = []  # what /v1/completions was asked
        self.keys: set[str | None] = set()
        self.busy = 0  # so many of the next requests are answered 503
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def completion(self, asked: dict[str, Any]) -> tuple[int, Any]:
        """The status and the body, as vLLM 0.32 answers."""
        ids, k = asked["prompt"], asked["prompt_logprobs"]
        size = self.model.config.vocab_size
        for is_wrong, words in (
            (asked["model"] != "teach", f"The model `{asked['model']}` does not exist."),
            (k > self.max_logprobs, f"Requested prompt logprobs of {k}, which is greater than max "
                                    f"allowed: {self.max_logprobs}"),
            (max(ids) >= size, f"Token id {max(ids)} is out of vocabulary"),
            (len(ids) + asked["max_tokens"] > self.max_model_len, "maximum context length"),
        ):  # fmt: skip
            if is_wrong:
                return 400, {"error": {"message": words, "type": "BadRequestError", "code": 400}}
        with self.lock, torch.no_grad():
            self.asked.append(asked)
            logits = self.model(torch.tensor([ids])).logits[0]
        found: list[Any] = [None]
        for logprobs, token in zip(logits.log_softmax(-1), ids[1:], strict=False):
            best = logprobs.topk(k).indices.tolist()
            ranks = {token: int((logprobs >= logprobs[token]).sum())}
            ranks |= {each: rank for rank, each in enumerate(best, start=1)}
            found.append({
                str(each): {"logprob": float(logprobs[each]), "rank": rank,
                            "decoded_token": self.tokenizer.decode([each])}
                for each, rank in ranks.items()
            })  # fmt: skip
        choice = {"index": 0, "text": "1", "finish_reason": "length", "prompt_logprobs": found}
        return 200, {
            "id": "cmpl-1", "object": "text_completion", "created": 0, "model": "teach",
            "choices": [choice], "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids) + 1},
        }  # fmt: skip

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [
                {"id": "teach", "object": "model", "max_model_len": self.max_model_len}
            ]}  # fmt: skip
        if path == "/v1/completions":
            if self.busy > 0:
                self.busy -= 1
                return 503, {"error": {"message": "busy"}}
            time.sleep(self.delay_s)
            return self.completion(asked)
        if path == "/detokenize":
            return 200, {"prompt": self.tokenizer.decode(asked["tokens"])}
        return 404, {"detail": "Not Found"}


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def respond(self, asked: dict[str, Any]) -> None:
        self.server.keys.add(self.headers.get("Authorization"))
        code, told = self.server.answer(self.path, asked)
        body = json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def standing_in(folder: Path, **limits: int) -> Iterator[StandIn]:
    """limits: of StandIn."""
    server = StandIn(folder, **limits)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
