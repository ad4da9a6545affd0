import gc
import os
import random
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from ranks import ENGINE_ENV, STRICT

# byte code is kept, whatever the environment says: to compile spmdrl alone takes each process two
# seconds, and there are hundreds
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# a shell starts its background jobs with SIGINT ignored, which children would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)

for name, value in ENGINE_ENV.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402  it reads OMP_NUM_THREADS
from tiny_models import save_qwen3  # noqa: E402

torch.set_num_threads(1)
gc.disable()  # until all test files are imported, see pytest_collection_finish


# `make check` leaves out tests with these markers, and no other test may start a program
NOT_QUICK = {
    "ranks", "vllm", "engine", "megatron", "sandbox", "compiles", "clock", "programs",
}  # fmt: skip
STARTED: list[str] = []  # command lines of the programs that the present test has started


def note_program(event: str, args: tuple[Any, ...]) -> None:
    """Python calls this for every program that is started, by asyncio too. Those are left out that
    the standard library's `platform` asks for the processor's name.
    """
    if event == "subprocess.Popen":
        command = args[1] if isinstance(args[1], list | tuple) else [args[1]]
        if command[0] not in ("uname", "file"):
            STARTED.append(" ".join(map(os.fsdecode, command)))


sys.addaudithook(note_program)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of the inputs that tests draw (0)")
    strict = "hold what ranks do to NCCL's rules (spmdrl/distributed/nccl_rules)"
    parser.addoption("--strict-nccl", action="store_true", help=strict)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--strict-nccl"):
        os.environ[STRICT] = "1"  # forked ranks find it there


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that is marked strict_nccl, and what it sets up, runs as with --strict-nccl."""
    if item.get_closest_marker("strict_nccl") is None:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STRICT, "1")
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start ranks come first, those without any category last: of two workers none has
    a long file left when the other has ended."""

    def place(marks: set[str]) -> int:
        long = {"vllm", "engine", "megatron", "compiles", "programs"}
        return 0 if "ranks" in marks else 1 if marks & long else 2

    marks: dict[Path, set[str]] = {}
    for item in items:
        marks.setdefault(item.path, set()).update(mark.name for mark in item.iter_markers())
    items.sort(key=lambda item: place(marks[item.path]))


def pytest_collection_finish() -> None:
    """Garbage collection leaves out all that is imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """What a test draws depends on its file's name, its own and --seed: not on the folder of the
    file, nor on the tests before it."""
    name = f"{request.path.name}::{request.node.nodeid.partition('::')[2]}"
    seed = crc32(name.encode()) ^ request.config.getoption("--seed")
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No run of torchrun outlives the test that started it."""
    yield
    if "programs" in sys.modules:
        sys.modules["programs"].end_left()


@pytest.fixture(autouse=True)
def programs_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that starts a program, or the first one whose fixtures do, has a marker that says
    so."""
    yield
    started = STARTED.copy()
    STARTED.clear()
    if not NOT_QUICK & {mark.name for mark in request.node.iter_markers()}:
        what = [command[:200] for command in started]
        assert not what, f"give the test the marker `programs`, as it has started {what}"


@pytest.fixture(scope="module", autouse=True)
def no_group_left() -> Iterator[None]:
    """Which file met which process before it is drawn anew in every run: none leaves it changed."""
    yield
    assert not torch.distributed.is_initialized()
    for engine in ("vllm.distributed.parallel_state", "sglang.srt.distributed.parallel_state"):
        if engine in sys.modules:
            assert sys.modules[engine]._WORLD is None
    if "megatron.core.parallel_state" in sys.modules:
        assert not sys.modules["megatron.core.parallel_state"].is_initialized()


@pytest.fixture(scope="module")
def topology() -> Iterator[Any]:
    """Of this process alone."""
    from spmdrl.distributed.topology import Topology

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/pg", rank=0, world_size=1
        )
        yield Topology.build(torch.device("cpu"), dp=1, tp=1)
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with its tokenizer."""
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))
