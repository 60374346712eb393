"""The loopback under load and under abuse: many sessions at once, ten thousand broken bodies, foreign addresses."""

import asyncio
import gc
import json
import logging
import random
import resource
import socket
import tracemalloc
from collections import Counter
from contextlib import asynccontextmanager

import aiohttp
import anthropic
import openai
import pytest
from test_loopback import KEEP, Engine, exact, ids, parse, serving, spelled, template, toy, user

from loopback import BREAK, MAX_DEPTH, Loopback, Sampling

SAMPLING = Sampling(1.0, 1.0, 60, True)
ROUTES = {"chat": "chat/completions", "responses": "responses", "messages": "messages",
          "count": "messages/count_tokens"}  # fmt: skip


def within(seconds: float, coroutine):
    """Run to the end, or fail: nothing here may hang. The seconds are those of a quiet machine."""
    return asyncio.run(asyncio.wait_for(coroutine, 6 * seconds))


@pytest.fixture(autouse=True, scope="module")
def many_sockets():
    """A thousand connections have two ends each, both in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def server_of(engine, context=4096):
    server = Loopback(template(), parse, engine, "policy", context)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def talkative(seed: int) -> Engine:
    """An engine that says something short, always another thing."""
    rng, engine = random.Random(seed), Engine()

    async def say(call):
        await asyncio.sleep(0)
        text = "".join(rng.choice("ab }\n😀é") for _ in range(rng.randrange(12)))
        sampled = spelled(rng.choice(("", "<think>ab</think>")) + text)
        engine.say(call, sampled if rng.random() < 0.9 else sampled[:-1] or sampled)

    engine.script = Forever(say)
    return engine


class Forever:
    """A script that never ends."""

    def __init__(self, step):
        self.step = step

    def pop(self, _):
        return self.step


def spent(server: Loopback) -> str:
    meters = server.meters()
    return " ".join(f"{name} {meters[f'loopback/own_ms_{name}']:.2f} ms" for name in ("mean", "p99"))


# -------------------------------------------------------------------------------------------------------- the load


def test_a_thousand_sessions_of_five_turns_lose_nothing(capsys):
    """Each call's own cost is printed, alone and in the crowd: the crowd's is not counted as its own."""
    engine, turns = talkative(1), 5

    async def dialogue(http, server, s) -> list[int]:
        said, statuses = [], []
        for turn in range(turns):
            said.append(user(f"turn {turn}"))
            body = {"messages": said}
            async with http.post(f"{server.url(s)}/v1/chat/completions", json=body) as reply:
                statuses.append(reply.status)
                said.append((await reply.json())["choices"][0]["message"])
        return statuses

    async def go():
        async with server_of(engine) as server, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            for _ in range(20):
                await dialogue(http, server, server.open(SAMPLING))
            alone = spent(server)
            sessions = [server.open(SAMPLING) for _ in range(1000)]
            statuses = await asyncio.gather(*(dialogue(http, server, s) for s in sessions))
            return sessions, statuses, alone, spent(server)

    sessions, statuses, alone, crowd = within(80, go())
    with capsys.disabled():
        print(f"\n  own cost of a call: alone {alone}; one of a thousand {crowd}")
    assert Counter(status for each in statuses for status in each) == {200: 1000 * turns}
    for s in sessions:
        rows = exact(s)
        assert len(s.calls) == turns and s.uncommitted == 0
        assert s.sampled == sum(int(row.sampled.sum()) for row in rows) > 0


def test_w15_two_hundred_concurrent_calls_of_the_real_clients_all_arrive():
    """One client per SDK, as a program has; streamed and not, all three APIs; none waits for a slot of a pool."""
    engine, together = Engine(), asyncio.Event()

    async def slow(call):
        if len(engine.calls) == 200:
            together.set()
        await asyncio.wait_for(together.wait(), 60)  # every call is in the engine before one of them is answered
        engine.say(call, spelled("ab"))

    engine.script = Forever(slow)

    async def scenario(server, s):
        async with (openai.AsyncOpenAI(base_url=server.url(s) + "/v1", api_key="none", max_retries=0) as oa,
                    anthropic.AsyncAnthropic(base_url=server.url(s), api_key="none", max_retries=0) as an):  # fmt: skip

            async def one(index):
                said = [user(f"call {index}")]
                sort, stream = index % 3, index % 2 == 0
                if sort == 0:
                    reply = await oa.chat.completions.create(model="policy", messages=said, stream=stream)
                elif sort == 1:
                    reply = await oa.responses.create(model="policy", input=said, stream=stream)
                else:
                    reply = await an.messages.create(model="policy", messages=said, max_tokens=50, stream=stream)
                return repr([event async for event in reply]) if stream else repr(reply)

            return await asyncio.gather(*map(one, range(200)))

    async def go():
        async with serving(engine) as (server, s):
            return s, await scenario(server, s)

    s, replies = within(40, go())
    assert len(replies) == 200 and all("ab" in reply for reply in replies)
    assert len(exact(s)) == 200


# -------------------------------------------------------------------------------------------------------- the abuse

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # noqa: E501
VALID = {
    "chat": [
        {"model": "policy", "messages": [
            {"role": "system", "content": "s"}, user([{"type": "text", "text": "a"}]),
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "5"}],
         "tools": [{"type": "function", "function": FUNCTION}], "temperature": 0.5, "top_p": 0.9, "seed": 1, "n": 2,
         "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}, "logprobs": True,
         "tool_choice": "auto", "parallel_tool_calls": False, "max_tokens": 4, "metadata": {"k": "v"}},
        {"model": "policy", "messages": [user([{"type": "image_url", "image_url": {"url": PIXEL}}])]},
        {"model": "policy", "messages": [user("a")],
         "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
    ],
    "responses": [
        {"model": "policy", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": "t", "annotations": []}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "5"}],
         "instructions": "s", "tools": [{"type": "function", **FUNCTION, "strict": True}], "temperature": 0.5,
         "max_output_tokens": 4, "stream": True, "store": False, "metadata": {"k": "v"}, "tool_choice": "auto",
         "include": [], "reasoning": {}},
        {"model": "policy", "input": "a", "previous_response_id": None, "parallel_tool_calls": False, "top_p": 0.9,
         "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
        {"model": "policy", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}]},
    ],
    "messages": [
        {"model": "policy", "max_tokens": 4,
         "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
         "messages": [
            user([{"type": "text", "text": "a"}]),
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "r", "signature": "x"}, {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]},
            user([{"type": "tool_result", "tool_use_id": "c", "is_error": True,
                   "content": [{"type": "text", "text": "5"}]},
                  {"type": "text", "text": "b"}])],
         "tools": [{"name": "f", "description": "d", "input_schema": FUNCTION["parameters"]}],
         "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stop_sequences": ["x"], "top_k": 5,
         "stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"model": "policy", "max_tokens": 4, "messages": [user([{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}}])]},
    ],
}  # fmt: skip
VALID["count"] = [
    {name: value for name, value in body.items() if name in ("model", "system", "messages", "tools")}
    for body in VALID["messages"]
]
BIG = "\ue000"
"""Stands for a number too long for Python to print."""
ODD = ["\ud83d", "\udc00\ud800", BREAK, "\ufdd0", "\x00", "‮abc", "a\u0300" * 50, "<eot>", "<|im_end|>", "{{ 7 }}", "{%",
       "x" * 20_000, "\u2028", "😀", "", " ", "\ufeff", "data:", "http://x", "__class__", "null"]  # fmt: skip
NUMBERS = [0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -1e308, float("nan"), float("inf"), 0.1, 2**53 + 1]


def deep(rng) -> object:
    out, depth = "x", rng.choice((MAX_DEPTH - 2, MAX_DEPTH + 2, 200, 700))
    for _ in range(depth):
        out = [out] if rng.random() < 0.5 else {"k": out}
    return out


def other(rng, words: list[str]) -> object:
    """A value of some kind."""
    pick = rng.randrange(9)
    if pick == 0:
        return rng.choice(ODD)
    if pick == 1:
        return rng.choice([*NUMBERS, BIG])
    if pick == 2:
        return rng.choice((None, True, False, [], {}, [[]], [{}], [None], {"": None}))
    if pick == 3:
        return {"type": rng.choice(words), rng.choice(words): rng.choice(ODD)}
    if pick == 4:
        return [rng.choice(words), rng.choice(NUMBERS)]
    if pick == 5:
        return deep(rng)
    return rng.choice(words)


def places(value, at=()) -> list[tuple]:
    """The paths of everything in a body."""
    found = [at] if at else []
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(item, (*at, name))
    return found


def mutated(rng, body: dict, words: list[str]) -> bytes:
    """A body with one to three faults."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        spots = places(body)
        if not spots:
            break
        *path, last = rng.choice(spots)
        holder = body
        for step in path:
            holder = holder[step]
        how = rng.randrange(8)
        if how <= 2:
            holder[last] = other(rng, words)
        elif how == 3:
            del holder[last]
        elif how == 4 and isinstance(holder, list):
            holder += [json.loads(json.dumps(holder[last]))] * rng.choice((1, 3, 60))
        elif how == 4 or (how == 5 and isinstance(holder, dict)):
            holder[rng.choice(words)] = holder.pop(last) if isinstance(holder, dict) else other(rng, words)
        elif how == 6 and isinstance(holder, list):
            rng.shuffle(holder)
        else:
            holder[last] = rng.choice(ODD) if isinstance(holder[last], str) else rng.choice([*NUMBERS, BIG])
    try:
        data = json.dumps(body).replace(json.dumps(BIG), "9" * 5000).encode()
    except RecursionError:  # deep within deep
        data = b'{"model": "policy", "messages": ' + b"[" * 100_000
    how = rng.randrange(20)
    if how == 0:
        return data[: rng.randrange(len(data))]
    if how == 1:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    if how == 2:
        at = rng.randrange(len(data))
        return data[:at] + bytes(rng.randrange(256) for _ in range(3)) + data[at + rng.randrange(4) :]
    return data


