"""The largest of three numbers, after one example: about the smallest task there is, for the smallest real model."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agents import Env, Message, Result, Task

HELD_OUT = 4
"""Triples whose sum is a multiple of it are for evaluation alone."""


class Largest(Env):
    """One turn; the answer is right or it is not."""

    max_turns = 1

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Task]:
        """Endless; the same triples for every seed in evaluation."""
        rng = random.Random(f"{split} {seed if split == 'train' else ''}")
        while True:
            numbers = rng.sample(range(10, 100), 3)
            if (sum(numbers) % HELD_OUT == 0) == (split == "eval"):
                yield Task(" ".join(map(str, numbers)), {"numbers": numbers})

    async def reset(self, task: Task) -> list[Message]:
        self.numbers = task.data["numbers"]
        return [{"role": "system", "content": "Say the largest."},
                {"role": "user", "content": "17, 52, 38"}, {"role": "assistant", "content": "\\boxed{52}"},
                {"role": "user", "content": ", ".join(map(str, self.numbers))}]  # fmt: skip

    async def step(self, action: Message) -> Result:
        right = (action["content"] or "").strip() == f"\\boxed{{{max(self.numbers)}}}"
        return Result(reward=float(right), terminated=True)


AgentRunner = Largest
