"""Serves the page on this machine's loopback address, to whoever has the token of its address.

The token comes with the first address and is then kept in a cookie. The browser sends it where a
link is followed, but not with what other sites load from here.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from spmdrl.config import ConfigError
from spmdrl.view.page import MEDIA_TYPES, STATIC, served_page
from spmdrl.view.runs import Answer, Questions

HOST = "127.0.0.1"
POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class TokenRequired:
    """Lets a request through that has the token: in its cookie, or once in its address."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self.app, self.token, self.cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        given = request.query_params.get("token")
        response: ASGIApp
        if given is not None and self.is_token(given):
            response = RedirectResponse("/", status_code=303, headers=HEADERS)
            response.set_cookie(self.cookie, self.token, httponly=True, samesite="lax")
        elif self.is_token(request.cookies.get(self.cookie, "")):
            response = self.app
        else:
            text = (
                "This page needs a token. Open the address that spmdrl.view printed when it "
                "started, the one with ?token= in it; then open this address again.\n"
            )
            response = Response(text, 403, HEADERS, "text/plain")
        await response(scope, receive, send)

    def is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())


def application(questions: Questions, token: str, port: int) -> ASGIApp:
    """The page, its files, and the answers to its questions as JSON under /api/."""

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = f"{POLICY}; script-src 'self' 'nonce-{nonce}'"
        headers = HEADERS | {"Content-Security-Policy": policy}
        return Response(served_page(nonce), headers=headers, media_type="text/html")

    async def static(request: Request) -> Response:
        path = (STATIC / request.path_params["path"]).resolve()
        if not path.is_relative_to(STATIC) or not path.is_file():
            raise HTTPException(404)
        return FileResponse(path, headers=HEADERS, media_type=MEDIA_TYPES.get(path.suffix))

    async def image(request: Request) -> Response:
        samples = questions.runs[run_of(request, questions)].samples
        path = samples.image(request.query_params.get("name", ""))
        if path is None:
            raise HTTPException(404)
        return FileResponse(path, headers=HEADERS, media_type=image_type(path.read_bytes()[:12]))

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{path:path}", static),
            Route("/api/image", image),
            Route("/api/{question}", answering(questions)),
        ]
    )
    guarded = TokenRequired(app, token, f"spmdrl_view_{port}")
    return TrustedHostMiddleware(guarded, allowed_hosts=[HOST, "localhost"])


def answering(questions: Questions) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint of all questions; each is answered in a thread of its own."""

    async def answer(request: Request) -> Response:
        try:
            found = await run_in_threadpool(ask, questions, request)
        except (ConfigError, FileNotFoundError) as error:
            raise HTTPException(400, str(error)) from None
        return Response(json.dumps(found), headers=HEADERS, media_type="application/json")

    return answer


def ask(questions: Questions, request: Request) -> Answer:
    """Reads the parameters of a question, and asks it. Raises ConfigError for wrong ones."""
    given = request.query_params
    question = request.path_params["question"]
    if question == "overview":
        return questions.overview()
    if question == "state":
        return questions.state()
    run, kind = run_of(request, questions), given.get("kind", "step")
    found: dict[str, Any] = {
        "wanted": given.get("wanted", "all"),
        "above": number_of(given.get("above", "0")),
        "text": given.get("text", ""),
    }
    start = [whole_of(part) for part in given.get("start", "0").split(",")]
    match question:
        case "curves":
            return questions.curves(run, given.getlist("name"))
        case "rows":
            return questions.rows(
                run, kind, whole_of(given.get("step", "0")), start=start[0], **found
            )
        case "search":
            return questions.search(run, kind, start=search_start(start), **found)
        case "history":
            return questions.history(run, kind, prompt_of(given.get("prompt", "")))
        case "timeline":
            return questions.timeline(run, given.get("steps"))
        case "config":
            return questions.config(run)
    raise HTTPException(404)


def run_of(request: Request, questions: Questions) -> int:
    run = whole_of(request.query_params.get("run", "0"))
    if not 0 <= run < len(questions.runs):
        raise ConfigError(f"run {run}: there are {len(questions.runs)} runs, counted from 0")
    return run


def number_of(text: str) -> float:
    """Reads a number, which may be negative. Raises ConfigError for what is none or not finite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{text[:80]!r} is no finite number")
    return number


def whole_of(text: str) -> int:
    """Reads a whole number, 0 or more. Raises ConfigError for what is none."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"{text[:80]!r} is no whole number of 0 or more")
    return int(text)


def search_start(numbers: list[int]) -> tuple[int, int] | None:
    """Reads where a search goes on: a step and a place in its file; from the newest step for 0."""
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def prompt_of(text: str) -> int | None:
    """Reads a prompt's id. A text without one asks for any prompt."""
    return int(number_of(text)) if text else None


def image_type(head: bytes) -> str:
    """The media type of an image by its first 12 bytes; what is no picture is never shown as one.

    SVG is not among them: it can hold scripts.
    """
    if head.startswith(b"\x89PNG"):
        return "image/png"
    if head.startswith(b"\xff\xd8"):
        return "image/jpeg"
    if head.startswith(b"GIF8"):
        return "image/gif"
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        return "image/webp"
    return "application/octet-stream"


def serve(questions: Questions, port: int) -> None:
    """Serves until Ctrl-C. port 0: any that is free. Raises ConfigError where it is taken."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()  # from here on the address that is printed answers
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port} cannot be listened on: {error}; 0 takes any") from None
    port, token = listening.getsockname()[1], secrets.token_urlsafe(16)
    print(f"http://{HOST}:{port}/?token={token}")
    print(f"from another machine: ssh -N -L {port}:{HOST}:{port} THIS_HOST; Ctrl-C ends it")
    sys.stdout.flush()
    app = application(questions, token, port)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run([listening])
