"""Checks before anything is built whether the config of a run of reinforcement learning is sound.
What it will need: describe.py.

`check` raises ConfigError with the value, the place and the remedy.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from transformers import PreTrainedConfig

from spmdrl.algo.advantages import asked_keys_of
from spmdrl.config import ConfigError, KeepSamplesConfig, PpoConfig, TrainConfig, require
from spmdrl.config.words import counted, verb
from spmdrl.distributed.placement import (
    Placement,
    is_frozen,
    place,
    reference_is_base,
    show_ranks,
    training_roles,
)
from spmdrl.distributed.topology import resolve_degrees, train_degrees
from spmdrl.engines.megatron.layout import divisors
from spmdrl.hub.hf_folder import has_tower, load_hf_config
from spmdrl.hub.model_files import check_eos, check_model_files
from spmdrl.hub.remote_code import allow_code
from spmdrl.rewards.reward_model import check_reward_model, train_config
from spmdrl.rewards.runner import asks_model, built_ins_of, rewards_of, runs_programs
from spmdrl.rollout.build import ENGINES, check_engine
from spmdrl.training.checks.adapters import check_adapters, warnings_of_adapters
from spmdrl.training.checks.agents import check_agents, warnings_of_agents
from spmdrl.training.checks.algorithms import check_algo, takes_other_samplers
from spmdrl.training.checks.common import (
    check_checkpoint,
    check_megatron,
    check_other_model,
    check_pixels,
    check_places,
    check_reference_options,
    check_sharing,
    check_training_role,
    check_vision,
    check_world,
    keep_towers,
    warnings_of_run,
)
from spmdrl.training.checks.distillation import check_distillation, check_tokenizers
from spmdrl.training.checks.fp8 import check_fp8
from spmdrl.training.checks.hosts import warnings_of_hosts
from spmdrl.training.checks.judge import check_judge, check_judge_files
from spmdrl.training.checks.length import check_length, warnings_of_length
from spmdrl.training.checks.mismatch import check_explain_mismatch
from spmdrl.training.checks.ranges import check_bounds
from spmdrl.training.checks.routers import check_router_aux_loss, check_router_replay
from spmdrl.training.checks.sampler import check_sampler
from spmdrl.training.checks.sampling_mask import check_sampling_mask
from spmdrl.training.checks.strict import check_strict, check_strict_model
from spmdrl.training.checks.turns import check_reply_images, check_turns
from spmdrl.training.logs.profiler import check_profile
from spmdrl.training.logs.trackers import check_trackers
from spmdrl.training.run_length import known_updates

logger = logging.getLogger(__name__)


def check(config: PpoConfig, world: int, hosted: bool = False, installed: bool = True) -> None:
    """Raises ConfigError, and warns; needs no process group, no weights and no data.

    hosted: the actor's layout stands already, in another program. installed: False for a run on
    other machines, whose rollout engines need not be installed on this one.
    """
    if installed:
        check_installed(config)
    require_sound(config, world, hosted)
    check_files(config, load_hf_config(config.model), hosted)
    for warning in [*warnings_of(config), *([] if hosted else warnings_of_hosts(config, world))]:
        logger.warning(warning)


def require_sound(config: PpoConfig, world: int, hosted: bool = False) -> None:
    """Raises ConfigError where `check` does, but for what stands in the files of weights, and for
    engines that are not installed.

    hosted: the actor's layout stands already, in another program.
    """
    data, rollout, algo = config.data, config.rollout, config.algo
    check_bounds(config)
    check_world(world)
    check_places(config)
    require(
        rollout.min_tokens <= rollout.max_tokens,
        f"rollout.min_tokens={rollout.min_tokens} is above max_tokens={rollout.max_tokens}",
    )
    check_algo(config)
    check_trackers(config)
    check_profile(config, world)
    check_checkpoint(config, "reward/mean")
    check_length(config)
    check_sampler(data)
    check_read(config)
    check_evaluation(config)
    check_turns(config)
    check_per_turn(config)
    check_keys(config)
    check_sandbox(config)
    require(
        not hosted or config.keep_samples == KeepSamplesConfig(),
        "keep_samples: another program has the actor, and saves no checkpoint that a step could be "
        "replayed from: leave keep_samples out",
    )
    require(
        data.prompts_per_step % algo.mini_batches == 0,
        f"data.prompts_per_step={data.prompts_per_step} does not divide into "
        f"algo.mini_batches={algo.mini_batches}; counts that do: {divisors(data.prompts_per_step)}",
    )
    check_roles(config, world)
    if config.trust_remote_code:
        roles = training_roles(config).values()
        scorers = [s.model for s in (config.reward_model, config.judge) if s is not None]
        others = [role.model or config.model for role in roles]
        for model in dict.fromkeys([config.model, *others, *scorers]):
            allow_code(model)
    keep_towers(
        config, scorer_of(config), *(role.model for role in training_roles(config).values())
    )
    hf = load_hf_config(config.model)
    check_model(hf, config)
    check_strict(config, hf, hosted)
    check_router_replay(config, hf, hosted)
    check_sampling_mask(config)
    check_distillation(config, hf, hosted)
    placement = place(config, world)
    check_explain_mismatch(config, hf, placement, hosted)
    check_scores_of_model(config, len(placement.roles["reward"]))
    check_judge(config, placement.roles["rollout"], placement.roles["reward"], placement.training)
    check_agents(config, len(placement.roles["rollout"]) // config.rollout.tensor_parallel)
    require(
        config.agent is None or placement.roles["reward"] == placement.roles["rollout"],
        "agent: rewards are given where trajectories are made, leave 'reward' out of placement",
    )
    for name, role in training_roles(config).items():
        if role.engine == "megatron" and not (hosted and name == "actor"):
            check_megatron(name, role, role.model or config.model, len(placement.roles[name]))
        strict = config.strict and name == "actor"
        check_sharing(name, role, role.model or config.model, strict)
        check_router_aux_loss(name, role, role.model or config.model)
        check_fp8(name, role, role.model or config.model)
    check_adapters(config, placement, hf)
    if "ref" in training_roles(config):
        check_reference(config, placement)
    if config.algo.ref_model_sync_steps > 0:
        check_sync_of_reference(config, placement, hosted)


def check_installed(config: PpoConfig) -> None:
    """Raises ConfigError where the library of a rollout engine that the run builds is missing."""
    for name in engine_names(config):
        ENGINES[name].check_installed()


def engine_names(config: PpoConfig) -> list[str]:
    """Returns the engines of the run, the judge's after that which samples; each once."""
    judge = [] if config.judge is None else [config.judge.engine or config.rollout.engine]
    return list(dict.fromkeys([config.rollout.engine, *judge]))


