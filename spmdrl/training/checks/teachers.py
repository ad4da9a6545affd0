"""Checks of who teaches: several teachers by data source, the policy itself, and their hints."""

from __future__ import annotations

from urllib.parse import urlsplit

from spmdrl.algo.losses import loss_of
from spmdrl.config import DataConfig, PpoConfig, TeacherEndpoint, TrainConfig, require
from spmdrl.distributed.placement import TEACHERS, is_frozen, training_roles
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.checks.common import check_reference_options
from spmdrl.training.checks.options import shown


def check_teachers(config: PpoConfig, hosted: bool) -> None:
    """Refuses teachers that nobody asks, that are none, and what does not go with several. hosted:
    the actor is another program's.
    """
    if config.algo.policy_teaches:
        check_policy_as_teacher(config)
    if not config.teachers:
        return
    algo = config.algo
    require(
        algo.distillation is not None or algo.kl_coef > 0,
        "teachers has no effect: nothing is learnt from them. Set algo.distillation, or "
        "algo.kl_coef with kl_in='reward' (docs/distillation.md)",
    )
    reasons = {
        "algo.distillation.teacher='policy' makes the policy the only teacher": algo.policy_teaches,
        "ref is another one, which would have no sequences; name it under '*'": (
            config.ref != TrainConfig()
        ),
        "a process reward model measures itself by one reference": config.prm is not None,
        f"algo.policy_loss={shown(algo.policy_loss)} compares with one reference": (
            loss_of(algo).pairs is not None
        ),
        "the actor is another program's": hosted,
    }
    for reason, is_so in reasons.items():
        require(not is_so, f"teachers: {reason}. Leave out one of them")
    for source, teacher in config.teachers.items():
        check_teacher_of_source(config, source, teacher)


def check_teacher_of_source(config: PpoConfig, source: str, teacher: object) -> None:
    """Raises ConfigError where an entry of `teachers` is no teacher."""
    where = f"teachers[{source!r}]"
    if isinstance(teacher, str):
        others = [key for key, each in config.teachers.items() if not isinstance(each, str)]
        require(
            teacher in others,
            f"{where}={teacher!r}: expected TrainConfig(model=...), TeacherEndpoint(...), or the "
            f"source that has the same teacher, one of {others}",
        )
        return
    if isinstance(teacher, TeacherEndpoint):
        check_endpoint_options(config, where, teacher)
        return
    assert isinstance(teacher, TrainConfig)
    require(
        teacher.model is not None and (teacher.model != config.model or bool(config.data.hint_key)),
        f"{where}.model={teacher.model!r}: set it to a teacher, another model than the run's",
    )
    name = f"{TEACHERS}{source}"
    require(teacher.lora is None, f"{name}.lora has no effect: the teacher is not trained")
    reason = "the teacher is not trained"
    check_reference_options(teacher, config.actor, reason=reason, role=name)


def check_endpoint_options(config: PpoConfig, where: str, endpoint: TeacherEndpoint) -> None:
    """Raises ConfigError for what can be known without asking the server."""
    url = urlsplit(endpoint.url)
    require(
        url.scheme in ("http", "https") and bool(url.netloc),
        f"{where}.url={endpoint.url!r}: expected the address of an API, as http://10.0.0.7:8000/v1",
    )
    require(bool(endpoint.model.strip()), f"{where}.model is empty: name the server's model")
    require(
        config.rollout.temperature == 1,
        f"{where}: a server says the log-probabilities of its model at temperature 1, and policies "
        f"are compared at rollout.temperature={config.rollout.temperature:g}: set that to 1, or "
        "have the teacher in the ranks",
    )


def check_policy_as_teacher(config: PpoConfig) -> None:
    """Refuses a policy that would teach itself nothing, or whose experts are not known."""
    require(
        config.data.hint_key is not None,
        "algo.distillation.teacher='policy': with the same prompt the policy teaches itself "
        "nothing. Set data.hint_key to a column that the teacher alone sees",
    )
    require(
        config.actor.router_replay is None,
        "algo.distillation.teacher='policy' with actor.router_replay: the rollout engine has sent "
        "no tokens of a prompt with a hint to experts. Leave out one of them, or use "
        "teacher='reference'",
    )


def check_hints(config: PpoConfig) -> None:
    """Refuses hints that no teacher sees, and those that have no place in its prompt."""
    data, algo, default = config.data, config.algo, DataConfig("")
    if data.hint_key is None:
        for name in ("hint_template", "max_hint_prompt_tokens"):
            require(
                getattr(data, name) == getattr(default, name),
                f"data.{name}={getattr(data, name)!r} has no effect without data.hint_key",
            )
        return
    where = f"data.hint_key={data.hint_key!r}"
    require(
        algo.distillation is not None or algo.kl_coef > 0,
        f"{where} has no effect: there is no teacher to see it. Set algo.distillation, or "
        "algo.kl_coef with kl_in='reward' (docs/distillation.md)",
    )
    for place in ("{prompt}", "{hint}"):
        require(
            place in data.hint_template,
            f"data.hint_template has no {place}: it is what the teacher is asked, with {{prompt}} "
            "and {hint} where these belong",
        )
    reasons = {
        "agents write their prompts themselves, in which a hint has no place": (
            config.agent is not None
        ),
        "a process reward model measures itself by the reference, which must see what it sees": (
            config.prm is not None
        ),
        f"algo.policy_loss={shown(algo.policy_loss)} compares with the reference's probability of "
        "whole answers, which must see the policy's prompt": loss_of(algo).pairs is not None,
    }
    for reason, is_so in reasons.items():
        require(not is_so, f"{where}: {reason}. Leave out one of them")
    asked = {"ref": config.ref} | training_roles(config)
    for name in [name for name in asked if is_frozen(name)]:
        check_length(name, asked[name].model or config.model, config)


def check_length(name: str, model: str, config: PpoConfig) -> None:
    """Refuses prompts with hints that are longer than the teacher reads."""
    data = config.data
    limit = getattr(load_hf_config(model).get_text_config(), "max_position_embeddings", None)
    longest = data.max_hint_prompt_tokens + config.rollout.max_tokens
    require(
        limit is None or longest <= limit,
        f"data.max_hint_prompt_tokens={data.max_hint_prompt_tokens} + rollout.max_tokens="
        f"{config.rollout.max_tokens} = {longest} tokens, but max_position_embeddings of the "
        f"teacher, {name}, is {limit}",
    )
