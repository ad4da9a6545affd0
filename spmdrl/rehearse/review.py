"""Reads a config, its data and its reward as a careful colleague would, and says what looks wrong.

Each function here looks for one kind of mistake that is legal, so that no check refuses it, and
returns a sentence for each that it finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from spmdrl.config import PpoConfig, TrainConfig
from spmdrl.config.words import counted, verb
from spmdrl.data.chat import TEMPLATE_ERRORS
from spmdrl.data.prompts import PromptDataset
from spmdrl.distributed.placement import is_frozen, training_roles
from spmdrl.hub.model_files import eos_token_ids
from spmdrl.rehearse.probes import FORMS, Probes
from spmdrl.rollout.multi_turn.conversation import has_dialogue
from spmdrl.types import Prompt

MOST_ROWS = 2000  # of each data set that are read
ANSWER, THOUGHT = "kx7qz", "vw3jm"  # text that no template has by itself
USUAL_LR = {"full": (1e-7, 5e-5), "lora": (1e-6, 1e-3)}
SLOW_SHARE_S = 60.0  # seconds of a step that rewards may take
FEW = 0.05  # share of rows that may be left out


@dataclass(frozen=True)
class Reviewed:
    """Holds what a review looks at."""

    config: PpoConfig
    world: int  # ranks of the real run
    tokenizer: Any
    train: PromptDataset
    held_out: PromptDataset | None
    probes: Probes

    def prompts(self, dataset: PromptDataset) -> list[Prompt]:
        """Returns at most MOST_ROWS prompts, at equal distances."""
        step = max(1, -(-len(dataset) // MOST_ROWS))
        return [dataset.prompt(i) for i in range(0, len(dataset), step)]


Finder = Callable[[Reviewed], Iterator[str]]


def review(reviewed: Reviewed) -> list[str]:
    """Returns a sentence for each thing that looks wrong."""
    return [sentence for find in FINDERS for sentence in find(reviewed)]


# ---- the reward


def deaf_rewards(seen: Reviewed) -> Iterator[str]:
    """A reward that does not tell right from wrong."""
    probes, given = seen.probes, seen.probes.all
    if probes.skipped or not probes.right or not probes.reads_truth:
        return
    if len(set(given)) == 1 and len(given) > 2:
        yield (
            f"the reward is {given[0]:g} for every one of {len(given)} answers that were tried: "
            "ground truths in several forms, those of other prompts, and nothing at all. There is "
            "nothing to learn from: what does the reward read of the answer, and is ground_truth "
            "one?"
        )
        return
    best = probes.best
    right, wrong = fmean(probes.right[best]), fmean(probes.wrong.get(best) or probes.empty or [0.0])
    if right <= wrong:
        yield (
            f"the reward of the right answer is {right:.3g} on average and that of another "
            f"prompt's answer {wrong:.3g}, in the form that scores best, {best}: it does not tell "
            "them apart. Is its sign right, and does it compare with ground_truth?"
        )
    elif best != FORMS[0][0] and fmean(probes.right.get(FORMS[0][0], [0.0])) < right:
        sign = next(sign for name, _, sign in FORMS if name == best)
        texts = [prompt.text for prompt in seen.prompts(seen.train)[:64]]
        if not any(sign in text for text in texts):
            yield (
                f"the reward reads answers in the form {best} (mean {right:.3g}; the bare answer "
                f"has {fmean(probes.right.get(FORMS[0][0], [0.0])):.3g}), and no prompt asks for "
                "it: ask for this form in a system message, or every answer will count as wrong"
            )


def failing_rewards(seen: Reviewed) -> Iterator[str]:
    """A reward that raises, or takes too long for the step."""
    probes, config = seen.probes, seen.config
    if probes.failed:
        reason, _ = Counter(probes.failed).most_common(1)[0]
        yield (
            f"the reward fails on {len(probes.failed)} of {counted(probes.tried, 'answer')} that "
            "were tried, "
            f"each of which will be an invalid sample: {reason}"
        )
    samples = config.data.prompts_per_step * config.rollout.n
    workers = max(1, config.rewards.workers) * seen.world
    seconds = probes.seconds * samples / workers
    if seconds > SLOW_SHARE_S:
        yield (
            f"the reward takes {probes.seconds:.2g} s a sample: {counted(samples, 'sample')} on "
            f"{seen.world} "
            f"ranks x rewards.workers={config.rewards.workers} are {seconds:.0f} s of each step"
        )


def large_rewards(seen: Reviewed) -> Iterator[str]:
    """Rewards of another order than estimators with a critic expect."""
    largest = max(map(abs, seen.probes.all), default=0.0)
    scaled = seen.config.algo.advantage in ("grpo", "grpo_passk", "gdpo")
    if largest > 10 and not scaled:
        yield (
            f"rewards reach {largest:g}, and advantages of {seen.config.algo.advantage!r} grow "
            "with them: rewards between -1 and 1 are usual. Divide them, or set algo.reward_clip"
        )


# ---- data


def lost_rows(seen: Reviewed) -> Iterator[str]:
    """Prompts that are too long, and truths that no answer has room for."""
    data, train = seen.config.data, seen.train
    whole = len(train) + train.num_overlong
    if train.num_overlong > FEW * whole and data.overlong_prompts == "filter":
        yield (
            f"{train.num_overlong} of {counted(whole, 'prompt')} "
            f"{verb(train.num_overlong, 'are')} longer than data.max_prompt_tokens="
            f"{data.max_prompt_tokens} and left out: raise it, or the run learns from the short "
            "ones alone"
        )
    if seen.probes.skipped or not seen.probes.reads_truth:
        return
    truths = [str(prompt.ground_truth or "") for prompt in seen.prompts(train)]
    limit = seen.config.rollout.max_tokens
    # a token has hardly less than one character: what is short as text is not tokenized
    lengths = [len(seen.tokenizer(text).input_ids) for text in truths if len(text) > limit]
    cut = sum(length > limit for length in lengths)
    if cut:
        yield (
            f"{cut} of {len(truths)} ground truths have more than rollout.max_tokens={limit} "
            "tokens: no answer has room for them, so each of these will be cut"
        )


def repeated_rows(seen: Reviewed) -> Iterator[str]:
    """Held-out prompts that are trained on, and prompts with two answers."""
    rows = [prompt for prompt in seen.prompts(seen.train) if not prompt.images]
    texts = {prompt.text for prompt in rows}
    if seen.held_out is not None:
        held_out = [prompt for prompt in seen.prompts(seen.held_out) if not prompt.images]
        both = sum(prompt.text in texts for prompt in held_out)
        if both:
            yield (
                f"{both} of {len(held_out)} held-out prompts that were read are among those that "
                "are trained on: the evaluation will show what was learnt by heart"
            )
    truths: dict[str, set[str]] = {}
    for prompt in rows:
        truths.setdefault(prompt.text, set()).add(str(prompt.ground_truth))
    split = [text for text, found in truths.items() if len(found) > 1]
    if split:
        yield (
            f"{counted(len(split), 'prompt')} {verb(len(split), 'stand')} in data.train with "
            "different ground truths, such as "
            f"...{split[0][-80:]!r}: every answer to them is wrong half of the time"
        )


def no_evaluation(seen: Reviewed) -> Iterator[str]:
    if seen.config.data.eval is None:
        yield (
            "data.eval is not set: nothing will tell a model that has learnt the task from one "
            "that has found a gap in the reward"
        )
    elif seen.config.eval_every == 0:
        yield "eval_every=0: held-out prompts are asked before and after the run, not meanwhile"


# ---- the chat template


def answer_ends(seen: Reviewed) -> Iterator[str]:
    """A template that ends an answer by a token at which sampling does not stop."""
    tokenizer, rollout = seen.tokenizer, seen.config.rollout
    text = rendered(seen, [user("hi"), assistant(ANSWER)])
    if text is None or rollout.ignore_eos or rollout.stop:
        return
    behind = text.partition(ANSWER)[2]
    ids = tokenizer(behind, add_special_tokens=False).input_ids
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ends = [id for id in ids if id in special][:1]
    stops = {*eos_token_ids(seen.config.model), *rollout.stop_token_ids}
    if ends and not stops & {*ids}:
        name = tokenizer.convert_ids_to_tokens(ends[0])
        yield (
            f"the chat template ends an answer with {name!r} (token {ends[0]}), and sampling stops "
            f"at {tokenizer.convert_ids_to_tokens(sorted(stops))} alone: every answer will run on "
            f"to rollout.max_tokens. Set rollout.stop_token_ids=({ends[0]},), or the eos_token_id "
            "of the model's generation_config.json"
        )


def two_beginnings(seen: Reviewed) -> Iterator[str]:
    """A prompt that begins with two tokens for the beginning."""
    bos = seen.tokenizer.bos_token_id
    prompt = seen.train.prompt(0)
    if bos is not None and prompt.token_ids[:2] == [bos, bos]:
        yield (
            f"prompts begin with {seen.tokenizer.bos_token!r} twice: the text of the data has it, "
            "and the tokenizer adds another. Take it out of the data"
        )


def lost_thoughts(seen: Reviewed) -> Iterator[str]:
    """A template that takes thoughts out of earlier turns, where there are several."""
    if not has_dialogue(seen.config) and seen.config.agent is None:
        return
    said = [user("a"), assistant(f"<think>{THOUGHT}</think>{ANSWER}"), user("b")]
    text = rendered(seen, said)
    if text is not None and ANSWER in text and THOUGHT not in text:
        what = (
            "each turn of an agent that sends them back without is a row of its own, which costs "
            "time" if seen.config.agent is not None
            else "the policy is trained with thoughts of earlier turns in its context, and a "
            "server that uses the template will not show them"
        )  # fmt: skip
        yield f"the chat template takes <think>...</think> out of earlier turns: {what}"


def rendered(seen: Reviewed, messages: list[dict[str, str]]) -> str | None:
    """Returns a chat as text; None where prompts are no chats, or the template takes no such."""
    data, tokenizer = seen.config.data, seen.tokenizer
    is_chat = data.apply_chat_template or seen.train.prompt(0).chat is not None
    if not is_chat or not tokenizer.chat_template:
        return None
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **data.chat_template_kwargs)
    except TEMPLATE_ERRORS:  # it wants a system message, or other content
        return None


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# ---- numbers


def unusual_rates(seen: Reviewed) -> Iterator[str]:
    """Learning rates of another order than what works."""
    for name, role in training_roles(seen.config).items():
        if not is_frozen(name):
            yield from unusual_rate(name, role)


def unusual_rate(name: str, role: TrainConfig) -> Iterator[str]:
    low, high = USUAL_LR["lora" if role.lora is not None else "full"]
    what = "adapters" if role.lora is not None else "all weights"
    lr, is_muon = role.optim.lr, role.optim.name == "muon"
    if lr and not low <= lr <= high and not is_muon:
        side = "above" if lr > high else "below"
        yield (
            f"{name}.optim.lr={lr:g} is {side} what trains {what} of a pretrained model by "
            f"rewards, {low:g} to {high:g}"
        )


def same_answers(seen: Reviewed) -> Iterator[str]:
    """Sampling that gives a group's answers no difference."""
    rollout = seen.config.rollout
    if rollout.n > 1 and (rollout.temperature < 0.2 or rollout.top_k == 1):
        yield (
            f"rollout.temperature={rollout.temperature:g}, top_k={rollout.top_k}: the "
            f"{rollout.n} answers to a prompt will be all but the same, and a group without "
            "differences teaches nothing. 1.0 is usual"
        )