def check_files(config: PpoConfig, hf: PreTrainedConfig, hosted: bool) -> None:
    """Checks what the files of the models say; hosted: the weights are another program's. Raises
    ConfigError.
    """
    check_judge_files(config)
    check_model_files("model", config.model, hf, has_weights=not hosted)
    check_eos(config.model, config.rollout)
    for name, role in training_roles(config).items():
        if role.model is not None:
            other = load_hf_config(role.model)
            check_model_files(f"{name}.model", role.model, other, is_policy=name != "critic")
            if is_frozen(name) and (name != "ref" or config.algo.distillation is not None):
                check_tokenizers(config.model, role.model, name)


def warnings_of(config: PpoConfig) -> list[str]:
    """Returns warnings about what may be meant, and mostly is not."""
    return [
        *warnings_of_length(config), *warnings_of_agents(config), *warnings_of_run(config),
        *warnings_of_kept(config), *warnings_of_adapters(config),
    ]  # fmt: skip


def warnings_of_kept(config: PpoConfig) -> list[str]:
    """Warns where most steps' samples are kept for nothing."""
    last, saved = config.keep_samples.last, config.checkpoint.every_steps
    if not last or 0 < saved <= last:
        return []
    return [
        f"keep_samples.last={last}: a replay begins at a checkpoint, and checkpoint.every_steps="
        f"{saved}, so that most steps will lack the samples of steps before them: set "
        "keep_samples.last to every_steps or more"
    ]


