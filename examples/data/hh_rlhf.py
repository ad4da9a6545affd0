"""hh-rlhf: pairs of conversations, of which people preferred one; for reward models.

    python examples/data/hh_rlhf.py --out runs/hh_rlhf
    python -m spmdrl.reward_model --config cfg.py --data.train runs/hh_rlhf/train.parquet ...

Source: Anthropic/hh-rlhf (MIT licence; Bai et al. 2022, arXiv 2204.05862), whose columns `chosen`
and `rejected` are texts with "Human:" and "Assistant:". They become chat lists, in TRL's schema:
the turns that both share are the prompt. Pairs that do not end in an answer of the assistant, or
that say the same, are left out. Unpack files *.jsonl.gz first.
"""

import re

from preparation import Row, main

ROLES = {"Human": "user", "Assistant": "assistant"}


def chat_of(text: str) -> list[dict[str, str]]:
    """Returns the turns of "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    _, *parts = re.split(r"(?:^|\n\n)(Human|Assistant): ?", text)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": ROLES[who], "content": said.strip()} for who, said in turns]


def convert(row: Row) -> Row | None:
    chosen, rejected = chat_of(row["chosen"]), chat_of(row["rejected"])
    if not chosen or not rejected:
        raise ValueError("expected texts with turns 'Human: ...' and 'Assistant: ...'")
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    ends = [said[-1]["role"] == "assistant" and said[-1]["content"] for said in (chosen, rejected)]
    if chosen == rejected or not prompt or not all(ends):
        return None
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


if __name__ == "__main__":
    main(
        __doc__, "Anthropic/hh-rlhf", "default", ("train", "test"), ("chosen", "rejected"), convert
    )
