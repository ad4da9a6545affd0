"""Whole runs on prompts with images: the same on any ranks, resumed, exported, evaluated."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from programs import ROOT, metrics_of, train
from safetensors.torch import load_file
from tiny_models import save_tokenizer
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)
from vision_task import (
    CLOSE,
    IMAGE_CONFIG,
    SAVE_EACH_STEP,
    image_question,
    run_task,
    save_task,
)

from spmdrl.engines.hf_export import export
from spmdrl.types import Picture

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_task(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def alone(folder):
    return run_task(folder, "alone", 1, *SAVE_EACH_STEP)


def same(rows, others):
    assert len(rows) == len(others)
    for one, other in zip(rows, others, strict=True):
        one["balance/imbalance"] = other["balance/imbalance"]  # of as many ranks
        assert one == pytest.approx(other, **CLOSE)
        assert one["actor/logprob_diff_max"] < 1e-5
        assert one["actor/grad_norm"] > 0


def test_images_of_samples_are_kept_once(folder, alone):
    """Under the digest of each, as the data has them, for every place that the prompt names."""
    run = folder / "alone"
    rows = [json.loads(line) for line in (run / "samples" / "step_1.jsonl").open()]
    names = [name for row in rows for name in row.get("images", ())]
    assert names and len(set(names)) < len(names)
    for row in rows:
        assert row["prompt"].count("<image>") in (0, len(row.get("images", ())))
        for name in row.get("images", ()):
            content = Path(run, "samples", "images", name).read_bytes()
            assert Picture(content).digest == name and content.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        (2, ("--actor.micro_batch_tokens", "40", "--actor.activation_checkpointing", "True")),
        (3, ("--placement", '{"actor":"0-1","rollout":"2","reward":"2"}', "--actor.fsdp", "1")),
        (2, ("--actor.ulysses", "2")),
    ],
)
def test_numbers_do_not_depend_on_who_sees_what(folder, alone, ranks, args):
    """A rank with a micro-batch of text alone passes the tower as the others do."""
    same(run_task(folder, f"r{ranks}{len(args[0])}", ranks, *SAVE_EACH_STEP, *args), alone)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("model", "ranks", "args"),
    [
        ("model", 2, ("--rollout.tensor_parallel", "2")),
        ("qwen3", 2, ("--algo.advantage", "gae", "--algo.kl_coef", "0.1",
                      "--critic.dtype", "float32", "--ref.dtype", "float32")),
    ],
)  # fmt: skip
def test_engine_and_trainer_see_the_same(folder, model, ranks, args):
    """vLLM, its weights proven bit by bit after each sync, with a critic and a reference."""
    rows = run_task(folder, f"vllm_{model}", ranks, "--rollout.engine", "vllm", "--model", model,
                    "--weights.check", "True", *args)  # fmt: skip
    assert len(rows) == 3
    assert all(row["actor/logprob_diff_max"] < 1e-5 for row in rows[1:])


@pytest.mark.vllm
def test_a_model_that_could_see_trains_on_text(folder):
    text = [image_question(3 * seed) for seed in range(20)]
    pq.write_table(pa.Table.from_pylist(text), folder / "text.parquet")
    rows = run_task(folder, "text", 2, "--rollout.engine", "vllm", "--weights.check", "True",
                    "--data.train", "text.parquet", "--data.eval", "None",
                    "--steps", "1")  # fmt: skip
    assert rows[0]["actor/logprob_diff_max"] < 1e-5


def test_a_tower_may_be_left_as_it_is(folder):
    args = ("--actor.freeze_vision", "True", "--actor.activation_checkpointing", "True")
    rows = run_task(
        folder, "frozen", 2, "--checkpoint.every_steps", "2", "--data.eval", "None", *args
    )
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    export(folder / "frozen/checkpoints/step_00000002", folder / "half")
    start, end = (load_file(folder / name / "model.safetensors") for name in ("model", "half"))
    for name, weight in end.items():
        assert torch.equal(weight, start[name]) == name.startswith("visual."), name


def test_a_resumed_run_sees_what_it_would_have_seen(folder, alone):
    run_task(folder, "stopped", 1, *SAVE_EACH_STEP, "--steps", "1")
    rows = run_task(folder, "stopped", 2, *SAVE_EACH_STEP, "--steps", "2")
    same(rows, alone)


def test_what_was_trained_is_exported_with_its_eyes_and_evaluated(folder, alone):
    checkpoint = str(folder / "alone/checkpoints/step_00000002")
    done = train(folder, 1, "--checkpoint", checkpoint, "--out", "out", program="spmdrl.export")
    assert done.code == 0, done.output
    model = AutoModelForImageTextToText.from_pretrained(folder / "out", dtype=torch.float32)
    start = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters())]  # noqa: B905
    assert sum(moved) > 0.9 * len(moved)
    assert AutoImageProcessor.from_pretrained(folder / "out").patch_size == 4
    rows = []
    for name, ranks, *args in (("a", 1, "--model", "out"), ("b", 2, "--checkpoint", checkpoint)):
        done = train(folder, ranks, "--config", "cfg.py", "--out", name, *args,
                     program="spmdrl.evaluate")  # fmt: skip
        assert done.code == 0, done.output[-6000:]
        rows.append(metrics_of(folder / name)[0])
        del rows[-1]["step"], rows[-1]["model"]
    assert rows[0] == rows[1]


TALK = IMAGE_CONFIG.replace(
    "max_tokens=8", "max_tokens=24, stop_token_ids=tuple(range(4, 44))"
).replace("reward=reward", "reward=judged").replace("config = PpoConfig(", '''
def environment(num_turns):
    return "and?" if num_turns == 1 else None

def judged(model_score, messages):
    assert [m["role"] for m in messages[1:]] in (["assistant"], ["assistant", "user", "assistant"])
    return model_score

config = PpoConfig(
    environment=environment, reward_model=RewardModelConfig(model="judge"),
''')  # fmt: skip


def test_an_environment_and_a_reward_model_have_words_for_images(folder, qwen3):
    """The answer goes on behind images and replies; a model of text scores what was said."""
    hf = Qwen3Config.from_pretrained(qwen3, num_labels=1)
    Qwen3ForSequenceClassification(hf).save_pretrained(folder / "judge")
    save_tokenizer(folder / "judge")
    Path(folder, "talk.py").write_text(TALK)
    rows = run_task(folder, "talk", 2, "--config", "talk.py")
    assert len(rows) == 3
    for row in rows[1:]:
        assert row["actor/logprob_diff_max"] < 1e-5 and row["actor/grad_norm"] > 0
        assert row["turns/mean"] > 1.2 and row["reward/invalid"] == 0


SHOWN = IMAGE_CONFIG.replace(
    "max_tokens=8", "max_tokens=64, stop_token_ids=tuple(range(4, 44))"
).replace("config = PpoConfig(", """
import sys
sys.path.insert(0, {tests!r})
from reply_pictures import show

