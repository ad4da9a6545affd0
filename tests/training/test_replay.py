"""A step is run again from what its run has kept: the files, the comparison, and whole programs."""

import dataclasses
import io
import json
import math
import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from programs import set_up, train

from spmdrl.checkpoint.earlier_runs import later_files
from spmdrl.config import (
    ConfigError,
    DistillationConfig,
    KeepSamplesConfig,
    PpoConfig,
    TrainConfig,
)
from spmdrl.data.packing import empty_batch
from spmdrl.replay import start_ranks
from spmdrl.training.checks.rl import warnings_of_kept
from spmdrl.training.collect import RolloutResult
from spmdrl.training.replay import token_table
from spmdrl.training.replay.comparison import compare, first_difference, verdict
from spmdrl.training.replay.keeper import SampleKeeper, kept_file
from spmdrl.training.replay.plan import make_plan
from spmdrl.training.replay.rerun import Edit, check_edit
from spmdrl.training.replay.run_config import Absent, edited_config, read_run_config
from spmdrl.training.replay.sample_files import packed, read
from spmdrl.training.replay.sequence_sums import (
    merged_sums,
    packed_sums,
    read_sums,
    sums_of,
)
from spmdrl.training.replay.token_gradients import check_gradients
from spmdrl.types import Judgement, Prompt, Sample

PROMPT = Prompt(7, [5, 6], "sums", {"answer": [1, 2.5]}, "1+1=", {"level": 3})


def sample(index: int, **fields: object) -> Sample:
    messages = [{"role": "assistant", "content": f"said {index}"}]
    usual = {"reward": 0.1 + index, "messages": messages, "response": f"said {index}"}
    return Sample(
        PROMPT, 4, index, [8, 9 + index, 2], [-0.25, -1.1, -2.0**-20], [1, 0, 1], [3, -1, 4],
        "stop", **usual | fields,
    )  # fmt: skip


def whole_rollout() -> RolloutResult:
    """Samples with all that one may have: an invalid one, verdicts, experts, an agent's rows."""
    row = sample(3, turn_numbers=[1], response="another", messages=[])
    row.prompt = dataclasses.replace(PROMPT, token_ids=[1, 2, 3])
    everyone = [
        sample(0, judgement=Judgement(0.5, ["yes"], 0, 12), reward_info={"format": 1.0}, pred="2"),
        sample(1, reward=None, invalid="Traceback: \ud800", messages=[]),
        sample(2, rows=[row], turn_rewards=[0.5, -1e-9], penalty=-0.5, greedy_reward=math.pi),
    ]
    everyone[0].routed_experts = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    everyone[1].support_ids = np.array([[8, -1], [-1, -1], [2, 9]], np.int32)
    return RolloutResult(
        [everyone[2], everyone[0]], 1, everyone, rounds=2, num_sampled=3, num_equal=1,
        metrics={"data/epoch": 0.5},
    )  # fmt: skip


def same_floats(sample: Sample) -> Sample:
    floats = np.array(sample.rollout_logprobs, np.float32).tolist()
    rows = [same_floats(row) for row in sample.rows]
    return dataclasses.replace(sample, rollout_logprobs=floats, rows=rows)


def test_samples_come_back_as_they_were(tmp_path):
    rollout, path = whole_rollout(), tmp_path / "kept.npz"
    path.write_bytes(packed(rollout, world=4, num_rows=40))
    found = read(path)
    assert (found.world, found.num_rows) == (4, 40)
    assert found.rollout.all_samples == [same_floats(each) for each in rollout.all_samples]
    assert [each.index for each in found.rollout.samples] == [2, 0]
    assert found.rollout.samples[0] is found.rollout.all_samples[2]
    experts = [each.routed_experts for each in found.rollout.all_samples]
    assert np.array_equal(experts[0], rollout.all_samples[0].routed_experts)
    supports = [each.support_ids for each in found.rollout.all_samples]
    assert np.array_equal(supports[1], rollout.all_samples[1].support_ids)
    assert experts[1:] == [None, None]
    others = [f.name for f in dataclasses.fields(rollout) if not f.name.endswith("samples")]
    assert all(getattr(found.rollout, name) == getattr(rollout, name) for name in others)


