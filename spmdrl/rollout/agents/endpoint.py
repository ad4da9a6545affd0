"""The HTTP endpoint of a rollout engine: OpenAI's and Anthropic's APIs, for agents.

A trajectory's requests go to /t/<id>/v1/..., or to /v1/... with the header X-Trajectory-Id.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from spmdrl.config import ServeConfig
from spmdrl.rollout.agents import anthropic_messages, openai_chat, openai_responses
from spmdrl.rollout.agents.answers import Events, server_sent
from spmdrl.rollout.agents.requests import ApiError, over, without_surrogates
from spmdrl.rollout.agents.session import Session

KEEP_ALIVE_S = 15.0  # between signs of life in a stream whose answer is being sampled
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed")  # where half a character may be
MOST_ENDED = 1 << 16  # ids of trajectories that are remembered as over

Api = Callable[[Session, dict[str, Any]], Awaitable[tuple[dict[str, Any], Events | None]]]


class Json(JSONResponse):
    """JSON in UTF-8, in which halves of characters are question marks."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False).encode(errors="replace")


class Endpoint:
    """The trajectories of an engine and the application that answers them. It belongs to the event
    loop that serves it.
    """

    def __init__(self, config: ServeConfig, model: str, key: str) -> None:
        self.config, self.model, self.key = config, model, key
        self.sessions: dict[str, Session] = {}
        self.ended: OrderedDict[str, None] = OrderedDict()
        self.num_requests = 0  # under way
        apis: dict[str, tuple[Api, bool]] = {
            "chat/completions": (chat, False), "completions": (text, False),
            "responses": (responses, False), "messages": (messages, True),
            "messages/count_tokens": (count_tokens, True),
        }  # fmt: skip
        routes = [
            Route(f"{prefix}/v1/{path}", self.handler(api, anthropic), methods=["POST"])
            for path, (api, anthropic) in apis.items()
            for prefix in ("", "/t/{id}")
        ]
        models = [
            Route(f"{prefix}/v1/models{name}", self.models)
            for name in ("", "/{model}")
            for prefix in ("", "/t/{id}")
        ]
        self.app = Starlette(
            routes=[*routes, *models, Route("/health", self.health)],
            exception_handlers=dict.fromkeys((404, 405), no_such_path),
        )

    def begin(self, session: Session) -> None:
        """Raises ValueError for an id that another trajectory has or had."""
        id = session.trajectory.id
        if id in self.sessions or id in self.ended:
            raise ValueError(f"there is a trajectory {id!r} already")
        self.sessions[id] = session

    def end(self, id: str) -> None:
        session = self.sessions.pop(id)
        self.ended[id] = None
        if len(self.ended) > MOST_ENDED:
            self.ended.popitem(last=False)
        session.end()

    def handler(self, api: Api, anthropic: bool) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            if self.num_requests >= self.config.max_requests:
                error = ApiError(
                    429, f"the endpoint answers serve.max_requests={self.config.max_requests} "
                    "requests at a time", "too_many_requests",
                )  # fmt: skip
                return refused(error, anthropic)
            self.num_requests += 1
            try:
                return await self.answer(request, api, anthropic)
            except ApiError as error:
                return refused(error, anthropic)
            finally:
                self.num_requests -= 1

        return handle

    async def answer(self, request: Request, api: Api, anthropic: bool) -> Response:
        """Raises ApiError."""
        self.check_key(request)
        session = self.session_of(request)
        body = await self.body_of(request)
        if session.over:
            raise over(session.trajectory.id)
        self.check_model(body.get("model", self.model))
        task = asyncio.ensure_future(api(session, body))
        session.tasks.add(task)
        task.add_done_callback(session.tasks.discard)
        if body.get("stream") is True:
            # what is wrong with the request is told by its status, before the stream begins
            is_gone = await self.wait_for(task, request, timeout_s=0.01)
            if not is_gone and (not task.done() or task.exception() is None):
                events = self.stream(task, session, anthropic)
                return StreamingResponse(events, media_type="text/event-stream")
        found, _ = await self.watched(task, request, session)
        return Json(found)

    async def watched(self, task: asyncio.Task[Any], request: Request, session: Session) -> Any:
        """Waits for an answer. Gives it up where the client hangs up. Raises ApiError."""
        try:
            await self.wait_for(task, request)
            return await task
        except asyncio.CancelledError:
            if session.over:
                raise over(session.trajectory.id) from None
            raise ApiError(499, "the client hung up", "client_closed_request") from None
        finally:
            task.cancel()

    @staticmethod
    async def wait_for(
        task: asyncio.Task[Any], request: Request, timeout_s: float | None = None
    ) -> bool:
        """Waits until the task is done, or its client hangs up, or the time is over. Says whether
        the client has hung up: then the task is cancelled.
        """
        gone = asyncio.ensure_future(request.receive())  # the body is read: what comes is the end
        try:
            await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_gone = not gone.cancel()
        if is_gone:
            task.cancel()
        return is_gone

    async def stream(
        self, task: asyncio.Task[Any], session: Session, anthropic: bool
    ) -> AsyncIterator[bytes]:
        """Sends signs of life until the turn is whole, then its events. A client that hangs up
        cancels this, and the turn with it.
        """
        self.num_requests += 1
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
                if not task.done():
                    yield b": sampling\n\n"
            try:
                _, events = task.result()
            except ApiError as error:
                events = [("error" if anthropic else "", error_body(error, anthropic))]
            except asyncio.CancelledError:
                body = error_body(over(session.trajectory.id), anthropic)
                events = [("error" if anthropic else "", body)]
            for event in server_sent(events or ()):
                yield event
            if not anthropic:
                yield b"data: [DONE]\n\n"
        finally:
            self.num_requests -= 1
            task.cancel()

    def check_key(self, request: Request) -> None:
        """Raises ApiError for a request without the run's key."""
        headers, key = request.headers, self.key.encode()
        # a client that has a token of its own in its environment sends it beside the key
        given = headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key")
        if not any(secrets.compare_digest((each or "").encode(), key) for each in given):
            raise ApiError(
                401, "the key is not this run's: send `Authorization: Bearer KEY` or `x-api-key: "
                "KEY` with the api_key that the agent was given", "invalid_api_key",
            )  # fmt: skip

    def session_of(self, request: Request) -> Session:
        """Raises ApiError for a trajectory that does not exist, or that is over."""
        id = request.path_params.get("id") or request.headers.get("x-trajectory-id")
        if id is None:
            raise ApiError(
                404, "which trajectory? Use the base_url that the agent was given, "
                "or send its id in the header X-Trajectory-Id", "no_trajectory",
            )  # fmt: skip
        if id in self.ended:
            raise over(id)
        if id not in self.sessions:
            raise ApiError(404, f"there is no trajectory {id!r}", "unknown_trajectory")
        return self.sessions[id]

    async def body_of(self, request: Request) -> dict[str, Any]:
        """Returns the JSON object of a request. Raises ApiError, for one that is too large before
        all of it is read.
        """
        most = int(self.config.max_body_mib * 2**20)
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise ApiError(
                        413, "the body has more than serve.max_body_mib="
                        f"{self.config.max_body_mib:g} MiB", "body_too_large",
                    )  # fmt: skip
        except ClientDisconnect:
            raise ApiError(499, "the client hung up", "client_closed_request") from None
        try:
            found = json.loads(body.decode("utf-8-sig", "surrogatepass"))
            if SURROGATE.search(body):
                found = without_surrogates(found)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}", "invalid_json") from error
        if not isinstance(found, dict):
            raise ApiError(400, "the body is no JSON object", "invalid_json")
        return found

    async def models(self, request: Request) -> Response:
        name = request.path_params.get("model")
        try:
            self.check_key(request)
            self.check_model(name or self.model)
        except ApiError as error:
            return refused(error, anthropic=False)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "spmdrl"}
        return Json({"object": "list", "data": [model]} if name is None else model)

    def check_model(self, name: Any) -> None:
        """Raises ApiError for another model than the one that is trained."""
        if name != self.model:
            raise ApiError(
                404, f"there is no model {name!r}, there is {self.model!r}", "model_not_found"
            )

    async def health(self, request: Request) -> Response:
        return Json({"trajectories": len(self.sessions), "requests": self.num_requests})


