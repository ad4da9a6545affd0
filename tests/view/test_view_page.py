"""The page of spmdrl.view in Chromium, served and as one file: what is clicked is done."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import CHROMIUM, CHROMIUM_ARGS, metrics_row, start_server, write_run

pytestmark = pytest.mark.programs

if not Path(CHROMIUM).exists():
    pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

STEPS = 20
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0"
    "00000301010018dd8db00000000049454e44ae426082"
)
IMAGE = "0123456789abcdef0123456789abcdef"
HOSTILE = "</script><img src=x onerror=document.body.dataset.hacked=1>"
THOUGHTS = "<think>\nI should count.\n</think>Let me look."
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"word": "ab"}}\n</tool_call>'


def talk() -> list[dict[str, Any]]:
    """Two answers to a prompt with an image: one of several turns, and an invalid one."""
    same = {"prompt_id": 900, "group": 0, "data_source": "talk", "prompt": "<image>How many?",
            "ground_truth": "2", "images": [IMAGE],
            "chat": [{"role": "user", "content": "<image>How many?"}]}  # fmt: skip
    turns = [
        {"role": "assistant", "content": THOUGHTS + CALL},
        {
            "role": "tool",
            "name": "lookup",
            "is_error": True,
            "content": [
                {"type": "text", "text": "two letters"},
                {"type": "image", "image": f"images/{IMAGE}.png"},
            ],
        },
        {"role": "assistant", "content": f"It is 2. {HOSTILE}"},
    ]
    tokens = {"tokens": ["It", " is", "\n", "2"], "logprobs": [-0.5, None, -3.0, -0.01]}
    many = {"sample": 0, "response": "It is 2.", "reward": 1.0, "invalid": None, "pred": "2",
            "finish_reason": "stop", "response_tokens": 9, "messages": turns, **tokens}  # fmt: skip
    bad = {"sample": 1, "response": "nothing", "reward": None, "finish_reason": "stop",
           "invalid": "Traceback:\n  here\n  there\nTimeoutError: 5 s", "response_tokens": 1,
           "messages": [{"role": "assistant", "content": "nothing"}]}  # fmt: skip
    return [{**same, **many}, {**same, **bad}]


def other_data(samples: Path) -> None:
    """Gives the second run another first question, a ground truth that is an object, and a sample
    whose fields a reward function has reported with types of its own.
    """
    for step in range(0, STEPS + 1, 10):
        path = samples / f"eval_{step}.jsonl"
        rows = [json.loads(line) for line in path.open()]
        rows[0]["chat"][0]["content"] = "Another question"
        rows[1]["prompt"] = "the template of another model"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    odd = {"prompt_id": 700, "group": 9, "sample": 99, "prompt": "?", "response": 4, "images": 5,
           "chat": {"a": 1}, "tokens": 7, "logprobs": "x", "advantage": "much", "reward": 1.0,
           "turn_rewards": 3, "invalid": None, "finish_reason": 2, "response_tokens": "9",
           "messages": [{"role": 5, "content": [None, 3, {"type": "image", "image": 4},
                                                "odd ΟΔΟΣΑ"],
                         "thinking": ["odd"], "tool_calls": {"name": 1}},
                        {"content": {"text": "odd"}, "tool_calls": [None]}]}  # fmt: skip
    with Path(samples, f"step_{STEPS}.jsonl").open("a") as file:
        file.write(json.dumps(odd) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of reinforcement learning, the first with a talk in its last step; one of SFT."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first", STEPS, 200_000)
    write_run(folder / "second", STEPS, 100_000, seed=1)
    samples = folder / "first" / "samples"
    for step in range(0, STEPS + 1, 10):
        path = samples / f"eval_{step}.jsonl"
        path.write_text(
            path.read_text().replace('"ground_truth": "1"', '"ground_truth": {"value": 1}')
        )
    Path(samples, f"step_{STEPS}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in talk()))
    trained = {"prompt_id": 900, "group": 0, "sample": 0, "advantage": 0.75,
               "trainer_logprobs": [-0.4, None, -3.2, -0.01]}  # fmt: skip
    Path(samples, f"step_{STEPS}_trained.jsonl").write_text(json.dumps(trained) + "\n")
    Path(samples, "images").mkdir()
    Path(samples, "images", IMAGE).write_bytes(PNG)
    Path(samples, "images", f"{IMAGE}.png").write_bytes(PNG)
    other_data(folder / "second" / "samples")
    spans = [["rollout", 1.0, 2.0, 2.5], ["update_actor", 2.5, 3.5, 3.5]]
    Path(folder, "first", "trace").mkdir()
    for rank in range(2):
        line = json.dumps({"step": STEPS, "host": "a", "spans": spans})
        Path(folder, "first", "trace", f"rank_{rank:05d}.jsonl").write_text(line + "\n")
    Path(folder, "sft").mkdir()
    rows = [{"step": step, "sft/loss": 2.0 / step, "eval/loss": 2.5 / step} for step in range(1, 9)]
    Path(folder, "sft", "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return [folder / "first", folder / "second", folder / "sft"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


def opened(browser: Any, address: str, **context: Any) -> Any:
    """A page that has started, whose `problems` are errors of its scripts."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}, **context).new_page()
    page.set_default_timeout(15_000)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    return page