def test_a_damaged_file_is_told(tmp_path):
    path = tmp_path / "kept.npz"
    path.write_bytes(packed(whole_rollout(), 1, 40)[:-200])
    with pytest.raises(ConfigError, match=r"kept\.npz cannot be read"):
        read(path)
    whole, draw = packed(whole_rollout(), 1, 40), random.Random(0)
    sums = packed_sums(sums_of([two_sequences(0)]), 1)
    for _ in range(300):  # bits of headers, too
        for content, reader in ((whole, read), (sums, read_sums)):
            changed = bytearray(content)
            changed[draw.randrange(len(changed))] = draw.randrange(256)
            path.write_bytes(changed)
            with suppress(ConfigError):
                reader(path)


def test_the_last_steps_stay_and_some_for_good(tmp_path):
    for rank in (1, 0):  # an earlier start had a rank more
        keeper = SampleKeeper(tmp_path, KeepSamplesConfig(last=2, every=3), rank, 1 + rank, 40)
        for step in range(1, 7 + (1 - rank)):
            keeper.keep(step, whole_rollout())
        keeper.wait()
    names = sorted(path.name for path in (tmp_path / "kept_samples").iterdir())
    assert names == [
        *(f"step_{step}.samples_{rank}.npz" for step in (1, 4) for rank in (0, 1)),
        "step_6.samples_0.npz", "step_6.samples_1.npz", "step_7.samples_0.npz",
    ]  # fmt: skip


def test_a_write_that_failed_is_told_by_the_next_step(tmp_path):
    Path(tmp_path, "kept_samples").write_text("a file in its place")
    keeper = SampleKeeper(tmp_path, KeepSamplesConfig(last=1), 0, 1, 40)
    keeper.keep(1, whole_rollout())
    with pytest.raises(OSError, match="kept_samples"):
        keeper.keep(2, whole_rollout())


def test_a_warning_of_samples_that_have_no_start():
    config = PpoConfig("m", SimpleNamespace(), len, keep_samples=KeepSamplesConfig(last=5))
    (warning,) = warnings_of_kept(config)
    assert "set keep_samples.last to every_steps or more" in warning
    kept = dataclasses.replace(config, keep_samples=KeepSamplesConfig(last=50))
    assert not warnings_of_kept(kept)


# ---- comparison


def two_sequences(group: int) -> torch.Tensor:
    batch = empty_batch(torch.tensor([3, 4]))
    batch.groups = torch.tensor([group, group])
    batch.indices = torch.tensor([1, 0])
    batch.loss_mask = torch.tensor([0.0, 1, 1, 0, 1, 1, 1])
    batch.rollout_logprobs = -torch.rand(7, generator=torch.Generator().manual_seed(group))
    batch.advantages = batch.loss_mask * (group + 1)
    batch.loss_weights = batch.loss_mask * 1e-6
    return batch


def test_the_first_difference_is_named_in_order_of_computation(tmp_path):
    whole = sums_of([two_sequences(0), two_sequences(1)])
    parts = [sums_of([two_sequences(1)]), sums_of([two_sequences(0)])]
    path = tmp_path / "sums.npz"
    path.write_bytes(packed_sums(merged_sums(parts), 2))
    run, world = read_sums(path)
    metrics = {"actor/grad_norm": 1e-3, "actor/loss": 0.0, "balance/imbalance": 1.0}
    row = {"step": 3, "actor/grad_norm": 1e-3, "actor/loss": 1e-7, "balance/imbalance": 2.0}
    found = compare(row, run, metrics, merged_sums([whole]))
    assert world == 2 and first_difference(found, 1e-6) is None
    assert [each.name for each in found[-2:]] == ["actor/loss", "actor/grad_norm"]
    assert "equal: all" in verdict(found, 1e-6) and "in every bit" in verdict(found, 1e-6)

    changed = two_sequences(1)
    changed.advantages = changed.advantages + changed.loss_mask * torch.tensor(
        [0, 0, 0, 0, 0, 0, 1e-3]
    )
    changed.loss_weights = changed.loss_weights * 1.001
    sums = merged_sums([sums_of([two_sequences(0)]), sums_of([changed])])
    found = compare(row | {"actor/grad_norm": 1.001e-3}, run, metrics, sums)
    first = first_difference(found, 1e-6)
    assert first is not None and (first.name, first.where) == ("advantages", "sample 1.0")
    differing = [each.name for each in found if each.difference > 1e-6]
    assert differing == ["advantages", "loss weights", "actor/grad_norm"]
    assert "3 of " in verdict(found, 1e-6) and "advantages of sample 1.0" in verdict(found, 1e-6)

    found = compare(row, run, metrics, sums, replay_steps=1)  # of every second group
    assert first_difference(found, 1e-6).where == "sample 0.0 of 1 step before"
    found = compare(row, run, metrics, sums_of([two_sequences(0)]))
    assert first_difference(found, 1e-6).name == "sequences"


