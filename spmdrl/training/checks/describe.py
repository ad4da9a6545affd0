"""Describes what a run will do and need: batch arithmetic, who is where, what the names mean,
memory of a rank.
"""

from __future__ import annotations

from spmdrl.algo.advantages import estimator_of
from spmdrl.algo.losses import aggregation_of
from spmdrl.algo.objectives import needs_old_logprobs, weighs_pairs
from spmdrl.config import (
    JudgeConfig,
    PpoConfig,
    SftConfig,
    SupervisedConfig,
    TeacherEndpoint,
    TrainConfig,
)
from spmdrl.config.words import counted, verb
from spmdrl.distributed.placement import (
    Ranks,
    place,
    reference_is_base,
    show_ranks,
    training_roles,
)
from spmdrl.distributed.topology import resolve_degrees, train_degrees
from spmdrl.engines.stored_dtype import stored_dtype
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.checks.host_memory import host_lines
from spmdrl.training.checks.memory_fit import rl_planner, room_lines, supervised_planner
from spmdrl.training.checks.memory_plan import (
    Array,
    memory_plan,
    sharing_ranks,
    supervised_plan,
)
from spmdrl.training.checks.options import shown
from spmdrl.training.run_length import updates_per_run

REMEDY = "lower actor.micro_batch_tokens, or start fewer ranks"


def describe(
    config: PpoConfig, world: int, num_prompts: int, prompt_tokens: Array | None = None,
    gpu_gib: float | None = None, image_tokens: float = 0.0,
) -> str:  # fmt: skip
    """Batch arithmetic, placement, parameters and memory, as text.

    prompt_tokens: (num_prompts,) lengths; None: all are as long as they may be. gpu_gib: of each
    GPU; None: the ranks are on CPUs. image_tokens: of a prompt, those of its images, as a mean.
    """
    d, r, a = config.data, config.rollout, config.algo
    samples = d.prompts_per_step * r.n
    longest = d.max_prompt_tokens + r.max_tokens
    sharing = sharing_ranks(config.actor)
    actors = len(place(config, world).roles["actor"]) // sharing
    holders = "ranks" if sharing == 1 else f"groups of {sharing} ranks"
    budget = config.actor.micro_batch_tokens * config.actor.context_parallel * config.actor.ulysses
    per_update = samples // a.mini_batches
    lines = [
        "batch",
        f"  {counted(d.prompts_per_step, 'prompt')} x {counted(r.n, 'sample')} = "
        f"{counted(samples, 'sample')} a step, "
        f"at most {samples * r.max_tokens:,} response tokens",
        f"  {samples} / {counted(a.mini_batches, 'mini-batch')} = {counted(per_update, 'sample')} "
        "an update, "
        f"about {per_update / actors:g} on each of {actors} {holders}; "
        f"{counted(a.epochs, 'epoch')}: "
        f"{counted(a.epochs * a.mini_batches, 'update')} a step, {updates_per_run(config)} in "
        f"{config.steps}",
        f"  {counted(num_prompts, 'prompt')} / {d.prompts_per_step} = "
        f"{num_prompts // d.prompts_per_step} "
        f"steps an epoch: {config.steps * d.prompts_per_step / max(num_prompts, 1):.2f} epochs",
        f"  longest sequence {d.max_prompt_tokens} + {r.max_tokens} = {longest} tokens; "
        f"micro-batches of {budget} tokens",
        *algorithm_lines(config),
        *placement_lines(config, world),
    ]
    plan = memory_plan(config, world, prompt_tokens, gpu_gib, image_tokens)
    room = room_lines(config, world, plan, rl_planner(prompt_tokens, gpu_gib, image_tokens))
    return "\n".join([*lines, *plan.all_lines(), *room, *host_lines(plan.host_gib, world, REMEDY)])


