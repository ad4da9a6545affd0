"""The kernels' bench runs through on this machine, whatever one of its cases does."""

import json
import multiprocessing
import sys
import time
from pathlib import Path

BENCH = Path(__file__).parents[2] / "kernels" / "bench"
sys.path.insert(0, str(BENCH))  # a folder of commands, not a package
import run as bench  # noqa: E402
from kernel_cases import Case, cpu_cases, gpu_cases  # noqa: E402


class Here:
    """In place of the process that measures."""

    alive = True

    def __init__(self, log: Path) -> None:
        self.device = bench.torch.device("cpu")

    def measure(self, case: Case, end: float) -> bench.Result:
        return bench.measure(case, self.device)

    def stop(self) -> None:
        pass


def test_all_cases_of_a_machine_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "Worker", Here)
    monkeypatch.setattr(bench, "SECONDS", 0.04)
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path)])
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    bench.main()
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["results"]) == len(cpu_cases())
    for result in found["results"]:
        assert result["ms"] > 0, result
        assert result["form"] == "ceiling" or result["fraction"] > 0
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


def test_a_case_that_fails_or_hangs_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch):
    """The second and the third process are forks, which import nothing."""
    kinds, context = iter(("spawn", "fork", "fork")), multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context(next(kinds)))
    good = Case("copy", "ceiling", (1000,))
    cases = [Case("copy", "ceiling", (-1,)), good,
             Case("gae", "eager", (64, 1 << 20), limit_s=0.5), good]  # fmt: skip
    results = bench.measure_all(cases, tmp_path, time.monotonic() + 600)
    assert results[0]["error"] == "the process ended"
    assert any("non-negative" in line for line in results[0]["log"])
    assert "over the limit" in results[2]["error"]
    assert results[1]["ms"] > 0 and results[3]["ms"] > 0
    late = bench.measure_all([good], tmp_path, time.monotonic() - 1)
    assert "left out" in late[0]["error"]


def test_gpu_cases_are_few_enough_and_begin_with_the_ceilings():
    cases = gpu_cases(full=False, num_tiles=5)
    assert [c.form for c in cases[:2]] == ["ceiling", "ceiling"]
    assert len(set(cases)) == len(cases) < 100
    assert len(gpu_cases(full=True, num_tiles=5)) > len(cases)
