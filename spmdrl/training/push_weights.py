"""The actor's new weights on their way into the rollout engine."""

from __future__ import annotations

from spmdrl.training.roles import Roles


def push_weights(roles: Roles, version: int) -> None:
    """Gives the rollout engine the actor's weights; `version` names them.

    Ranks that sample ahead (config.async_steps) take them when they come to it: `take_weights`.
    """
    ahead = roles.config.async_steps > 0
    if not roles.syncing.here or (ahead and not roles.actor.here):
        return
    if not ahead:  # those that only sample wait here for the others to have learnt
        roles.phases.barrier("wait sync", roles.syncing)
    with roles.phases("sync", roles.actor.topology if ahead else roles.syncing):
        if ahead:
            assert roles.mailbox is not None
            roles.mailbox.announce(version)
        transfer(roles, version)


def take_weights(roles: Roles, version: int) -> None:
    """Waits, on ranks that sample ahead, for the weights of step `version`, if they lack them."""
    while roles.sampler.here and roles.policy_version < version:
        with roles.phases("wait weights", roles.sampler.topology):
            transfer(roles, roles.policy_version + 1)


def new_weights(roles: Roles) -> bool:
    """Returns True if the trainers have weights that this rank, which samples ahead, lacks."""
    assert roles.mailbox is not None
    return roles.mailbox.newest() > roles.policy_version


def transfer(roles: Roles, version: int) -> None:
    """Sends the actor's weights to the rollout engine. Collective over the ranks of both.

    The engine takes memory for its weights when what the optimizer keeps has left, and for its KV
    cache when the trainer's weights have: a rank never has both.
    """
    actor, sampler = roles.actor, roles.sampler
    wakes = sampler.here and roles.sleeps
    if actor.here:
        actor.model.offload(keep_weights=True)
        actor.model.onload(weights_only=True)
    if wakes:
        sampler.engine.wake(("weights",))
    assert roles.weights is not None
    stats = roles.weights.push()
    if actor.here:
        actor.model.offload()
    if wakes:
        sampler.engine.wake(("kv_cache",))
    if sampler.here:
        sampler.engine.policy_version = version
    roles.policy_version = version
    roles.weight_bytes += stats.moved_bytes
