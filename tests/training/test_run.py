"""Whole runs under torchrun with the real vLLM: they train, resume, reshard, export."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from programs import CONFIG, metrics_of, torchrun, train, write_task
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.logs.flops import Flops

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

VLLM = CONFIG.replace('engine="hf"', 'engine="vllm"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("runs")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    Path(path, "cfg.py").write_text(VLLM)
    return path


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """Four steps on two ranks, a checkpoint after the second and the fourth."""
    done = torchrun(
        folder, 2, "--config", "cfg.py", "--steps", "4", "--run_dir", "whole",
        "--checkpoint.every_steps", "2", "--checkpoint.keep", "5", "--weights.check",
        "--trackers", "tensorboard",
        forked=False,  # so a rank's end is Python's, too
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    return done


def test_a_run_leaves_what_it_should(folder, uninterrupted):
    run = folder / "whole"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        assert row["actor/ratio_max"] == 1.0  # one update per rollout
        assert row["actor/logprob_diff_max"] < 1e-4  # fp32 on both sides
        assert row["rollout/loss_tokens"] <= 8 * 4 * 8
        assert row["reward/frac_reward_zero_std"] * 8 in range(8)  # not all of the 8 groups
        assert row["advantage/all_zero"] == 0
        phases = sum(row[f"time/{p}_s"] for p in ("rollout", "reward", "update_actor", "sync"))
        assert 0.5 * row["time/step_s"] < phases < row["time/step_s"]
    assert {"eval/reward", "reward/mean"} <= rows[4].keys()
    samples = [json.loads(line) for line in (run / "samples" / "step_1.jsonl").open()]
    assert len(samples) == 16
    assert samples[0]["prompt"].endswith("=")
    check_tokens(samples, run / "samples" / "step_1_trained.jsonl")
    assert "config = PpoConfig(" in (run / "config.py").read_text()
    assert not (run / "errors").exists()
    lines = uninterrupted.output.splitlines()
    assert sum(line.startswith("step 3/4 | reward") for line in lines) == 1
    assert not [line for line in lines if "Warning" in line or "Traceback" in line]
    assert max(len(line) for line in lines if line.startswith("step ")) <= 100
    said = [line for line in lines if line.startswith("spmdrl: ")]
    assert said[0] == "spmdrl: reading cfg.py"  # once, by rank 0, and before anything is imported
    assert len(said) == len(set(said)) < 20
    assert "\r" not in uninterrupted.output and "\033" not in uninterrupted.output
    assert "tensors in" in (run / "weights.txt").read_text()


def check_tokens(samples, path):
    """Tokens spell the answer, and what the trainer computed of them is of the same tokens."""
    trained = [json.loads(line) for line in path.open()]
    address = ("prompt_id", "group", "sample")
    assert [[row[a] for a in address] for row in trained] == [
        [row[a] for a in address] for row in samples
    ]
    for row, numbers in zip(samples, trained, strict=True):
        assert len(row["tokens"]) == len(row["logprobs"]) == row["response_tokens"]
        said = re.sub("<(pad|bos|eos|unk)>", "", "".join(row["tokens"]))
        assert said == row["response"]
        # one update per step: its own pass is the trainer's
        assert numbers["trainer_logprobs"] == pytest.approx(row["logprobs"], abs=2e-4)
        assert "update_logprobs" not in numbers and "advantages" not in numbers
        group = torch.tensor([r["reward"] for r in samples if r["group"] == row["group"]])
        wanted = (row["reward"] - group.mean()) / (group.std() + 1e-6)
        assert numbers["advantage"] == pytest.approx(float(wanted), abs=2e-3)


def test_a_run_ends_with_a_summary_and_a_picture(folder, uninterrupted):
    run, rows = folder / "whole", metrics_of(folder / "whole")
    told = (run / "summary.txt").read_text()
    assert f"\n{told}" in uninterrupted.output
    before, after = (f"{rows[step]['eval/reward']:.4g}" for step in (0, 4))
    assert f"reward on held-out data  {before} (step 0) -> {after} (step 4)" in told
    assert told.count("\n    answer: ") == 3 and f"{run.name}/samples/eval_4.jsonl" in told
    assert imread(run / "reward.png").shape[:2] == (540, 960)
    words = shlex.split(command_of(told, "spmdrl.evaluate"))
    assert words[:7] == ["python", "-m", "spmdrl.launch", "--nproc-per-node", "2", "-m",
                         "spmdrl.evaluate"]  # fmt: skip
    events = EventAccumulator(str(run)).Reload()
    shown = events.Tensors("samples/eval/text_summary")
    assert [event.step for event in shown] == [0, 4]
    assert b"**reward " in shown[-1].tensor_proto.string_val[0]
    steps = [event.step for event in events.Tensors("samples/train/text_summary")]
    assert steps == [1, 2, 3, 4]


def command_of(told, program):
    """The command of a summary that starts this program."""
    [line] = [line for line in told.splitlines() if f"-m {program} " in line]
    return line


def test_resume_is_bit_for_bit(folder, uninterrupted):
    # a run that died after its fourth step's line and before that step's checkpoint
    shutil.copytree(folder / "whole", folder / "resumed")
    shutil.rmtree(folder / "resumed/checkpoints/step_00000004")
    done = train(
        folder, 2, "--config", "cfg.py", "--steps", "4", "--run_dir", "resumed",
        "--checkpoint.keep", "5", "--checkpoint.every_steps", "2", "--resume", "auto",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    assert "2 steps done" in done.output
    whole, resumed = metrics_of(folder / "whole"), metrics_of(folder / "resumed")
    assert [r["step"] for r in resumed] == [0, 1, 2, 3, 4]
    assert resumed[3:] == whole[3:]
    told, before = ((folder / run / "summary.txt").read_text() for run in ("resumed", "whole"))
    assert (
        told.splitlines()[3:6]
        == [  # from step 0 on, which the resumed run did not do
            line.replace("whole/", "resumed/") for line in before.splitlines()[3:6]
        ]
    )
    for rank in (0, 1):
        shard = f"checkpoints/step_00000004/actor/__{rank}_0.distcp"
        assert (folder / "whole" / shard).read_bytes() == (folder / "resumed" / shard).read_bytes()


def test_ranks_that_share_the_tokens_of_sequences_go_on_alike(folder, uninterrupted):
    """From a checkpoint of ranks that did not; the engines' weights are proven after every push."""
    done = train(
        folder, 2, "--config", "cfg.py", "--steps", "4", "--run_dir", "ulysses",
        "--resume", "whole/checkpoints/step_00000002", "--actor.ulysses", "2",
        "--actor.activation_checkpointing", "--actor.offload_params", "--actor.offload_optimizer",
        "--weights.check",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    whole, shared = metrics_of(folder / "whole"), metrics_of(folder / "ulysses")
    for want, got in zip(whole[3:], shared[-2:], strict=True):
        assert got.keys() == want.keys()
        for key in want.keys() - {"balance/imbalance"}:
            assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-5), key


