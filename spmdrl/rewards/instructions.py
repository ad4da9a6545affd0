"""The reward of IFEval: whether a response keeps what its prompt demands of its form.

Zhou et al. 2023, arXiv 2311.07911. The checks are those of the package if-verifiable, which is
Google's code as a package; they are imported in reward workers alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from spmdrl.config import ConfigError

# instructions that count sentences or words with data that NLTK downloads
WITH_NLTK_DATA = ("length_constraints:number_sentences", "change_case:capital_word_frequency")


def ifeval(response: str, ground_truth: Any) -> dict[str, float]:
    """Returns 1.0 as the score where the response follows every instruction of its prompt.

    ground_truth: {"prompt": ..., "instruction_id_list": [names], "kwargs": [a mapping each]}, as in
    the rows of google/IFEval. Beside the score: `loose`, the same without the response's first or
    last line or its asterisks, and the fractions of instructions, `instructions` and
    `instructions_loose`. Raises ValueError for an instruction that is not known.
    """
    from spmdrl.rewards.ifeval_checks import INSTRUCTION_DICT, evaluate_instructions

    read_instructions(ground_truth)
    names = ground_truth["instruction_id_list"]
    unknown = set(names) - set(INSTRUCTION_DICT)
    if unknown:
        raise ValueError(f"ground_truth names instructions that are not known: {sorted(unknown)}")
    _, scores = evaluate_instructions(
        response, names, ground_truth["kwargs"], ground_truth["prompt"], INSTRUCTION_DICT
    )
    return {
        "score": scores.binary_strict, "loose": scores.binary_loose,
        "instructions": scores.partial_strict, "instructions_loose": scores.partial_loose,
    }  # fmt: skip


def check_installed() -> None:
    """Raises ConfigError where the package of the checks is not installed."""
    if find_spec("if_verifiable") is None:
        raise ConfigError(
            "the reward 'ifeval' needs the package if-verifiable, which is not installed here: "
            "pip install 'spmdrl[benchmarks]'"
        )


def read_instructions(ground_truth: Any) -> None:
    """Raises ValueError for a ground truth of another form, and where NLTK's data are missing that
    one of its instructions needs.
    """
    names, kwargs = ground_truth["instruction_id_list"], ground_truth["kwargs"]
    if not names or len(names) != len(kwargs):
        raise ValueError(
            f"{len(names)} instructions and {len(kwargs)} kwargs; expected as many, at least 1"
        )
    needs = [name for name in names if name in WITH_NLTK_DATA]
    if needs and not has_nltk_data():
        raise ValueError(
            f"{needs[0]} counts with NLTK's data punkt_tab, which is not here: "
            "python -m nltk.downloader punkt_tab; NLTK_DATA names another folder for it"
        )


def has_nltk_data() -> bool:
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        return False
    return True