def test_what_is_no_number_differs_from_a_number_and_not_from_itself():
    usual, broken, endless = (two_sequences(0) for _ in range(3))
    broken.advantages[5] = math.nan
    endless.advantages[5] = -math.inf
    for one, other in ((usual, broken), (broken, usual), (usual, endless)):
        first = first_difference(compare({}, sums_of([one]), {}, sums_of([other])), 1e-6)
        assert first is not None and (first.name, first.where) == ("advantages", "sample 0.0")
    for each in (broken, endless):
        assert first_difference(compare({}, sums_of([each]), {}, sums_of([each])), 1e-6) is None


def test_the_gradient_of_a_token_is_that_of_the_loss(tmp_path):
    """PPO by hand: -A r w where nothing is clipped, 0 where the ratio has left its range."""
    batch = two_sequences(2)
    batch.old_logprobs = batch.rollout_logprobs * batch.loss_mask
    batch.advantages = batch.loss_mask * torch.tensor([0.0, 2, 2, 0, -1, -1, 0])
    batch.loss_weights = batch.loss_mask / 5
    shift = torch.tensor([0.0, 0.5, 0.1, 0, 0.5, -0.5, 0.5])
    last = batch.old_logprobs + shift * batch.loss_mask
    config = PpoConfig("m", SimpleNamespace(), len)
    roles = SimpleNamespace(config=config, tokenizer=SimpleNamespace(decode=lambda ids, **_: "x"))
    recorder = SimpleNamespace(logprobs=lambda: {(2, 0): last[3:], (2, 1): last[:3]})
    tables = [
        token_table.token_table(roles, [batch], recorder, address, (0.0, 0.0))
        for address in ((2, 1), (2, 0))
    ]
    rows = [row for table in tables for row in table.rows]
    chosen = batch.loss_mask > 0
    ratio, advantage = shift.exp()[chosen], batch.advantages[chosen]
    clipped = torch.tensor([1.0, 0, 0, 1, 0])
    assert [row["clip"] for row in rows] == clipped.tolist()
    expected = -advantage * ratio / 5 * (1 - clipped)
    found = torch.tensor([row["gradient"] for row in rows])
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(torch.tensor([row["ratio"] for row in rows]), ratio)
    assert token_table.token_table(roles, [batch], recorder, (3, 0), (0.0, 0.0)) is None
    taught = dataclasses.replace(config.algo, distillation=DistillationConfig())
    roles.config = dataclasses.replace(config, algo=taught)  # whose divergence comes on top
    assert token_table.token_table(roles, [batch], recorder, (2, 1), (0.0, 0.0)) == tables[0]


# ---- what a run's folder has


def run_folder(folder: Path, config: str = "PpoConfig(model='m', data=None, reward=score)") -> Path:
    Path(folder, "config.py").write_text(f"config = {config}\n")
    rows = [{"step": step, "actor/loss": 0.0} for step in range(31, 41)]
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "kept_samples").mkdir()
    for step in (37, 39, 40):
        content = packed(RolloutResult([], 0, []), world=1, num_rows=40)
        kept_file(folder, step, "samples", 0).write_bytes(content)
    Path(folder, "checkpoints", "step_38").mkdir(parents=True)
    return folder


