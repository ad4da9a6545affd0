"""Conversations of one sample with tools and environments, as the rollout leads them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from chat_tokenizers import ENDS, split_like_qwen
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spmdrl.config import DataConfig, PpoConfig, RolloutConfig
from spmdrl.rollout.base import Completion, SamplingParams
from spmdrl.rollout.multi_turn.conversation import TurnHandler
from spmdrl.rollout.sampling import SampleRequest, as_samples, completion_of
from spmdrl.types import Prompt

# As Qwen's: a tool's reply is the user's turn, several of them are one.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for t in tools %} {{ t | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROMPT = Prompt(
    7, [1, 2], "maths", "42", "6 x 7?", {"secret": 5}, [{"role": "user", "content": "6 x 7?"}]
)
LIMIT = SamplingParams(max_tokens=1000)


def chat_tokenizer(folder: Path) -> Any:
    """Returns a small one with TEMPLATE, which it saves in the folder."""
    made, trainer = split_like_qwen()
    trainer.special_tokens = ENDS
    made.train_from_iterator(["the answer is 42 multiply arguments name"] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_tokens(["<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>"])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def config_of(**fields: Any) -> PpoConfig:
    base = PpoConfig("m", DataConfig("t"), "math", rollout=RolloutConfig(max_tokens=1000))
    return replace(base, **fields)


def said(tokenizer: Any, text: str, reason: str = "stop") -> Completion:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Completion(ids, [-0.5] * len(ids), reason, [3] * len(ids))


def call(name: str, **arguments: Any) -> str:
    asked = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{asked}\n</tool_call>"


def answer(talk: TurnHandler, turn: Completion, position: int = 0) -> Completion:
    """What comes of it, or the turn itself where nobody replies."""
    if not talk.ask(position, turn):
        return turn
    end = time.monotonic() + 60
    while not (came := talk.came()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(talk) == 0
    return came[position]


def contents(completion: Completion) -> list[list[str]]:
    return [[m["content"] for m in json.loads(reply)] for reply in completion.replies]


def then(turn: Completion, more: Completion) -> Completion:
    """The policy goes on behind a reply."""
    return Completion(
        turn.token_ids + more.token_ids, turn.logprobs + more.logprobs, more.finish_reason,
        turn.versions + more.versions, turn.replies,
    )  # fmt: skip


def played(
    round: TurnHandler, tokenizer: Any, *turns: str, begun: Completion | None = None,
    position: int = 0,
) -> Completion:  # fmt: skip
    """The sample after these turns of the policy's. begun: what it goes on from."""
    sample = begun
    for text in turns:
        turn = said(tokenizer, text + "<|im_end|>")
        sample = answer(round, turn if sample is None else then(sample, turn), position)
    assert sample is not None
    return sample


def messages_of_sample(completion: Completion, prompt: Prompt, tokenizer: Any) -> list[dict]:
    """What a reward function gets as `messages`, of the sample that an answer becomes."""
    question = SampleRequest(prompt, 0, 2, 0)
    [sample] = as_samples([question], [completion], tokenizer)
    assert as_samples([question], [completion_of(sample)], tokenizer) == [sample]
    assert (sample.invalid is None) == (sample.finish_reason != "error")
    return sample.chat
