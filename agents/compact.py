"""A long horizon in a short context: the agent replaces its own history by what the model itself made of it.

Numbers arrive one after another, and the model keeps their total. It is told from the start to sum up in its answers:
once the history would take more than ``LIMIT`` tokens, the last answer is all that the agent keeps, and it goes on
from there. A rewritten history continues no conversation that there was, so it begins a row of its own, and a summary
is trained by the reward that came of it: the share of the totals that are right.

The request stands in the system prompt, always the same, because under another system prompt every reply so far
would be context that the model never spoke in.
"""

from __future__ import annotations

from anthropic import AsyncAnthropic

from agents import ChatAgent, Context, Result, Task
from agents.anthropic_tools import TOOL, converse
from agents.calculator import four_numbers, last_number

LIMIT = 120
"""Tokens, by the API's own count. Here one use of the tool is over it; a real context holds many thousands."""
SYSTEM = "Sum up."


class Compacting(ChatAgent):
    """A running total."""

    tasks = staticmethod(four_numbers)

    async def run(self, task: Task, ctx: Context) -> Result:
        truth, *rest = task.data["numbers"]
        summary, right, history = str(truth), 0, []
        async with AsyncAnthropic(base_url=ctx.session_url, api_key="-") as client:
            for number in rest:
                total = last_number(summary)  # all that the agent knows of what was before
                if total is None:
                    break
                history.append({"role": "user", "content": f"What is {total} + {number}?"})
                if await used(client, history) > LIMIT:
                    history = history[-1:]
                summary = await converse(client, history, system=SYSTEM)
                truth += number
                right += last_number(summary) == truth
        return Result(reward=right / len(rest), truncated=summary is None)


async def used(client: AsyncAnthropic, history: list) -> int:
    """Tokens of the context that the history takes."""
    counted = await client.messages.count_tokens(model="policy", messages=history, system=SYSTEM, tools=[TOOL])
    return counted.input_tokens


AgentRunner = Compacting
