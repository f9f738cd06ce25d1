"""Objects for a runtime to host; loaded by path, also inside other processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from tranship.types import UserError


class OddError(Exception):
    """Cannot be built from its message alone, and its module is known by path only."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


class Counter:
    """A service: a number that grows."""

    def __init__(self, start, context):
        self.value = start
        self.seq = 0
        self.closed_file = None

    def add(self, amount, *, times=1):
        self.value += amount * times
        self.seq += 1
        return self.value

    def read(self):
        return self.value

    def fail(self, kind):
        if kind == "user":
            raise UserError("steps -1 is negative: use at least 1")
        if kind == "json":
            return json.loads("{broken")
        if kind == "odd":
            raise OddError(1, 2)
        if kind == "exit":
            raise SystemExit(3)
        raise KeyError("missing")


class Stepper:
    """A loop: counts up to `until`, one step a pass, and tells of each step and of the end."""

    def __init__(self, until, context, closed_file=None):
        self.until = until
        self.context = context
        self.count = 0
        self.closed_file = closed_file
        self.threads = set()
        self.in_poll = False

    def poll(self):
        self.threads.add(threading.get_ident())
        self.in_poll = True
        if self.count < self.until:
            self.count += 1
            self.context.emit({"step": self.count, "name": self.context.name})
            if self.count == self.until:
                self.context.emit({"done": True, "numbers": [1, 2.5, None], "text": "end"})
        self.in_poll = False
        return self.count < self.until

    def more(self, steps):
        self.threads.add(threading.get_ident())
        assert not self.in_poll
        self.until += steps
        return self.until

    def say_something_odd(self):
        self.context.emit({"thing": object()})

    def facts(self):
        return {"count": self.count, "threads": len(self.threads), "pid": os.getpid()}

    def close(self):
        if self.closed_file:
            with open(self.closed_file, "a") as file:
                file.write(f"{self.context.name}\n")


class Broken:
    """Its factory refuses."""

    def __init__(self, context):
        raise UserError("model.path 'nowhere' does not exist: give a folder")


class Bomb:
    """A loop that fails at a chosen pass, or that does a violent thing when told."""

    def __init__(self, fuse, context):
        self.fuse = fuse

    def poll(self):
        self.fuse -= 1
        if self.fuse == 0:
            raise UserError("the fuse 3 is too short: use 4")
        return self.fuse > 0

    def sleep(self, seconds):
        time.sleep(seconds)
        return "rested"

    def kill_self(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, code):
        os._exit(code)

    def greet(self):
        return "hello"


class Follower:
    """A loop that follows a service: says what it reads each time it has changed."""

    def __init__(self, counter, context):
        self.counter = counter
        self.context = context
        self.last = None

    def poll(self):
        value = self.counter.call("read")
        if value == self.last:
            return False
        self.last = value
        self.context.emit({"saw": value})
        return True

    def try_fail(self):
        try:
            self.counter.call("fail", "user")
        except UserError as error:
            return str(error)
        return "no error"


class Bucketer:
    """A loop that publishes arrays and reads those of others."""

    def __init__(self, context):
        self.context = context

    def poll(self):
        return False

    def publish(self, size, value):
        buffer = np.full(size, value, dtype=np.uint8)
        ref = self.context.objects.put(buffer)
        buffer[:] = 0
        return {"refs": [ref]}

    def total(self, announcement):
        array = self.context.objects.get(announcement["refs"][0], timeout_s=20)
        return int(array.sum()), bool(array.flags.writeable)


class Environment:
    """A service that tells of its process."""

    def __init__(self, context):
        import torch

        self.threads = torch.get_num_threads()

    def facts(self):
        return {
            "threads": self.threads,
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "spin": os.environ.get("GOMP_SPINCOUNT"),
            "folder": os.getcwd(),
        }


class Parent:
    """A loop that has started a process of its own."""

    def __init__(self, context):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def poll(self):
        return False

    def child_pid(self):
        return self.child.pid


class SlowStart(Bomb):
    """A loop that takes its time to be built."""

    def __init__(self, seconds, context):
        time.sleep(seconds)
        super().__init__(-1, context)
