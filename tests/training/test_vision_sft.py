"""Fine-tuning on rows with images: what is learnt, on any ranks, and the model that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from programs import metrics_of, train
from tiny_models import SHOWING_TEMPLATE, png, save_qwen_vl
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from spmdrl.config import ConfigError, SftDataConfig
from spmdrl.data.images import ImageProcessor
from spmdrl.data.sft import SftDataset
from spmdrl.hub.hf_folder import load_hf_config

CONFIG = """
from spmdrl.config import *

config = SftConfig(
    model="model",
    data=SftDataConfig(train="rows.jsonl", eval="eval.jsonl", batch_size=6, max_tokens=48,
                       turns="all"),
    out="out", run_dir="run", steps=3, eval_every=0,
    actor=TrainConfig(dtype="float32", micro_batch_tokens=64, optim=OptimConfig(lr=1e-3)),
    checkpoint=CheckpointConfig(every_steps=2),
    trackers=(),
)
"""
SIZES = {0: (), 1: ((8, 16),), 2: ((16, 24), (8, 8))}  # by the images of a row
CLOSE = {"rel": 1e-4, "abs": 1e-5}


def chat(seed: int) -> dict:
    """A row with none, one or two images, the second in the second question."""
    shown = [f"see/{seed}_{i}.png" for i in range(seed % 3)]
    return {
        "messages": [
            {"role": "user", "content": "<image>" * bool(shown) + f"{seed}?"},
            {"role": "assistant", "content": f"{seed % 7}"},
            {"role": "user", "content": "more" + "<image>" * (len(shown) > 1)},
            {"role": "assistant", "content": f"{seed % 5}!"},
        ],
        "images": shown,
    }  # fmt: skip


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft")
    save_qwen_vl(path / "model")
    Path(path, "see").mkdir()
    for seed in range(30):
        for i, size in enumerate(SIZES[seed % 3]):
            Path(path, f"see/{seed}_{i}.png").write_bytes(png(10 * seed + i, *size))
    write(path / "rows.jsonl", [chat(seed) for seed in range(24)])
    write(path / "eval.jsonl", [chat(seed) for seed in range(24, 30)])
    Path(path, "cfg.py").write_text(CONFIG)
    return path


def run(folder, name, ranks, *args):
    done = train(folder, ranks, "--config", "cfg.py", "--run_dir", name, "--out", f"{name}/out",
                 *args, program="spmdrl.sft")  # fmt: skip
    assert done.code == 0, done.output[-6000:]
    return metrics_of(folder / name)


@pytest.fixture(scope="module")
def alone(folder):
    return run(folder, "alone", 1)


def load(folder, topology, rows, template=None, **settings):
    model = str(folder / "model")
    if template is not None:
        settings["chat_template_kwargs"] = {"chat_template": template}
    config = SftDataConfig(train=write(folder / "few.jsonl", rows), **settings)
    vision = ImageProcessor.load(model, load_hf_config(model), config)
    return SftDataset.load(
        config.train, AutoTokenizer.from_pretrained(model), config, topology, vision=vision
    )


def loss_of(model, folder, row):
    """(-log p of what the assistant says, its tokens), by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    processor = AutoImageProcessor.from_pretrained(folder / "model")
    mark = model.config.image_token_id
    opened = [processor.fetch_images(str(folder / path)) for path in row["images"]]
    seen = dict(processor(images=opened, return_tensors="pt")) if opened else {}
    counts = iter((seen["image_grid_thw"].prod(1) // 4).tolist() if opened else [])
    ids, learnt = [], []
    for turn in row["messages"]:
        parts = [{"type": "image"}] * turn["content"].count("<image>")
        parts += [{"type": "text", "text": turn["content"].replace("<image>", "")}]
        if turn["content"].startswith("more"):
            parts.reverse()
        text = tokenizer.apply_chat_template(
            [turn | {"content": parts}], tokenize=False,
            add_generation_prompt=turn["role"] == "user",
        )  # fmt: skip
        if turn["role"] == "assistant":  # the template's opening stands behind the question
            text = text[text.index(turn["content"]) :]
        for id in tokenizer(text, add_special_tokens=False)["input_ids"]:
            n = next(counts) if id == mark else 1
            ids += [id] * n
            learnt += [turn["role"] == "assistant"] * n
    ids, learnt = torch.tensor([[*ids, tokenizer.eos_token_id]]), [*learnt, True]
    if opened:
        seen["mm_token_type_ids"] = (ids == mark).int()
    with torch.no_grad():
        logits = model(input_ids=ids, **seen).logits[0].float()
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    chosen = torch.tensor(learnt[1:])
    return -logprobs[chosen].sum().item(), int(chosen.sum())


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["model", "alone/out"])
def test_the_loss_is_that_of_transformers(folder, alone, name):
    model = AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float32)
    sums = [loss_of(model, folder, chat(seed)) for seed in range(24, 30)]
    found = alone[0 if name == "model" else -1]["eval/loss"]
    assert found == pytest.approx(sum(s for s, _ in sums) / sum(n for _, n in sums), **CLOSE)
    assert AutoImageProcessor.from_pretrained(folder / name).patch_size == 4


