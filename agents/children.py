"""Programs that agents start: in a process group of their own, with limits, and without our secrets.

``run_program`` runs any program, ``in_child`` a function of yours. Neither blocks the loop that runs the agents, and
whatever happens nothing is left running.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib.util
import inspect
import json
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any


def end_with_parent() -> None:
    """Die when the parent dies, be it by a signal that leaves it no time to stop what it started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


SHOWN = re.compile(
    "PATH|HOME|LANG|LC_.*|TZ|TERM|TMPDIR|USER|LOGNAME|SHELL|VIRTUAL_ENV|LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES|"
    "SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(?i:(http|https|all|no)_proxy)|PYTHON(?!STARTUP$).*"
)
"""Names of the variables of our environment that a program sees."""


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """A program's environment: what of ours is ``SHOWN`` and what the caller adds, of which ``INSTAR_*`` never."""
    ours = {name: value for name, value in os.environ.items() if SHOWN.fullmatch(name)}
    return {name: value for name, value in (ours | dict(more)).items() if not name.startswith("INSTAR_")}


async def run_program(command: Sequence[str], given: bytes, time_limit_s: float, env: Mapping[str, str] | None = None,
                      output_limit: int = 2**20) -> tuple[bytes, bytes, int]:  # fmt: skip
    """Run a program with ``given`` on its standard input: its standard output, standard error, and exit status.

    It has a process group of its own, which ends with it, whatever happens. Its environment is ``env`` and, of ours,
    only what ``SHOWN`` lists (paths, locale, proxies, certificates, ``PYTHON*``): no key or token of the trainer's is
    among it, and ``INSTAR_*`` not even if asked for. What else a program needs is passed in ``env``. Raises
    ``TimeoutError``, and ``RuntimeError`` for more than ``output_limit`` bytes of either output.
    """
    out, err, status, limit = await run_to_limits(command, given, time_limit_s, environment(env or {}), output_limit)
    if limit == "time limit":
        raise TimeoutError(f"{command[0]} ran for more than {time_limit_s} s")
    if limit:
        raise RuntimeError(f"{command[0]} wrote more than {output_limit} bytes")
    return out, err, status


async def run_to_limits(command: Sequence[str], given: bytes, time_limit_s: float, env: Mapping[str, str],
                        output_limit: int) -> tuple[bytes, bytes, int, str]:  # fmt: skip
    """``run_program`` in exactly this environment, where a limit is a result: the "time limit" or "output limit" that
    ended the program is named last, "" if none did, and what it wrote until then is there, cut to the limit."""
    out, err, limit = bytearray(), bytearray(), ""
    with tempfile.TemporaryFile() as file:  # not a pipe: a program need not read what it is given
        file.write(given)
        file.seek(0)
        how = {"env": env, "stdin": file, "stdout": PIPE, "stderr": PIPE, "start_new_session": True}
        starting = asyncio.create_task(asyncio.create_subprocess_exec(*command, **how))
        try:
            program = await asyncio.shield(starting)
            reading = (
                read(program.stdout, program, output_limit, out),
                read(program.stderr, program, output_limit, err),
            )
            with suppress(TimeoutError):
                limit = "time limit"
                async with asyncio.timeout(time_limit_s):
                    await asyncio.gather(*reading, exited(program))
                    limit = ""
        finally:  # also when the caller is cancelled, be it while the program starts
            program = await starting
            kill(program)
            await exited(program)
    limit = "output limit" if max(len(out), len(err)) > output_limit else limit
    return bytes(out[:output_limit]), bytes(err[:output_limit]), program.returncode, limit


async def read(stream: asyncio.StreamReader, program: Process, limit: int, into: bytearray) -> None:
    """All of an output, or one byte more than the limit; the program that writes as much is ended."""
    while chunk := await stream.read(2**16):  # to the end, even of one that was ended: else its pipe stays open
        into += chunk[: limit + 1 - len(into)]
        if len(into) > limit:
            kill(program)


def kill(program: Process) -> None:
    """End the program's process group: itself and what it started, unless that left the group."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


async def exited(program: Process) -> None:
    """Wait until the program is gone, then end what it left behind. ``Process.wait`` would wait for that as well."""
    while program.returncode is None:
        await asyncio.sleep(0.02)
    kill(program)


CHILDREN = asyncio.Semaphore(os.cpu_count() or 1)
"""Children of ``in_child`` that may run at once."""


async def in_child(function: Callable, *args: Any, time_limit_s: float) -> Any:
    """``function(*args)`` in a process of its own: code that blocks, crashes or never returns costs its own rollout.

    The function stands at the top of a file or in a class there, where the child finds it by name; arguments and result
    are what JSON holds. Waiting for a core does not count against the limit. Raises ``TimeoutError`` at it, and
    ``RuntimeError`` with the error of a function that raises, or the status and last words of a process that dies.

    >>> reward = await in_child(grade, answer, time_limit_s=10)  # doctest: +SKIP
    """
    plain = inspect.unwrap(function)
    if not inspect.isfunction(plain) or "<" in plain.__qualname__:  # a bound method would come without its self
        raise ValueError(f"in_child takes a function at the top of a file, not {function!r}")
    where = plain.__module__ if plain.__globals__.get("__package__") else inspect.getfile(plain)
    call = json.dumps([where, plain.__qualname__, args]).encode()
    path = [str(Path(__file__).parent.parent), *map(str, sys.path)]  # not PYTHONPATH: its programs would inherit that
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {path}; from agents.children import answer; answer()"]
    async with CHILDREN:
        out, err, status = await run_program(command, call, time_limit_s)
    last = (err.decode(errors="replace").strip().splitlines() or ["nothing on standard error"])[-1]
    result, error = json.loads(out) if out and not status else (None, f"ended with status {status}: {last}")
    if error:
        raise RuntimeError(f"{plain.__qualname__} {error}")
    return result


def answer() -> None:
    """The child of ``in_child``: what the function prints goes to standard error, its result or error to the output."""
    end_with_parent()
    where, name, args = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        module = module_of(where) if where.endswith(".py") else importlib.import_module(where)
        said = json.dumps([functools.reduce(getattr, name.split("."), module)(*args), None])
    except Exception as error:  # the function's: told in one line
        said = json.dumps([None, " ".join(f"raised {type(error).__name__}: {error}".split())])
    print(said, file=out, flush=True)


def module_of(path: str) -> ModuleType:
    """The module that a Python file makes."""
    spec = importlib.util.spec_from_file_location(f"instar_agent_{Path(path).stem}", Path(path).resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
