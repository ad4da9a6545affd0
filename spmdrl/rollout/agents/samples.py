"""Trajectories as samples: one for the group's statistics, with a row for each sequence that is
trained on.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

from spmdrl.data.pictures import read_images, written_images
from spmdrl.rewards.workers.worker import Reply
from spmdrl.rollout.agents.pool import Ended
from spmdrl.rollout.agents.trajectory import Row, Trajectory
from spmdrl.types import Message, Prompt, Sample

NO_TURN = "the agent asked for no turn, so there is nothing to learn from"


def trajectory_sample(prompt: Prompt, group: int, index: int, ended: Ended) -> Sample:
    """Makes the sample of a trajectory. It is invalid where its agent failed or never asked."""
    trajectory, reply = ended.trajectory, with_turns_in_order(ended.reply, ended.trajectory)
    rows = [row_sample(prompt, group, index, row) for row in trajectory.rows]
    invalid = f"the agent: {reply.error}" if reply.error is not None else None
    if not rows:
        return Sample(
            prompt, group, index, [], [], [], [], "error", invalid=invalid or NO_TURN,
            agent_output=reply.value,
        )  # fmt: skip
    last = trajectory.last_row
    return replace(
        rows[0], rows=rows, messages=trajectory.rows[last].conversation, invalid=invalid,
        response=rows[last].response, finish_reason=rows[last].finish_reason,
        agent_output=reply.value,
    )  # fmt: skip


def with_turns_in_order(reply: Reply, trajectory: Trajectory) -> Reply:
    """Returns what an agent returned, with the rewards of turns under "turns" as a list in the
    order in which they were answered, where it has them by the ids of answers. An answer with
    several choices gives its reward to each; turns that are not named have 0.
    """
    value = reply.value
    if not isinstance(value, dict) or not isinstance(value.get("turns"), dict):
        return reply
    rewards: list[Any] = [0.0] * trajectory.num_turns
    for given, reward in value["turns"].items():
        numbers = trajectory.turns_of.get(re.split("[-_]", given)[-1])
        if numbers is None:
            return Reply(None, f"it returned a reward for {given!r}, which it was not answered")
        for number in numbers:
            rewards[number] = reward
    return Reply({**value, "turns": rewards}, reply.error)


def row_sample(prompt: Prompt, group: int, index: int, row: Row) -> Sample:
    """Makes the sample of one row. What stands before its first own turn is its prompt."""
    start = row.num_prompt_tokens
    said = own_turns(row)
    return Sample(
        prompt=replace(prompt, token_ids=row.token_ids[:start], images=()),
        group=group,
        index=index,
        response_ids=row.token_ids[start:],
        rollout_logprobs=row.logprobs[start:],
        loss_mask=row.loss_mask[start:],
        policy_version=row.versions[start:],
        finish_reason=row.finish_reason,
        response=row.conversation[-1]["content"] or "",
        messages=said,
        placed_images=row.images,
        turn_numbers=row.turns,
    )


def own_turns(row: Row) -> list[Message]:
    """Returns the end of a row's conversation that begins with its first own turn."""
    turns = [i for i, m in enumerate(row.conversation) if m["role"] == "assistant"]
    own = min(row.num_turns, len(turns))  # a client may have sent another history of these tokens
    return row.conversation[turns[-own] :] if own else []


def training_rows(samples: list[Sample], n: int) -> list[Sample]:
    """Returns what is trained on: of a trajectory its rows, with its reward, and none of an invalid
    one. A row has the rewards of its own turns, and none of other rows' turns. n: samples of a
    prompt; the k-th further row has the index of its trajectory plus n * k.
    """
    found = []
    for sample in samples:
        if sample.invalid is not None or sample.reward is None:
            continue
        outcome = sample.reward - math.fsum(sample.turn_rewards)
        for k, row in enumerate(sample.rows):
            turns = [sample.turn_rewards[i] for i in row.turn_numbers if sample.turn_rewards]
            found.append(
                replace(
                    row,
                    group=sample.group,
                    index=sample.index + n * k,
                    reward=outcome + math.fsum(turns) if turns else outcome,
                    turn_rewards=turns,
                    penalty=sample.penalty,
                    reward_info=sample.reward_info,
                )
            )
    return found


TRAJECTORY_FIELDS = ("messages", "response", "finish_reason", "invalid", "agent_output")
ROW_FIELDS = ("turn_numbers", "response_ids", "rollout_logprobs", "loss_mask", "policy_version",
              "finish_reason", "response", "messages")  # fmt: skip


def to_json(sample: Sample) -> str:
    """Writes a trajectory that is not scored yet, for a checkpoint."""
    rows = [
        {"prompt_ids": row.prompt.token_ids, "images": written_images(row.placed_images)}
        | {name: getattr(row, name) for name in ROW_FIELDS}
        for row in sample.rows
    ]
    own = {name: getattr(sample, name) for name in TRAJECTORY_FIELDS}
    return json.dumps({"rows": rows, **own})


def from_json(text: str, prompt: Prompt, group: int, index: int) -> Sample:
    """Reads what to_json has written."""
    saved = json.loads(text)
    rows = [
        Sample(
            prompt=replace(prompt, token_ids=row.pop("prompt_ids"), images=()),
            group=group,
            index=index,
            placed_images=read_images(row.pop("images", ())),
            **row,
        )
        for row in saved["rows"]
    ]
    first = rows[0] if rows else Sample(prompt, group, index, [], [], [], [], "error")
    return replace(first, rows=rows, **{name: saved[name] for name in TRAJECTORY_FIELDS})
