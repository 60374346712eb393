"""The three wires with the real SDKs, ``openai`` and ``anthropic``: blocking and async, streamed and not.

Names such as w1, t9 are entries of the project's list of faults. One conversation is written once, as ``Said`` replies
and ``(kind, …)`` items, and told to each API by ``say`` in its own words; the engine and the tokenizer are those of
test_loopback.py.
"""

import asyncio
import base64
import io
import json
import struct
import time
import typing
import zlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import anthropic
import openai
import pydantic
import pytest
from anthropic.types import RawMessageStreamEvent, message_count_tokens_params, message_create_params
from openai.types.chat import ChatCompletionChunk, completion_create_params
from openai.types.responses import ResponseStreamEvent, response_create_params
from PIL import Image
from test_loopback import (
    KEEP,
    SMILE,
    Engine,
    exact,
    ids,
    parse,
    run,
    spelled,
    template,
    toy,
    trained,
    user,
)

import loopback
from loopback import Loopback, Sampling, Session, Template

APIS = ("chat", "responses", "messages")
MODES = ("plain", "stream", "blocking plain", "blocking stream")
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
ADD = {"a": {"type": "integer"}, "b": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": ADD}
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}],
    "responses": [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}],
    "messages": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
}


def calling(*pairs) -> str:
    """What the model says to call ``add`` once for each pair."""
    asked = [json.dumps({"name": "add", "arguments": {"a": a, "b": b}}) for a, b in pairs]
    return "".join(f"<tool_call>{text}</tool_call>" for text in asked)


# ------------------------------------------------------------------------------- one conversation, three APIs


@dataclass
class Said:
    """A reply, whatever the API."""

    text: str
    thinking: str
    calls: list[tuple[str, dict, str]]
    """Name, arguments, id."""
    why: str
    """stop, length or tool_calls."""
    used: tuple[int, int]
    echo: list
    """The SDK's own objects, as a client appends them to its history."""
    raw: typing.Any = field(repr=False)


@dataclass
class World:
    """A server, one session of it, and clients."""

    server: Loopback
    s: Session
    engine: typing.Any
    clients: dict = field(default_factory=dict)

    def client(self, api: str, blocking: bool = False, **options):
        """The SDK's client; ``options`` such as timeout and max_retries make a copy of it."""
        name = ("anthropic" if api == "messages" else "openai", blocking)
        if name not in self.clients:
            kinds = {
                ("openai", True): openai.OpenAI,
                ("openai", False): openai.AsyncOpenAI,
                ("anthropic", True): anthropic.Anthropic,
                ("anthropic", False): anthropic.AsyncAnthropic,
            }
            url = self.server.url(self.s) + ("" if api == "messages" else "/v1")
            self.clients[name] = kinds[name](base_url=url, api_key="none", max_retries=0)
        return self.clients[name].with_options(**options) if options else self.clients[name]

    def url(self, api: str) -> str:
        return f"{self.server.url(self.s)}/v1/{PATHS[api]}"

    async def close(self) -> None:
        for (_, blocking), client in self.clients.items():
            client.close() if blocking else await client.close()


@asynccontextmanager
async def world(engine, fixed=True, max_tokens=400, context=4096, chat=None, parse=parse):
    server = Loopback(chat or template(), parse, engine, "policy", context)
    await server.start()
    w = World(server, server.open(Sampling(1.0, 1.0, max_tokens, fixed)), engine)
    try:
        yield w
    finally:
        await w.close()
        await server.stop()


def wires(engine, scenario, **kwargs) -> Session:
    """Run ``scenario(world)``, then hold the rows against every law of token identity."""

    async def go():
        async with world(engine, **kwargs) as w:
            await scenario(w)
            return w.s

    s = run(go())
    exact(s)
    return s


