"""What distillation is refused with, in reinforcement learning and in fine-tuning, whose tokens a
teacher must have, and what it takes.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import CHARS, save_qwen3, save_tokenizer
from transformers import AutoTokenizer, Qwen3Config

from spmdrl.cli.arguments import override
from spmdrl.cli.paths import check_paths, model_fields
from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    DistillationConfig,
    LoraConfig,
    OptimConfig,
    PpoConfig,
    RolloutConfig,
    SftConfig,
    SftDataConfig,
    TeacherEndpoint,
    TrainConfig,
)
from spmdrl.distributed.placement import place, saved_roles, training_roles
from spmdrl.training.checks import memory_plan, teachers
from spmdrl.training.checks.algorithms import check_algo
from spmdrl.training.checks.distillation import check_distillation, check_tokenizers
from spmdrl.training.checks.memory_fit import changes
from spmdrl.training.checks.ranges import check_bounds
from spmdrl.training.checks.rl import check_read
from spmdrl.training.checks.supervised import check_sft
from spmdrl.training.checks.timeline import works_of
from spmdrl.training.run_identity import identity
from spmdrl.training.teacher_prompts import check_sources

HF = Qwen3Config(vocab_size=len(CHARS))


def config_of(teacher="teacher", reward_coef=0.0, changes=None, **distillation):
    algo = AlgoConfig(
        advantage="reinforce",
        reward_coef=reward_coef,
        distillation=DistillationConfig(**distillation),
    )
    config = PpoConfig(
        "m", DataConfig("t"), "gsm8k", algo=algo, ref=TrainConfig(model=teacher),
        rollout=RolloutConfig(n=1),
    )  # fmt: skip
    return replace(config, **(changes or {}))


def check_all(config, hosted=False):
    check_bounds(config)
    check_read(config)
    check_distillation(config, HF, hosted)
    check_algo(config)


SENSE = [
    {}, {"reward_coef": 1.0}, {"reward_coef": 0.5, "loss": "jsd", "beta": 0.9},
    {"loss": "reverse_kl", "topk": 1, "loss_max_clamp": 10.0}, {"tail": False, "coef": 0.1},
    {"changes": {"ref": TrainConfig(model="teacher", engine="megatron")}},
]  # fmt: skip
NONSENSE = [
    ({"teacher": None}, ["ref.model", "None", "teacher"]),
    ({"teacher": "m"}, ["ref.model", "'m'", "another model"]),
    ({"topk": 65}, ["topk=65", "at most 64"]),
    ({"topk": 0}, ["topk=0", "at least 1"]),
    ({"beta": 0.2}, ["beta=0.2", "no effect", "'jsd'"]),
    ({"loss": "jsd", "beta": 1.0}, ["beta=1.0", "reverse_kl"]),
    ({"loss": "jsd", "beta": 0.0}, ["beta=0.0", "above 0"]),
    ({"loss": "reverse_kl", "tail": False}, ["tail=False", "'forward_kl'"]),
    ({"coef": 0.0}, ["coef=0.0", "above 0"]),
    ({"loss_max_clamp": 0.0}, ["loss_max_clamp=0.0", "above 0"]),
    ({"changes": {"prm": TrainConfig()}}, ["process reward model"]),
    ({"changes": {"strict": True}}, ["strict=True", "batch-invariant"]),
]


HINTED = {"data": DataConfig("t", hint_key="tip")}
POLICY = {"teacher": None, "changes": HINTED, "by": "policy"}
SENSE_HINTED = [
    POLICY, POLICY | {"by": "reference"}, POLICY | {"teacher": "m", "by": "reference"},
    {"changes": HINTED}, POLICY | {"reward_coef": 1.0},
]  # fmt: skip
NONSENSE_HINTED = [
    ({"teacher": None, "by": "policy"}, "teacher='policy': with the same prompt"),
    (POLICY | {"teacher": "other"}, "ref.model='other' has no effect"),
    ({"changes": {"data": DataConfig("t", hint_template="{prompt}{hint}")}},
     "hint_template='{prompt}{hint}' has no effect without data.hint_key"),
    ({"changes": {"data": DataConfig("t", max_hint_prompt_tokens=9)}}, "has no effect without"),
    (POLICY | {"changes": {"data": DataConfig("t", hint_key="tip", hint_template="{prompt}")}},
     "hint_template has no {hint}"),
    (POLICY | {"changes": HINTED | {"agent": ["a"]}}, "agents write their prompts themselves"),
    (POLICY | {"changes": HINTED | {"prm": TrainConfig()}}, "process reward model"),
    (POLICY | {"changes": HINTED | {"actor": TrainConfig(router_replay="rollout")}},
     "teacher='policy' with actor.router_replay"),
    (POLICY | {"changes": {"data": DataConfig("t", hint_key="tip", max_hint_prompt_tokens=40_000)}},
     "max_hint_prompt_tokens=40000 + rollout.max_tokens=1024 = 41024 tokens, but max_position_"),
    (POLICY | {"changes": HINTED, "taught": False}, "there is no teacher to see it"),
]  # fmt: skip


def hinted_config(by="reference", taught=True, **settings):
    config = config_of(**settings)
    distillation = replace(config.algo.distillation, teacher=by) if taught else None
    coef = config.algo.reward_coef if taught else 1.0
    return replace(config, algo=replace(config.algo, distillation=distillation, reward_coef=coef))


@pytest.mark.parametrize("settings", SENSE_HINTED)
def test_with_hints_the_model_itself_may_teach(settings, monkeypatch):
    monkeypatch.setattr(teachers, "load_hf_config", lambda name: HF)
    config = hinted_config(**settings)
    check_all(config)
    assert ("ref" in training_roles(config)) == (settings.get("by") != "policy")
    works = [work.phase for work in works_of(config)]
    assert ("teacher_logprobs" in works) == (settings.get("by") == "policy")


@pytest.mark.parametrize(("settings", "words"), NONSENSE_HINTED)
def test_hints_that_nobody_sees_are_refused(settings, words, monkeypatch):
    monkeypatch.setattr(teachers, "load_hf_config", lambda name: HF)
    config = hinted_config(**settings)
    with pytest.raises(ConfigError) as error:
        check_all(config)
    assert words in str(error.value), str(error.value)


BOTH = {"sums": TrainConfig(model="a"), "more": "sums", "*": TeacherEndpoint("http://h/v1", "b")}
SEVERAL = {"teacher": None, "changes": {"teachers": BOTH}}


def with_teachers(teachers, **more):
    return {"teacher": None, "changes": {"teachers": teachers} | more}


NONSENSE_SEVERAL = [
    (SEVERAL | {"taught": False}, "teachers has no effect: nothing is learnt from them"),
    (SEVERAL | {"teacher": "c"}, "ref.model='c' has no effect"),
    (with_teachers(BOTH, ref=TrainConfig(fsdp=1)), "ref is another one"),
    (with_teachers(BOTH, prm=TrainConfig()), "a process reward model"),
    (with_teachers(BOTH, strict=True), "batch-invariant"),
    (with_teachers(BOTH, rollout=RolloutConfig(n=1, temperature=0.7)), "at temperature 1"),
    (with_teachers({"a": "b"}), "teachers['a']='b': expected TrainConfig(model=...)"),
    (with_teachers({"a": "b", "b": "a"}), "one of []"),
    (with_teachers({"a": TrainConfig()}), "teachers['a'].model=None: set it to a teacher"),
    (with_teachers({"a": TrainConfig(model="m")}), "another model than the run's"),
    (with_teachers({"a": TrainConfig(model="c", lora=LoraConfig())}), "teachers.a.lora has no"),
    (with_teachers({"a": TrainConfig(model="c", ema=0.5)}), "teachers.a.ema=0.5 has no effect"),
    (with_teachers({"a": TeacherEndpoint("h:80", "b")}), "expected the address of an API"),
    (with_teachers({"a": TeacherEndpoint("http://h", " ")}), "model is empty"),
    (with_teachers({"a": TeacherEndpoint("http://h", "b", max_concurrent=0)}),
     "teachers.a.max_concurrent=0"),
    (with_teachers({"a": TrainConfig(model="c", micro_batch_tokens=1)}),
     "teachers.a.micro_batch_tokens=1"),
    (with_teachers(BOTH, data=DataConfig("t", hint_key="tip")) | {"by": "policy"},
     "makes the policy the only teacher"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), NONSENSE_SEVERAL)
def test_teachers_that_are_none_are_refused(settings, words, monkeypatch):
    monkeypatch.setattr(teachers, "load_hf_config", lambda name: HF)
    with pytest.raises(ConfigError) as error:
        check_all(hinted_config(**settings))
    assert words in str(error.value), str(error.value)


def test_each_teacher_in_the_ranks_is_a_role_of_its_own():
    config = config_of(**SEVERAL)
    check_all(config)
    assert [*training_roles(config)] == ["actor", "teachers.sums"] and [*saved_roles(config)] == [
        "actor"
    ]
    apart = replace(config, placement={"actor": "0", "teachers.sums": "1"})
    assert place(config, 2).roles["teachers.sums"] == (0, 1)
    assert place(apart, 2).roles["teachers.sums"] == (1,)
    with pytest.raises(ConfigError, match=r"names teachers\.more, which this run does not have"):
        place(replace(config, placement={"teachers.more": "1"}), 2)
    with pytest.raises(ConfigError, match="another program's"):
        check_all(config, hosted=True)
    dotted = replace(config, teachers={"v1.5/a": BOTH["sums"], "v1": "v1.5/a"})
    changed = override(dotted, "teachers.v1.5/a.optim.lr", 0.5)
    assert changed.teachers["v1.5/a"].optim.lr == 0.5 and changed.teachers["v1"] == "v1.5/a"
    with pytest.raises(ConfigError, match="TrainConfig has no field 'modell'"):
        override(dotted, "teachers.v1.5/a.modell", "b")
    assert model_fields(dotted) == {"model": "m", "teachers.v1.5/a.model": "a"}
    assert "teachers.sums.offload_params" in {text.partition("=")[0] for _, text, _ in changes(
        config)}  # fmt: skip


def test_every_data_source_has_a_teacher_and_every_teacher_a_source():
    config = config_of(**SEVERAL)
    check_sources(config, ["more", "sums", "x"])
    check_sources(config, ["sums", "more"])
    with pytest.raises(ConfigError, match=r"teachers\['more'\]: no row has this data_source"):
        check_sources(config, ["sums", "x"])
    few = replace(config, teachers={"sums": BOTH["sums"], "more": "sums"})
    with pytest.raises(ConfigError, match="none for data_source 'x'"):
        check_sources(few, ["more", "sums", "x"])
    check_sources(replace(config, teachers={}), ["any"])


@pytest.mark.parametrize("settings", SENSE, ids=str)
def test_sense_is_not_refused_and_loads_the_teacher(settings):
    config = config_of(**settings)
    check_all(config)
    assert training_roles(config)["ref"].model == "teacher"
    assert place(replace(config, placement={"actor": "0", "ref": "1"}), 2).roles["ref"] == (1,)


@pytest.mark.parametrize(("settings", "words"), NONSENSE, ids=str)
def test_nonsense_is_refused(settings, words):
    with pytest.raises(ConfigError) as error:
        check_all(config_of(**settings))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_actor_of_another_program_and_a_small_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="another program"):
        check_all(config_of(), hosted=True)
    with pytest.raises(ConfigError, match="topk=64, but the model has 61 tokens"):
        check_distillation(config_of(), Qwen3Config(vocab_size=61))


def test_a_teacher_must_mean_the_same_by_every_id(tmp_path, monkeypatch):
    save_tokenizer(tmp_path / "own")
    save_tokenizer(tmp_path / "same")
    monkeypatch.setattr("tiny_models.CHARS", [*CHARS[:7], CHARS[8], CHARS[7], *CHARS[9:]])
    save_tokenizer(tmp_path / "other")
    monkeypatch.undo()
    added = AutoTokenizer.from_pretrained(tmp_path / "own")
    added.add_tokens(["<think>"])
    added.save_pretrained(tmp_path / "more")

    def check(teacher):
        check_tokenizers(str(tmp_path / "own"), str(tmp_path / teacher))

    check("same")
    with pytest.raises(ConfigError, match=r"2 ids differ, id 7 is '4' there and '3' here"):
        check("other")
    with pytest.raises(ConfigError, match=f"id {len(CHARS)} is '<think>' there and None here"):
        check("more")
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no tokenizer that loads"):
        check("none")


# ---- fine-tuning


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by name; all but the student are teachers."""
    path = tmp_path_factory.mktemp("models")
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 40}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny_models.CHARS", CHARS[:40])
        save_qwen3(path / "student", **small)
        save_qwen3(path / "teacher", **small | {"num_hidden_layers": 3})
        save_qwen3(path / "short", **small, max_position_embeddings=31)
        save_qwen3(path / "wide", **small | {"vocab_size": 48})
        patch.setattr("tiny_models.CHARS", [*CHARS[:7], CHARS[8], CHARS[7], *CHARS[9:40]])
        save_qwen3(path / "other", **small)
    row = {"prompt": "1+1=", "response": "2"}
    Path(path, "rows.jsonl").write_text(json.dumps(row) + "\n")
    return path