def test_a_checkpoint_loads_on_another_number_of_ranks(folder, uninterrupted):
    done = train(
        folder, 1, "--config", "cfg.py", "--steps", "4", "--run_dir", "resharded",
        "--resume", "whole/checkpoints/step_00000002",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    whole, other = metrics_of(folder / "whole"), metrics_of(folder / "resharded")
    for want, got in zip(whole[3:], other[-2:], strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


def test_export_loads_and_is_what_was_trained(folder, uninterrupted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = "whole/checkpoints/step_00000004"
    args = ["--checkpoint", checkpoint, "--out", "exported"]
    done = train(folder, 1, *args, program="spmdrl.export")
    assert done.code == 0, done.output
    _, info = AutoModelForCausalLM.from_pretrained(
        folder / "exported", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder / "exported").decode([4, 5]) == "01"
    # greedy answers of the exported model are those of the run's last evaluation, through vLLM
    rerun = train(folder, 1, "--config", "cfg.py", "--model", "exported", "--steps", "1",
                     "--run_dir", "from_export")  # fmt: skip
    assert rerun.code == 0, rerun.output[-4000:]
    before = metrics_of(folder / "from_export")[0]
    after = metrics_of(folder / "whole")[4]
    assert before["eval/reward"] == pytest.approx(after["eval/reward"])
    again = train(folder, 1, *args, program="spmdrl.export")
    assert again.code == 2, again.output
    assert "already holds a model" in again.output
    Path(folder, "full").mkdir()
    Path(folder, "full", "model.safetensors.unfinished").symlink_to("/dev/full")
    full = train(folder, 1, *args[:-1], "full", program="spmdrl.export")
    assert full.code == 1
    assert "Traceback" not in full.output
    assert re.search(r"spmdrl: \S+ \S+ cannot write full/model.safetensors, where", full.output)


def test_critic_reference_and_tensor_parallel_rollout(folder):
    known = "import spmdrl.training.rl as t\nt.peak_tflops = lambda device: 1e-3\n"
    known += "import spmdrl.distributed.progress as p\n"
    known += "p.TICK_S = p.PATIENCE_S = p.LONG_S = 0.01\n"  # talkative
    Path(folder, "known.py").write_text(VLLM + known)  # as if the device's peak were known
    done = train(
        folder, 2, "--config", "known.py", "--run_dir", "all_roles",
        "--rollout.tensor_parallel", "2", "--algo.advantage", "gae", "--critic.dtype", "float32",
        "--critic.optim.lr", "1e-3", "--algo.kl_coef", "0.01",
        "--algo.kl_in", "reward", "--algo.mini_batches", "2", "--algo.epochs", "2",
        "--ref.dtype", "float32", "--weights.check", "--weights.bucket_mib", "1",
        "--actor.shared_prefix", "False",  # its operations are counted below
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    said = [line for line in done.output.splitlines() if line.startswith("spmdrl: step 1/2: ")]
    for words, counted in (
        ("generating answers", "of 32 answers"),
        ("computing reference log-probabilities", "of 2 mini-batches"),
        ("updating the critic", "of 4 updates"),
        ("updating the model", "of 4 updates"),
    ):
        assert any(words in line and line.endswith(counted) for line in said), (words, said)
    rows = metrics_of(folder / "all_roles")
    flops = Flops.of_model(load_hf_config(str(folder / "model")))
    for line in (folder / "all_roles/metrics.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        most = row["time/update_actor_s"] * 2 * 1e9  # two ranks, 1e-3 TFLOP/s each
        tokens = row["response/tokens"] + 32 * 4  # prompts are "1+2="
        heads = flops.per_prediction * row["response/tokens"]
        share = 2 * (flops.per_token * tokens + heads) / most  # two epochs
        assert row["throughput/mfu"] == pytest.approx(share, rel=0.05)  # attention is the rest
    assert rows[1]["actor/ref_kl"] < rows[2]["actor/ref_kl"]  # it moves away from the reference
    assert rows[1]["critic/value_mean"] < rows[2]["critic/value_mean"]  # from 0 to the returns
    assert rows[1]["actor/ratio_max"] > 1.0  # four updates on one rollout
    assert rows[2]["actor/logprob_diff_max"] < 1e-4


def test_five_ranks(folder):
    """More ranks than two prompts' samples. vLLM's engines are made four at a time elsewhere."""
    done = train(
        folder, 5, "--config", "cfg.py", "--run_dir", "five", "--steps", "1",
        "--rollout.engine", "hf", "--rollout.n", "2", timeout_s=230,
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    assert metrics_of(folder / "five")[1]["rollout/loss_tokens"] > 0
