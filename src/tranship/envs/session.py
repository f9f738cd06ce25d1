"""What runs in the process of one session: an environment, answering one request after another."""

from __future__ import annotations

import os
import random
import resource
import socket
import sys
import traceback
from typing import Any

from tranship.envs.env import Env, Message
from tranship.envs.frames import make_reader, pack
from tranship.envs.tools import parse_tool_calls

_MAX_ERROR = 500


def serve(env: Env, connection: socket.socket) -> None:
    """Answer {reset: prompt_info, seed} and {step: message} with {messages, ...} or {error}, until the input ends."""
    frames = make_reader()
    while data := connection.recv(1 << 16):
        for request in frames.feed(data):
            connection.sendall(_answer(env, request))


def limit(memory_bytes: int | None) -> None:
    """Bound this process's memory, and have it leave no core file."""
    if memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def quiet() -> None:
    """Give this process no input, and send what it prints to its error output."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)


def _answer(env: Env, request: dict[str, Any]) -> bytes:
    try:
        if "reset" in request:
            random.seed(request["seed"])
            return pack({"messages": env.reset(request["reset"], request["seed"])})
        return pack(_step(env, request["step"]))
    except BaseException as error:  # SystemExit too: whatever ends a step ends only this sample.
        traceback.print_exc()
        sys.stderr.flush()
        return pack({"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR]})


def _step(env: Env, message: Message) -> dict[str, Any]:
    step = env.step({**message, "tool_calls": parse_tool_calls(message["content"])})
    return {"messages": step.messages, "reward": step.reward, "done": step.done, "info": step.info}
