"""Talks to a process of a benchmark by lines of JSON on its standard input and output; it ends when its input ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tranship.types import RunError

_TAIL = 12


class Process:
    """A command that answers each line with a line. log: where its errors go. env: beside that of this process."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._name = Path(command[-1]).name if len(command) < 4 else " ".join(command[2:4])
        with log.open("wb") as errors:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a line. RunError if the process is gone."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(message).encode() + b"\n")
            self.popen.stdin.flush()
        except OSError as error:
            raise RunError(self._words()) from error

    def hear(self, limit_s: float) -> dict[str, Any]:
        """The next line. RunError if the process ends, fails, or takes longer (it is then killed)."""
        assert self.popen.stdout is not None
        timer = threading.Timer(limit_s, self.popen.kill)
        timer.start()
        try:
            for line in self.popen.stdout:
                if line.startswith(b"{"):
                    return json.loads(line)
        finally:
            timer.cancel()
        raise RunError(self._words())

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        self.tell(message)
        return self.hear(limit_s)

    def close(self) -> None:
        """Close its input, at which it ends; `end` waits for that."""
        assert self.popen.stdin is not None
        with suppress(OSError):
            self.popen.stdin.close()

    def end(self) -> None:
        """End it: first by closing its input."""
        self.close()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def _words(self) -> str:
        self.popen.kill()
        self.popen.wait()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL:])
        return f"{self._name} ended (exit {self.popen.returncode}):\n{tail}"


def answer_lines(handlers: Mapping[str, Any]) -> None:
    """Answer each line {"do": NAME, ...} of standard input with what the handler of that name returns."""
    for line in sys.stdin:
        message = json.loads(line)
        result = handlers[message.pop("do")](**message)
        print(json.dumps(result or {}), flush=True)
