"""A run's folder belongs to one process at a time, and to nobody once that has ended."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmdrl.checkpoint import run_dir as run_lock
from spmdrl.config import ConfigError


@contextmanager
def held(path: Path, seconds: float) -> Iterator[BaseProcess]:
    """Another process, a fork, that has taken the folder for so long."""
    fork, (told, tells) = multiprocessing.get_context("fork"), multiprocessing.Pipe(False)

    def hold() -> None:
        tells.send(run_lock.take(path, 5)[1])
        time.sleep(seconds)

    holder = fork.Process(target=hold)
    holder.start()
    try:
        assert told.recv() is None
        yield holder
    finally:
        holder.kill()
        holder.join()


@pytest.mark.clock
def test_another_process_is_named_and_a_killed_one_leaves_nothing(tmp_path):
    with held(tmp_path / "run", 60) as holder:
        fd, problem = run_lock.take(tmp_path / "run", 0.3)
        assert fd is None
        assert problem is not None and f"in use by process {holder.pid} on " in problem
        holder.kill()
        holder.join()
    begin = time.monotonic()
    fd, problem = run_lock.take(tmp_path / "run", 0.3)
    assert problem is None and isinstance(fd, int)
    assert time.monotonic() - begin < 0.3


def test_what_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    fd, problem = run_lock.take(tmp_path / "file" / "run", 0.3)
    assert fd is None
    assert str(tmp_path / "file" / "run") in problem and "Not a directory" in problem


def test_ranks_that_start_again_wait_for_the_lock_of_a_lost_host(tmp_path, monkeypatch, capsys):
    """A file server keeps it until the lease of that host has run out."""
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.3)
    monkeypatch.setattr(run_lock.dist, "broadcast_object_list", lambda *args, **kwargs: None)
    alone = SimpleNamespace(rank=0, control=None)
    with held(tmp_path / "run", 1.5) as holder:
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid} on "):
            run_lock.lock_run_dir(tmp_path / "run", alone)
        assert run_lock.lock_run_dir(tmp_path / "run", alone, again=True) is not None
    assert f"waiting up to 180 s for {tmp_path / 'run'}, which process {holder.pid} on " in (
        capsys.readouterr().out
    )
