"""The agent of ``python -m tools.bench lag``: one rollout in eight has twenty turns, the others one.

What is said means nothing, and rewards only have to differ: the share of turns whose answer has a digit in it.
"""

from __future__ import annotations

from itertools import count

from agents import ChatAgent, Result, Task

LONG, ONE_IN = 20, 8
STARTED = count()
"""Rollouts of this node, in the order in which they begin: their lengths are the same in every run."""


class LongTail(ChatAgent):
    """Asks for one number after the other."""

    @classmethod
    def tasks(cls, split, seed):
        for number in count():
            yield Task(f"{number}", {"number": number})

    async def run(self, task, ctx):
        turns = LONG if next(STARTED) % ONE_IN == 0 else 1
        messages, digits = [], 0
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{turn}?"})
            messages.append((await ctx.chat(messages, [])).message)
            digits += any(character.isdigit() for character in messages[-1]["content"] or "")
        return Result(reward=digits / turns)


AgentRunner = LongTail