def spell(api: str, items: list, tools=False, cap=None, **fields) -> dict:
    """A conversation as the API's request."""
    said = []
    for item in items:
        if isinstance(item, Said):
            said += item.echo
        elif item[0] == "results" and api == "messages":
            blocks = [{"type": "tool_result", "tool_use_id": ident, "content": text} for ident, text in item[1:]]
            said.append({"role": "user", "content": blocks})
        elif item[0] == "results" and api == "chat":
            said += [{"role": "tool", "tool_call_id": ident, "content": text} for ident, text in item[1:]]
        elif item[0] == "results":
            said += [{"type": "function_call_output", "call_id": ident, "output": text} for ident, text in item[1:]]
        else:
            said.append({"role": item[0], "content": item[1]})
    caps = {"chat": "max_completion_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
    body = {"model": "policy", ("input" if api == "responses" else "messages"): said}
    if cap or api == "messages":
        body[caps[api]] = cap or 400
    return body | ({"tools": TOOLS[api]} if tools else {}) | fields


def opened(client, api: str, body: dict):
    """The SDK's own streaming helper, which adds up the events."""
    resource = {"chat": lambda: client.chat.completions, "responses": lambda: client.responses,
                "messages": lambda: client.messages}[api]()  # fmt: skip
    return resource.stream(**body)


def final(api: str, stream, last):
    """What the helper added up. (Its ``get_final_…`` refuse a reply that was cut by length.)"""
    return last.response if api == "responses" else stream.get_final_message()


def plainly(client, api: str):
    """The SDK's ``create``."""
    at = client.chat.completions if api == "chat" else client.responses if api == "responses" else client.messages
    return at.create


async def fetch(client, api: str, body: dict, mode: str):
    """One request in one mode; the SDK's final object."""
    if mode == "plain":
        return await plainly(client, api)(**body)
    if mode == "blocking plain":
        return await asyncio.to_thread(plainly(client, api), **body)

    def blocking():
        with opened(client, api, body) as stream:
            last = [event for event in stream][-1]  # noqa: C416
            return stream.current_completion_snapshot if api == "chat" else final(api, stream, last)

    if mode == "blocking stream":
        return await asyncio.to_thread(blocking)
    async with opened(client, api, body) as stream:
        last = [event async for event in stream][-1]
        found = stream.current_completion_snapshot if api == "chat" else final(api, stream, last)
        return await found if asyncio.iscoroutine(found) else found


def read(api: str, reply) -> Said:
    """A reply in the one shape."""
    return {"chat": read_chat, "responses": read_response, "messages": read_message}[api](reply)


def read_chat(reply) -> Said:
    [choice] = reply.choices
    said = choice.message
    calls = [(c.function.name, json.loads(c.function.arguments), c.id) for c in said.tool_calls or []]
    used = (reply.usage.prompt_tokens, reply.usage.completion_tokens) if reply.usage else None
    thinking = getattr(said, "reasoning_content", None) or ""
    return Said(said.content or "", thinking, calls, choice.finish_reason, used, [said], reply)


def read_response(reply) -> Said:
    calls = [(i.name, json.loads(i.arguments), i.call_id) for i in reply.output if i.type == "function_call"]
    thinking = "".join(p.text for i in reply.output if i.type == "reasoning" for p in i.content)
    if reply.status == "incomplete":
        assert reply.incomplete_details.reason == "max_output_tokens"
    why = "length" if reply.status == "incomplete" else "tool_calls" if calls else "stop"
    used = reply.usage.input_tokens, reply.usage.output_tokens
    return Said(reply.output_text, thinking, calls, why, used, list(reply.output), reply)


def read_message(reply) -> Said:
    text = "".join(b.text for b in reply.content if b.type == "text")
    thinking = "".join(b.thinking for b in reply.content if b.type == "thinking")
    calls = [(b.name, b.input, b.id) for b in reply.content if b.type == "tool_use"]
    why = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    used = reply.usage.input_tokens, reply.usage.output_tokens
    echo = [{"role": "assistant", "content": reply.content}]
    return Said(text, thinking, calls, why[reply.stop_reason], used, echo, reply)


async def say(w: World, api: str, items: list, mode="plain", client=None, **fields) -> Said:
    """One turn of a conversation."""
    client = client or w.client(api, "blocking" in mode)
    body = spell(api, items, **fields)
    if api == "chat" and "stream" in mode:
        body["stream_options"] = {"include_usage": True}
    return read(api, await fetch(client, api, body, mode))


async def raw(w: World, api: str, body, headers: dict | None = None, path: str | None = None):
    """A POST without an SDK: status, headers, bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{w.server.url(w.s)}/v1/{path}" if path else w.url(api)
    async with aiohttp.ClientSession() as http, http.post(url, data=data, headers=headers) as reply:
        return reply.status, reply.headers, await reply.read()


def frames(data: bytes) -> list[tuple[str | None, typing.Any]]:
    """A server-sent stream's events: name and data; comments are left out."""
    out = []
    for frame in data.decode().split("\n\n"):
        lines = [line for line in frame.split("\n") if line and not line.startswith(":")]
        name = next((line[7:] for line in lines if line.startswith("event: ")), None)
        given = "\n".join(line[6:] for line in lines if line.startswith("data: "))
        if lines:
            out.append((name, given if given == "[DONE]" else json.loads(given)))
    return out


async def events(w: World, api: str, items: list, **fields) -> list[tuple[str | None, typing.Any]]:
    """The events of a streamed reply."""
    status, headers, data = await raw(w, api, spell(api, items, **fields) | {"stream": True})
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream"), data
    return frames(data)


def after(engine, seconds: float, sampled: list[int]):
    """A step that takes its time."""

    async def step(call):
        await asyncio.sleep(seconds)
        engine.say(call, sampled)

    return step


def held(engine, gate: asyncio.Event, sampled: list[int], started: asyncio.Event | None = None):
    """A step that says two ids at once and the rest when the gate opens."""

    async def step(call):
        if started:
            started.set()
        await gate.wait()
        engine.say(call, sampled)

    return step


HI = ("user", "hi")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("api", APIS)
def test_t11_a_tool_dialogue_is_one_row_with_true_usage(api, mode):
    """The SDK's own objects, parsed by its stream helpers or not, echo back onto the branch they came from."""
    script = [spelled(f"<think>hm</think>so {calling((2, 3), (4, 5))}"), spelled("5 and 9"), spelled("bye")]
    engine = Engine(*script)

    async def scenario(w):
        first = await say(w, api, [HI], mode, tools=True)
        assert [(name, asked) for name, asked, _ in first.calls] == [
            ("add", {"a": 2, "b": 3}),
            ("add", {"a": 4, "b": 5}),
        ]
        assert (first.text.strip(), first.why) == ("so", "tool_calls") and len(
            {ident for *_, ident in first.calls}
        ) == 2
        results = ("results", *((ident, str(sum(asked.values()))) for _, asked, ident in first.calls))
        second = await say(w, api, [HI, first, results], mode, tools=True)
        assert (second.text, second.calls, second.why) == ("5 and 9", [], "stop")
        third = await say(w, api, [HI, first, results, second, ("user", "thanks")], mode, tools=True, cap=2)
        assert (third.text, third.why) == ("by", "length")
        for said, prompt, sampled in zip(
            (first, second, third), engine.prompts, (*map(len, script[:2]), 2), strict=True
        ):
            assert said.used == (len(prompt), sampled)
        assert toy(KEEP).decode(engine.prompts[1]).endswith(
            "<user><tool>5</tool><tool>9</tool><eot>\n<assistant>"), "w8, t3"  # fmt: skip

    s = wires(engine, scenario)
    [row] = exact(s)
    assert trained(row) == [*script[0], *script[1], *script[2][:2]]
    assert s.meters["turns_continue"] == 2


# --------------------------------------------------------------------------------------------- w1, w2, w3: streams


def told(reply, api: str) -> dict:
    """An SDK object without what differs between two replies."""
    out = reply.model_dump(exclude_none=True)
    for choice in out.get("choices", ()):
        for call in choice["message"].get("tool_calls", ()):
            call.pop("index", None)  # left over by the helper
    for item in out.get("output", ()):
        item.pop("id")
        item.pop("parsed_arguments", None)
    for name in ("id", "created", "created_at", "completed_at", "service_tier"):
        out.pop(name, None)
    return out


WHOLE = {
    "all": f"<think>hm {SMILE}</think>so {calling((1, 2), (3, 4))}",
    "long": "é" * 700,
    "nothing": "",
    "one call": calling((1, 1)),
}


@pytest.mark.parametrize("mode", ["stream", "blocking stream"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", WHOLE)
def test_w1_a_stream_adds_up_to_exactly_the_plain_reply(api, mode, name):
    said = WHOLE[name]
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if api == "messages" else {}

    async def scenario(w):
        streamed = await say(w, api, [HI], mode, tools=True, **more)
        plain = await say(w, api, [HI], tools=True, **more)
        assert told(streamed.raw, api) == told(plain.raw, api)
        assert (streamed.thinking, streamed.text, streamed.calls, streamed.used) == (
            plain.thinking, plain.text, plain.calls, plain.used)  # fmt: skip
        assert streamed.thinking == (f"hm {SMILE}" if "think" in said else "")

    wires(Engine(spelled(said)), scenario, max_tokens=2000)


def test_w1_w2_each_call_of_a_chat_stream_has_its_id_and_name_once_at_its_own_index():
    async def scenario(w):
        got = await events(w, "chat", [HI], tools=True)
        assert got[-1] == (None, "[DONE]") and all(name is None for name, _ in got)
        chunks = [ChatCompletionChunk.model_validate(data) for _, data in got[:-1]]
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
        for index in (0, 1):
            first, *rest = [delta for delta in deltas if delta.index == index]
            assert first.id == f"call_{index}" and first.function.name == "add" and first.type == "function"
            assert rest and all(d.id is None and d.function.name is None and d.type is None for d in rest)
            spelled_out = "".join(delta.function.arguments or "" for delta in [first, *rest])
            assert json.loads(spelled_out) == {"a": index, "b": index}
        assert {delta.index for delta in deltas} == {0, 1}
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]

    wires(Engine(spelled(calling((0, 0), (1, 1)))), scenario)


SAYINGS = {
    "a call": (calling((1, 2)), "tool_calls"),
    "a call, then cut": (calling((1, 2)) + "and so on", "tool_calls"),
    "no call": ("done", "stop"),
    "half a call": ("<tool_call>{", "stop"),
    "cut": ("and so on", "length"),
}


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", SAYINGS)
def test_w3_the_finish_reason_is_tool_calls_exactly_when_there_is_a_call(api, mode, name):
    text, why = SAYINGS[name]
    sampled = spelled(text)[:-1] if "cut" in name else spelled(text)

    async def scenario(w):
        said = await say(w, api, [HI], mode, tools=True)
        assert (said.why, bool(said.calls)) == (why, why == "tool_calls")

    wires(Engine(sampled), scenario)


# ------------------------------------------------------------------------------------------ w4, w5, w6: messages


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("arguments", ["null", "", "{}", "{bad", '"x"', "[1]", '{"a": 1}'])
def test_w4_sampled_arguments_of_every_kind_come_back_onto_their_branch(api, mode, arguments):
    def odd(text, tools):
        function = {"name": "add", "arguments": arguments}
        calls = [{"id": "call_0", "type": "function", "function": function}]
        return {"role": "assistant", "content": ""} | ({"tool_calls": calls} if "b" in text else {"content": text})

    async def scenario(w):
        if mode == "stream":
            *_, last = await events(w, api, [HI], tools=True)
            assert last[0] in (None, "response.completed", "message_stop")
        reply = json.loads((await raw(w, api, spell(api, [HI], tools=True)))[2])  # of a stream: its recorded turn
        first = {"chat": lambda: [reply["choices"][0]["message"]], "responses": lambda: reply["output"],
                 "messages": lambda: [{"role": "assistant", "content": reply["content"]}]}[api]()  # fmt: skip
        echoed = Said("", "", [], "", (0, 0), first, reply)
        await say(w, api, [HI, echoed, ("results", ("call_0", "5"))], tools=True)
        if api == "messages":
            wanted = {'{"a": 1}': {"a": 1}, "{bad": {"INVALID_JSON": "{bad"}, "null": {}, "": {}}.get(arguments)
            [block] = reply["content"]
            assert isinstance(block["input"], dict) and (wanted is None or block["input"] == wanted)

    s = wires(Engine(ids("b <eot>"), ids("a <eot>")), scenario, parse=odd)
    assert len(s.branches) == 1 and s.meters["turns_continue"] == 1


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_w5_content_null_empty_and_absent_are_the_same_ids(api):
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [called]}
    empties = [message, message | {"content": None}, message | {"content": ""}, message | {"content": []}]
    plain = [{"role": "assistant", "content": "x", "tool_calls": none} for none in (None, [])]
    engine = Engine(*[ids("a <eot>")] * 20)

    async def scenario(w):
        if api == "messages":
            bodies = [spell(api, [HI]) | {"messages": [user("hi"), {"role": "user", "content": empty}, user("x")]}
                      for empty in ("", [], [{"type": "text", "text": ""}])]  # fmt: skip
        else:
            tail = {"role": "tool", "tool_call_id": "c", "content": "5"}
            bodies = [spell(api, [HI], tools=True) | {"messages": [user("hi"), empty, tail]} for empty in empties]
        for body in bodies:
            assert (await raw(w, api, body))[0] == 200
        assert len({tuple(prompt) for prompt in engine.prompts}) == 1
        if api == "chat":
            for message in plain:
                assert (await raw(w, api, {"messages": [user("hi"), message, user("x")]}))[0] == 200
            assert engine.prompts[-1] == engine.prompts[-2]

    wires(engine, scenario)


@pytest.mark.parametrize("api", APIS)
def test_w6_every_way_to_give_a_system_prompt_is_the_same_ids(api):
    """As a string, as blocks with a marker, within the messages, by the developer's role."""
    text = {"type": "input_text" if api == "responses" else "text"}
    blocks = [text | {"text": "Be "}, text | {"text": "kind"} | {"cache_control": {"type": "ephemeral"}}]
    within = [("system", "Be kind"), ("system", blocks), ("developer", "Be kind")]
    asked = [([item, HI], {}) for item in within]
    asked += [([HI], {"system": given}) for given in ("Be kind", blocks)] if api == "messages" else []
    asked += [([HI], {"instructions": "Be kind"})] if api == "responses" else []
    engine = Engine(*[ids("a <eot>")] * len(asked))

    async def scenario(w):
        for items, more in asked:
            await say(w, api, items, **more)
        assert {toy(KEEP).decode(prompt) for prompt in engine.prompts} == {
            "<system>Be kind<eot>\n<user>hi<eot>\n<assistant>"}  # fmt: skip

    wires(engine, scenario)


# --------------------------------------------------------------------------------------- w7: fields of the requests

PARAMS = {
    "chat": completion_create_params.CompletionCreateParamsNonStreaming,
    "responses": response_create_params.ResponseCreateParamsNonStreaming,
    "messages": message_create_params.MessageCreateParamsNonStreaming,
    "count_tokens": message_count_tokens_params.MessageCountTokensParams,
}
LABEL, REFUSED = "label", "refused"


class Only(list):
    """Values at which a field asks for nothing, so that it is accepted; another is refused by name."""


MODE = "tests of its own"
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
FLAT_FORM = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
EVERY_FIELD = {
    "chat": {
        "messages": ([user("ab")], lambda call: "<user>ab" in toy(KEEP).decode(call.prompt_ids)),
        "tools": (TOOLS["chat"], lambda call: "Adds." in toy(KEEP).decode(call.prompt_ids)),
        "temperature": (0.5, lambda call: call.temperature == 0.5),
        "top_p": (0.5, lambda call: call.top_p == 0.5),
        "seed": (7, lambda call: call.seed == 7),
        "max_tokens": (2, lambda call: call.max_tokens == 2),
        "max_completion_tokens": (2, lambda call: call.max_tokens == 2),
        "stop": ("x", lambda call: call.stop == ["x"]),
        "response_format": (FORM, lambda call: call.schema == SCHEMA),
        "n": MODE, "logprobs": MODE, "stream": MODE, "stream_options": MODE, "tool_choice": MODE,
        "parallel_tool_calls": MODE, "model": LABEL, "metadata": LABEL, "user": LABEL, "store": LABEL,
        "service_tier": LABEL,
        "safety_identifier": LABEL, "prompt_cache_key": LABEL, "prompt_cache_retention": LABEL,
        "presence_penalty": Only([0]), "frequency_penalty": Only([0]), "top_logprobs": Only([0]),
        "logit_bias": Only([{}]), "modalities": Only([["text"]]),
        "audio": REFUSED, "function_call": REFUSED, "functions": REFUSED, "moderation": REFUSED,
        "prediction": REFUSED, "prompt_cache_options": REFUSED, "reasoning_effort": REFUSED, "verbosity": REFUSED,
        "web_search_options": REFUSED,
    },
    "responses": {
        "input": ("ab", lambda call: "<user>ab" in toy(KEEP).decode(call.prompt_ids)),
        "instructions": ("ab", lambda call: "<system>ab" in toy(KEEP).decode(call.prompt_ids)),
        "tools": (TOOLS["responses"], lambda call: "Adds." in toy(KEEP).decode(call.prompt_ids)),
        "temperature": (0.5, lambda call: call.temperature == 0.5),
        "top_p": (0.5, lambda call: call.top_p == 0.5),
        "max_output_tokens": (2, lambda call: call.max_tokens == 2),
        "text": (FLAT_FORM, lambda call: call.schema == SCHEMA),
        "previous_response_id": MODE, "stream": MODE, "tool_choice": MODE, "parallel_tool_calls": MODE, "store": MODE,
        "model": LABEL, "metadata": LABEL, "user": LABEL, "service_tier": LABEL, "safety_identifier": LABEL,
        "prompt_cache_key": LABEL, "prompt_cache_retention": LABEL,
        "include": Only([[]]), "truncation": Only(["disabled"]), "background": Only([False]),
        "top_logprobs": Only([0]), "reasoning": Only([{}]), "stream_options": Only([{"include_obfuscation": False}]),
        "access_programs": REFUSED, "background_options": REFUSED, "context_management": REFUSED,
        "conversation": REFUSED, "image": REFUSED, "max_tool_calls": REFUSED, "moderation": REFUSED,
        "prompt": REFUSED, "prompt_cache_options": REFUSED,
    },
    "messages": {
        "messages": ([user("ab")], lambda call: "<user>ab" in toy(KEEP).decode(call.prompt_ids)),
        "system": ("ab", lambda call: "<system>ab" in toy(KEEP).decode(call.prompt_ids)),
        "tools": (TOOLS["messages"], lambda call: "Adds." in toy(KEEP).decode(call.prompt_ids)),
        "max_tokens": (2, lambda call: call.max_tokens == 2),
        "stop_sequences": (["x"], lambda call: call.stop == ["x"]),
        "stream": MODE, "thinking": MODE, "tool_choice": MODE,
        "model": LABEL, "metadata": LABEL, "service_tier": LABEL, "cache_control": LABEL, "inference_geo": LABEL,
        "user_profile_id": LABEL,
        "output_config": Only([{}]),
        "container": REFUSED, "diagnostics": REFUSED, "speed": REFUSED, "workspace_id": REFUSED,
    },
    "count_tokens": {
        "messages": MODE, "system": MODE, "tools": MODE, "thinking": MODE, "tool_choice": MODE,
        "model": LABEL, "cache_control": LABEL, "user_profile_id": LABEL,
        "output_config": Only([{}]), "speed": REFUSED, "workspace_id": REFUSED,
    },
}  # fmt: skip
LABELLED = {"metadata": {"user_id": "u"}, "store": True}


@pytest.mark.parametrize("api", EVERY_FIELD)
def test_w7_every_field_that_the_sdk_knows_is_in_the_table(api):
    """A new version of an SDK shows its new fields here: decide, then write down what becomes of each."""
    assert EVERY_FIELD[api].keys() == typing.get_type_hints(PARAMS[api]).keys()


async def one_field(w: World, api: str, **more) -> tuple[int, dict]:
    path = "messages/count_tokens" if api == "count_tokens" else PATHS[api]
    body = spell("messages" if api == "count_tokens" else api, [HI])
    if api == "count_tokens":
        del body["max_tokens"]
    status, _, data = await raw(w, api, body | more, path=path)
    return status, json.loads(data)


@pytest.mark.parametrize("api", EVERY_FIELD)
def test_w7_every_field_has_an_effect_or_is_a_label_or_is_refused_by_name(api):
    engine = Engine(*[ids("a <eot>")] * 60)

    async def scenario(w):
        assert (await one_field(w, api))[0] == 200
        for name, what in EVERY_FIELD[api].items():
            known = len(engine.calls)
            if what == MODE:
                continue
            if what == LABEL:
                status, reply = await one_field(w, api, **{name: LABELLED.get(name, "x")})
                assert status == 200, (name, reply)
                assert api == "count_tokens" or engine.prompts[-1] == engine.prompts[0], name
            elif isinstance(what, tuple):
                value, seen = what
                status, reply = await one_field(w, api, **{name: value})
                assert status == 200 and seen(engine.calls[-1]), (name, reply)
            else:
                for value in what if isinstance(what, Only) else ():
                    assert (await one_field(w, api, **{name: value}))[0] == 200, name
                known = len(engine.calls)
                status, reply = await one_field(w, api, **{name: ["y"]})
                assert status == 400 and name in reply["error"]["message"], (name, reply)
                assert reply["error"].get("param", name) == name and len(engine.calls) == known
        status, reply = await one_field(w, api, never_heard_of=1)
        assert status == 400 and "never_heard_of" in reply["error"]["message"]
        assert all(status == 200 for status, _ in [await one_field(w, api, never_heard_of=None)])

    wires(engine, scenario, fixed=False)


NESTED = {
    "chat": {"response_format": {"type": "grammar"}, "stream_options": 1},
    "responses": {"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}, "tools": [{"type": "web_search"}]},
    "messages": {"output_config": {"effort": "low"}, "thinking": {"type": "sometimes"},
                 "tools": [{"type": "bash_20250124", "name": "bash"}]},
}  # fmt: skip


@pytest.mark.parametrize("api", APIS)
def test_w7_a_form_of_a_field_that_is_not_supported_is_refused_by_name(api):
    async def scenario(w):
        for name, value in NESTED[api].items():
            status, reply = await one_field(w, api, **{name: value})
            assert status == 400 and name.rstrip("s") in reply["error"]["message"], (name, reply)

    wires(Engine(), scenario)


def forced(api: str) -> list:
    if api == "messages":
        return [{"type": "any"}, {"type": "tool", "name": "add"}]
    named = {"type": "function", "name": "add"} if api == "responses" else {
        "type": "function", "function": {"name": "add"}}  # fmt: skip
    return ["required", named]


@pytest.mark.parametrize("api", APIS)
def test_w7_a_forced_tool_choice_is_a_400_that_names_it(api):
    async def scenario(w):
        for choice in forced(api):
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="tool_choice"):
                await say(w, api, [HI], tools=True, tool_choice=choice)

    assert not wires(Engine(), scenario).calls


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_w7_tool_choice_none_never_yields_a_call(api, mode):
    none = {"type": "none"} if api == "messages" else "none"

    async def scenario(w):
        said = await say(w, api, [HI], mode, tools=True, tool_choice=none)
        assert (said.calls, said.why) == ([], "stop") and "add" in said.text
        await say(w, api, [HI, said, ("user", "x")], mode, tools=True, tool_choice=none)

    s = wires(Engine(spelled(calling((1, 2))), ids("a <eot>")), scenario)
    assert len(s.branches) == 1


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_w7_without_parallel_calls_there_is_at_most_one_and_no_id_is_lost(api, mode):
    """The ids of the second call were sampled, so they stay; the client that saw one call continues the branch."""
    one = ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}} if api == "messages"
           else {"parallel_tool_calls": False})  # fmt: skip
    script = [spelled(calling((1, 2), (3, 4))), spelled("3")]
    engine = Engine(*script)

    async def scenario(w):
        first = await say(w, api, [HI], mode, tools=True, **one)
        assert [(asked, first.why) for _, asked, _ in first.calls] == [({"a": 1, "b": 2}, "tool_calls")]
        await say(w, api, [HI, first, ("results", (first.calls[0][2], "3"))], mode, tools=True, **one)

    [row] = exact(wires(engine, scenario))
    assert trained(row) == script[0] + script[1]
    assert engine.prompts[1][: len(engine.prompts[0]) + len(script[0])] == engine.prompts[0] + script[0]


