"""A taskset with the API of verifiers.v1 (0.4), for the package itself and for its stand-in."""

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]


def said(trace) -> str:
    return trace.branches[-1].messages[-1].content or ""


class LettersData(vf.TaskData):
    answer: str


class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def letters(self, trace) -> float:
        return float(said(trace).count("o"))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(said(trace)))


class LettersConfig(vf.TasksetConfig):
    count: int = 1


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        for _ in range(self.config.count):
            yield LettersTask(LettersData(prompt="hi", answer="o"), self.config.task)
