"""Signs that a run learns nothing, found in the rows of its metrics and told in words.

Each sign is a function of the newest rows and the config. It returns None, or a sentence that says
what is seen, what may cause it and what to do. Nothing here is collective or reads a file: the rank
that logs calls it with what it has logged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from spmdrl.config import PpoConfig

WINDOW = 10  # steps that a sign looks back on
CUT_WINDOW = 3  # steps after which cut answers are told of
EVALUATIONS = 4  # that must agree before it is told that they never change
AGAIN = 50  # steps until the same is said again
TINY = 1e-6  # what is nearer counts as equal, beside 1 or the value itself
SMALL_REWARD = 0.03  # root mean square: of rewards 0 and 1 one answer in 1,100 is right

Row = Mapping[str, float]  # one line of metrics.jsonl
Finder = Callable[[Sequence[Row], Sequence[Row]], dict[str, str]]


class LearningSigns:
    """Says each sign when it begins, and not again for AGAIN steps.

    find: is given the last WINDOW rows and the last EVALUATIONS rows with a held-out result, both
    oldest first; returns a sentence by the name of its sign.
    """

    def __init__(self, find: Finder) -> None:
        self.find = find
        self.rows: deque[Row] = deque(maxlen=WINDOW)
        self.evaluations: deque[Row] = deque(maxlen=EVALUATIONS)
        self.said: dict[str, int] = {}  # sign -> step

    def after_step(self, step: int, metrics: Row) -> list[str]:
        """The sentences that are due after this step. Step 0: of an evaluation alone."""
        row = {"step": step, **metrics}
        if step > 0:
            self.rows.append(row)
        if any(name.startswith("eval/") for name in row):
            self.evaluations.append(row)
        found = self.find(list(self.rows), list(self.evaluations))
        due = [name for name in found if step - self.said.get(name, -AGAIN) >= AGAIN]
        self.said |= dict.fromkeys(due, step)
        return [found[name] for name in due]


def signs_of_rl(config: PpoConfig) -> LearningSigns:
    return LearningSigns(partial(find_in_rl, config))


def signs_of_supervised(name: str) -> LearningSigns:
    """name: of the program's metrics, as in <name>/loss."""
    return LearningSigns(partial(find_in_supervised, name))


def find_in_rl(
    config: PpoConfig, rows: Sequence[Row], evaluations: Sequence[Row]
) -> dict[str, str]:  # fmt: skip
    found = {
        "cut": cut_answers(rows, config),
        "tools": unused_tools(rows, config),
        "update": update_without_advantages(rows, config),
        "rate": no_learning_rate(rows, "actor"),
        "evaluation": same_evaluation(evaluations, "eval/reward"),
    }
    by_reward = config.algo.reward_coef != 0 and config.algo.pairs == "best_worst"
    if by_reward:  # not where a teacher alone, or pairs of demonstrations, are learnt from
        found["reward"] = same_reward(rows, config) or small_reward(rows, config)
        found["groups"] = None if found["reward"] else few_signals(rows, config)
    return {name: text for name, text in found.items() if text is not None}


def find_in_supervised(
    name: str, rows: Sequence[Row], evaluations: Sequence[Row]
) -> dict[str, str]:  # fmt: skip
    found = {
        "loss": same_loss(rows, name),
        "rate": no_learning_rate(rows, name),
        "evaluation": same_evaluation(evaluations, "eval/loss"),
    }
    return {sign: text for sign, text in found.items() if text is not None}


# ---- reinforcement learning


def same_reward(rows: Sequence[Row], config: PpoConfig) -> str | None:
    """Every answer of ten steps has the same reward."""
    means, stds = column(rows, "reward/mean"), column(rows, "reward/std")
    if means is None or stds is None or not all_equal(means) or max(stds) > bound(means):
        return None
    without = column(rows, "reward/frac_reward_zero_std")
    if without is not None and min(without) < 1:  # a penalty or another reward differs
        return None
    return (
        f"every answer of the last {len(rows)} steps got the reward {means[-1]:g}, so none is "
        f"better than another and nothing can be learnt. {read_answers(rows, config)} If right "
        "and wrong answers got the same, correct the reward function (does it find the final "
        "answer in the text?). If all are wrong, ask easier prompts, reward parts of an answer, "
        "or fine-tune the model first (spmdrl.sft). If all are right, ask harder prompts."
    )


def small_reward(rows: Sequence[Row], config: PpoConfig) -> str | None:
    """Almost no answer of ten steps has a reward, and so hardly any group a signal."""
    means, stds = column(rows, "reward/mean"), column(rows, "reward/std")
    if means is None or stds is None:
        return None
    largest = max((m**2 + s**2) ** 0.5 for m, s in zip(means, stds, strict=True))
    without = column(rows, "reward/frac_reward_zero_std")
    if largest > SMALL_REWARD or (without is not None and min(without) < 0.9):
        return None
    return (
        f"the reward was near 0 in the last {len(rows)} steps (its mean is {fmean(means):.2g}), "
        f"so there is almost nothing to learn from. {read_answers(rows, config)} If right answers "
        "got 0 too, correct the reward function. If there are none, ask easier prompts, reward "
        "parts of an answer, or fine-tune the model first (spmdrl.sft)."
    )


def few_signals(rows: Sequence[Row], config: PpoConfig) -> str | None:
    """Most groups of ten steps have equal rewards, so their advantages are 0."""
    without = column(rows, "reward/frac_reward_zero_std")
    if without is None or fmean(without) <= 0.8:
        return None
    means = column(rows, "reward/mean")
    reward = "" if means is None else f" (the mean reward is {fmean(means):.3g})"
    advice = ""
    if config.algo.dynamic_sampling:
        advice = " What algo.dynamic_sampling asks in their place takes time."
    elif may_leave_groups_out(config):
        advice = " --algo.dynamic_sampling 4 asks others in their place."
    return (
        f"in {fmean(without):.0%} of the groups of the last {len(rows)} steps all "
        f"{config.rollout.n} answers to the prompt got the same reward{reward}: their advantages "
        "are 0 and they teach nothing. The prompts are too easy or too hard for the model: choose "
        f"others, or raise --rollout.n.{advice}"
    )