def check_read(config: PpoConfig) -> None:
    """Raises ConfigError for what nobody would read."""
    data = config.data
    require(
        config.ref.model is None or "ref" in training_roles(config),
        f"ref.model={config.ref.model!r} has no effect: algo.kl_coef=0 and there is neither "
        "algo.distillation, nor a prm, nor a loss that reads it, or teachers take its place: the "
        "run has no reference",
    )
    require(
        data.eval is not None or data.max_eval_prompts is None,
        f"data.max_eval_prompts={data.max_eval_prompts} has no effect without data.eval",
    )


def check_reference(config: PpoConfig, placement: Placement) -> None:
    """Refuses options of the reference that change nothing; it may be given the actor's whole
    config.
    """
    if not reference_is_base(config, placement):
        check_reference_options(config.ref, config.actor)
        return
    names = [field.name for field in dataclasses.fields(TrainConfig) if field.name != "model"]
    check_reference_options(
        config.ref, config.actor, names,
        "with actor.lora the reference is the actor's base with its adapter off, computed as "
        "the actor is. Leave it out, or place ref on other ranks, where it is loaded by itself",
    )  # fmt: skip


def check_sync_of_reference(config: PpoConfig, placement: Placement, hosted: bool) -> None:
    """Raises ConfigError where the reference cannot follow the policy."""
    where = f"algo.ref_model_sync_steps={config.algo.ref_model_sync_steps}"
    layout = ("engine", "pipeline_parallel", "virtual_pipeline", "expert_parallel")
    unlike = [name for name in layout if getattr(config.ref, name) != getattr(config.actor, name)]
    require("ref" in training_roles(config), f"{where} has no effect: the run has no reference")
    reasons = {
        "another program has the actor, and saves no reference": hosted,
        f"ref.model={config.ref.model!r} is a model of its own, a teacher that stays as it is": (
            config.ref.model not in (None, config.model)
        ),
        "prm rewards by what it has learnt since the reference": config.prm is not None,
        "with actor.lora the reference is the actor's base": config.actor.lora is not None,
        "the reference has no MTP layers, which the actor trains": (
            config.actor.mtp_loss_scaling_factor > 0
        ),
        f"ref.engine='megatron' keeps its weights in {config.ref.dtype}, which would round the "
        "mixture to the one or the other: set ref.dtype='float32'": (
            config.ref.engine == "megatron" and config.ref.dtype != "float32"
        ),
        f"ref and actor differ in {', '.join(unlike)}, so that their weights come in different "
        "orders": bool(unlike),
        f"ref is on ranks {show_ranks(placement.roles.get('ref', ()))} and the actor on "
        f"{show_ranks(placement.roles['actor'])}, and only on the same ranks it is given weights": (
            placement.roles.get("ref") != placement.roles["actor"]
        ),
    }
    for reason, is_so in reasons.items():
        require(not is_so, f"{where}: {reason}. Else leave ref_model_sync_steps out")


def check_evaluation(config: PpoConfig) -> None:
    """Raises ConfigError where held-out prompts cannot be answered as the eval_... fields say."""
    n, temperature = config.eval_samples, config.eval_temperature
    require(
        n == 1 or temperature > 0,
        f"eval_samples={n} with eval_temperature={temperature:g} asks {n} times for the greedy "
        "answer: set eval_temperature, e.g. to 1.0, or leave eval_samples at 1",
    )
    engine = ENGINES[config.rollout.engine]
    require(
        not 0 < temperature < engine.least_temperature,
        f"eval_temperature={temperature:g}: {engine.title} would raise it to "
        f"{engine.least_temperature}; use 0 (greedy) or more",
    )
    for name, usual in (("eval_top_p", 1.0), ("eval_top_k", 0), ("eval_min_p", 0.0)):
        require(
            temperature > 0 or getattr(config, name) == usual,
            f"{name}={getattr(config, name)} has no effect on greedy answers: set eval_temperature",
        )
    penalty = config.eval_repetition_penalty
    require(
        config.data.eval is not None or (n == 1 and temperature == 0 and penalty == 1),
        f"eval_samples={n}, eval_temperature={temperature:g}, eval_repetition_penalty={penalty:g} "
        "have no effect without data.eval",
    )


