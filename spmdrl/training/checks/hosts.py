"""Warns of groups of ranks that exchange in every layer and reach over several hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from spmdrl.config import PpoConfig, RunConfig, SupervisedConfig
from spmdrl.distributed.placement import place, training_roles

RANKS_OF_HOST = 8  # of a plan for other machines: most that have GPUs have so many


def warnings_of_hosts(config: RunConfig, world: int) -> list[str]:
    """Returns a warning that names all such groups, or nothing. A launcher's ranks of a host are
    consecutive.
    """
    is_own = world == int(os.environ.get("WORLD_SIZE", "1"))  # and not a plan for other ranks
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if is_own else RANKS_OF_HOST
    wide = [
        f"{field}={degree}" for field, degree, size, ranks in groups_of_neighbours(config, world)
        if spans_hosts(ranks, size, here)
    ]  # fmt: skip
    if not wide:
        return []
    whose = "" if is_own else ", if they have as many as most machines with GPUs"
    return [
        f"{', '.join(wide)}: ranks of such a group wait for each other in every layer, and some "
        f"are on different hosts, of {here} ranks each{whose}: a network is many times slower than "
        f"the links within a host. Choose degrees that divide {here}, and in placement ranks that "
        "begin with a host's; what a host cannot hold is better cut by more data-parallel ranks, "
        "or by pipeline_parallel"
    ]


def groups_of_neighbours(
    config: RunConfig, world: int
) -> Iterator[tuple[str, int, int, Sequence[int]]]:
    """Yields (field, its value, how many neighbours hold a group, the role's ranks)."""
    assert isinstance(config, PpoConfig | SupervisedConfig)
    roles = place(config, world).roles if isinstance(config, PpoConfig) else {}
    for name, role in training_roles(config).items():
        ranks, experts = roles.get(name, range(world)), role.expert_parallel
        if role.engine == "megatron":
            yield f"{name}.tensor_parallel", role.tensor_parallel, role.tensor_parallel, ranks
            experts *= role.expert_tensor_parallel
        else:
            yield f"{name}.ulysses", role.ulysses, role.ulysses, ranks
        if role.expert_parallel > 1:
            yield f"{name}.expert_parallel", role.expert_parallel, experts, ranks
    if isinstance(config, PpoConfig):
        for name, degree, ranks in (
            ("rollout", config.rollout.tensor_parallel, roles["rollout"]),
            ("judge", config.judge.tensor_parallel if config.judge else 1, roles["reward"]),
        ):
            yield f"{name}.tensor_parallel", degree, degree, ranks


def spans_hosts(ranks: Sequence[int], size: int, here: int) -> bool:
    """Whether some `size` neighbours among the ranks are on more than one host."""
    groups = (ranks[first : first + size] for first in range(0, len(ranks), size))
    return any(group[0] // here != group[-1] // here for group in groups)
