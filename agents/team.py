"""A parent and two sub-agents that work at the same time.

All three speak to the one address of the rollout. Each is a conversation of its own, so each becomes a row of its own,
however their calls interleave, and the rollout's one reward trains all three. The work is four numbers: each sub-agent
adds two of them, the parent adds what they report. Reward is the share of the three sums that are right.

Sub-agents that are asked exactly the same at the same time (to vote, say) are taken for one that asks again, and get
one answer: ask once with ``n=``, or give each a ``user=`` of its own.
"""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI

from agents import ChatAgent, Context, Result, Task
from agents.calculator import four_numbers, last_number
from agents.openai_tools import converse


class Parent(ChatAgent):
    """Four numbers, three conversations."""

    tasks = staticmethod(four_numbers)

    async def run(self, task: Task, ctx: Context) -> Result:
        a, b, c, d = task.data["numbers"]
        async with AsyncOpenAI(base_url=ctx.base_url, api_key="-") as client:
            reports = await asyncio.gather(sum_of(client, a, b), sum_of(client, c, d))
            one, two = map(last_number, reports)
            final = "" if None in (one, two) else await sum_of(client, one, two)
        right = (one == a + b) + (two == c + d) + (last_number(final) == a + b + c + d)
        return Result(reward=right / 3, truncated=None in (*reports, final))


async def sum_of(client: AsyncOpenAI, a: int, b: int) -> str | None:
    """A conversation of its own."""
    return await converse(client, [{"role": "user", "content": f"What is {a} + {b}?"}])


AgentRunner = Parent
