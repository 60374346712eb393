"""An agent for the tests: three turns whatever the model says, by both ways of speaking to it. In evaluation, where a
client's sampling parameters are honoured, it asks for what only a real engine can show."""

from __future__ import annotations

import json
from itertools import count

from openai import AsyncOpenAI

from agents import ChatAgent, Result, Task

FILLER = "." * 128
"""Every history has a block of the engine's prefix cache (128 tokens) to find again."""


class Turns(ChatAgent):
    """Even tasks talk in process, as ``Env`` does; odd ones through the stock OpenAI client."""

    @classmethod
    def tasks(cls, split, seed):
        for number in count() if split == "train" else range(4):
            yield Task(f"{split}-{number}", {"number": number})

    async def run(self, task, ctx):
        number = task.data["number"]
        if ctx.split == "eval":
            return await self.ask_for_much(f"question {number}", ctx)
        if number % 7 == 6:
            raise ArithmeticError("this task's agent always fails")
        say = self.by_client if number % 2 else self.in_process
        messages = [{"role": "user", "content": f"task {number} {FILLER}"}]
        for turn in range(3):
            reply = await say(messages, ctx)
            messages += [reply, {"role": "user", "content": f"and then {turn}?"}]
        reward = float(number % 3 == 0)
        # Even tasks say what each turn earned, odd ones only what it came to.
        return Result(reward=reward, rewards=[] if number % 2 else [0.25, 0.5, reward - 0.75])

    async def ask_for_much(self, question, ctx):
        """Raises ``AssertionError`` where the engine did not do what was asked."""
        asked = {"model": "policy", "messages": [{"role": "user", "content": question}], "temperature": 1.0}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
        stops = [*"aeiou", "1", "2"]
        async with AsyncOpenAI(base_url=ctx.base_url, api_key="none", max_retries=0) as client:
            make = client.chat.completions.create
            judged = (await make(**asked, response_format=form)).choices[0].message.content
            assert json.loads(judged) in ("yes", "no"), judged
            one, two = [(await make(**asked, seed=7, logprobs=True, user=name)) for name in "ab"]
            assert one.choices[0].message.content == two.choices[0].message.content
            assert len(one.choices[0].logprobs.content) == one.usage.completion_tokens
            several = (await make(**asked, n=3, seed=7)).choices
            assert len({choice.message.content for choice in several}) == 3
            halted = (await make(**asked, stop=stops, max_tokens=400)).choices[0]
            assert halted.finish_reason == "stop" and not set(halted.message.content or "") & set(stops), halted
            tokens = (await make(**asked, top_p=1e-6, max_tokens=5, logprobs=True)).choices[0].logprobs.content
            assert all(token.logprob > -1e-3 for token in tokens), "the only token left has all of the probability"
        return Result(reward=1.0)

    async def in_process(self, messages, ctx):
        return (await ctx.chat(messages, [])).message

    async def by_client(self, messages, ctx):
        async with AsyncOpenAI(base_url=ctx.base_url, api_key="none", max_retries=0) as client:
            reply = await client.chat.completions.create(model="policy", messages=messages, temperature=0.1)
        return reply.choices[0].message.model_dump(exclude_none=True)


AgentRunner = Turns