@pytest.mark.parametrize("mode", MODES)
def test_w7_n_choices_are_n_rows_of_one_prompt(mode):
    script = [spelled("one"), spelled("two!"), spelled("three")]

    async def scenario(w):
        body = (
            spell("chat", [HI]) | {"n": 3} | ({"stream_options": {"include_usage": True}} if "stream" in mode else {})
        )
        reply = await fetch(w.client("chat", "blocking" in mode), "chat", body, mode)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert {choice.message.content for choice in reply.choices} == {"one", "two!", "three"}
        assert reply.usage.completion_tokens == sum(map(len, script))
        assert reply.usage.prompt_tokens == len(w.engine.prompts[0])
        second = Said("", "", [], "", (0, 0), [reply.choices[1].message], reply)
        await say(w, "chat", [HI, second, ("user", "go on")])

    engine = Engine(*script, ids("a <eot>"))
    s = wires(engine, scenario)
    assert len(s.branches) == 3 and sorted(len(trained(row)) for row in exact(s)) == [4, 6, 5 + 2]
    assert engine.prompts[0] == engine.prompts[1] == engine.prompts[2]
    assert (s.meters["turns_resample"], s.meters["turns_continue"]) == (2, 1)


def test_w7_n_choices_fail_together():
    """An engine that fails one of them leaves no branch: half an answer would be trained and never shown."""
    engine = Engine()

    async def die(call):
        await asyncio.sleep(0.02)
        raise RuntimeError("died")

    engine.script = [spelled("one"), die]

    async def scenario(w):
        status, reply = await one_field(w, "chat", n=2)
        assert status == 503 and reply["error"]["type"] == "server_error"

    s = wires(engine, scenario)
    assert s.branches == [] and s.uncommitted == 4


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("api", ["chat", "messages"])
@pytest.mark.parametrize("stop", ["ab", "<tool_call>", "a"])
def test_w7_a_stop_string_cuts_the_text_and_no_id(api, mode, stop):
    """Even one that is spread over two tokens, or that is one; the next turn goes on after all sampled ids."""
    sampled = spelled("x")[:-1] + ids("a b a <tool_call> a")
    name = "stop_sequences" if api == "messages" else "stop"

    async def scenario(w):
        said = await say(w, api, [HI], mode, **{name: ["never", stop]})
        want = "xaba" if stop.startswith("<") else "x"
        assert (said.text, said.why, said.used[1]) == (want, "stop", len(sampled))
        if api == "messages":
            assert (said.raw.stop_reason, said.raw.stop_sequence) == ("stop_sequence", stop)
        await say(w, api, [HI, said, ("user", "x")], mode, **{name: ["never", stop]})

    engine = Engine(sampled, ids("b <eot>"))
    s = wires(engine, scenario)
    assert engine.calls[0].stop == ["never", stop]
    [row] = exact(s)
    assert trained(row) == sampled + ids("b <eot>") and s.meters["turns_continue"] == 1


def test_w7_a_stop_string_that_does_not_occur_is_not_reported():
    async def scenario(w):
        reply = (await say(w, "messages", [HI], stop_sequences=["x"])).raw
        assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)

    wires(Engine(ids("a <eot>")), scenario)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("api", APIS)
