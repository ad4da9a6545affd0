"""A trajectory whose agent may ask: requests in, answers out."""

from __future__ import annotations

import asyncio
import secrets
import threading
from dataclasses import dataclass, field, replace
from typing import Any

from spmdrl.config.words import counted
from spmdrl.rollout.agents.answers import Answers, Choice, call_ids_of
from spmdrl.rollout.agents.call_queue import CallQueue
from spmdrl.rollout.agents.chat_encoder import ChatEncoders, before_stop
from spmdrl.rollout.agents.requests import ApiError, ChatRequest, TextRequest, over
from spmdrl.rollout.agents.trajectory import Draft, Trajectory, digest_of
from spmdrl.rollout.base import Completion, Request, SamplingParams
from spmdrl.rollout.engine_calls import EngineCall
from spmdrl.rollout.seeds import seed_of
from spmdrl.types import Message


@dataclass(frozen=True)
class SessionLimits:
    """The limits of a trajectory's requests."""

    max_model_len: int  # tokens of a prompt and its answer
    max_turns: int
    max_images: int  # of a prompt
    vocab_size: int  # tokens that the model has embeddings of


@dataclass
class Session:
    """Belongs to the event loop of the endpoint, but for `close`."""

    trajectory: Trajectory
    params: SamplingParams  # how the policy samples; requests set lengths and stops alone
    encoders: ChatEncoders
    queue: CallQueue
    limits: SessionLimits
    model: str  # its name in answers
    responses: dict[str, list[Message]] = field(default_factory=dict)  # conversations, by response
    names: dict[str, str] = field(default_factory=dict)  # of called tools, by the id of the call
    adapter: int = 0  # as of a Request
    num_turns: int = 0  # asked for
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # that answer requests
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `over` and the trajectory

    async def chat(self, request: ChatRequest) -> Answers:
        """Raises ApiError."""
        if request.messages[-1]["role"] == "assistant":
            raise ApiError(
                400, "messages: the last one is the assistant's; a turn cannot be begun for it",
                "invalid_messages",
            )  # fmt: skip
        draft = await self.draft(request)
        encoder = self.encoders.of(request)
        stop = (*self.params.stop, *request.stop)
        completions = await self.sample(draft, request)
        spoken = [encoder.spoken(completion, stop) for completion in completions]
        id = self.commit(draft, completions, [each.message for each in spoken])
        choices = [
            Choice(said.message, said.finish_reason, completion,
                   self.token_texts(completion) if request.logprobs else [],
                   call_ids_of(said.message), said.stop if said.stop in request.stop else None)
            for completion, said in zip(completions, spoken, strict=True)
        ]  # fmt: skip
        self.names |= {call: name for choice in choices for call, name, _ in choice.calls}
        return Answers(self.model, draft.tokens.ids, choices, id)

    async def text(self, request: TextRequest) -> Answers:
        """Raises ApiError."""
        tokenizer = self.encoders.tokenizer
        said = request.prompt
        known = self.text_behind(said) if isinstance(said, str) else None
        if isinstance(said, str):
            ids = self.encoders.texts.bounded(said, True, "end") if known is None else known
        else:
            ids = said
        if not ids or min(ids) < 0 or max(ids) >= self.limits.vocab_size:
            raise ApiError(
                400, f"prompt: expected token ids of 0 to {self.limits.vocab_size - 1}",
                "invalid_value",
            )  # fmt: skip
        self.room_behind(ids)  # before so many are decoded
        draft = self.trajectory.draft_tokens(ids, tokenizer.decode)
        completions, messages = await self.sample(draft, request), []
        for completion in completions:
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            text = before_stop(text, (*self.params.stop, *request.stop))
            messages.append({"role": "assistant", "content": text})
        id = self.commit(draft, completions, messages)
        choices = [
            Choice(message, "length" if completion.finish_reason == "length" else "stop",
                   completion, self.token_texts(completion) if request.logprobs else [])
            for completion, message in zip(completions, messages, strict=True)
        ]  # fmt: skip
        echoed = ""
        if request.echo:
            echoed = said if isinstance(said, str) else tokenizer.decode(ids)
        return Answers(self.model, ids, choices, id, echoed)

    async def count(self, request: ChatRequest) -> int:
        """Returns the number of tokens of a prompt. Raises ApiError."""
        return len((await self.draft(request)).tokens.ids)

    async def draft(self, request: ChatRequest) -> Draft:
        """Raises ApiError."""
        await self.encoders.prepare(request)
        encoder = self.encoders.of(request)
        return self.trajectory.draft(
            request.messages, request.context, encoder.encode_all, encoder.encode_behind
        )

    def text_behind(self, text: str) -> list[int] | None:
        """Returns the tokens of a text that goes on behind an answer, of the longest that it goes
        on behind, without encoding again what stands before; None where there is none.
        """
        tokenizer = self.encoders.tokenizer
        for begun in self.trajectory.known_tokens():
            is_over = begun[-1] in tokenizer.all_special_ids  # a token that the text may lack
            for ids in (begun, begun[:-1])[: 1 + is_over]:
                said = tokenizer.decode(ids)
                if said and text.startswith(said):
                    rest = text[len(said) :]
                    return [*ids, *self.encoders.texts.bounded(rest, False, "end")]
        return None

    async def sample(self, draft: Draft, request: ChatRequest | TextRequest) -> list[Completion]:
        """Samples as many answers as are asked for. Raises ApiError."""
        if self.num_turns + request.n > self.limits.max_turns:
            raise ApiError(
                400, f"the trajectory has had its agents.max_turns={self.limits.max_turns} turns",
                "too_many_turns",
            )  # fmt: skip
        if len(draft.tokens.images) > self.limits.max_images:
            raise ApiError(
                400, f"the messages show {counted(len(draft.tokens.images), 'image')}, more than "
                f"agents.max_images={self.limits.max_images}", "too_many_images",
            )  # fmt: skip
        if not draft.tokens.ids:
            raise ApiError(400, "the prompt has no tokens", "invalid_value")
        room = self.room_behind(draft.tokens.ids)
        if max(draft.tokens.ids) >= self.limits.vocab_size:
            raise ApiError(400, "the model has no embedding of a token", "invalid_value")
        self.num_turns += request.n
        most = min(request.max_tokens or room, room, self.params.max_tokens)
        params = replace(
            self.params, stop=(*self.params.stop, *request.stop),
            min_tokens=min(self.params.min_tokens, most),
        )  # fmt: skip
        calls = [
            EngineCall(
                Request(
                    draft.tokens.ids, seed, max_tokens=most, placed_images=draft.tokens.images,
                    adapter=self.adapter,
                ),
                params,
            )
            for seed in self.seeds(draft, request)
        ]  # fmt: skip
        try:
            return list(await asyncio.gather(*(self.queue.ask(call) for call in calls)))
        except asyncio.CancelledError:
            self.num_turns -= request.n  # nobody waits for them any more
            raise

    def room_behind(self, ids: list[int]) -> int:
        """Returns how many tokens an answer to a prompt may have. Raises ApiError for none."""
        room = self.limits.max_model_len - len(ids)
        if room < 1:
            raise ApiError(
                400, f"this model's maximum context length is {self.limits.max_model_len} tokens "
                f"(data.max_prompt_tokens + rollout.max_tokens), and the prompt has {len(ids)}",
                "context_length_exceeded",
            )  # fmt: skip
        return room

    def commit(
        self, draft: Draft, completions: list[Completion], messages: list[Message]
    ) -> str:  # fmt: skip
        """Adds answers to the trajectory, with what the agent is told of each. Returns the id of
        the whole. Raises ApiError once the trajectory is closed, and perhaps being trained on.
        """
        id = secrets.token_hex(12)
        with self.lock:
            if self.over:
                raise over(self.trajectory.id)
            for completion, message in zip(completions, messages, strict=True):
                self.trajectory.commit(draft, completion, message, id)
        return id

    def seeds(self, draft: Draft, request: ChatRequest | TextRequest) -> list[int]:
        """Returns a seed for each answer: of the sample, of the prompt, and of how often that was
        asked before. With a seed in the request it is of that instead, so that the sample's next
        request for the same is answered in the same way.
        """
        own = self.trajectory.seed
        if request.seed is not None:
            address = f"agent's seed/{digest_of(draft.tokens)}"
            return [seed_of(own, request.seed, i, 0, address) for i in range(request.n)]
        return [
            seed_of(own, 0, 0, 0, f"agent/{self.trajectory.address_of(draft.tokens)}")
            for _ in range(request.n)
        ]

    def token_texts(self, completion: Completion) -> list[str]:
        return [self.encoders.tokenizer.decode([token]) for token in completion.token_ids]

    def close(self) -> None:
        """Has the trajectory stay as it is. Any thread may call this."""
        with self.lock:
            self.over = True

    def end(self) -> None:
        """Refuses what is still asked."""
        self.close()
        for task in self.tasks:
            task.cancel()
