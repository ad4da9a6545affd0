"""Requests that come to an engine while a round goes on: those of agents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from spmdrl.data.pictures import read_images as read
from spmdrl.data.pictures import written_images as written
from spmdrl.rollout.answer_codec import pack, resume, unpack
from spmdrl.rollout.base import Completion, Request, SamplingParams


@dataclass(frozen=True)
class EngineCall:
    """One continuation that an agent asked for, with its own lengths and stops."""

    request: Request
    params: SamplingParams

    def continued(self, begun: Completion) -> EngineCall:
        """Returns the same call behind what there is of its answer."""
        return replace(self, request=resume(self.request, replace(begun, finish_reason="abort")))


@dataclass(frozen=True)
class EngineCalls:
    """The calls that an engine begins and gives up between two bursts, by their numbers."""

    begun: Mapping[int, EngineCall]
    given_up: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.begun or self.given_up)

    def to_bytes(self) -> bytes:
        """JSON of the calls, then their answers so far as answer_codec packs them."""
        head = {
            "given_up": self.given_up,
            "begun": [
                [number, call.request.prompt_ids, call.request.seed, call.request.max_tokens,
                 call.request.adapter, written(call.request.placed_images), asdict(call.params)]
                for number, call in self.begun.items()
            ],
        }  # fmt: skip
        answers = pack({number: call.request.begun() for number, call in self.begun.items()})
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + answers

    @classmethod
    def from_bytes(cls, packed: bytes) -> EngineCalls:
        size = int.from_bytes(packed[:8], "little")
        head, answers = json.loads(packed[8 : 8 + size]), unpack(packed[8 + size :])
        begun = {}
        for number, prompt_ids, seed, max_tokens, adapter, images, params in head["begun"]:
            lists = {name: tuple(v) for name, v in params.items() if isinstance(v, list)}
            request = Request(
                prompt_ids, seed, max_tokens=max_tokens, placed_images=read(images),
                adapter=adapter,
            )  # fmt: skip
            call = EngineCall(request, SamplingParams(**(params | lists)))
            begun[number] = call.continued(answers[number])
        return cls(begun, tuple(head["given_up"]))


NO_CALLS = EngineCalls({})
