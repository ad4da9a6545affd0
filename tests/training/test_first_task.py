"""The first task: data, reward, a GGUF file as a folder, a step, and the table of answers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from programs import ROOT, metrics_of, train
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = ROOT / "examples" / "first_task"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports a file of the example, whose name is forgotten at the end: other examples have a
    `config` too.
    """
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, name, raising=False)  # another test's comes back
    module = importlib.import_module(name)
    del sys.modules[name]
    monkeypatch.setitem(sys.modules, name, module)
    return module


def write_gguf(path: Path) -> np.ndarray:
    """A Llama of random weights with SmolLM2's kind of tokenizer; returns the embedding."""
    gguf = pytest.importorskip("gguf")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "Ġc"]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)

    def add(name: str, *shape: int) -> np.ndarray:
        weight = draw.normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(name, weight)
        return weight

    embedding = add("token_embd.weight", len(tokens), HIDDEN)
    width = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (width, HIDDEN), "attn_v": (width, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER), "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
        }  # fmt: skip
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}.weight", *shape)
    add("output_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/first_task in an empty folder, with the model of a small GGUF file."""
    monkeypatch.chdir(tmp_path)
    out = Path("runs/first_task")
    script("make_data", monkeypatch).make_data(out)
    embedding = write_gguf(tmp_path / "tiny.gguf")
    get_model = script("get_model", monkeypatch)
    get_model.convert(tmp_path / "tiny.gguf", out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    want = torch.from_numpy(embedding).bfloat16()
    assert torch.equal(model.get_input_embeddings().weight, want)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "12 cs"}], tokenize=True,
                                        return_dict=False)  # fmt: skip
    assert tokenizer.convert_ids_to_tokens(ids)[-6:] == ["1", "2", "Ġc", "s", "<|im_end|>", "Ċ"]
    with pytest.raises(SystemExit, match="has sha256"):
        get_model.check_sum(tmp_path / "tiny.gguf")
    return tmp_path


@pytest.mark.ranks
def test_a_gguf_file_is_trained_and_its_answers_are_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = train(
        folder, 1, "--config", str(EXAMPLE / "config.py"), "--steps", "1",
        "--rollout.engine", "hf", "--rollout.max_tokens", "4", "--rollout.n", "2",
        "--data.prompts_per_step", "2", "--actor.lora.rank", "2", "--actor.lora.alpha", "4",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    rows = metrics_of(folder / "runs/first_task/grpo")
    assert [row["step"] for row in rows] == [0, 1] and rows[0]["eval/reward"] == 0.0
    run = script("run", monkeypatch)
    before, after = run.first_and_last_answers(Path("runs/first_task/grpo"))
    assert len(before) == len(after) == 24
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(run.answers_table(before, after))
    shown = console.export_text()
    assert before[0]["ground_truth"] in shown and shown.count(" 0 ") == 2 * run.MOST_SHOWN


def test_countries_of_the_held_out_questions_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data = script("make_data", monkeypatch)
    make_data.make_data(tmp_path)
    train_rows, eval_rows = (
        pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "eval")
    )
    asked = [row["prompt"][0]["content"] for row in (*train_rows, *eval_rows)]
    assert len(set(asked)) == len(asked) == len(make_data.CAPITALS) and len(eval_rows) == 24
    assert "What is the capital of Kenya?" in asked


def test_the_reward_wants_the_city_in_a_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = script("config", monkeypatch).short_and_right
    answers = ["paris", "The capital of France is Paris.", "Paris " + "x " * 20, "Lyon."]
    assert [reward(answer, "Paris")["score"] for answer in answers] == [1, 1, 0, 0]
    assert reward("Paris " + "x " * 20, "Paris") == {"score": 0, "right": 1, "short": 0}
