"""The process that makes an environment once, and forks a session from itself for each sample. `EnvPool` starts it.

It gets one frame {env, args, sys_path, parent, memory_bytes} and answers {tools, roles} or {error}. Then it gets
commands of a fixed size: "open" brings the session's end of a socket pair, "end" kills the session and what it started,
and is answered with {ended, how}. It runs nothing of the environment itself after it has made it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from tranship.envs.env import Env, make_env
from tranship.envs.frames import COMMAND, OPEN, make_reader, pack
from tranship.envs.session import limit, quiet, serve
from tranship.envs.tools import Tool
from tranship.types import UserError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_SWEEPS = 100


def main() -> None:
    """Serve the socket whose number is the first argument until it ends; leave no process behind."""
    control = socket.socket(fileno=int(sys.argv[1]))
    quiet()
    setup = _read_setup(control)
    if setup is None:
        return
    _die_with(setup["parent"])
    _adopt_orphans()
    env, answer = _make(setup)
    control.sendall(pack(answer))
    sessions: dict[int, int] = {}
    try:
        while env is not None and (command := _read_command(control)):
            what, session, descriptor = command
            if what == OPEN:
                sessions[session] = _fork(env, control, descriptor, setup["memory_bytes"])
            else:
                how = _end(sessions.pop(session))
                _sweep(set(sessions.values()))
                control.sendall(pack({"ended": session, "how": how}))
    except ConnectionError:
        pass  # The pool is gone.
    finally:
        for pid in sessions.values():
            _end(pid)
        _sweep(set())


def describe(env: Env) -> dict[str, Any]:
    """What the pool has to know of an environment: the schemas of its tools, and the roles of its messages."""
    roles = list(getattr(env, "roles", ("tool",)))
    if not roles or any(role not in ("tool", "user") for role in roles):
        raise UserError(f"env.name: {type(env).__name__}.roles is {roles}: use tool, user, or both")
    return {"tools": [Tool(function).schema for function in getattr(env, "tools", ())], "roles": roles}


def _read_setup(control: socket.socket) -> dict[str, Any] | None:
    frames = make_reader()
    while data := control.recv(1 << 16):
        for setup in frames.feed(data):
            return setup
    return None


def _make(setup: dict[str, Any]) -> tuple[Env | None, dict[str, Any]]:
    sys.path[:] = setup["sys_path"]
    try:
        env = make_env(setup["env"], setup["args"])
        return env, describe(env)
    except UserError as error:
        return None, {"error": str(error)}
    except BaseException as error:
        return None, {"error": f"env.name: {setup['env']} failed: {type(error).__name__}: {error}"}


def _read_command(control: socket.socket) -> tuple[bytes, int, int] | None:
    data, descriptor = b"", -1
    while len(data) < COMMAND.size:
        part, descriptors, _, _ = socket.recv_fds(control, COMMAND.size - len(data), 1)
        if not part:
            return None
        data += part
        descriptor = descriptors[0] if descriptors else descriptor
    what, session = COMMAND.unpack(data)
    return what, session, descriptor


def _fork(env: Env, control: socket.socket, descriptor: int, memory_bytes: int | None) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        os.setsid()
        _die_with(parent)
        _adopt_orphans()
        control.close()
        os.set_inheritable(descriptor, False)
        limit(memory_bytes)
        serve(env, socket.socket(fileno=descriptor))
    except ConnectionError:
        pass  # Nobody wants the answer any more.
    finally:
        sys.stderr.flush()
        os._exit(0)


def _end(pid: int) -> str:
    """Kill a session's process group, reap the session, and say how it had ended (a zombie keeps its own status)."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # It has not yet made a group of its own.
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"was killed by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.WEXITSTATUS(status)}"


def _sweep(sessions: set[int]) -> None:
    """Kill what ended sessions have left: processes that have become children of this one (Linux)."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(_MAX_SWEEPS):
        left = {int(pid) for pid in children.read_text().split()} - sessions if children.exists() else set()
        if not left:
            return
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even in the middle of C code (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found and ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    main()