def test_w7_a_training_rollout_overrides_and_names_what_it_overrides(api, fixed):
    asked = {"chat": {"seed": 5, "temperature": 0.5, "top_p": 0.9}, "responses": {"temperature": 0.5, "top_p": 0.9},
             "messages": {"temperature": 0.5, "top_k": 3}}[api]  # fmt: skip
    engine = Engine(ids("a <eot>"), ids("a <eot>"))

    async def scenario(w):
        for stream in (False, True):
            body = spell(api, [HI, ("user", str(stream))]) | asked | {"stream": stream}
            status, headers, _ = await raw(w, api, body)
            assert status == 200
            named = set(headers.get("x-instar-overridden", "").split(",")) - {""}
            assert named == (set(asked) if fixed else set())

    s = wires(engine, scenario, fixed=fixed)
    assert s.meters["overridden"] == (2 * len(asked) if fixed else 0)
    for call in s.calls:
        got = {name: getattr(call, name) for name in asked}
        assert got == ({name: {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None}[name] for name in asked}
                       if fixed else asked)  # fmt: skip


def test_w7_n_choices_of_one_seed_have_seeds_of_their_own():
    engine = Engine(*[ids("a <eot>")] * 3)

    async def scenario(w):
        await one_field(w, "chat", n=3, seed=5)

    assert len({call.seed for call in wires(engine, scenario, fixed=False).calls}) == 3


@pytest.mark.parametrize("mode", MODES)
def test_w7_logprobs_are_the_engines_own(mode):
    sampled = spelled(f"ab{SMILE}")

    async def scenario(w):
        reply = (await say(w, "chat", [HI], mode, logprobs=True)).raw
        listed = reply.choices[0].logprobs.content
        assert [one.logprob for one in listed] == w.s.calls[0].logprobs and len(listed) == len(sampled)
        assert listed[0].token == "ab" and listed[0].bytes == [97, 98] and listed[-1].token == "<eot>"
        assert listed[1].bytes is None, "half an emoji has no text"

    wires(Engine(sampled), scenario)


FORMS = {
    "chat": ({"response_format": FORM}, "response_format"),
    "responses": ({"text": FLAT_FORM}, "text"),
}


@pytest.mark.parametrize("api", FORMS)
def test_w7_a_schema_reaches_the_engine_in_evaluation_and_is_refused_in_training(api):
    asked, name = FORMS[api]

    async def scenario(w):
        await say(w, api, [HI], **asked)

    assert wires(Engine(ids("a <eot>")), scenario, fixed=False).calls[0].schema == SCHEMA

    async def refused(w):
        with pytest.raises(openai.BadRequestError) as caught:
            await say(w, api, [HI], **asked)
        assert caught.value.param.startswith(name) and "training" in caught.value.message

    assert not wires(Engine(), refused).calls


def test_w7_a_json_object_is_any_object_and_text_is_no_schema():
    async def scenario(w):
        await say(w, "chat", [HI], response_format={"type": "json_object"})
        await say(w, "chat", [HI], response_format={"type": "text"})
        await say(w, "responses", [HI], text={"format": {"type": "text"}})

    s = wires(Engine(*[ids("a <eot>")] * 3), scenario, fixed=False)
    assert [call.schema for call in s.calls] == [{"type": "object"}, None, None]


class Sum(pydantic.BaseModel):
    total: int


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_w7_the_sdks_typed_replies_work_in_evaluation(api, mode):
    """``parse`` and the typed stream: the schema reaches the engine, the reply is the type."""

    async def scenario(w):
        name = "response_format" if api == "chat" else "text_format"
        body = spell(api, [HI]) | {name: Sum}
        client = w.client(api)
        if mode == "plain":
            reply = await (client.chat.completions if api == "chat" else client.responses).parse(**body)
        else:
            async with opened(client, api, body) as stream:
                async for _ in stream:
                    pass
                reply = await (stream.get_final_completion() if api == "chat" else stream.get_final_response())
        assert (reply.choices[0].message.parsed if api == "chat" else reply.output_parsed) == Sum(total=5)

    s = wires(Engine(spelled('{"total": 5}')), scenario, fixed=False)
    assert s.calls[0].schema["required"] == ["total"]


def test_w8_the_beta_client_of_anthropic_speaks_to_the_same_wire():
    async def scenario(w):
        beta = w.client("messages").beta.messages
        body = spell("messages", [HI], tools=True) | {"betas": ["x-2026-01-01"]}
        reply = await beta.create(**body)
        assert [(block.type, block.input) for block in reply.content] == [("tool_use", {"a": 1, "b": 2})]
        async with beta.stream(**body) as stream:  # the same turn: the body is the same but for its mode
            assert (await stream.get_final_message()).content[0].input == {"a": 1, "b": 2}
        del body["max_tokens"]
        assert (await beta.count_tokens(**body)).input_tokens == reply.usage.input_tokens

    wires(Engine(*[spelled(calling((1, 2)))] * 2), scenario)


# -------------------------------------------------------------------------------------- the responses API's own


def test_responses_a_string_and_items_are_the_same_request():
    engine = Engine(*[ids("a <eot>")] * 3)

    async def scenario(w):
        create = w.client("responses").responses.create
        for given in ("hi", [user("hi")], [{"type": "message", **user([{"type": "input_text", "text": "hi"}])}]):
            reply = await create(model="policy", input=given)
            assert reply.output_text == "a" and reply.status == "completed" and reply.error is None

    wires(engine, scenario)
    assert engine.prompts[0] == engine.prompts[1] == engine.prompts[2]


@pytest.mark.parametrize("mode", MODES)
def test_responses_a_chain_of_ids_is_the_same_ids_as_the_whole_history(mode):
    script = [spelled(f"<think>hm</think>so {calling((1, 2))}"), spelled("3"), spelled("bye")]
    prompts = []
    for chained in (False, True):
        engine = Engine(*script)

        async def scenario(w, chained=chained):
            client = w.client("responses", "blocking" in mode)
            items, before = [], {}
            new = [user("hi")]
            for text in ("", "thanks", ""):
                items += new
                body = {"model": "policy", "input": new if chained else items, "instructions": "Be kind",
                        "tools": TOOLS["responses"]} | before  # fmt: skip
                reply = await fetch(client, "responses", body, mode)
                assert reply.previous_response_id == before.get("previous_response_id")
                items += reply.output
                before = {"previous_response_id": reply.id} if chained else {}
                calls = [i for i in reply.output if i.type == "function_call"]
                new = [{"type": "function_call_output", "call_id": c.call_id, "output": "3"} for c in calls]
                new = new or [user(text)]

        assert len(wires(engine, scenario).branches) == 1
        prompts.append(engine.prompts)
    assert prompts[0] == prompts[1] and len(prompts[0]) == 3


def test_responses_a_chain_may_fork_at_an_older_id():
    """Two continuations of one response: the stored history is not changed by either."""

    async def scenario(w):
        create = w.client("responses").responses.create
        first = await create(model="policy", input="hi")
        left, right = [await create(model="policy", input=say, previous_response_id=first.id) for say in ("l", "r")]
        await create(model="policy", input="on", previous_response_id=left.id)
        await create(model="policy", input="on", previous_response_id=right.id)

    engine = Engine(*[ids("a <eot>")] * 5)
    s = wires(engine, scenario)
    head = "<user>hi<eot>\n<assistant>a<eot>\n<user>"
    assert [toy(KEEP).decode(prompt).removeprefix(head) for prompt in engine.prompts[3:]] == [
        f"{side}<eot>\n<assistant>a<eot>\n<user>on<eot>\n<assistant>" for side in "lr"]  # fmt: skip
    assert len(s.branches) == 2


@pytest.mark.parametrize("ident", ["resp_unknown", "", 5, ["resp_unknown"], {"id": "x"}])
def test_responses_an_unknown_previous_id_is_400(ident):
    async def scenario(w):
        status, _, data = await raw(w, "responses", {"input": "hi", "previous_response_id": ident})
        assert status == 400 and json.loads(data)["error"]["param"] == "previous_response_id"

    wires(Engine(), scenario)


def test_responses_store_false_and_another_session_are_not_found():
    async def scenario(w):
        create = w.client("responses").responses.create
        reply = await create(model="policy", input="hi", store=False)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await create(model="policy", input="x", previous_response_id=reply.id)
        kept = await create(model="policy", input="hi")
        other = w.server.open(Sampling(1.0, 1.0, 8, True))
        foreign = w.client("responses").with_options(base_url=w.server.url(other) + "/v1")
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await foreign.responses.create(model="policy", input="x", previous_response_id=kept.id)

    wires(Engine(*[ids("a <eot>")] * 2), scenario)


def test_responses_instructions_belong_to_their_request_alone():
    """As the API documents: they are not carried over by previous_response_id."""
    engine = Engine(*[ids("a <eot>")] * 2)

    async def scenario(w):
        create = w.client("responses").responses.create
        reply = await create(model="policy", input="hi", instructions="Be kind")
        assert reply.instructions == "Be kind"
        await create(model="policy", input="x", instructions="Be short", previous_response_id=reply.id)

    wires(engine, scenario)
    assert toy(KEEP).decode(engine.prompts[1]).startswith("<system>Be short<eot>\n<user>hi<eot>\n<assistant>a<eot>")


def test_responses_a_stream_is_legal_event_by_event():
    """Numbered from 0, by the SDK's own types, each item and part opened once and closed before the next opens."""
    adapter = pydantic.TypeAdapter(ResponseStreamEvent)
    text = f"<think>{'hm ' * 200}</think>so {calling((1, 2), (3, 4))}"

    async def scenario(w):
        got = await events(w, "responses", [HI], tools=True)
        read = [adapter.validate_python(data) for _, data in got]
        assert [name for name, _ in got] == [event.type for event in read]
        assert [event.sequence_number for event in read] == list(range(len(read)))
        kinds = [event.type.removeprefix("response.") for event in read]
        assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed" and kinds.count("completed") == 1
        assert read[0].response.status == "in_progress" and read[0].response.output == []
        final, item, part, text = read[-1].response, None, None, ""
        for event in read[2:-1]:
            sort = event.type.removeprefix("response.")
            if sort == "output_item.added":
                assert item is None and event.output_index == final.output.index(
                    next(i for i in final.output if i.id == event.item.id))  # fmt: skip
                item, text = event.item, ""
            elif sort == "output_item.done":
                assert part is None and event.item == final.output[event.output_index] and event.item.id == item.id
                item = None
            else:
                assert event.item_id == item.id
                if sort == "content_part.added":
                    assert part is None and event.part.text == ""
                    part, text = event.part, ""
                elif sort == "content_part.done":
                    assert event.part.text == text and part is not None
                    part = None
                elif sort.endswith(".delta"):
                    assert len(event.delta) > 0
                    text += event.delta
                elif sort == "function_call_arguments.done":
                    assert event.arguments == text and json.loads(text)
                else:
                    assert sort in ("output_text.done", "reasoning_text.done") and event.text == text
        assert item is None
        assert [i.type for i in final.output] == ["reasoning", "message", "function_call", "function_call"]

    wires(Engine(spelled(text)), scenario, max_tokens=2000)