def sft_config(models, teacher="teacher", taught=True, ref=None, **fields):
    distillation = DistillationConfig(**{"topk": 40} | fields.pop("distillation", {}))
    return SftConfig(
        model=str(models / "student"), out=str(models / "out"), run_dir=str(models / "run"),
        data=SftDataConfig(str(models / "rows.jsonl"), max_tokens=32),
        distillation=distillation if taught else None,
        ref=TrainConfig(model=str(models / teacher) if teacher else None, **ref or {}), **fields,
    )  # fmt: skip


BEST = CheckpointConfig(keep_best=1, best_metric="eval/distillation_loss", best_is="largest")
NONSENSE_SFT = [
    ({"taught": False}, "ref has no effect without distillation"),
    (
        {"taught": False, "teacher": None, "cross_entropy_coef": 0.5},
        "cross_entropy_coef=0.5 has no effect without distillation",
    ),
    ({"cross_entropy_coef": -1.0}, "cross_entropy_coef=-1.0"),
    ({"teacher": None}, "distillation learns from ref.model, which is None"),
    ({"teacher": "student"}, "set it to a teacher, another model than the run's"),
    ({"teacher": "wide"}, "ref.model has 48 tokens, the model 40"),
    ({"teacher": "other"}, "2 ids differ, id 7 is '4' there and '3' here"),
    ({"teacher": "short"}, "max_tokens=32, but ref.model's max_position_embeddings is 31"),
    ({"distillation": {"topk": 64}}, "distillation.topk=64, but the model has 40 tokens"),
    ({"distillation": {"beta": 0.1}}, "distillation.beta=0.1 has no effect on loss='forward_kl'"),
    (
        {"distillation": {"loss": "reverse_kl", "tail": False}},
        "distillation.tail=False with loss='reverse_kl'",
    ),
    ({"ref": {"lora": LoraConfig()}}, "ref.lora has no effect: the teacher is not trained"),
    ({"ref": {"ema": 0.9}}, "ref.ema=0.9 has no effect"),
    ({"ref": {"optim": OptimConfig(lr=0.1)}}, "has no effect: the teacher is not trained"),
    ({"ref": {"ulysses": 2}}, "ref.fsdp with ulysses on ranks 0"),
    ({"ref": {"tensor_parallel": 2}}, "ref.tensor_parallel=2 has no effect with ref.engine='fsdp'"),
    (
        {"ref": {"engine": "megatron", "tensor_parallel": 2}},
        "ref.tensor x pipeline x context_parallel on ranks 0",
    ),
    ({"ref": {"freeze_vision": True}}, "ref.freeze_vision"),
    ({"actor": TrainConfig(offload_params=True)}, "here the actor trains in every step"),
    ({"data": SftDataConfig("t", eval="e", max_tokens=32), "checkpoint": BEST},
     "best_is='largest' would keep the worst by best_metric='eval/distillation_loss'"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), NONSENSE_SFT, ids=str)
