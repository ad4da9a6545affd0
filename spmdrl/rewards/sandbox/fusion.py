"""A client of SandboxFusion's HTTP API: POST /run_code.

Request and response are RunCodeRequest and RunCodeResponse of sandbox/server/sandbox_api.py in
github.com/bytedance/SandboxFusion. Its servers answer 200 also where the program failed, and where
they did. Standard library only.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from spmdrl.config import ConfigError, SandboxConfig
from spmdrl.rewards.sandbox.place import Busy, RemoteSandbox, ended
from spmdrl.rewards.sandbox.sandbox import Limits, Result, SandboxError

QUEUE_S = 30.0  # beyond a program's own time, for a server's queue
NO_ROOM = (408, 429, 500, 502, 503, 504)
MOST_WORDS = 500  # of what a server says, in an error


@contextmanager
def in_fusion(config: SandboxConfig, longest_s: float) -> Iterator[RemoteSandbox]:
    """Yields the servers of config.urls, in turn; another attempt asks the next one."""
    numbers = itertools.count(random.randrange(len(config.urls)) + os.getpid())

    def run(code: str, stdin: str, limits: Limits, turn: int) -> Result:
        url = config.urls[next(numbers) % len(config.urls)]
        asked = {
            "code": code, "language": "python", "stdin": stdin, "files": {},
            "run_timeout": limits.wall_s, "memory_limit_MB": limits.memory_mib,
        }  # fmt: skip
        return as_result(posted(f"{url.rstrip('/')}/run_code", asked, limits.wall_s), limits, url)

    yield run


def posted(url: str, asked: dict[str, Any], wall_s: float) -> dict[str, Any]:
    """Returns the response. Raises Busy, SandboxError."""
    import urllib.error  # slow, and most reward workers do not need it
    import urllib.request
    from http.client import HTTPException

    data = json.dumps(asked).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=wall_s + QUEUE_S) as response:
            told = json.loads(response.read())
    except urllib.error.HTTPError as error:
        words = f"{url} answers {error.code}: {error.read(MOST_WORDS).decode(errors='replace')}"
        if error.code in NO_ROOM:
            raise Busy(words, seconds_of(error.headers.get("Retry-After"))) from error
        raise SandboxError(words) from error
    except (OSError, HTTPException) as error:  # no connection, or one that broke
        raise Busy(f"{url}: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise SandboxError(f"{url} answers no JSON: {error}") from error
    if not isinstance(told, dict) or "status" not in told:
        raise SandboxError(f"{url} is no SandboxFusion: it answers {str(told)[:MOST_WORDS]}")
    return told


def seconds_of(text: str | None) -> float:
    """Reads a Retry-After in seconds; 0 for a date or none."""
    return float(text) if text is not None and text.isdecimal() else 0.0


def as_result(told: dict[str, Any], limits: Limits, url: str) -> Result:
    """Raises Busy where the server says that it failed itself."""
    ran = told.get("run_result") or {}
    seconds = float(ran.get("execution_time") or 0.0)
    out, err = ran.get("stdout") or "", ran.get("stderr") or ""
    if ran.get("status") == "TimeLimitExceeded":
        return Result("time", None, out, err, "", limits.wall_s)
    if told["status"] == "SandboxError" or ran.get("status") != "Finished":
        words = str(told.get("message") or err or told)[:MOST_WORDS]
        raise Busy(f"{url} failed: {words}")
    return ended(ran.get("return_code"), out, err, seconds)


def check_urls(config: SandboxConfig) -> None:
    """Raises ConfigError for what is no address of a server."""
    if not config.urls:
        raise ConfigError(
            "sandbox.urls is empty: name at least one server of SandboxFusion, such as "
            "('http://127.0.0.1:8080',)"
        )
    for url in config.urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"sandbox.urls has {url!r}: expected http://host:port")
