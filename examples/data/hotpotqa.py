"""HotpotQA: 90,447 questions that need two articles of Wikipedia; for policies that search.

    python examples/data/hotpotqa.py --out runs/hotpotqa

Source: hotpotqa/hotpot_qa, config distractor (CC-BY-SA-4.0; Yang et al. 2018, arXiv 1809.09600).
Beside train.parquet and validation.parquet it writes passages.jsonl, first paragraphs of articles,
which the tool `search` of a config looks into: docs/data.md has one, with a reward.
"""

import json
from pathlib import Path

from preparation import Row, main, verl_row

INSTRUCTION = (
    "Search for what you do not know. Write the final answer between <answer> and </answer>."
)
passages: dict[str, str] = {}


def convert(row: Row) -> Row:
    context = row["context"]
    for title, sentences in zip(context["title"], context["sentences"], strict=True):
        passages[title] = "".join(sentences)
    facts = sorted(set(row["supporting_facts"]["title"]))
    extra = {"id": row["id"], "type": row["type"], "level": row["level"], "articles": facts}
    return verl_row("hotpotqa", f"{row['question'].strip()} {INSTRUCTION}", row["answer"], **extra)


if __name__ == "__main__":
    columns = ("id", "question", "answer", "type", "level", "supporting_facts", "context")
    out = main(
        __doc__, "hotpotqa/hotpot_qa", "distractor", ("train", "validation"), columns, convert
    )
    with Path(out, "passages.jsonl").open("w", encoding="utf-8") as file:
        for title, text in passages.items():
            file.write(json.dumps({"title": title, "text": text}, ensure_ascii=False) + "\n")
    print(f"{out}/passages.jsonl: {len(passages)} passages")