def many_epochs(seen: Reviewed) -> Iterator[str]:
    config, count = seen.config, len(seen.train)
    passes = config.steps * config.data.prompts_per_step / max(count, 1)
    if passes > 50:
        yield (
            f"steps={config.steps} x prompts_per_step={config.data.prompts_per_step} ask each of "
            f"{counted(count, 'prompt')} {passes:.0f} times"
        )


def strong_kl(seen: Reviewed) -> Iterator[str]:
    algo = seen.config.algo
    if algo.kl_coef > 0.5 and algo.reward_coef != 0 and algo.kl_target is None:
        yield (
            f"algo.kl_coef={algo.kl_coef:g} holds the policy at the reference: 0 to 0.1 is usual"
        )


def nothing_kept(seen: Reviewed) -> Iterator[str]:
    config = seen.config
    if config.checkpoint.every_steps > config.steps > 0:
        yield (
            f"checkpoint.every_steps={config.checkpoint.every_steps} and steps={config.steps}: a "
            "run that fails before its end loses all of it"
        )


FINDERS: tuple[Finder, ...] = (
    deaf_rewards, failing_rewards, large_rewards, lost_rows, repeated_rows, no_evaluation,
    answer_ends, two_beginnings, lost_thoughts, unusual_rates, same_answers, many_epochs,
    strong_kl, nothing_kept,
)  # fmt: skip
