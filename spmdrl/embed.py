"""Our step inside another program that trains with FSDP2 or Megatron-core; see docs/embedding.md.

    rl = attach(model, optimizer, config)     # after the program has built and loaded both
    metrics = rl.step(iteration)              # in place of its train step
    rl.close()

The program keeps its process groups, environment, seeds, logging, learning rates, checkpoints and
outer loop. All of attach, step, evaluate and close are collective over its ranks.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.config import PpoConfig, TrainConfig, require
from spmdrl.distributed.faults.embedded_watchdog import Guard
from spmdrl.distributed.phases import Phases
from spmdrl.distributed.placement import place
from spmdrl.distributed.process import ENGINE_ENV
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import process_groups
from spmdrl.engines.base import TrainEngine
from spmdrl.engines.external_actor import ExternalActor
from spmdrl.engines.fsdp.hosted_actor import FsdpActor
from spmdrl.engines.fsdp.layer_kinds import shares_prefixes
from spmdrl.engines.megatron.external_weights import (
    destroy_groups,
    device_here,
    load_hf_weights,
    save_hf_weights,
)
from spmdrl.engines.megatron.hosted_actor import MegatronActor, is_megatron
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.rollout.rng import preserved_rng
from spmdrl.training.build import RlRun, build
from spmdrl.training.checks.rl import check
from spmdrl.training.collect import evaluate
from spmdrl.training.embed_compare import check_gap
from spmdrl.training.fetch import fetch
from spmdrl.training.push_weights import push_weights
from spmdrl.training.rl import run_step
from spmdrl.training.roles import Trainer
from spmdrl.training.runtime import Runtime
from spmdrl.training.step_schedule import Schedule, interleave
from spmdrl.types import Sample

__all__ = [
    "Attachment", "Schedule", "attach", "interleave", "load_hf_weights", "save_hf_weights",
]  # fmt: skip


@dataclass
class Attachment:
    """Holds what stands beside the host's model and optimizer. Made by `attach`."""

    run: RlRun
    actor: ExternalActor
    guard: Guard
    groups: list[dist.ProcessGroup]  # that we made, the same in order on every rank
    logprob_gap: float = 0.0  # mean difference between engine and host, as attach measured it

    def step(self, number: int) -> dict[str, float]:
        """Samples with the model as it stands, learns from it, steps the host's optimizer.

        number: of the step, from 1; seeds are made from it. Returns the step's metrics, the same
        on every rank. Raises PhaseError on every rank where one failed, ConfigError for the user's
        mistakes; the model may then be amid a step, to be taken from a checkpoint.
        """
        roles = self.run.roles
        with untouched(), self.at_work():
            # the weights may have changed since: by the host, or from a checkpoint
            roles.policy_version = number - 2
            push_weights(roles, version=number - 1)
            return run_step(self.run, number, push=False)

    def evaluate(self, number: int) -> dict[str, float]:
        """Answers config.data.eval with the model as it stands; the metrics."""
        roles = self.run.roles
        require(self.run.held_out != [], "evaluate: config.data.eval is not set")
        with untouched(), self.at_work():
            push_weights(roles, version=number)
            return evaluate(roles, self.run.held_out, number)  # all ranks sample

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Our passes drive the host's model; whatever happens, all of it is back afterwards."""
        before = process_groups()
        roles = self.run.roles
        with self.guard.watching(roles.phases), self.actor.driven_by_us():
            try:
                yield
            finally:
                if roles.sampler.here and roles.sleeps:  # after an evaluation or a failure
                    roles.sampler.engine.sleep()
                roles.actor.model.onload()
                self.groups += [g for g in process_groups() if g not in before]

    @property
    def samples(self) -> list[Sample]:
        """Returns the samples of the last step that this rank made, with prompt, response and
        reward.
        """
        return self.run.samples

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """Critic and process reward model, if there are any; their save(folder) and load(folder)
        belong beside the host's own checkpoint."""
        return {name: e for name, e in self.run.engines.items() if name != "actor"}

    def state_dict(self) -> dict[str, Any]:
        """Returns where the data stands and what adapts: JSON-able, the same on every rank."""
        roles = self.run.roles
        return {
            "order": self.run.order.state_dict(), "kl_coef": roles.kl_coef,
            "entropy_coef": roles.entropy_coef, "entropy": roles.entropy,
            "reference": self.reference,
        }  # fmt: skip

    @property
    def reference(self) -> str | None:
        """Says of which weights the KL reference is, where they are those of the host at attach."""
        ref = self.run.roles.ref
        return ref.started_from if ref is not None else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError where the KL reference would be another than before."""
        roles = self.run.roles
        require(
            state.get("reference") == self.reference,
            f"load_state_dict: the KL reference's digest was {state.get('reference')}, and it is "
            f"{self.reference}: without ref.model the reference is the host's weights at attach. "
            "Attach before the checkpoint of this run is loaded, or write the reference once with "
            "save_hf_weights and set ref.model to that folder",
        )
        self.run.order.load_state_dict(state["order"])
        if roles.config.algo.kl_target is not None:
            roles.kl_coef = state["kl_coef"]
        if roles.config.algo.entropy_target is not None:
            roles.entropy_coef, roles.entropy = state["entropy_coef"], state["entropy"]

    def close(self) -> None:
        """Ends engines and reward processes, and takes our process groups away.

        To be called in a `finally`. Where an exception is on its way through it, the other ranks
        may be anywhere and are not waited for.
        """
        failed = sys.exc_info()[0] not in (None, SystemExit)
        with untouched():
            if not failed:
                self.run.roles.post.wait_until_delivered()
            self.run.parts.close()
            if failed:
                return
            dist.barrier(group=self.run.roles.topology.control)
            standing = process_groups()  # an engine takes its own groups away
            for group in [g for g in self.groups if g in standing]:
                dist.destroy_process_group(group)


def attach(
    model: Any, optimizer: Any, config: PpoConfig, tolerance: float | None = None
) -> Attachment:
    """Builds everything around a model that the program trains: engines, data, rewards.

    model: a causal language model of transformers that fully_shard has sharded, or that is whole on
    the only rank, with a torch.optim.Optimizer of its weights; or the GPTModel chunks of this rank
    in Megatron's DistributedDataParallel, or the only one, with a MegatronOptimizer over them, and
    parallel_state initialised. config.model is the Hugging Face folder of the same architecture:
    its tokenizer and config are read, and no weights. Those of the engine that samples, of the KL
    reference, and what critic and process reward model start from are the host's as they stand now,
    but for roles whose `model` is set. What config says of the actor's layout and optimizer must be
    left out: both are the program's. Collective over all ranks of the program.

    Once the engine has the host's weights it samples a few tokens, and the host is asked for their
    log-probabilities. tolerance: how far both may differ on average; None: by dtype, see
    embed_compare.TOLERANCE.

    Raises ConfigError where model and config do not fit, with the difference.
    """
    groups_before = process_groups()
    with untouched(), ExitStack() as undo:
        undo.callback(destroy_groups, groups_before)
        everyone = Topology.build(device_here(), hosted=True, dp=-1)
        phases, guard = Phases(everyone), Guard(everyone, config)
        with guard.watching(phases):
            config = fetch(config, phases, "roles")
            with phases("attach"):
                check_use(config)
                actor: ExternalActor = hosted(model, optimizer, config)
                config = replace(config, actor=actor.role(config.actor))
                check(config, everyone.world, hosted=True)
                require(
                    place(config, everyone.world).sampling == everyone.ranks,
                    "placement: in a host's program every rank samples or scores, so that all hear "
                    "of a failure",
                )
            engine = actor.engine(config.actor, everyone)
            shares = shares_prefixes(config.actor, False, load_hf_config(config.model))
            trainer = Trainer("actor", engine.topology, engine, shares_prefixes=shares)
            runtime = Runtime(everyone, phases, Path(config.run_dir))
            with actor.driven_by_us():  # other roles start from the host's weights
                run = build(config, runtime, trainer, undo)
            run.spans.report(0)  # of what comes before the first step
            engine.onload()
        groups = [group for group in process_groups() if group not in groups_before]
        rl = Attachment(run, actor, guard, groups)
        with rl.at_work():
            push_weights(run.roles, version=0)
            rl.logprob_gap = check_gap(run, actor, tolerance)
        undo.pop_all()  # it stands
    return rl


def hosted(model: Any, optimizer: Any, config: PpoConfig) -> ExternalActor:
    """Finds out what has built the model. Raises ConfigError where a step cannot train it."""
    kind = MegatronActor if is_megatron(model) else FsdpActor
    return kind(model, optimizer, config)


def check_use(config: PpoConfig) -> None:
    """Refuses what only a program of our own can do."""
    for name in (
        "activation_checkpointing", "model", "ema", "fp8", "lora", "mtp_loss_scaling_factor",
    ):  # fmt: skip
        require(
            getattr(config.actor, name) in (False, None, getattr(TrainConfig(), name)),
            f"actor.{name} has no effect: the model is the host's",
        )
    for name in ("critic", "prm"):
        role = getattr(config, name)
        require(
            role is None or role.lora is None or role.model is not None,
            f"{name}.lora: adapters belong to a base that a folder holds; set {name}.model",
        )
    require("actor" not in config.placement, "placement: the actor is on all of the host's ranks")
    default = PpoConfig(config.model, config.data, config.reward)
    for name in (
        "resume", "steps", "epochs", "eval_every", "checkpoint", "start_timeout_s", "project",
        "profile", "show_metrics", "log_lines",
    ):  # fmt: skip
        require(
            getattr(config, name) == getattr(default, name),
            f"{name} has no effect: the host has the loop, the files and the ranks",
        )
    require(
        config.trackers in ((), default.trackers),
        "trackers has no effect: the host shows what Attachment.step returns",
    )
    ours = {
        "warmup_ratio": any(
            role is not None and role.optim.warmup_ratio > 0 for role in (config.critic, config.prm)
        ),
        "async_steps": config.async_steps > 0,
        "rollout.oversample": config.rollout.oversample > 1,
        "algo.replay_steps": config.algo.replay_steps > 0,
    }
    for name, is_on in ours.items():
        require(not is_on, f"{name} does not go with a host's loop; use python -m spmdrl.ppo")


@contextmanager
def untouched() -> Iterator[None]:
    """Random states, environment and the root logger are afterwards what they were before."""
    environment, root = dict(os.environ), logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    for name, value in ENGINE_ENV.items():
        os.environ.setdefault(name, value)
    try:
        with preserved_rng(), preserved_tracker():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        root.setLevel(level)
        root.handlers[:] = handlers
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextmanager
def preserved_tracker() -> Iterator[None]:
    """Keeps Megatron's own generators, by name, as they were, where the program has Megatron."""
    if "megatron.core.tensor_parallel" not in sys.modules:
        yield
        return
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = {name: copy_of(state) for name, state in tracker.get_states().items()}
    try:
        yield
    finally:
        if states:
            tracker.set_states(states)


def copy_of(state: Any) -> Any:
    """Copies a tensor, or a generator, which Megatron keeps for CUDA graphs."""
    return state.clone_state() if isinstance(state, torch.Generator) else state.clone()