def describe_supervised(
    config: SupervisedConfig, world: int, num_rows: int, kind: str, row_sequences: int,
    row_tokens: Array, gpu_gib: float | None = None, image_tokens: float = 0.0,
) -> str:  # fmt: skip
    """Describes a run that learns from rows, as `describe` does one of reinforcement learning.
    kind: of engine; row_sequences: see Task; row_tokens: (num_rows,) lengths.
    """
    data, actor = config.data, config.actor
    sharing = sharing_ranks(actor)
    plan = supervised_plan(config, world, kind, row_tokens, gpu_gib, image_tokens)
    planner = supervised_planner(kind, row_tokens, gpu_gib, image_tokens)
    most = data.batch_size * data.max_tokens * row_sequences
    holders = "ranks" if sharing == 1 else f"groups of {sharing} ranks"
    budget = actor.micro_batch_tokens * actor.context_parallel * actor.ulysses
    return "\n".join([
        "batch",
        f"  {counted(data.batch_size, 'row')} a step, at most {most:,} tokens, "
        f"about {data.batch_size * sharing / world:g} on each of {world // sharing} {holders}; "
        f"micro-batches of {budget} tokens",
        f"  {counted(num_rows, 'row')} / {data.batch_size} = {num_rows // data.batch_size} steps "
        "an epoch: "
        f"{counted(config.steps, 'step')} {verb(config.steps, 'are')} "
        f"{config.steps * data.batch_size / max(num_rows, 1):.2f} epochs",
        written_line(config),
        *distillation_lines(config),
        "placement",
        *(role_line(n, role, tuple(range(world))) for n, role in training_roles(config).items()),
        *plan.all_lines(),
        *room_lines(config, world, plan, planner),
        *host_lines(plan.host_gib, world, REMEDY),
    ])  # fmt: skip


def distillation_lines(config: SupervisedConfig) -> list[str]:
    """Returns lines that say what is learnt from a teacher, where there is one."""
    if not isinstance(config, SftConfig) or config.distillation is None:
        return []
    d = config.distillation
    return [
        "algorithm",
        f"  distillation from {config.ref.model}: {d.coef:g} x {d.loss} over its {d.topk} "
        f"likeliest tokens, beside {config.cross_entropy_coef:g} x cross-entropy",
    ]


def written_line(config: SupervisedConfig) -> str:
    """Returns a line that says what the run leaves."""
    lora = config.actor.lora
    if lora is not None and lora.by_source:
        return f"  {config.out}/adapter is written in float32: {', '.join(lora.names)}"
    return f"  {config.out} is written in {out_dtype(config)}"


def out_dtype(config: SupervisedConfig) -> str:
    if config.out_dtype is not None:
        return config.out_dtype
    stored = stored_dtype(load_hf_config(config.model), config.model)
    return f"{str(stored).removeprefix('torch.')}, the dtype in which the model is stored"


def placement_lines(config: PpoConfig, world: int) -> list[str]:
    placement, rollout = place(config, world), config.rollout
    roles, lines = placement.roles, ["placement"]
    for name, role in training_roles(config).items():
        if name == "ref" and reference_is_base(config, placement):
            lines.append(f"  ref      ranks {show_ranks(roles[name])}: the actor, its adapter off")
        else:
            lines.append(role_line(name, role, roles[name]))
    engines = len(roles["rollout"]) // rollout.tensor_parallel
    experts = ", whole experts on each rank" if rollout.expert_parallel else ""
    lines += [
        f"  rollout  ranks {show_ranks(roles['rollout'])}: "
        f"{counted(engines, f'{rollout.engine} engine')} x tp {rollout.tensor_parallel}{experts}",
        f"  reward   ranks {show_ranks(roles['reward'])}: "
        f"{counted(config.rewards.workers, 'process')} each",
    ]
    if config.judge is not None:
        lines.append(judge_text(config, config.judge, roles["reward"]))
    if config.async_steps:
        lines.append(f"  sampling runs up to {counted(config.async_steps, 'step')} ahead of "
                     "training; both meet where the run evaluates or saves")  # fmt: skip
    return lines


def judge_text(config: PpoConfig, judge: JudgeConfig, ranks: Ranks) -> str:
    engines, name = len(ranks) // judge.tensor_parallel, judge.engine or config.rollout.engine
    how = "each answer by itself"
    if judge.compare == "pairs":
        others = judge.opponents or config.rollout.n - 1
        how = f"{config.rollout.n * others} comparisons a prompt"
    return (
        f"  judge    ranks {show_ranks(ranks)}: "
        f"{counted(engines, f'{name} engine')} x tp {judge.tensor_parallel}; {how}"
    )


