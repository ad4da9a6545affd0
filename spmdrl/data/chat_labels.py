"""A whole chat as token ids, and which of them the assistant said: fine-tuning on all its turns.

The chat template writes the chat once as a whole, and for each turn of the assistant up to where it
is to answer and up to where its turn ends:

    <user>2?<bot>4<end><user>3?<bot>9<end>    the whole
    <user>2?<bot>                             before the first answer
    <user>2?<bot>4<end>                       after it: `4<end>` is learnt

Both must be how the whole begins. A template that writes a turn otherwise once more turns follow is
refused, unless it says itself, between {% generation %} and {% endgeneration %}, what is learnt.
"""

from __future__ import annotations

import re
from itertools import chain, pairwise
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from spmdrl.data.chat import MARGIN, TEMPLATE_ERRORS, Encoder
from spmdrl.data.left_out import calls_left_out, without_space
from spmdrl.data.table_files import BadRow

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = list[tuple[int, int]]  # (start, end) in a text, in order


class Turns(NamedTuple):
    """Both lists have one entry per token; of text far over the limit, only those of its start."""

    ids: list[int]
    learnt: list[int]  # 1: the assistant's, the end of its turn included
    escaped: bool  # whether names of control tokens were made ordinary text


def encode_turns(chat: list[dict[str, Any]], encoder: Encoder) -> Turns:
    """The chat up to the end of the assistant's last turn. Raises BadRow, ConfigError.

    What the assistant says is encoded by itself, as a model that is asked says it, so no token lies
    across the border of a turn. Of a turn's end its last control token is the last to be learnt;
    where the last turn has none, EOS is put there.
    """
    tokenizer = encoder.tokenizer
    marked, names = encoder.marked(chat, "messages")
    text = encoder.render(marked, asks=False)
    require_calls(chat, encoder)
    says_itself = GENERATION.search(template_of(encoder)) is not None
    spans = generation_spans(marked, encoder) if says_itself else turn_spans(marked, text, encoder)
    if len(text) > 2 * encoder.size:
        ids, learnt = tokens_of(text[: encoder.size], spans, names, encoder, not says_itself)
        if len(ids) >= encoder.limit + MARGIN:
            return Turns(ids[: -MARGIN // 2], learnt[: -MARGIN // 2], bool(names))
    ids, learnt = tokens_of(text, spans, names, encoder, not says_itself)
    if 1 not in learnt or learnt[0]:
        raise BadRow(
            "field 'messages': the chat template marks nothing to learn, or the very first token, "
            "which nothing stands before"
        )
    says_nothing = not says_itself and spans[-1][0] == spans[-1][1]  # in the end: EOS alone
    if not says_nothing:
        end = len(learnt) - learnt[::-1].index(1)  # what follows is nobody's to learn
        ids, learnt = ids[:end], learnt[:end]
    if says_nothing or not (says_itself or ids[-1] in encoder.control_ids):
        ids, learnt = [*ids, int(tokenizer.eos_token_id)], [*learnt, 1]
    return Turns(ids, learnt, bool(names))


def require_calls(chat: list[dict[str, Any]], encoder: Encoder) -> None:
    """Raises BadRow where the template leaves out calls of the assistant: what would be learnt in
    their place is an empty turn."""
    missing = calls_left_out(chat, lambda c: encoder.render(c, asks=False))
    if missing:
        raise BadRow(
            f"field 'messages': the chat template leaves out {', '.join(sorted(missing))}, so what "
            "the assistant calls would not be learnt. Give the tokenizer a template that writes it"
        )


def turn_spans(chat: list[dict[str, Any]], text: str, encoder: Encoder) -> Spans:
    """Finds the span of each turn of the assistant in `text`, which is the whole chat. Raises
    BadRow.
    """
    spans: Spans = []
    for i, turn in enumerate(chat):
        if turn["role"] != "assistant":
            continue
        if i == 0:
            raise BadRow("field 'messages[0]': an answer that nothing stands before")
        before, after = encoder.render(chat[:i]), encoder.render(chat[: i + 1], asks=False)
        if not (after.startswith(before) and text.startswith(after)):
            raise BadRow(
                f"field 'messages[{i}]': the chat template writes this answer otherwise when it is "
                "asked for, or once more turns follow (as those do that drop earlier thoughts), so "
                "there is no telling which tokens to learn. Set data.turns='last', or give the "
                "tokenizer a template that has {% generation %} around what the assistant says"
            )
        if without_space(turn["content"]) not in without_space(after[len(before) :]):
            raise BadRow(
                f"field 'messages[{i}]': the chat template leaves out or changes some of this "
                "answer (thoughts, say), so it would not be learnt as it stands. Set "
                "data.turns='last', which takes the answer's text as it is"
            )
        eos, end = str(encoder.tokenizer.eos_token), len(after)
        if text.startswith(eos, end):  # some write a turn's end only once more turns follow
            end += len(eos)
        spans.append((len(before), end))
    return spans


def template_of(encoder: Encoder) -> str:
    settings = encoder.config.chat_template_kwargs
    return encoder.tokenizer.get_chat_template(
        settings.get("chat_template"), settings.get("tools")
    )  # fmt: skip


def generation_spans(chat: list[dict[str, Any]], encoder: Encoder) -> Spans:
    """Finds what the template itself says the assistant wrote. Raises BadRow."""
    given: Any = {**encoder.tokenizer.special_tokens_map, **encoder.config.chat_template_kwargs}
    given |= {"chat_template": template_of(encoder), "return_assistant_tokens_mask": True}
    render: Any = render_jinja_template  # annotated as if it returned the text alone
    try:
        [text], [spans] = render(conversations=[chat], **given)
    except TEMPLATE_ERRORS as error:
        raise BadRow(f"field 'messages': the chat template refuses the chat: {error}") from error
    if encoder.image_text is None:
        return list(spans)
    mark, written = encoder.image_text  # the spans are of the text with the marks
    more = len(written) - len(mark)
    return [
        (start + more * text.count(mark, 0, start), end + more * text.count(mark, 0, end))
        for start, end in spans
    ]


def tokens_of(
    text: str, spans: Spans, names: dict[int, str], encoder: Encoder, trim: bool
) -> tuple[list[int], list[int]]:
    """Ids, and 1 for those in `spans`. Raises BadRow where the pieces do not spell the whole.

    names: see Encoder.marked. trim: what a template writes behind a turn's last control token, a
    line break say, is not learnt.
    """
    bounds = [0, *chain.from_iterable(spans), len(text)]  # every second piece is learnt
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    parts = encode_pieces(pieces, names, encoder, literal=bool(names))
    learnt: list[int] = []
    for i, part in enumerate(parts):
        count = i % 2 * (turn_end(part, encoder) if trim else len(part))
        learnt += [1] * count + [0] * (len(part) - count)
    harmless = [piece.translate(dict.fromkeys(names, "x")) for piece in pieces]
    one_by_one = list(chain(*encode_pieces(harmless, {}, encoder, literal=bool(names))))
    whole = encoder.encode("".join(harmless), special=False)
    if one_by_one != whole and encoder.spell(one_by_one) != encoder.spell(whole):
        raise BadRow(
            "field 'messages': the turns of the chat, encoded one by one, are not what the whole "
            "chat is to this tokenizer. Set data.turns='last'"
        )
    ids = list(chain(*parts))
    encoder.require_known(ids, "messages")
    return ids, learnt


def encode_pieces(
    pieces: list[str], names: dict[int, str], encoder: Encoder, literal: bool
) -> list[list[int]]:
    if literal:
        return [encoder.in_pieces(piece, names) for piece in pieces]
    return [encoder.encode(piece, special=False) if piece else [] for piece in pieces]


def turn_end(ids: list[int], encoder: Encoder) -> int:
    """Returns how many of a turn's tokens are learnt: up to its last control token, if only white
    space follows on that; else all.
    """
    last = max((i for i, token in enumerate(ids) if token in encoder.control_ids), default=None)
    if last is None or encoder.spell(ids[last + 1 :]).strip():
        return len(ids)
    return last + 1