def check_per_turn(config: PpoConfig) -> None:
    """Raises ConfigError for a reward that knows nothing of turns."""
    found = built_ins_of(rewards_of(config)) if config.rewards.per_turn else []
    found = [name for name in found if name != "agent"]  # which returns what the agent says
    require(
        not found,
        f"rewards.per_turn=True: the built-in reward {', '.join(map(repr, found))} scores a sample "
        "as a whole. Call it in a function of your own that returns "
        "{'score': ..., 'turns': [a number for each turn]}, or leave per_turn False",
    )


def check_keys(config: PpoConfig) -> None:
    """Raises ConfigError for rewards of one number where the algorithm reads others. Of several
    rewards some may be of held-out prompts, of which nothing else is read.
    """
    missing = [key for key in asked_keys_of(config.algo) if key != "score"]
    count = len(config.reward) if isinstance(config.reward, Mapping) else 1
    names = built_ins_of(rewards_of(config)) if missing else []
    single = [name for name in names if name in ("model", "judge")]
    named = " or ".join(repr(name) for name in dict.fromkeys(single))
    require(
        len(single) < max(count, 1),
        f"the reward {named} is one number, 'score', and "
        "algo.advantage_args reward_keys or algo.dynamic_sampling_metric asks for "
        f"{missing}: write a function with a parameter {(single or [''])[0]}_score that returns "
        "them, too",
    )


def check_sandbox(config: PpoConfig) -> None:
    """Raises ConfigError for remote sandboxes that nothing would use."""
    require(
        config.sandbox is None or runs_programs(config.reward) or "python" in config.tools,
        'sandbox has no effect: neither a reward "code" nor a tool "python" runs programs',
    )


def check_scores_of_model(config: PpoConfig, num_ranks: int) -> None:
    """Raises ConfigError for a reward model that cannot be asked, or that nobody asks."""
    asked, given = asks_model(rewards_of(config)), config.reward_model
    require(
        given is not None or not asked,
        "the reward asks for model_score, but there is no reward_model: set it, "
        "e.g. reward_model=RewardModelConfig('Skywork/Skywork-Reward-V2-Qwen3-0.6B')",
    )
    if given is None:
        return
    require(
        asked,
        "reward_model has no effect: no reward function has a parameter model_score. "
        'reward="model" is its score and nothing else',
    )
    require(given.model != "", "reward_model.model is not set: which model is to be asked?")
    check_reward_model(given)
    try:
        resolve_degrees(train_degrees(train_config(given)), num_ranks)
    except ConfigError as error:
        raise ConfigError(f"reward_model.fsdp on the ranks of reward: {error}") from error


def scorer_of(config: PpoConfig) -> str | None:
    """Returns the model that scores answers, if one does."""
    return config.reward_model.model if config.reward_model is not None else None


