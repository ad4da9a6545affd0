"""Places roles on ranks.

    placement={"actor": "0-3", "rollout": "4-7", "ref": "4-5", "critic": "6-7", "reward": "4"}

A role that is not named: actor and rollout live on all ranks, ref, teachers, critic and prm with
the actor, reward with the rollout. Imports no torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spmdrl.config import ConfigError, PpoConfig, SftConfig, SupervisedConfig, TrainConfig
from spmdrl.config.words import counted, verb

Ranks = tuple[int, ...]  # of the job, ascending
TEACHERS = "teachers."  # what the names of teachers' roles begin with; a data source follows
ROLES = ("actor", "rollout", "ref", "critic", "prm", "reward")
FOLLOWS = {"ref": "actor", "critic": "actor", "prm": "actor", "reward": "rollout"}


@dataclass(frozen=True)
class Placement:
    """The ranks of every role that this run has."""

    roles: Mapping[str, Ranks]

    @property
    def sampling(self) -> Ranks:
        """Ranks that make and score samples."""
        return union(self.roles["rollout"], self.roles["reward"])

    @property
    def training(self) -> Ranks:
        """Ranks with a model that trains, or is asked about the samples."""
        return union(
            *(self.roles[name] for name in self.roles if name not in ("rollout", "reward"))
        )


def union(*parts: Ranks) -> Ranks:
    return tuple(sorted(set().union(*parts)))


def place(config: PpoConfig, world: int) -> Placement:
    """Raises ConfigError where a role or a rank is unknown, or a rank would have nothing to do."""
    asked = config.placement
    for name in asked:
        if name not in ROLES and not name.startswith(TEACHERS):
            near = difflib.get_close_matches(name, ROLES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"placement has no role {name!r}{hint}. Roles: {', '.join(ROLES)}")
    trained = training_roles(config)
    unused = [name for name in asked if name not in (*trained, "rollout", "reward")]
    if unused:
        raise ConfigError(
            f"placement names {', '.join(unused)}, which this run does not have (ref needs "
            "algo.kl_coef above 0, algo.distillation or a loss of pairs, and no teachers; these, "
            "critic and prm need a section of their own)"
        )
    roles: dict[str, Ranks] = {}
    for name in ("actor", "rollout", *(n for n in trained if n != "actor"), "reward"):
        if name in asked:
            roles[name] = parse_ranks(asked[name], world, f"placement[{name!r}]")
        else:
            leader = "actor" if name.startswith(TEACHERS) else FOLLOWS.get(name)
            roles[name] = tuple(range(world)) if leader is None else roles[leader]
    idle = sorted(set(range(world)) - set(union(*roles.values())))
    if idle:
        raise ConfigError(
            f"placement uses {world - len(idle)} of {counted(world, 'rank')}; nothing would run on "
            f"{show_ranks(tuple(idle))}: place a role there, or start fewer ranks"
        )
    return Placement(roles)


def training_roles(config: PpoConfig | SupervisedConfig) -> dict[str, TrainConfig]:
    """The roles of this run that hold a trainer's model, by name. Those of a SupervisedConfig live
    on all ranks.
    """
    roles = {"actor": config.actor}
    if isinstance(config, SupervisedConfig):
        if isinstance(config, SftConfig) and config.distillation is not None:
            roles["ref"] = config.ref
        return roles
    if config.teachers:
        roles |= {f"{TEACHERS}{source}": teacher for source, teacher in config.teachers.items()
                  if isinstance(teacher, TrainConfig)}  # fmt: skip
    elif config.algo.needs_reference or config.prm is not None:
        roles["ref"] = config.ref
    if config.critic is not None:
        roles["critic"] = config.critic
    if config.prm is not None:
        roles["prm"] = config.prm
    return roles


def is_frozen(name: str) -> bool:
    """Whether a role of this name is only asked, and never trained."""
    return name == "ref" or name.startswith(TEACHERS)


def saved_roles(config: PpoConfig) -> dict[str, TrainConfig]:
    """Returns those of training_roles whose weights change, so that checkpoints hold them."""
    follows = config.algo.ref_model_sync_steps > 0
    roles = training_roles(config)
    return {n: role for n, role in roles.items() if not is_frozen(n) or (n == "ref" and follows)}


def reference_is_base(config: PpoConfig, placement: Placement) -> bool:
    """Whether the reference is the actor's model with its adapter off, whatever its engine: no
    second copy is loaded.
    """
    roles, ref = placement.roles, config.ref
    return (
        config.actor.lora is not None
        and "ref" in roles
        and ref.model in (None, config.model)
        and roles["ref"] == roles["actor"]
    )


def parse_ranks(text: str | int | tuple, world: int, where: str) -> Ranks:
    """ "0-3", "4", "0,2,5-7" or "all" -> ranks, ascending. Raises ConfigError."""
    text = as_text(text)
    if text == "all":
        return tuple(range(world))
    ranks: list[int] = []
    for first, last in spans_in(text, where, "ranks like '0-3', '4', '0,2,5-7', 'all'"):
        if last >= world:
            raise ConfigError(
                f"{where}={text!r} needs rank {last}, but there {verb(world, 'are')} "
                f"{counted(world, 'rank')}: 0-{world - 1}"
            )
        ranks += range(first, last + 1)
    if len(set(ranks)) < len(ranks):
        raise ConfigError(f"{where}={text!r} names a rank twice")
    return tuple(sorted(ranks))


def as_text(numbers: str | int | tuple) -> str:
    """fire reads 0,2 as a tuple and 4 as a number."""
    if isinstance(numbers, tuple | list):
        numbers = ",".join(map(str, numbers))
    return str(numbers).replace(" ", "")


def spans_in(text: str, where: str, expected: str) -> Iterator[tuple[int, int]]:
    """ "0,5-7" -> (0, 0), (5, 7). Raises ConfigError."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"{where}={text!r}: expected {expected}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{where}={text!r}: {part} runs backwards")
        yield first, last


def show_ranks(ranks: Ranks) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