class Faults(logging.Handler):
    """The server's own exceptions, by the place that raised them."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def emit(self, record):
        if record.exc_info:
            kind, error, at = record.exc_info
            while at.tb_next:
                at = at.tb_next
            self.seen[f"{kind.__name__}: {str(error)[:80]} in {at.tb_frame.f_code.co_name}"] += 1


@pytest.mark.parametrize("seed", range(4))
def test_mutated_bodies_are_answered_and_leave_nothing_behind(seed):
    """2,500 bodies per seed over every POST route; a session takes 50 of them, as a rollout does, and is closed."""
    rng, engine = random.Random(seed), Engine()

    async def step(call):
        await asyncio.sleep(0)
        engine.calls.clear()
        engine.say(call, spelled(("a", "xb", "<think>a</think>b")[len(call.prompt_ids) % 3]))

    engine.script = Forever(step)
    words = sorted({word for bodies in VALID.values() for body in bodies for word in words_of(body)})

    def batch() -> list[tuple[str, bytes]]:
        names = [rng.choice(list(ROUTES)) for _ in range(50)]
        return [(name, mutated(rng, rng.choice(VALID[name]), words)) for name in names]

    faults, statuses, bad = Faults(), Counter(), []

    async def abuse(http, server, bodies, fixed):
        s = server.open(Sampling(1.0, 1.0, 8, fixed))
        for name, data in bodies:
            async with http.post(f"{server.url(s)}/v1/{ROUTES[name]}", data=data) as reply:
                text = await reply.read()
            statuses[reply.status] += 1
            if reply.status >= 500 or (reply.status >= 400 and b'"error"' not in text):
                bad.append((name, reply.status, data[:200]))
        # Refused bodies leave no branch, and what was sampled before is as it should be.
        assert len(s.branches) <= sum(call.committed for call in s.calls)
        exact(s)
        server.close(s)

    async def part(http, server):
        await asyncio.gather(*(abuse(http, server, batch(), index % 2 == 0) for index in range(10)))

    async def go():
        timeout = aiohttp.ClientTimeout(total=30)
        async with server_of(engine) as server, aiohttp.ClientSession(timeout=timeout) as http:
            await part(http, server)  # fills caches
            tracemalloc.start()
            try:
                for _ in range(4):
                    await part(http, server)
                gc.collect()
                grown = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
            assert not server.sessions
            s = server.open(SAMPLING)
            for name in ("chat", "responses", "messages"):
                body = VALID[name][0] | {"temperature": 1}
                async with http.post(f"{server.url(s)}/v1/{ROUTES[name]}", json=body) as reply:
                    assert reply.status == 200, await reply.read()
            exact(s)
            return grown

    logger = logging.getLogger("aiohttp.server")
    logger.addHandler(faults)
    try:
        grown = within(60, go())
    finally:
        logger.removeHandler(faults)
    assert not bad, (faults.seen.most_common(), bad[:4])
    assert statuses.total() == 2500
    assert statuses[200] > 200 and statuses[400] > 500, "the mutations are neither too weak nor too strong"
    assert grown < 4 * 2**20, f"2,000 bodies left {grown / 2**20:.1f} MiB"


def words_of(value) -> set[str]:
    """Keys and short strings of a body: the words that a fault may put in a wrong place."""
    if isinstance(value, dict):
        return set(value) | {word for item in value.values() for word in words_of(item)}
    if isinstance(value, list):
        return {word for item in value for word in words_of(item)}
    return {value} if isinstance(value, str) and len(value) < 30 else set()


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_refused_bodies_are_not_kept(route):
    """An agent that asks again and again with a history that does not fit must not fill the memory."""

    async def go():
        async with server_of(Engine()) as server, aiohttp.ClientSession() as http:
            s = server.open(SAMPLING)

            async def ask(number):
                said = [user(f"{number} " + "xy " * 50_000)]
                body = {"input" if route == "responses" else "messages": said, "max_tokens": 9, "model": "policy"}
                body |= {"max_output_tokens": body.pop("max_tokens")} if route == "responses" else {}
                async with http.post(f"{server.url(s)}/v1/{route}", json=body) as reply:
                    assert reply.status == 400 and b"too long" in await reply.read()

            for number in range(3):
                await ask(number)
            tracemalloc.start()
            try:
                for number in range(3, 13):
                    await ask(number)
                gc.collect()
                return s, tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()

    s, grown = within(60, go())
    assert s.branches == [] and grown < 2**20, f"10 bodies of 150 kB left {grown / 2**20:.1f} MiB"


# ---------------------------------------------------------------------------------------------------- the addresses


async def everywhere(http, server, prefix: str) -> dict[str, tuple[int, str]]:
    """Every route of the server under another address: status and reply."""
    out = {}
    for route in server.runner.app.router.routes():
        path = route.resource.canonical.replace("/s/{session}", prefix).replace("{model}", "policy")
        url = f"http://127.0.0.1:{server.port}{path}"
        async with http.request(route.method, url, data=b"{}" if route.method == "POST" else None) as reply:
            out[f"{route.method} {route.resource.canonical}"] = reply.status, await reply.text()
    return out


def test_an_unknown_a_closed_and_a_foreign_session_are_404_on_every_route():
    async def go():
        async with server_of(talkative(1)) as server, server_of(talkative(1)) as other, aiohttp.ClientSession() as http:
            mine, closed, foreign = server.open(SAMPLING), server.open(SAMPLING), other.open(SAMPLING)
            server.close(closed)
            known = await everywhere(http, server, f"/s/{mine.id}")
            assert len(known) >= 7 and all(status != 404 for status, _ in known.values()), known
            for prefix in ("guess", closed.id, foreign.id, mine.id[:-1], mine.id + "x", mine.id.swapcase(), "x" * 4000):
                for route, (status, text) in (await everywhere(http, server, f"/s/{prefix}")).items():
                    assert status == 404, (route, prefix[:40])
                    assert route.startswith("HEAD") or "session" in json.loads(text)["error"]["message"]

    within(20, go())


def test_a_closed_session_ends_while_its_last_call_runs():
    """``shut`` is what a rollout's end calls: the client hears 404, nothing more is sampled."""
    engine, started = Engine(), asyncio.Event()

    async def endless(call):
        engine.say(call, ids("b b"))
        started.set()
        await asyncio.sleep(60)

    engine.script = [endless]

    async def go():
        async with server_of(engine) as server, aiohttp.ClientSession() as http:
            s = server.open(SAMPLING)
            asking = asyncio.create_task(
                http.post(f"{server.url(s)}/v1/chat/completions", json={"messages": [user("a")]})
            )
            await started.wait()
            server.close(s)
            await s.shut()
            async with await asking as reply:
                assert reply.status == 404 and (await reply.json())["error"]["message"]
            assert s.uncommitted == 2 and s.failure is None
            exact(s)

    within(10, go())


