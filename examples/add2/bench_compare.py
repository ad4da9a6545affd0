"""`make bench-compare BASE=<commit>`: the commit before and the present one, run in turns.

    python examples/add2/bench_compare.py BASE [--rounds 4] [--workload add2] [--ranks 1,2]

Prints a line for each figure: medians of both, their ratio, and whether it moved beyond the noise:
whether every run of one is above every run of the other. By chance that happens to a figure once in
35 with 4 rounds, so to one of ten in about one table of four; with 6 rounds once in 462. BASE's
files are put into runs/bench-base; both run in this environment, with the config of their own
commit but vLLM eager, as all commits have it on CPUs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench import COMPARED, ROOT, Record, add_options, make_assets, measure, report

FIGURES = ("gen_s", "logp_s", "train_s", "sync_s", *COMPARED)
BASE = ROOT / "runs/bench-base"


def main() -> None:
    parser = argparse.ArgumentParser(description="compares two commits")
    parser.add_argument("base", help="commit, branch or tag")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each")
    add_options(parser)
    parser.set_defaults(steps=8)
    args = parser.parse_args()
    out = args.out.resolve()
    os.chdir(ROOT)
    base = check_out(args.base)
    make_assets()
    shutil.copytree(ROOT / "runs/add2", base / "runs/add2", dirs_exist_ok=True)
    options = [*args.options, "--rollout.enforce_eager", "True"]
    for name, ranks in product(args.workload.split(","), map(int, args.ranks.split(","))):
        before: list[Record] = []
        after: list[Record] = []
        for _ in range(args.rounds):
            for found, root in ((before, base), (after, ROOT)):
                found.append(measure(name, ranks, "off", args.steps, options, root))
                report(found[-1], out)
        print("\n".join(table(f"{name} on {ranks} ranks", before, after)), flush=True)


def check_out(commit: str) -> Path:
    """The files of a commit, in BASE. Exits the process where there is none such."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if found.returncode:
        sys.exit(f"bench-compare: {commit!r} is no commit of this repository")
    if not BASE.exists():
        subprocess.run([*git, "worktree", "prune"], check=True)
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(BASE)], check=True)
    subprocess.run(
        ["git", "-C", str(BASE), "checkout", "--quiet", "--detach", found.stdout.strip()],
        check=True,
    )
    return BASE


def table(what: str, before: list[Record], after: list[Record]) -> list[str]:
    """Lines of text: a figure each."""
    commits = f"{before[0]['commit']} -> {after[0]['commit']}"
    foreign = max(record["foreign_cores"] for record in before + after)
    lines = [f"{what}, {commits}, {after[0]['processor']}, other programs took {foreign} cores"]
    for name in FIGURES:
        old, new = ([record[name] for record in records] for records in (before, after))
        a, b = median(old), median(new)
        ratio = f"{b / a:6.3f}" if a else "     -"
        lines.append(f"  {name:20} {a:10.3f} -> {b:10.3f}  ratio {ratio}  {verdict(old, new)}")
    return lines


def verdict(before: list[float], after: list[float]) -> str:
    """Says "rose", "fell", or "the same" where runs of both lie among each other."""
    if len(before) < 2:
        return "one run says nothing"
    if min(after) > max(before):
        return "rose"
    return "fell" if max(after) < min(before) else "the same"


if __name__ == "__main__":
    main()
