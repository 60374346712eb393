"""Runs a Python program that nobody vouches for, such as one that a model wrote.

It runs as another user (if we are root), in namespaces of its own, under Landlock and under resource limits; see
``tools/sandbox_launcher.py``. A part that the system refuses is done without, and one warning names it: what is
missing is found by trying. Nothing here bounds what all of its processes take together but their number and the time
limit.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import logging
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents import children

log = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
PARTS = ("another user", "namespaces", "Landlock", "limits")
NOT_ALLOWED = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC}
MISSING: dict[str, str] = {}
"""Parts that this system refused, and its words."""


@dataclass(frozen=True)
class Limits:
    """What a program may take. Each of its processes has the CPU time, memory, and files to itself."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 16 * 2**20
    folder_bytes: int = 64 * 2**20
    """All of its files together, where it has namespaces; they are in memory there."""
    open_files: int = 64
    processes: int = 64
    """The two that watch over it among them."""
    output_bytes: int = 64 * 2**10
    """Of standard output, and of standard error."""


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    stdout: str
    stderr: str
    status: int
    """Its exit status; 128 + the signal if one ended it, negative if we did."""
    ended: str
    """"time limit", "output limit" or "CPU limit" if that ended it, else ""."""


async def sandboxed(files: Mapping[str, str], arguments: Sequence[str], given: str = "",
                    limits: Limits = Limits()) -> Outcome:  # fmt: skip
    """Run Python with these arguments in a new folder that has these files, and ``given`` on its standard input.

    It has the standard library, and can reach neither the network nor any file but the interpreter's and its folder's.
    As many run at once as there are cores, which others wait for; that does not count against the time limit. A limit
    is a result. Raises ``RuntimeError`` when no program could be started.
    """
    async with children.CHILDREN:
        while True:
            without = list(MISSING)
            outcome, refused = await attempt(files, arguments, given.encode(errors="replace"), limits, without)
            if not refused:
                warn(", ".join(f"{part} ({MISSING[part]})" for part in without))
                return outcome
            part, number, words = refused
            if part not in PARTS or part in without or number not in NOT_ALLOWED:
                raise RuntimeError(f"the sandbox cannot start a program: {part}: {words}")
            MISSING[part] = words


async def attempt(files: Mapping[str, str], arguments: Sequence[str], given: bytes, limits: Limits,
                  without: Sequence[str]) -> tuple[Outcome, list]:  # fmt: skip
    """One try without these parts, and what was refused: the part, the error's number, its words."""
    folder = Path(tempfile.mkdtemp(prefix="instar-"))
    try:
        order, report = folder / "order.json", folder / "report.json"
        (folder / "box").mkdir()
        report.touch()
        order.write_text(json.dumps(described(limits) | {
            "box": str(folder / "box"), "report": str(report), "files": dict(files), "arguments": list(arguments),
            "prefix": sys.base_prefix, "python": str(PYTHON), "without": list(without),
        }))  # fmt: skip
        order.chmod(0o600)
        folder.chmod(0o711)  # another user goes through it, and reads nothing in it
        command, env = [str(PYTHON), "-I", "-S", str(LAUNCHER), str(order)], children.environment({})
        out, err, status, ended = await children.run_to_limits(command, given, limits.wall_s, env, limits.output_bytes)
        ended = ended or "CPU limit" * (status == 128 + signal.SIGXCPU)
        refused = json.loads(report.read_text() or "[]")
        return Outcome(out.decode(errors="replace"), err.decode(errors="replace"), status, ended), refused
    finally:  # by a program: what is nested deeply is too deep for rmtree; in a thread, which no cancelling ends
        await asyncio.to_thread(subprocess.run, ["rm", "-rf", folder], timeout=60, check=False)


@functools.cache
def warn(missing: str) -> None:
    """Say what programs run without; each once."""
    if missing:
        log.warning("programs of a model run without a part of their sandbox that this system refuses: %s", missing)


def described(limits: Limits) -> dict:
    """The limits by the names that the system has for them."""
    return {"folder_bytes": limits.folder_bytes, "limits": {
        "RLIMIT_CPU": limits.cpu_s, "RLIMIT_AS": limits.memory_bytes, "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.open_files, "RLIMIT_NPROC": limits.processes, "RLIMIT_CORE": 0,
    }}  # fmt: skip
