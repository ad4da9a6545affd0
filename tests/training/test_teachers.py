"""Teachers under torchrun: one that sees a hint, several by data source, one behind an endpoint.

The numbers are those of a loop by transformers in float64, and the same on any ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import metrics_of, train
from teacher_server import standing_in
from tiny_models import CHARS, save_qwen3
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.ranks

VOCAB = 40  # at most 64, so that a teacher can name all tokens
SOURCES = ("sums", "more sums", "v1.5/others")
TEMPLATE = "{prompt} (is {hint}) "
CONFIG = f"""
from spmdrl.config import *

def score(response, ground_truth):
    return float(response.startswith(ground_truth))

config = PpoConfig(
    model="student",
    data=DataConfig(train="rows.jsonl", prompts_per_step=6, max_prompt_tokens=12,
                    hint_key="extra_info.solution", hint_template="{TEMPLATE}",
                    max_hint_prompt_tokens=32),
    reward=score, rewards=RewardConfig(workers=1),
    run_dir="run", steps=3, eval_every=0,
    algo=AlgoConfig(
        advantage="reinforce", reward_coef=0.0,
        distillation=DistillationConfig("forward_kl", topk={VOCAB}, teacher="policy"),
    ),
    rollout=RolloutConfig(engine="hf", n=2, max_tokens=6, temperature=0.8, dtype="float32",
                          kv_cache_mib=32),
    ref=TrainConfig(dtype="float32"),
    actor=TrainConfig(dtype="float32", micro_batch_tokens=64, optim=OptimConfig(lr=1e-2)),
    checkpoint=CheckpointConfig(every_steps=2),
    trackers=(), log_sample_tokens=64,
)
"""


SEVERAL = """
from dataclasses import replace
from cfg import config
from spmdrl.config import *

config = replace(
    config,
    algo=replace(config.algo, distillation=replace(config.algo.distillation, teacher="reference")),
    ref=TrainConfig(),
    teachers={
        "sums": TrainConfig(model="first", dtype="float32"), "v1.5/others": "sums",
        "*": TrainConfig(model="second", dtype="float32", micro_batch_tokens=32),
    },
)
"""
SERVED = """
from dataclasses import replace
from several import config
from spmdrl.config import *

