"""Checks of demonstrations: what they do not go with is refused (docs/demonstrations.md)."""

from __future__ import annotations

from spmdrl.algo.advantages import estimator_of
from spmdrl.algo.losses import loss_of
from spmdrl.config import AlgoConfig, PpoConfig, require
from spmdrl.training.checks.options import shown


def check_demonstrations(config: PpoConfig) -> None:
    """Raises ConfigError where algo.demonstrations or a field that belongs to it does not go with
    the rest.
    """
    algo, key = config.algo, config.data.demonstration_key
    asked = f"algo.demonstrations={algo.demonstrations}"
    check_pairs_of_demonstrations(config)
    if algo.demonstrations == 0:
        require(
            key is None,
            f"data.demonstration_key={key!r} has no effect: algo.demonstrations=0 takes none of "
            "them; set it to 1 or more, or leave the key out",
        )
        return
    require(
        key is not None and key.strip() != "",
        f"{asked}: set data.demonstration_key to the column that has them",
    )
    require(
        algo.demonstrations < config.rollout.n,
        f"{asked} of rollout.n={config.rollout.n} answers to a prompt leaves none to be sampled: "
        "raise rollout.n",
    )
    for reason, is_so in reasons_against(config).items():
        require(not is_so, f"{asked} does not go with {reason}")


def check_pairs_of_demonstrations(config: PpoConfig) -> None:
    """Raises ConfigError where algo.pairs asks for pairs that there cannot be."""
    algo = config.algo
    if algo.pairs == "best_worst" or loss_of(algo).pairs is None:  # algorithms.READERS
        return
    where = f"algo.pairs={algo.pairs!r}"
    require(
        algo.demonstrations == 1 and config.rollout.n == 2,
        f"{where} compares one demonstration with one sampled answer, and there are "
        f"algo.demonstrations={algo.demonstrations} of rollout.n={config.rollout.n} answers: set "
        "them to 1 and 2",
    )
    default = AlgoConfig()
    for name in ("dynamic_sampling", "overlong_buffer", "reward_clip"):
        value = getattr(algo, name)
        require(
            value == getattr(default, name),
            f"algo.{name}={value} goes by rewards, and {where} does not look at them: leave it out",
        )


def reasons_against(config: PpoConfig) -> dict[str, bool]:
    """Returns what demonstrations do not go with and why, and whether the config has it."""
    algo, estimator = config.algo, estimator_of(config.algo)
    advantage, loss = shown(algo.advantage), shown(algo.policy_loss)
    return {
        "tools, an environment or an agent: a demonstration is one turn of the assistant's": bool(
            config.tools or config.environment or config.agent is not None
        ),
        f"advantage={advantage}: the critic would learn what another policy's answers are worth": (
            estimator.critic
        ),
        f"advantage={advantage}: the process reward model would learn by what another policy "
        "says": estimator.prm,
        f"advantage={advantage}: its baseline of each token is that of answers which the policy "
        "samples": estimator.token_sums,
        f"algo.sample_filter={algo.sample_filter!r}: it draws among the policy's answers, and "
        "would draw a demonstration again and again": algo.sample_filter is not None,
        f"algo.policy_loss={loss}: it chooses tokens by how the policy's probability of its own "
        "answers goes with the advantage": loss_of(algo).selects is not None,
        f"algo.top_entropy_fraction={algo.top_entropy_fraction}: it chooses tokens by how "
        "uncertain the policy was when it sampled them": algo.top_entropy_fraction < 1,
        "algo.kl_in='reward': over tokens that the policy did not sample, the sum is no estimate "
        "of a KL; use kl_in='loss'": algo.kl_coef > 0 and algo.kl_in == "reward",
        "algo.kl_bias_correction: nobody knows the ratio to the policy that wrote a "
        "demonstration": algo.kl_bias_correction,
        f"actor.router_replay={config.actor.router_replay!r}: no engine has chosen experts for a "
        "demonstration": config.actor.router_replay is not None,
    }  # fmt: skip
