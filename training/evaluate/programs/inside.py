"""The inside of the sandbox: this file runs as a script, whose child is process 1 of the namespace.

It reads a job as JSON from standard input, enters new namespaces and builds a root file system in
which programs can write only to one small folder. Then it runs the job's commands in sequence, each
with limits, and writes a line of JSON for each to the file descriptor in its argument. The
programs' output goes to standard output. `training.evaluate.programs.sandbox` starts it.

It imports only the standard library and calls libc through ctypes, because Python 3.11 has no
`os.unshare` and no Python has `mount`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)

_NEWNS, _NEWUSER = 0x20000, 0x10000000
_NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x4000000, 0x8000000, 0x20000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV = 0x1000, 0x4000, 1 << 18, 0x2, 0x4
_DETACH = 2
# System call numbers; mount_setattr has the same one on all architectures.
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_SET_READ_ONLY, _SET_NOSUID = 0x1, 0x2
_AT_RECURSIVE = 0x8000
_DEATH_SIGNAL, _DUMPABLE, _NO_NEW_PRIVILEGES = 1, 4, 38

_USER = 1000  # user id inside; not root, so that execve drops all capabilities
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MOST_FILES = 4096
_POLL = 0.01  # seconds
# Calls that no program under test needs, and calls that allocate memory outside all limits.
_REFUSED_CALLS = (
    *("socket", "memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open"),
    *("unshare", "setns", "mount", "fsopen", "fsmount", "open_tree", "move_mount", "pivot_root"),
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "ptrace", "process_vm_readv"),
    *("process_vm_writev", "keyctl", "add_key", "request_key"),
)


def main() -> None:
    """Read the job, enter the sandbox, run the commands."""
    report = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    os.set_inheritable(report.fileno(), False)
    job = json.load(sys.stdin)
    try:
        _call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        call_filter = _call_filter()
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        _enter(job, proc)
        first = os.fork()
    except OSError as error:
        report.write(json.dumps({"refused": f"{error.filename}: {error.strerror}"}) + "\n")
        sys.exit(1)
    if first:
        os.waitpid(first, 0)
        return
    _call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.close(proc)
    layers = ["namespaces", *(["system call filter"] if call_filter else [])]
    report.write(json.dumps({"layers": layers}) + "\n")
    for name, text in job["files"].items():
        Path(name).write_text(text, encoding="utf-8")
    for command in job["commands"]:
        ended = _run(command, job["limits"], call_filter)
        report.write(json.dumps(ended) + "\n")
        if ended["ended"] != "exit 0":
            return


def _call(name: str, *arguments: Any) -> int:
    """Call a function of libc.

    Raises:
        OSError: it failed; `filename` is the function's name.
    """
    result = getattr(_LIBC, name)(*(_c(argument) for argument in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def _c(argument: Any) -> Any:
    if isinstance(argument, str):
        return argument.encode()
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _enter(job: dict[str, Any], proc: int) -> None:
    """Enter new namespaces, with a new root and a user that owns no file of the machine."""
    separate = _NEWUSER | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    if os.geteuid() == 0:
        # The process limit does not apply to root, so the sandbox switches to a user id of its own.
        _call("unshare", _NEWNS)
        _make_root(job)
        _become(0x70000000 + os.getpid())
        user, group = os.geteuid(), os.getegid()
        _call("unshare", separate)
        _map(proc, user, group)
    else:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", separate | _NEWNS)
        _map(proc, user, group)
        _make_root(job)
    # In a nested user namespace a program could mount file systems of unlimited size.
    _write(proc, "sys/user/max_user_namespaces", "0")


def _become(user: int) -> None:
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        # Containers may have no user but root; start the evaluation as another user there.
        raise OSError(error.errno, error.strerror, f"root becoming user {user}") from error
    # A change of user clears both: without DUMPABLE root owns /proc/self/uid_map.
    _call("prctl", _DUMPABLE, 1, 0, 0, 0)
    _call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _map(proc: int, user: int, group: int) -> None:
    _write(proc, "self/setgroups", "deny")
    _write(proc, "self/uid_map", f"{_USER} {user} 1")
    _write(proc, "self/gid_map", f"{_USER} {group} 1")


def _write(proc: int, name: str, text: str) -> None:
    try:
        file = os.open(name, os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"/proc/{name}") from error


def _make_root(job: dict[str, Any]) -> None:
    """Switch to a root with the job's `visible` paths, read-only, and one writable folder."""
    root = job["root"]
    _call("mount", None, "/", None, _RECURSIVE | _PRIVATE, None)
    _call("mount", "tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in job["visible"]:
        _show(path, root + path)
    for device in _DEVICES:
        _show(f"/dev/{device}", f"{root}/dev/{device}", writable=True)
    box = root + job["folder"]
    os.makedirs(box)
    size = job["limits"]["files"]
    options = f"size={size},nr_inodes={_MOST_FILES},mode=777"
    _call("mount", "tmpfs", box, "tmpfs", _NOSUID | _NODEV, options)
    os.symlink(job["folder"], f"{root}/tmp")
    _restrict(root)
    os.chdir(root)
    machine = os.uname().machine
    if machine not in _PIVOT_ROOT:
        raise OSError(errno.ENOSYS, f"not known on {machine}", "pivot_root")
    _call("syscall", _PIVOT_ROOT[machine], ".", ".")
    _call("umount2", ".", _DETACH)
    os.chdir(job["folder"])


def _show(path: str, target: str, *, writable: bool = False) -> None:
    """Bind-mount `path` of the machine at `target`; copy a symbolic link as a link."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        Path(target).touch()
    _call("mount", path, target, None, _BIND | _RECURSIVE, None)
    if not writable:
        _restrict(target, _AT_RECURSIVE)


def _restrict(target: str, flags: int = 0) -> None:
    """Make a mount read-only, with `_AT_RECURSIVE` all mounts below it too (Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(_SET_READ_ONLY | _SET_NOSUID, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    _call("syscall", _MOUNT_SETATTR, -100, target, flags, ctypes.byref(attributes), size)


def _run(command: dict[str, Any], limits: dict[str, int], call_filter: Any) -> dict[str, Any]:
    """Run one command until it ends or its time is over, then kill all of its processes."""
    began = time.monotonic()
    program = os.fork()
    if not program:
        with contextlib.suppress(BaseException):
            _become_program(command, limits, call_filter)
        os._exit(127)
    ended = None
    while ended is None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            ended = f"exit {code}" if code >= 0 else signal.Signals(-code).name
        elif time.monotonic() - began > command["seconds"]:
            ended = "time"
        elif not pid:
            time.sleep(_POLL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # every process of the namespace except this one
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return {"ended": ended}


def _become_program(command: dict[str, Any], limits: dict[str, int], call_filter: Any) -> None:
    seconds = int(command["seconds"]) + 1
    for name, most in (
        ("RLIMIT_AS", limits["memory"]),
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_FSIZE", limits["files"]),
        ("RLIMIT_NPROC", limits["processes"] + 2),  # this process and its parent count
        ("RLIMIT_NOFILE", 256),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MEMLOCK", 0),
        ("RLIMIT_MSGQUEUE", 0),
        ("RLIMIT_STACK", 8 << 20),
    ):
        resource.setrlimit(getattr(resource, name, _MSGQUEUE), (most, most))
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(1, 2)
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if call_filter is not None:
        load, context = call_filter
        if load(context):
            os._exit(126)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": os.getcwd(), "LANG": "C.UTF-8"}
    os.execve(command["program"][0], command["program"], environment)


_MSGQUEUE = 12  # RLIMIT_MSGQUEUE, which the module `resource` does not define


def _call_filter() -> Any:
    """(libseccomp's `seccomp_load`, a filter), or None when libseccomp is not installed."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(allow)))
    for name in _REFUSED_CALLS:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            library.seccomp_rule_add(context, ctypes.c_uint32(refuse), number, 0)
    return library.seccomp_load, context


if __name__ == "__main__":
    main()
