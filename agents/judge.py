"""Reward by a judge: another model, or the policy itself, reads the answer and says a grade.

By default the judge is the policy's own engines, through a session of its own (``ctx.aside``): it has its own sampling
parameters, and nothing it says is ever trained. ``INSTAR_JUDGE_URL`` and ``INSTAR_JUDGE_MODEL`` name any other
OpenAI-compatible API instead, ``OPENAI_API_KEY`` its key. A judge that fails, or says no grade, fails the rollout:
that is not a reward of 0.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from itertools import product

from openai import AsyncOpenAI

from agents import ChatAgent, Context, Result, Task, opening

RUBRIC = "Is it polite? {answer}"
"""What the judge is asked. A real one states the question, what matters, and the scale."""
SORTS, THINGS = ("red", "blue", "old", "new", "big"), ("cup", "hat", "map", "pen")
GRADES = {"yes": 1.0, "no": 0.0}
JUDGE_LIMIT_S = 120.0


def requests(split: str, seed: int) -> Iterator[Task]:
    """Things to ask for, one in ten held out."""
    things = [f"{sort} {thing}" for sort, thing in product(SORTS, THINGS)]
    pairs = [(i, f"Ask for the {thing}.") for i, thing in enumerate(things) if (split == "eval") == (i % 10 == 9)]
    random.Random(seed).shuffle(pairs)
    for index, prompt in pairs:
        yield Task(f"request-{index}", {"prompt": prompt})


class Judged(ChatAgent):
    """One turn, and its grade."""

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Task]:
        return super().tasks(split, seed) if cls.data.get(split) else requests(split, seed)

    async def run(self, task: Task, ctx: Context) -> Result:
        reply = await ctx.chat(opening(task.data), [])
        if reply.finish_reason == "length":
            return Result(truncated=True)
        if url := os.environ.get("INSTAR_JUDGE_URL"):
            return Result(reward=await grade(url, os.environ.get("INSTAR_JUDGE_MODEL", ""), reply.message["content"]))
        async with ctx.aside() as url:
            return Result(reward=await grade(url, "policy", reply.message["content"]))


async def grade(url: str, model: str, answer: str) -> float:
    """The judge's grade. Raises ``RuntimeError`` when it says none, and what the SDK raises when it does not answer."""
    key = os.environ.get("OPENAI_API_KEY", "-")
    async with AsyncOpenAI(base_url=url, api_key=key, timeout=JUDGE_LIMIT_S) as client:
        asked = [{"role": "user", "content": RUBRIC.format(answer=answer)}]
        judged = await client.chat.completions.create(model=model, messages=asked, temperature=0.0, max_tokens=64)
    said = judged.choices[0].message.content or ""
    found = re.findall("|".join(GRADES), said.lower())
    if not found:
        raise RuntimeError(f"the judge gave no grade, one of {', '.join(GRADES)}: {said[:100]!r}")
    return GRADES[found[-1]]


AgentRunner = Judged
