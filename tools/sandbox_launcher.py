"""Runs one program as confined as the system allows: the process that ``sandbox.sandboxed`` starts.

It is started by the base interpreter with the path of an order (JSON, see ``sandbox.py``), imports nothing of Instar,
and is strict: the first part that the system refuses is named in the order's report and ends it before the program
runs. Its caller then asks again without that part. Three processes: this one confines itself and waits; its child is
the first of the new process namespace, with which all others die; that one's child becomes the program.
"""

import ctypes
import errno
import json
import os
import resource
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534
NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000 | 0x20000000 | 0x00020000  # CLONE_NEW: USER, NET, IPC, PID, NS
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
NO_NEW = 2 | 4  # MS_NOSUID, MS_NODEV


def call(name: str, *args: object) -> int:
    """A function of Linux's C library. Raises ``OSError``, as it does on another system."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{name}: not on {sys.platform}")
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in args]
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


@contextmanager
def part(name: str, order: dict) -> Iterator[None]:
    """An error in here is reported as this part's, and ends this process: no program runs."""
    try:
        yield
    except Exception as error:  # whatever it is: else it would pass for one of the program's
        said = json.dumps([name, getattr(error, "errno", None), f"{type(error).__name__}: {error}"])
        os.write(order["report"], said.encode())
        os._exit(1)


def another_user(order: dict) -> None:
    """Root becomes nobody, who owns the program's folder and nothing else."""
    if os.getuid() == 0:
        os.chown(order["box"], NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        if "namespaces" in order["without"]:  # then both have to be where nobody may go
            Path(order["prefix"], "lib").stat()
            Path(order["box"], "..", "box").stat()


def namespaces(order: dict) -> None:
    """No network, none of the system's processes, and a file system in memory with what a program needs.

    The interpreter may lie where nobody may go, such as below /root: it is the working folder since before this
    process became nobody, and is mounted from there.
    """
    uid, gid = os.getuid(), os.getgid()
    call("prctl", 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self is still root's
    call("unshare", NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text)
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", NO_NEW, b"size=1m,mode=755")  # where it stands matters to nobody
    for path in filter(Path.exists, map(Path, (*READABLE, *DEVICES))):
        bind(path, Path(f"/tmp{path}"))
    bind(Path(), Path("/tmp" + order["prefix"]))
    Path("/tmp/box").mkdir()
    call("syscall", 442, -100, b"/tmp", 0x8000, struct.pack("4Q", 1 | 2, 0, 0, 0), 32)  # all of it: read-only, no suid
    call("mount", b"tmpfs", b"/tmp/box", b"tmpfs", NO_NEW, f"size={order['folder_bytes']},nr_inodes=4k".encode())
    os.chroot("/tmp")
    order["box"] = "/box"


def bind(source: Path, target: Path) -> None:
    """Mount a folder or file at ``target``, which is made."""
    (target if source.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
    if not source.is_dir():
        target.touch()
    call("mount", bytes(source), bytes(target), None, 0x1000 | 0x4000, None)  # MS_BIND, MS_REC


def landlock(order: dict) -> None:
    """No file but the interpreter's and the folder's, no TCP, no signal and no abstract socket to the outside."""
    abi = call("syscall", 444, None, 0, 1)
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1  # the rights to files that this ABI knows
    rules = call("syscall", 444, struct.pack("3Q", every, 3 * (abi >= 4), 3 * (abi >= 6)), 24, 0)
    rights = dict.fromkeys((order["prefix"], *READABLE), 1 | 4 | 8) | dict.fromkeys(DEVICES, 2 | 4)
    for path, right in (rights | {order["box"]: every}).items():  # 1: execute, 2: write, 4: read, 8: list
        if Path(path).exists():
            right &= every if Path(path).is_dir() else 1 | 2 | 4
            call("syscall", 445, rules, 1, struct.pack("=Qi", right, os.open(path, os.O_PATH)), 0)
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("syscall", 446, rules, 0)


def limits(order: dict) -> None:
    """The limits of one process, as far below those of this one as they are."""
    for name, value in order["limits"].items():
        most = resource.getrlimit(kind := getattr(resource, name))[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value + (name == "RLIMIT_CPU" and value != most)))  # SIGXCPU, then SIGKILL


def write_files(order: dict) -> None:
    """The program's files, and a virtual environment without packages: the standard library is all there is."""
    os.chdir(order["box"])
    config = f"home = {Path(order['python']).parent}\ninclude-system-site-packages = false\n"
    for name, text in (order["files"] | {".python/pyvenv.cfg": config}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, "utf-8", "replace")
    Path(".python/python3").symlink_to(order["python"])


def become(order: dict) -> None:
    """The program, with an environment that has nothing of ours."""
    env = {"PATH": "/usr/bin:/bin", "HOME": order["box"], "TMPDIR": order["box"], "LANG": "C.UTF-8"}
    os.execve(".python/python3", [f"{order['box']}/.python/python3", *order["arguments"]], env)


def wait_for(child: int) -> None:
    """End as the child ends; 128 + the signal, as in a shell, where one ended it. Orphans are buried meanwhile."""
    while True:  # for as long as the caller's time limit lets it
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def end_with_parent() -> None:
    if sys.platform == "linux":
        call("prctl", 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL; a change of user undoes it


def main(order: dict) -> None:
    os.chdir(order["prefix"])
    confine(order, {"another user": another_user, "namespaces": namespaces, "Landlock": landlock})
    for _ in range(2):
        end_with_parent()
        if child := os.fork():
            wait_for(child)
    end_with_parent()
    write_files(order)
    confine(order, {"limits": limits})
    become(order)


def confine(order: dict, parts: dict) -> None:
    for name in parts:
        if name not in order["without"]:
            with part(name, order):
                parts[name](order)


if __name__ == "__main__":
    order = json.loads(Path(sys.argv[1]).read_text())
    order["report"] = os.open(order["report"], os.O_WRONLY)
    with part("launcher", order):
        main(order)
