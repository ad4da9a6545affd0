"""What spmdrl.view reads of run folders, also of damaged ones, and who may ask its server."""

from __future__ import annotations

import http.client
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_runs import start_server, write_run

from spmdrl.config import ConfigError
from spmdrl.view.export import halving
from spmdrl.view.metric_table import MetricTable, thinned
from spmdrl.view.runs import Questions, Run, open_runs
from spmdrl.view.sample_index import verdict_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_run(path, 30, 100_000)
    return path


def test_metrics_are_read_on_where_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    table = MetricTable(path)
    table.update()
    assert list(table.steps) == []
    path.write_text('{"step": 1, "a": 1.5}\n{"step": 2, "a": 2, "b"')
    table.update()
    assert list(table.steps) == [1]
    with path.open("a") as file:
        file.write(': NaN}\nno row\n{"step": 3, "b": 7}\n')
    table.update()
    assert table.series(["a", "b", "c"], 100) == {
        "a": {"steps": [1, 2], "values": [1.5, 2]}, "b": {"steps": [3], "values": [7]},
    }  # fmt: skip
    assert table.damaged == 1
    resumed = path.with_suffix(".tmp")  # as earlier_runs replaces it when a run is resumed
    resumed.write_text('{"step": 1, "a": 9}\n')
    resumed.replace(path)
    table.update()
    assert table.series(["a"], 100)["a"] == {"steps": [1], "values": [9]}


def test_a_long_curve_keeps_its_peaks() -> None:
    points = [(step, math.sin(step)) for step in range(10_000)]
    points[4321], points[77] = (4321, 5.0), (77, -5.0)
    found = thinned(points, 1000)
    assert 900 <= len(found) <= 1000
    assert (4321, 5.0) in found and (77, -5.0) in found
    assert found == sorted(found)


@pytest.mark.parametrize("reward", [None, 1.0, -2, 1e-7])
@pytest.mark.parametrize("invalid", [None, 'it says "reward": 3, "invalid": null'])
def test_a_line_is_judged_without_reading_all_of_it(
    reward: float | None, invalid: str | None
) -> None:
    row = {"prompt_id": 7, "group": 0, "sample": 1, "prompt": '", "reward": 5, "invalid": "',
           "response": "\\", "reward": reward, "invalid": invalid,
           "finish_reason": "length"}  # fmt: skip
    fast = verdict_of(json.dumps(row).encode())
    slow = verdict_of(json.dumps(dict(reversed(row.items()))).encode())
    wanted = (7, reward, invalid is not None, True)
    for found in (fast, slow):
        assert found[0] == 7 and found[2:] == wanted[2:]
        assert found[1] != found[1] if reward is None else found[1] == reward


def test_samples_are_found_without_loading_them(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "samples/step_3.jsonl").read_text().splitlines(keepends=True)
    Path(tmp_path, "samples").mkdir()
    path = tmp_path / "samples" / "step_3.jsonl"
    path.write_text("".join(lines[:4]) + "damaged\n" + lines[4][:50])
    questions = Questions([Run(tmp_path)])
    found = questions.rows(0, "step", 3)
    assert [row["response"] for row in found["rows"]] == [
        json.loads(line)["response"] for line in lines[:4]
    ]
    assert found["damaged"] == 1 and found["next"] is None
    path.write_text("".join(lines))
    first = questions.rows(0, "step", 3, most=10)
    rest = questions.rows(0, "step", 3, start=first["next"])
    assert [*first["rows"], *rest["rows"]] == [json.loads(line) | {"step": 3} for line in lines]
    assert questions.rows(0, "step", 99)["rows"] == []


