"""Checkpoints that are written meanwhile: killed, damaged, forged, kept, on another world size."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import tempfile
import time
import zipfile
import zlib
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_calls, start_ranks
from tiny_models import save_qwen3
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from training_batches import engine_on, whole_batch

from spmdrl.checkpoint import chunk_index
from spmdrl.checkpoint import format as checkpoint
from spmdrl.checkpoint.writer import Saver, check_metric
from spmdrl.config import CheckpointConfig, ConfigError, TrainConfig
from spmdrl.distributed.phases import PhaseError, Phases
from spmdrl.engines import host_copies
from spmdrl.engines.fsdp.model import build_model
from spmdrl.engines.hf_export import load_full

MOMENTS = int(os.environ.get("SPMDRL_KILLS", "8"))  # 50 to be thorough
ACTOR = TrainConfig(dtype="float32", micro_batch_tokens=300)


def built(topology, model, **changes):
    torch.manual_seed(1)
    return engine_on(topology, "policy", str(model), replace(ACTOR, **changes))


def saver_of(topology, root, engine, said=lambda step, folder: None, **config):
    settings = CheckpointConfig(**{"keep": 1} | config)
    return Saver(Path(root), settings, Phases(topology), {"actor": engine.topology}, said)


def fill(engine, value):
    """Every weight and moment is `value`."""
    with torch.no_grad():
        for tensor in tensors_of(engine):
            tensor.fill_(value)
    engine.num_updates = value


def tensors_of(engine):
    state = engine.optimizer.state.values()
    return [*engine.params, *(t for s in state for name, t in s.items() if name != "step")]


def values_of(engine):
    tensors = [t.to_local() for t in tensors_of(engine)]
    return {float(v) for t in tensors for v in t.detach().unique()} | {float(engine.num_updates)}


# ---- killed


def note(path, value):
    with Path(path).open("a") as f:
        f.write(f"{value}\n")


def notes_of(path):
    return Path(path).read_text().split("\n")[:-1] if Path(path).exists() else []


def count_of(path):
    return len(notes_of(path))


def last_of(path):
    return int((notes_of(path) or ["0"])[-1])


def save_for_ever_on(topology, model, folder, same_step):
    """What a run does: takes its folder, resumes, saves; the state of save N is all N."""
    root = Path(folder, "checkpoints")
    engine = built(topology, model)
    if topology.rank == 0:
        checkpoint.recover(root)
    dist.barrier()
    found, value = checkpoint.find("auto", root, topology), 0
    if found is not None:
        run = checkpoint.load(found, {"actor": engine}, topology)
        value = run["value"]
        assert values_of(engine) == {float(value)}, (found, values_of(engine))
    if topology.rank == 0:
        note(f"{folder}/resumed", value)
    stands = []

    def said(step, path):
        if topology.rank == 0:
            note(f"{folder}/stood", stands.pop())

    saver = saver_of(topology, root, engine, said)
    while True:
        value += 1
        fill(engine, value)
        saver.wait()
        if topology.rank == 0:
            note(f"{folder}/begun", value)
        stands.append(value)
        step = 1 if same_step else value
        saver.save(step, {"actor": engine}, {"engines": ["actor"], "value": value}, [])
        fill(engine, -1)  # training goes on: it must not be seen


def until(condition, procs, folder, limit_s=60):
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end or any(p.exitcode is not None for p in procs):
            raise AssertionError([log.read_text()[-3000:] for log in Path(folder).glob("log_*")])
        time.sleep(0.005)


@contextmanager
def running(call):
    with tempfile.TemporaryDirectory() as folder:
        procs = start_ranks(2, [call], folder)
        try:
            yield procs, folder
        finally:
            for process in procs:
                process.kill()
                process.join()


def kill_one(folder, call, chance):
    """Starts ranks, waits until one save more stands, and kills both or one of them."""
    resumed, stood, begun = (folder / name for name in ("resumed", "stood", "begun"))
    before, starts = last_of(stood), count_of(resumed)
    with running(call) as (procs, logs):
        until(lambda: count_of(resumed) > starts, procs, logs)
        # where the last one was killed: what was told to stand does, or what was begun
        assert before <= last_of(resumed) <= last_of(begun)
        until(lambda: last_of(stood) > before, procs, logs)
        time.sleep(chance.uniform(0, 0.25))
        victims = chance.choice([procs, procs[:1], procs[1:]])
        for process in victims:
            process.kill()
        time.sleep(0.2 * (len(victims) == 1))  # the other one goes on as long as it can


@pytest.mark.ranks
@pytest.mark.parametrize("same_step", [False, True])
def test_a_kill_at_any_moment_leaves_the_previous_or_the_new_one(tmp_path, qwen3, same_step):
    """same_step: each save replaces the one before, under the same name."""
    seed = time.time_ns()
    print(f"{seed=}")
    chance = random.Random(seed)
    call = (save_for_ever_on, (qwen3, tmp_path, same_step))
    for _ in range(MOMENTS // 2):
        kill_one(tmp_path, call, chance)
    assert last_of(tmp_path / "begun") >= MOMENTS // 2


# ---- written meanwhile


def meanwhile_on(topology, model, root):
    """Weights change while the copy of them is written; then another world loads it."""
    engine, stood = built(topology, model), []
    saver = saver_of(topology, root, engine, lambda step, folder: stood.append(step), keep=2)
    for step in (1, 2):
        fill(engine, step)
        saver.save(step, {"actor": engine}, {"engines": ["actor"]}, [])
        fill(engine, 100 + step)
    saver.wait()
    written = saver.take_metrics()
    found = [
        values_of(engine)
        for step, path in checkpoint.steps_in(Path(root))
        if checkpoint.load(path, {"actor": engine}, topology)["step"] == step
    ]
    return stood, found, written


def replicas_on(topology, model, folder):
    """Saved as two replicas, loaded as two shards, and the other way round."""
    found = []
    for name, wrote, reads in (("a", 1, 2), ("b", 2, 1)):
        engine = built(topology, model, fsdp=wrote)
        mine = list(range(topology.rank, 9, topology.world))
        engine.update(whole_batch().select(mine), likelihood, 1.0)
        root = Path(folder, name)
        saver = saver_of(topology, root, engine)
        saver.save(1, {"actor": engine}, {"engines": ["actor"]}, [])
        saver.wait()
        step = root / "step_00000001"
        (root / "old").mkdir(exist_ok=True)
        for file in (f"rng_{topology.rank}.pt", *(["run.json"] if topology.rank == 0 else ())):
            shutil.copy(step / file, root / "old")
        dcp.save(engine.state_dict(), checkpoint_id=root / "old/actor")  # as earlier versions did
        for folder_read in (step, root / "old"):
            other = built(topology, model, fsdp=reads)
            checkpoint.load(folder_read, {"actor": other}, topology)
            pairs = zip(tensors_of(engine), tensors_of(other), strict=True)
            found.append(all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs))
            found.append(other.num_updates == 1)
        sizes = [(step / "actor" / chunk_index.file_of(rank)).stat().st_size for rank in (0, 1)]
        found.append(max(sizes) < 0.8 * sum(sizes))  # replicas share the writing
        index = chunk_index.read_index(step / "actor").state_dict_metadata.values()
        stored = [info for info in index if isinstance(info, TensorStorageMetadata)]
        found.append(
            all(
                sum(chunk.sizes.numel() for chunk in info.chunks) == info.size.numel()
                for info in stored
            )
        )  # each element once
    return found


def likelihood(logprobs, entropy, mb):
    return -(logprobs * mb.loss_weights).sum(), {}


def too_large_on(topology, model, root):
    """Rank 1 may write no file above 64 KiB, during the second of three saves."""
    engine, said = built(topology, model), []
    saver = saver_of(topology, root, engine, lambda step, folder: said.append(step), keep=3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    failure = None
    for step in (1, 2, 3):
        saver.wait()
        if step == 2 and topology.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        fill(engine, step)
        saver.save(step, {"actor": engine}, {"engines": ["actor"]}, [])
        if step == 2:
            while not saver.failed:
                time.sleep(0.01)
            try:
                saver.wait()
            except PhaseError as error:
                failure = error.report
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    saver.wait()
    names = sorted(path.name for path in Path(root).iterdir())
    return failure.rank, failure.phase, failure.cause, said, names


SCORES = [0.5, 0.9, float("nan"), 0.1, None, 0.9, 0.2]


def kept_on(topology, model, root):
    engine, found = built(topology, model), []
    for best_is in ("largest", "smallest"):
        where = Path(root, best_is)
        saver = saver_of(
            topology, where, engine, keep=1, keep_best=2, best_metric="m", best_is=best_is
        )
        for step, score in enumerate(SCORES, start=1):
            metrics = {"other": 1.0} | ({} if score is None else {"m": score})
            run_info = {"engines": ["actor"], "metrics": metrics}
            saver.save(step, {"actor": engine}, run_info, [])
        saver.wait()
        found.append([step for step, _ in checkpoint.steps_in(where)])
    return found


@pytest.mark.parametrize(("name", "metrics", "refused"), [
    ("eval/reward", {"sft/loss": 1.0}, False),  # not evaluated in this step
    ("eval/reward", {"eval/acc": 1.0, "reward/mean": 0.0}, True),
    ("reward/mean", {"eval/acc": 1.0, "reward/mean": 0.0}, False),
    ("sft/lost", {"sft/loss": 1.0}, True),
    # there may be none where samples have no reward
    ("eval/reward", {"eval/reward/invalid": 3.0, "reward/mean": 0.0}, False),
    ("eval/reward", {"eval/reward/invalid": 0.0, "reward/invalid": 2.0}, True),
    ("reward/mean", {"reward/invalid": 2.0}, False),
])  # fmt: skip
def test_a_metric_that_does_not_exist_is_named_with_those_that_do(name, metrics, refused):
    config = CheckpointConfig(keep_best=1, best_metric=name)
    with pytest.raises(ConfigError) if refused else nullcontext() as error:
        check_metric(config, metrics)
    assert not refused or all(words in str(error.value) for words in (name, *metrics))
    check_metric(replace(config, keep_best=0), metrics)


# ---- damaged


def flip(path):
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 1
    Path(path).write_bytes(content)


def found_on(topology, model, root):
    """What is found, and said, as one checkpoint after the other is damaged in its own way."""
    engine, root = built(topology, model), Path(root)
    saver = saver_of(topology, root, engine, keep=9)
    for step in (1, 2, 3, 4, 5):
        saver.save(step, {"actor": engine}, {"engines": ["actor"]}, [])
    saver.wait()
    damages = [
        lambda folder: flip(folder / "actor/__1_0.distcp"),
        lambda folder: (folder / "run.json").unlink(),
        lambda folder: (folder / "rng_1.pt").write_bytes(b""),
        lambda folder: (folder / "manifest.json").write_text("[1, 2"),
    ]
    said = []
    for step, harm in zip((5, 4, 3, 2), damages, strict=True):
        folder = root / f"step_{step:08d}"
        if topology.rank == 0:
            harm(folder)
        dist.barrier()
        for resume, on_damage in (("auto", "stop"), (str(folder), "previous")):
            try:
                checkpoint.find(resume, root, topology, on_damage=on_damage)
            except ConfigError as error:
                said.append(str(error))
        found = checkpoint.find("auto", root, topology)
        assert found == root / f"step_{step - 1:08d}", found
        dist.barrier()
        if topology.rank == 0:  # so that the next is the newest
            shutil.move(folder, f"{root}-{step}")
        dist.barrier()
    return said


def test_copies_on_the_host_lie_in_blocks_and_are_kept(monkeypatch):
    """torch rounds each block of pinned memory up to a power of two, so there are to be few."""
    monkeypatch.setattr(host_copies, "BLOCK_BYTES", 1024)
    copies = host_copies.HostCopies(pinned=False)
    sources = [
        torch.randn(5, 7).bfloat16(), torch.randn(300), torch.tensor(3.0), torch.zeros(0, 4),
        torch.arange(90), torch.randn(2, 2, 1),
    ]  # fmt: skip
    taken = [copies.take(i, source) for i, source in enumerate(sources)]
    assert [len(block) for block in copies.blocks] == [1024, 1200]
    for copy, source in zip(taken, sources, strict=True):
        assert copy.dtype == source.dtype and torch.equal(copy, source)
        assert copy.untyped_storage().nbytes() == source.nbytes and copy.data_ptr() % 64 == 0
    again = [copies.take(i, source + 1) for i, source in enumerate(sources)]
    assert all(a is b for a, b in zip(taken, again, strict=True)) and len(copies.blocks) == 2
    assert torch.equal(again[0], sources[0] + 1) and torch.equal(again[4], sources[4] + 1)


def test_ranks_share_the_bytes_that_are_checked():
    chance = random.Random(time.time_ns())
    sizes = {f"file {i}": chance.choice([0, 1, 10**6, chance.randrange(10**9)]) for i in range(41)}
    for world in (1, 2, 7, 64):
        shares = [checkpoint.share_of(sizes, rank, world) for rank in range(world)]
        assert sorted(name for share in shares for name in share) == sorted(sizes)
        loads = [sum(sizes[name] for name in share) for share in shares]
        assert max(loads) <= sum(sizes.values()) / world + max(sizes.values())


# ---- forged


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def change_table(folder, change):
    """Replaces rank 0's part of an index by what `change` makes of it."""
    with zipfile.ZipFile(folder / "index.zip") as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(folder / "index.zip", "w") as file:
        for name, part in (parts | {"0": change(parts["0"])}).items():
            file.writestr(name, part)