def test_a_replay_begins_at_the_newest_checkpoint_that_serves(tmp_path):
    config = read_run_config(run_folder(tmp_path))
    assert isinstance(config.reward, Absent) and config.reward.__qualname__ == "score"
    plan = make_plan(tmp_path, config, 40)
    assert (plan.done, plan.start.name, plan.computed) == (38, "step_38", None)
    assert "and 1 step between" in plan.described()
    for step, words in (
        (41, "has no such step; its metrics.jsonl has the steps 31 to 40"),
        (38, "its samples were not kept; those of the steps 37, 39, 40 were"),
        (37, "there is no checkpoint before it, and the samples of step 1, 2, 3, 4, 5, 6, 7, 8 be"),
    ):
        with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
            make_plan(tmp_path, config, step)
    Path(tmp_path, "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"no step yet: its metrics\.jsonl has none, or is not"):
        make_plan(tmp_path, config, 40)


def test_a_start_from_an_earlier_step_sets_later_samples_aside(tmp_path):
    names = {path.name for path in later_files(run_folder(tmp_path), 38)}
    assert names == {"step_39.samples_0.npz", "step_40.samples_0.npz"}


@pytest.mark.parametrize(("config", "words"), [
    ("PpoConfig(model='m', data=None, reward=f, former=1)", "does not fit this version of spmdrl"),
    ("SftConfig(model='m', data=None, out='o')", "is of SftConfig"),
    ("PpoConfig(model='m', data=None, reward=make.<locals>.f)", "line 1, names a function"),
    ("PpoConfig(model='m', data=None", "line 1, is no Python: '\\(' was never closed"),
    ("PpoConfig(model='m', data=None, reward=f, algo=AlgoConfig(policy_loss=mine))", "by --config"),
])  # fmt: skip
def test_a_config_that_cannot_be_replayed_is_told(tmp_path, config, words):
    with pytest.raises(ConfigError, match=words):
        read_run_config(run_folder(tmp_path, config))


def test_functions_come_from_the_config_file_and_values_from_the_run(tmp_path):
    mine = "AlgoConfig(policy_loss=mine, epochs=3)"
    run_folder(tmp_path, f"PpoConfig(model='m', data=None, reward=f, algo={mine})")
    text = "from spmdrl.config import *\ndef mine(logprobs, old_logprobs, mb): ...\n"
    text += (
        "config = PpoConfig('m', DataConfig('t.jsonl'), len, algo=AlgoConfig(policy_loss=mine))\n"
    )
    Path(tmp_path, "cfg.py").write_text(text)
    config = read_run_config(tmp_path, str(tmp_path / "cfg.py"))
    assert config.algo.policy_loss.__code__.co_filename == str(tmp_path / "cfg.py")
    assert config.algo.epochs == 3


def test_gradients_of_tokens_that_cannot_be_had_are_refused():
    config = PpoConfig("m", SimpleNamespace(), len)
    check_gradients(config, (2, 1))
    with pytest.raises(ConfigError, match=r"--sample P\.S says of which"):
        check_gradients(config, None)
    megatron = dataclasses.replace(config, actor=TrainConfig(engine="megatron"))
    with pytest.raises(ConfigError, match="the actor's engine is megatron"):
        check_gradients(megatron, (2, 1))


def test_fewer_ranks_than_none_are_refused():
    with pytest.raises(ConfigError, match="--ranks -1: how many processes"):
        start_ranks(-1)


def test_only_what_is_made_of_samples_can_be_edited(tmp_path):
    config = PpoConfig("m", SimpleNamespace(), len)
    assert edited_config(config, "", {"algo.policy_loss": "gspo"}).algo.policy_loss == "gspo"
    with pytest.raises(ConfigError, match=r"--rollout\.temperature: a step is replayed with other"):
        edited_config(config, "", {"rollout.temperature": 0.5})
    with pytest.raises(ConfigError, match="dynamic_sampling=3 would learn from other samples"):
        edited_config(config, "", {"algo.dynamic_sampling": 3})
    with pytest.raises(ConfigError, match=r"--edit: no such file: 'missing\.py'"):
        edited_config(config, "missing.py", {})


def test_an_edit_whose_critic_has_not_learnt_is_refused_before_the_step_is_run():
    config = PpoConfig("m", SimpleNamespace(), len)
    for advantage, role in (("gae", "critic"), ("prime", "prm")):
        algo = dataclasses.replace(config.algo, advantage=advantage)
        edit = Edit(dataclasses.replace(config, algo=algo), rescores=False)
        with pytest.raises(ConfigError, match=f"the run has no {role}, which would have learnt"):
            check_edit(SimpleNamespace(config=config), None, edit)


# ---- whole programs

EDIT = """
from cfg import *
from cfg import config as other
from dataclasses import replace
def longer(response, ground_truth):
    return float(len(response)) - 2.0 * ("7" in response)
config = replace(other, reward=longer)
"""
OPTIONS = (
    "--config", "cfg.py", "--steps", "3", "--algo.kl_coef", "0.01", "--algo.mini_batches", "2",
    "--keep_samples.last", "3", "--checkpoint.every_steps", "2", "--explain_mismatch",
)  # fmt: skip


def plant(path: Path) -> None:
    """Changes one log-probability of the file's first sample."""
    with np.load(path) as file:
        arrays = dict(file)
    arrays["logprobs"][0] -= 0.01
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    path.write_bytes(content.getvalue())


def replayed(folder: Path, ranks: int, *args: str, code: int = 0) -> tuple[str, dict]:
    done = train(folder, ranks, "run", *args, program="spmdrl.replay")
    assert done.code == code, done.output[-3000:]
    step = args[args.index("--step") + 1]
    return done.output, json.loads(Path(folder, f"run/replay/step_{step}.json").read_text())


@pytest.mark.ranks
def test_a_step_is_what_it_was_on_as_many_ranks_and_on_one(tmp_path, qwen3):
    folder = set_up(tmp_path, qwen3)
    done = train(folder, 2, *OPTIONS)
    assert done.code == 0, done.output[-3000:]

    text, found = replayed(
        folder, 2, "--step", "3", "--sample", "2.1", "--gradients", "--algo.policy_loss", "gspo"
    )
    assert found["first_difference"] is None and len(found["compared"]) > 30
    assert all(each["difference"] == 0 for each in found["compared"])  # in every bit
    assert {"ref log-probs", "old log-probs", "advantages", "actor/loss"} < {
        each["name"] for each in found["compared"]
    }
    assert "replayed from run/checkpoints/step_00000002, on 2 ranks" in text
    assert found["edited"]["actor/loss"] != found["metrics"]["actor/loss"]
    assert found["edited"]["reward/mean"] == found["metrics"]["reward/mean"]
    assert "with the edit:" in text and "sample 2.1, with the edit: prompt" in text
    rows = found["tokens"]["rows"]
    shown = [json.loads(line) for line in Path(folder, "run/samples/step_3.jsonl").open()]
    (same,) = [each for each in shown if (each["group"], each["sample"]) == (2, 1)]
    assert [row["text"] for row in rows] == same["tokens"]
    assert [round(row["engine"], 4) for row in rows] == same["logprobs"]
    assert {"trainer", "update", "ratio", "advantage", "mask", "clip", "gradient"} < {*rows[0]}
    total = found["tokens"]["grad_norm"]
    assert f"of the update's gradient norm {total:.4g}, " in text
    assert all((row["grad_norm"] > 0) == (row["mask"] > 0) for row in rows)
    assert 0 < max(abs(row["grad_share"]) for row in rows) < total

    plant(kept_file(folder / "run", 2, "samples", 1))
    Path(folder, "edit.py").write_text(EDIT)
    text, found = replayed(folder, 1, "--step", "2", "--edit", "edit.py")
    assert "from the models as the run began and 1 step between, on 1 rank" in text
    first = found["first_difference"]
    assert first["name"] == "rollout log-probs" and first["where"].startswith("sample ")
    assert "The first, in the order in which a step computes them: rollout log-probs of" in text
    of_engine = {"actor/logprob_diff_max", "actor/logprob_diff_mean", "actor/rollout_kl"}
    others = [c for c in found["compared"] if c["name"] not in {"rollout log-probs", *of_engine}]
    assert max(each["difference"] for each in others) < 1e-6 and len(others) > 30
    assert found["edited"]["reward/mean"] > 5  # the other reward function has been asked

    plant(kept_file(folder / "run", 1, "samples", 1))
    text, found = replayed(folder, 2, "--step", "1", code=1)  # nothing is edited, and it differs
    assert found["first_difference"]["name"] == "rollout log-probs"
    assert "The first, in the order in which a step computes them: rollout log-probs of" in text
