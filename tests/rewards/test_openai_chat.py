"""What a judge that sees images is sent."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import png

from spmdrl.config import RewardConfig
from spmdrl.rewards.openai_chat import openai_messages
from spmdrl.rewards.runner import RewardRunner
from spmdrl.rewards.workers.worker import image_part
from spmdrl.types import Picture, Prompt, Sample

URIS = [image_part(png(seed, 8, 8))["image"] for seed in range(3)]


def shown(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": URIS[number]}}


def test_images_stand_where_the_policy_saw_them() -> None:
    """Marks in a prompt's text and parts without data are the prompt's images, in order; a mark in
    an answer is text; a tool's message, whose images have their data, is the user's."""
    chat = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "A<image>B"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "C"}]},
        {"role": "assistant", "content": "an <image>"},
        {"role": "tool", "name": "zoom", "content": [{"type": "image", "image": URIS[2]}]},
        {"role": "assistant", "content": "7"},
    ]
    told = {"type": "text", "text": "The tool zoom returned:"}
    assert openai_messages(chat, URIS[:2]) == [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [
            {"type": "text", "text": "A"}, shown(0), {"type": "text", "text": "B"}]},
        {"role": "user", "content": [shown(1), {"type": "text", "text": "C"}]},
        {"role": "assistant", "content": "an <image>"},
        {"role": "user", "content": [told, shown(2)]},
        {"role": "assistant", "content": "7"},
    ]  # fmt: skip


@pytest.mark.programs
def test_a_reward_is_given_images_only_where_it_names_them() -> None:
    """The functions are sent to worker processes as they are; those of this file would have them
    import it, and torch."""
    uri = URIS[0]

    def names(images: list[str]) -> dict[str, Any]:
        return {"score": len(images), "first": images[0] == uri}

    def takes_all(**given: Any) -> float:
        return float("images" in given)

    prompt = Prompt(0, [5], "d", "", "", images=(Picture(png(0, 8, 8)), Picture(png(1, 8, 8))))
    for function, reward, info in ((names, 2.0, {"first": 1.0}), (takes_all, 0.0, {})):
        runner = RewardRunner(function, RewardConfig(workers=1))
        sample = Sample(prompt, 0, 0, [6], [0.0], [1], [1], "stop")
        runner.score([sample])
        runner.close()
        assert (sample.reward, sample.invalid) == (reward, None)
        assert {name: sample.reward_info[name] for name in info} == info
