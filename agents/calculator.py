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
        if not action.get("tool_calls"):
            numbers = re.findall(r"-?\d+", action["content"] or "")
            right = bool(numbers) and int(numbers[-1]) == self.a + self.b
            return Result(reward=float(right), terminated=True, info={"tool_calls": self.calls})
        self.calls += len(action["tool_calls"])
        return Result(observation=[self.answer(call) for call in action["tool_calls"]])

    def answer(self, call: dict) -> Message:
        """The tool's reply; a malformed call gets an error to read, as from a real tool."""
        try:
            arguments = json.loads(call["function"]["arguments"])
            text = str(int(arguments["a"]) + int(arguments["b"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            text = "error"
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


AgentRunner = Calculator