def test_nonsense_in_fine_tuning_is_refused(models, settings, words):
    data = settings.get("data")
    config = sft_config(models, **{n: v for n, v in settings.items() if n != "data"})
    with pytest.raises(ConfigError) as error:
        check_sft(config if data is None else replace(config, data=data), 1, warn=False)
    assert words in str(error.value), str(error.value)


def test_sense_in_fine_tuning_is_not_refused(models):
    for settings in (
        {}, {"cross_entropy_coef": 0.0}, {"ref": {"offload_params": True}},
        {"ref": {"optim": OptimConfig(lr=0.1)}, "actor": TrainConfig(optim=OptimConfig(lr=0.1))},
        {"distillation": {"loss": "jsd", "beta": 0.1}, "actor": TrainConfig(lora=LoraConfig())},
    ):  # fmt: skip
        config = sft_config(models, **settings)
        check_sft(config, 1, warn=False)
        assert [*training_roles(config)] == ["actor", "ref"]
    check_sft(sft_config(models, taught=False, teacher=None), 1, warn=False)
    with pytest.raises(ConfigError, match=r"is the folder of ref.model, which would be overwr"):
        check_paths(replace(sft_config(models), out=str(models / "teacher")))


@pytest.fixture
def steady(monkeypatch):
    """What the process itself takes does not change meanwhile."""
    monkeypatch.setattr(memory_plan, "process_gib", lambda *engines: 1.0)


