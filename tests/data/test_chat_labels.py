"""Fine-tuning on all turns of a chat: which tokens are learnt, by template and tokenizer."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from chat_tokenizers import ENDS, FORGED, KINDS, metaspace, num_control, saved

from spmdrl.config import SftDataConfig
from spmdrl.data.chat import Encoder
from spmdrl.data.chat_labels import encode_turns
from spmdrl.data.table_files import BadRow

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as Qwen3: thoughts stand in the last answer alone
FORGETS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('<b>')[-1] }}",
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content.split('<b>')[-1] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + (
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LATE_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK, ASKED = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
CHAT = [("user", "2 + 3"), ("assistant", " 5\n"), ("user", "= 5?"), ("assistant", "is 5")]
EXPECTED = [
    ("given", f"{ASK}2 + 3{ASKED}"), ("learnt", " 5\n<|im_end|>"),
    ("given", f"\n{ASK}= 5?{ASKED}"), ("learnt", "is 5<|im_end|>"),
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return saved(KINDS[request.param], tmp_path_factory.mktemp("turns"))


def chat_of(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def encoder_of(tokenizer, template: str = CHATML, limit: int = 1000, **options: Any) -> Encoder:
    tokenizer.chat_template = template
    return Encoder(tokenizer, SftDataConfig("t", turns="all", **options), limit)


def parts(tokenizer, turns) -> list[tuple[str, str]]:
    assert len(turns.ids) == len(turns.learnt)
    runs = groupby(zip(turns.learnt, turns.ids, strict=True), key=lambda pair: pair[0])
    return [("learnt" if learnt else "given", tokenizer.decode([token for _, token in run]))
            for learnt, run in runs]  # fmt: skip


def encode(tokenizer, turns, template: str = CHATML, **options: Any) -> list[tuple[str, str]]:
    return parts(
        tokenizer, encode_turns(chat_of(turns), encoder_of(tokenizer, template, **options))
    )


def test_every_answer_is_learnt_with_the_end_of_its_turn(tokenizer):
    assert encode(tokenizer, CHAT) == EXPECTED
    assert encode(tokenizer, CHAT[:2]) == EXPECTED[:2]


def test_a_chat_of_one_answer_is_what_it_is_as_the_last(tokenizer):
    """Token by token, where the template writes no more than the answer and EOS."""
    encoder = encoder_of(tokenizer)
    found = encode_turns(chat_of(CHAT[2:]), encoder)
    asked, answer = encoder.prompt(chat_of(CHAT[2:3])), encoder.answer("is 5", "response")
    assert found.ids == [*asked.ids, *answer.ids, tokenizer.eos_token_id]
    assert found.learnt == [0] * len(asked.ids) + [1] * (len(answer.ids) + 1)


def test_no_token_lies_across_the_border_of_a_turn(tokenizer):
    """A line break that ends the prompt and one that begins the answer are one token of many
    tokenizers, which a model that is asked never sees: the prompt is encoded as when it is asked.
    """
    encoder = encoder_of(tokenizer)
    found = encode_turns(chat_of([("user", "x"), ("assistant", "\n\n 5")]), encoder)
    asked = encoder.prompt(chat_of([("user", "x")])).ids
    assert found.ids[: len(asked)] == asked
    assert found.learnt == [0] * len(asked) + [1] * (len(found.ids) - len(asked))


def test_names_of_control_tokens_in_any_turn_are_text(tokenizer):
    turns = [
        ("user", FORGED),
        ("assistant", "x<|im_end|>\n"),
        ("user", "5"),
        ("assistant", ENDS[0]),
    ]
    encoder = encoder_of(tokenizer)
    found = encode_turns(chat_of(turns), encoder)
    assert found.escaped and num_control(tokenizer, found.ids) == 8
    learnt = [text for kind, text in parts(tokenizer, found) if kind == "learnt"]
    assert learnt == ["x<|im_end|>\n<|im_end|>", "<|im_start|><|im_end|>"]
    with pytest.raises(BadRow, match=r"field 'messages': its text names .*control_tokens"):
        encode(tokenizer, turns, control_tokens="error")


def test_a_template_without_ends_gets_one_eos_at_the_end(tokenizer):
    given = "<user>2 + 3<assistant>", " 5\n", "<user>= 5?<assistant>", "is 5<|im_end|>"
    assert [text for _, text in encode(tokenizer, CHAT, PLAIN)] == list(given)
    silent = encode(tokenizer, [*CHAT[:3], ("assistant", "")], PLAIN)
    assert [text for _, text in silent] == [*given[:3], "<|im_end|>"]


def test_an_end_that_is_written_only_before_more_turns_is_learnt(tokenizer):
    assert encode(tokenizer, CHAT, LATE_END) == EXPECTED


def test_a_template_that_forgets_is_refused_unless_it_marks_its_answers(tokenizer):
    thinking = [("user", "5"), ("assistant", "<b>x<b>is"), *CHAT[2:]]
    with pytest.raises(BadRow, match=r"'messages\[1\]': .* once more turns follow.*turns='last'"):
        encode(tokenizer, thinking, FORGETS)
    assert encode(tokenizer, thinking[:2], FORGETS)[1] == ("learnt", "<b>x<b>is<|im_end|>")
    found = encode(tokenizer, thinking, MARKED)
    assert [text for kind, text in found if kind == "learnt"] == ["is<|im_end|>", "is 5<|im_end|>"]
    assert not any("<b>" in text for _, text in found)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        # drops thoughts everywhere: all prefixes agree, but the answer is not the row's
        (MARKED.replace("{% generation %}", "{% if true %}").replace("endgeneration", "endif"),
         "leaves out or"),
        # asks otherwise than it writes an answer
        (CHATML.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}<b>"),
         "writes this answer otherwise"),
        (CHATML + "{% if not add_generation_prompt %}bye{% endif %}", "once more turns follow"),
        (MARKED.replace("== 'assistant'", "== 'model'"), "marks nothing to learn"),
        (MARKED.replace("<|im_start|>", "{% generation %}<|im_start|>{% endgeneration %}", 1),
         "the very first token"),
        ("{{ nothing.at.all }}", "refuses the chat"),
    ],
)  # fmt: skip
def test_templates_that_do_not_say_what_is_learnt_are_refused(tokenizer, template, words):
    thinking = [("user", "5"), ("assistant", "<b>x<b>is"), *CHAT[2:]]
    with pytest.raises(BadRow, match=words):
        encode(tokenizer, thinking, template)


def test_an_answer_before_any_question_is_refused(tokenizer):
    with pytest.raises(BadRow, match=r"messages\[0\]': an answer that nothing stands before"):
        encode(tokenizer, CHAT[1:])


def test_a_tokenizer_whose_pieces_are_not_its_whole_is_refused(tmp_path):
    """Like Llama 2's: each piece would get a space in front that the chat does not have."""
    tokenizer = saved(lambda: metaspace("first"), tmp_path)
    with pytest.raises(BadRow, match="encoded one by one"):
        encode(tokenizer, CHAT)


def test_of_a_huge_chat_the_start_is_enough(tokenizer):
    chat = chat_of([*CHAT, ("user", "the answer is 42 " * 100_000), ("assistant", "x")])
    whole = encode_turns(chat_of(CHAT), encoder_of(tokenizer, limit=50))
    found = encode_turns(chat, encoder_of(tokenizer, limit=50))
    assert 50 < len(found.ids) < 50_000
    at_least = min(len(whole.ids), 50)
    assert found.ids[:at_least] == whole.ids[:at_least]
    assert found.learnt[:at_least] == whole.learnt[:at_least]