@pytest.mark.ranks
def test_all_of_it_learns(alone, folder):
    assert alone[-1]["eval/loss"] < alone[0]["eval/loss"] - 0.5
    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder / name).state_dict()
        for name in ("model", "alone/out")
    )
    tower = [name for name in before if "visual" in name]
    assert sum(not torch.equal(before[name], after[name]) for name in tower) > 0.9 * len(tower) > 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "args"),
    [(2, ("--actor.micro_batch_tokens", "48")), (3, ("--actor.activation_checkpointing", "True"))],
)
def test_losses_do_not_depend_on_who_sees_what(folder, alone, ranks, args):
    rows = run(folder, f"r{ranks}", ranks, *args)
    for one, other in zip(rows, alone, strict=True):
        for key in ("sft/loss", "sft/grad_norm", "eval/loss"):
            assert (key in one) == (key in other)
            assert one.get(key, 0) == pytest.approx(other.get(key, 0), **CLOSE)


@pytest.mark.ranks
def test_a_stopped_run_goes_on_seeing(folder, alone):
    run(folder, "half", 2, "--steps", "2")
    rows = run(folder, "half", 1, "--resume", "auto")
    assert rows[-1]["sft/loss"] == pytest.approx(alone[-1]["sft/loss"], **CLOSE)


@pytest.mark.ranks
def test_adapters_learn_from_images(folder):
    run(folder, "lora", 2, "--actor.lora.rank", "4", "--actor.freeze_vision", "True")
    base = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, str(folder / "lora/out/adapter")).merge_and_unload()
    whole = AutoModelForImageTextToText.from_pretrained(folder / "lora/out", dtype=torch.float32)
    for one, other in zip(tuned.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    sums = [loss_of(whole, folder, chat(seed)) for seed in range(24, 30)]
    found = metrics_of(folder / "lora")[-1]["eval/loss"]
    assert found == pytest.approx(sum(s for s, _ in sums) / sum(n for _, n in sums), **CLOSE)


@pytest.mark.ranks
def test_the_plan_shows_what_is_seen_and_learnt(folder):
    done = train(folder, 1, "--config", "cfg.py", "--dry-run", program="spmdrl.sft")
    assert done.code == 0, done.output
    assert "train data: 24 rows" in done.output
    done = train(folder, 1, "--config", "cfg.py", "--dry-run", "--data.shuffle", "False",
                 "--data.train", write(folder / "one.jsonl", [chat(1)]), "--data.batch_size", "1",
                 program="spmdrl.sft")  # fmt: skip
    assert f"'{folder}/see/1_0.png'" in done.output
    assert "learnt '1" in done.output


# ---- rows


def test_two_columns_and_parts_are_the_same_row(folder, topology):
    row = chat(1)
    asked, said = row["messages"][0]["content"], row["messages"][1]["content"]
    parts = [{"type": "image"}, {"type": "text", "text": asked.removeprefix("<image>")}]
    answer = [{"type": "text", "text": said}]
    forms = [
        {"prompt": asked, "response": said},
        {"prompt": [{"role": "user", "content": asked}], "response": said},
        {
            "messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": answer},
            ]
        },
    ]
    found = [
        load(folder, topology, [form | {"images": row["images"]}]).example(0) for form in forms
    ]
    assert all(example.token_ids == found[0].token_ids for example in found)
    assert all(example.loss_mask == found[0].loss_mask for example in found)
    mark = load_hf_config(str(folder / "model")).image_token_id
    assert [found[0].token_ids.count(mark), sum(found[0].loss_mask)] == [2, 2]  # "1", and the end


