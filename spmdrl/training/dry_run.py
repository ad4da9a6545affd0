"""--dry-run: reads the data, scores a sample of each data set, and prints the plan of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from spmdrl.algo.advantages import asked_keys_of, estimator_of
from spmdrl.cli.arguments import Dry, shown_config
from spmdrl.config import ConfigError, LoraConfig, PpoConfig, RewardConfig
from spmdrl.config.words import counted
from spmdrl.data.demonstrations import demonstration_lines
from spmdrl.data.prompts import PromptDataset
from spmdrl.data.row_reports import left_out_lines
from spmdrl.data.source_adapters import adapter_of
from spmdrl.distributed.placement import place, training_roles
from spmdrl.distributed.progress import PROGRESS
from spmdrl.hub.hf_folder import load_tokenizer
from spmdrl.rewards.runner import RewardRunner, rewards_of
from spmdrl.rewards.workers.worker import cause_of
from spmdrl.rollout.multi_turn.conversation import Dialogue, has_dialogue
from spmdrl.rollout.multi_turn.environment import check_environments
from spmdrl.training.build import (
    build_order,
    load_dataset,
    load_train,
)
from spmdrl.training.checks.agents import agent_lines, check_parser
from spmdrl.training.checks.describe import describe
from spmdrl.training.checks.length import check_steps
from spmdrl.training.checks.memory_fit import rl_planner
from spmdrl.training.checks.memory_plan import gpu_gib_here
from spmdrl.training.checks.packing import trial_lines
from spmdrl.training.checks.shown import check_kept, check_shown
from spmdrl.training.collect import check_reward_keys
from spmdrl.training.elastic import check_memory_of_sizes
from spmdrl.training.process_reward_model import not_labels
from spmdrl.training.run_images import with_replies
from spmdrl.training.run_length import with_length
from spmdrl.training.runtime import Runtime
from spmdrl.training.teacher_endpoint import endpoint_lines
from spmdrl.types import Prompt, Sample

logger = logging.getLogger(__name__)

EXAMPLES = 8  # prompts of each data set that a dry run scores

# parameters of reward functions that a dry run cannot give, and who would
ASKED = {
    "model_score": "a model, which a dry run does not load",
    "judge_score": "a judge, which a dry run does not load",
    "judge_verdicts": "a judge, which a dry run does not load",
    "agent_output": "an agent, which a dry run does not start",
}


def show_plan(config: PpoConfig, runtime: Runtime, dry: Dry) -> None:
    """--dry-run: the config, arithmetic, memory, and one scored sample per data set.

    Raises ConfigError, on every rank, where the GPUs cannot hold the run.
    """
    ranks, gpu_gib = dry.ranks or runtime.topology.world, dry.gpu_gib or gpu_gib_here()
    scorers = place(config, ranks).roles["reward"]
    rewards = RewardRunner(rewards_of(config), config.rewards, len(scorers))
    tokenizer = load_tokenizer(config.model)
    sets = {"train": config.data.train, "eval": config.data.eval}
    lines, num_prompts, lengths, image_tokens, mixture = [], 0, None, 0.0, []
    for name, paths in sets.items():
        if paths is None:
            continue
        if name == "train":
            dataset = load_train(config, tokenizer, runtime.topology)
        else:
            dataset = load_dataset(paths, config, tokenizer, runtime.topology)
        rewards.check_sources(dataset.data_sources)
        check_environments(config.environment, dataset.data_sources)
        check_shown(config, dataset)
        if name == "train":
            num_prompts, lengths = len(dataset), dataset.num_tokens
            image_tokens = dataset.image_tokens
            order = build_order(config, dataset)
            mixture = order.lines()
            if order.function is not None:  # what it returns is checked
                order.draw(config.data.prompts_per_step, step=1, sampling_round=0)
            config = with_length(config, num_prompts)
            check_steps(config, ranks)
            check_kept(config, with_replies(dataset.looks(), config))
        lines += [f"{name} data: {counted(len(dataset), 'prompt')}, "
                  f"{dataset.num_overlong} over-long, {counted(dataset.num_bad, 'bad row')} left "
                  f"out, {dataset.num_escaped} with control tokens in their text",
                  *left_out_lines(dataset.left_out), *image_lines(dataset),
                  *demonstration_lines(dataset.demonstrated), *hint_lines(dataset),
                  *adapter_lines(config.actor.lora, dataset.data_sources),
                  *(mixture if name == "train" else []),
                  *held_out_lines(name, len(dataset), config),
                  *scored_examples(examples_of(dataset), rewards, config.rewards,
                                   asked_keys_of(config.algo) if name == "train" else (),
                                   name == "train" and estimator_of(config.algo).prm),
                  *scored_demonstrations(examples_of(dataset), rewards, tokenizer)]  # fmt: skip
    rewards.close()
    if has_dialogue(config):
        sampling = place(config, ranks).roles["rollout"]
        engines = len(sampling) // config.rollout.tensor_parallel
        dialogue = Dialogue(config, tokenizer, engines, dataset.vision)
        lines += dialogue.lines()
        dialogue.close()
    if config.agent is not None:
        check_parser(config, tokenizer)
        lines += agent_lines(config)
    lines += endpoint_lines(config, tokenizer)
    trained = [role for role in training_roles(config).values() if role.engine == "fsdp"]
    lines += trial_lines([role.model or config.model for role in trained])
    if runtime.is_main:
        plan = describe(config, ranks, num_prompts, lengths, gpu_gib, image_tokens)
        PROGRESS.line("\n".join([shown_config(config, dry.show_config), *lines, plan]))
    check_memory_of_sizes(config, ranks, rl_planner(lengths, gpu_gib, image_tokens), runtime)


def image_lines(dataset: PromptDataset) -> list[str]:
    most, lines = dataset.images, []
    if most.per_prompt:
        lines.append(
            f"  images: at most {most.per_prompt} in a prompt, and {most.largest[0]} tokens in one"
        )
    if most.videos:
        lines.append(
            f"  videos: at most {most.videos} in a prompt, and {most.largest_video[0]} tokens in "
            f"one, of {counted(most.largest_video[1], 'step')} in time"
        )
    return lines


def hint_lines(dataset: PromptDataset) -> list[str]:
    """Returns a line with the first prompt as a teacher is asked it, where it sees a hint."""
    if dataset.hints is None:
        return []
    first = dataset.hinted(dataset.prompt(0).id)
    return [f"  with its hint prompt {first.id} has {len(first.token_ids)} tokens: "
            f"...{first.text[-200:]!r}"]  # fmt: skip


def adapter_lines(lora: LoraConfig | None, data_sources: Sequence[str]) -> list[str]:
    """Returns a line for each of several adapters that says whose rows it has."""
    if lora is None or not lora.by_source:
        return []
    sources: dict[str, list[str]] = {name: [] for name in lora.names}
    for source in data_sources:
        sources[lora.names[adapter_of(lora, source)]].append(source)
    return [f"  adapter {name}: the rows of {', '.join(map(repr, own)) or 'no source'}"
            for name, own in sources.items()]  # fmt: skip


def held_out_lines(name: str, num_prompts: int, config: PpoConfig) -> list[str]:
    """Returns a line that says what an evaluation asks."""
    if name != "eval":
        return []
    asked = min(num_prompts, config.data.max_eval_prompts or num_prompts)
    return [
        f"  {asked} of them asked at each evaluation, "
        f"{counted(asked * config.eval_samples, 'answer')}"
    ]


def examples_of(dataset: PromptDataset) -> list[Prompt]:
    """The first prompt and others at equal distances."""
    step = max(len(dataset) // EXAMPLES, 1)
    return [dataset.prompt(i) for i in range(0, len(dataset), step)][:EXAMPLES]


def scored_examples(
    prompts: list[Prompt], rewards: Any, config: RewardConfig, keys: tuple[str, ...] = (),
    labels: bool = False,
) -> list[str]:  # fmt: skip
    """Scores each ground truth as if it were the answer, and shows the first. keys: what the
    algorithm reads of what the reward returns. labels: the algorithm takes rewards as labels.

    Raises ConfigError where the reward fails on more of them than a step may have invalid samples,
    or returns one of the keys for none of them, though it finds some right. One that finds none
    right may want more than the bare answer, and return the keys with it. Raises ConfigError as
    well where a reward should be a label and is none.
    """
    first = prompts[0]
    shown = f"  prompt {first.id} ({first.data_source}): ...{first.text[-200:]!r}"
    asks = asked_by(prompts, rewards)
    samples = [
        answered(prompt, str(prompt.ground_truth))
        for prompt in prompts
        if prompt.ground_truth is not None and not asks[prompt.data_source]
    ]
    rewards.score(samples)
    if labels:
        check_labels(samples, rewards)
    scored = [sample for sample in samples if sample.invalid is None]
    finds_right = any(sample.reward for sample in scored)
    check_reward_keys(samples, keys)
    failed = [sample for sample in samples if sample.invalid is not None]
    num_lacking = sum(sample.invalid is not None for sample in scored)
    if failed:
        told = (
            f"the reward fails on {len(failed)} of {counted(len(samples), 'ground truth')} given "
            "as answers; "
            f"prompt {failed[0].prompt.id} ({failed[0].prompt.data_source}), "
            f"{str(failed[0].prompt.ground_truth)[:60]!r}: {last_line(failed[0].invalid)}"
        )
        num_failed = len(failed)
        if not (finds_right and num_lacking == len(scored)):
            num_failed -= num_lacking
        if num_failed > config.max_invalid_fraction * len(samples):
            raise ConfigError(told)
        logger.warning(told)
    if asks[first.data_source]:
        return [shown, f"  its reward asks {ASKED[asks[first.data_source][0]]}"]
    if first.ground_truth is None:
        return [shown, "  no ground truth, and its reward asks for none"]
    sample = samples[0]
    verdict = f"{sample.reward:g}" if sample.invalid is None else "none, it fails"
    if sample.reward == 0:
        verdict += " (right only if the grader wants more than the bare answer)"
    return [shown, f"  reward of its ground truth {sample.response!r} as the answer: {verdict}"]


def check_labels(samples: list[Sample], rewards: Any) -> None:
    """Raises ConfigError where a reward of these samples, or of an empty answer to the same
    prompts, is no label of PRIME's. An empty answer shows what a wrong one is given.
    """
    empty = [answered(sample.prompt, "") for sample in samples]
    rewards.score(empty)
    found = [sample.reward for sample in (*samples, *empty) if sample.reward is not None]
    if found and (told := not_labels(min(found), max(found))):
        raise ConfigError(f"{told}. These are of ground truths and empty answers")


def asked_by(prompts: list[Prompt], rewards: Any) -> dict[str, list[str]]:
    """Returns by data source what its reward asks for and a dry run cannot give."""
    return {
        source: [name for name in ASKED if name in rewards.reward_of(source).arguments]
        for source in {prompt.data_source for prompt in prompts}
    }


def scored_demonstrations(prompts: list[Prompt], rewards: Any, tokenizer: Any) -> list[str]:
    """Scores the first demonstration of each prompt that has one; held-out prompts have none."""
    asks = asked_by(prompts, rewards)
    samples = [
        answered(prompt, str(tokenizer.decode(prompt.demonstrations[0], skip_special_tokens=True)))
        for prompt in prompts
        if prompt.demonstrations and not asks[prompt.data_source]
    ]
    if not samples:
        return []
    rewards.score(samples)
    found = [sample.reward for sample in samples if sample.reward is not None]
    mean = f"mean {fmean(found):g}" if found else "none, it fails"
    return [f"  reward of a demonstration, of {counted(len(samples), 'prompt')}: {mean}"]


def answered(prompt: Prompt, answer: str) -> Sample:
    """Returns a sample of the prompt with this answer, as if the policy had said it."""
    sample = Sample(prompt, 0, 0, [], [], [], [], "stop", response=answer)
    sample.messages = [{"role": "assistant", "content": answer}]
    return sample


def last_line(reason: str | None) -> str:
    """Returns what was raised, of a traceback, and where in the user's code."""
    lines = (reason or "").splitlines()
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return cause_of(reason or "") + (f" ({places[-1]})" if places else "")
