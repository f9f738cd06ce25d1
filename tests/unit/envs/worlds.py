"""Environments that behave badly, or in a way that a test can foresee."""

from __future__ import annotations

import os
import random
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tranship.envs import Step
from tranship.types import UserError

THIS = Path(__file__)


class Obedient:
    """Does what the message's content says."""

    tools = ()
    roles = ("user",)

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.turns = 0

    def reset(self, prompt_info: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        if prompt_info.get("fault"):
            raise RuntimeError(prompt_info["fault"])
        if self.folder:
            (Path(self.folder) / str(os.getpid())).touch()
        return [{"role": "user", "content": f"{prompt_info.get('text')} {seed} {random.random()}"}]

    def step(self, message: dict[str, Any]) -> Any:
        order = message["content"]
        self.turns += 1
        if order == "count":
            return Step([{"role": "user", "content": str(self.turns)}], reward=0.5, info={"turns": self.turns})
        if order == "sleep":
            time.sleep(60)
        if order == "raise":
            raise ValueError("as asked")
        if order == "exit":
            sys.exit(3)
        if order == "die":
            os._exit(7)
        if order == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if order == "allocate":
            held = []
            while True:
                held.append(bytearray(1 << 24))
        if order == "fork":
            subprocess.Popen(["sleep", "60"])
            subprocess.Popen(["sleep", "60"], start_new_session=True)
        if order == "regicide":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        if order == "close":
            os.closerange(3, 256)
            time.sleep(60)
        if order == "print":
            print("said to standard output")
        if order == "object":
            return Step([{"role": "user", "content": "x"}], info={"object": object()})
        if order == "nan":
            return Step(reward=float("nan"), done=True)
        if order == "deep":
            os.write(next(fd for fd in range(3, 256) if _is_socket(fd)), struct.pack("<I", 200_000) + b"[" * 200_000)
            time.sleep(60)
        if order == "number":
            return Step([{"role": "user", "content": 3}])
        if order == "system":
            return Step([{"role": "system", "content": "obey"}])
        if order == "large":
            return Step([{"role": "user", "content": "x" * (1 << 21)}])
        return Step(reward=1.0, done=True)


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


class Refused:
    """Cannot be made."""

    def __init__(self) -> None:
        raise UserError("this world has to be given a key")


class Broken:
    """Cannot be made, for no good reason."""

    def __init__(self) -> None:
        raise KeyError("oops")


class Half:
    """Has no step."""

    def reset(self, prompt_info: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        return []


class Deadly:
    """Ends the process that makes it."""

    def __init__(self) -> None:
        os._exit(5)


class Slow:
    """Takes a minute to make."""

    def __init__(self) -> None:
        time.sleep(60)


class Quiz:
    """Asks on, as the row's extra_info says: `turns` to answer, words to `say`, a `first` message, a `pause` in s, a
    `fault` at a turn."""

    tools = ()
    roles = ("tool", "user")

    def reset(self, prompt_info: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        self.script = {"turns": 1, "say": "on", "first": None, "pause": 0.0, "fault": -1, **prompt_info["extra_info"]}
        self.turn = 0
        self.random = random.Random(seed)
        self._pause()
        if self.script["fault"] == 0:
            raise RuntimeError("no world today")
        return [] if self.script["first"] is None else [{"role": "user", "content": self.script["first"]}]

    def step(self, message: dict[str, Any]) -> Step:
        self.turn += 1
        self._pause()
        if self.turn == self.script["fault"]:
            raise RuntimeError("the world is gone")
        if self.turn == self.script["turns"]:
            return Step(
                [{"role": "tool", "content": "never seen"}], reward=1.0, done=True, info={"seen": message["content"]}
            )
        answer = {"role": "tool", "content": f"{self.script['say']} {self.random.randint(0, 9)}"}
        return Step([answer], reward=0.25, info={"tool_calls": 1, "tool_errors": self.turn % 2, "turn": self.turn})

    def _pause(self) -> None:
        time.sleep(self.script["pause"] * self.random.random())


class Silent:
    """Neither answers nor ends."""

    tools = ()
    roles = ("tool",)

    def reset(self, prompt_info: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        return []

    def step(self, message: dict[str, Any]) -> Step:
        return Step()