config = replace(
    config, rollout=replace(config.rollout, temperature=1.0), steps=2,
    teachers=config.teachers | {"*": TeacherEndpoint(URL, "teach", max_concurrent=3)},
)
"""
TAUGHT_BY = {"sums": "first", "v1.5/others": "first", "more sums": "second"}


def row(n: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"{n}+{n % 7}="}]
    return {
        "data_source": SOURCES[n % 3], "prompt": prompt,
        "reward_model": {"ground_truth": str(n + n % 7)},
        "extra_info": {"solution": "so " * (1 + n % 3) + str(n + n % 7)},
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hinted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny_models.CHARS", CHARS[:VOCAB])
        save_qwen3(path / "student", vocab_size=VOCAB, num_hidden_layers=1, initializer_range=0.15)
        for seed, name in enumerate(("first", "second"), start=1):
            save_qwen3(path / name, seed=seed, vocab_size=VOCAB, initializer_range=0.15)
    Path(path, "several.py").write_text(SEVERAL)
    Path(path, "rows.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(14)))
    Path(path, "cfg.py").write_text(CONFIG)
    return path


def ppo(folder: Path, ranks: int, name: str, *args: str, cfg: str = "cfg") -> list[dict]:
    done = train(folder, ranks, "--config", f"{cfg}.py", "--run_dir", name, *args)
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


@pytest.fixture(scope="module")
def alone(folder):
    """On one rank, the policy its own teacher."""
    return ppo(folder, 1, "alone")


@pytest.fixture(scope="module")
def sharded(folder):
    """The same on two."""
    return ppo(folder, 2, "sharded")


# ---- by transformers, in float64


def prompts_of(n: int) -> tuple[str, str]:
    """Without and with the hint, written down by hand."""
    hint = "so " * (1 + n % 3) + str(n + n % 7)
    return f"{n}+{n % 7}=", f"{n}+{n % 7}= (is {hint}) "


def logprobs(
    model: Any, tokenizer: Any, prompt: str, answer: list[int], temperature: float = 0.8
) -> Tensor:
    """(len(answer), VOCAB). temperature: that at which the policy samples."""
    asked = tokenizer(prompt)["input_ids"]
    logits = model(torch.tensor([[*asked, *answer]])).logits[0, len(asked) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def model_of(folder: Path, name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()


def loss_of(
    folder: Path, run: str, teachers: dict[str, str], temperature: float = 0.8
) -> tuple[float, float]:
    """The mean over the tokens of the first step of KL(teacher || student), and the norm of its
    gradient. teachers: by data source; they see the hints.
    """
    models = {name: model_of(folder, name) for name in {"student", *teachers.values()}}
    student = models.pop("student") if "student" not in teachers.values() else models["student"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    losses = []
    for text in Path(folder, run, "samples/step_1.jsonl").read_text().splitlines():
        sample = json.loads(text)
        answer = tokenizer.convert_tokens_to_ids(sample["tokens"])
        prompts = prompts_of(sample["prompt_id"])
        assert sample["prompt"] == prompts[0]
        q = logprobs(student, tokenizer, prompts[0], answer, temperature)
        with torch.no_grad():
            teacher = models[teachers[sample["data_source"]]]
            p = logprobs(teacher, tokenizer, prompts[1], answer, temperature)
        losses.append((p.exp() * (p - q)).sum(-1))
    assert len(losses) == 12
    loss = torch.cat(losses).mean()
    gradient = torch.autograd.grad(loss, list(student.parameters()))
    return loss.item(), torch.stack([part.norm() for part in gradient]).norm().item()


def test_loss_and_gradient_are_those_of_the_whole_distributions(folder, alone):
    """The teacher of the first step is the student itself, which has seen the hint."""
    loss, norm = loss_of(folder, "alone", dict.fromkeys(SOURCES, "student"))
    assert loss > 0.5
    check_golden(alone[0], loss, norm)


def check_golden(found: dict, loss: float, norm: float) -> None:
    assert found["actor/distillation_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["actor/loss"] == pytest.approx(loss, rel=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert found["actor/teacher_mass"] == pytest.approx(1, abs=1e-5)


# ---- ranks, weights of the teacher, resume


def same(rows: list[dict], want: list[dict]) -> None:
    """But for how evenly the ranks work."""
    assert [found["step"] for found in rows] == [right["step"] for right in want]
    for found, right in zip(rows, want, strict=True):
        left = {n: v for n, v in right.items() if n != "balance/imbalance"}
        assert {n: found[n] for n in left} == pytest.approx(left, rel=2e-4, abs=1e-5)


def test_two_ranks_have_the_numbers_of_one(alone, sharded):
    same(sharded, alone)


REFERENCE = ("--algo.distillation.teacher", "reference")
FOLLOWS = ("--algo.ref_model_sync_steps", "1", "--algo.ref_model_mixup_alpha", "1.0")


def test_a_reference_that_follows_at_once_is_the_policy(folder, alone):
    """A second copy of the weights, which becomes the policy after each step."""
    same(ppo(folder, 2, "follows", *REFERENCE, *FOLLOWS), alone)


@pytest.mark.megatron
def test_the_initial_weights_teach_on_ranks_of_their_own(folder, alone):
    """By Megatron-core, apart from the actor: the first step is the same, the second is not."""
    rows = ppo(
        folder, 2, "apart", *REFERENCE, "--ref.engine", "megatron",
        "--placement", json.dumps({"actor": "0", "rollout": "0", "ref": "1"}), "--steps", "2",
    )  # fmt: skip
    same(rows[:1], alone[:1])
    assert rows[1]["actor/distillation_loss"] != pytest.approx(
        alone[1]["actor/distillation_loss"], rel=1e-2
    )


def test_resumed_is_bit_for_bit_the_run_left_alone(folder, sharded):
    rows = ppo(folder, 2, "parted", "--resume", "sharded/checkpoints/step_00000002")
    assert rows == sharded[2:] and rows[0]["step"] == 3


def test_the_base_of_an_adapter_teaches_it(folder, alone):
    """Without a second copy; a new adapter changes nothing, so the first step is the same."""
    rows = ppo(folder, 2, "adapter", *REFERENCE, "--actor.lora.rank", "4", "--steps", "1")
    for name in ("distillation_loss", "entropy", "student_mass"):
        assert rows[0][f"actor/{name}"] == pytest.approx(alone[0][f"actor/{name}"], rel=2e-4)


def test_a_dry_run_shows_what_the_teacher_is_asked(folder):
    done = train(folder, 1, "--config", "cfg.py", "--dry-run", "--ranks", "2")
    assert done.code == 0, done.output[-4000:]
    for words in (
        "with its hint prompt 0 has 15 tokens: ...'0+0= (is so 0) '",
        "  distillation from the policy itself: 1 x forward_kl over its 40 likeliest tokens, besi",
        "  the policy itself sees 'extra_info.solution' in its prompt, of at most 32 tokens",
        "    teacher_logprobs",
    ):
        assert done.output.count(words) == 1, (words, done.output)


# ---- several teachers


@pytest.fixture(scope="module")
def several(folder):
    """On one rank."""
    return ppo(folder, 1, "several", cfg="several")


def test_each_data_source_has_its_teacher(folder, several):
    loss, norm = loss_of(folder, "several", TAUGHT_BY)
    check_golden(several[0], loss, norm)
    swapped = {"sums": "second", "v1.5/others": "second", "more sums": "first"}
    assert loss_of(folder, "several", swapped)[0] != pytest.approx(loss, rel=0.02)


@pytest.mark.parametrize(
    "args",
    [
        ("--teachers.sums.offload_params", "True"),
        pytest.param(
            ("--placement", '{"actor": "0-1", "teachers.sums": "0", "teachers.*": "1"}',
             "--teachers.sums.engine", "megatron", "--actor.ulysses", "2"),
            marks=pytest.mark.megatron,
        ),
    ],
    ids=["beside the actor", "each on a rank of its own"],
)  # fmt: skip
def test_placement_and_engines_of_teachers_change_nothing(folder, several, args):
    same(ppo(folder, 2, "placed", *args, cfg="several"), several)


def test_the_sampled_tokens_kl_is_to_the_rows_teacher(folder):
    """Without algo.distillation, log p_student - log p_teacher: the teachers, which see the hints,
    are on ranks of their own.
    """
    rows = ppo(
        folder, 2, "kl", "--algo.distillation", "None", "--algo.kl_coef", "1.0", "--algo.kl_in",
        "reward", "--algo.kl_estimator", "k1", "--steps", "1", "--placement",
        '{"actor": "0", "rollout": "0", "teachers.sums": "1", "teachers.*": "1"}', cfg="several",
    )  # fmt: skip
    tokenizer, student = AutoTokenizer.from_pretrained(folder / "student"), "student"
    models, values = {name: model_of(folder, name) for name in (student, "first", "second")}, []
    for text in Path(folder, "kl/samples/step_1.jsonl").read_text().splitlines():
        sample = json.loads(text)
        answer = tokenizer.convert_tokens_to_ids(sample["tokens"])
        with torch.no_grad():
            own, theirs = (
                logprobs(models[name], tokenizer, prompt, answer)
                for name, prompt in zip(
                    (student, TAUGHT_BY[sample["data_source"]]), prompts_of(sample["prompt_id"]),
                    strict=True,
                )
            )  # fmt: skip
        values.append((own - theirs)[range(len(answer)), answer])
    assert rows[0]["reward/kl"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)


def test_a_dry_run_shows_every_teacher(folder):
    done = train(
        folder, 1, "--config", "several.py", "--dry-run", "--ranks", "2", "--placement",
        '{"actor": "0", "rollout": "0", "teachers.sums": "1"}',
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    for words in (
        "  teacher of sums: first\n", "  teacher of v1.5/others: as of sums\n",
        "  teacher of other sources: second\n",
        "  teachers.sums ranks 1: dp 1 x fsdp 1\n", "  teachers.* ranks 0: dp 1 x fsdp 1\n",
        "  teachers.sums 0.1M parameters; weights 0.00, gradients 0.00",
        "    teacher_logprobs",
    ):  # fmt: skip
        assert words in done.output, (words, done.output)
    done = train(folder, 1, "--config", "several.py", "--dry-run", "--teachers.sums", "first")
    assert done.code == 2 and "teachers['sums']='first': expected TrainConfig" in done.output


# ---- a teacher behind an endpoint


def test_a_teacher_behind_an_endpoint_sees_its_sources_and_their_hints(folder):
    """The stand-in of vLLM's server has one of two teachers, and is busy at times; the other one is
    on a rank of its own. Then a server with another model is refused before a model is loaded.
    """
    placement = '{"actor": "0", "rollout": "0", "teachers.sums": "1"}'
    with standing_in(folder / "second") as server:
        Path(folder, "served.py").write_text(SERVED.replace("URL", repr(server.url)))
        server.busy = 1
        rows = ppo(folder, 2, "served", "--placement", placement, cfg="served")
        sources = [json.loads(text)["data_source"] for step in (1, 2) for text in Path(
            folder, f"served/samples/step_{step}.jsonl").read_text().splitlines()]  # fmt: skip
        asked = [each for each in server.asked if len(each["prompt"]) > 2]  # not those of checks
        assert len(asked) == sources.count("more sums") > 0
        assert all(each["prompt_logprobs"] == VOCAB for each in asked)
    check_golden(rows[0], *loss_of(folder, "served", TAUGHT_BY, temperature=1.0))
    assert len(rows) == 2 and rows[1]["actor/teacher_mass"] == pytest.approx(1, abs=1e-5)
    with standing_in(folder / "second", max_logprobs=20) as server:
        Path(folder, "served.py").write_text(SERVED.replace("URL", repr(server.url)))
        done = train(folder, 2, "--config", "served.py", "--run_dir", "refused")
    assert done.code == 2 and "names at most --max-logprobs" in done.output, done.output[-3000:]
