"""Episodes of Gymnasium environments, and of others with its reset and step, such as GEM's.

A row names the environment and the seed of its episode; its prompt has the first observation. Each
turn of the policy's is an action. API: gymnasium.farama.org/api/env.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.environments.episodes import Row, episode_row, last_number, spoken_action

HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*m(.+?)\x1b\[[0-9;]*m", re.DOTALL)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")

Make = Callable[..., Any]
Parse = Callable[[str, Any], Any]
Describe = Callable[[Any, Any], Any]


def make_gymnasium(env_id: str, **kwargs: Any) -> Any:
    """Makes a registered environment. Raises ConfigError where Gymnasium is not installed."""
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"{env_id} needs Gymnasium: pip install 'spmdrl[gymnasium]' ({error})"
        ) from error
    return gymnasium.make(env_id, **kwargs)


def parse_action(text: str, env: Any) -> Any:
    r"""Returns the action that a turn names, None where it names none.

    Of a space of numbers (Discrete) it is the last number in the turn's last <action>...</action>
    or \boxed{...}, else in the turn; of any other space, or of none, the text there.
    """
    space: Any = getattr(env, "action_space", None)
    if not hasattr(space, "n"):
        return spoken_action(text) or None
    number = last_number(text)
    first = int(getattr(space, "start", 0))
    return number if number is not None and first <= number < first + int(space.n) else None


def describe_observation(observation: Any, env: Any) -> str:
    """Returns an observation as text: of an environment with render_mode="ansi" its picture, in
    which what is coloured stands in brackets.
    """
    if getattr(env, "render_mode", None) != "ansi":
        return observation if isinstance(observation, str) else str(observation)
    picture = HIGHLIGHTED.sub(r"[\1]", str(env.render()))
    return ESCAPE.sub("", picture).strip("\n")


class GymnasiumEpisode:
    """An episode, which a sample plays. For `PpoConfig.environment`, or with arguments of its own
    as `functools.partial(GymnasiumEpisode, parse=...)`.
    """

    def __init__(
        self,
        extra_info: dict[str, Any],
        make: Make = make_gymnasium,
        parse: Parse = parse_action,
        describe: Describe = describe_observation,
        reward_of_bad_action: float = 0.0,
    ) -> None:
        """extra_info: of a row of `episode_rows`. make(env_id, **kwargs): the environment.
        parse(text, env): the action in a turn, or None. describe(observation, env): text, an image
        or messages for the policy. reward_of_bad_action: of a turn without an action, which the
        environment does not see.
        """
        self.parse, self.describe = parse, describe
        self.reward_of_bad_action = reward_of_bad_action
        self.env = make(extra_info["env_id"], **json.loads(extra_info["env_kwargs"]))
        self.env.reset(seed=extra_info["seed"])

    def step(self, action: str) -> dict[str, Any]:
        """action: what the policy said in a turn."""
        found = self.parse(action, self.env)
        if found is None:
            return {"observation": self.bad_action(), "reward": self.reward_of_bad_action}
        observation, reward, terminated, truncated, _ = self.env.step(found)
        return {
            "observation": self.describe(observation, self.env),
            "reward": float(reward),
            "done": bool(terminated or truncated),
        }

    def bad_action(self) -> str:
        space = getattr(self.env, "action_space", None)
        expected = f" It must be one of {space}." if space is not None else ""
        return f"No action was found in your answer.{expected} Write <action>...</action>."

    def close(self) -> None:
        self.env.close()


def episode_rows(
    env_id: str,
    seeds: Iterable[int],
    instructions: str,
    env_kwargs: Mapping[str, Any] | None = None,
    make: Make = make_gymnasium,
    describe: Describe = describe_observation,
    data_source: str = "",
) -> list[Row]:
    """Returns a row for each seed: the instructions and the first observation as the user's
    message, and what GymnasiumEpisode needs in extra_info.

    make, describe: as the episodes will have them. data_source: by which rewards, environments and
    metrics tell rows apart; empty: env_id.
    """
    kwargs = dict(env_kwargs or {})
    env = make(env_id, **kwargs)
    rows = []
    for seed in seeds:
        observation, _ = env.reset(seed=seed)
        info = {"env_id": env_id, "env_kwargs": json.dumps(kwargs), "seed": seed}
        seen = describe(observation, env)
        rows.append(episode_row(data_source or env_id, info, instructions, seen))
    env.close()
    return rows