@pytest.mark.parametrize("text", ["and so on", "<think>hm", calling((1, 2))[:-5]])
def test_responses_a_stream_that_was_cut_ends_as_incomplete(text):
    async def scenario(w):
        got = await events(w, "responses", [HI], tools=True)
        last = pydantic.TypeAdapter(ResponseStreamEvent).validate_python(got[-1][1])
        assert got[-1][0] == last.type == "response.incomplete" and last.response.status == "incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        assert last.response.usage.output_tokens == len(w.s.calls[0].token_ids)

    wires(Engine(spelled(text)[:-1]), scenario)


# ------------------------------------------------------------------------------------ echoes of real agent libraries

CALL_23 = '{"a":2,"b":3}'
CHAT_CALL = {"id": "call_abcadd", "type": "function", "function": {"name": "add", "arguments": CALL_23}}
CHAT_LEAD = [{"content": "Use the tool.", "role": "system"}, {"role": "user", "content": "What is 2 + 3?"}]
CHAT_TURN = [{"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
             {"role": "tool", "tool_call_id": "call_abcadd", "content": "5"}]  # fmt: skip
CHAT_NEXT = [{"role": "assistant", "content": "The sum is 5."}, {"role": "user", "content": "And 4?"}]
FLAT_LEAD = [{"content": "What is 2 + 3?", "role": "user"}]
FLAT_CALL = {"arguments": CALL_23, "call_id": "call_abc", "name": "add", "type": "function_call"}
FLAT_OUT = {"call_id": "call_abc", "output": "5", "type": "function_call_output"}
OUR_TEXT = {"id": "msg_1", "content": [{"annotations": [], "text": "The sum is 5.", "type": "output_text"}],
            "role": "assistant", "status": "completed", "type": "message"}  # fmt: skip
SPACED = {**CHAT_CALL, "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
BLOCKS = [{"role": "user", "content": [{"text": "What is 2 + 3?", "type": "text"}]},
          {"role": "assistant", "content": [{"id": "toolu_1", "type": "tool_use", "name": "add",
                                             "input": {"a": 2, "b": 3}}]},
          {"role": "user", "content": [{"tool_use_id": "toolu_1", "type": "tool_result",
                                        "content": [{"text": "5", "type": "text"}], "is_error": False}]},
          {"role": "assistant", "content": [{"text": "The sum is 5.", "type": "text"}]},
          {"role": "user", "content": [{"text": "And 4?", "type": "text"}]}]  # fmt: skip
ECHOES = {
    "openai-agents chat": ("chat", {"metadata": {"k": "v"}, "store": False, "parallel_tool_calls": False},
                           [*CHAT_LEAD, {**CHAT_TURN[0], "tool_calls": [SPACED]}, CHAT_TURN[1], *CHAT_NEXT], (2, 4, 6)),
    "pydantic-ai chat": ("chat", {"tool_choice": "auto", "stop": ["END"], "seed": 1, "max_completion_tokens": 64},
                         [*CHAT_LEAD, *CHAT_TURN, *CHAT_NEXT], (2, 4, 6)),
    "openai-agents responses": ("responses", {"include": [], "instructions": "Use the tool.", "store": False,
                                              "tool_choice": "auto", "truncation": "disabled"},
                                [*FLAT_LEAD, {**FLAT_CALL, "id": "fc_1", "status": "completed"}, FLAT_OUT, OUR_TEXT,
                                 {"content": "And 4?", "role": "user"}], (1, 3, 5)),
    "pydantic-ai responses": ("responses", {"instructions": "Use the tool.", "parallel_tool_calls": False},
                              [*FLAT_LEAD, FLAT_CALL, FLAT_OUT, {"role": "assistant", "content": "The sum is 5."},
                               {"role": "user", "content": "And 4?"}], (1, 3, 5)),
    "pydantic-ai anthropic": ("messages", {"max_tokens": 64, "system": [{"type": "text", "text": "Use the tool."}],
                                           "tool_choice": {"type": "auto"}, "stop_sequences": ["END"]},
                              BLOCKS, (1, 3, 5)),
}  # fmt: skip


@pytest.mark.parametrize("client", ECHOES)
def test_the_echo_of_a_real_agent_library_continues_its_branch(client):
    """Bodies as captured from the library: other ids for calls, other spacing of arguments, no thinking, own keys."""
    api, more, items, ends = ECHOES[client]
    script = [spelled(f"<think>2 and 3</think>{calling((2, 3))}"), spelled("The sum is 5."), spelled("9")]

    async def scenario(w):
        for end in ends:
            body = {
                "model": "policy",
                "tools": TOOLS[api],
                ("input" if api == "responses" else "messages"): items[:end],
            }
            status, _, data = await raw(w, api, body | more)
            assert status == 200, data

    [row] = exact(wires(Engine(*script), scenario))
    assert trained(row) == [*script[0], *script[1], *script[2]]


# ---------------------------------------------------------------------------------------------- w8: Anthropic's own


def test_w8_a_stream_opens_one_block_at_a_time_and_starts_with_nothing():
    adapter = pydantic.TypeAdapter(RawMessageStreamEvent)
    text = f"<think>hm {'x' * 600}</think>so {calling((1, 2), (3, 4))}"

    async def scenario(w):
        got = await events(
            w, "messages", [HI], tools=True, cap=2000, thinking={"type": "enabled", "budget_tokens": 1024}
        )
        read = [adapter.validate_python(data) for _, data in got]
        assert [name for name, _ in got] == [event.type for event in read]
        start = got[0][1]["message"]
        assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
        assert start["role"] == "assistant" and start["type"] == "message" and start["id"].startswith("msg_")
        assert start["usage"]["input_tokens"] == len(w.engine.prompts[0]), "w8: usage is real from the start"
        is_open, blocks = None, []
        for event in read[1:-2]:
            if event.type == "content_block_start":
                assert is_open is None and event.index == len(blocks)
                is_open, kinds = event.index, set()
                blocks.append(event.content_block.type)
                empty = {"text": "text", "thinking": "thinking", "tool_use": "input"}[event.content_block.type]
                assert not getattr(event.content_block, empty)
            elif event.type == "content_block_delta":
                assert event.index == is_open
                kinds.add(event.delta.type)
            else:
                assert event.type == "content_block_stop" and event.index == is_open
                assert kinds == {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"},
                                 "tool_use": {"input_json_delta"}}[blocks[-1]]  # fmt: skip
                is_open = None
        assert is_open is None and blocks == ["thinking", "text", "tool_use", "tool_use"]
        assert [event.type for event in read[-2:]] == ["message_delta", "message_stop"]
        assert read[-2].delta.stop_reason == "tool_use"
        assert read[-2].usage.output_tokens == len(w.s.calls[0].token_ids)

    wires(Engine(spelled(text)), scenario, max_tokens=2000)


@pytest.mark.parametrize("mode", MODES)
def test_w8_a_reply_of_calls_alone_has_no_empty_text_block(mode):
    async def scenario(w):
        said = await say(w, "messages", [HI], mode, tools=True)
        assert [block.type for block in said.raw.content] == ["tool_use"]

    wires(Engine(spelled(calling((1, 2)))), scenario)


RESULTS = {
    "string": ("5", "5"), "text blocks": ([{"type": "text", "text": "5"}, {"type": "text", "text": "6"}], "56"),
    "nothing": (None, ""), "empty": ([], ""),
}  # fmt: skip


@pytest.mark.parametrize("is_error", [None, False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_w8_a_tool_result_reaches_the_template(name, is_error):
    given, shown = RESULTS[name]
    engine = Engine(spelled(calling((1, 2))), ids("a <eot>"))

    async def scenario(w):
        first = await say(w, "messages", [HI], tools=True)
        block = {"type": "tool_result", "tool_use_id": first.calls[0][2]}
        block |= {"content": given} if given is not None else {}
        block |= {"is_error": is_error} if is_error is not None else {}
        await say(w, "messages", [HI, first, ("user", [block, {"type": "text", "text": "go"}])], tools=True)
        said = toy(KEEP).decode(engine.prompts[1])
        wanted = shown or ("error" if is_error else "")
        assert said.endswith(f"<user><tool>{wanted}</tool><eot>\n<user>go<eot>\n<assistant>")

    assert len(wires(engine, scenario).branches) == 1


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("echoed", [True, False])
def test_w8_thinking_is_shown_to_who_asks_and_may_be_echoed_or_not(mode, shown, echoed):
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if shown else {}
    script = [spelled("<think>hm</think>so"), spelled("<think>mm</think>yes")]

    async def scenario(w):
        first = await say(w, "messages", [HI], mode, **more)
        kinds = [block.type for block in first.raw.content]
        assert kinds == (["thinking", "text"] if shown else ["text"]) and first.text == "so"
        if not echoed:
            first.echo = [{"role": "assistant", "content": first.text}]
        await say(w, "messages", [HI, first, ("user", "x")], mode, **more)

    [row] = exact(wires(Engine(*script), scenario))
    assert trained(row) == script[0] + script[1]


REASONS = {
    "end_turn": ("so", {}, True), "max_tokens": ("so", {}, False), "tool_use": (calling((1, 2)), {}, True),
    "stop_sequence": ("so END", {"stop_sequences": ["END"]}, True),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("reason", REASONS)
def test_w8_the_stop_reason_of_each_case(mode, reason):
    text, more, ended = REASONS[reason]

    async def scenario(w):
        reply = (await say(w, "messages", [HI], mode, tools=True, **more)).raw
        assert (reply.stop_reason, reply.stop_sequence) == (reason, "END" if reason == "stop_sequence" else None)

    wires(Engine(spelled(text) if ended else spelled(text)[:-1]), scenario)


def test_w8_tools_reach_the_template_alike_from_all_three_apis():
    engine = Engine(*[ids("a <eot>")] * 3)

    async def scenario(w):
        for api in APIS:
            await say(w, api, [HI], tools=True)

    wires(engine, scenario)
    seen = []
    for prompt in engine.prompts:
        [function] = [
            tool["function"] for tool in json.loads(toy(KEEP).decode(prompt)[len("<system>") :].split("<eot>")[0])
        ]
        seen.append({name: value for name, value in function.items() if name != "strict"})
    assert seen == [{"name": "add", "description": "Adds.", "parameters": SCHEMA}] * 3


# ------------------------------------------------------------------------------------ w9, w10, w11: usage, counts, caps


def test_w9_the_usage_chunk_is_there_only_when_asked_for_and_has_no_choices():
    async def scenario(w):
        bare = [data for _, data in await events(w, "chat", [HI])][:-1]
        assert all(chunk["choices"] and not chunk.get("usage") for chunk in bare)
        asked = [data for _, data in await events(w, "chat", [HI], stream_options={"include_usage": True})][:-1]
        assert all(chunk["choices"] and chunk["usage"] is None for chunk in asked[:-1])
        assert asked[-1]["choices"] == []
        prompt, sampled = len(w.engine.prompts[0]), len(w.s.calls[0].token_ids)
        assert asked[-1]["usage"] == {"prompt_tokens": prompt, "completion_tokens": sampled,
                                      "total_tokens": prompt + sampled}  # fmt: skip

    wires(Engine(*[spelled("ab")] * 2), scenario)


@pytest.mark.parametrize("blocking", [False, True])
def test_w10_count_tokens_is_the_length_of_the_ids_that_the_call_then_uses(blocking):
    script = [spelled(f"<think>hm</think>{calling((1, 2))}"), spelled("ab")[:-1], spelled("bye")]
    engine = Engine(*script)

    async def scenario(w):
        client, items = w.client("messages", blocking), [HI]
        for turn in range(3):
            body = spell("messages", items, tools=True, system="Be kind")
            del body["max_tokens"]
            counting = client.messages.count_tokens
            counted = await asyncio.to_thread(counting, **body) if blocking else await counting(**body)
            said = await say(
                w, "messages", items, "blocking plain" if blocking else "plain", tools=True, system="Be kind"
            )
            assert counted.input_tokens == said.used[0] == len(engine.prompts[turn])
            items += [said, ("results", (said.calls[0][2], "3")) if said.calls else ("user", "go on")]
        await client.messages.count_tokens(**body) if not blocking else None
        assert len(engine.calls) == 3, "counting samples nothing"

    s = wires(engine, scenario)
    assert len(s.branches) == 1 and s.meters["closing_tokens"] > 2, "the length stop's closing ids are counted too"


CAPS = [("chat", "max_tokens"), ("chat", "max_completion_tokens"), ("responses", "max_output_tokens"),
        ("messages", "max_tokens")]  # fmt: skip


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize(("api", "name"), CAPS)
def test_w11_every_cap_caps_and_says_so(api, name, mode):
    async def scenario(w):
        said = await say(w, api, [HI], mode, **{name: 3})
        assert (said.text, said.why, said.used[1]) == ("xyz", "length", 3)
        if api == "messages":
            assert said.raw.stop_reason == "max_tokens"

    s = wires(Engine(spelled("xyz and so on")), scenario)
    assert s.calls[0].max_tokens == 3


def test_w11_of_two_caps_the_smaller_one_caps():
    async def scenario(w):
        for two in ({"max_tokens": 2, "max_completion_tokens": 9}, {"max_tokens": 9, "max_completion_tokens": 2}):
            await say(w, "chat", [HI], **two)

    assert [call.max_tokens for call in wires(Engine(*[spelled("abcdef")] * 2), scenario).calls] == [2, 2]


@pytest.mark.parametrize("api", APIS)
def test_w11_a_cap_above_the_rollouts_own_or_the_context_is_cut_to_what_is_left(api):
    async def scenario(w):
        await say(w, api, [HI], cap=20_000)

    s = wires(Engine(ids("a <eot>")), scenario, context=100)
    assert s.calls[0].max_tokens == 100 - len(s.calls[0].prompt_ids)


# ----------------------------------------------------------------------------------------------------- w12: retries


@pytest.mark.parametrize("modes", [("plain", "plain"), ("stream", "stream"), ("stream", "blocking plain")])
@pytest.mark.parametrize("api", APIS)
def test_w12_a_duplicate_body_while_the_first_runs_is_one_generation(api, modes):
    engine, gate = Engine(), asyncio.Event()
    engine.script = [held(engine, gate, spelled(calling((1, 2))))]

    async def scenario(w):
        asking = [asyncio.create_task(say(w, api, [HI], mode, tools=True)) for mode in modes]
        while w.s.meters["retries_joined"] < 1:
            await asyncio.sleep(0.01)
        gate.set()
        one, two = await asyncio.gather(*asking)
        assert (one.text, one.calls, one.why, one.used) == (two.text, two.calls, two.why, two.used)

    s = wires(engine, scenario)
    assert len(engine.calls) == 1 and s.meters["retries_joined"] == 1 and len(exact(s)) == 1


@asynccontextmanager
async def losing(port: int, lost: int):
    """A way to the server on which the first ``lost`` replies are lost: the connection breaks instead."""
    left = [lost]

    async def pipe(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connected(reader, writer):
        up, down = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.create_task(pipe(reader, down))
        if left[0]:
            left[0] -= 1
            got = b""
            while b"[DONE]" not in got and b"message_stop" not in got and b"response.completed" not in got:
                more = await up.read(65536)
                got += more
                if not more or (b"application/json" in got and got.rstrip().endswith(b"}")):
                    break
            await asyncio.sleep(0.05)  # the server believes that it has answered
            writer.transport.abort()
            down.close()
        else:
            await pipe(up, writer)
        sending.cancel()

    proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield proxy.sockets[0].getsockname()[1]
    finally:
        proxy.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_w12_the_sdks_own_retry_of_a_lost_answer_is_the_recorded_turn(api, stream):
    """The SDK asks again by itself, and says so in its own header; tokens are trained once."""
    engine = Engine(spelled("first"), spelled("second"))

    async def scenario(w):
        async with losing(w.server.port, 1) as port:
            direct = w.server.url(w.s)
            url = direct.replace(str(w.server.port), str(port)) + ("" if api == "messages" else "/v1")
            client = w.client(api).with_options(base_url=url, max_retries=2)
            if not stream:
                said = await say(w, api, [HI], client=client)
            else:  # the answer is lost whole, so that the SDK has no stream yet and may ask again
                body = spell(api, [HI]) | {"stream": True}
                got = [event async for event in await plainly(client, api)(**body)]
                said = None
                assert "first" in repr(got)
            assert said is None or said.text == "first"

    s = wires(engine, scenario)
    assert len(engine.calls) == 1 and s.meters["retries_joined"] == 1
    [row] = exact(s)
    assert trained(row) == spelled("first")


@pytest.mark.parametrize("api", APIS)
def test_w12_a_plain_request_after_a_stream_of_the_same_body_is_the_same_turn(api):
    engine = Engine(spelled("first"), spelled("second"), spelled("third"))

    async def scenario(w):
        assert (await say(w, api, [HI], "stream")).text == "first"
        assert (await say(w, api, [HI], "plain")).text == "first"
        assert len(engine.calls) == 1
        assert (await say(w, api, [HI], "plain")).text == "second", "the fallback has been served: a wish for another"

    s = wires(engine, scenario)
    assert len(engine.calls) == 2 and len(exact(s)) == 2


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_w12_the_same_body_again_after_its_answer_is_another_sample(api, mode):
    script = [spelled("first"), spelled("second")]
    engine = Engine(*script)

    async def scenario(w):
        assert [(await say(w, api, [HI], mode)).text for _ in range(2)] == ["first", "second"]

    s = wires(engine, scenario)
    assert [trained(row) for row in exact(s)] == script and s.meters["turns_resample"] == 1


@pytest.mark.parametrize("other", [False, "true", None])
def test_w12_bodies_that_differ_deep_inside_are_two_requests(other):
    """A tool of the client's own may have an argument named stream: only the body's own does not count."""
    engine, gate = Engine(), asyncio.Event()
    engine.script = [held(engine, gate, spelled("first")), held(engine, gate, spelled("second"))]

    async def scenario(w):
        async def ask(value):
            used = {"type": "tool_use", "id": "c", "name": "add", "input": {"stream": value, "x": 1}}
            result = {"type": "tool_result", "tool_use_id": "c", "content": "5"}
            return await say(w, "messages", [HI, ("assistant", [used]), ("user", [result])], tools=True)

        asking = [asyncio.create_task(ask(value)) for value in (True, other)]
        while len(engine.calls) + w.s.meters["retries_joined"] < 2:
            await asyncio.sleep(0.01)
        gate.set()
        assert {said.text for said in await asyncio.gather(*asking)} == {"first", "second"}

    wires(engine, scenario)


@pytest.mark.parametrize("api", APIS)
def test_w12_the_order_of_a_bodys_keys_does_not_count(api):
    """The SDK's stream helper writes the same fields in another order than its plain call."""
    engine = Engine(spelled("first"), spelled("second"))

    async def scenario(w):
        body = spell(api, [HI], tools=True)
        await raw(w, api, {"stream": True} | body)
        status, _, data = await raw(w, api, dict(reversed(body.items())) | {"stream": False})
        assert status == 200 and b"first" in data

    assert len(wires(engine, scenario).calls) == 1


@pytest.mark.parametrize("api", APIS)
def test_w12_the_first_client_may_leave_while_another_waits(api):
    """And the second may leave while the first waits; only the last one to go aborts the call."""
    for leaver in (0, 1):
        engine, gate, started = Engine(), asyncio.Event(), asyncio.Event()
        engine.script = [held(engine, gate, spelled("first"), started)]

        async def scenario(w, leaver=leaver, gate=gate, started=started):
            asking = [asyncio.create_task(say(w, api, [HI], mode)) for mode in ("stream", "plain")]
            await started.wait()
            while w.s.meters["retries_joined"] < 1:
                await asyncio.sleep(0.01)
            asking[leaver].cancel()
            await asyncio.sleep(0.1)
            gate.set()
            assert (await asking[1 - leaver]).text == "first"
            assert w.s.meters["disconnects"] == 0

        assert len(wires(engine, scenario).calls) == 1


@pytest.mark.parametrize("api", APIS)
def test_w12_a_retry_that_arrives_while_the_abandoned_call_still_stops_is_answered(api):
    """An engine takes a moment to abort. A client that timed out and asks again must not get the dying call."""
    engine, started = Engine(), asyncio.Event()

    async def stubborn(call):
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.4)
            raise

    engine.script = [stubborn, spelled("second")]

    async def scenario(w):
        asking = asyncio.create_task(say(w, api, [HI]))
        await started.wait()
        asking.cancel()
        while not w.s.meters["disconnects"]:
            await asyncio.sleep(0.01)
        assert (await say(w, api, [HI])).text == "second"

    wires(engine, scenario)


@pytest.mark.parametrize("api", APIS)
def test_w12_a_failed_body_may_be_asked_again_at_once(api):
    engine = Engine()

    async def die(call):
        raise RuntimeError("died")

    engine.script = [die, spelled("second")]

    async def scenario(w):
        with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)):
            await say(w, api, [HI])
        assert (await say(w, api, [HI])).text == "second"

    wires(engine, scenario)


# ----------------------------------------------------------------------------- w13, keep-alive, the SDKs' own patience


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_w13_a_closed_socket_aborts_the_call_within_a_second(api, stream, monkeypatch):
    monkeypatch.setattr(loopback, "KEEP_ALIVE_S", 0.1)
    engine, started, aborted = Engine(), asyncio.Event(), []

    async def endless(call):
        engine.say(call, ids("b b b"))
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            aborted.append(time.perf_counter())
            raise

    engine.script = [endless, ids("a <eot>")]

    async def scenario(w):
        body = json.dumps(spell(api, [HI]) | {"stream": stream}).encode()
        async with aiohttp.ClientSession() as http:
            asking = asyncio.create_task(http.post(w.url(api), data=body).__aenter__())
            await started.wait()
            if stream:
                reply = await asking
                await reply.content.readany()
                reply.close()
            else:
                asking.cancel()
            left = time.perf_counter()
            while not aborted:
                await asyncio.sleep(0.01)
                assert time.perf_counter() - left < 1
        assert w.s.meters["disconnects"] == 1 and w.s.uncommitted == 3 and w.s.failure is None
        assert (await say(w, api, [HI])).text == "a"

    s = wires(engine, scenario)
    assert [trained(row) for row in exact(s)] == [ids("a <eot>")]


def together(scenario, **kwargs) -> dict[str, Session]:
    """Run ``scenario(world, engine, api)`` for every API at once, each with its own server."""

    async def one(api):
        engine = Engine()
        async with world(engine, **kwargs) as w:
            await scenario(w, engine, api)
            return w.s

    async def go():
        return dict(zip(APIS, await asyncio.gather(*map(one, APIS)), strict=True))

    sessions = run(go())
    for s in sessions.values():
        exact(s)
    return sessions


@pytest.mark.parametrize("blocking", [False, True])
def test_keep_alive_a_stream_outlives_the_clients_read_time_out(blocking):
    async def scenario(w, engine, api):
        engine.script = [after(engine, 1.5, spelled("late"))]
        mode = "blocking stream" if blocking else "stream"
        said = await say(w, api, [HI], mode, client=w.client(api, blocking, timeout=1.0))
        assert said.text == "late"

    together(scenario)


def test_keep_alive_is_a_comment_or_a_ping_and_nothing_else_comes_before_the_commit(monkeypatch):
    monkeypatch.setattr(loopback, "KEEP_ALIVE_S", 0.05)

    async def scenario(w, engine, api):
        gate = asyncio.Event()
        engine.script = [held(engine, gate, spelled("late"))]
        body = json.dumps(spell(api, [HI]) | {"stream": True}).encode()
        async with aiohttp.ClientSession() as http, http.post(w.url(api), data=body) as reply:
            seen, pings, committed = b"", 0, None
            ping = b'event: ping\ndata: {"type": "ping"}\n\n' if api == "messages" else b": "
            while data := await reply.content.readany():
                if committed is None and (not frames(data) or frames(data)[0][0] == "ping"):
                    pings += 1
                    assert data.startswith(ping) and data.endswith(b"\n\n")
                    assert not w.s.calls[0].committed
                    if pings == 3:
                        gate.set()
                else:
                    committed = w.s.calls[0].committed if committed is None else committed
                    seen += data
            assert pings >= 3 and committed is True
            assert frames(seen)[-1][0] in ("message_stop", "response.completed", None) and b"late" in seen

    together(scenario)


def test_the_sdks_honour_the_503_and_succeed_at_the_second_attempt():
    async def scenario(w, engine, api):
        async def die(call):
            engine.say(call, ids("b b"))
            raise RuntimeError("died")

        engine.script = [die, spelled("second")]
        began = time.perf_counter()
        said = await say(w, api, [HI], client=w.client(api, max_retries=1))
        assert said.text == "second" and time.perf_counter() - began > 0.95, "Retry-After: 1"

    for s in together(scenario).values():
        assert [trained(row) for row in exact(s)] == [spelled("second")] and s.uncommitted == 2


def test_the_sdks_time_out_and_ask_again_and_one_call_is_trained():
    async def scenario(w, engine, api):
        async def endless(call):
            engine.say(call, ids("b b"))
            await asyncio.sleep(60)

        engine.script = [endless, spelled("second")]
        said = await say(w, api, [HI], client=w.client(api, timeout=1.0, max_retries=1))
        assert said.text == "second"

    for s in together(scenario).values():
        assert [trained(row) for row in exact(s)] == [spelled("second")]
        assert s.meters["disconnects"] == 1 and s.uncommitted == 2


# ------------------------------------------------------------------------------------------------------- w14: marks


@pytest.mark.parametrize("api", APIS)
def test_w14_a_moved_marker_or_a_changed_unknown_key_of_a_message_does_not_fork(api):
    engine = Engine(*[ids("a <eot>")] * 3)
    sort = "input_text" if api == "responses" else "text"

    async def scenario(w):
        said = []
        for turn in range(3):
            for message in said:  # the marker stands on the newest message only; a key changes in every turn
                for part in message["content"]:
                    part.pop("cache_control", None)
                message["x_trace"] = turn
            part = {"type": sort, "text": f"u{turn}", "cache_control": {"type": "ephemeral"}}
            said.append({"role": "user", "content": [part]})
            tools = json.loads(json.dumps(TOOLS[api]))
            if turn % 2:
                tools[0]["cache_control"] = {"type": "ephemeral"}
            body = spell(api, [], tools=False) | {"input" if api == "responses" else "messages": said, "tools": tools}
            status, _, data = await raw(w, api, body)
            assert status == 200, data
            kind = "output_text" if api == "responses" else "text"
            said.append({"role": "assistant", "content": [{"type": kind, "text": "a"}]})

    s = wires(engine, scenario)
    assert len(s.branches) == 1 and s.meters["turns_continue"] == 2


# ------------------------------------------------------------------------------------- t9, t14 in all three shapes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("api", APIS)
def test_t9_an_emoji_over_two_tokens_is_whole_and_cut_in_two_its_ids_are_intact(api, mode):
    smile = spelled(SMILE)[:-1]
    assert len(smile) == 2

    async def scenario(w):
        whole = await say(w, api, [HI], mode)
        assert whole.text == f"ab{SMILE}" and "\ufffd" not in whole.text
        cut = await say(w, api, [HI, whole, ("user", "x")], mode, cap=2)
        assert cut.text == "a\ufffd" and cut.why == "length"
        await say(w, api, [HI, whole, ("user", "x"), cut, ("user", "y")], mode)

    script = [[*spelled("ab")[:-1], *smile, *ids("<eot>")], [*ids("a"), *smile], ids("a <eot>")]
    s = wires(Engine(*script), scenario)
    [row] = exact(s)
    assert trained(row) == [*script[0], *script[1][:2], *script[2]]


def test_t9_no_delta_of_a_stream_holds_half_a_character():
    text = (SMILE + "é") * 300

    async def scenario(w):
        got = [data["choices"][0]["delta"].get("content") or "" for _, data in (await events(w, "chat", [HI]))[:-1]]
        assert "".join(got) == text and len([one for one in got if one]) > 1
        assert all("\ufffd" not in one and one == one.encode().decode() for one in got)

    wires(Engine(spelled(text)), scenario, max_tokens=4000, context=8192)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("api", APIS)
def test_t14_an_overflow_is_a_clear_400_and_a_shorter_turn_goes_on(api, mode):
    engine = Engine(ids("a <eot>"), ids("b <eot>"))

    async def scenario(w):
        said = await say(w, api, [HI], mode)
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            await say(w, api, [HI, said, ("user", "x" * 40)], mode)
        assert "too long" in str(caught.value) and "30" in str(caught.value)
        if api != "messages":
            assert caught.value.code == "context_length_exceeded"
        assert (await say(w, api, [HI, said, ("user", "y")], mode)).text == "b"

    s = wires(engine, scenario, context=30)
    assert len(s.branches) == 1 and "xx" not in toy(KEEP).decode(engine.prompts[1])


# ------------------------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("api", ["chat", "messages"])
def test_the_models_are_listed_and_found_in_both_shapes(api, blocking):
    async def scenario(w):
        models = w.client(api, blocking).models
        if blocking:
            listed = await asyncio.to_thread(lambda: list(models.list()))
            found = await asyncio.to_thread(models.retrieve, "policy")
        else:
            listed, found = [model async for model in models.list()], await models.retrieve("policy")
        assert [model.id for model in listed] == ["policy"] and found.id == "policy"
        if api == "messages":
            assert found.type == "model" and found.display_name and found.created_at.year
        else:
            assert found.object == "model" and isinstance(found.created, int) and found.owned_by
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError), match="policy"):
            await asyncio.to_thread(models.retrieve, "other") if blocking else await models.retrieve("other")

    wires(Engine(), scenario)


# -------------------------------------------------------------------------------------------------------- the errors


def shaped(api: str, reply: dict) -> dict:
    """The error, checked for the API's shape."""
    error = reply["error"]
    if api == "messages":
        assert reply["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert set(reply) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str)
    return error


ANTHROPIC_TYPES = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large",
                   503: "overloaded_error"}  # fmt: skip
OPENAI_CLASSES = {400: openai.BadRequestError, 404: openai.NotFoundError, 413: openai.APIStatusError,
                  503: openai.InternalServerError}  # fmt: skip
ANTHROPIC_CLASSES = {400: anthropic.BadRequestError, 404: anthropic.NotFoundError,
                     413: anthropic.RequestTooLargeError, 503: anthropic.InternalServerError}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 413, 503])
