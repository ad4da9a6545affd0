"""examples/arithmetic/bench_algos.py: its methods, its noisy verifier, its page and its picture."""

import importlib.util
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from programs import ROOT
from tiny_models import save_qwen3

from spmdrl.algo.advantages import ESTIMATORS
from spmdrl.algo.losses import POLICY_LOSSES
from spmdrl.cli.arguments import load_config
from spmdrl.config import PpoConfig
from spmdrl.training.checks.rl import check

FOLDER = ROOT / "examples/arithmetic"


@pytest.fixture(scope="module")
def bench():
    """The script, with the modules of its folder, which other folders' must not find later."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("bench_algos_script", FOLDER / "bench_algos.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(FOLDER))
    for name in {"noisy", "quickstart", "bench_algos_report", spec.name} - before:
        del sys.modules[name]


def test_the_methods_are_those_of_the_registries(bench, tmp_path):
    """Each is in the table or says why not; and what it sets is a config that may run."""
    said = {(method.kind, method.name) for method in bench.all_methods()}
    left_out = bench.without_runs()
    for kind, names in (("estimators", ESTIMATORS), ("losses", POLICY_LOSSES)):
        run = {name for of_kind, name in said if of_kind == kind}
        assert set(names) <= run | set(left_out[kind]), kind
        assert not run & set(left_out[kind])
        assert set(bench.OPTIONS[kind]) | set(bench.LEFT_OUT[kind]) <= run | set(left_out[kind])
    assert left_out["losses"] == {
        "vanilla": "another name of `ppo`", "reinforce": "another name of `gpg`",
    }  # fmt: skip
    assert {"dpo", "ipo", "orpo", "simpo", "cpo"} < {name for _, name in said}
    model = str(save_qwen3(tmp_path))
    for method in bench.all_methods():
        words = {"model": model, **dict(method.settings)}
        config = load_config(str(FOLDER / "noisy.py"), PpoConfig, words)
        check(config, 1)
        chosen = config.algo.advantage if method.kind == "estimators" else config.algo.policy_loss
        assert chosen == method.name


def test_the_verifier_errs_as_often_as_it_says_and_the_same_everywhere(bench):
    noisy = sys.modules["noisy"]
    rows = [(index, sample) for index in range(2000) for sample in range(8)]
    wrong = [noisy.errs(*row, "score") for row in rows]
    share = noisy.ERRORS
    deviation = (share * (1 - share) / len(rows)) ** 0.5
    assert abs(np.mean(wrong) - share) < 4 * deviation
    per_row = np.reshape(wrong, (2000, 8)).sum(axis=1)  # binomial: no row is judged by a whim
    assert abs(per_row.var() / (8 * share * (1 - share)) - 1) < 0.15
    for response, truth in (("24", 1.0), ("23", 0.0)):  # right answers and wrong ones alike
        scores = [noisy.noisy_match(response, "24", {"index": i}, k) for i, k in rows]
        assert {score["right"] for score in scores} == {truth}
        assert [score["score"] != truth for score in scores] == wrong
        tens = np.array([score["tens"] != truth for score in scores])
        assert abs(tens.mean() - share) < 4 * deviation
        assert abs(np.corrcoef(tens, wrong)[0, 1]) < 0.04  # its errors are its own
    assert noisy.exact_match(" 24", "24") == 1.0 and noisy.exact_match("2", "24") == 0.0


def result(bench, kind, name, seed, *accuracies):
    """A run with these accuracies at steps 0, 8, 16."""
    settings = {(method.kind, method.name): method.settings for method in bench.all_methods()}
    curve = tuple(zip((0, 8, 16), accuracies, strict=True))
    return bench.Result(
        kind, name, settings[kind, name], curve, 0.75, 30.0 + seed, seed, "a processor"
    )


STORED = {
    ("estimators", "grpo"): [(0.4, 0.6, 0.8), (0.4, 0.7, 0.9), (0.4, 0.65, 0.88)],
    ("estimators", "reinforce"): [(0.4, 0.3, 0.5), (0.4, 0.2, 0.1), (0.4, 0.3, 0.45)],
    ("estimators", "win_rate"): [(0.4, 0.8, 0.95), (0.4, 0.8, 0.93), (0.4, 0.8, 0.94)],
    ("estimators", "rloo"): [(0.4, 0.8, 0.92), (0.4, 0.8, 0.9), (0.4, 0.8, 0.91)],
    ("losses", "ppo"): [(0.4, 0.6, 0.8), (0.4, 0.7, 0.9), (0.4, 0.65, 0.88)],
    ("losses", "cispo"): [(0.4, 0.5, 0.7), (0.4, 0.5, 0.72), (0.4, 0.5, 0.74)],
}


def test_page_and_picture_of_a_few_stored_runs(bench, tmp_path, capsys):
    report = sys.modules["bench_algos_report"]
    runs = [result(bench, *key, seed, *each)
            for key, seeds in STORED.items() for seed, each in enumerate(seeds)]  # fmt: skip
    report.write(runs, bench.without_runs(), tmp_path, tmp_path)
    page = (tmp_path / "bench_algos.md").read_text()
    rows = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows["| `grpo`"] == "| `grpo` |  | 0.880 | 0.800..0.900 | 0.750 | 31 |"
    assert "`--algo.policy_loss sppo` | 0.940 | 0.930..0.950" in rows["| `win_rate`"]
    assert "clip_high" in rows["| `cispo`"] and "another name of `ppo`" in rows["| `vanilla`"]
    names = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert names[:4] == ["win_rate", "rloo", "grpo", "reinforce"]  # from the highest median on
    spread = [line for line in page.splitlines() if line.startswith("| estimators, ")]
    finals = [
        [each[-1] for each in seeds]
        for (kind, name), seeds in STORED.items()
        if kind == "estimators" and name != "win_rate"
    ]  # which had a loss of its own
    f_all, f_learners = f_ratio(finals), f_ratio([finals[0], finals[2]])
    assert spread[0].endswith(f" {f_all:.1f} |") and spread[1].endswith(f" {f_learners:.1f} |")
    assert "| estimators, those that learn | 2 |" in spread[1]
    assert spread[0] in capsys.readouterr().out
    assert (tmp_path / "bench_algos.png").stat().st_size > 10_000
    figure = report.draw(report.summarise(runs))
    panels = [axes for axes in figure.get_axes() if axes.get_visible()]
    assert len(panels) == len(STORED)
    [of_cispo] = [axes for axes in panels if axes.get_title("left").startswith("cispo")]
    lines = [list(line.get_ydata()) for line in of_cispo.get_lines()]
    assert lines == [[0.4, 0.65, 0.88], [0.4, 0.5, 0.72]]  # the default's medians, its own
    corners = of_cispo.collections[0].get_paths()[0].vertices
    assert {0.7, 0.74} <= set(corners[corners[:, 0] == 16, 1])  # the band, at the end


def f_ratio(groups):
    """One-way analysis of variance, from sums of squares and degrees of freedom."""
    values = np.array(groups)
    between = ((values.mean(1) - values.mean()) ** 2).sum() * values.shape[1] / (len(values) - 1)
    within = ((values - values.mean(1, keepdims=True)) ** 2).sum() / (values.size - len(values))
    return between / within


def test_a_run_is_kept_until_its_command_changes(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bench, "RUNS", tmp_path)
    launched = []

    def launch(words, output):
        launched.append(words)
        rows = [{"step": 0, "eval/reward": 0.25}, {"step": 1, "reward/right": 0.5},
                {"step": 2, "reward/right": 1.0, "eval/reward": 0.75}]  # fmt: skip
        (output.parent / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return 0 if "cispo" not in words else bench.OUT_OF_TIME

    monkeypatch.setattr(bench, "launch", launch)
    methods = {method.run_name: method for method in bench.all_methods()}
    method, failing = methods["rloo-ppo"], methods["grpo-cispo"]
    assert bench.read_result(method, 1) is None
    assert "0.25 -> 0.75" in bench.run_one(method, 1)
    kept = bench.read_result(method, 1)
    assert (kept.curve, kept.samples_right) == (((0, 0.25), (2, 0.75)), 0.75)
    assert bench.read_result(method, 2) is None
    assert f"exit code {bench.OUT_OF_TIME}" in bench.run_one(failing, 1)
    assert bench.read_result(failing, 1) is None
    words = launched[0][launched[0].index("spmdrl.ppo") :]
    assert words[words.index("--algo.advantage") + 1] == "rloo" and "--seed" in words
    other = replace(method, settings=(*method.settings, ("actor.optim.lr", 1e-3)))
    assert other.run_name == method.run_name and bench.read_result(other, 1) is None
    by_loss, by_estimator = (
        next(m for m in bench.all_methods() if (m.kind, m.name) == each)
        for each in (("losses", "ppo"), ("estimators", "grpo"))
    )
    assert bench.key_of(by_loss, 0) == bench.key_of(by_estimator, 0)  # one run for both
