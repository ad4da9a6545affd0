"""What a chat holds and its template does not write: found by part, refused where it is learnt."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import KINDS, saved

from spmdrl.config import ConfigError, DataConfig, PreferenceDataConfig, SftDataConfig
from spmdrl.data.preferences import PreferenceDataset
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.sft import SftDataset

ROLES = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CONTENTS = ROLES + "{{ m.content }}" + END
CALLS = ROLES + (
    "{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
) + END  # fmt: skip
NAMES = CALLS.replace("{{ c.function.arguments | tojson }}", "")
ARGUMENTS = CALLS.replace("{{ c.function.name }}", "")
NO_SYSTEM = CALLS.replace(ROLES, ROLES.replace("messages", "messages if m.role != 'system'"))
SHORT = CALLS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = [{"role": "system", "content": "You may call add."}, {"role": "user", "content": "2 + 3?"}]
CALLED = {"role": "assistant", "content": "", "tool_calls": [call("add", a=2, b=3)]}
TOLD = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "5"}
THOUGHT = {"role": "assistant", "content": "It is 5.", "reasoning_content": "two and three"}
CHAT = [*ASKED, CALLED, TOLD, THOUGHT]


@pytest.fixture
def tokenizer(tmp_path_factory):
    return saved(KINDS["byte level"], tmp_path_factory.mktemp("left_out"))


def load(kind, config, rows, tokenizer, template, topology, tmp_path, **options):
    tokenizer.chat_template = template
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = config(str(path), **options)
    return kind.load(str(path), tokenizer, given, topology)


@pytest.mark.parametrize(("template", "missing"), [
    (CONTENTS, {"assistant.tool_calls", "assistant.reasoning_content", "tool.name"}),
    (CALLS, {"tool.name"}),
    (NAMES, {"assistant.tool_calls.arguments", "tool.name"}),
    (ARGUMENTS, {"assistant.tool_calls.name", "tool.name"}),
    (NO_SYSTEM, {"system.content", "tool.name"}),
])  # fmt: skip
def test_prompts_are_counted_by_what_they_lack(
    template, missing, tokenizer, topology, tmp_path, caplog
):
    asked = [{"data_source": "a", "ground_truth": "1", "prompt": chat} for chat in (
        CHAT, CHAT, [{"role": "user", "content": "what is this?"}]
    )]  # fmt: skip
    data = load(PromptDataset, DataConfig, asked, tokenizer, template, topology, tmp_path)
    assert data.left_out == dict.fromkeys(missing, 2)
    for name in missing:
        assert f"{name} in 2 rows" in caplog.text


def test_a_content_of_which_a_part_is_left_out(tokenizer, topology, tmp_path):
    said = {"role": "assistant", "content": "<think>hm</think>It is 5."}
    row = {"data_source": "a", "ground_truth": "1", "prompt": [*ASKED, said], "tools": [{"a": 1}]}
    args = (PromptDataset, DataConfig, [row], tokenizer)
    data = load(*args, SHORT, topology, tmp_path)
    assert data.left_out == {"assistant.content, in part": 1, "column tools": 1}
    given = {"chat_template_kwargs": {"tools": [{"a": 1}]}}
    assert load(*args, CALLS, topology, tmp_path, **given).left_out == {}


@pytest.mark.parametrize("content", ["", None, "I call"])
@pytest.mark.parametrize(
    ("template", "lacks"), [(CONTENTS, "tool_calls"), (NAMES, "tool_calls.arguments"),
                            (ARGUMENTS, "tool_calls.name")],
)  # fmt: skip
def test_calls_that_would_not_be_learnt_make_a_bad_row(
    template, lacks, content, tokenizer, topology, tmp_path
):
    rows = [{"messages": [*ASKED, {**CALLED, "content": content}]}, {"messages": [*CHAT[:2], said]}]
    args = (SftDataset, SftDataConfig, rows, tokenizer, template, topology, tmp_path)
    with pytest.raises(ConfigError, match=f"leaves out assistant.{lacks}, so what the assistant"):
        load(*args, turns="all")
    data = load(*args, turns="all", on_bad_row="skip")
    assert (len(data), data.measured.num_bad) == (1, 1)
    with pytest.raises(ConfigError, match=r"messages\[2\].tool_calls': data.turns='last' learns"):
        load(*args)
    assert load(*args, on_bad_row="skip").measured.num_bad == 1


said = {"role": "assistant", "content": "It is 5."}


def test_calls_are_learnt_where_the_template_writes_them(tokenizer, topology, tmp_path):
    rows = [{"messages": [*ASKED, {**CALLED, "content": None}]}]
    args = (rows, tokenizer, CALLS, topology, tmp_path)
    data = load(SftDataset, SftDataConfig, *args, turns="all")
    assert data.measured.left_out == {}
    text = "".join(tokenizer.decode(ids) for learnt, ids in data.example(0).parts() if learnt)
    assert text == '<call>add{"a": 2, "b": 3}<|im_end|>'


def test_calls_of_a_parquet_file_have_the_arguments_that_were_written(
    tokenizer, topology, tmp_path
):
    """Arrow gives the arguments of every call the keys of all others."""
    calls = [call("add", a=2, b=3), call("root", of=9)]
    rows = [{"messages": [*ASKED, {**CALLED, "content": None, "tool_calls": calls}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tokenizer.chat_template = CALLS
    path = str(tmp_path / "rows.parquet")
    data = SftDataset.load(path, tokenizer, SftDataConfig(path, turns="all"), topology)
    text = "".join(tokenizer.decode(ids) for learnt, ids in data.example(0).parts() if learnt)
    assert text == '<call>add{"a": 2, "b": 3}<call>root{"of": 9}<|im_end|>'


def test_what_is_given_to_fine_tuning_and_to_a_reward_model_is_counted(
    tokenizer, topology, tmp_path
):
    rows = [{"messages": CHAT}]
    args = (rows, tokenizer, CONTENTS, topology, tmp_path)
    lacks = {"assistant.tool_calls": 1, "assistant.reasoning_content": 1, "tool.name": 1}
    assert load(SftDataset, SftDataConfig, *args).measured.left_out == lacks
    args = (rows, tokenizer, CALLS, topology, tmp_path)
    # the thoughts of the turn that is learnt are no part of its content
    lacks = {"assistant.reasoning_content": 1, "tool.name": 1}
    assert load(SftDataset, SftDataConfig, *args).measured.left_out == lacks
    found = load(SftDataset, SftDataConfig, *args, turns="all").measured.left_out
    assert found == {"tool.name": 1}
    pairs = [{"chosen": CHAT, "rejected": [*CHAT[:-1], said | {"content": "It is 6."}]}]
    found = load(PreferenceDataset, PreferenceDataConfig, pairs, tokenizer, CALLS, topology,
                 tmp_path, prompt_key=None)  # fmt: skip
    assert found.measured.left_out == {"tool.name": 1}
