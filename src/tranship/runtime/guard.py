"""A small process that outlives the driver by a moment and ends what the driver could not.

Run as a script: reads lines "PID START" from standard input (START: the process's start time, field 22 of
/proc/PID/stat, so that a number used again is spared). The line "done" ends it. When the input ends without one, the
driver was killed: the named processes are killed, and those that carry the mark of the folder that is the first
argument (helpers of a daemon that died before anyone knew of them), and the folder is removed.
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


# The variable that every process of a cluster inherits; it holds the cluster's folder. Command lines do not serve:
# some of Ray's helpers overwrite theirs.
MARK = "TRANSHIP_CLUSTER"


def members(folder: str) -> list[int]:
    """Processes of this user that were started within the cluster of a folder, this one left out."""
    wanted = os.fsencode(f"{MARK}={folder}")
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            if not name.isdigit() or int(name) == os.getpid() or os.stat(f"/proc/{name}").st_uid != os.getuid():
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue
    return found


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
    doomed = [pid for pid, started in known.items() if start_time(pid) == started]
    # A second look, since a daemon may have started a helper just before it was killed.
    for find in (lambda: doomed, lambda: members(sys.argv[1]), lambda: members(sys.argv[1])):
        for pid in find():
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