config = PpoConfig(
    environment=show, multi_turn=MultiTurnConfig(max_images=3, max_image_tokens=16, workers=1),
""")  # fmt: skip


@pytest.mark.vllm
def test_images_of_replies_are_what_the_trainer_sees_on_any_ranks(folder):
    """By vLLM on a rank of its own, trained on two others with Ulysses, a critic on one of them.
    The files in samples/ are the images that were shown."""
    Path(folder, "show.py").write_text(SHOWN.replace("{tests!r}", repr(str(ROOT / "tests"))))
    apart = (
        "--rollout.engine", "vllm", "--weights.check", "True", "--actor.ulysses", "2",
        "--placement", '{"actor":"0-1","critic":"1","rollout":"2","reward":"2"}',
        "--algo.advantage", "gae", "--critic.dtype", "float32",
    )  # fmt: skip
    rows = run_task(
        folder, "shown_apart", 3, "--config", "show.py", "--data.eval", "None", *apart
    )  # fmt: skip
    for row in rows:
        assert row["actor/logprob_diff_max"] < 1e-5 and row["reward/invalid"] == 0
        assert row["turns/mean"] == 3 and row["actor/grad_norm"] > 0
    lines = Path(folder, "shown_apart/samples/step_1.jsonl").read_text().splitlines()
    parts = [
        part for line in lines for message in json.loads(line)["messages"]
        if isinstance(message["content"], list) for part in message["content"]
    ]  # fmt: skip
    named = {part["image"] for part in parts if part["type"] == "image"}
    assert named and all(Path(folder, "shown_apart/samples", name).is_file() for name in named)


@pytest.mark.megatron
def test_megatron_sees_the_images_of_prompts_and_replies_and_its_model_is_exported(folder):
    """In two pipeline stages: the last is given the sequences, the first has the tower."""
    Path(folder, "show.py").write_text(SHOWN.replace("{tests!r}", repr(str(ROOT / "tests"))))
    (row,) = run_task(
        folder, "stages", 2, "--config", "show.py", "--data.eval", "None", "--weights.check",
        "True", "--checkpoint.every_steps", "1", "--steps", "1", "--actor.engine", "megatron",
        "--actor.pipeline_parallel", "2",
    )  # fmt: skip
    assert row["actor/logprob_diff_max"] < 1e-5 and row["reward/invalid"] == 0
    assert row["turns/mean"] == 3 and row["actor/grad_norm"] > 0
    export(folder / "stages/checkpoints/step_00000001", folder / "staged")
    start, end = (load_file(folder / name / "model.safetensors") for name in ("model", "staged"))
    assert start.keys() == end.keys()
    assert sum(not torch.equal(start[name], end[name]) for name in start) > 0.9 * len(start)
    assert AutoImageProcessor.from_pretrained(folder / "staged").patch_size == 4
    hf, found = AutoModelForImageTextToText.from_pretrained(
        folder / "staged", dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values())
    assert torch.equal(hf.model.visual.merger.mlp[0].weight, end["visual.merger.mlp.0.weight"])


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--config", "show.py", "--model", "blind"), "multi_turn.max_images=3: the model sees no"),
        (("--actor.compile", "True"), "actor.compile: not with 'qwen2_5_vl', a model that sees"),
        (("--model", "blind", "--vision_tower", "True"),
         "vision_tower=True: model type 'qwen3' has no tower"),
        (("--strict",), "strict: not with 'qwen2_5_vl'"),
        (("--model", "qwen3", "--critic.model", "blind", "--algo.advantage", "gae"),
         "critic.model and the model mark images by different tokens, or one sees none"),
        (("--critic.model", "other", "--algo.advantage", "gae"),
         "critic.model and the model have image or video processors that differ"),
        (("--model", "blind", "--data.image_max_pixels", "99"), "data.image_max_pixels: the model"),
        (("--model", "blind", "--actor.freeze_vision"), "actor.freeze_vision: the model sees no"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_images_is_refused(folder, qwen3, args, error):
    if not Path(folder, "blind").exists():
        Path(folder, "blind").symlink_to(qwen3)
        shutil.copytree(folder / "model", folder / "other")
        settings = Path(folder, "other/preprocessor_config.json")
        settings.write_text(settings.read_text().replace("0.48145466", "0.5"))
    Path(folder, "show.py").write_text(SHOWN.replace("{tests!r}", repr(str(ROOT / "tests"))))
    config = () if "--config" in args else ("--config", "cfg.py")
    done = train(folder, 2, *config, "--run_dir", "refused", *args)
    assert done.code == 2
    assert f"spmdrl: config error: {error}" in done.output, done.output


def test_a_model_learns_the_names_of_colours(tmp_path):
    """The examples, from random weights: of images in prompts, and of images that the environment
    shows, without which nothing says which colour it is."""
    script = ROOT / "examples/colours/make_assets.py"
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True, timeout=120)
    for name in ("train", "eval"):  # one image and an answer of one letter are learnt soonest
        path = tmp_path / f"runs/colours/{name}.parquet"
        rows = [row for row in pq.read_table(path).to_pylist() if len(row["images"]) == 1]
        pq.write_table(pa.Table.from_pylist(rows), path)
    config = str(ROOT / "configs/qwen2_5_vl_tiny_colours_cpu.py")
    done = train(
        tmp_path, 2, "--config", config, "--steps", "8", "--eval_every", "8", "--run_dir", "run",
        "--rollout.max_tokens", "1",
    )  # fmt: skip
    assert done.code == 0, done.output[-6000:]
    rows = [json.loads(line) for line in Path(tmp_path, "run/metrics.jsonl").open()]
    right = {row["step"]: row["eval/reward"] for row in rows if "eval/reward" in row}
    assert right[0] < 0.25, right
    assert right[8] > 0.6, right

    config = str(ROOT / "configs/qwen2_5_vl_tiny_look_cpu.py")
    done = train(
        tmp_path, 2, "--config", config, "--steps", "8", "--eval_every", "8", "--run_dir", "look"
    )
    assert done.code == 0, done.output[-6000:]
    rows = [json.loads(line) for line in Path(tmp_path, "look/metrics.jsonl").open()]
    assert all(row.get("actor/logprob_diff_max", 0) < 1e-5 for row in rows)
    right = {row["step"]: row["eval/reward"] for row in rows if "eval/reward" in row}
    assert right[0] < 0.4, right
    assert right[8] > 0.6, right