async def chat(session: Session, body: dict[str, Any]) -> tuple[dict[str, Any], Events]:
    request = openai_chat.chat_request(body)
    answers = await session.chat(request)
    return openai_chat.chat_answer(request, answers), openai_chat.chat_events(request, answers)


async def text(session: Session, body: dict[str, Any]) -> tuple[dict[str, Any], Events]:
    request = openai_chat.text_request(body)
    answers = await session.text(request)
    return openai_chat.text_answer(request, answers), openai_chat.text_events(request, answers)


async def responses(session: Session, body: dict[str, Any]) -> tuple[dict[str, Any], Events]:
    request = openai_responses.responses_request(body, session.responses, session.names)
    answers = await session.chat(request)
    found = openai_responses.responses_answer(request, answers)
    own = request.messages[bool(body.get("instructions")) :]  # they are of one request alone
    session.responses[found["id"]] = [*own, answers.choices[0].message]
    return found, openai_responses.responses_events(request, answers)


async def messages(session: Session, body: dict[str, Any]) -> tuple[dict[str, Any], Events]:
    request = anthropic_messages.messages_request(body)
    answers = await session.chat(request)
    return anthropic_messages.messages_answer(answers), anthropic_messages.messages_events(answers)


async def count_tokens(session: Session, body: dict[str, Any]) -> tuple[dict[str, Any], None]:
    request = anthropic_messages.messages_request({"max_tokens": 1} | body)
    return {"input_tokens": await session.count(request)}, None


async def no_such_path(request: Request, error: Exception) -> Response:
    """Answers what is asked at another path, or by another method, than the endpoint has."""
    found = ApiError(
        getattr(error, "status_code", 404), f"{request.method} {request.url.path}: the endpoint "
        "has no such path, or not for this method", "unknown_path",
    )  # fmt: skip
    return refused(found, anthropic=False)


def refused(error: ApiError, anthropic: bool) -> Response:
    return Json(error_body(error, anthropic), status_code=error.status)


def error_body(error: ApiError, anthropic: bool) -> dict[str, Any]:
    """Writes an error as the API's clients read it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 410: "not_found_error",
             413: "request_too_large", 429: "rate_limit_error"}  # fmt: skip
    kind = kinds.get(error.status, "invalid_request_error")
    if anthropic:
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}