@pytest.mark.parametrize("api", APIS)
def test_an_error_has_the_wires_shape_status_and_the_sdks_class(api, status, stream, monkeypatch):
    monkeypatch.setattr(loopback, "MAX_BODY", 2**16)
    engine = Engine()

    async def die(call):
        raise RuntimeError("died")

    engine.script = [die, die]

    async def scenario(w):
        body = spell(api, [("user", "x" * (2**16 if status == 413 else 1))]) | {"stream": stream}
        body |= {"tools": 5} if status == 400 else {}
        if status == 404:
            w.server.close(w.s)
        got, headers, data = await raw(w, api, body)
        error = shaped(api, json.loads(data))
        assert got == status and headers["Content-Type"].startswith("application/json")
        assert ("Retry-After" in headers) == (status == 503)
        if api == "messages":
            assert error["type"] == ANTHROPIC_TYPES[status]
        else:
            assert error["type"] == ("server_error" if status == 503 else "invalid_request_error")
        classes = ANTHROPIC_CLASSES if api == "messages" else OPENAI_CLASSES
        with pytest.raises(classes[status]) as caught:
            await plainly(w.client(api), api)(**body)
        assert caught.value.status_code == status

    wires(engine, scenario)


@pytest.mark.parametrize("blocking", [False, True])
def test_an_error_inside_a_stream_that_has_begun_is_raised_by_the_sdk(blocking, monkeypatch):
    monkeypatch.setattr(loopback, "KEEP_ALIVE_S", 0.05)

    async def scenario(w, engine, api):
        async def die(call):
            engine.say(call, ids("b b"))
            await asyncio.sleep(0.2)
            raise RuntimeError("the engine died")

        engine.script = [die, die, ids("a <eot>")]
        body = spell(api, [HI]) | {"stream": True}
        status, _, data = await raw(w, api, body)
        [(name, event)] = [frame for frame in frames(data) if frame[0] != "ping"]
        assert status == 200 and name == (None if api == "chat" else "error")
        shaped(api, event)
        with pytest.raises((openai.APIError, anthropic.APIError), match="the engine died"):
            await say(w, api, [HI], "blocking stream" if blocking else "stream")
        assert w.s.branches == [] and (await say(w, api, [HI])).text == "a"

    together(scenario)


