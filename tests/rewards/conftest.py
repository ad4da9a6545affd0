"""The forms of the sandbox that this machine has."""

import pytest
from sandbox_attacks import there_is_one

from spmdrl.rewards.sandbox import sandbox


@pytest.fixture(params=["strong", "weak"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "weak":
        monkeypatch.setenv(sandbox.FORM_VARIABLE, "weak")
    else:
        monkeypatch.delenv(sandbox.FORM_VARIABLE, raising=False)
    if not there_is_one(request.param):
        pytest.skip(f"no {request.param} sandbox on this machine")
    return request.param


@pytest.fixture
def strong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sandbox.FORM_VARIABLE, raising=False)
    if not there_is_one("strong"):
        pytest.skip("no bubblewrap, or no namespaces, on this machine")
