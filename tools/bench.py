"""Speed, as ratios within one run: ``python -m tools.bench [NAME …]`` runs the named comparisons, or all of them.

loopback   the server's own time per turn, the engine's excluded, as a session grows. The engine is a stub that replies
           at once; the client is a bare HTTP client that sends the whole history each turn, as the SDKs do. Reported is
           the median over sessions and, from turn 8 on, over the eight turns up to the one that is named; and the
           dearest turn of all, in which the template is asked about the whole history.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time

import aiohttp

from loopback import Call, Loopback, Sampling, Template
from tools import toy

TURNS, SESSIONS = 128, 9
SHOWN = (2, 16, 32, 64, 128)
"""Turns of the table. The first turn of a session has nothing to match, so ratios are to the second."""


def tool_loop(turn: int, reply: dict) -> list[dict]:
    """What an agent appends after a reply that called a tool."""
    return [
        reply,
        {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": f"result {turn}: " + "x" * 80},
    ]


def chat(turn: int, reply: dict) -> list[dict]:
    """What an agent appends after a reply that says something."""
    return [reply, {"role": "user", "content": f"question {turn}: " + "x" * 80}]


ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]
SHAPES = {
    "chat": (chat, "It is " + "y" * 60 + ".", []),
    "tool loop": (tool_loop, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ADD),
}


async def play(shape: str, parse) -> list[float]:
    """One session of ``TURNS`` turns; the server's own seconds for each."""
    tokenizer = toy.tokenizer()
    follow, said, tools = SHAPES[shape]
    sampled = [*tokenizer.encode(said), toy.END]

    async def generate(call: Call) -> None:
        call.token_ids += sampled
        call.logprobs += [-1.0] * len(sampled)
        call.versions += [0] * len(sampled)
        call.finish_reason = "stop"

    loopback = Loopback(Template(tokenizer, [toy.END]), parse, generate, "toy", 10**6)
    await loopback.start()
    session = loopback.open(Sampling(1.0, 1.0, 256, fixed=True))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}]
    async with aiohttp.ClientSession() as client:
        for turn in range(TURNS):
            body = {"model": "policy", "messages": messages, "tools": tools}
            async with client.post(loopback.url(session) + "/v1/chat/completions", json=body) as response:
                reply = json.loads(await response.read())["choices"][0]["message"]
            messages += follow(turn, reply)
    await loopback.stop()
    assert len(session.branches) == 1, "the history was not recognised"
    return list(loopback.costs)


def loopback() -> None:
    """Prints the table of the loopback's own time."""
    from rollout import Parser

    parse = Parser(toy.tokenizer(), "hermes", "")
    gc.collect()
    gc.freeze()  # as the rollout node does
    gc.set_threshold(20_000)
    print(f"own time per turn, ms (median of {SESSIONS} sessions); ratio to turn 2")
    print("history    " + "".join(f"{'turn ' + str(turn):>18}" for turn in SHOWN) + f"{'dearest':>10}")
    for shape in SHAPES:
        asyncio.run(play(shape, parse))  # warm-up
        runs = [asyncio.run(play(shape, parse)) for _ in range(SESSIONS)]
        spans = {turn: range(turn - 8 if turn > 8 else turn - 1, turn) for turn in SHOWN}
        cost = {turn: statistics.median(run[i] for run in runs for i in span) * 1e3 for turn, span in spans.items()}
        dearest = max(statistics.median(run[turn] for run in runs) for turn in range(1, TURNS)) * 1e3
        table = "".join(f"{cost[turn]:>10.2f} ({cost[turn] / cost[2]:.2f}x)" for turn in SHOWN)
        print(f"{shape:<11}{table}{dearest:>10.2f}")


BENCHES = {"loopback": loopback}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHES], help="comparisons to run; none: all")
    for name in parser.parse_args().names or BENCHES:
        began = time.monotonic()
        print(f"== {name}")
        BENCHES[name]()
        print(f"   {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
