"""A real agent library, unmodified, over all three APIs: a one-tool loop is one branch, every sampled id in it once.

``play`` and ``check`` are also for a real engine: ``play(base_url, api, stream)`` needs an address and nothing else.
"""

import asyncio
from dataclasses import dataclass

import anthropic
import openai
import pytest
from test_loopback import Engine, exact, ids, run, serving, spelled, template, toy, trained

pytest.importorskip("pydantic_ai", reason="requirements-test.txt installs it")
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

APIS = ("chat", "responses", "anthropic")


@dataclass
class Played:
    """What came of a loop."""

    output: str
    added: list[tuple[int, int]]
    """The arguments of each call of the tool."""


async def play(
    base_url: str, api: str, stream: bool, prompts=("What is 2 + 3?", "And one more?"), **settings
) -> Played:
    """A conversation of a one-tool agent: one run per prompt, each going on after the last one's messages.

    ``base_url`` is a session's own address, ``Context.session_url``. ``settings`` are the library's (max_tokens, …).
    """
    added: list[tuple[int, int]] = []

    async def add(a: int, b: int) -> int:  # not in a thread each: two calls at once are then made in their order
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        added.append((a, b))
        return a + b

    kind, address = (anthropic.AsyncAnthropic, "") if api == "anthropic" else (openai.AsyncOpenAI, "/v1")
    async with kind(base_url=base_url + address, api_key="none", max_retries=0) as client:
        if api == "anthropic":
            model = AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))
        else:
            wire = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
            model = wire("policy", provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, instructions="Use the tool.", tools=[add], model_settings=settings or None)
        history, output = [], ""
        for prompt in prompts:
            if stream:
                async with agent.run_stream(prompt, message_history=history) as running:
                    output = await running.get_output()
                    history = running.all_messages()
            else:
                result = await agent.run(prompt, message_history=history)
                output, history = result.output, result.all_messages()
    return Played(output, added)


def hermes(*pairs, thought="") -> list[int]:
    """Sampled ids of calls in hermes' form."""
    said = f"<think>{thought}</think>" if thought else ""
    for a, b in pairs:
        said += f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    return spelled(said)


async def loop(engine, api: str, stream: bool, **kwargs):
    async with serving(engine, **kwargs) as (server, s):
        return s, await play(server.url(s), api, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_tool_loop_of_pydantic_ai_is_one_branch_trained_once(api, stream):
    """Two runs, the second after the first one's history; in the first, one call, then two at once."""
    script = [hermes((2, 3)), hermes((5, 1), (6, 2)), spelled("The sum is 5."), hermes((7, 8)), spelled("15")]
    engine = Engine(*script)
    s, played = run(loop(engine, api, stream, max_tokens=1000))
    assert played == Played("15", [(2, 3), (5, 1), (6, 2), (7, 8)])
    [row] = exact(s)
    assert trained(row) == [token for sampled in script for token in sampled]
    assert (s.meters["turns_first"], s.meters["turns_continue"], s.uncommitted) == (1, 4, 0)
    text = toy(template().tokenizer.chat_template).decode(row.token_ids)
    assert (
        text.count("<system>Use the tool.") == 1 and "<tool>5</tool>" in text and "<tool>6</tool><tool>8</tool>" in text
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_thinking_model_in_the_loop_is_one_branch_too(api, stream):
    """The library echoes thinking in some APIs and drops it in others: neither may fork."""
    script = [hermes((2, 3), thought="add them"), spelled("<think>so</think>5"), spelled("<think>mm</think>6")]
    s, played = run(loop(Engine(*script), api, stream, max_tokens=1000))
    assert (played.output, played.added) == ("6", [(2, 3)])
    [row] = exact(s)
    assert trained(row) == [token for sampled in script for token in sampled]


@pytest.mark.parametrize("api", APIS)
def test_a_call_that_the_tool_rejects_is_told_to_the_model_in_the_same_branch(api):
    """The library answers arguments that do not fit with its own words, as a tool's result."""
    wrong = spelled('<tool_call>{"name": "add", "arguments": {"a": "two"}}</tool_call>')
    script = [wrong, hermes((2, 3)), spelled("5"), spelled("6")]
    s, played = run(loop(Engine(*script), api, False, max_tokens=1000))
    assert played == Played("6", [(2, 3)])
    assert len(exact(s)) == 1


def test_many_agents_at_once_each_have_their_own_branch():
    """All APIs, streamed and not, side by side in one server."""
    engine = Engine()

    async def answer(call):
        await asyncio.sleep(0.02)
        asked = toy(template().tokenizer.chat_template).decode(call.prompt_ids)
        engine.say(call, hermes((1, 2)) if asked.endswith("What is 2 + 3?<eot>\n<assistant>") else ids("a <eot>"))

    async def go():
        async with serving(answer, max_tokens=1000) as (server, s):
            sessions = [server.open(s.sampling) for _ in range(12)]
            turns = [(api, stream) for api in APIS for stream in (False, True)] * 2
            played = await asyncio.gather(
                *(play(server.url(one), *turn) for one, turn in zip(sessions, turns, strict=True))
            )
            return sessions, played

    sessions, played = run(go())
    assert all(one == Played("a", [(1, 2)]) for one in played)
    for s in sessions:
        [row] = exact(s)
        assert trained(row) == [*hermes((1, 2)), *ids("a <eot> a <eot>")]
