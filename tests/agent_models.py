"""A tiny model that calls a tool, for tests of agents: it knows three conversations by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import CHARS, TINY, save_tokenizer

TEMPLATE = (
    "{% if tools %}#{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<eos>"
    "{% else %}{{ m.role[0] }}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
CALL: dict[str, Any] = {
    "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}
}  # fmt: skip
QUESTION = {"role": "user", "content": "2+3"}
CALLED = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
ANSWERED = [*CALLED, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "it is 5"}]
PLAIN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day to you"}]
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}  # fmt: skip
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}


def save_calling_model(folder: Path) -> Path:
    """A two-layer Qwen3 and its tokenizer, whose added tokens begin and end a tool call."""
    import torch  # not at the top: the processes of agents import this module
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    vocab = {"vocab_size": len(CHARS) + 2, "intermediate_size": 128}
    model = Qwen3ForCausalLM(Qwen3Config(**TINY | vocab))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    learn_by_heart(model, tokenizer)
    model.save_pretrained(folder)
    return folder


def learn_by_heart(model: Any, tokenizer: Any) -> None:
    import torch

    texts = [
        tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
        for chat, tools in ((ANSWERED, [ADD]), (PLAIN, None))
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt", padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.tensor(1.0)
    for _ in range(250):
        loss = model(**{k: batch[k] for k in ("input_ids", "attention_mask")}, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 2e-3:
            return
    raise AssertionError(f"the model has not learnt its conversations: loss {loss:.3g}")
