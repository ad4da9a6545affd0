"""The protocol of remote sandboxes, which remote.py uses. Standard library only."""

from __future__ import annotations

from typing import Protocol

from spmdrl.rewards.sandbox.sandbox import Limits, Result, SandboxError, Status


class RemoteSandbox(Protocol):
    """Runs a Python program. Several threads may call it at once."""

    def __call__(self, code: str, stdin: str, limits: Limits, turn: int) -> Result:
        """turn: the number of the attempt, from 0. Raises Busy, SandboxError."""
        ...


class Busy(SandboxError):
    """There is no room now, or no connection: worth another attempt."""

    def __init__(self, problem: str, wait_s: float = 0.0) -> None:
        """wait_s: what the service asks to be waited."""
        super().__init__(problem)
        self.wait_s = wait_s


def ended(exit_code: int | None, stdout: str, stderr: str, seconds: float) -> Result:
    """Returns the Result of a program that ended by itself, or by a signal."""
    if exit_code is None:
        return Result("killed", None, stdout, stderr, "", seconds)
    status: Status = "ok" if exit_code == 0 else "killed" if exit_code < 0 else "error"
    return Result(status, exit_code, stdout, stderr, "", seconds)
