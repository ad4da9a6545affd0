"""Reinforcement learning: torchrun --nproc-per-node 8 -m spmdrl.ppo --config cfg.py

Options: --dry-run checks everything that needs no engine and prints the plan; any field of the
config is set by its dotted name, as in --steps 2 --actor.optim.lr 1e-6 --resume auto.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.cli import as_source, load_config
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.exits import exit_config

if TYPE_CHECKING:
    from spmdrl.data import PromptDataset, PromptOrder
    from spmdrl.engines.fsdp import FsdpEngine
    from spmdrl.program import Runtime
    from spmdrl.step import Roles
    from spmdrl.types import Prompt

SHOWN = ("reward/mean", "reward/invalid", "actor/entropy", "actor/logprob_diff_max")


def main(config: str = "", dry_run: bool = False, ranks: int = 0, **overrides: Any) -> None:
    """Trains the model that the config file names.

    Args:
        config: a Python file that defines `config = PpoConfig(...)`
        dry_run: check, print the plan, score one sample of each data set, and stop
        ranks: with --dry-run, plan for so many ranks instead of those that run
        overrides: any field of the config by its dotted name: --actor.optim.lr 1e-6
    """
    try:
        if not config:
            raise ConfigError("--config FILE is required: a Python file with config = PpoConfig()")
        value = load_config(config, PpoConfig, overrides)
    except ConfigError as error:
        exit_config(error)
    # Not at the top: a wrong key should cost a fraction of a second, and torch takes seconds.
    from spmdrl.program import started

    with started(value) as runtime:
        from spmdrl.plan import check

        check(value, ranks or runtime.topology.world)
        if dry_run:
            show_plan(value, runtime, ranks or runtime.topology.world)
        else:
            train(value, runtime)


def train(config: PpoConfig, runtime: Runtime) -> None:
    """The whole run: build, resume, then steps with evaluations and checkpoints between them."""
    from spmdrl import checkpoint
    from spmdrl.metrics import RunLog, write_samples
    from spmdrl.step import collect, evaluate, learn, sync

    topology, phases = runtime.topology, runtime.phases
    roles, prompts, held_out, order = build(config, runtime)
    trained = training_engines(roles)
    root = runtime.run_dir / "checkpoints"
    with phases("resume"):
        folder = checkpoint.find(config.resume, root, topology)
        done = 0
        if folder is not None:
            run = checkpoint.load(folder, trained, topology)
            done = run["step"]
            order.load_state_dict(run["order"])
    log = RunLog(runtime.run_dir, runtime.is_main, config.steps, config.tensorboard, done)
    phases.on_change = log.phase
    if folder is not None:
        log.line(f"resumed from {folder}: {done} steps done")
    sync(roles, version=done)

    def held_out_accuracy(step: int) -> dict[str, float]:
        samples, metrics = evaluate(roles, held_out, step)
        write_samples(
            runtime.run_dir / "samples" / f"eval_{step}.jsonl",
            samples,
            config.log_samples,
            topology,
        )
        shown = " ".join(f"{k} {v:.4g}" for k, v in metrics.items() if "accuracy" in k)
        log.line(f"step {step}/{config.steps} | held out: {shown} ({len(held_out)} prompts)")
        return metrics

    if held_out and done == 0:
        log.write(0, held_out_accuracy(0))
    phases.take_seconds()
    for step in range(done + 1, config.steps + 1):
        log.begin_step(step)
        started_at = time.perf_counter()
        with phases("data"):
            asked = list(enumerate(prompts.prompt(i) for i in order.next_step()))
        samples = collect(roles, asked, step)
        write_samples(
            runtime.run_dir / "samples" / f"step_{step}.jsonl",
            samples,
            config.log_samples,
            topology,
        )
        metrics = learn(roles, samples, len(asked), step)
        metrics |= timing(metrics, phases.take_seconds(), time.perf_counter() - started_at)
        log.step_line(step, metrics, SHOWN)
        last = step == config.steps
        if held_out and (last or (config.eval_every and step % config.eval_every == 0)):
            metrics |= held_out_accuracy(step)
        log.write(step, metrics)
        every = config.checkpoint.every_steps
        if every and (last or step % every == 0):
            state = {name: engine.state_dict() for name, engine in trained.items()}
            run = {"engines": sorted(trained), "order": order.state_dict(), "config":
                   as_source(config)}  # fmt: skip
            parts = [roles.actor.hf_config, roles.tokenizer]
            saved = checkpoint.save(root, step, state, run, phases, config.checkpoint.keep, parts)
            log.line(f"step {step}/{config.steps} | saved {saved}")
        phases.take_seconds()
    log.close()
    roles.rewards.close()
    roles.rollout.shutdown()


def build(
    config: PpoConfig, runtime: Runtime
) -> tuple[Roles, PromptDataset, list[tuple[int, Prompt]], PromptOrder]:
    """Data first, since its mistakes are cheap to find; then the engines."""
    from spmdrl.data import PromptDataset, PromptOrder
    from spmdrl.engines.fsdp import FsdpEngine
    from spmdrl.plan import roles_of
    from spmdrl.program import load_tokenizer
    from spmdrl.rewards.runner import RewardRunner
    from spmdrl.rollout import build_engine
    from spmdrl.step import Roles
    from spmdrl.topology import Topology, train_degrees

    topology, phases = runtime.topology, runtime.phases
    rewards = RewardRunner(config.reward, config.rewards)
    tokenizer = load_tokenizer(config.model)
    with phases("load data"):
        prompts = PromptDataset.load(config.data.train, tokenizer, config.data, topology)
        order = PromptOrder(
            len(prompts), config.data.prompts_per_step, config.seed, config.data.shuffle
        )
        rewards.check_sources(prompts.data_sources)
        held_out: list[tuple[int, Prompt]] = []
        if config.data.eval is not None:
            dataset = PromptDataset.load(config.data.eval, tokenizer, config.data, topology)
            rewards.check_sources(dataset.data_sources)
            count = min(len(dataset), config.data.max_eval_prompts or len(dataset))
            held_out = [(i, dataset.prompt(i)) for i in range(count)]
    engines: dict[str, FsdpEngine] = {}
    for name, role in roles_of(config).items():
        with phases(f"build {name}"):
            ranks = Topology.build(topology.device, **train_degrees(role.fsdp))
            kind = "value" if name == "critic" else "policy"
            engine = FsdpEngine(kind, role.model or config.model, role, ranks, name == "ref")
            engine.offload()
            engines[name] = engine
    with phases("build rollout"):
        ranks = Topology.build(topology.device, dp=-1, tp=config.rollout.tensor_parallel)
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        rollout = build_engine(config.model, config.rollout, longest, ranks)
        if config.rollout.sleep:
            rollout.sleep()
    roles = Roles(
        config, topology, phases, tokenizer, ranks, rollout, rewards,
        actor=engines["actor"], ref=engines.get("ref"), critic=engines.get("critic"),
    )  # fmt: skip
    return roles, prompts, held_out, order


def training_engines(roles: Roles) -> dict[str, Any]:
    """Those whose state is saved and resumed."""
    return {n: e for n, e in (("actor", roles.actor), ("critic", roles.critic)) if e is not None}


def timing(
    metrics: dict[str, float], seconds: dict[str, float], total_s: float
) -> dict[str, float]:
    """time/<phase>_s of this step, and response tokens per second of the whole job."""
    times = {f"time/{name.replace(' ', '_')}_s": s for name, s in seconds.items()}
    tokens = metrics["rollout/loss_tokens"]
    return {**times, "time/step_s": total_s, "throughput/tokens_per_s": tokens / total_s}


def show_plan(config: PpoConfig, runtime: Runtime, ranks: int) -> None:
    """--dry-run: resolved config, arithmetic, and one scored sample per data set."""
    from spmdrl.data import PromptDataset, PromptOrder
    from spmdrl.plan import describe
    from spmdrl.program import load_tokenizer
    from spmdrl.rewards.runner import RewardRunner

    rewards = RewardRunner(config.reward, config.rewards)
    tokenizer = load_tokenizer(config.model)
    sets = {"train": config.data.train, "eval": config.data.eval}
    lines, num_prompts = [], 0
    for name, paths in sets.items():
        if paths is None:
            continue
        dataset = PromptDataset.load(paths, tokenizer, config.data, runtime.topology)
        rewards.check_sources(dataset.data_sources)
        if name == "train":
            num_prompts = len(dataset)
            PromptOrder(num_prompts, config.data.prompts_per_step, config.seed)
        lines += [f"{name} data: {len(dataset)} prompts, {dataset.num_overlong} over-long",
                  *scored_example(dataset.prompt(0), rewards)]  # fmt: skip
    rewards.close()
    if runtime.is_main:
        print(as_source(config), describe(config, ranks, num_prompts), *lines, sep="\n")


def scored_example(prompt: Prompt, rewards: Any) -> list[str]:
    """Scores the ground truth as if it were the answer: a grader that fails here fails always."""
    from spmdrl.types import Sample

    answer = str(prompt.ground_truth)
    sample = Sample(prompt, 0, 0, [], [], [], [], "stop", response=answer)
    rewards.score([sample])
    verdict = f"{sample.reward:g}" if sample.invalid is None else f"invalid: {sample.invalid}"
    return [f"  prompt {prompt.id} ({prompt.data_source}): ...{prompt.text[-200:]!r}",
            f"  reward of its ground truth {answer!r} as the answer: {verdict}"]  # fmt: skip


if __name__ == "__main__":
    fire.Fire(main)
