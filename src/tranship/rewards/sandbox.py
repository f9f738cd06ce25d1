"""A program that runs one piece of foreign Python code within limits. `run_code` starts it, by its path, with `-I`.

It imports nothing of ours and gets a job as JSON on its input: code, test (None: the code is a program), stdin, secret,
folder, timeout_s, memory_bytes, file_bytes, disk_bytes, num_processes, isolate, network. It answers one JSON object:
{"error"} where the limits cannot be set, else {"ended": "exit 0" | "exit N" | "signal N" | "timeout", "passed": whether
the test ran to its end, "stdout": base64}.

There are two processes: this one sets the limits and watches, its child runs the code. isolate: the child is the first
process of namespaces of its own: it sees no process but its own, has no network (unless `network`) and no file system
that can be written but an empty one in memory at `folder`; when it ends, the kernel ends all that it started.
"""

import base64
import contextlib
import ctypes
import io
import json
import os
import platform
import resource
import select
import signal
import sys

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38
_CAP_DAC_READ_SEARCH, _CAP_VERSION_3 = 2, 0x20080522
# A range that no account uses: systemd gives these numbers to services for as long as they run.
_FIRST_UID, _NUM_UIDS = 61184, 4336
_READY = b"ready "
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the job on the input and print its answer."""
    job = json.load(sys.stdin)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        answer = _run(job)
    except OSError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


def _run(job):
    is_root = os.geteuid() == 0
    uid = _FIRST_UID + os.getpid() % _NUM_UIDS if is_root else os.getuid()
    if job["isolate"]:
        _enter_namespaces(job, is_root, uid)
    else:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if is_root:
            os.chown(job["folder"], uid, uid)
    with open(os.memfd_create("given"), "w+b") as given, open(os.memfd_create("printed"), "rb") as printed:
        given.write(job["stdin"].encode("utf-8", "surrogatepass"))
        given.seek(0)
        passed, passed_write = os.pipe()
        child = os.fork()
        if child == 0:
            _be_child(job, is_root, uid, given.fileno(), printed.fileno(), passed_write)
        os.close(passed_write)
        ended = _watch(child, job["timeout_s"])
        if not job["isolate"]:
            _end_strays(is_root, uid)
        with open(passed, "rb") as end:
            os.set_blocking(passed, False)
            said = end.read() or b""
        if not said.startswith(_READY):
            return {"error": said.decode(errors="replace") or f"it ended before the code began: {ended}"}
        printed.seek(0)
        output = printed.read(job["file_bytes"])
    return {
        "ended": ended,
        "passed": said == _READY + job["secret"].encode(),
        "stdout": base64.b64encode(output).decode(),
    }


def _enter_namespaces(job, is_root, uid):
    flags = _NEWNS | _NEWIPC | _NEWPID | (0 if job["network"] else _NEWNET) | (0 if is_root else _NEWUSER)
    gid = uid if is_root else os.getgid()
    _check(_libc.unshare(flags), "unshare")
    if not is_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
    # Kernels before 5.12 do not have this call: there the rights of files alone protect them.
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))
    # What listens under /run (a container daemon, a user's session) does things outside for whoever may connect. Names
    # of hosts are often found through it too, which only code with a network needs.
    covered = (job["folder"], "/dev/shm", *(() if job["network"] else ("/run",)))
    for folder in filter(os.path.isdir, covered):
        data = f"size={job['disk_bytes']},nr_inodes=1000,mode=0700,uid={uid},gid={gid}".encode()
        _check(_libc.mount(b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, data), f"mount {folder}")


def _be_child(job, is_root, uid, given, printed, passed):
    """Never returns."""
    try:
        for source, target in ((given, 0), (printed, 1), (os.open(os.devnull, os.O_WRONLY), 2), (passed, 3)):
            os.dup2(source, target)
        os.closerange(4, 1 << 16)
        os.setsid()
        if job["isolate"]:
            _own_proc()
        base = _num_tasks(uid) if not is_root and not _counts_per_namespace(job["isolate"]) else 0
        _drop_rights(uid if is_root else None)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(job["folder"])
        limits = (
            (resource.RLIMIT_AS, job["memory_bytes"]),
            (resource.RLIMIT_FSIZE, job["file_bytes"]),
            (resource.RLIMIT_NPROC, base + job["num_processes"] + 2),
            (resource.RLIMIT_CPU, int(job["timeout_s"] * 2) + 2),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 256),
        )
        for which, limit in limits:
            resource.setrlimit(which, (limit, limit))
        os.write(3, _READY)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(3, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os._exit(_execute(job["code"], job["test"], job["secret"].encode()))


def _execute(code, test, secret):
    sys.argv = ["solution.py"]
    names = {"__name__": "__main__" if test is None else "solution", "__builtins__": __builtins__}
    try:
        sys.stdin = io.TextIOWrapper(
            io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="surrogateescape"
        )
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="surrogateescape"
        )
        exec(compile(code, "solution.py", "exec"), names)
        if test is not None:
            exec(compile(test, "test.py", "exec"), names)
            os.write(3, secret)
        sys.stdout.flush()
    except SystemExit as end:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        return 0 if end.code in (None, 0) else 1
    except BaseException:
        return 1
    return 0


def _watch(child, timeout_s):
    """Wait for the child's end, kill it at the limit; how it ended, in words."""
    handle = os.pidfd_open(child)
    try:
        in_time = bool(select.select([handle], [], [], timeout_s)[0])
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            os.killpg(child, signal.SIGKILL)
    finally:
        os.close(handle)
    _, status = os.waitpid(child, 0)
    if not in_time:
        return "timeout"
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit {os.WEXITSTATUS(status)}"


def _end_strays(is_root, uid):
    """End what the child left behind, where no namespace does that."""
    if is_root:
        killer = os.fork()
        if killer == 0:
            with contextlib.suppress(BaseException):
                os.setresuid(uid, uid, uid)
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
    for _ in range(1000):
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(word) for word in file.read().split()]
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _own_proc():
    """A /proc of its own; where that is not allowed (in some containers), an empty one."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if _libc.mount(b"proc", b"/proc", b"proc", flags, None) != 0:
        _check(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags | 1, b"size=4096"), "mount /proc")


def _drop_rights(uid):
    """Give up all capabilities, those over its own namespaces too; from root become `uid`, which owns nothing.

    From root, reading any file stays allowed where Python itself lies in folders that only root can read.
    """
    kept = 0
    if uid is not None:
        needed = [path for path in (sys.prefix, sys.base_prefix, *sys.path) if os.path.exists(path)]
        kept = 0 if all(map(_others_may_read, needed)) else 1 << _CAP_DAC_READ_SEARCH
        _prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def _others_may_read(path):
    path = os.path.realpath(path)
    while True:
        if not os.stat(path).st_mode & 0o001:
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)


def _counts_per_namespace(isolate):
    """Whether RLIMIT_NPROC counts the processes of the namespace alone (Linux 5.14), not all of the account."""
    major, minor = (int("".join(filter(str.isdigit, part))) for part in platform.release().split(".")[:2])
    return isolate and (major, minor) >= (5, 14)


def _num_tasks(uid):
    total = 0
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == uid:
                total += len(os.listdir(f"/proc/{entry}/task"))
    return total


def _prctl(option, value):
    _check(_libc.prctl(option, int(value), 0, 0, 0), f"prctl {option}")


def _check(result, what):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
