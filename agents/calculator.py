"""Sums of two numbers, with a calculator at hand: the smallest agent that has to learn to use a tool.

The model may guess the sum, or call ``add`` and copy what it answers. A small model guesses badly, so reward
teaches it to call the tool. Reward is 1 when the last number of the final answer is the right sum, else 0.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterator
from itertools import count, islice

from agents import Env, Message, Result, Task

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
EVAL_TASKS = 256


def held_out(a: int, b: int) -> bool:
    """Whether ``a + b`` belongs to the evaluation: one sum in ten, by a fixed hash, in every run alike."""
    return zlib.crc32(f"{a}+{b}".encode()) % 10 == 0


def problems(seed: int, held: bool) -> Iterator[tuple[int, int]]:
    """Endless pairs of 2- to 4-digit numbers on one side of the split."""
    rng = random.Random(seed)
    for _ in count():
        a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for digits in (rng.randint(2, 4), rng.randint(2, 4)))
        if held_out(a, b) == held:
            yield a, b


def four_numbers(split: str, seed: int) -> Iterator[Task]:
    """Two sums at a time, for agents whose work has several steps."""
    sums = Calculator.tasks(split, seed)
    for one, two in zip(sums, sums, strict=False):
        yield Task(f"{one.task_id}+{two.task_id}", {"numbers": [*one.data.values(), *two.data.values()]})


def call_tool(name: str, arguments: str | dict) -> str:
    """What ``add`` answers; an error to read, as from a real tool, where the call makes no sense."""
    if name != "add":
        return "error"
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(int(given["a"]) + int(given["b"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "error"


def last_number(text: str | None) -> int | None:
    """The number that an answer ends with; None where there is none, or one too long to be meant."""
    numbers = re.findall(r"-?\d+", text or "")
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 100 else None


class Calculator(Env):
    """One sum."""

    tools = (ADD,)
    max_turns = 3

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Task]:
        pairs = problems(seed, False) if split == "train" else islice(problems(0, True), EVAL_TASKS)
        for a, b in pairs:
            yield Task(f"{a}+{b}", {"a": a, "b": b})

    async def reset(self, task: Task) -> list[Message]:
        self.a, self.b, self.calls = task.data["a"], task.data["b"], 0
        return [{"role": "user", "content": f"What is {self.a} + {self.b}?"}]

    async def step(self, action: Message) -> Result:
        calls = action.get("tool_calls")
        if not calls:
            right = last_number(action["content"]) == self.a + self.b
            return Result(reward=float(right), terminated=True, info={"tool_calls": self.calls})
        self.calls += len(calls)
        said = [call_tool(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        answers = zip(calls, said, strict=True)
        return Result([{"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in answers])


AgentRunner = Calculator