def check_held_out(config: PpoConfig, num_scorers: int, world: int) -> None:
    """Checks the config of an evaluation by itself, as `check` does that of a run. num_scorers: the
    first of the `world` ranks, which score.
    """
    check_installed(config)
    check_bounds(config)
    check_places(config)
    check_evaluation(config)
    check_turns(config)
    check_per_turn(config)
    check_sandbox(config)
    check_scores_of_model(config, num_scorers)
    check_agents(config, world // config.rollout.tensor_parallel)
    require(
        config.agent is None or num_scorers == world,
        f"rewards.max_concurrent={config.rewards.max_concurrent} is below the {world} ranks: "
        "trajectories of agents are scored where they are made, so take fewer ranks",
    )
    if config.trust_remote_code:
        for model in [config.model, *([config.judge.model] if config.judge else [])]:
            allow_code(model)
    keep_towers(config, scorer_of(config))
    hf = load_hf_config(config.model)
    check_model(hf, config)
    if config.strict:
        check_strict_model(hf, config.rollout.engine)
    check_judge(config, tuple(range(world)), tuple(range(num_scorers)))
    check_judge_files(config)
    # the weights of a checkpoint are exported first
    check_model_files("model", config.model, hf, has_weights=config.resume == "never")
    check_eos(config.model, config.rollout)


def check_roles(config: PpoConfig, world: int) -> None:
    require(
        config.actor.model is None,
        f"actor.model={config.actor.model!r}: the actor trains the run's model, set `model`; "
        "only critic and ref may start from another one",
    )
    tp = config.rollout.tensor_parallel
    ENGINES[config.rollout.engine].check(config.rollout)
    placement = place(config, world)
    here = placement.roles["rollout"]
    try:
        engines = resolve_degrees({"dp": -1, "tp": tp}, len(here))["dp"]
    except ConfigError as error:
        raise ConfigError(
            f"rollout.tensor_parallel on ranks {show_ranks(here)}: {error}"
        ) from error
    samples = config.data.prompts_per_step * config.rollout.n
    require(
        samples >= engines,
        f"data.prompts_per_step={config.data.prompts_per_step} x rollout.n={config.rollout.n} = "
        f"{counted(samples, 'sample')} {verb(samples, 'are')} fewer than the {engines} rollout "
        f"engines ({len(here)} ranks / "
        f"tensor_parallel={tp}): some would have nothing to do",
    )
    for name, role in training_roles(config).items():
        check_training_role(name, role, placement.roles[name], known_updates(config))
    check_schedule(config, placement)


def check_schedule(config: PpoConfig, placement: Placement) -> None:
    """Checks what over-sampling and sampling ahead ask of the rest."""
    rollout, algo = config.rollout, config.algo
    both = sorted(set(placement.sampling) & set(placement.training))
    require(
        config.async_steps == 0 or not both,
        f"async_steps={config.async_steps} samples while it trains, so no rank can do both: ranks "
        f"{show_ranks(tuple(both))} are to. With 8 ranks e.g. placement={{'actor': '0-3', "
        "'rollout': '4-7'}",
    )
    for name, is_on in (("algo.dynamic_sampling", algo.dynamic_sampling > 0),
                        ("rollout.greedy_baseline", rollout.greedy_baseline),
                        ("async_steps", config.async_steps > 0)):  # fmt: skip
        require(
            rollout.oversample == 1 or not is_on,
            f"rollout.oversample={rollout.oversample} does not go with {name}: both decide what "
            "a step asks and what weights answer; choose one",
        )
    require(
        rollout.oversample == 1 or placement.roles["reward"] == placement.roles["rollout"],
        f"rollout.oversample={rollout.oversample} keeps answers where they were made: leave "
        "'reward' out of placement",
    )
    stale = {"async_steps": config.async_steps, "rollout.oversample": rollout.oversample - 1}
    for name, value in stale.items():
        require(
            not value or takes_other_samplers(algo),
            f"{name} trains on tokens of older weights: set algo.correction=CorrectionConfig("
            "level='token') to weigh for it, or CorrectionConfig(bypass=True), which makes the "
            "loss's ratio that to the policy that sampled",
        )


def check_model(hf: PreTrainedConfig, config: PpoConfig) -> None:
    text, tp = hf.get_text_config(), config.rollout.tensor_parallel
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    limit = getattr(text, "max_position_embeddings", None)
    require(
        limit is None or longest <= limit,
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_tokens="
        f"{config.rollout.max_tokens} = {longest} tokens, but the model's "
        f"max_position_embeddings is {limit}",
    )
    wanted = {"strict": config.strict, "rollout.quantization": config.rollout.quantization,
              "weights.lora='adapter'": config.weights.lora == "adapter"}  # fmt: skip
    check_vision(hf, training_roles(config), wanted)
    check_reply_images(hf, config)
    check_pixels(hf, config.data)
    require("" not in config.rollout.stop, "rollout.stop has an empty string: every answer has it")
    unknown = [t for t in config.rollout.stop_token_ids if t >= text.vocab_size]
    require(
        not unknown,
        f"rollout.stop_token_ids: the model has {text.vocab_size} tokens, but not {unknown}",
    )
    engine = ENGINES[config.rollout.engine]
    require(
        engine.leaves_towers or not has_tower(config.model),
        f"rollout.engine={engine.name!r}: {config.model} is a language model in files with a tower "
        f"for images or sounds, which {engine.title} would build too; use 'vllm' or 'hf'",
    )
    check_engine(config.model, hf, config.rollout, config.strict)
    for name, role in training_roles(config).items():
        if role.model is not None:
            check_other_model(name, role.model, config.model, hf)
    heads = text.num_attention_heads
    require(
        heads % tp == 0,
        f"rollout.tensor_parallel={tp} does not divide the model's {heads} attention heads; "
        f"use one of {divisors(heads)}",
    )