def test_an_error_on_a_path_that_is_not_served_has_the_shape_of_the_client_that_asks():
    async def scenario(w):
        with pytest.raises(openai.NotFoundError):
            await w.client("chat").embeddings.create(model="policy", input="x")
        with pytest.raises(anthropic.NotFoundError) as caught:
            await w.client("messages").messages.batches.list()
        shaped("messages", caught.value.body)
        with pytest.raises(openai.NotFoundError):
            await w.client("responses").responses.retrieve("resp_x")

    wires(Engine(), scenario)


# Each of these once was, or easily is, a 5xx: an object of the wrong kind at a place where the reply is built from it.
WRONG = {
    "metadata of another type": ("responses", {"metadata": 5}),
    "metadata of numbers": ("responses", {"metadata": {"a": 1}}),
    "strict of another type": ("responses", {"tools": [{**TOOLS["responses"][0], "strict": "x"}]}),
    "async of another type": ("responses", {"tools": [{**TOOLS["responses"][0], "async": "x"}]}),
    "id of another type": ("responses", {"previous_response_id": ["x"]}),
    "summary of another type": ("responses", {"input": [user("x"), {"type": "reasoning", "summary": ["x"]}]}),
    "reasoning of another type": ("responses", {"input": [user("x"), {"type": "reasoning", "content": [5]}]}),
    "input of another type": ("responses", {"input": 5}),
    "item of another type": ("responses", {"input": ["x", None]}),
    "metadata in chat": ("chat", {"metadata": 5}),
    "logprobs of another type": ("chat", {"logprobs": "x"}),
    "half a surrogate pair to stop at": ("chat", {"stop": "\ud83d"}),
    "half a surrogate pair to stop at, in a list": ("messages", {"stop_sequences": ["\ud83d"]}),
    "system of another type": ("messages", {"system": {"a": 1}}),
    "result of another type": ("messages", {"messages": [user([{"type": "tool_result", "content": 5}])]}),
    "block of another type": ("messages", {"messages": [user([5])]}),
    "source of another type": ("messages", {"messages": [user([{"type": "image", "source": 5}])]}),
    "message of another type": ("messages", {"messages": ["x"]}),
    "message without a role": ("messages", {"messages": [{"content": "x"}]}),
    "tool without a type": ("responses", {"tools": [{"name": "f", "parameters": {}}]}),
    "stop of another type": ("chat", {"stop": 5}),
    "choice of another type": ("messages", {"tool_choice": "auto"}),
    "budget of another type": ("messages", {"thinking": 5}),
}


