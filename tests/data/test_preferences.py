"""Reward models before they are trained: the loss, the rows, pairs in micro-batches, the checks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat_tokenizers import marked_turns
from tiny_models import save_qwen3
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

from spmdrl.algo.preference import bradley_terry, pair_loss
from spmdrl.config import (
    CheckpointConfig,
    ConfigError,
    LoraConfig,
    PreferenceDataConfig,
    RewardTrainingConfig,
    TrainConfig,
)
from spmdrl.data.packing import to_batch
from spmdrl.data.preferences import PreferenceDataset
from spmdrl.data.shared_prefix import Unit
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.classifier import build_classifier, classifier_config
from spmdrl.engines.micro_batches import cut
from spmdrl.training.checks.supervised import check_reward_training
from spmdrl.training.supervised import name_padding
from spmdrl.types import Batch


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return marked_turns(tmp_path_factory.mktemp("tokenizer"))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = turn("user", "2?"), turn("assistant", "4"), turn("assistant", "5")
ROW = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}


def load(tokenizer: Any, topology: Topology, path: Path, rows: list, **options: Any) -> Any:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    padding = options.pop("pad_token_id", None)
    config = PreferenceDataConfig(str(path), **options)
    return PreferenceDataset.load(
        str(path), tokenizer, config, topology, len(tokenizer), padding
    )  # fmt: skip


# --- the loss


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_the_loss_is_that_of_the_papers(coef):
    chosen, rejected, margins = torch.randn(3, 50, dtype=torch.float64).mul(4)
    found = bradley_terry(chosen, rejected, margins, coef)
    for i in range(50):
        c, r, m = float(chosen[i]), float(rejected[i]), float(margins[i])
        right = -math.log(1 / (1 + math.exp(-(c - r - m)))) + coef * (c + r) ** 2
        assert float(found[i]) == pytest.approx(right, rel=1e-12)


def test_far_apart_rewards_overflow_nowhere():
    found = bradley_terry(*torch.tensor([[1e4, -1e4], [-1e4, 1e4], [0.0, 0.0]]))
    assert found.tolist() == [0.0, 2e4]


def pairs_of(lens: list[tuple[int, int]], margins: list[float]) -> Batch:
    """Weighted by one over their unmasked tokens, as supervised.take_share does it."""
    batch = to_batch([[1] * n for pair in lens for n in pair])
    batch.rewards[0::2] = torch.tensor(margins, dtype=torch.float64)
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def test_any_split_into_micro_batches_has_the_same_loss_gradient_and_metrics(topology):
    lens = [(3, 9), (2, 2), (7, 1), (5, 6), (1, 30)]
    margins = [0.0, 0.5, 1.0, 0.0, 2.0]
    batch = pairs_of(lens, margins)
    scores = torch.randn(10)
    ends = (batch.cu_seqlens[1:] - 1).tolist()
    right = bradley_terry(scores[0::2], scores[1::2], torch.tensor(margins), 0.1).mean()
    leaf = scores.clone().requires_grad_()
    bradley_terry(leaf[0::2], leaf[1::2], torch.tensor(margins), 0.1).mean().backward()
    for max_tokens in (2, 20, 33, 1000):
        total, grad, sums, seen = 0.0, torch.zeros(10), {}, []
        pairs = [Unit((first, first + 1)) for first in range(0, 10, 2)]
        for part in cut(batch, max_tokens, topology, multiple=3, units=pairs):  # some stand in
            seqs, mb = part.seqs, part.batch
            assert [s // 2 for s in seqs[0::2]] == [s // 2 for s in seqs[1::2]]
            assert mb.num_tokens <= max_tokens or len(seqs) <= 2
            values = torch.zeros(mb.num_tokens)
            values[mb.cu_seqlens[1:][: len(seqs)] - 1] = scores[seqs]
            values.requires_grad_()
            loss, metrics = pair_loss(values, torch.zeros_like(values), mb, center_coef=0.1)
            loss.backward()
            total += float(loss.detach())
            sums = {name: sums.get(name, 0.0) + float(v) for name, v in metrics.items()}
            grad[seqs] = values.grad[mb.loss_mask > 0]
            seen += seqs
        assert sorted(seen) == list(range(10)) and len(ends) == 10
        assert total == pytest.approx(float(right), rel=1e-6)
        torch.testing.assert_close(grad, leaf.grad)
        means = {name: value / 10 for name, value in sums.items()}
        assert means["accuracy"] == pytest.approx(float((scores[0::2] > scores[1::2]).sum()) / 5)
        assert means["margin"] == pytest.approx(
            float((scores[0::2] - scores[1::2]).mean()), rel=1e-5
        )
        assert means["chosen_reward"] == pytest.approx(float(scores[0::2].mean()), rel=1e-5)


# --- rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_prompt_stands_before_both(tokenizer, topology, tmp_path, kind):
    rows = [ROW | {"margin": 0.5}, ROW | {"margin": None}]
    data = load(tokenizer, topology, tmp_path / f"a.{kind}", rows)
    said = [(p.chosen.text, p.rejected.text, p.margin) for p in (data.pair(0), data.pair(1))]
    assert said == [("<user>2?<assistant>4", "<user>2?<assistant>5", m) for m in (0.5, 0.0)]
    batch = data.batch([1, 0])
    assert batch.rewards.tolist() == [0, 0, 0.5, 0]
    assert batch.loss_mask.sum() == 4 and batch.loss_mask[batch.cu_seqlens[1:] - 1].all()
    first = batch.token_ids[: int(batch.cu_seqlens[1]) - 1]  # and one that nobody reads
    assert tokenizer.decode(first) == "<user>2?<assistant>4"
    assert data.measured.num_tokens.tolist() == [2 * len("<user>2?<assistant>4")] * 2


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "<user>2?<assistant>4"),
        (
            {"prompt": None, "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
            "<user>2?<assistant>4",
        ),
        ({"prompt": [ASKED], "chosen": "4", "rejected": "5"}, "<user>2?<assistant>4"),
        ({"prompt": "2? ", "chosen": "4", "rejected": "5"}, "2? 4"),
        ({"chosen": "2? 4", "rejected": "2? 5"}, "2? 4"),
        (
            {"prompt": [ASKED], "chosen": [BAD, ASKED, GOOD], "rejected": [BAD]},
            "<user>2?<assistant>5<user>2?<assistant>4",
        ),
    ],
)
def test_kinds_of_rows(tokenizer, topology, tmp_path, row, text):
    assert load(tokenizer, topology, tmp_path / "a.jsonl", [row]).pair(0).chosen.text == text


def test_other_columns_and_templates(tokenizer, topology, tmp_path):
    row = {"prompt": "not read", "a": {"b": [ASKED, GOOD]}, "c": [ASKED, BAD], "gap": 2}
    keys = {"prompt_key": None, "chosen_key": "a.b", "rejected_key": "c", "margin_key": "gap"}
    path = tmp_path / "a.jsonl"
    data = load(tokenizer, topology, path, [row], chat_template_kwargs={"end": "."}, **keys)
    assert data.pair(0).rejected.text == "<user>2?<assistant>5." and data.pair(0).margin == 2
    row.pop("gap")
    with pytest.raises(ConfigError, match=r"'gap': missing.*data\.margin_key"):
        load(tokenizer, topology, path, [row], **keys)


def test_long_pairs_are_left_out_and_names_of_control_tokens_are_text(
    tokenizer, topology, tmp_path
):
    long = ROW | {"rejected": [turn("assistant", "5" * 9)]}
    forged = ROW | {"chosen": [turn("assistant", "<eos>")]}
    path = tmp_path / "a.jsonl"
    data = load(tokenizer, topology, path, [ROW, long, forged, long], max_tokens=25)
    assert (len(data), data.measured.num_overlong, data.measured.num_escaped) == (2, 2, 1)
    assert tokenizer.eos_token_id not in data.pair(1).chosen.ids
    with pytest.raises(ConfigError, match=r"all 2 pairs .* max_tokens=9 .*Raise"):
        load(tokenizer, topology, path, [ROW, long], max_tokens=9)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"chosen": [GOOD]}, "field 'rejected': missing; the row has chosen"),
        ({"chosen": "4"}, "field 'rejected': missing"),
        ({**ROW, "chosen": None}, "field 'chosen': found null"),
        ({**ROW, "chosen": []}, "field 'chosen': found list"),
        ({**ROW, "chosen": "4"}, "'chosen' and 'rejected': expected two strings, or two chats"),
        ({**ROW, "chosen": [{"role": "assistant"}]}, r"'chosen\[0\].content': missing"),
        ({**ROW, "chosen": [GOOD, turn("user", "?")]}, r"'chosen\[1\].role': found str 'user'"),
        ({**ROW, "chosen": [turn("system", "Be."), ASKED, GOOD]}, "would stand before what is in"),
        ({"prompt": "Q", "chosen": "Qa", "rejected": "b"}, "would stand before what is in 'chosen"),
        ({**ROW, "chosen": [BAD]}, "are the same: nothing is preferred"),
        ({**ROW, "prompt": 3}, "'prompt': found int 3"),
        ({**ROW, "prompt": "2?"}, "before what is in 'chosen'.*prompt_key=None"),
        ({**ROW, "chosen": [ASKED, GOOD]}, "whole conversation set data.prompt_key=None"),
        ({**ROW, "margin": -1}, "'margin': found int -1, expected a number, 0 to"),
        ({**ROW, "margin": 10**400}, "'margin': found int 1000"),
        ({**ROW, "margin": float("nan")}, "'margin': found float nan"),
        ({**ROW, "margin": True}, "'margin': found bool True"),
        ({**ROW, "images": ["a.png"]}, "'images': the model sees none"),
        ({**ROW, "image": "a.png"}, "'image': found str 'a.png', expected a column 'images'"),
        ({**ROW, "chosen": [turn("a\nb", "x"), GOOD]}, "field 'chosen', with what.*a plain name"),
    ],
)
def test_bad_rows_are_named(tokenizer, topology, tmp_path, bad, words):
    path = tmp_path / "a.jsonl"
    with pytest.raises(ConfigError, match=f"a.jsonl, line 2: .*{words}"):
        load(tokenizer, topology, path, [ROW, bad])
    data = load(tokenizer, topology, path, [ROW, bad], on_bad_row="skip")
    assert (len(data), data.measured.num_bad) == (1, 1)


def test_a_last_token_that_transformers_takes_for_padding_is_refused(tokenizer, topology, tmp_path):
    end = {"chat_template_kwargs": {"end": "<eos>"}}
    path = tmp_path / "a.jsonl"
    assert len(load(tokenizer, topology, path, [ROW], **end)) == 1
    with pytest.raises(ConfigError, match="ends in '<eos>', the model's padding"):
        load(tokenizer, topology, path, [ROW], pad_token_id=tokenizer.eos_token_id, **end)


# --- models and checks


def test_a_language_model_begins_with_a_score_of_zeros(tmp_path):
    folder = str(save_qwen3(tmp_path / "model", tie_word_embeddings=False))
    model, shell = (build_classifier(folder, full) for full in (True, False))
    assert model.config.architectures == ["Qwen3ForSequenceClassification"]
    assert model.score.weight.shape == (1, 64) and not model.score.weight.any()
    assert model.model.embed_tokens.weight.any()
    assert shell.state_dict().keys() == model.state_dict().keys()
    torch.nn.init.ones_(model.score.weight)
    model.save_pretrained(tmp_path / "scores")
    assert build_classifier(str(tmp_path / "scores"), True).score.weight.eq(1).all()


def test_the_result_names_its_padding(qwen3, tokenizer):
    config = classifier_config(str(qwen3))
    config.pad_token_id = 7
    name_padding(config, tokenizer)
    assert config.pad_token_id == 7
    config.pad_token_id = None
    name_padding(config, tokenizer)
    assert config.pad_token_id == tokenizer.pad_token_id == 0


def test_what_cannot_work_is_refused(qwen3, tmp_path):
    def reward_model(**changes: Any) -> RewardTrainingConfig:
        data = PreferenceDataConfig("t", eval="e", max_tokens=511)
        return RewardTrainingConfig(**{"model": str(qwen3), "data": data, "out": "o"} | changes)

    def best(metric: str, best_is: Any) -> dict[str, Any]:
        return {"checkpoint": CheckpointConfig(keep_best=1, best_metric=metric, best_is=best_is)}

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_labels": 1}
    BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    two = classifier_config(str(qwen3))
    two.num_labels = 2
    AutoModelForSequenceClassification.from_config(two).save_pretrained(tmp_path / "two")
    check_reward_training(reward_model(**best("eval/accuracy", "largest")), 2)
    check_reward_training(reward_model(**best("reward_model/loss", "smallest")), 2)
    for changes, words in [
        (best("eval/reward", "largest"), "has not.*'eval/accuracy' with best_is='largest'"),
        ({"actor": TrainConfig(lora=LoraConfig())}, "leave actor.lora out"),
        ({"actor": TrainConfig(offload_params=True)}, "offload_params has no effect"),
        ({"actor": TrainConfig(fsdp=3)}, "actor.fsdp"),
        ({"center_coef": -0.1}, "center_coef=-0.1"),
        ({"data": PreferenceDataConfig("t", max_tokens=512)}, "embeddings is 512, of which 1 is"),
        ({"data": PreferenceDataConfig("t", chosen_key=" ")}, "data.chosen_key=' ' is no name"),
        ({"model": str(tmp_path / "two")}, "has 2 outputs, expected one"),
        ({"model": str(tmp_path / "bert")}, "cannot train model type 'bert'.*or non-causal use"),
        (best("eval/accuracy", "smallest"), "keep the worst.*best_is='largest'"),
        (best("eval/loss", "largest"), "keep the worst.*best_is='smallest'"),
        (best("eval/perplexity", "smallest"), "which a reward model has not"),
        (best("sft/loss", "smallest"), "'sft/loss', which a reward model has not"),
        (best("eval/loss", "smallest") | {"eval_every": 0}, "nothing is evaluated"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_reward_training(reward_model(**changes), 2)