def role_line(name: str, role: TrainConfig, ranks: Ranks) -> str:
    degrees = resolve_degrees(train_degrees(role), len(ranks))
    layout = " x ".join(f"{axis} {size}" for axis, size in degrees.items())
    if role.engine == "megatron":
        layout = f"megatron, {layout}" + "".join(
            f", {label} {getattr(role, field)}"
            for label, field in (("sequence parallel", "sequence_parallel"),
                                 ("chunks per stage", "virtual_pipeline"),
                                 ("layers in stage 0", "num_layers_in_first_pipeline_stage"),
                                 ("layers in the last", "num_layers_in_last_pipeline_stage"),
                                 ("experts over", "expert_parallel"),
                                 ("each over", "expert_tensor_parallel"))
            if getattr(role, field) not in (None, False, 1)
        )  # fmt: skip
    return f"  {name:8} ranks {show_ranks(ranks)}: {layout}"


def algorithm_lines(config: PpoConfig) -> list[str]:
    """Returns lines that say what the names resolve to, and which passes they cost."""
    algo, estimator = config.algo, estimator_of(config.algo)
    seen = "on its last token" if estimator.sees == "tokens" else "of which it sees the sum"
    over = "all unmasked tokens of the step" if estimator.whiten else "nothing"
    if estimator.whiten and algo.whiten_over == "samples":
        over = "all valid samples of the step"
    old = "a pass of the actor" if needs_old_logprobs(algo) else "those of the update's own pass"
    if algo.correction.bypass:
        old = "those of the rollout engine (bypass)"
    extra = {
        "a greedy answer per prompt": config.rollout.greedy_baseline,
        f"up to {counted(algo.dynamic_sampling, 'round')} of sampling": algo.dynamic_sampling > 0,
        f"samples of {counted(algo.replay_steps, 'earlier step')}": algo.replay_steps > 0,
        f"samples drawn by {algo.sample_filter!r}": algo.sample_filter is not None,
        "rollout correction of each " + algo.correction.level: algo.correction.level != "off",
        f"rejection by {', '.join(algo.correction.reject)}": bool(algo.correction.reject),
        f"a reward for each turn, {seen}": config.rewards.per_turn,
        "the mean over sequences is one over all, those without a token to train on too": (
            algo.seq_mean_over == "all"
        ),
        f"the KL estimate {algo.kl_estimator} is cut at {algo.kl_cut}": algo.kl_cut is not None,
    }
    chosen = (
        f"  advantage {shown(algo.advantage)}, whitened over {over}; policy loss "
        f"{shown(algo.policy_loss)}, aggregation {shown(aggregation_of(algo))}"
    )
    if weighs_pairs(algo):
        chosen = (
            f"  {shown(algo.policy_loss)} of the best and the worst answer to each prompt, a mean "
            f"over pairs; {'with a' if algo.needs_reference else 'no'} reference"
        )
    return [
        "algorithm",
        chosen,
        f"  old logprobs: {old}",
        *teacher_lines(config),
        *[f"  {text}" for text, is_on in extra.items() if is_on],
    ]


def teacher_lines(config: PpoConfig) -> list[str]:
    """Returns lines that say what is learnt from a teacher, and what it sees, if there is one."""
    d, hint = config.algo.distillation, config.data.hint_key
    teacher = config.ref.model or "the initial model"
    if config.algo.policy_teaches:
        teacher = "the policy itself"
    elif config.teachers:
        teacher = "the teacher of a prompt's data source"
    lines = [
        f"  teacher of {'other sources' if source == '*' else source}: {text_of_teacher(found)}"
        for source, found in config.teachers.items()
    ]
    if d is not None:
        lines.append(f"  distillation from {teacher}: {d.coef:g} x {d.loss} over its {d.topk} "
                     f"likeliest tokens, beside {config.algo.reward_coef:g} x rewards")  # fmt: skip
    if hint is not None:
        lines.append(f"  {teacher} sees {hint!r} in its prompt, of at most "
                     f"{config.data.max_hint_prompt_tokens} tokens")  # fmt: skip
    return lines


def text_of_teacher(teacher: TrainConfig | TeacherEndpoint | str) -> str:
    if isinstance(teacher, str):
        return f"as of {teacher}"
    if isinstance(teacher, TeacherEndpoint):
        return (
            f"{teacher.model} at {teacher.url}, {teacher.max_concurrent} requests of a rank at once"
        )
    return str(teacher.model)
