"""The calculator's sums again, by the loop that every program with the OpenAI SDK and tools has.

Nothing in it knows that it is being trained: the client is a stock one, at the rollout's own address. What such a
loop must get right for training is what it must get right anyway: echo the model's message as it came, answer every
call of a turn, and tell an answer from a conversation that was cut.
"""

from __future__ import annotations

from openai import AsyncOpenAI, BadRequestError

from agents import ChatAgent, Context, Result, Task
from agents.calculator import ADD, Calculator, call_tool, last_number

MAX_TURNS = 4


async def converse(client: AsyncOpenAI, messages: list) -> str | None:
    """Play on until the model answers; ``messages`` grows. None: cut, by length, by the context or by ``MAX_TURNS``."""
    for _ in range(MAX_TURNS):
        try:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        except BadRequestError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        [choice] = reply.choices
        if choice.finish_reason == "length":
            return None
        messages.append(choice.message)
        if not choice.message.tool_calls:
            return choice.message.content or ""
        for call in choice.message.tool_calls:
            said = call_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return None


class OpenAITools(ChatAgent):
    """One sum."""

    tasks = Calculator.tasks

    async def run(self, task: Task, ctx: Context) -> Result:
        a, b = task.data["a"], task.data["b"]
        async with AsyncOpenAI(base_url=ctx.base_url, api_key="-") as client:
            said = await converse(client, [{"role": "user", "content": f"What is {a} + {b}?"}])
        return Result(reward=float(last_number(said) == a + b), truncated=said is None)


AgentRunner = OpenAITools
