"""Evaluation: python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.evaluate --config cfg.py

Answers data.eval as a run's own evaluations do, with the rollout engine alone, on all ranks.
--checkpoint <run dir>/checkpoints/step_N: that model, whatever engine and layout trained it;
without it config.model, so --model DIR takes what spmdrl.export wrote. Any field of the config is
set by its dotted name: --eval_samples 8 --eval_temperature 1.0.

--benchmark gsm8k asks the prompts of a benchmark instead, with its own grader, and needs no config:
python -m spmdrl.evaluate --benchmark gsm8k --model Qwen/Qwen3-0.6B. docs/benchmarks.md
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fire

from spmdrl.cli.arguments import LAUNCHER, Dry, dry_flags, load_config, shown_config
from spmdrl.cli.help import asks_for_help
from spmdrl.cli.hub_names import with_names
from spmdrl.cli.paths import check_paths, check_writable, missing_checkpoint
from spmdrl.config import ConfigError, PpoConfig, TrainConfig
from spmdrl.config.words import counted
from spmdrl.data.benchmark_config import benchmark_config
from spmdrl.distributed.env import without_garbage_collection
from spmdrl.distributed.exit import BAD_CONFIG
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.start import reading

if TYPE_CHECKING:
    from spmdrl.data.image_limits import ImageLimits
    from spmdrl.data.prompts import PromptDataset
    from spmdrl.distributed.phases import Phases
    from spmdrl.distributed.topology import Topology
    from spmdrl.rewards.runner import RewardRunner
    from spmdrl.training.roles import Sampler
    from spmdrl.training.runtime import Runtime
    from spmdrl.types import Prompt, Sample


def main(
    config: str = "", checkpoint: str = "", out: str = "", benchmark: str = "",
    dry_run: bool = False, show_config: bool = False, **overrides: Any,
) -> None:  # fmt: skip
    """Evaluates a checkpoint, or the model that the config names.

    Args:
        config: a Python file that defines `config = PpoConfig(...)`
        checkpoint: a folder checkpoints/step_N of a run
        out: the folder for metrics.jsonl, items/ and samples/; <run_dir>_eval if it is not given
        benchmark: aime24, math500, gsm8k, mbpp, humaneval or ifeval; it has its own data and reward
        dry_run: check, score one sample, and stop
        show_config: with --dry-run, print every field and not only what differs from the defaults
        overrides: any field of the config by its dotted name: --eval_samples 8
    """
    if asks_for_help(overrides, main, PpoConfig):
        return
    with reading(config):
        dry = dry_flags(dry_run, 0, show_config)
        if "resume" in overrides:
            raise ConfigError("--resume: what is evaluated is named by --checkpoint")
        if any(name.partition(".")[0] == "profile" for name in overrides):
            raise ConfigError("--profile: an evaluation has no steps that could be profiled")
        if checkpoint and config and "model" in overrides:
            raise ConfigError(
                "--model and --checkpoint both name what is evaluated: leave one of them out"
            )
        if benchmark:
            value = benchmark_config(str(benchmark), config, overrides)
        else:
            value = load_config(config, PpoConfig, overrides)
        value = evaluation_of(value, str(checkpoint), str(out))
        check_writable("--out", value.run_dir)
        check_paths(value, ("eval",))
    with without_garbage_collection():
        from spmdrl.distributed.process import notes_last
        from spmdrl.training.fetch import fetch
        from spmdrl.training.runtime import started

    with started(value) as runtime, notes_last(dry.run):
        value = fetch(value, runtime.phases, "none" if dry.run else "all", ("eval",))
        run(value, runtime, dry, str(benchmark))


def evaluation_of(config: PpoConfig, checkpoint: str, out: str) -> PpoConfig:
    """A run's config as that of an evaluation, which trains nothing and has a folder of its own.

    Its `resume` is the checkpoint. Raises ConfigError.
    """
    if config.data.eval is None:
        raise ConfigError("data.eval is not set: there is nothing to evaluate on")
    runs = [Path(config.run_dir)]
    if checkpoint:
        if not os.path.isfile(Path(checkpoint, "run.json")):
            missing = missing_checkpoint(Path(checkpoint))
            raise ConfigError(f"--checkpoint {checkpoint}: there is no checkpoint: {missing}")
        within = Path(checkpoint).resolve().parent
        runs.append(within.parent if within.name == "checkpoints" else Path(checkpoint))
    folder = Path(out or f"{config.run_dir}_eval")
    for taken in runs:
        if folder.resolve().is_relative_to(taken.resolve()):
            raise ConfigError(f"--out {folder} is in the folder of a run, {taken}: name another")
    return replace(
        config, model=str(Path(checkpoint, "hf")) if checkpoint else config.model,
        resume=checkpoint or "never", run_dir=str(folder), placement={}, critic=None, prm=None,
        profile=None, actor=TrainConfig(), ref=TrainConfig(), teachers={},
        rollout=replace(config.rollout, sleep=False),
    )  # fmt: skip


@dataclass
class EvalRoles:
    """A collect.EvalContext without a trainer; every rank samples and scores."""

    config: PpoConfig
    sampler: Sampler
    sampling: Topology
    phases: Phases
    tokenizer: Any


def run(config: PpoConfig, runtime: Runtime, dry: Dry, benchmark: str = "") -> None:
    """Every rank runs it from the first line to the last. benchmark: the name of one, or ""."""
    from spmdrl.checkpoint.run_dir import lock_run_dir
    from spmdrl.distributed.process import keep_what_stands
    from spmdrl.hub.hf_folder import load_tokenizer
    from spmdrl.rewards.runner import RewardRunner, rewards_of
    from spmdrl.rollout.multi_turn.environment import check_environments
    from spmdrl.training.build import load_held_out
    from spmdrl.training.checks.rl import check_held_out
    from spmdrl.training.checks.shown import check_shown

    phases, topology, out = runtime.phases, runtime.topology, runtime.run_dir
    # as few ranks as the limits for a reward's service leave
    scorers = min(topology.world, config.rewards.max_concurrent or topology.world)
    check_held_out(config, scorers, topology.world)
    with ExitStack() as undo:
        rewards = RewardRunner(rewards_of(config), config.rewards, scorers)
        undo.callback(rewards.close)
        tokenizer = load_tokenizer(config.model)
        with phases("load data"):
            prompts, dataset = load_held_out(config, tokenizer, topology, benchmark)
            rewards.check_sources(dataset.data_sources)
            check_environments(config.environment, dataset.data_sources)
            check_shown(config, dataset)
        if dry.run:
            if runtime.is_main:
                show_dry_run(config, dry, len(prompts), dataset, rewards)
            return
        runtime.lock = lock_run_dir(out, topology)
        model = model_of(config, runtime)
        sampler = sampler_of(config, model.folder, rewards, tokenizer, runtime, dataset.looks())
        undo.callback(sampler.engine.shutdown)
        if sampler.judge is not None:
            undo.callback(sampler.judge.engine.shutdown)
        keep_what_stands()
        for started in (sampler.dialogue, sampler.agents):
            if started is not None:
                undo.callback(started.close)
        path = Path(out, "samples", f"{next_number(out)}.jsonl")
        alone = EvalRoles(config, sampler, topology, phases, tokenizer)
        metrics = answers_scored(alone, prompts, model.step, path)
        PROGRESS.now("ending the evaluation")
    PROGRESS.now("")
    if runtime.is_main:
        write_results(config, out, model, path, metrics, len(prompts))


class EvaluatedModel(NamedTuple):
    step: int  # of the checkpoint; 0 where the config's model is evaluated
    name: str  # what the user calls it: the checkpoint, or the model
    folder: str  # that the engine loads, or a name on the hub


def model_of(config: PpoConfig, runtime: Runtime) -> EvaluatedModel:
    """Returns what is evaluated; a checkpoint is exported. Collective."""
    from spmdrl.checkpoint.format import read_run
    from spmdrl.training.run_identity import of_evaluation

    if config.resume == "never":
        return EvaluatedModel(0, with_names(config.model), config.model)
    folder = exported(config, runtime)  # it finds what is damaged
    saved = read_run(Path(config.resume))
    if runtime.is_main and isinstance(saved.get("identity"), dict):
        for difference in of_evaluation(saved["identity"], config):
            PROGRESS.line(f"not as in the run: {difference.text}")
    return EvaluatedModel(saved["step"], config.resume, folder)


def show_dry_run(
    config: PpoConfig, dry: Dry, num_prompts: int, dataset: PromptDataset, rewards: RewardRunner
) -> None:
    from spmdrl.training.dry_run import examples_of, scored_examples

    PROGRESS.line("\n".join([
        shown_config(config, dry.show_config),
        f"{counted(num_prompts, 'held-out prompt')}, "
        f"{counted(num_prompts * config.eval_samples, 'answer')}",
        *scored_examples(examples_of(dataset), rewards, config.rewards),
    ]))  # fmt: skip


def answers_scored(
    roles: EvalRoles, prompts: list[tuple[int, Prompt]], step: int, path: Path
) -> dict[str, float]:
    """Samples and scores answers to the prompts, writes them to `path` and returns their metrics.
    Collective.
    """
    from spmdrl.rollout.multi_turn.conversation import has_replies
    from spmdrl.training.collect import evaluate
    from spmdrl.training.logs.metrics import SampleDetail, write_samples

    config = roles.config
    most = len(prompts) * config.eval_samples
    by_id = {prompt.id: prompt for _, prompt in prompts}
    detail = SampleDetail(
        replies=has_replies(config),
        tokenizer=roles.tokenizer,
        num_samples=config.log_samples,
        num_tokens=config.log_sample_tokens,
        prompt_of=by_id.__getitem__ if any(prompt.images for prompt in by_id.values()) else None,
    )

    def show(samples: list[Sample]) -> None:
        with roles.phases("log samples"):
            write_samples(path, samples, most, roles.sampling, detail)

    PROGRESS.now("")
    return evaluate(roles, prompts, step, show)


def write_results(
    config: PpoConfig, out: Path, model: EvaluatedModel, path: Path, metrics: dict[str, float],
    num_prompts: int,
) -> None:  # fmt: skip
    """Appends the row of this evaluation to metrics.jsonl, prints it, and writes a row for each
    prompt into items/. On the first rank.
    """
    from spmdrl.checkpoint.run_dir import write_config
    from spmdrl.training.logs.items import interval, items_of
    from spmdrl.training.logs.metrics import metrics_line, write_rows

    write_config(config, out)
    log = Path(out, "metrics.jsonl")
    samples = str(path.relative_to(out))
    items = items_of(path)
    write_rows(Path(out, "items", path.name), items)
    metrics = metrics | interval(items)
    row = {"step": model.step, "model": model.name, "samples": samples, **metrics}
    torn = log.exists() and log.read_bytes()[-1:] not in (b"", b"\n")  # by a kill
    with log.open("a") as file:
        file.write("\n" * torn + metrics_line(row))
    shutil.rmtree(Path(out, "model"), ignore_errors=True)
    width = max(map(len, metrics))
    num_answers = num_prompts * config.eval_samples
    PROGRESS.line("\n".join([
        f"{model.name}, step {model.step}: {counted(num_prompts, 'prompt')}, "
        f"{counted(num_answers, 'answer')}",
        *(f"  {key:{width}}  {value:.6g}" for key, value in metrics.items()),
        f"in {log} and {path}",
    ]))  # fmt: skip


def next_number(out: Path) -> int:
    """Returns the number of this evaluation: above those of all that left a row or samples in the
    folder.
    """
    log = Path(out, "metrics.jsonl")
    rows = len(log.read_bytes().splitlines()) if log.exists() else 0
    taken = [int(p.stem) for p in Path(out, "samples").glob("*.jsonl") if p.stem.isdecimal()]
    return 1 + max([rows, *taken])


def exported(config: PpoConfig, runtime: Runtime) -> str:
    """The checkpoint as a Hugging Face model in our folder. Collective.

    In a process of its own, since spmdrl.export needs torch.distributed for itself to put together
    what Megatron saved. Raises ConfigError where it refuses.
    """
    folder = Path(runtime.run_dir, "model")
    dtype = "float32" if config.rollout.quantization else config.rollout.dtype  # as in a run
    command = [
        sys.executable, "-m", "spmdrl.export", "--checkpoint", config.resume, "--out", str(folder),
        "--dtype", dtype, "--trust_remote_code", str(config.trust_remote_code), "--without_mtp",
    ]  # fmt: skip
    alone = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    with runtime.phases("export"):
        if runtime.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # of an evaluation that failed
            done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
            if done.returncode == BAD_CONFIG:
                raise ConfigError(done.stderr.partition("config error: ")[2].strip())
            if done.returncode:
                raise RuntimeError(f"spmdrl.export ended with {done.returncode}: {done.stderr}")
    return str(folder)


def sampler_of(
    config: PpoConfig, model: str, rewards: RewardRunner, tokenizer: Any, runtime: Runtime,
    looks: ImageLimits | None,
) -> Sampler:  # fmt: skip
    """Builds a sampler on all ranks. Collective."""
    from spmdrl.distributed.topology import Topology
    from spmdrl.hub.hf_folder import keep_tower
    from spmdrl.hub.remote_code import allow_code
    from spmdrl.rollout.build import build_engine, engine_text
    from spmdrl.rollout.scheduler import Scheduler
    from spmdrl.training.build import (
        build_agents,
        build_dialogue,
        build_reward_model,
    )
    from spmdrl.training.language_judge import build_judge
    from spmdrl.training.roles import Sampler
    from spmdrl.training.run_images import with_replies
    from spmdrl.training.topologies import reward_degrees

    topology, rollout = runtime.topology, config.rollout
    looks = with_replies(looks, config)
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    judge = None
    if config.judge is not None:
        with runtime.phases("build judge"):
            judges = Topology.build(
                topology.device, range(rewards.ranks), dp=-1, tp=config.judge.tensor_parallel
            )
            judge = build_judge(config, judges, topology, config.judge.sleep)
    with runtime.phases("build rollout"):
        if config.trust_remote_code:
            allow_code(model)
        if config.vision_tower:
            keep_tower(model)
        ranks = Topology.build(topology.device, dp=-1, tp=rollout.tensor_parallel)
        PROGRESS.detail(engine_text(rollout, model))
        engine = build_engine(
            model, rollout, longest, ranks, topology, config.strict, looks=looks
        )  # fmt: skip
        assert engine is not None  # on all ranks
        scheduler = Scheduler(engine, ranks, rollout.static_split)
        dialogue = build_dialogue(config, tokenizer, ranks, looks)
        agents = build_agents(config, tokenizer, ranks, looks)
        degrees = reward_degrees(config)
        scoring = Topology.build(topology.device, range(rewards.ranks), **degrees)
        reward_model = build_reward_model(config, scoring, topology)
    mine = rewards if scoring.here else None
    return Sampler(ranks, scheduler, scoring, mine, reward_model, dialogue, agents, judge)


if __name__ == "__main__":
    fire.Fire(main)
