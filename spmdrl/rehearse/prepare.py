"""Makes what a rehearsal needs, and reads what can be said without running: checks, data, rewards,
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from spmdrl.config import ConfigError, PpoConfig
from spmdrl.config.words import counted
from spmdrl.data.prompts import PromptDataset
from spmdrl.distributed.placement import ROLES, place
from spmdrl.hub.hf_folder import load_tokenizer
from spmdrl.rehearse.probes import Probes, probe
from spmdrl.rehearse.review import Reviewed, review
from spmdrl.rehearse.scale import Scaled, scale
from spmdrl.rehearse.tiny_models import write_tiny_models
from spmdrl.rewards.runner import RewardRunner, rewards_of
from spmdrl.rollout.build import ENGINES, HF
from spmdrl.training.build import load_dataset, load_train
from spmdrl.training.checks.memory_fit import check_memory, rl_planner
from spmdrl.training.checks.memory_plan import memory_plan
from spmdrl.training.checks.rl import check, engine_names, require_sound
from spmdrl.training.fetch import fetch
from spmdrl.training.run_length import with_length
from spmdrl.training.runtime import Runtime

MOST_RANKS = 1025  # that a placement is tried on
USUAL_WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 4, 2, 1)


@dataclass(frozen=True)
class Prepared:
    """A rehearsal that can begin, and what is known of the real run by then."""

    world: int  # ranks of the real run
    ranks: int  # of the rehearsal
    on_gpu: bool
    scaled: Scaled
    probes: Probes
    tokens: list[str]
    memory: list[str]
    wrong: list[str]


def prepare(
    config: PpoConfig, runtime: Runtime, folder: Path, ranks: int, gpus_as: int, gpu_gib: float
) -> Prepared:
    """Raises ConfigError for a config that the real run would refuse, and where the small one is
    refused.
    """
    config = fetch(config, runtime.phases, "none")
    world = world_of(config, gpus_as)
    check(config, world, installed=False)
    tokenizer = load_tokenizer(config.model)
    train = load_train(config, tokenizer, runtime.topology)
    config = with_length(config, len(train))
    held_out = None
    if config.data.eval is not None:
        held_out = load_dataset(config.data.eval, config, tokenizer, runtime.topology)
    probes = tried_reward(config, train)
    wrong = review(Reviewed(config, world, tokenizer, train, held_out, probes))
    wrong += [*too_large(config, world, train, gpu_gib), *missing_engines(config)]
    models = write_tiny_models(config, folder)
    on_gpu = torch.cuda.is_available()
    scaled, here = scale(config, world, ranks, models, str(folder / "run"), on_gpu)
    if on_gpu and here > torch.cuda.device_count():
        raise ConfigError(f"--ranks: a rehearsal of this placement needs {counted(here, 'GPU')}")
    require_sound(scaled.config, here)
    plan = memory_plan(config, world, train.num_tokens, gpu_gib, train.image_tokens)
    return Prepared(
        world, here, on_gpu, scaled, probes, token_lines(config, train), plan.all_lines(), wrong
    )  # fmt: skip


def world_of(config: PpoConfig, gpus_as: int) -> int:
    """Returns how many ranks the real run has: as is said, as the placement names them, or the
    first usual number that the config allows.
    """
    if gpus_as:
        return gpus_as
    if config.placement:
        return next((n for n in range(1, MOST_RANKS) if fits_placement(config, n)), USUAL_WORLDS[0])
    refused = None
    for world in USUAL_WORLDS:
        try:
            require_sound(config, world)
        except ConfigError as error:
            refused = refused or error
        else:
            return world
    assert refused is not None
    raise refused


def fits_placement(config: PpoConfig, world: int) -> bool:
    if not set(config.placement) <= {*ROLES}:
        return False
    try:
        place(config, world)
    except ConfigError:
        return False
    return True


def tried_reward(config: PpoConfig, train: PromptDataset) -> Probes:
    rewards = RewardRunner(rewards_of(config), config.rewards)
    try:
        step = max(1, len(train) // 64)
        prompts = [train.prompt(i) for i in range(0, len(train), step)]
        return probe(rewards, prompts, max(1, config.rewards.workers))
    finally:
        rewards.close()


def too_large(config: PpoConfig, world: int, train: PromptDataset, gpu_gib: float) -> list[str]:
    """Returns what is said of a run that its GPUs cannot hold."""
    try:
        check_memory(config, world, rl_planner(train.num_tokens, gpu_gib, train.image_tokens))
    except ConfigError as error:
        return [str(error)]
    return []


def missing_engines(config: PpoConfig) -> list[str]:
    """Returns a sentence for each engine of the run that is not installed here."""
    found = []
    for name in engine_names(config):
        try:
            ENGINES[name].check_installed()
        except ConfigError as error:
            found.append(f"{error}. The rehearsal had {HF.title} in its place")
    return found


def token_lines(config: PpoConfig, train: PromptDataset) -> list[str]:
    lengths, most = np.asarray(train.num_tokens), config.data.max_prompt_tokens
    return [
        f"prompts: {len(train)}, median {np.median(lengths):g} tokens, longest {lengths.max()} of "
        f"data.max_prompt_tokens={most}; {train.num_overlong} over-long"
    ]
