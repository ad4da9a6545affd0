"""Nothing that a program prints may end it, whatever has become of its standard streams."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.programs

PRINTS = """
import os, sys, threading
from spmdrl.distributed.output import keep_output
keep_output()
keep_output()  # a second time it finds its own
for i in range(3):
    print("line", i, "\\u00e4\\udc80", flush=True)
print("to the other", file=sys.stderr)
other = open("other", "w")
print("not into a file")
other.write("mine")
other.close()
sys.stdout.buffer.write(b"bytes\\n")
print("left to be flushed at the end")
print("closed" if sys.stdout is None else sys.stdout.fileno(), file=open("done", "w"))
"""


@pytest.mark.parametrize("stdout", ["| true", "> /dev/full", ">&-", ">&- 2>&- <&-", "> log"])
def test_a_program_outlives_its_output(tmp_path, stdout):
    (tmp_path / "prints.py").write_text(PRINTS)
    # with a pipe the program waits until the reader has gone
    wait = "sleep 0.5; " if "|" in stdout else ""
    command = f"({wait}{sys.executable} prints.py; echo $? > code) {stdout}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, text=True, stderr=subprocess.PIPE, timeout=60,
        env={"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}, check=False,
    )  # fmt: skip
    assert (tmp_path / "code").read_text() == "0\n", done.stderr
    assert (tmp_path / "done").read_text() == "1\n"
    assert (tmp_path / "other").read_text() == "mine"
    lost = done.stderr.count("standard output cannot be written")
    assert lost == (stdout in ("| true", "> /dev/full"))
    if stdout == "> log":
        lines = (tmp_path / "log").read_text().splitlines()
        assert lines[0] == "line 0 \\xe4\\udc80"
        assert lines[-1] == "left to be flushed at the end"


def test_a_descriptor_that_does_not_block_gets_all_of_it(tmp_path):
    """A pipe that is full for a while: what is printed waits, as on one that blocks."""
    script = (
        "import os; from spmdrl.distributed.output import keep_output; os.set_blocking(1, False)\n"
        "keep_output()\nfor i in range(20_000): print('x' * 50)"
    )
    reader = "import sys, time; time.sleep(1); print(len(sys.stdin.read()))"
    command = f'{sys.executable} -c "{script}" | {sys.executable} -c "{reader}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{20_000 * 51}\n", done.stderr
