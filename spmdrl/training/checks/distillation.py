"""Checks of distillation over a teacher's distribution: what it goes with, and that both models
mean the same by a token.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from spmdrl.config import DistillationConfig, PpoConfig, SftConfig, TrainConfig, require
from spmdrl.hub.hf_folder import load_tokenizer
from spmdrl.training.checks.common import check_other_model, check_reference_options
from spmdrl.training.checks.teachers import check_hints, check_teachers


def check_distillation(config: PpoConfig, hf: PreTrainedConfig, hosted: bool = False) -> None:
    """Raises ConfigError where algo.distillation, or the hints of a teacher, do not go with the
    rest.

    hf: the config of the model; hosted: the actor is another program's.
    """
    check_teachers(config, hosted)
    check_hints(config)
    distillation = config.algo.distillation
    if distillation is None:
        return
    if distillation.teacher == "policy" or config.teachers:
        check_options("algo.distillation", distillation, hf)
    else:
        hinted = config.data.hint_key is not None
        check_teacher("algo.distillation", distillation, config.ref, config.model, hf, hinted)
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


def check_sft_distillation(config: SftConfig, hf: PreTrainedConfig) -> None:
    """Raises ConfigError where distillation of fine-tuning does not go with the rest. hf: the
    config of the model.
    """
    distillation, ref, coef = config.distillation, config.ref, config.cross_entropy_coef
    if distillation is None:
        require(
            ref == TrainConfig(),
            "ref has no effect without distillation, of which it is the teacher: set "
            "distillation=DistillationConfig(), or leave ref out",
        )
        require(
            coef == 1,
            f"cross_entropy_coef={coef:g} has no effect without distillation, beside which it "
            "weighs the cross-entropy: leave it out",
        )
        return
    require(
        distillation.teacher == "reference",
        "distillation.teacher='policy': on given answers the teacher is ref.model; a teacher with "
        "hints is of spmdrl.ppo",
    )
    check_teacher("distillation", distillation, ref, config.model, hf)
    assert ref.model is not None
    require(
        ref.lora is None, "ref.lora has no effect: the teacher is not trained. Leave it out"
    )  # fmt: skip
    check_reference_options(ref, config.actor, reason="the teacher is not trained")
    check_other_model("ref", ref.model, config.model, hf)


def check_teacher(
    field: str, distillation: DistillationConfig, ref: TrainConfig, model: str,
    hf: PreTrainedConfig, hinted: bool = False,
) -> None:  # fmt: skip
    """Checks the options of `field`, and that there is a teacher. hf: the config of `model`;
    hinted: the teacher sees hints, so that it may be the model.
    """
    check_options(field, distillation, hf)
    require(
        hinted or ref.model not in (None, model),
        f"{field} learns from ref.model, which is {ref.model!r}: set it to a teacher, another "
        "model than the run's",
    )


def check_options(field: str, distillation: DistillationConfig, hf: PreTrainedConfig) -> None:
    """hf: the config of the model."""
    loss, beta = distillation.loss, distillation.beta
    vocab = hf.get_text_config().vocab_size
    require(
        distillation.topk <= vocab,
        f"{field}.topk={distillation.topk}, but the model has {vocab} tokens",
    )
    require(
        loss == "jsd" or beta == DistillationConfig().beta,
        f"{field}.beta={beta} has no effect on loss={loss!r}: 'jsd' reads it",
    )
    require(
        beta < 1,
        f"{field}.beta={beta}: the divergence to the mixture is then 0 for every "
        "student; what it comes near, divided by 1 - beta, is loss='reverse_kl'",
    )
    require(
        distillation.tail or loss == "forward_kl",
        f"{field}.tail=False with loss={loss!r}: a student that says none of the "
        "teacher's tokens would have the least loss. Leave tail True, or use 'forward_kl'",
    )


def check_tokenizers(model: str, teacher: str, name: str = "ref") -> None:
    """Raises ConfigError where the teacher, the model of role `name`, has another tokenizer than
    the model.
    """
    require_same_tokens(load_tokenizer(model), load_tokenizer(teacher), f"{name}.model={teacher!r}")


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
            f"{teacher} has another tokenizer than the model: {len(different)} ids "
            f"differ, id {first} is {theirs.get(first)!r} there and {ours.get(first)!r} here. "
            "Distillation compares distributions over the same tokens: choose a teacher of the "
            "model's family",
        )
