"""What spmdrl.view reads of run folders, also of damaged ones, and who may ask its server."""

from __future__ import annotations

import http.client
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import start_server, write_run

from spmdrl.config import ConfigError
from spmdrl.view.export import exported, halving
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
    assert all("advantage" in row and "tokens" not in row for row in history["rows"])
    assert not any("logprobs" in name for row in history["rows"] for name in row)
    newest = questions.history(0, "step")
    assert newest["prompt"] == rows[30][0]["prompt_id"] and newest["rows"][-1]["step"] == 30


def write_samples(folder: Path, step: int, rows: list[dict[str, Any]]) -> Path:
    path = folder / "samples" / f"step_{step}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def sample(prompt_id: int, response: str, **more: Any) -> dict[str, Any]:
    return {"prompt_id": prompt_id, "group": 0, "sample": 0, "response": response, "reward": 1.0,
            "invalid": None, "finish_reason": "stop", **more}  # fmt: skip


@pytest.mark.parametrize("text", ["Größe Ä", "größe ä", "GRÖSSE", "ΟΔΟΣ", "Привет", 'Say "Hi"'])
def test_a_search_finds_what_was_typed(tmp_path: Path, text: str) -> None:
    said = 'Größe Ä, GRÖSSE, ΟΔΟΣΑ, Привет, Say "Hi"'
    rows = [sample(0, "x"), sample(1, said), sample(2, "", messages=[{"content": said}])]
    path = write_samples(tmp_path, 1, rows)
    questions = Questions([Run(tmp_path)])
    for ensure_ascii in (False, True):
        lines = [json.dumps(row, ensure_ascii=ensure_ascii) + "\n" for row in rows]
        path.write_text("".join(lines))
        found = questions.search(0, "step", text=text)["rows"]
        assert [row["prompt_id"] for row in found] == [1, 2]


@pytest.mark.parametrize("patience_s", [3.0, 0.0])
def test_a_search_goes_on_within_a_file(
    tmp_path: Path, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdrl.view.runs.SEARCH_S", patience_s)
    for step in (1, 2):
        write_samples(tmp_path, step, [sample(i, f"word {i % 2}") for i in range(100)])
    questions = Questions([Run(tmp_path)])
    found, start, asked = [], None, 0
    while asked == 0 or start is not None:
        answer = questions.search(0, "step", text="WORD 1", start=start)
        found += [(row["step"], row["prompt_id"]) for row in answer["rows"]]
        start, asked = answer["next"], asked + 1
    assert found == [(step, i) for step in (2, 1) for i in range(1, 100, 2)]
    assert answer["searched"] == 2 and asked == (2 if patience_s else 200)


DEEP = "[" * 100_000 + "]" * 100_000


def test_a_damaged_line_hides_no_other(tmp_path: Path) -> None:
    good = json.dumps(sample(3, "good", advantage="much", images=5, chat={}, messages=[1],
                             tokens=7, logprobs={}))  # fmt: skip
    odd = [good.replace("3", "1" + "0" * 30, 1), good.replace("1.0", "1" + "0" * 400), good[:30],
           '{"prompt_id": 1e999}', "[]", DEEP, good.replace("5", DEEP)]  # fmt: skip
    path = write_samples(tmp_path, 1, [])
    path.write_text("\n".join([*odd, good, ""]))
    trained = json.dumps({"prompt_id": 3, "group": 0, "sample": 0, "advantage": 0.5})
    path.with_name("step_1_trained.jsonl").write_text("\n".join(["odd", DEEP, "[]", trained, ""]))
    questions = Questions([Run(tmp_path)])
    found = questions.rows(0, "step", 1)
    assert [row["response"] for row in found["rows"] if row["reward"] == 1] == ["good"]
    row = found["rows"][-1]
    assert row["advantage"] == 0.5 and row["prompt_id"] == 3
    assert not {"images", "chat", "messages", "tokens", "logprobs"} & set(row)
    assert len(found["rows"]) + found["damaged"] == len(odd) + 1 + 3
    assert exported(questions, 2**20)["rows"][0]["step"][1]["rows"] == found["rows"]


def test_odd_numbers_in_metrics_hide_no_others(tmp_path: Path) -> None:
    lines = ['{"step": 1, "a": 1, "b": 1}', f'{{"step": 2, "a": 1{"0" * 400}, "b": 2}}',
             '{"step": 3, "a": 1e999, "b": 3}', f'{{"step": {2**70}, "b": 9}}',
             '{"step": 1e999, "b": 9}', DEEP, '{"step": 4, "a": 4, "b": 4}']  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*lines, ""]))
    table = MetricTable(path)
    table.update()
    assert table.damaged == 3
    assert table.series(["a", "b"], 100) == {
        "a": {"steps": [1, 4], "values": [1, 4]},
        "b": {"steps": [1, 2, 3, 4], "values": [1, 2, 3, 4]},
    }


def test_questions_at_once_have_one_answer(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "a": step, "b": -step}) for step in range(20_000)]
    Path(tmp_path, "metrics.jsonl").write_text("\n".join([*lines, ""]))
    questions = Questions([Run(tmp_path)])
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(questions.curves, 0, ["a", "b"], 10**6) for _ in range(8)]
        answers = [future.result() for future in asked]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["a"] == {"steps": [*range(20_000)], "values": [*range(20_000)]}


def test_runs_have_the_shortest_names_that_differ(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a/s/grpo", "b/s/grpo", "t/grpo", "ppo")]
    for folder in folders:
        Path(folder, "samples").mkdir(parents=True)
    names = [run.name for run in open_runs([str(folder) for folder in folders])]
    assert names == ["a/s/grpo", "b/s/grpo", "t/grpo", "ppo"]


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


@pytest.mark.programs
def test_the_server_wants_its_token_and_its_name(folder: Path) -> None:
    server, address = start_server([folder])
    host, _, token = address.removeprefix("http://").partition("/?token=")

    def answer(path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", path, headers=headers)
        found = connection.getresponse()
        return found.status, {k.lower(): v for k, v in found.getheaders()}, found.read()

    try:
        assert b"Open the address that spmdrl.view printed" in answer("/")[2]
        for path in ("/", "/api/overview", "/static/main.js", "/?token=wrong", "/?token=%C3%A4"):
            assert answer(path)[0] == 403, path
        status, headers, _ = answer(f"/?token={token}")
        cookie = headers["set-cookie"].partition(";")[0]
        assert status == 303 and "HttpOnly" in headers["set-cookie"]
        assert "samesite=lax" in headers["set-cookie"].lower()
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
        for odd in ("run=nan", "run=-1", "step=x", "step=-1", "step=inf", "start=inf", "start=0.5",
                    "above=nan", "above=x", "start="):  # fmt: skip
            assert answer(f"/api/rows?{odd}", cookie=cookie)[0] == 400, odd
        assert answer("/api/history?kind=step&prompt=inf", cookie=cookie)[0] == 400
        assert answer("/api/rows?kind=step&step=1&above=-1", cookie=cookie)[0] == 200
        first = json.loads(answer("/api/search?kind=step&start=0", cookie=cookie)[2])
        step, place = first["next"]
        more = answer(f"/api/search?kind=step&start={step},{place}", cookie=cookie)[2]
        assert json.loads(more)["rows"][0]["step"] <= first["rows"][-1]["step"]
        assert answer("/api/nothing", cookie=cookie)[0] == 404
    finally:
        server.send_signal(2)  # Ctrl-C
        assert server.wait(20) == 130


@pytest.mark.programs
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