@pytest.mark.parametrize("name", WRONG)
def test_w4_no_value_of_a_wrong_kind_is_a_5xx_or_samples_and_then_fails(name):
    api, more = WRONG[name]

    async def scenario(w):
        status, _, data = await raw(w, api, spell(api, [HI]) | more)
        assert status in (200, 400), data
        assert status == 200 or not w.engine.calls, "tokens were sampled, and trained, for an error"
        shaped(api, json.loads(data)) if status == 400 else None
        for call in w.engine.calls:
            json.dumps([call.stop, call.schema], ensure_ascii=False).encode()  # as it goes to the engine

    wires(Engine(ids("a <eot>")), scenario, fixed=False)


@pytest.mark.parametrize("api", APIS)
def test_w4_a_parser_that_fails_is_an_answer_in_the_wires_shape(api):
    """Parsers are vLLM's: what one raises is no reason for a reply that no client understands."""

    def broken(text, tools):
        raise ValueError("a parser's own fault")

    async def scenario(w):
        status, _, data = await raw(w, api, spell(api, [HI], tools=True))
        assert status in (200, 503)
        if status == 503:
            shaped(api, json.loads(data))
            assert w.s.branches == []

    wires(Engine(ids("a <eot>")), scenario, parse=broken)


@pytest.mark.parametrize("api", APIS)
def test_w4_sampled_arguments_of_any_depth_leave_the_session_whole(api):
    """A model may sample a deeply nested JSON; whatever the answer, a turn is committed whole or not at all."""
    depths = [50, 300, 800, 900, 940, 960, 970, 980, 985, 990]

    def deep(text, tools):
        arguments = '{"a": ' + "[" * len(text) + "]" * len(text) + "}"
        function = {"name": "add", "arguments": arguments}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    async def scenario(w):
        for depth in depths:
            status, _, data = await raw(w, api, spell(api, [("user", str(depth))], tools=True))
            assert status < 500, (depth, data)
            exact(w.s)

    wires(Engine(*[spelled("x" * depth) for depth in depths]), scenario, parse=deep, max_tokens=2000)


# -------------------------------------------------------------------------------------------------------- the images

SHOWN = "(m.content if m.content is string else m.content | map(attribute='type') | join(','))"
SEES = KEEP.replace("'>' + m.content", "'>' + " + SHOWN).replace("'<tool>' + m.content", "'<tool>' + " + SHOWN)
"""A template that writes the kinds of a message's parts."""


def png(width=2, height=2) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (255, 0, 0)).save(out, "PNG")
    return out.getvalue()


def headed(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def uri(data: bytes | str, media="image/png") -> str:
    return f"data:{media};base64,{data if isinstance(data, str) else base64.b64encode(data).decode()}"


def showing(api: str, url: str) -> tuple:
    """A user's item with a text and an image."""
    if api == "chat":
        return "user", [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    if api == "responses":
        return "user", [
            {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": url, "detail": "auto"},
        ]
    source = {"type": "url", "url": url}
    if url.startswith("data:"):
        media, _, data = url.removeprefix("data:").partition(";base64,")
        source = {"type": "base64", "media_type": media, "data": data}
    return "user", [{"type": "text", "text": "see"}, {"type": "image", "source": source}]


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x.png", "https://example.com/x.png", "file:///etc/passwd"])
@pytest.mark.parametrize("api", APIS)
def test_images_are_not_fetched_from_an_address(api, url, images):
    async def scenario(w):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="URLs are not fetched"):
            await say(w, api, [showing(api, url)])

    wires(Engine(), scenario, chat=Template(toy(SEES), template().eos_ids, images=images))


@pytest.mark.parametrize("api", APIS)
def test_images_are_refused_by_a_model_of_text_also_in_a_tool_result(api):
    engine = Engine(spelled(calling((1, 2))))

    async def scenario(w):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="text, not images"):
            await say(w, api, [showing(api, uri(png()))])
        first = await say(w, api, [HI], tools=True)
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="text, not images"):
            parts = showing(api, uri(png()))[1]
            await say(w, api, [HI, first, ("results", (first.calls[0][2], parts))], tools=True)

    wires(engine, scenario)


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_images_reach_the_engine_and_the_row(api, mode):
    one, two = uri(png()), uri(png(3, 1))
    engine = Engine(spelled(calling((1, 2))), ids("a <eot>"))

    async def scenario(w):
        item = showing(api, one)
        first = await say(w, api, [item], mode, tools=True)
        await say(w, api, [item, first, ("results", (first.calls[0][2], showing(api, two)[1]))], mode, tools=True)
        assert toy(SEES).decode(engine.prompts[0]).endswith("<user>text,image<eot>\n<assistant>")

    s = wires(engine, scenario, chat=Template(toy(SEES), template().eos_ids, images=True))
    assert [call.images for call in s.calls] == [[one], [one, two]]
    [row] = exact(s)
    assert row.images == [one, two]


BAD_IMAGES = {
    "not base64": uri("!!!!"),
    "bad padding": uri("abcde"),
    "no image": uri(b"hello"),
    "cut short": uri(png(64, 64)[:60]),
    "another type": uri(png(), "image/svg+xml"),
    "a type that lies": uri(b"%PDF-1.4 hello", "image/jpeg"),
    "a few too many pixels": uri(headed(4097, 4096)),
    "a bomb": uri(headed(60_000, 60_000)),
    "a bomb of another kind": uri(headed(2**31 - 1, 2**31 - 1)),
    "no pixels": uri(headed(0, 5)),
    "one pixel, no data": uri(headed(100, 100)),
    "empty": uri(""),
    "an odd space": uri("iVBORw0KGgo\u2028AAAA"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", BAD_IMAGES)
def test_images_that_cannot_be_shown_are_400(api, name):
    async def scenario(w):
        status, _, data = await raw(w, api, spell(api, [showing(api, BAD_IMAGES[name])]))
        assert status == 400 and "image" in shaped(api, json.loads(data))["message"], data

    wires(Engine(), scenario, chat=Template(toy(SEES), template().eos_ids, images=True))


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_w7_a_top_p_of_nothing_is_the_likeliest_token(api):
    """The APIs allow 0, which engines refuse; the smallest nucleus there is asks for the same."""
    engine = Engine(spelled("a"))

    async def scenario(w):
        status, _, data = await raw(w, api, spell(api, [HI], top_p=0))
        assert status == 200, data

    wires(engine, scenario, fixed=False)
    assert 0 < engine.calls[0].top_p < 1e-3


@pytest.mark.parametrize("api", APIS)
def test_w7_a_tool_with_a_grammar_is_refused(api):
    """OpenAI's custom tools take free text under a grammar; only Anthropic calls its functions custom."""
    tool = {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}

    async def scenario(w):
        status, _, data = await raw(w, api, spell(api, [HI]) | {"tools": [tool]})
        assert status == 400 and b"tools" in data

    wires(Engine(), scenario)