TRICKS = [
    "/", "/s", "/s/", "/s//v1/models", "/s/../v1/models", "/s/%2e%2e/v1/models", "/s/..%2f..%2fetc/passwd",
    "/s/{id}/../../etc/passwd", "/s/{id}%00/v1/models", "/s/{id}%2fv1%2fmodels", "/s/{id}/v1/../../trace",
    "/s/{id}/v1/models/../../../etc", "/s/{id}/", "/s/{id}/v1", "//s/{id}/v1/models", "/S/{id}/v1/models",
    "/s/{id};x/v1/models", "/s/ {id}/v1/models", "/s/\\..\\{id}/v1/models", "/trace", "/s/trace", "/s/%ff/v1/models",
    "/s/%F0%9F%98%80/v1/models", "/s/{{7*7}}/v1/models", "/s/" + "x" * 7000 + "/v1/models", "/s/" + "x" * 100_000,
    "/s/" + "../" * 1000 + "v1/models", "/s/{id}/v1/models/other", "/static/../s", "*", "http://127.0.0.1/s/x/trace",
]  # fmt: skip


def test_tricks_with_a_path_find_nothing():
    """Sent as they are, since clients tidy paths up."""

    async def go():
        async with server_of(Engine()) as server:
            s = server.open(SAMPLING)

            async def status(path: str) -> int:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                head = f"GET {path.replace('{id}', s.id)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                answer = await asyncio.wait_for(reader.read(), 30)
                writer.close()
                return int(answer.split()[1])

            assert await status("/s/{id}/v1/models") == 200
            for path in TRICKS:
                assert await status(path) in (400, 404), path

    within(30, go())