def test_a_row_is_cut_behind_its_images_and_never_through_them(folder, topology):
    rows = [chat(2), chat(2)]
    rows[1]["messages"][2]["content"] = "<image> more"
    whole = load(folder, topology, rows).example(0)
    mark = load_hf_config(str(folder / "model")).image_token_id
    end = len(whole.token_ids) - whole.token_ids[::-1].index(mark)
    cut = load(folder, topology, rows, max_tokens=end, turns="all")
    assert [len(cut.example(i).token_ids) for i in range(len(cut))] == [end, end]
    assert cut.measured.num_overlong == 2
    shorter = load(folder, topology, rows, max_tokens=end - 1, turns="all")
    assert [shorter.example(i).id for i in range(len(shorter))] == [1]
    with pytest.raises(ConfigError, match="in all 1 row the prompt alone"):
        load(folder, topology, rows[:1], max_tokens=end - 1, turns="all")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"images": ["see/0.png"]}, "see/0.png"),
        ({"images": []}, "0 of them, but the prompt has 1 places"),
        ({"images": ["see/1_0.png"] * 2}, "2 of them, but the prompt has 1 places"),
        ({"image": "see/1_0.png", "images": []}, "a column 'images', a list for each row"),
    ],
)
def test_what_is_wrong_is_said_with_its_row(folder, topology, change, error):
    row = chat(1) | change
    row["messages"][0] = {"role": "user", "content": [{"type": "image"}]}
    with pytest.raises(ConfigError, match=error):
        load(folder, topology, [chat(0), row], turns="all")


def test_strings_with_images_are_told_what_to_write(folder, topology):
    row = {"prompt": "<image>?", "completion": "y", "images": ["see/1_0.png"]}
    with pytest.raises(ConfigError, match="that are strings have no chat template around them"):
        load(folder, topology, [row])


def test_the_assistant_shows_nothing(folder, topology):
    row = chat(1)
    row["messages"][1]["content"] = [{"type": "image"}, {"type": "text", "text": "so"}]
    with pytest.raises(ConfigError, match="an image in what the assistant says"):
        load(folder, topology, [row])


def test_what_the_assistant_said_before_is_text_in_any_column(folder, topology):
    """Arrow gives every part the keys of all others, and some templates ask for a key alone."""
    template = SHOWING_TEMPLATE.replace("p['type'] == 'image'", "'image' in p")
    assert template != SHOWING_TEMPLATE
    said = ("user", "hi"), ("assistant", "ok"), ("user", "more")
    parts = [
        {"role": role, "content": [{"type": "text", "text": text, "image": None}]}
        for role, text in said
    ]
    plain = [{"role": role, "content": text} for role, text in said]
    one, other = (
        load(folder, topology, [{"prompt": chat, "response": "y"}], template).example(0)
        for chat in (parts, plain)
    )
    assert one.token_ids == other.token_ids
    for part, error in (({"type": "image"}, "in what the assistant says"), ({"type": "video"}, "")):
        parts[1]["content"] = [part, {"type": "text", "text": "x"}]
        with pytest.raises(ConfigError, match=f"line 1: .*{error}"):
            load(folder, topology, [{"prompt": parts, "response": "y"}])


def test_marks_without_images_are_counted_in_parts_too(folder, topology):
    parts = [{"type": "text", "text": "<image>hi"}]
    rows = [{"prompt": [{"role": "user", "content": c}], "response": "y"} for c in (parts, "hi")]
    reader = load(folder, topology, rows).reader
    assert [reader.read(row, folder).blind for row in rows] == [True, False]


@pytest.mark.ranks
def test_a_model_that_sees_nothing_is_told(folder, qwen3):
    Path(folder, "blind").symlink_to(qwen3)
    for more, error in (
        ((), "the data has images, which the model does not see"),
        (("--data.image_max_pixels", "99"), "data.image_max_pixels: the model sees no images"),
    ):
        done = train(folder, 1, "--config", "cfg.py", "--model", "blind", *more,
                     program="spmdrl.sft")  # fmt: skip
        assert done.code == 2 and error in done.output, done.output[-3000:]
