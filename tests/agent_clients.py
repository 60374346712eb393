"""An agent for the tests: a sum by every client there is. Task n takes the n-th way, round and round.

Both SDKs, blocking and async, streamed and not, over chat, responses and messages; and an agent library over the same.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import product
from pathlib import Path

import anthropic
import openai

from agents import ChatAgent, Result, Task
from agents.calculator import ADD, Calculator, call_tool, last_number

sys.path.insert(0, str(Path(__file__).parent))
from pydantic_ai.exceptions import UnexpectedModelBehavior
from test_agent_libraries import APIS, play

FLAT = {"type": "function", "strict": False, **ADD["function"]}
SCHEMA = {"name": "add", "input_schema": ADD["function"]["parameters"]}
WAYS = [*product(("sdk",), APIS, (False, True), (False, True)), *product(("library",), APIS, (False, True), (None,))]
TURNS = 4


async def told(blocking: bool, make, stream, final: str, **asked):
    """One reply, by ``create``, or by the SDK's own stream helper where ``stream`` is given."""
    if stream is None:
        return await (asyncio.to_thread(make, **asked) if blocking else make(**asked))

    def blocked():
        with stream(**asked) as events:
            return getattr(events, final)()

    if blocking:
        return await asyncio.to_thread(blocked)
    async with stream(**asked) as events:
        return await getattr(events, final)()


async def by_chat(client, streamed, blocking, question):
    api, messages = client.chat.completions, [{"role": "user", "content": question}]
    for _ in range(TURNS):
        stream = api.stream if streamed else None
        asked = {"model": "policy", "messages": messages, "tools": [ADD]}
        reply = await told(blocking, api.create, stream, "get_final_completion", **asked)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            said = call_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return None


async def by_responses(client, streamed, blocking, question):
    api, given, before = client.responses, question, openai.omit
    for _ in range(TURNS):
        stream = api.stream if streamed else None
        asked = {"model": "policy", "input": given, "tools": [FLAT], "previous_response_id": before}
        reply = await told(blocking, api.create, stream, "get_final_response", **asked)
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        answers = [(call.call_id, call_tool(call.name, call.arguments)) for call in calls]
        given = [{"type": "function_call_output", "call_id": name, "output": said} for name, said in answers]
        before = reply.id
    return None


async def by_messages(client, streamed, blocking, question):
    api, messages = client.messages, [{"role": "user", "content": question}]
    for _ in range(TURNS):
        stream = api.stream if streamed else None
        asked = {"model": "policy", "messages": messages, "tools": [SCHEMA], "max_tokens": 80}
        reply = await told(blocking, api.create, stream, "get_final_message", **asked)
        messages.append({"role": "assistant", "content": reply.content})
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in reply.content)
        said = [call_tool(use.name, use.input) for use in uses]
        results = zip(uses, said, strict=True)
        blocks = [{"type": "tool_result", "tool_use_id": use.id, "content": text} for use, text in results]
        messages.append({"role": "user", "content": blocks})
    return None


class Clients(ChatAgent):
    """One sum, one client."""

    @classmethod
    def tasks(cls, split, seed):
        for number, task in enumerate(Calculator.tasks(split, seed)):
            yield Task(task.task_id, task.data | {"way": number % len(WAYS)})

    async def run(self, task, ctx):
        kind, api, streamed, blocking = WAYS[task.data["way"]]
        a, b = task.data["a"], task.data["b"]
        question = f"What is {a} + {b}?"
        if kind == "library":
            try:
                said = (await play(ctx.session_url, api, streamed, (question,), max_tokens=80)).output
            except UnexpectedModelBehavior:
                said = ""  # the library gave up on what the policy said
        else:
            try:
                said = await self.by_sdk(ctx, api, streamed, blocking, question)
            except openai.LengthFinishReasonError:
                said = None  # so OpenAI's stream helper tells a reply that was cut by length, over chat
            except RuntimeError as error:
                if "response.completed" not in str(error):
                    raise
                said = None  # and so over responses
        return Result(reward=float(last_number(said) == a + b), truncated=said is None)

    async def by_sdk(self, ctx, api, streamed, blocking, question):
        sdk = anthropic if api == "anthropic" else openai
        say = {"chat": by_chat, "responses": by_responses, "anthropic": by_messages}[api]
        address = ctx.session_url if api == "anthropic" else ctx.base_url
        if blocking:
            client = (sdk.Anthropic if sdk is anthropic else sdk.OpenAI)(base_url=address, api_key="-")
            try:
                return await say(client, streamed, blocking, question)
            finally:
                client.close()
        async with (sdk.AsyncAnthropic if sdk is anthropic else sdk.AsyncOpenAI)(
            base_url=address, api_key="-"
        ) as client:
            return await say(client, streamed, blocking, question)


AgentRunner = Clients
