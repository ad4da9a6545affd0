"""The judge of a run (PpoConfig.judge): a frozen language model that says in words how good answers
are, in an engine on the ranks that score.

All ranks that score know all questions of a call, and its engines share them as those of the
rollout share prompts (rollout/scheduler.py). A question's seed is made from its tokens, so that
equal questions have one verdict, whoever made the answers and in whatever step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from spmdrl.config import DataConfig, JudgeConfig, PpoConfig, RolloutConfig
from spmdrl.data.chat import Encoder
from spmdrl.data.table_files import BadRow
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.placement import Placement
from spmdrl.distributed.topology import Topology
from spmdrl.hub.hf_folder import load_hf_config, load_tokenizer
from spmdrl.rewards.judge import answer_of, asked_messages, read_verdict
from spmdrl.rollout.base import Request, RolloutEngine, SamplingParams
from spmdrl.rollout.build import build_engine
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.rollout.seeds import seed_of
from spmdrl.training.logs.metrics import address_of
from spmdrl.types import Judgement, Sample

Address = tuple[int, int]  # group and index of a sample
NOBODY = (-1, -1)  # in place of the other answer: there is none, or it is the ground truth


@dataclass(frozen=True)
class Question:
    """One question to the judge. Its score is the first sample's; of two answers what is left of 1
    is the second's.
    """

    first: Address
    second: Address
    token_ids: np.ndarray  # (num_tokens,) int32


@dataclass(frozen=True)
class JudgeVerdict:
    text: str
    num_tokens: int


class LanguageJudge:
    """The judge, on each rank that scores."""

    def __init__(
        self, config: JudgeConfig, engine: RolloutEngine, topology: Topology, seed: int,
        sleeps: bool,
    ) -> None:  # fmt: skip
        """topology: of its engines, axes dp and tp. sleeps: others work on these ranks as well.
        Collective over the topology.
        """
        self.config, self.engine, self.topology = config, engine, topology
        self.seed, self.sleeps = seed, sleeps
        self.scheduler = Scheduler(engine, topology)
        self.tokenizer: Any = load_tokenizer(config.model)
        data = DataConfig("", chat_template_kwargs=config.chat_template_kwargs)
        vocab = load_hf_config(config.model).get_text_config().vocab_size
        self.encoder = Encoder(self.tokenizer, data, config.max_prompt_tokens, vocab)
        self.params = SamplingParams(
            temperature=config.temperature, top_p=config.top_p, max_tokens=config.max_tokens
        )

    def score(
        self, samples: list[Sample], is_wanted: Callable[[Sample], bool], held_out: bool,
        between_bursts: Callable[[], None],
    ) -> None:  # fmt: skip
        """Sets judgement, or invalid where the judge cannot read a sample or be read.

        is_wanted: whether a sample's reward asks for it. held_out: of pairs, answers are compared
        with the ground truth, not with each other. Collective over the topology; each rank brings
        its own samples.
        """
        own = [s for s in samples if s.invalid is None and is_wanted(s)]
        if self.config.compare == "each":
            asked = self.about_each(own)
        elif held_out:
            asked = self.about_truths(own)
        else:
            asked = self.about_pairs(own)
        parts = gather_to_all(asked, self.topology.control)
        questions = sorted(itertools.chain.from_iterable(parts), key=attrgetter("first", "second"))
        verdicts = self.ask(questions, between_bursts)
        by_address = judgements(self.config, questions, verdicts)
        for sample in own:
            take(sample, by_address.get(address_of(sample)), self.config)

    def ask(
        self, questions: Sequence[Question], between_bursts: Callable[[], None]
    ) -> list[JudgeVerdict]:  # fmt: skip
        """Returns a verdict for each question, on every rank. The list is the same on all ranks;
        questions of the same tokens are asked once. Collective.
        """
        numbers: dict[bytes, int] = {}
        for question in questions:
            numbers.setdefault(question.token_ids.tobytes(), len(numbers))
        requests = [
            Request(np.frombuffer(ids, np.int32).tolist(), verdict_seed(self.seed, ids))
            for ids in numbers
        ]
        if not requests:
            return []
        if self.sleeps:
            self.engine.wake()
        found = self.scheduler.run(requests, self.params, between_bursts=between_bursts).finished
        if self.sleeps:
            self.sleep()
        mine = {
            number: JudgeVerdict(self.text_of(answer.token_ids), len(answer.token_ids))
            for number, answer in found.items()
        }
        everyone: dict[int, JudgeVerdict] = {}
        for part in gather_to_all(mine, self.topology.control):
            everyone |= part
        return [everyone[numbers[question.token_ids.tobytes()]] for question in questions]

    def sleep(self) -> None:
        self.engine.sleep()
        if self.topology.device.type != "cpu":
            torch.cuda.empty_cache()  # another engine of these ranks has a pool of its own

    def text_of(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def about_each(self, own: list[Sample]) -> list[Question]:
        """A question about each sample by itself."""
        return [
            question
            for sample in own
            for question in self.question(sample, [answer_of(sample)], address_of(sample), NOBODY)
        ]

    def about_truths(self, own: list[Sample]) -> list[Question]:
        """Two questions about each sample: it stands before the ground truth, and behind it."""
        found: list[Question] = []
        for sample in own:
            here, answer, truth = address_of(sample), answer_of(sample), sample.prompt.ground_truth
            if truth is None or not str(truth):
                sample.invalid = "the row has no ground truth that the judge could compare it with"
                continue
            found += self.question(sample, [answer, str(truth)], here, NOBODY)
            if sample.invalid is None:
                found += self.question(sample, [str(truth), answer], NOBODY, here)
        return found

    def about_pairs(self, own: list[Sample]) -> list[Question]:
        """Questions about pairs of a group's answers, in which the first is this rank's.
        Collective.
        """
        mine = [(address_of(sample), answer_of(sample)) for sample in own]
        groups: dict[int, dict[int, str]] = {}
        for (group, index), answer in sorted(
            itertools.chain.from_iterable(gather_to_all(mine, self.topology.control))
        ):
            groups.setdefault(group, {})[index] = answer
        found: list[Question] = []
        for sample in own:
            group = groups[sample.group]
            if len(group) == 1:
                sample.invalid = (
                    "no other answer to its prompt is valid: nothing to compare it with"
                )
            for other in opponents(list(group), sample.index, self.config.opponents):
                texts, there = [answer_of(sample), group[other]], (sample.group, other)
                found += self.question(sample, texts, address_of(sample), there)
        return found

    def question(
        self, sample: Sample, answers: list[str], first: Address, second: Address
    ) -> Iterator[Question]:  # fmt: skip
        """Yields the question; none where the judge cannot read it, which makes the sample
        invalid.
        """
        try:
            ids = self.encoder.prompt(asked_messages(self.config, sample, answers)).ids
            if len(ids) > self.config.max_prompt_tokens:
                raise BadRow(
                    f"{len(ids)} tokens or more, above judge.max_prompt_tokens="
                    f"{self.config.max_prompt_tokens}"
                )
        except BadRow as error:
            sample.invalid = sample.invalid or f"the judge cannot read it: {error}"
            return
        yield Question(first, second, np.array(ids, np.int32))


def opponents(indices: list[int], index: int, count: int) -> list[int]:
    """Returns the answers that come after `index` in the ring of all: `count` of them, 0: all.

    If everyone is compared with those after it, each is as often the second of both as the first.
    """
    start = indices.index(index)
    ring = indices[start + 1 :] + indices[:start]
    return ring[: count or None]


def verdict_seed(run_seed: int, token_ids: bytes) -> int:
    """Returns the seed of a verdict by what is asked."""
    return seed_of(run_seed, 0, 0, 0, f"judge/{token_ids.hex()}")


def judgements(
    config: JudgeConfig, questions: Sequence[Question], verdicts: Sequence[JudgeVerdict]
) -> dict[Address, Judgement]:
    """Returns what is said of each sample: the mean over those of its verdicts that can be read."""
    found: dict[Address, list[tuple[float | None, JudgeVerdict]]] = {}
    for question, verdict in zip(questions, verdicts, strict=True):
        share = read_verdict(config, verdict.text)
        found.setdefault(question.first, []).append((share, verdict))
        found.setdefault(question.second, []).append(
            (None if share is None else 1 - share, verdict)
        )
    return {address: judgement_of(said) for address, said in found.items() if address != NOBODY}


def judgement_of(said: list[tuple[float | None, JudgeVerdict]]) -> Judgement:
    scores = [score for score, _ in said if score is not None]
    return Judgement(
        sum(scores) / len(scores) if scores else None,
        [verdict.text for _, verdict in said],
        len(said) - len(scores),
        sum(verdict.num_tokens for _, verdict in said),
    )


def take(sample: Sample, judgement: Judgement | None, config: JudgeConfig) -> None:
    """Gives a sample its judgement; one that has no score gets config.unparsable."""
    sample.judgement = judgement
    if sample.invalid is not None or judgement is None:
        sample.invalid = sample.invalid or "the judge was not asked: the others cannot be read"
    elif judgement.score is None and config.unparsable == "invalid":
        said = judgement.verdicts[-1].strip()
        sample.invalid = f"the judge's verdict cannot be read (judge.verdict): {said[-200:]!r}"
    elif judgement.score is None:
        judgement.score = float(config.unparsable)


# ---- its engine


def engine_config(config: JudgeConfig, rollout: RolloutConfig, sleeps: bool) -> RolloutConfig:
    """Returns the config of the judge's engine. rollout: the policy's. sleeps: it gives its memory
    back, to an address that it may not find again, so that it captures no graphs on a GPU.
    """
    return RolloutConfig(
        engine=config.engine or rollout.engine,
        n=1,
        max_tokens=config.max_tokens,
        tensor_parallel=config.tensor_parallel,
        dtype=config.dtype,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=True if sleeps else "auto",
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_mib=config.kv_cache_mib,
        engine_args=config.engine_args,
        sleep=sleeps,
    )


def shares_ranks(config: PpoConfig, placement: Placement) -> bool:
    """Whether others work on ranks of the judge, so that it sleeps meanwhile."""
    others = {*placement.roles["rollout"], *placement.training}
    assert config.judge is not None
    return config.judge.sleep and not others.isdisjoint(placement.roles["reward"])


def build_judge(
    config: PpoConfig, topology: Topology | None, everyone: Topology, sleeps: bool
) -> LanguageJudge | None:
    """Builds the judge, asleep if it sleeps. topology: of its engines; None outside of its ranks,
    and where there is no judge. Collective over everyone.
    """
    if config.judge is None or topology is None:
        return None
    rollout = engine_config(config.judge, config.rollout, sleeps)
    longest = config.judge.max_prompt_tokens + config.judge.max_tokens
    engine = build_engine(config.judge.model, rollout, longest, topology, everyone, frozen=True)
    if engine is None:
        return None
    judge = LanguageJudge(config.judge, engine, topology, config.seed, sleeps)
    if sleeps:
        judge.sleep()
    return judge