def forge(folder, what, marker):
    """Puts code into a file, and makes its checksum right."""
    if what == "rng":
        torch.save({"torch": Evil(marker)}, folder / "rng_0.pt")
    elif what == "metadata":  # torch's index, which earlier versions wrote
        (folder / "actor/index.zip").rename(folder / "actor/aside.zip")
        (folder / "actor/.metadata").write_bytes(pickle.dumps(Evil(marker)))
    elif what == "index":
        change_table(folder / "actor", lambda table: pickle.dumps(Evil(marker)))
    else:  # in place of the number of updates
        evil, path = io.BytesIO(), folder / "actor" / chunk_index.file_of(0)
        torch.save(Evil(marker), evil)
        place, length = path.stat().st_size, len(evil.getvalue())
        path.write_bytes(path.read_bytes() + evil.getvalue())
        with zipfile.ZipFile(folder / "actor/index.zip") as file:
            names = [tuple(row) for row in json.loads(file.read("names.json"))]
        number = [name for name, _, _ in names].index("num_updates")

        def elsewhere(table):
            rows = chunk_index.decode(table, chunk_index.wanted_boxes(names, None)).copy()
            rows[rows[:, 0] == number, 1:3] = place, length
            return zlib.compress(rows.T.tobytes())

        change_table(folder / "actor", elsewhere)
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != "manifest.json"]
    digests = {str(f.relative_to(folder)): checkpoint.digest(f) for f in files}
    (folder / "manifest.json").write_text(json.dumps(digests))