def cut_answers(rows: Sequence[Row], config: PpoConfig) -> str | None:
    """Over half of the answers of three steps ended at rollout.max_tokens, which none had to."""
    shares = column(rows[-CUT_WINDOW:], "response/truncated", CUT_WINDOW)
    most, rollout = config.rollout.max_tokens, config.rollout
    is_meant = rollout.ignore_eos or rollout.min_tokens == most
    if shares is None or is_meant or fmean(shares) <= 0.5:
        return None
    return (
        f"{fmean(shares):.0%} of the answers of the last {CUT_WINDOW} steps were cut at "
        f"rollout.max_tokens={most}, so they have no end and most rewards find no result in them. "
        f"Raise --rollout.max_tokens (to {2 * most}, say). If the answers have an end and go on "
        "behind it, the model does not know the token that ends an answer: check "
        "generation_config.json (eos_token_id) and the chat template."
    )


def unused_tools(rows: Sequence[Row], config: PpoConfig) -> str | None:
    """Tools are there and no answer of ten steps calls one, or none has room for a reply."""
    calls = column(rows, "tools/calls")
    if not config.tools or calls is None:
        return None
    if min(column(rows, "tools/unread") or [0.0]) == 1:
        return (
            f"no reply of a tool in the last {len(rows)} steps has fitted into rollout.max_tokens="
            f"{config.rollout.max_tokens}, so the model reads none: lower "
            "--multi_turn.max_reply_tokens, or raise --rollout.max_tokens."
        )
    if max(calls) > 0:
        return None
    return (
        f"no answer of the last {len(rows)} steps called one of the tools of the config. "
        f"{read_answers(rows, config)} Either the model does not see the tools (--dry-run shows "
        "the first prompt as the chat template makes it), or it writes its calls in another form "
        "than the one that is read, or it must first learn to call them: name the tools in the "
        "prompt, or fine-tune on a few conversations with calls (spmdrl.sft)."
    )


def update_without_advantages(rows: Sequence[Row], config: PpoConfig) -> str | None:
    """The newest step updated the actor with advantages that are all 0."""
    row = rows[-1] if rows else {}
    if not row.get("advantage/all_zero") or "actor/grad_norm" not in row:
        return None
    if config.algo.distillation is not None:  # there is a teacher to learn from
        return None
    advice = ""
    if may_leave_groups_out(config):
        advice = (
            " --algo.dynamic_sampling 4 leaves groups of equal rewards out, and a step without any "
            "other makes no update."
        )
    return (
        f"every advantage of step {row['step']:g} is 0, and the actor was updated all the same "
        f"(gradient norm {row['actor/grad_norm']:.2g}): what moves the weights is the KL and "
        "entropy terms, if there are any, the optimizer's momentum and the weight decay, and not "
        f"the reward.{advice}"
    )


def may_leave_groups_out(config: PpoConfig) -> bool:
    """Whether algo.dynamic_sampling goes with the other options (training/checks/)."""
    compares = config.rollout.n > 1 and config.algo.advantage != "gdpo"
    return compares and config.rollout.oversample == 1 and not config.algo.dynamic_sampling


# ---- any program


def same_loss(rows: Sequence[Row], name: str) -> str | None:
    """The loss of ten different batches is one number."""
    losses = column(rows, f"{name}/loss")
    if losses is None or not all_equal(losses):
        return None
    return (
        f"the loss was {losses[-1]:.6g} in each of the last {len(rows)} steps: nothing is learnt. "
        "Check the learning rate (actor.optim.lr), and that rows have tokens to learn from, with "
        "--dry-run, which shows the first."
    )


def no_learning_rate(rows: Sequence[Row], name: str) -> str | None:
    """The learning rate of ten steps is 0."""
    rates = column(rows, f"{name}/lr")
    if rates is None or max(rates) > 0:
        return None
    return (
        f"the learning rate was 0 in the last {len(rows)} steps, so the weights do not change. "
        "actor.optim.warmup_steps and decay_steps count updates, of which a step may make "
        "several: raise decay_steps, or set min_lr_ratio."
    )


def same_evaluation(rows: Sequence[Row], metric: str) -> str | None:
    """Four evaluations in a row gave the same number; not where it is the best possible."""
    values = column(rows, metric, EVALUATIONS)
    if values is None or len(set(values)) > 1 or values[-1] == 1:
        return None
    return (
        f"{metric} was {values[-1]:.6g} in each of the last {len(rows)} evaluations, since step "
        f"{rows[0]['step']:g}: what is learnt does not change the held-out answers. Read "
        "samples/, and check the learning rate (actor.optim.lr) and the reward."
    )


# ---- rows


def column(rows: Sequence[Row], name: str, least: int = WINDOW) -> list[float] | None:
    """The metric of each row; None where there are fewer than `least` rows or one lacks it."""
    if len(rows) < least or any(name not in row for row in rows):
        return None
    return [row[name] for row in rows]


def bound(values: Sequence[float]) -> float:
    return TINY * max(1.0, *(abs(value) for value in values))


def all_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= bound(values)


def read_answers(rows: Sequence[Row], config: PpoConfig) -> str:
    if config.log_samples == 0:
        return "Read some answers: --log_samples 16 keeps some of each step."
    return f"Read samples/step_{rows[-1]['step']:g}.jsonl."