def test_the_plan_of_memory_has_the_teacher(models, steady):
    """Its weights in both phases, unless they leave; no proposal takes the actor away."""
    lengths, plans = np.full(8, 30), {}
    for offload in (False, True):
        config = sft_config(models, ref={"offload_params": offload})
        plans[offload] = memory_plan.supervised_plan(config, 2, "policy", lengths, gpu_gib=80)
    without = sft_config(models, taught=False, teacher=None)
    plain = memory_plan.supervised_plan(without, 2, "policy", lengths, gpu_gib=80)
    stays, leaves, alone = (
        {phase.name: phase.parts["weights"] for phase in plan.timelines[0].phases}
        for plan in (plans[False], plans[True], plain)
    )
    assert [*stays] == [*leaves] == ["ref_logprobs", "update"] and [*alone] == ["update"]
    teacher = stays["update"] - alone["update"]
    assert teacher == pytest.approx(alone["update"] * 3, rel=0.4)  # three layers for one
    assert leaves["update"] == alone["update"]
    assert stays["ref_logprobs"] == leaves["ref_logprobs"] == stays["update"]
    assert plans[True].host_gib - plans[False].host_gib == pytest.approx(teacher)
    rows = sft_config(models).data.batch_size // 2
    assert plans[False].process - plain.process == pytest.approx(rows * 30 * 8 * 40 / 2**30)
    proposed = {text.partition("=")[0] for _, text, _ in changes(sft_config(models))}
    assert {"ref.offload_params", "ref.micro_batch_tokens"} < proposed
    assert "actor.offload_params" not in proposed and "ref.lora" not in proposed