@pytest.fixture(scope="module")
def served(runs: list[Path], browser: Any) -> Iterator[Any]:
    server, address = start_server(runs)
    page = opened(browser, address, color_scheme="light")
    page.base = page.url.partition("#")[0]
    yield page
    assert page.problems == []
    server.terminate()
    server.wait(20)


@pytest.fixture(scope="module")
def alone(runs: list[Path], browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The page as one file, which has room for a part of the samples."""
    out = tmp_path_factory.mktemp("out") / "page.html"
    command = [sys.executable, "-m", "spmdrl.view", *map(str, runs), "--out", str(out),
               "--out_mib", "0.5"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "left out: first: samples of" in done.stdout
    page = opened(browser, f"file://{out}", color_scheme="dark", offline=True)
    page.requests = []
    page.on("request", lambda request: page.requests.append(request.url))
    yield page
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith(("data:", "file:"))] == []


def go(page: Any, address: str, wait_for: str) -> None:
    page.evaluate("address => { location.hash = address; }", "/config")  # never the same twice
    page.wait_for_selector(".view-config #config *")
    page.evaluate("address => { location.hash = address; }", address)
    page.wait_for_selector(wait_for)


def until(page: Any, condition: str, *given: Any) -> None:
    """Waits for a condition in JavaScript, which the page's policy keeps Playwright from waiting
    for; `given` is what it calls `given`.
    """
    deadline = time.monotonic() + 15
    while not page.evaluate(f"given => {condition}", [*given]):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


@pytest.mark.parametrize("form", ["served", "alone"])
def test_curves(form: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(form)
    go(page, "/curves", ".chart canvas")
    shown = page.eval_on_selector_all(".chart", "all => all.map(c => c.dataset.metric)")
    assert shown[:2] == ["reward/mean", "eval/reward"] and "sft/loss" in shown
    held_out = page.locator("#results tr", has_text="first").locator("[data-metric='eval/reward']")
    held_out.filter(has_text="0.4 → 0.9").wait_for()
    page.fill("#find-metric", "phase_7")
    page.click("[data-metric='time_mean/phase_7_s']")
    page.wait_for_selector(".chart[data-metric='time_mean/phase_7_s'] canvas")
    assert "phase_7" in page.url
    series = page.locator(".chart[data-metric='reward/mean'] .u-series")
    assert series.count() == 3  # the step and two runs: SFT has no such metric
    page.click("#chips [data-run='1']")
    until(page, "document.querySelector('.chart').querySelectorAll('.u-series').length === 2")
    page.click("#chips [data-run='1']")
    drawn = page.eval_on_selector(".chart canvas", "c => c.toDataURL()")
    page.eval_on_selector("#smooth", "s => { s.value = 0.9; s.dispatchEvent(new Event('input')); }")
    until(page, "document.querySelector('.chart canvas')?.toDataURL() !== given[0]", drawn)


def test_a_click_on_a_curve_opens_the_samples_of_the_step(served: Any) -> None:
    go(served, "/curves", ".chart canvas")
    over = served.locator(".chart[data-metric='reward/mean'] .u-over")
    box = over.bounding_box()
    over.click(position={"x": box["width"] / 2, "y": 20})
    served.wait_for_selector(".sample")
    step = int(re.search(r"step=(\d+)", served.url)[1])
    assert abs(step - STEPS / 2) <= 2
    assert served.input_value("#step") == str(step)


@pytest.mark.parametrize("form", ["served", "alone"])
def test_a_conversation_with_thought_call_and_image(
    form: str, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(form)
    go(page, f"/samples?run=0&kind=step&step={STEPS}", ".sample")
    assert page.locator(".group").count() == 1 and page.locator(".sample").count() == 2
    assert page.eval_on_selector(".prompt img", "i => i.decode().then(() => i.naturalWidth)") == 1
    good, bad = page.locator(".sample").nth(0), page.locator(".sample").nth(1)
    assert [b.strip() for b in good.locator(".badge").all_inner_texts()] == [
        "reward 1", "advantage +0.75",
    ]  # fmt: skip
    roles = good.locator(".turn").evaluate_all("all => all.map(t => t.dataset.role)")
    assert roles == ["assistant", "tool", "assistant"]
    assert good.locator(".turn.tool.failed").count() == 1
    replied = good.locator(".turn.tool img").evaluate("i => i.decode().then(() => i.naturalWidth)")
    assert replied == 1
    thought = good.locator(".thought .text")
    assert not thought.is_visible()
    good.locator(".thought summary").click()
    assert thought.inner_text() == "I should count."
    assert "calls lookup" in good.locator(".call").inner_text()
    assert '"word": "ab"' in good.locator(".call").inner_text()
    assert HOSTILE in good.locator(".turn").nth(2).inner_text()
    assert page.evaluate("document.body.dataset.hacked") is None
    assert "TimeoutError: 5 s" in bad.locator(".reason summary").inner_text()
    bad.locator(".reason summary").click()
    assert "there" in bad.locator(".reason pre").inner_text()


@pytest.mark.parametrize("form", ["served", "alone"])
def test_tokens_are_coloured_and_tell_their_numbers(
    form: str, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(form)
    go(page, f"/samples?run=0&kind=step&step={STEPS}", ".sample")
    page.click("#measure [data-value='gap']")
    page.wait_for_selector(".token")
    backs = page.eval_on_selector_all(".token", "a => a.map(t => getComputedStyle(t).background)")
    assert len({*backs[:3]}) == 3  # +0.1, a reply's, -0.2
    assert page.locator(".token.reply").count() == 1
    assert "-0.2" in page.inner_text("#legend") and "0.2" in page.inner_text("#legend")
    page.hover(".token[data-i='2']")
    told = page.inner_text("#tip")
    for line in ("engine log-probability -3", "engine -0.2", "ratio 0.8187"):
        assert line in told
    assert "5 more tokens are not kept" in page.inner_text(".tokens")
    assert "keeps no tokens" in page.locator(".sample").nth(1).inner_text()
    for measure in ("logprob", "ratio", "advantage"):
        page.click(f"#measure [data-value='{measure}']")
        page.wait_for_selector(f"#measure .on[data-value='{measure}']")
        assert page.locator(".token[style*='color-mix']").count() == 3


@pytest.mark.parametrize("form", ["served", "alone"])
def test_filters_and_search(form: str, request: pytest.FixtureRequest, runs: list[Path]) -> None:
    page = request.getfixturevalue(form)
    known = [json.loads(line) for line in (runs[1] / "samples/step_1.jsonl").open()]
    go(page, "/samples?run=1&kind=step&step=1", ".sample")
    right = [row for row in known if row["reward"] is not None and row["reward"] > 0]
    wrong = [row for row in known if row["reward"] is not None and row["reward"] <= 0]
    page.wait_for_selector(f"#filter >> text=wrong {len(wrong)}")
    assert f"right {len(right)}" in texts(page, "#filter button")
    page.click("#filter [data-value='wrong']")
    until(page, "document.querySelectorAll('.sample').length === given[0]", len(wrong))
    assert set(texts(page, ".sample .badge:first-child")) == {"reward 0"}
    page.fill("#above", "-1")
    page.press("#above", "Enter")
    page.wait_for_selector("#filter >> text=wrong 0")
    page.wait_for_selector(".none")
    page.click("#filter [data-value='all']")
    needle = known[0]["response"][-30:]
    page.fill("#search", needle)
    until(page, "document.querySelectorAll('.sample').length === 1")
    page.check("#everywhere")
    page.wait_for_selector(".finding[data-step='1'] mark")
    assert page.inner_text(".finding mark") == needle
    page.click(".finding button")
    page.wait_for_selector(".sample")
    assert page.input_value("#step") == "1"
    page.fill("#search", "not there at all")
    page.wait_for_selector(".none")


@pytest.mark.parametrize("form", ["served", "alone"])
def test_before_and_after(form: str, request: pytest.FixtureRequest, runs: list[Path]) -> None:
    page = request.getfixturevalue(form)
    before, after = (
        [json.loads(line) for line in (runs[0] / f"samples/eval_{step}.jsonl").open()]
        for step in (0, STEPS)
    )
    gains = [(b["reward"] or 0) - (a["reward"] or 0) for a, b in zip(before, after, strict=True)
             if a["reward"] is not None and b["reward"] is not None]  # fmt: skip
    go(page, "/compare?run=0", "#pairs .group")
    assert page.locator("#pairs .group").count() == 8
    better = int(re.search(r"better (\d+)", page.inner_text("#change"))[1])
    assert better >= sum(gain > 0 for gain in gains) > 0
    page.click("#change [data-value='better']")
    until(page, "document.querySelectorAll('#pairs .group').length === given[0]", better)
    page.wait_for_selector(".pair ins")
    page.wait_for_selector(".pair del")
    page.uncheck("#marks")
    until(page, "document.querySelectorAll('.pair ins').length === 0")
    page.locator("#pairs .through").first.click()
    page.wait_for_selector("#history .group")
    steps = page.eval_on_selector_all("#history .group", "all => all.map(g => g.dataset.step)")
    assert steps[0] == "0" and steps[-1] == str(STEPS)
    page.wait_for_selector("#history ins")
    page.locator("#history .group header button").last.click()
    page.wait_for_selector(".sample")
    assert page.input_value("#step") == str(STEPS)


@pytest.mark.parametrize("form", ["served", "alone"])
def test_questions_of_other_data_are_no_pairs(form: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(form)
    go(page, "/compare?a=0&b=1", "#pairs .group")
    assert page.locator("#pairs .group").count() == 7
    assert "2 answers are left out" in page.inner_text("#pairs .unpaired")
    truth = page.locator("#pairs [data-prompt='1'] .truth")
    assert '{"value":1}' in truth.inner_text()


@pytest.mark.parametrize("form", ["served", "alone"])
def test_fields_of_another_type_break_no_view(form: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(form)
    go(page, f"/samples?run=1&kind=step&step={STEPS}", ".sample")
    assert page.locator(".group [data-sample='99']").inner_text().count("odd") == 2
    page.click("#measure [data-value='advantage']")
    page.wait_for_selector(".sample[data-sample='99'] .missing")
    page.fill("#search", "ΟΔΟΣ")
    until(page, "document.querySelectorAll('.sample').length === 1")
    page.check("#everywhere")
    page.wait_for_selector(".finding mark")
    go(page, "/history?run=1&kind=step&prompt=700", "#history .sample")


@pytest.mark.parametrize("form", ["served", "alone"])
def test_timeline_and_config(form: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(form)
    go(page, "/timeline?run=0", "#timeline rect")
    phases = page.eval_on_selector_all("rect", "all => all.map(r => r.dataset.phase)")
    assert sorted(phases) == sorted(["rollout", "waiting", "update_actor"] * 2)
    assert "rank 1" in page.inner_text(".ranks")
    go(page, "/config?run=0&other=1", "#config .diff")
    assert "seed=0" in page.inner_text("#config del:has-text('seed')")
    assert "seed=1" in page.inner_text("#config ins:has-text('seed')")
    page.select_option("#other", "")
    until(page, "!document.querySelector('#config .diff')")
    assert "config = PpoConfig(" in page.inner_text("#config .code")


def test_a_run_without_samples_says_so(served: Any) -> None:
    for view, said in (("samples", "no samples"), ("compare", "no held-out answers"),
                       ("history", "no samples"), ("timeline", "no trace folder")):  # fmt: skip
        go(served, f"/{view}?run=2", ".none")
        assert said in served.inner_text("main")


def test_themes_and_a_narrow_window(served: Any, alone: Any) -> None:
    def back() -> str:
        return served.evaluate("getComputedStyle(document.body).backgroundColor")

    light = back()
    assert alone.evaluate("getComputedStyle(document.body).backgroundColor") != light
    served.click("#theme")  # light
    served.click("#theme")
    assert back() != light and "dark" in served.inner_text("#theme")
    served.click("#theme")
    assert back() == light
    for page in (served, alone):
        page.set_viewport_size({"width": 390, "height": 800})
        for view in ("curves", "samples", "compare", "history", "timeline", "config"):
            go(page, f"/{view}?run=0", f".view-{view} *")
            page.wait_for_timeout(150)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 390, (view, wide)
        page.set_viewport_size({"width": 1280, "height": 900})


def test_the_page_follows_a_run(served: Any, runs: list[Path]) -> None:
    go(served, "/samples?run=1&kind=step&step=newest", ".sample")
    assert served.input_value("#step") == str(STEPS)
    newest = (runs[1] / "samples" / f"step_{STEPS}.jsonl").read_text()
    served.focus("#search")
    Path(runs[1], "samples", f"step_{STEPS + 1}.jsonl").write_text(newest)
    until(served, "document.querySelector('#step')?.value === given[0]", str(STEPS + 1))
    assert served.evaluate("document.activeElement.id") == "search"
    more = [json.loads(newest.splitlines()[0]) | {"sample": i, "reward": 1} for i in range(100)]
    path = Path(runs[1], "samples", f"step_{STEPS + 2}.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in more))
    until(served, "document.querySelectorAll('.sample').length === 64")
    served.click(".more")
    until(served, "document.querySelectorAll('.sample').length === 100")
    path.with_name(f"step_{STEPS + 3}.jsonl").write_text(path.read_text())
    until(served, "document.querySelector('#step')?.value === given[0]", str(STEPS + 3))
    until(served, "document.querySelectorAll('.sample').length === 64")
    served.click("#filter [data-value='right']")
    served.check("#everywhere")
    served.wait_for_selector(".finding")
    for _ in range(2):
        served.click(".more")
        served.wait_for_timeout(300)
    found = "[...document.querySelectorAll('.finding')].map(f => f.dataset.step)"
    until(served, f"{found}.filter(step => step === given[0]).length === 100", str(STEPS + 3))
    served.uncheck("#everywhere")
    go(served, "/curves?m=reward/mean", ".chart canvas")
    with Path(runs[1], "metrics.jsonl").open("a") as file:
        row = metrics_row(STEPS + 40, STEPS + 40, 10, random.Random(0))
        file.write(json.dumps(row) + "\n")
    served.locator("#results tr", has_text="second").locator(
        f"td:has-text('{STEPS + 40}')"
    ).wait_for()


def test_what_the_file_lacks_is_said_on_it(alone: Any) -> None:
    said = alone.inner_text("#messages")
    assert re.search(r"first: samples of \d+ of 23 files are on this page", said)
    assert alone.inner_text("#live") == ""
