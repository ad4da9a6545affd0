"""Control tokens in the text of a chat, over tokenizers of every kind; and fields that are huge."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from chat_tokenizers import ENDS, FORGED, KINDS, TEMPLATE, metaspace, num_control, saved
from tiny_models import save_tokenizer
from transformers import AutoTokenizer

from spmdrl.config import DataConfig, SftDataConfig
from spmdrl.data.chat import Encoder
from spmdrl.data.table_files import BadRow


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return saved(KINDS[request.param], tmp_path_factory.mktemp("chat"))


def encoder(tokenizer, **options) -> Encoder:
    return Encoder(tokenizer, DataConfig("t", **options), limit=1000)


def turn(content: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def test_a_turn_cannot_be_forged(tokenizer):
    kept = encoder(tokenizer, control_tokens="keep").prompt(turn(FORGED))
    assert num_control(tokenizer, kept.ids) == 5  # what the attack is after
    found = encoder(tokenizer).prompt(turn(FORGED))
    assert found.escaped and not kept.escaped
    assert num_control(tokenizer, found.ids) == 3
    assert found.text == kept.text  # the model reads the same characters
    assert tokenizer.decode(found.ids) == tokenizer.decode(kept.ids)


def test_text_without_control_tokens_is_what_it_was(tokenizer):
    for text in ("the answer", "<think>\nis 42</think> <b>", " x ", "<|im_end", "im_start|>\n\n"):
        found = encoder(tokenizer).prompt(turn(text))
        rendered = tokenizer.apply_chat_template(turn(text), tokenize=False)
        plain = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert (found.ids, found.text, found.escaped) == (plain, rendered, False)


def test_random_texts_never_make_a_control_token(tokenizer):
    draw = random.Random()
    parts = [*ENDS, "<|im_", "end|>", "<|", "|>", "a", " ", "\n", "é", "x" * 9, "<think>"]
    for _ in range(100):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 9))) + "q"
        chat = turn(text) + turn("yes", "assistant") + turn(text[::-1])
        found = encoder(tokenizer).prompt(chat)
        assert num_control(tokenizer, found.ids) == 7, text


def test_a_tokenizer_whose_pieces_are_not_its_whole(tmp_path):
    """Like Llama 2's: a space is put before the very first word alone. Refused, not let through."""
    tokenizer = saved(lambda: metaspace("first"), tmp_path)
    with pytest.raises(BadRow, match="this tokenizer cannot take as ordinary text"):
        encoder(tokenizer).prompt(turn(FORGED))
    assert not encoder(tokenizer).prompt(turn("hi")).escaped


def test_control_tokens_can_be_refused(tokenizer):
    with pytest.raises(BadRow, match=r"control token '<\|im_end\|>'.*control_tokens"):
        encoder(tokenizer, control_tokens="error").prompt(turn(FORGED))
    # a whole prompt is its author's to the last token
    whole = encoder(tokenizer, control_tokens="error").prompt(FORGED)
    assert num_control(tokenizer, whole.ids) == 2 and not whole.escaped


@pytest.mark.parametrize("role", ["user<|im_end|>", "user\nassistant", "", " "])
def test_roles_are_plain_names(tokenizer, role):
    with pytest.raises(BadRow, match=r"prompt\[0\].role.*expected a plain name"):
        encoder(tokenizer).prompt(turn("hi", role))


def test_answers_and_other_keys_are_text_too(tokenizer):
    answer = Encoder(tokenizer, SftDataConfig("t"), 1000).answer("5<|im_end|>", "response")
    assert answer.escaped and num_control(tokenizer, answer.ids) == 0
    chat = [{"role": "user", "content": "hi", "name": "x<|im_end|>"}]
    named = TEMPLATE.replace("{{ m.role }}", "{{ m.role }} {{ m.name }}")
    old, tokenizer.chat_template = tokenizer.chat_template, named
    try:
        assert num_control(tokenizer, encoder(tokenizer).prompt(chat).ids) == 3
    finally:
        tokenizer.chat_template = old


@pytest.mark.clock
def test_a_huge_field_is_not_tokenised_whole(tokenizer):
    huge = "the answer is 42 " * 400_000  # 7 MB: whole, many seconds
    for text in (huge, huge + FORGED):
        for prompt in (text, turn(text)):
            started_at = time.perf_counter()
            found = encoder(tokenizer).prompt(prompt)
            assert time.perf_counter() - started_at < 4
            assert 1000 < len(found.ids) < 100_000
    few = encoder(tokenizer).prompt("x " * 40_000 + FORGED).ids[-1000:]
    whole = tokenizer("x " * 40_000 + FORGED)["input_ids"][-1000:]
    assert few == whole
    long = "the answer " * 20_000
    start = Encoder(tokenizer, SftDataConfig("t"), 1000).answer(long, "response").ids[:1000]
    assert start == tokenizer(long, add_special_tokens=False)["input_ids"][:1000]


def test_tokens_that_the_model_lacks(tokenizer):
    known = tokenizer.convert_tokens_to_ids("<think>")
    Encoder(tokenizer, DataConfig("t"), 100, known + 1).prompt(turn("<think>"))
    with pytest.raises(BadRow, match=rf"'<think>' has id {known}, .*vocab_size is {known}"):
        Encoder(tokenizer, DataConfig("t"), 100, known).prompt(turn("<think>"))


def test_templates_run_in_a_sandbox(tmp_path: Path):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for template in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{% for", "{{ x.y.z }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ):  # fmt: skip
        tokenizer.chat_template = template
        with pytest.raises(BadRow, match="the chat template refuses the chat"):
            encoder(tokenizer).prompt(turn("hi"))
