"""A small process that outlives the driver by a moment and ends what the driver could not.

Run as a script: reads lines "PID START" from standard input (START: the process's start time, field 22 of
/proc/PID/stat, so that a number used again is spared). The line "done" ends it. When the input ends without one, the
driver was killed: the named processes are killed, and the folder that is the first argument is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys


def start_time(pid: int) -> str:
    """When a process of this node started, in the kernel's ticks; "" if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def main() -> None:
    """Wait for the driver's end, and clean up if it was not a good one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known: dict[int, str] = {}
    for line in sys.stdin:
        words = line.split()
        if words == ["done"]:
            return
        if len(words) == 2:
            known[int(words[0])] = words[1]
    for pid, started in known.items():
        if start_time(pid) == started:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
