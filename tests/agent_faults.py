"""An agent for the tests that goes wrong in every way an agent can, on a train split that ends after eight tasks."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI

from agents import ChatAgent, Result, Task


class Faults(ChatAgent):
    """What task ``n`` does is in the name of its method; the last two behave."""

    @classmethod
    def tasks(cls, split, seed):
        for number in range(8):
            yield Task(f"{split}-{number}", {"number": number})

    async def run(self, task, ctx):
        number = task.data["number"]
        ways = (self.raises, self.hangs, self.leaks, self.hangs_up, self.calls_nothing, self.overflows)
        if number < len(ways):
            return await ways[number](ctx)
        await self.talk(ctx, turns=3)
        return Result(reward=number / 7)

    async def talk(self, ctx, turns: int) -> None:
        messages = [{"role": "user", "content": "well?"}]
        for _ in range(turns):
            messages += [(await ctx.chat(messages, [])).message, {"role": "user", "content": "and?"}]

    async def raises(self, ctx):
        await self.talk(ctx, turns=1)
        raise ArithmeticError("this task's agent always fails")

    async def hangs(self, ctx):
        await self.talk(ctx, turns=1)
        await asyncio.Event().wait()

    async def leaks(self, ctx):
        """Its tasks go on talking after it returned."""
        self.left = [asyncio.create_task(self.talk(ctx, turns=99)) for _ in range(3)]
        await self.talk(ctx, turns=1)
        return Result(reward=0.5)

    async def hangs_up(self, ctx):
        """Closes its client in the middle of a call, then thinks better of it."""
        asked = {"model": "policy", "messages": [{"role": "user", "content": "long?"}]}
        async with AsyncOpenAI(base_url=ctx.base_url, api_key="none", max_retries=0) as client:
            call = asyncio.create_task(client.chat.completions.create(**asked))
            await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.wait({call})
        await self.talk(ctx, turns=1)
        return Result(reward=0.25)

    async def calls_nothing(self, ctx):
        return Result(reward=1.0)

    async def overflows(self, ctx):
        """Says more than the context holds, and takes no for an answer."""
        await self.talk(ctx, turns=1)
        await ctx.chat([{"role": "user", "content": "x" * 2000}], [])


AgentRunner = Faults
