"""Checks of distillation over a teacher's distribution: what it goes with, and that both models
mean the same by a token.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from spmdrl.config import DistillationConfig, PpoConfig, require
from spmdrl.hub.hf_folder import load_tokenizer


def check_distillation(config: PpoConfig, hf: PreTrainedConfig, hosted: bool = False) -> None:
    """Raises ConfigError where algo.distillation does not go with the rest.

    hf: the config of the model; hosted: the actor is another program's.
    """
    distillation = config.algo.distillation
    if distillation is None:
        return
    check_options(distillation)
    require(
        config.ref.model not in (None, config.model),
        f"algo.distillation learns from ref.model, which is {config.ref.model!r}: set it to a "
        "teacher, another model than the run's",
    )
    require(
        config.prm is None,
        "algo.distillation makes the reference a teacher, and a process reward model measures "
        "itself by a reference that it starts from: leave out one of them",
    )
    require(
        not config.strict,
        "algo.distillation with strict=True: the log-probabilities of the teacher's tokens have no "
        "batch-invariant form; leave out one of them",
    )
    require(
        not hosted,
        "algo.distillation: an actor of another program is not asked for the teacher's tokens; "
        "use algo.kl_in='reward' (docs/distillation.md)",
    )
    vocab = hf.get_text_config().vocab_size
    require(
        distillation.topk <= vocab,
        f"algo.distillation.topk={distillation.topk}, but the model has {vocab} tokens",
    )


def check_options(distillation: DistillationConfig) -> None:
    loss, beta = distillation.loss, distillation.beta
    require(
        loss == "jsd" or beta == DistillationConfig().beta,
        f"algo.distillation.beta={beta} has no effect on loss={loss!r}: 'jsd' reads it",
    )
    require(
        beta < 1,
        f"algo.distillation.beta={beta}: the divergence to the mixture is then 0 for every "
        "student; what it comes near, divided by 1 - beta, is loss='reverse_kl'",
    )
    require(
        distillation.tail or loss == "forward_kl",
        f"algo.distillation.tail=False with loss={loss!r}: a student that says none of the "
        "teacher's tokens would have the least loss. Leave tail True, or use 'forward_kl'",
    )


def check_tokenizers(config: PpoConfig) -> None:
    """Raises ConfigError where the teacher of algo.distillation has another tokenizer."""
    if config.algo.distillation is None or config.ref.model is None:
        return
    require_same_tokens(
        load_tokenizer(config.model), load_tokenizer(config.ref.model), config.ref.model
    )


def require_same_tokens(
    own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, teacher: str
) -> None:
    """Raises ConfigError, with the first difference, where an id stands for different tokens."""
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (own, other))
    different = [i for i in sorted({*ours, *theirs}) if ours.get(i) != theirs.get(i)]
    if different:
        first = different[0]
        require(
            False,
            f"ref.model={teacher!r} has another tokenizer than the model: {len(different)} ids "
            f"differ, id {first} is {theirs.get(first)!r} there and {ours.get(first)!r} here. "
            "Distillation compares distributions over the same tokens: choose a teacher of the "
            "model's family",
        )