def test_the_server_listens_on_127_0_0_1_only():
    async def go():
        async with server_of(Engine()) as server:
            [address] = server.runner.addresses
            assert address[0] == "127.0.0.1" and address[1] == server.port > 0
            for elsewhere in ("127.0.0.2", "::1"):
                family = socket.AF_INET6 if ":" in elsewhere else socket.AF_INET
                with socket.socket(family) as probe, pytest.raises(OSError):
                    probe.settimeout(1)
                    probe.connect((elsewhere, server.port))

    within(10, go())


CODE = "{{ 7*7 }}{% for x in range(3) %}x{% endfor %}{{ raise_exception('boom') }}{# gone #}{{ messages }}"


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_a_message_that_is_template_code_is_text(name):
    """In a message, the system's words, a tool's description and its name; the ids hold it letter by letter."""
    engine = talkative(1)
    tool = {"name": "f" + CODE, "description": CODE, "parameters": {"type": "object", "title": CODE}}
    body = {
        "chat": {"messages": [{"role": "system", "content": CODE}, user(CODE)],
                 "tools": [{"type": "function", "function": tool}]},
        "responses": {"instructions": CODE, "input": CODE, "tools": [{"type": "function", **tool}]},
        "messages": {"system": CODE, "messages": [user(CODE)], "max_tokens": 9,
                     "tools": [{"name": tool["name"], "description": CODE, "input_schema": tool["parameters"]}]},
    }[name]  # fmt: skip

    async def go():
        async with server_of(engine) as server, aiohttp.ClientSession() as http:
            reply = await http.post(f"{server.url(server.open(SAMPLING))}/v1/{ROUTES[name]}", json=body)
            assert reply.status == 200, await reply.read()

    within(10, go())
    said = toy(KEEP).decode(engine.prompts[0])
    assert f"<system>{CODE}<eot>" in said and f"<user>{CODE}<eot>" in said
    assert said.replace("\\u0027", "'").count(CODE) == 5, said
