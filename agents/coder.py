"""Programs that solve a task: the model writes one, sees what it does with an example, and repairs it.

A message's program is run in a sandbox. Once it does the examples right, and at the last turn in any case, it is run on
hidden tests: what they give is its standard input, what they expect never leaves this process. The reward is the share
of them that it passes.

A task's data are ``prompt``, ``examples`` and ``tests``; the latter two are lists of standard input and output. Those
made here are small functions of two numbers; see ``solution``.
"""

from __future__ import annotations

import asyncio
import operator
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence

from agents import Env, Message, Result, Task
from tools.sandbox import Limits, Outcome, sandboxed

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "a + b": operator.add, "a - b": operator.sub, "a * b": operator.mul, "max(a, b)": max, "min(a, b)": min,
}  # fmt: skip
CONSTANTS = 200
TESTS = 4
SHOWN = 300
"""Characters of each output that the model sees: the first of standard output, the last of standard error."""


def held_out(name: str) -> bool:
    """Whether a function belongs to the evaluation: one in ten, by a fixed hash, in every run alike."""
    return zlib.crc32(name.encode()) % 10 == 0


def task_of(operation: str, constant: int) -> Task:
    """The same task in every run: a function, an example, and ``TESTS`` hidden tests of other numbers."""
    name = f"{operation} + {constant}"
    picked = random.Random(name).sample(range(10_000), 1 + TESTS)
    pairs = [divmod(number, 100) for number in picked]
    cases = [[f"{a} {b}\n", f"{OPERATIONS[operation](a, b) + constant}\n"] for a, b in pairs]
    return Task(name, {"prompt": f"f(a, b) = {name}", "examples": cases[:1], "tests": cases[1:]})


def solution(task: Task) -> str:
    """A right program for a task made here."""
    expression = task.data["prompt"].removeprefix("f(a, b) = ").replace(" ", "")
    return f"a,b=map(int,input().split())\nprint({expression})"


def program_of(text: str | None) -> str:
    """The last block of Python in a message (one that is not closed ends with it); the whole message without one."""
    blocks = re.findall(r"```(?:python|py)[ \t]*\n(.*?)(?:```|\Z)", text or "", re.S)
    return blocks[-1] if blocks else text or ""


def lines(output: str) -> list[str]:
    """An output as it is compared: spaces at the end of lines, and empty lines around it, do not count."""
    return [line.rstrip() for line in output.strip().split("\n")]


def right(outcome: Outcome, expected: str) -> bool:
    """Whether a program printed what was expected, and ended by itself and well."""
    return not outcome.ended and outcome.status == 0 and lines(outcome.stdout) == lines(expected)


def feedback(given: str, expected: str, outcome: Outcome) -> str:
    """What the model sees of an example that its program got wrong; parts that are empty are left out."""
    ended = outcome.ended or (f"status {outcome.status}" if outcome.status else "")
    parts = {"input": given, "expected": expected, "output": outcome.stdout[:SHOWN],
             "errors": outcome.stderr[-SHOWN:], "ended by": ended}  # fmt: skip
    return "\n".join(f"{name}:\n{text.strip()}" for name, text in parts.items() if text.strip() or name == "output")


class Coder(Env):
    """One program, and what it takes to get it right."""

    max_turns = 3
    limits = Limits()

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Task]:
        every = [(operation, constant) for operation in OPERATIONS for constant in range(CONSTANTS)]
        mine = [pair for pair in every if held_out("{} + {}".format(*pair)) == (split != "train")]
        rng = random.Random(seed if split == "train" else 0)
        while True:
            for pair in rng.sample(mine, len(mine)):
                yield task_of(*pair)
            if split != "train":
                return

    async def reset(self, task: Task) -> list[Message]:
        self.examples, self.tests, self.turns = task.data["examples"], task.data["tests"], 0
        return [{"role": "user", "content": task.data["prompt"]}]

    async def step(self, action: Message) -> Result:
        self.turns += 1
        program = program_of(action["content"])
        if self.turns < self.max_turns:
            for case, outcome in await self.run_on(program, self.examples):
                if not right(outcome, case[1]):
                    return Result([{"role": "user", "content": feedback(*case, outcome)}])
        passed = [right(outcome, expected) for (_, expected), outcome in await self.run_on(program, self.tests)]
        return Result(reward=sum(passed) / len(passed), terminated=True, info={"turns": self.turns})

    async def run_on(self, program: str, cases: Sequence[Sequence[str]]) -> list[tuple[Sequence[str], Outcome]]:
        """Each of the cases with what the program did; as many run at once as there are cores."""
        runs = (sandboxed({"main.py": program}, ["main.py"], given, self.limits) for given, _ in cases)
        return list(zip(cases, await asyncio.gather(*runs), strict=True))


AgentRunner = Coder
