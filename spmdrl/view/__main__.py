"""Shows runs and their rollouts on a page: python -m spmdrl.view RUN [RUN ...]

Serves the page on this machine, and follows a run that is going on; --out writes one file instead
that needs no server. Reads what the run has left (docs/run_folder.md) and writes nothing into it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fire

from spmdrl.cli.help import asks_for_help, refuse_unknown
from spmdrl.cli.paths import check_writable
from spmdrl.config import ConfigError
from spmdrl.distributed.exit import exit_config
from spmdrl.distributed.output import keep_output
from spmdrl.view.runs import Questions, open_runs

INTERRUPTED = 130  # exit code of Ctrl-C


def main(
    *runs: str, out: str | None = None, port: int = 0, out_mib: float = 16.0, **others: Any
) -> None:
    """Shows curves, samples, timeline and config of runs on a page.

    Args:
        runs: folders of runs, also of some that are still going; with several their curves are
            drawn together
        out: a file, which gets the page with what it shows and needs no server
        port: to listen on, at 127.0.0.1; 0: any that is free
        out_mib: MiB of samples at most that --out puts into the file
    """
    keep_output()
    if asks_for_help(others, main):
        return
    try:
        refuse_unknown(others, main)
        if not runs:
            raise ConfigError("RUN is required: python -m spmdrl.view RUN [RUN ...]")
        questions = Questions(open_runs([str(run) for run in runs]))
        if out is None:
            show(questions, whole_number("--port", port))
        else:
            write(questions, Path(str(out)), out_mib)
    except ConfigError as error:
        exit_config(error)


def show(questions: Questions, port: int) -> None:
    from spmdrl.view.server import serve

    try:
        serve(questions, port)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def write(questions: Questions, path: Path, out_mib: float) -> None:
    """Writes the page that stands alone. Raises ConfigError where it cannot."""
    from spmdrl.view.export import exported
    from spmdrl.view.page import whole_page

    if path.suffix != ".html":
        raise ConfigError(f"--out {path}: the name must end in .html")
    if isinstance(out_mib, bool) or not isinstance(out_mib, (int, float)) or out_mib < 0:
        raise ConfigError(f"--out_mib {out_mib}: it is a number of MiB, 0 or more")
    check_writable("--out", str(path.parent))
    data = exported(questions, int(out_mib * 2**20))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(whole_page(data), encoding="utf-8")
    for sentence in data["overview"]["left_out"]:
        print(f"left out: {sentence}")
    print(f"wrote {path}: {path.stat().st_size / 2**20:.1f} MiB")


def whole_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**16:
        raise ConfigError(f"{name} {value}: it is a number from 0 to 65535")
    return value


if __name__ == "__main__":
    fire.Fire(main)
