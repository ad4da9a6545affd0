"""Checks of samples of several turns: tools, environments, and the images that replies show."""

from __future__ import annotations

from transformers import PreTrainedConfig

from spmdrl.config import AgentConfig, MultiTurnConfig, PpoConfig, require
from spmdrl.hub.hf_folder import sees_images
from spmdrl.rollout.multi_turn.conversation import has_dialogue
from spmdrl.rollout.multi_turn.environment import resolve_environments
from spmdrl.rollout.multi_turn.tools import Toolbox


def check_turns(config: PpoConfig) -> None:
    """Raises ConfigError where tools or an environment cannot answer."""
    if not has_dialogue(config):
        require(
            config.multi_turn == MultiTurnConfig(),
            "multi_turn has no effect: the config has neither tools nor an environment",
        )
        return
    rollout = config.rollout
    require(
        not rollout.ignore_eos,
        "rollout.ignore_eos=True: a turn would never end, so tools and environment never be asked",
    )
    require(
        not rollout.static_split,
        "rollout.static_split=True repeats a run bit for bit, but when a tool or an environment "
        "answers, and so what is in a batch with what, is a matter of timing: leave it False",
    )
    Toolbox(config.tools, config.sandbox)
    resolve_environments(config.environment)


def check_reply_images(hf: PreTrainedConfig, config: PpoConfig) -> None:
    """Raises ConfigError where replies, or agents' messages, cannot show images."""
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    check_shown(
        hf, config.multi_turn, "multi_turn", config.rollout.max_tokens,
        f"replies are part of an answer of at most rollout.max_tokens={config.rollout.max_tokens}",
    )  # fmt: skip
    check_shown(
        hf, config.agents, "agents", longest,
        f"a turn and its prompt have at most data.max_prompt_tokens + rollout.max_tokens={longest}",
    )  # fmt: skip
    asked = f"multi_turn.max_images={config.multi_turn.max_images}"
    require(
        not config.multi_turn.max_images or config.algo.sample_filter is None,
        f"algo.sample_filter with {asked}: the images of earlier steps' replies are not kept for "
        "a step that trains on them again; leave one of them out",
    )


def check_shown(
    hf: PreTrainedConfig, limits: MultiTurnConfig | AgentConfig, section: str, room: int, why: str
) -> None:
    """Raises ConfigError for limits of images that cannot hold. room: tokens that there are, and
    why there are no more.
    """
    if not limits.max_images:
        require(
            limits.max_image_tokens == type(limits)().max_image_tokens,
            f"{section}.max_image_tokens={limits.max_image_tokens} has no effect: "
            f"{section}.max_images=0 allows no image",
        )
        return
    require(sees_images(hf), f"{section}.max_images={limits.max_images}: the model sees no images")
    require(
        limits.max_image_tokens < room,
        f"{section}.max_image_tokens={limits.max_image_tokens}, but {why}: no image of that size "
        "fits",
    )
