"""Any program as an agent: a script, a binary, somebody else's coding agent.

The program is started once per rollout. It finds the model's address in its environment, under the names that the
OpenAI and Anthropic SDKs read by themselves, and the task as JSON on its standard input. It reports by its last line
of output that is a JSON object with a ``reward`` (``truncated`` and any further numbers may stand beside it), or, if it
prints none, by its exit status: 0 is a reward of 1, 1 a reward of 0. Anything else is a crash, not a bad result; so is
a Python traceback, whose status is 1 as well.

To run another program, name it in ``command`` and its tasks in ``tasks``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

from agents import ChatAgent, Context, Result, Task
from agents.calculator import Calculator


class External(ChatAgent):
    """The sums, solved by external_program.py."""

    command = (sys.executable, str(Path(__file__).with_name("external_program.py")))
    time_limit_s = 240.0
    output_limit = 2**20
    """Bytes, of standard output and of standard error."""

    tasks = Calculator.tasks

    async def run(self, task: Task, ctx: Context) -> Result:
        env = {name: value for name, value in os.environ.items() if not name.startswith("INSTAR_")}
        env |= {"OPENAI_BASE_URL": ctx.base_url, "ANTHROPIC_BASE_URL": ctx.session_url}
        env |= {"OPENAI_API_KEY": "-", "ANTHROPIC_API_KEY": "-"}
        with tempfile.TemporaryFile() as given:  # not a pipe: a program need not read its task
            given.write(json.dumps(task.data).encode())
            given.seek(0)
            how = {"env": env, "stdin": given, "stdout": PIPE, "stderr": PIPE, "start_new_session": True}
            starting = asyncio.create_task(asyncio.create_subprocess_exec(*self.command, **how))
            try:
                program = await asyncio.shield(starting)
                async with asyncio.timeout(self.time_limit_s):
                    reading = (self.read(stream, program) for stream in (program.stdout, program.stderr))
                    out, err, _ = await asyncio.gather(*reading, exited(program))
            finally:  # also when the rollout is cancelled, be it while the program starts
                program = await starting
                kill(program)
                await exited(program)
        return result(out, err, program.returncode)

    async def read(self, stream: asyncio.StreamReader, program: Process) -> str:
        """All of a program's output. A program that writes more than ``output_limit`` is ended: ``RuntimeError``."""
        data = b""
        while chunk := await stream.read(2**16):  # to the end, even of one that was ended: else its pipe stays open
            data = (data + chunk)[: self.output_limit + 1]
            if len(data) > self.output_limit:
                kill(program)
        if len(data) > self.output_limit:
            raise RuntimeError(f"{self.command[0]} wrote more than {self.output_limit} bytes")
        return data.decode(errors="replace")


def kill(program: Process) -> None:
    """End the program's process group: itself and what it started, unless that left the group."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


async def exited(program: Process) -> None:
    """Wait until the program is gone, then end what it left behind. ``Process.wait`` would wait for that as well."""
    while program.returncode is None:
        await asyncio.sleep(0.05)
    kill(program)


def result(out: str, err: str, status: int) -> Result:
    """What the program reported. Raises ``RuntimeError`` when it crashed."""
    for line in reversed(out.split("\n")):
        with suppress(ValueError, RecursionError):
            said = json.loads(line)
            if isinstance(said, dict) and isinstance(said.get("reward"), int | float):
                info = {name: value for name, value in said.items() if isinstance(value, int | float)}
                return Result(reward=info.pop("reward"), truncated=bool(info.pop("truncated", False)), info=info)
    if status not in (0, 1) or (status == 1 and "Traceback (most recent call last)" in err):
        last = (err.strip().splitlines() or ["nothing on standard error"])[-1]
        raise RuntimeError(f"the program ended with status {status}: {last}")
    return Result(reward=1.0 - status)


AgentRunner = External
