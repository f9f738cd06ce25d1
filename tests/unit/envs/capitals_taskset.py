"""A taskset of `verifiers`, as its users write one (imported only where that package is installed)."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Capital(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, task: Any, trace: Any) -> float:
        return float(task.answer in trace.last_reply)

    @vf.reward
    async def short(self, trace: Any) -> float:
        if "crash" in trace.last_reply:
            raise RuntimeError("the judge is ill")
        return 0.5 if len(trace.last_reply) < 20 else 0.0

    @vf.metric
    async def letters(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class Settings(vf.TasksetConfig):
    shout: bool = False


class Capitals(vf.Taskset[Capital, Settings]):
    def load(self) -> Iterable[Capital]:
        for country, capital in (("France", "Paris"), ("Italy", "Rome")):
            question = f"The capital of {country}?"
            prompt = question.upper() if self.config.shout else question
            yield Capital(Data(prompt=prompt, system_prompt="One word.", answer=capital), self.config.task)


class Endless(Capitals):
    INFINITE = True


class Boxed(vf.Task[Data]):
    @vf.reward
    async def looks(self, trace: Any, runtime: Any) -> float:
        return 1.0


class Boxes(vf.Taskset[Boxed, vf.TasksetConfig]):
    def load(self) -> Iterable[Boxed]:
        yield Boxed(Data(prompt="Write a file."))


class Prepared(Capital):
    async def setup(self, trace: Any, runtime: Any) -> None:
        return None


class Preparations(vf.Taskset[Prepared, vf.TasksetConfig]):
    def load(self) -> Iterable[Prepared]:
        yield Prepared(Data(prompt="Go on."))
