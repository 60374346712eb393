"""Any program as an agent: a script, a binary, somebody else's coding agent.

The program is started once per rollout. It finds the model's address in its environment, under the names that the
OpenAI and Anthropic SDKs read by themselves, and the task as JSON on its standard input. It reports by its last line
of output that is a JSON object with a ``reward`` (``truncated`` and any further numbers may stand beside it), or, if it
prints none, by its exit status: 0 is a reward of 1, 1 a reward of 0. Anything else is a crash, not a bad result; so is
a Python traceback, whose status is 1 as well.

To run another program, name it in ``command`` and its tasks in ``tasks``.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

from agents import ChatAgent, Context, Result, Task, run_program
from agents.calculator import Calculator


class External(ChatAgent):
    """The sums, solved by external_program.py."""

    command = (sys.executable, str(Path(__file__).with_name("external_program.py")))
    time_limit_s = 240.0
    output_limit = 2**20
    """Bytes, of standard output and of standard error."""

    tasks = Calculator.tasks

    async def run(self, task: Task, ctx: Context) -> Result:
        env = {"OPENAI_BASE_URL": ctx.base_url, "ANTHROPIC_BASE_URL": ctx.session_url,
               "OPENAI_API_KEY": "-", "ANTHROPIC_API_KEY": "-"}  # fmt: skip
        given = json.dumps(task.data).encode()
        out, err, status = await run_program(self.command, given, self.time_limit_s, env, self.output_limit)
        return result(out.decode(errors="replace"), err.decode(errors="replace"), status)


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