def forged_on(topology, model, root):
    engine, said = built(topology, model), []
    saver = saver_of(topology, root, engine)
    saver.save(1, {"actor": engine}, {"engines": ["actor"]}, [engine.pretrained[0]])
    saver.wait()
    for what in ("rng", "metadata", "index", "number"):
        folder, marker = Path(root, what), Path(root, f"ran_{what}")
        shutil.copytree(Path(root, "step_00000001"), folder)
        forge(folder, what, marker)
        assert checkpoint.damage(folder) is None
        attempts = [lambda folder=folder: checkpoint.load(folder, {"actor": engine}, topology)]
        if what in ("metadata", "index"):
            attempts.append(lambda folder=folder: load_full(folder, "actor"))
        for attempt in attempts:
            try:
                attempt()
            except ConfigError as error:
                said.append((what, str(error), marker.exists()))
    return said


def test_no_code_runs_that_stands_in_a_models_folder(tmp_path):
    folder = save_qwen3(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    marker = tmp_path / "ran"
    torch.save({"model.embed_tokens.weight": Evil(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be loaded: "):
        build_model(str(folder), full=True)
    assert not marker.exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, qwen3):
    """{(world, case): what each rank got}"""
    folder = tmp_path_factory.mktemp("checkpoints")
    cases = [(2, meanwhile_on), (2, replicas_on), (2, too_large_on), (2, kept_on), (2, found_on),
             (1, forged_on)]  # fmt: skip
    found = {}
    for world in (2, 1):
        here = [case for case in cases if case[0] == world]
        calls = [(work, (qwen3, folder / work.__name__)) for _, work in here]
        names = [work.__name__.removesuffix("_on") for _, work in here]
        found |= zip(names, run_calls(world, calls), strict=True)
    return found


@pytest.mark.ranks
def test_what_is_written_is_the_copy(runs):
    for stood, found, written in runs["meanwhile"]:
        assert stood == [1, 2]
        assert found == [{1.0}, {2.0}]
        assert written["checkpoint/write_s"] > 0


@pytest.mark.ranks
def test_replicas_and_shards_load_each_others_checkpoints(runs):
    assert runs["replicas"] == [[True] * 12] * 2


@pytest.mark.ranks
def test_a_failure_while_training_goes_on_is_everyones_and_says_why(runs):
    for rank, phase, cause, said, names in runs["too_large"]:
        assert (rank, phase, said) == (1, "checkpoint", [1, 3])
        assert "MiB are free: File too large" in cause
        assert names == ["step_00000001", "step_00000003"]


@pytest.mark.ranks
def test_the_newest_and_the_best_are_kept(runs):
    # by number the seventh; of the others 0.9 twice, or 0.1 and 0.5: no value and nan are unranked
    assert runs["kept"] == [[[2, 6, 7], [1, 4, 7]]] * 2


@pytest.mark.ranks
def test_what_is_damaged_is_named_and_the_one_before_is_used(runs):
    words = ["actor/__1_0.distcp does not have the checksum", "run.json is missing",
             "rng_1.pt has 0 bytes", "manifest.json: "]  # fmt: skip
    for said in runs["found"]:
        assert len(said) == 8
        for i, word in enumerate(words):
            stop, named = said[2 * i : 2 * i + 2]
            assert f"step_{5 - i:08d} is damaged: {word}" in stop
            assert "--checkpoint.on_damage previous" in stop
            assert f"step_{5 - i:08d}: {word}" in named


@pytest.mark.ranks
def test_no_code_runs_that_stands_in_a_checkpoint(runs):
    files = {"rng": "rng_0.pt", "metadata": ".metadata", "index": "index.zip",
             "number": "__0_0.distcp"}  # fmt: skip
    said = runs["forged"][0]
    forged = [what for what, _, _ in said]
    assert forged == ["rng", "metadata", "metadata", "index", "index", "number"]
    for what, words, ran in said:
        assert not ran
        assert f"{files[what]} is not read" in words
        assert ("system" in words) == (what != "index"), words