def test_search_and_history_over_all_steps(folder: Path) -> None:
    questions = Questions([Run(folder)])
    rows = {
        step: [json.loads(line) for line in (folder / f"samples/step_{step}.jsonl").open()]
        for step in range(1, 31)
    }
    invalid = [row for found in rows.values() for row in found if row["invalid"]]
    found = questions.search(0, "step", wanted="invalid", most=10**6)
    assert len(found["rows"]) == len(invalid) > 0 and found["next"] is None
    needle = rows[5][3]["response"][20:60].upper()
    found = questions.search(0, "step", text=needle)
    assert [(row["step"], row["sample"]) for row in found["rows"]] == [(5, rows[5][3]["sample"])]
    assert questions.search(0, "step", text="logprobs")["rows"] == []  # only a column's name
    prompt = rows[9][0]["prompt_id"]
    wanted = [step for step, found in rows.items() if prompt in {r["prompt_id"] for r in found}]
    history = questions.history(0, "step", prompt)
    assert sorted({row["step"] for row in history["rows"]}) == wanted
    assert all("trainer_logprobs" in row for row in history["rows"])


def test_a_page_alone_has_the_ends_first() -> None:
    assert halving([1, 2, 3, 4, 5]) == [5, 1, 3, 2, 4]
    assert halving([7]) == [7] and halving([]) == []
    assert sorted(halving(list(range(100)))) == list(range(100))


def test_folders_that_are_no_runs_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        open_runs([str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match="it has none of metrics"):
        open_runs([str(tmp_path)])
    with pytest.raises(ConfigError, match=f"holds 1 of them: {folder}"):
        open_runs([str(folder.parent)])
    with pytest.raises(ConfigError, match="given twice"):
        open_runs([str(folder), f"{folder}/../run"])


def test_errors_of_a_run_and_images_outside_of_it(folder: Path) -> None:
    Path(folder, "errors").mkdir()
    Path(folder, "errors", "rank_1.json").write_text(json.dumps({"cause": "out of memory"}))
    notes = Questions([Run(folder)]).overview()["runs"][0]["notes"]
    assert notes == ["rank 1 failed: out of memory"]
    for name in ("../step_1.jsonl", "/etc/passwd", "0" * 32, ""):
        assert Run(folder).samples.image(name) is None


def test_the_server_wants_its_token_and_its_name(folder: Path) -> None:
    server, address = start_server([folder])
    host, _, token = address.removeprefix("http://").partition("/?token=")

    def answer(path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", path, headers=headers)
        found = connection.getresponse()
        return found.status, {k.lower(): v for k, v in found.getheaders()}, found.read()

    try:
        for path in ("/", "/api/overview", "/static/main.js", "/?token=wrong", "/?token=%C3%A4"):
            assert answer(path)[0] == 403, path
        status, headers, _ = answer(f"/?token={token}")
        cookie = headers["set-cookie"].partition(";")[0]
        assert status == 303 and "HttpOnly" in headers["set-cookie"]
        assert "samesite=strict" in headers["set-cookie"].lower()
        status, headers, _ = answer("/", cookie=cookie)
        assert (
            status == 200
            and "'unsafe-inline'" not in headers["content-security-policy"].split("script-src")[1]
        )
        assert json.loads(answer("/api/overview", cookie=cookie)[2])["runs"][0]["name"] == "run"
        assert answer("/api/overview", cookie=cookie, host="evil.example")[0] == 400
        assert answer("/static/../server.py", cookie=cookie)[0] == 404
        assert answer("/static/%2e%2e/server.py", cookie=cookie)[0] == 404
        assert answer("/api/rows?run=5", cookie=cookie)[0] == 400
        assert answer("/api/rows?step=x", cookie=cookie)[0] == 400
        assert answer("/api/nothing", cookie=cookie)[0] == 404
    finally:
        server.send_signal(2)  # Ctrl-C
        assert server.wait(20) == 130


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "RUN is required"),
        (["RUN", "--out", "page.txt"], "must end in .html"),
        (["RUN", "--port", "99999"], "a number from 0 to 65535"),
        (["RUN", "--prot", "1"], "nearest: --port"),
    ],
)
def test_mistakes_are_named(folder: Path, arguments: list[str], said: str) -> None:
    words = [str(folder) if word == "RUN" else word for word in arguments]
    command = [sys.executable, "-m", "spmdrl.view", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 2 and said in done.stdout + done.stderr