def test_the_plan_of_rl_has_what_teachers_say_and_every_pass(models, steady):
    """8 x topk bytes of each token of a step; hints make a teacher's sequences longer."""
    model, topk = str(models / "student"), 40

    def plan_of(by="reference", placement=None, **fields):
        config = PpoConfig(
            model, DataConfig("t", prompts_per_step=6, max_prompt_tokens=10, hint_key="tip",
                              max_hint_prompt_tokens=90), "gsm8k",
            rollout=RolloutConfig(engine="hf", n=4, max_tokens=20),
            placement=placement or {},
            **{"algo": AlgoConfig(distillation=DistillationConfig(topk=topk, teacher=by))} | fields,
        )  # fmt: skip
        return memory_plan.memory_plan(config, 2, gpu_gib=80)

    plain = plan_of(algo=AlgoConfig(kl_coef=0.1))
    for by in ("reference", "policy"):
        more = plan_of(by).process - plain.process
        assert more == pytest.approx(24 / 2 * 30 * 8 * topk / 2**30)
    (one,) = plan_of("policy").timelines
    looks = {phase.name: phase for phase in one.phases}
    assert "ref_logprobs" not in looks and looks["teacher_logprobs"].parts["activations"] > 0
    both = {"sums": TrainConfig(model=str(models / "teacher")),
            "*": TrainConfig(model=str(models / "short"))}  # fmt: skip
    apart = plan_of(teachers=both, placement={"actor": "0", "rollout": "0", "teachers.*": "1"})
    assert [timeline.roles for timeline in apart.timelines] == [
        ("actor", "rollout", "teachers.sums", "reward"), ("teachers.*",),
    ]  # fmt: skip
    for timeline in apart.timelines:
        assert "teacher_logprobs" in [phase.name for phase in timeline.phases]
    assert apart.process - plain.process == pytest.approx(24 * 30 * 8 * topk / 2**30)


def test_a_run_is_the_same_only_with_the_same_teacher(models):
    tokenizer = AutoTokenizer.from_pretrained(models / "student")
    prints = [
        identity(config, tokenizer)["models"]
        for config in (sft_config(models), sft_config(models, "short"),
                       sft_config(models, None, taught=False))
    ]  # fmt: skip
    assert prints[0]["ref"]["weights"] != prints[1]["ref"]["weights"]
    assert [*prints[2]] == ["model"] and "weights" not in prints[0]["model"]
