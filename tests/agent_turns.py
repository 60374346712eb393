"""An agent for the tests: three turns whatever the model says, by both ways of speaking to it."""

from __future__ import annotations

from itertools import count

from openai import AsyncOpenAI

from agents import ChatAgent, Result, Task


class Turns(ChatAgent):
    """Even tasks talk in process, as ``Env`` does; odd ones through the stock OpenAI client."""

    @classmethod
    def tasks(cls, split, seed):
        for number in count() if split == "train" else range(4):
            yield Task(f"{split}-{number}", {"number": number})

    async def run(self, task, ctx):
        number = task.data["number"]
        if number % 7 == 6:
            raise ArithmeticError("this task's agent always fails")
        say = self.by_client if number % 2 else self.in_process
        messages = [{"role": "user", "content": f"task {number}"}]
        for turn in range(3):
            reply = await say(messages, ctx)
            messages += [reply, {"role": "user", "content": f"and then {turn}?"}]
        return Result(reward=float(number % 3 == 0))

    async def in_process(self, messages, ctx):
        return (await ctx.chat(messages, [])).message

    async def by_client(self, messages, ctx):
        async with AsyncOpenAI(base_url=ctx.base_url, api_key="none", max_retries=0) as client:
            reply = await client.chat.completions.create(model="policy", messages=messages, temperature=0.1)
        return reply.choices[0].message.model_dump(exclude_none=True)


AgentRunner = Turns
