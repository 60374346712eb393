"""The calculator's sums by the Anthropic SDK: content blocks, ``tool_use`` answered by ``tool_result``.

The same model and the same tokens as under agents/openai_tools.py: the wire is the client's choice, not the model's.
"""

from __future__ import annotations

from anthropic import AsyncAnthropic, BadRequestError
from anthropic.types import ToolUseBlock

from agents import ChatAgent, Context, Result, Task
from agents.calculator import ADD, Calculator, call_tool, last_number

MAX_TURNS = 4
MAX_TOKENS = 4096
"""This wire asks for a cap of each call; where the model's context is shorter, that cuts it first."""
TOOL = {name: ADD["function"][name] for name in ("name", "description")} | {
    "input_schema": ADD["function"]["parameters"]
}


async def converse(client: AsyncAnthropic, messages: list, **more) -> str | None:
    """Play on until the model answers; ``messages`` grows. None: cut, by length, by the context or by ``MAX_TURNS``."""
    for _ in range(MAX_TURNS):
        try:
            reply = await client.messages.create(
                model="policy", max_tokens=MAX_TOKENS, messages=messages, tools=[TOOL], **more
            )
        except BadRequestError as error:
            if "prompt is too long" in str(error):
                return None
            raise
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason == "max_tokens":
            return None
        if reply.stop_reason != "tool_use":
            return "".join(block.text for block in reply.content if block.type == "text")
        answers = [answer(block) for block in reply.content if block.type == "tool_use"]
        messages.append({"role": "user", "content": answers})
    return None


def answer(call: ToolUseBlock) -> dict:
    """The tool's reply to one call."""
    said = call_tool(call.name, call.input)
    return {"type": "tool_result", "tool_use_id": call.id, "content": said, "is_error": said == "error"}


class AnthropicTools(ChatAgent):
    """One sum."""

    tasks = Calculator.tasks

    async def run(self, task: Task, ctx: Context) -> Result:
        a, b = task.data["a"], task.data["b"]
        async with AsyncAnthropic(base_url=ctx.session_url, api_key="-") as client:
            said = await converse(client, [{"role": "user", "content": f"What is {a} + {b}?"}])
        return Result(reward=float(last_number(said) == a + b), truncated=said is None)


AgentRunner = AnthropicTools
