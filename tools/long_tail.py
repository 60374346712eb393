"""The agent of ``python -m tools.bench lag``: one rollout in eight has twenty turns, the others one.

What is said means nothing, and rewards only have to differ: the share of turns whose answer has a digit in it.
"""

from __future__ import annotations

import random
from itertools import count

from agents import ChatAgent, Result, Task

LONG, MANY, FEW = 20, 64, 8
"""Turns of a long rollout; of so many rollouts in a row, so many are long."""
STARTED = count()
"""Rollouts of this node, in the order in which they begin: their lengths are the same in every run."""


def turns_of(number: int) -> int:
    """Turns of the rollout that begins as this one. As many are long in every 64, so that all steps are as much work;
    which ones is drawn, so that some groups have none and overtake those that have one."""
    block, place = divmod(number, MANY)
    return LONG if place in random.Random(block).sample(range(MANY), FEW) else 1


class LongTail(ChatAgent):
    """Asks for one number after the other; answers cut by length are answers."""

    @classmethod
    def tasks(cls, split, seed):
        for number in count():
            yield Task(f"{number}", {"number": number})

    async def run(self, task, ctx):
        turns = turns_of(next(STARTED))
        messages, digits = [], 0
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{turn}?"})
            messages.append((await ctx.chat(messages, [])).message)
            digits += any(character.isdigit() for character in messages[-1]["content"] or "")
        return Result(reward=digits / turns)


AgentRunner = LongTail
