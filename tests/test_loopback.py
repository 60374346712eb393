"""Laws and right values of loopback.py. Names such as t1, h2, w4 and m1 are entries of the project's list of faults.

The tokenizer is real (byte-level, greedy merges), small and hostile: ``ab``, ``}`` + newline and the halves of an
emoji are tokens, there are special and non-special added tokens, and one of them (``**``) overlaps itself. The engine
is a script: it emits given ids with a log-prob that no other token of the session has.
"""

import asyncio
import copy
import functools
import json
import random
import re
import socket
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import operator

import loopback
from agents import ContextOverflow
from loopback import (
    BREAK,
    Ask,
    Branch,
    Call,
    Loopback,
    Row,
    Sampling,
    Session,
    Template,
    WireError,
    pack_rows,
    unpack_rows,
)

# ------------------------------------------------------------------------------------ the toy model's surroundings

SPECIAL = ["<eos>", "<eot>", "<user>", "<assistant>", "<system>"]
ADDED = ["<think>", "</think>", "<tool>", "</tool>", "<tool_call>", "</tool_call>", "**"]
SMILE = "😀"

TOY = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- if tools -%}{{ '<system>' + (tools | tojson) + '<eot>\n' }}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{{ ('' if loop.previtem and loop.previtem.role == 'tool' else '<user>') + '<tool>' + m.content + '</tool>' }}"
    "{{ '' if loop.nextitem and loop.nextitem.role == 'tool' else '<eot>\n' }}"
    "{%- elif m.role == 'assistant' -%}"
    "{{ '<assistant>' }}"
    "{%- if m.reasoning_content and (KEEP or loop.index0 > ns.last) -%}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{%- endif -%}"
    "{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}{%- set a = c.function.arguments -%}"
    "{{ '<tool_call>' + c.function.name + (a if a is string else a | tojson) + '</tool_call>' }}{%- endfor -%}"
    "{{ '<eot>\n' }}"
    "{%- elif m.role in ('system', 'user') -%}{{ '<' + m.role + '>' + m.content + '<eot>\n' }}"
    "{%- else -%}{{ raise_exception('unknown role ' + m.role) }}{%- endif -%}"
    "{%- endfor -%}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
KEEP, DROP = TOY.replace("KEEP", "true"), TOY.replace("KEEP", "false")
"""Templates that keep old thinking, and that drop the thinking before the last user message."""
FORGETS = DROP.replace("'<tool>' + m.content", "'<tool>' + ('' if messages | length > 4 else m.content)")
"""Also empties tool results once the conversation is long."""
BARE = "{%- for m in messages -%}{{ '<' + m.role + '>' + m.content }}{%- endfor -%}{{ '<assistant>' if add_generation_prompt }}"  # fmt: skip  # noqa: E501
"""No end of turn: the model stops by opening the user's turn."""
LINES = BARE.replace("m.content", "m.content + '\n'")
"""Turns end with a newline and no token."""


@functools.cache
def toy(chat_template: str) -> PreTrainedTokenizerFast:
    """The tokenizer under one chat template."""
    smile = [("ð", "Ł"), ("ĺ", "Ģ")]
    merges = [("a", "b"), ("}", "Ċ"), *smile]
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(vocab)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", chat_template=chat_template)


def ids(names: str) -> list[int]:
    """Ids by token name, separated by spaces; NL is the newline."""
    found = toy(KEEP).convert_tokens_to_ids([name.replace("NL", "Ċ") for name in names.split()])
    assert None not in found, names
    return found


def spelled(text: str) -> list[int]:
    """What the model samples to say ``text`` and stop."""
    return [*toy(KEEP).encode(text, add_special_tokens=False), *ids("<eot>")]


EOT, EOS = ids("<eot>")[0], ids("<eos>")[0]
CONTROLS = frozenset(ids(" ".join(SPECIAL + ADDED)))


@functools.cache
def template(chat_template: str = KEEP, eos: tuple[int, ...] = (EOT, EOS)) -> Template:
    return Template(toy(chat_template), eos)


class Digits:
    """The tokenizer of the worked example: digit d is id d, newline is 10; a reply is closed by "9\n"."""

    def get_added_vocab(self):
        return {}

    def encode(self, text, add_special_tokens):
        return [10 if char == "\n" else int(char) if char.isdigit() else 99 for char in text]

    def decode(self, ids, **_):
        return "".join("\n" if number == 10 else str(number) for number in ids)

    def apply_chat_template(self, messages, **_):
        return "".join(m["content"] + ("9\n" if m["role"] == "assistant" else "") for m in messages)


def parse(text: str, tools: list[dict] | None) -> dict:
    """A stand-in for vLLM's parsers: ``<think>…</think>``, then ``<tool_call>{json}</tool_call>`` anywhere."""
    message = {"role": "assistant", "content": text}
    if thought := re.match(r"<think>(.*?)</think>", text, re.S):
        message |= {"reasoning_content": thought[1], "content": text[thought.end() :]}
    found = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S) if tools else []
    if found:
        calls = [json.loads(item) for item in found]
        message["content"] = re.sub(r"<tool_call>.*?</tool_call>", "", message["content"], flags=re.S)
        message["tool_calls"] = [
            {"id": f"call_{n}", "type": "function", "function": {**c, "arguments": json.dumps(c["arguments"])}}
            for n, c in enumerate(calls)
        ]
    return message


class Engine:
    """A scripted ``generate``. A step is the ids to sample, or a coroutine function that does what it likes."""

    def __init__(self, *script, ends=(EOT, EOS)):
        self.script, self.ends, self.count, self.calls = list(script), ends, 0, []

    async def __call__(self, call: Call) -> None:
        self.calls.append(call)
        step = self.script.pop(0)
        if callable(step):
            await step(call)
        else:
            self.say(call, step)

    def say(self, call: Call, sampled: list[int], version: int = 3) -> None:
        sampled = sampled[: call.max_tokens]
        call.token_ids += sampled
        for _ in sampled:
            self.count += 1
            call.logprobs.append(-self.count / 1024)
        call.versions += [version] * len(sampled)
        call.engines.append(0)
        call.finish_reason = "stop" if sampled and sampled[-1] in self.ends else "length"

    @property
    def prompts(self) -> list[list[int]]:
        return [call.prompt_ids for call in self.calls]


def session(engine, chat=None, parse=parse, fixed=True, max_tokens=200, context=4096) -> Session:
    return Session(chat or template(), parse, engine, Sampling(1.0, 1.0, max_tokens, fixed), context)


def user(content):
    return {"role": "user", "content": content}


def tool(content):
    return {"role": "tool", "tool_call_id": "call_0", "content": content}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def play(s: Session, *turns: list, tools=None) -> list[loopback.Turn]:
    """One conversation: each turn's new messages are appended to all that was said before."""

    async def go():
        history, out = [], []
        for new in turns:
            history += new
            out.append(await s.turn(history, tools, "test"))
            history.append(out[-1].message)
        return out

    return run(go())


def exact(s: Session) -> list[Row]:
    """The rows, once every law of token identity has been checked on them."""
    rows, seen = s.rows("r", 0, "t"), Counter()
    for row in rows:
        bare = ~row.sampled
        assert np.isnan(row.logprobs[bare]).all() and not np.isnan(row.logprobs[row.sampled]).any()
        assert (row.versions[bare] == -1).all() and (row.call[bare] == -1).all()
        assert len(row.experts) == len(row.experts_known) == len(row)
        for index in set(row.call[row.sampled].tolist()):
            call, where = s.calls[index], np.flatnonzero(row.call == index)
            start = int(where[0])
            assert where.tolist() == list(range(start, start + len(call.token_ids)))
            # What stands before a sampled token in its row is exactly what the engine saw.
            assert row.token_ids[:start].tolist() == call.prompt_ids
            assert row.token_ids[where].tolist() == call.token_ids
            assert row.logprobs[where].tolist() == call.logprobs and row.versions[where].tolist() == call.versions
            seen[index] += 1
    assert seen == {call.index: 1 for call in s.calls if call.committed and call.token_ids}
    assert s.sampled == sum(int(row.sampled.sum()) for row in rows) + s.uncommitted
    return rows


def trained(row: Row) -> list[int]:
    return row.token_ids[row.sampled].tolist()


# ------------------------------------------------------------------------------------------------ worked example


def test_the_worked_example_with_its_literal_ids():
    engine = Engine([4, 5], [8, 9], [5, 9], ends=(9,))
    s = session(engine, Template(Digits(), [9]))
    body = [user("123"), {"role": "assistant", "content": "45"}, user("67")]

    async def go():
        first = await s.turn(body[:1], None, "test")
        assert (first.message["content"], first.finish_reason) == ("45", "length")
        await s.turn(body, None, "test")
        await s.turn(body, None, "test")

    run(go())
    first, second = exact(s)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 9, 10, 6, 7, 8, 9]
    assert np.flatnonzero(first.sampled).tolist() == [3, 4, 9, 10]
    assert second.token_ids.tolist() == [1, 2, 3, 4, 5, 9, 10, 6, 7, 5, 9]
    assert np.flatnonzero(second.sampled).tolist() == [9, 10]
    assert (s.meters["turns_continue"], s.meters["turns_resample"]) == (1, 1)
    assert s.meters["closing_tokens"] == 4, "two for each turn after the length stop"


# ------------------------------------------------------------------------------------------------ T: token identity


def test_t1_sampled_a_b_is_never_merged_to_ab():
    s = session(engine := Engine(ids("a b <eot>"), ids("b <eot>")))
    first, _ = play(s, [user("ab")], [user("a")])
    assert first.message["content"] == "ab"
    assert engine.prompts[0] == ids("<user> ab <eot> NL <assistant>")
    assert engine.prompts[1] == ids("<user> ab <eot> NL <assistant> a b <eot> NL <user> a <eot> NL <assistant>")
    assert len(exact(s)) == 1


def test_t2_newline_after_the_end_of_turn_is_there_once_and_untrained():
    s = session(engine := Engine(ids("a <eot>"), ids("b <eot>")))
    play(s, [user("a")], [user("b")])
    [row] = exact(s)
    assert engine.prompts[1] == ids("<user> a <eot> NL <assistant> a <eot> NL <user> b <eot> NL <assistant>")
    assert trained(row) == ids("a <eot> b <eot>")
    assert s.meters["closing_tokens"] == 1


def test_t2_a_reply_does_not_merge_with_the_newline_that_closes_it():
    engine = Engine(ids("}"), ids("b <eos>"), ids("} <eos>"), ids("a <eos>"))
    s = session(engine, template(LINES))
    play(s, [user("a")], [user("b")])
    assert engine.prompts[1] == ids("<user> a NL <assistant> } NL <user> b NL <assistant>")
    assert ids("}NL")[0] in toy(LINES).encode("}\n"), "the tokenizer alone would have merged them"
    play(s, [user("b")], [user("b")])
    assert engine.prompts[3] == ids("<user> b NL <assistant> } <eos> NL <user> b NL <assistant>")
    exact(s)


def test_t3_two_tool_results_are_one_user_turn_with_both():
    s = session(engine := Engine(ids("a <eot>"), ids("b <eot>")))
    play(s, [user("a")], [tool("a"), tool("b")])
    answer = "NL <user> <tool> a </tool> <tool> b </tool> <eot> NL <assistant>"
    assert engine.prompts[1] == ids(f"<user> a <eot> NL <assistant> a <eot> {answer}")
    assert len(exact(s)) == 1


def test_t4_a_stop_token_that_opens_the_next_turn_is_there_once_and_trained_once():
    opening = ids("<user>")[0]
    engine = Engine(ids("a <user>"), ids("b <user>"), ends=(opening,))
    s = session(engine, template(BARE, (opening,)))
    play(s, [user("a")], [user("b")])
    [row] = exact(s)
    assert row.token_ids.tolist() == ids("<user> a <assistant> a <user> b <assistant> b <user>")
    assert np.flatnonzero(row.sampled).tolist() == [3, 4, 7, 8]
    assert s.meters["closing_tokens"] == 0


def test_t4_after_a_length_stop_the_opening_is_context():
    opening = ids("<user>")[0]
    s = session(Engine(ids("a"), ids("b"), ends=(opening,)), template(BARE, (opening,)))
    play(s, [user("a")], [user("b")])
    [row] = exact(s)
    assert row.token_ids.tolist() == ids("<user> a <assistant> a <user> b <assistant> b")
    assert trained(row) == ids("a b")


def test_t5_a_parser_that_swallows_text_changes_no_id():
    s = session(Engine(ids("a b a <eot>"), ids("b <eot>")), parse=lambda *_: {"role": "assistant", "content": ""})
    play(s, [user("a")], [user("b")])
    [row] = exact(s)
    assert trained(row) == ids("a b a <eot> b <eot>")


def test_t6_a_template_that_drops_old_thinking_makes_two_rows_both_trained():
    script = ids("<think> a b </think> b <eot>"), ids("<think> b </think> a <eot>")
    s = session(engine := Engine(*script), template(DROP))
    first, _ = play(s, [user("a")], [user("b")])
    assert first.message == {"role": "assistant", "content": "b", "reasoning_content": "ab"}
    one, two = exact(s)
    assert [trained(one), trained(two)] == list(script)
    assert engine.prompts[1] == ids("<user> a <eot> NL <assistant> b <eot> NL <user> b <eot> NL <assistant>")
    assert two.token_ids.tolist() == engine.prompts[1] + script[1]
    assert s.meters["turns_template"] == 1


def test_t6_thinking_that_the_template_keeps_until_the_next_user_stays_in_one_row():
    s = session(engine := Engine(ids("<think> a b </think> b <eot>"), ids("a <eot>")), template(DROP))
    play(s, [user("a")], [tool("b")])
    [row] = exact(s)
    assert engine.prompts[1][5:11] == ids("<think> a b </think> b <eot>")
    assert trained(row) == ids("<think> a b </think> b <eot> a <eot>")


def test_t6_a_full_render_shows_replies_as_they_were_returned_not_as_they_were_echoed():
    s = session(engine := Engine(*[ids("<think> a </think> b <eot>")] * 3), template(FORGETS))

    async def go():
        history = [user("a")]
        for _ in range(3):
            reply = (await s.turn(history, None, "test")).message
            history += [{"role": "assistant", "content": reply["content"]}, tool("b")]

    run(go())
    assert len(exact(s)) == 2 and s.meters["turns_template"] == 1
    again = "<assistant> <think> a </think> b <eot> NL <user> <tool> </tool> <eot> NL"
    assert engine.prompts[2] == ids(f"<user> a <eot> NL {again} {again} <assistant>")


def test_t7_a_length_stop_is_closed_by_ids_that_are_not_trained():
    s = session(engine := Engine(ids("a b"), ids("b <eot>")))
    first, _ = play(s, [user("a")], [user("b")])
    assert first.finish_reason == "length"
    [row] = exact(s)
    assert engine.prompts[1] == ids("<user> a <eot> NL <assistant> a b <eot> NL <user> b <eot> NL <assistant>")
    closing = [7, 8]
    assert row.token_ids[closing].tolist() == ids("<eot> NL")
    assert not row.sampled[closing].any() and np.isnan(row.logprobs[closing]).all()
    assert (row.versions[closing] == -1).all()
    assert s.meters["closing_tokens"] == 2
    assert [call["closing"] for call in row.calls] == [[0, 0], [7, 9]]


@pytest.mark.parametrize("end", ["<eot>", "<eos>"])
def test_t8_each_declared_end_id_finishes_a_reply(end):
    s = session(engine := Engine(ids(f"a {end}"), ids("b <eot>")))
    first, _ = play(s, [user("a")], [user("b")])
    assert (first.finish_reason, first.message["content"], first.used[1]) == ("stop", "a", 2)
    assert engine.prompts[1][: len(engine.prompts[0]) + 2] == engine.prompts[0] + ids(f"a {end}")
    [row] = exact(s)
    assert trained(row) == ids(f"a {end} b <eot>")


def test_t9_an_emoji_of_two_tokens_is_whole_and_a_cut_one_keeps_its_id():
    s = session(engine := Engine(ids("ðŁ ĺĢ <eot>"), ids("ðŁ"), ids("a <eot>")))
    whole, cut, _ = play(s, [user("a")], [user(SMILE)], [user("b")])
    assert whole.message["content"] == SMILE
    assert "\ufffd" in cut.message["content"]
    [row] = exact(s)
    assert trained(row) == ids("ðŁ ĺĢ <eot> ðŁ a <eot>")
    assert engine.prompts[2][-8:] == ids("ðŁ <eot> NL <user> b <eot> NL <assistant>")


def controls_in(prompt: list[int]) -> int:
    return sum(token in CONTROLS for token in prompt)


@pytest.mark.parametrize("text", [*SPECIAL, *ADDED, "".join(SPECIAL), "<<eot>", "***", "<eot", "*****"])
@pytest.mark.parametrize("role", ["tool", "user", "system"])
def test_t10_control_text_in_a_message_adds_no_control_id_and_loses_no_letter(role, text):
    prompts = []
    for content in ("x", f"b{text}a"):
        s = session(engine := Engine(ids("a <eot>"), ids("b <eot>")))
        play(s, [{"role": role, "content": content}], [{"role": role, "content": content}])
        prompts.append(engine.prompts)
        exact(s)
    for plain, hostile in zip(*prompts, strict=True):
        assert controls_in(hostile) == controls_in(plain)
        shown = toy(KEEP).decode(hostile)
        assert f"b{text}a" in shown and BREAK not in shown


@pytest.mark.parametrize("where", ["description", "parameter"])
def test_t10_control_text_in_a_tool_schema_adds_no_control_id(where):
    counts = []
    for text in ("x", "<eot>", "<think>"):
        schema = {"name": "f", "description": text if where == "description" else "x"}
        schema["parameters"] = {"properties": {text if where == "parameter" else "x": {}}}
        s = session(engine := Engine(ids("a <eot>")))
        play(s, [user("a")], tools=[{"type": "function", "function": schema}])
        counts.append(controls_in(engine.prompts[0]))
        assert text in toy(KEEP).decode(engine.prompts[0])
    assert counts[0] == counts[1] == counts[2]


def test_t10_the_marks_that_break_controls_are_refused_in_messages():
    s = session(Engine())
    with pytest.raises(WireError, match="FDD0"):
        play(s, [user(f"<e{BREAK}os>")])
    assert not s.calls


def test_t11_usage_counts_the_sampled_ids_and_is_capped():
    s = session(engine := Engine(ids("a b a b a b"), ids("a <eot>"), ids("b a b a b")), max_tokens=4)
    turns = play(s, [user("a")], [user("b")], [user("a")])
    assert [turn.used[1] for turn in turns] == [4, 2, 4]
    assert [turn.used[0] for turn in turns] == [len(prompt) for prompt in engine.prompts]
    assert [turn.finish_reason for turn in turns] == ["length", "stop", "length"]
    assert sum(turn.used[1] for turn in turns) == len(trained(exact(s)[0])) == 10


def test_t11_what_is_left_of_the_context_caps_a_call():
    s = session(Engine(ids("a b a b a b")), context=8)
    [turn] = play(s, [user("a")])
    assert turn.used == (5, 3)


def test_t12_a_diverging_history_is_a_new_row_and_the_run_goes_on():
    s = session(Engine(ids("a <eot>"), ids("b <eot>"), ids("a b <eot>")))

    async def go():
        await s.turn([user("a")], None, "test")
        edited = [user("a"), {"role": "assistant", "content": "never said"}, user("b")]
        reply = await s.turn(edited, None, "test")
        await s.turn([*edited, reply.message, user("a")], None, "test")

    run(go())
    first, second = exact(s)
    assert trained(first) == ids("a <eot>")
    assert trained(second) == ids("b <eot> a b <eot>")
    assert loopback.identity_meters([s])["identity/echo_mismatch"] == 1
    assert loopback.identity_meters([s])["identity/segments_per_rollout"] == 2


@pytest.mark.parametrize("order", [("a b <eot>", "ab <eot>"), ("ab <eot>", "a b <eot>")])
def test_t13_equal_messages_with_different_ids_are_two_rows_and_a_turn_continues_one(order):
    s = session(engine := Engine(*map(ids, order), ids("b <eot>")))

    async def go():
        one, two = await s.turn([user("a")], None, "test"), await s.turn([user("a")], None, "test")
        assert one.message == two.message
        await s.turn([user("a"), one.message, user("b")], None, "test")

    run(go())
    rows = exact(s)
    assert sorted(map(trained, rows), key=len)[0] in map(ids, order)
    assert sum(len(trained(row)) for row in rows) == 7 and len(rows) == 2
    begun = [engine.prompts[2][5 : 5 + len(ids(name))] == ids(name) for name in order]
    assert sum(begun) == 1


def test_t14_overflow_raises_before_sampling_and_leaves_no_trace():
    s = session(engine := Engine(ids("a <eot>"), ids("b <eot>")), context=20)

    async def go():
        first = await s.turn([user("a")], None, "test")
        history = [user("a"), first.message]
        with pytest.raises(ContextOverflow, match="20"):
            await s.turn([*history, user("a" * 20)], None, "test")
        await s.turn([*history, user("b")], None, "test")
        with pytest.raises(ContextOverflow):
            await s.turn([*history, user("a" * 20), user("b")], None, "test")

    run(go())
    assert len(engine.calls) == len(s.calls) == 2
    assert engine.prompts[1] == ids("<user> a <eot> NL <assistant> a <eot> NL <user> b <eot> NL <assistant>")
    assert len(exact(s)) == 1


def test_t14_a_prompt_that_leaves_one_token_is_served_and_one_that_leaves_none_is_not():
    for content, fits in (("b" * 5, True), ("b" * 6, False)):
        s = session(Engine(ids("a")), context=10)
        if fits:
            assert play(s, [user(content)])[0].used[1] == 1
        else:
            with pytest.raises(ContextOverflow):
                play(s, [user(content)])


# ------------------------------------------------------------------------------------------ H: histories, matching


def test_h1_interleaved_parent_and_sub_agent_are_two_rows():
    s = session(Engine(*(ids(f"{names} <eot>") for names in ("a", "b", "a a", "b b"))))

    async def go():
        told = {name: [{"role": "system", "content": name}, user("}")] for name in "ab"}
        for _ in range(2):
            for history in told.values():
                history.append((await s.turn(history, None, "test")).message)
                history.append(user("}"))

    run(go())
    assert [trained(row) for row in exact(s)] == [ids("a <eot> a a <eot>"), ids("b <eot> b b <eot>")]


def test_h2_compaction_is_two_rows_and_the_summary_is_trained_once():
    summary = ids("a b } <eot>")
    s = session(Engine(ids("a <eot>"), ids("b <eot>"), summary, ids("} <eot>")))

    async def go():
        history = [user("a")]
        for new in (user("b"), user("}"), None):
            history.append((await s.turn(history, None, "test")).message)
            history += [new] if new else []
        await s.turn([user("a"), user(history[-1]["content"])], None, "test")

    run(go())
    before, after = exact(s)
    assert trained(before) == ids("a <eot> b <eot>") + summary
    assert trained(after) == ids("} <eot>")
    assert after.token_ids.tolist() == ids("<user> a <eot> NL <user> ab } <eot> NL <assistant> } <eot>")


ASK = json.dumps({"name": "f", "arguments": {"x": 1, "y": [2]}})
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}]
PLAIN = {"role": "assistant", "content": "b"}
CALL = {"id": "z", "type": "function", "function": {"name": "f", "arguments": '{"y":[2],  "x":1}'}}
ASKED = {"role": "assistant", "tool_calls": [CALL]}
PARTS = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]


def called(**function) -> list[dict]:
    return [{**CALL, "function": {**CALL["function"], **function}}]


def two_turns(first: list, second: list, reply: list[int], tools=None, tools2=None) -> tuple[Session, Engine]:
    """Turn 1 with ``first``; turn 2 with exactly ``second``."""
    s = session(engine := Engine(reply, ids("a <eot>")))

    async def go():
        await s.turn(first, tools, "test")
        await s.turn(second, tools if tools2 is None else tools2, "test")

    run(go())
    exact(s)
    return s, engine


@pytest.mark.parametrize(
    "echo",
    [
        ASKED,
        {**ASKED, "content": None},
        {**ASKED, "content": ""},
        {**ASKED, "content": []},
        {**ASKED, "content": [{"type": "text", "text": ""}]},
        {**ASKED, "tool_calls": called(arguments={"x": 1, "y": [2]})},
        {**ASKED, "refusal": None, "annotations": [], "function_call": None, "cache_control": {"type": "ephemeral"}},
    ],
)
def test_an_echoed_tool_call_matches_by_name_and_parsed_arguments(echo):
    """Content null, "", [] and absent are one; ids, key order, spaces and unknown keys do not count."""
    s, _ = two_turns([user("a")], [user("a"), echo, tool("b")], spelled(f"<tool_call>{ASK}</tool_call>"), TOOLS)
    assert (len(s.branches), s.meters["turns_continue"]) == (1, 1)


@pytest.mark.parametrize(
    "echo",
    [
        {**PLAIN, "content": PARTS},
        {**PLAIN, "content": [{"type": "text", "text": ""}, *PARTS]},
        {**PLAIN, "tool_calls": []},
        {**PLAIN, "tool_calls": None, "name": "x", "unknown": {"deep": 1}},
        {**PLAIN, "reasoning_content": "ab"},
    ],
)
def test_an_echoed_reply_matches_with_or_without_its_thinking(echo):
    thinking = ids("<think> a b </think> b <eot>")
    s, engine = two_turns([user("a")], [user("a"), echo, user("b")], thinking)
    assert len(s.branches) == 1
    assert engine.prompts[1] == [*engine.prompts[0], *thinking, *ids("NL <user> b <eot> NL <assistant>")]


@pytest.mark.parametrize(
    "first, again",
    [
        (user("ab"), user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
        (user("ab"), {**user("ab"), "cache_control": {"type": "ephemeral"}, "name": ""}),
        ({**user("ab"), "name": "x"}, {**user("ab"), "name": "x", "unknown": 1}),
        ({"role": "system", "content": "a"}, {"role": "developer", "content": "a"}),
        ({"role": "system"}, {"role": "system", "content": []}),
    ],
)
def test_w5_w6_w14_one_message_in_two_spellings_is_one_message(first, again):
    s, engine = two_turns([first], [again, PLAIN, user("b")], ids("b <eot>"))
    assert len(s.branches) == 1
    other = session(Engine(ids("b <eot>")))
    play(other, [again])
    assert other.calls[0].prompt_ids == engine.prompts[0]


def test_w14_a_moved_cache_control_mark_on_a_tool_does_not_fork():
    marked = [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]
    for before, after in ((TOOLS, marked), (marked, TOOLS)):
        s, engine = two_turns([user("a")], [user("a"), PLAIN, user("b")], ids("b <eot>"), before, after)
        assert len(s.branches) == 1
        assert "cache_control" not in toy(KEEP).decode(engine.prompts[1])


@pytest.mark.parametrize(
    "echo",
    [
        {**ASKED, "content": "b"},
        {**ASKED, "tool_calls": called(name="g")},
        {**ASKED, "tool_calls": called(arguments='{"x": 1}')},
        {**ASKED, "tool_calls": called(arguments="{")},
        {**ASKED, "tool_calls": [CALL, CALL]},
        {"role": "assistant", "content": ""},
        {**ASKED, "role": "user"},
    ],
)
def test_t12_an_edited_tool_call_does_not_match(echo):
    s, _ = two_turns([user("a")], [user("a"), echo, tool("b")], spelled(f"<tool_call>{ASK}</tool_call>"), TOOLS)
    assert len(s.branches) == 2
    assert s.meters["turns_edit"] == (echo["role"] == "assistant")


@pytest.mark.parametrize(
    "second, tools2",
    [
        ([user("a"), {**PLAIN, "content": "b "}, user("b")], None),
        ([user("b"), PLAIN, user("b")], None),
        ([{"role": "system", "content": "a"}, PLAIN, user("b")], None),
        ([PLAIN, user("b")], None),
        ([user("a"), user("a"), PLAIN, user("b")], None),
        ([{**user("a"), "name": "x"}, PLAIN, user("b")], None),
        ([user("a"), PLAIN, user("b")], TOOLS),
    ],
)
def test_t12_an_edit_of_text_order_role_or_tools_does_not_match(second, tools2):
    s, engine = two_turns([user("a")], second, ids("b <eot>"), [], tools2)
    assert len(s.branches) == 2
    assert engine.prompts[1] == template().encode(template().render(s.branches[1].messages[:-1], tools2, prompt=True))


def test_a_turn_continues_the_longest_of_several_matches():
    s = session(engine := Engine(*[ids("a <eot>")] * 4))
    play(s, [user("a")], [user("b")], [user("}")])
    told = s.branches[0].messages

    async def go():
        return await s.turn([*told, user("b")], None, "test")

    run(go())
    assert len(exact(s)) == 1
    assert engine.prompts[3][: len(s.branches[0].ids) - 9] == s.branches[0].ids[: len(s.branches[0].ids) - 9]


def test_each_turn_is_counted_by_why_it_is_where_it_is():
    """First of the session, next of a branch, the same or a shorter beginning of one, another conversation, an edit."""
    s = session(Engine(*[ids("a <eot>")] * 7))
    causes = "first", "continue", "resample", "resample", "new", "continue", "edit"

    async def go():
        said = [user("a"), {"role": "assistant", "content": "a"}, user("b"), {"role": "assistant", "content": "a"}]
        sub = [{**user("a"), "name": "x"}]
        edited = [user("a"), {"role": "assistant", "content": "b"}, user("b")]
        for index, body in enumerate((said[:1], said[:3], said[:3], said[:1], sub, said, edited)):
            await s.turn(body, None, "test")
            assert s.meters == dict(Counter(f"turns_{cause}" for cause in causes[: index + 1])) | {
                name: s.meters[name] for name in ("closing_tokens", "overridden")
            }, index

    run(go())
    assert [branch.cause for branch in s.branches] == ["first", "resample", "resample", "new", "edit"]
    assert len(exact(s)) == 5
    # A history that ends in a committed reply is continued by another turn of the assistant.
    assert s.calls[5].prompt_ids == [*s.calls[1].prompt_ids, *ids("a <eot> NL <assistant>")]


@pytest.mark.parametrize("where", ["message", "list"])
def test_a_caller_may_edit_its_own_messages_in_place(where):
    """An ``Env`` keeps one list, compacts it in place, or writes into its messages."""
    s = session(engine := Engine(ids("a <eot>"), ids("b <eot>")))

    async def go():
        history = [user("a")]
        await s.turn(history, None, "test")
        if where == "list":
            history[:] = [user("b")]
        else:
            history[0]["content"] = "b"
        await s.turn(history, None, "test")

    run(go())
    assert engine.prompts[1] == ids("<user> b <eot> NL <assistant>")


def test_two_concurrent_calls_over_one_prefix_are_two_rows():
    """Also when the first to start is the last to end: each sampled token is in exactly one row."""
    gates = [asyncio.Event(), asyncio.Event()]
    engine = Engine(ids("a <eot>"))

    async def late(call, index):
        await gates[index].wait()
        engine.say(call, ids(["a b <eot>", "b a <eot>"][index]))

    engine.script += [functools.partial(late, index=0), functools.partial(late, index=1), ids("} <eot>")]
    s = session(engine)

    async def go():
        first = await s.turn([user("a")], None, "test")
        body = [user("a"), first.message, user("b")]
        slow, fast = (asyncio.create_task(s.turn(body, None, "test")) for _ in gates)
        await asyncio.sleep(0)
        gates[1].set()
        reply = (await fast).message
        gates[0].set()
        await slow
        await s.turn([*body, reply, user("}")], None, "test")

    run(go())
    one, two = exact(s)
    assert trained(one) == ids("a <eot> b a <eot> } <eot>")
    assert trained(two) == ids("a b <eot>")
    assert two.token_ids[:7].tolist() == one.token_ids[:7].tolist()
    assert (s.meters["turns_continue"], s.meters["turns_resample"]) == (2, 1)


def test_two_concurrent_first_calls_are_two_rows():
    engine = Engine()

    async def slow(call):
        await asyncio.sleep(0.01)
        engine.say(call, ids("a <eot>"))

    engine.script = [slow, ids("b <eot>")]
    s = session(engine)

    async def go():
        await asyncio.gather(s.turn([user("a")], None, "test"), s.turn([user("a")], None, "test"))

    run(go())
    assert [trained(row) for row in exact(s)] == [ids("b <eot>"), ids("a <eot>")]


@pytest.mark.parametrize("seed", range(12))
def test_random_interleavings_train_each_committed_token_once(seed):
    """Turns, resamples, edits, engine faults and vanished clients, four at a time, under both templates."""
    rng, engine = random.Random(seed), Engine()
    words = ids("a b ab } NL }NL ðŁ <think> </think> <tool> **")

    async def generate(call):
        await asyncio.sleep(rng.random() / 1000)
        sampled = rng.choices(words, k=rng.randint(0, 5)) + ids(rng.choice(["<eot>", "<eos>", ""]))
        engine.say(call, sampled, version=rng.randint(0, 3))
        await asyncio.sleep(rng.random() / 1000)
        if rng.random() < 0.25:
            raise RuntimeError("engine died")

    s = session(generate, template(rng.choice([KEEP, DROP])))
    told = [[]]
    outcomes = Counter()

    async def act():
        history = copy.deepcopy(rng.choice(told))
        if history and rng.random() < 0.2:
            rng.choice(history)["content"] = rng.choice(["a", "b", "never said"])
        if not history or rng.random() < 0.9:
            history += [rng.choice([user, tool])(rng.choice(["a", "b", "<eot>"])) for _ in range(rng.randint(1, 2))]
        else:
            history.pop()
        if not history:
            return
        try:
            timeout = 0.0008 if rng.random() < 0.2 else None
            turn = await asyncio.wait_for(asyncio.create_task(s.turn(history, None, "test")), timeout)
            told.append([*history, turn.message])
            outcomes["turns"] += 1
        except (RuntimeError, TimeoutError) as error:
            outcomes[type(error).__name__] += 1

    async def go():
        for _ in range(15):
            await asyncio.gather(*(act() for _ in range(4)))

    run(go())
    exact(s)
    assert outcomes["turns"] > 10 and outcomes["RuntimeError"] and outcomes["TimeoutError"] and s.uncommitted
    assert sum(s.meters[f"turns_{c}"] for c in ("first", "new", "continue", "resample", "template", "edit")) == sum(
        call.committed for call in s.calls
    )


# ----------------------------------------------------------------------------------------- faults inside a turn


def test_an_engine_fault_keeps_its_tokens_out_of_every_row():
    engine = Engine(ids("a <eot>"))

    async def die(call):
        engine.say(call, ids("b b"))
        raise RuntimeError("engine died")

    engine.script += [die, ids("a <eot>")]
    s = session(engine)
    with pytest.raises(RuntimeError):
        play(s, [user("a")], [user("b")])
    assert isinstance(s.failure, RuntimeError)
    assert (s.sampled, s.uncommitted) == (4, 2)
    assert [trained(row) for row in exact(s)] == [ids("a <eot>")]


@pytest.mark.parametrize("name", ["logprobs", "versions", "token_ids"])
def test_g11_lists_of_different_length_are_an_error(name):
    call = Call(0, "test", [], 8, 1.0, 1.0, "", token_ids=[1, 2], logprobs=[-0.5, -0.5], versions=[0, 0])
    vars(call)[name].pop()
    branch = Branch("[]")
    with pytest.raises(ValueError, match="engine returned"):
        call.check([])
    assert not any(branch.arrays.values())


def spoil_logprobs(call):
    call.logprobs.pop()


def spoil_routes(call):
    call.routes.append(np.zeros((500, 2, 2), np.uint8))


@pytest.mark.parametrize("spoil", [spoil_logprobs, spoil_routes])
@pytest.mark.parametrize("turns", [0, 1])
def test_g11_a_turn_that_cannot_be_committed_leaves_the_session_as_it_was(spoil, turns):
    """A retry after the error must not stand on half of the failed turn, and the rollout has an engine fault."""
    engine = Engine(*[ids("a <eot>")] * turns)

    async def spoiled(call):
        engine.say(call, ids("b b <eot>"))
        spoil(call)

    engine.script += [spoiled, ids("b <eot>")]
    s = session(engine)

    async def go():
        history = [user("a")]
        for _ in range(turns):
            history += [(await s.turn(history, None, "test")).message, user("b")]
        with pytest.raises((ValueError, RuntimeError)):
            await s.turn(history, None, "test")
        await s.turn(history, None, "test")

    run(go())
    [row] = exact(s)
    assert trained(row) == ids("a <eot>") * turns + ids("b <eot>")
    assert s.uncommitted == 3
    assert s.failure is not None


# --------------------------------------------------------------------------------------------- M: routes of experts


def routes(count: int, salt: int = 0) -> np.ndarray:
    """Routes of positions 0..count-1 by 2 layers and 2 experts; ``salt`` makes them another engine run's."""
    first = (np.arange(count)[:, None] + 3 * np.arange(2) + salt) % 8
    return np.stack([first, (first + 1) % 8], -1).astype(np.uint8)


class MoeEngine(Engine):
    """Its steps are (ids, salt, …): each salt is one engine request over prompt + tokens so far."""

    async def __call__(self, call):
        sampled, *salts = self.script[0]
        self.script[0] = sampled
        await super().__call__(call)
        call.routes += [routes(len(call.prompt_ids) + len(sampled) - 1, salt) for salt in salts]


def digits(*script, turns=2) -> tuple[Session, list[Row]]:
    """The worked example's dialogue with routes."""
    s = session(MoeEngine(*script, ends=(9,)), Template(Digits(), [9]))
    body = [user("123"), {"role": "assistant", "content": "45"}, user("67")]

    async def go():
        for turn in range(turns):
            await s.turn(body[:1] if turn == 0 else body, None, "test")

    run(go())
    return s, exact(s)


def test_m1_one_turn_of_five_tokens_has_four_routes():
    _, [row] = digits(([4, 5], 0), turns=1)
    assert row.experts.shape == (5, 2, 2) and row.experts.dtype == np.uint8
    assert row.experts_known.tolist() == [True] * 4 + [False]
    assert (row.experts[:4] == routes(4)).all()


def test_m1_m2_the_second_turn_fills_position_four_and_the_last_stays_unknown():
    s, [row] = digits(([4, 5], 0), ([8, 9], 0))
    assert len(row) == 11 and row.experts_known.tolist() == [True] * 10 + [False]
    assert (row.experts[:10] == routes(10)).all()
    assert s.meters["route_conflicts"] == 0


def test_m1_first_writer_wins_and_conflicts_are_counted():
    s, [row] = digits(([4, 5], 0), ([8, 9], 1))
    assert (row.experts[:4] == routes(4)).all()
    assert (row.experts[4:10] == routes(10, 1)[4:]).all(), "closing ids of t7 carry the route of the call that saw them"
    assert s.meters["route_conflicts"] == 4
    assert loopback.identity_meters([s, s])["identity/route_conflicts"] == 8


def test_a_pause_that_prefills_again_conflicts_only_where_it_differs():
    """Two requests of one call (m4): the second covers the same positions once more."""
    s, [row] = digits(([4, 5], 0, 2), turns=1)
    assert s.meters["route_conflicts"] == 4 and (row.experts[:4] == routes(4)).all()
    s, _ = digits(([4, 5], 0, 0), turns=1)
    assert s.meters["route_conflicts"] == 0


def test_the_same_experts_in_another_order_are_no_conflict():
    branch = Branch("[]")
    branch.add([1, 2, 3])
    assert branch.add_routes(routes(3)) == 0
    assert branch.add_routes(routes(3)[..., ::-1]) == 0
    assert branch.add_routes(routes(3, 1)) == 3
    branch.add([4])
    assert branch.add_routes(routes(4, 1)) == 0, "each position counts once, however often it is prefilled again"


def test_a_resample_keeps_the_routes_of_the_shared_beginning_and_has_its_own_after():
    s, [first, second] = digits(([4, 5], 0), ([8, 9], 1), ([5, 9], 2), turns=3)
    assert (first.experts[4:10] == routes(10, 1)[4:]).all()
    assert (second.experts[:4] == routes(4)).all()
    assert (second.experts[5:10] == routes(10, 2)[5:]).all()
    assert first.experts_known.tolist() == second.experts_known.tolist() == [True] * 10 + [False]
    assert len(second.experts) == 11 and s.meters["route_conflicts"] >= 8


def test_t7_ids_that_no_captured_call_saw_have_unknown_routes():
    """A second call without routes: the row's arrays still have one entry per token (else packing misaligns)."""
    _, [row] = digits(([4, 5], 0), ([8, 9],))
    assert row.experts.shape == (11, 2, 2)
    assert row.experts_known.tolist() == [True] * 4 + [False] * 7


def test_a_dense_row_has_no_layers_and_no_known_route():
    _, [row] = digits(([4, 5],), turns=1)
    assert row.experts.shape == (5, 0, 0) and row.experts_known.tolist() == [False] * 5


# ----------------------------------------------------------------------------------------------- packing of rows


def make_row(index: int, length: int, layers: int = 0, **kwargs) -> Row:
    rng = np.random.default_rng(index)
    sampled = rng.random(length) < 0.5
    return Row(
        f"r{index}.0", f"r{index}", index, f"täsk {index}",
        token_ids=rng.integers(0, 2**31 - 1, length).astype(np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(length), np.nan).astype(np.float32),
        versions=np.where(sampled, 7, -1).astype(np.int32),
        call=np.where(sampled, 0, -1).astype(np.int32),
        experts=rng.integers(0, 8, (length, layers, 2 if layers else 0)).astype(np.uint8),
        experts_known=rng.random(length) < 0.5,
        temperature=0.7, reward=index / 3, status="ok", truncated=bool(index % 2), **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("layers", [0, 3])
def test_rows_survive_packing(layers):
    call = Call(0, "test", [1], 8, 1.0, 1.0, "", token_ids=[1, 2], versions=[3, 4]).summary()
    rows = [make_row(index, length, layers, calls=[call]) for index, length in enumerate([1, 7, 0, 300])]
    back = unpack_rows(pack_rows(rows))
    assert len(back) == len(rows)
    for row, copied in zip(rows, back, strict=True):
        assert vars(row).keys() == vars(copied).keys()
        for name, value in vars(row).items():
            if isinstance(value, np.ndarray):
                assert vars(copied)[name].dtype == value.dtype
                np.testing.assert_array_equal(vars(copied)[name], value)
            else:
                assert vars(copied)[name] == value, name
    assert back[3].calls[0]["version_spans"] == [[3, 1], [4, 1]]


def test_no_rows_survive_packing():
    assert unpack_rows(pack_rows([])) == []


def test_packing_costs_at_most_a_tenth_more_than_the_arrays():
    call = Call(0, "openai.chat", [1] * 100, 8, 1.0, 1.0, "", engines=[0], finish_reason="stop").summary()
    rows = [make_row(index, 300, calls=[call]) for index in range(100)]
    arrays = sum(value.nbytes for row in rows for value in vars(row).values() if isinstance(value, np.ndarray))
    assert len(pack_rows(rows)) < 1.1 * arrays


# ----------------------------------------------------------------------------------------------------- the wire


@asynccontextmanager
async def serving(engine, fixed=True, max_tokens=200, context=4096, chat=None):
    """A loopback and one session of it."""
    server = Loopback(chat or template(), parse, engine, "policy", context)
    await server.start()
    s = server.open(Sampling(1.0, 1.0, max_tokens, fixed))
    try:
        yield server, s
    finally:
        await server.stop()


def sdk(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def wire(engine, scenario, **kwargs) -> Session:
    """Run ``scenario(server, session, chat)`` where ``chat(messages, …)`` is the SDK's call; check the rows."""

    async def go():
        async with serving(engine, **kwargs) as (server, s), sdk(server.url(s)) as client:
            await scenario(server, s, functools.partial(client.chat.completions.create, model="policy"))
            return s

    s = run(go())
    exact(s)
    return s


def post(engine, *bodies: bytes, path="chat/completions", **kwargs) -> list[tuple[int, dict | None]]:
    """Raw POSTs to one session: status, and the reply's JSON (None when it is not JSON)."""

    async def go():
        async with serving(engine, **kwargs) as (server, s), aiohttp.ClientSession() as http:
            out = []
            for body in bodies:
                async with http.post(f"{server.url(s)}/v1/{path}", data=body) as reply:
                    is_json = reply.content_type == "application/json"
                    out.append((reply.status, await reply.json() if is_json else None))
            return out

    return run(go())


def error_of(reply: dict | None) -> dict:
    """The error in OpenAI's shape."""
    assert reply is not None, "the error is not JSON"
    assert set(reply["error"]) == {"message", "type", "param", "code"} and reply["error"]["message"]
    return reply["error"]


def test_a_tool_dialogue_over_the_sdk_is_one_row_with_true_usage():
    """w3, t11: finish_reason is tool_calls, stop, length; usage counts ids; the SDK's own objects echo back."""
    asking = spelled(f"<think>a</think><tool_call>{ASK}</tool_call><tool_call>{ASK}</tool_call>")
    engine = Engine(asking, ids("a b <eot>"), ids("a b a b"))

    async def scenario(server, s, chat):
        said = [user("a")]
        asked = await chat(messages=said, tools=TOOLS)
        [choice] = asked.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [{"x": 1, "y": [2]}] * 2
        said += [choice.message, tool("b"), tool("a")]
        told = await chat(messages=said, tools=TOOLS)
        assert (told.choices[0].finish_reason, told.choices[0].message.content) == ("stop", "ab")
        assert told.choices[0].message.tool_calls is None and told.model == "policy"
        said += [told.choices[0].message.model_dump(), user("b")]
        cut = await chat(messages=said, tools=TOOLS, max_tokens=3)
        assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("length", "aba")
        for reply, sampled, prompt in zip((asked, told, cut), (len(asking), 3, 3), engine.prompts, strict=True):
            usage = reply.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), sampled)
            assert usage.total_tokens == len(prompt) + sampled

    s = wire(engine, scenario)
    assert len(s.branches) == 1 and {call.wire for call in s.calls} == {"openai.chat"}
    assert trained(exact(s)[0]) == asking + ids("a b <eot> a b a")


def test_a_reply_of_calls_alone_has_content_null_as_openai_has():
    """A program without the SDK reads ``message["content"]``; and no ``tool_calls: null`` where there are none."""
    body = json.dumps({"messages": [user("a")], "tools": TOOLS}).encode()
    replies = post(Engine(spelled(f"<tool_call>{ASK}</tool_call>"), ids("a <eot>")), body, body)
    asked, said = (reply["choices"][0]["message"] for _, reply in replies)
    assert asked["content"] is None and asked["tool_calls"][0]["function"]["name"] == "f"
    assert said["content"] == "a" and "tool_calls" not in said


@pytest.mark.parametrize("asked", [{"max_tokens": 2}, {"max_completion_tokens": 2}])
def test_w11_either_cap_caps(asked):
    async def scenario(server, s, chat):
        reply = await chat(messages=[user("a")], **asked)
        assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (2, "length")

    wire(Engine(ids("a b a b")), scenario)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_training_rollout_overrides_temperature_and_names_it(fixed):
    engine = Engine(*[ids("a <eot>")] * 3)

    async def scenario(server, s, chat):
        raw = chat.func.__self__.with_raw_response.create
        headers = []
        for asked in ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 1, "top_p": 1}, {"temperature": 0.0}):
            reply = await raw(model="policy", messages=[user("a")], **asked)
            headers.append(reply.headers.get("x-instar-overridden"))
        assert headers == (["temperature,top_p", None, "temperature"] if fixed else [None] * 3)
        assert s.meters["overridden"] == (3 if fixed else 0)

    s = wire(engine, scenario, fixed=fixed)
    sampled_at = [(call.temperature, call.top_p) for call in s.calls]
    assert sampled_at == ([(1.0, 1.0)] * 3 if fixed else [(0.5, 0.9), (1, 1), (0.0, 1.0)])


def test_an_unknown_or_closed_session_is_404_in_the_wires_shape():
    async def scenario(server, s, chat):
        await chat(messages=[user("a")])
        server.close(s)
        with pytest.raises(openai.NotFoundError, match="session") as caught:
            await chat(messages=[user("a")])
        error_of({"error": caught.value.body})
        async with sdk(f"http://127.0.0.1:{server.port}/s/guess") as other:
            with pytest.raises(openai.NotFoundError):
                await other.models.list()

    wire(Engine(ids("a <eot>")), scenario)


def test_sessions_of_one_server_do_not_share_a_history():
    async def scenario(server, s, chat):
        other = server.open(Sampling(1.0, 1.0, 8, True))
        assert other.id != s.id and len(other.id) >= 24
        reply = (await chat(messages=[user("a")])).choices[0].message
        await other.turn([user("a"), reply.model_dump(), user("b")], None, "test")
        assert len(s.branches) == len(other.branches) == 1 and other.meters["turns_edit"] == 1

    wire(Engine(ids("a b <eot>"), ids("b <eot>")), scenario)


def test_the_models_address_names_the_model():
    async def scenario(server, s, chat):
        assert [model.id async for model in chat.func.__self__._client.models.list()] == ["policy"]

    wire(Engine(), scenario)


UNSUPPORTED = {
    "top_logprobs": 2, "tool_choice": "required", "logit_bias": {"1": 1}, "frequency_penalty": 0.5,
    "presence_penalty": -1, "never_heard_of": 1,
}  # fmt: skip


def test_w7_a_field_that_is_not_supported_is_a_400_that_names_it():
    bodies = [json.dumps({"messages": [user("a")], name: value}).encode() for name, value in UNSUPPORTED.items()]
    for name, (status, reply) in zip(UNSUPPORTED, post(engine := Engine(), *bodies), strict=True):
        assert status == 400 and error_of(reply)["param"] == name and name in reply["error"]["message"]
    assert not engine.calls


@pytest.mark.parametrize("fixed", [True, False])
def test_w7_a_json_format_is_refused_by_name_in_training_only(fixed):
    """Constrained sampling would bend the distribution that the log-probs are of."""
    body = json.dumps({"messages": [user("a")], "response_format": {"type": "json_object"}}).encode()
    [(status, reply)] = post(engine := Engine(ids("a <eot>")), body, fixed=fixed)
    assert status == (400 if fixed else 200) and len(engine.calls) == (not fixed)
    assert not fixed or error_of(reply)["param"] == "response_format"


def test_w7_a_field_at_the_value_that_asks_for_nothing_is_accepted():
    asked = {"n": 1, "stream": False, "stop": None, "logprobs": False, "seed": None, "tool_choice": "auto",
             "parallel_tool_calls": True, "frequency_penalty": 0, "presence_penalty": 0.0, "tools": [],
             "response_format": {"type": "text"}, "user": "x", "metadata": {}, "temperature": None}  # fmt: skip
    [(status, _)] = post(Engine(ids("a <eot>")), json.dumps({"messages": [user("a")], **asked}).encode())
    assert status == 200


BAD_BODIES = {
    "empty": b"",
    "no json": b"{",
    "not an object": b"[]",
    "not utf-8": b'{"messages": "\xff"}',
    "nested too deep": b'{"messages":' + b"[" * 200_000,
    "no messages": {},
    "empty messages": {"messages": []},
    "messages of another type": {"messages": "a"},
    "message of another type": {"messages": ["a"]},
    "no role": {"messages": [{"content": "a"}]},
    "role unknown to the template": {"messages": [{"role": "wizard", "content": "a"}]},
    "content of another type": {"messages": [user(1)]},
    "image": {"messages": [user([{"type": "image_url", "image_url": {"url": "data:"}}])]},
    "half a surrogate pair": {"messages": [user("\ud83d")]},
    "noncharacters": {"messages": [user(BREAK)]},
    "tool_calls of another type": {"messages": [{**PLAIN, "tool_calls": 5}]},
    "tool call without a function": {"messages": [{**PLAIN, "tool_calls": [{"id": "x"}]}]},
    "tools of another type": {"messages": [user("a")], "tools": {"name": "f"}},
    "tool of another type": {"messages": [user("a")], "tools": [1]},
    "tool without a function": {"messages": [user("a")], "tools": [{"type": "function"}]},
    "max_tokens 0": {"messages": [user("a")], "max_tokens": 0},
    "max_tokens -1": {"messages": [user("a")], "max_tokens": -1},
    "max_completion_tokens 0": {"messages": [user("a")], "max_completion_tokens": 0},
    "max_tokens of another type": {"messages": [user("a")], "max_tokens": "9"},
    "temperature of another type": {"messages": [user("a")], "temperature": "hot"},
    "temperature below 0": {"messages": [user("a")], "temperature": -1},
    "top_p of another type": {"messages": [user("a")], "top_p": [1]},
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_fault_of_the_request_is_400_in_the_wires_shape_and_samples_nothing(name):
    body = BAD_BODIES[name]
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    [(status, reply)] = post(engine := Engine(ids("a <eot>")), body, fixed=False)
    assert status == 400 and error_of(reply)["type"] == "invalid_request_error"
    assert not engine.calls


@pytest.mark.parametrize("depth", [50, 100, 600, 900])
def test_no_depth_of_nesting_is_a_5xx_and_what_is_too_deep_is_400(depth):
    deep = b'{"x": ' + b"[" * depth + b"]" * depth + b"}"
    tools = b'[{"type": "function", "function": {"name": "f", "parameters": ' + deep + b"}}]"
    by_tool = b'{"messages": [{"role": "user"}], "tools": ' + tools + b"}"
    by_message = b'{"messages": [{"role": "user", "content": "a", "unknown": ' + deep + b"}]}"
    for status, reply in post(Engine(*[ids("a <eot>")] * 2), by_tool, by_message):
        assert status == (200 if depth < loopback.MAX_DEPTH else 400), reply


def test_an_oversized_body_is_413_in_the_wires_shape():
    [(status, reply)] = post(Engine(), b" " * (33 * 2**20))
    assert status == 413
    error_of(reply)


def test_a_path_that_is_not_served_is_404_in_the_wires_shape():
    [(status, reply)] = post(Engine(), b"{}", path="embeddings")
    assert status == 404
    error_of(reply)


ARGUMENTS = {"null": "null", "empty": "", "{}": "{}", "list": "[1]", "bad": "{bad", "string": '"x"', "absent": None,
             "mapping": {"x": 1}, "long number": "1" * 5000, "deep": "[" * 200_000}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_w4_no_tool_arguments_are_refused(name):
    history = [user("a"), {**ASKED, "tool_calls": called(arguments=ARGUMENTS[name])}, tool("b")]
    body = json.dumps({"messages": history, "tools": TOOLS}).encode()
    [(status, reply)] = post(Engine(ids("a <eot>")), body, context=10**6)
    assert status == 200, reply


def test_w4_arguments_reach_the_template_as_a_mapping():
    """Nothing and null are {}; what spells no JSON object is kept, as it was given, under one name."""
    for given, seen in (
        ("{}", {}), ("null", {}), ("", {}), (None, {}), ({}, {}), ('{"x": 1}', {"x": 1}), ({"x": 1}, {"x": 1}),
        *((text, {"INVALID_JSON": text}) for text in ("[1]", "{bad", '"x"', "0", "false", "1" * 5000, "[" * 200_000)),
    ):  # fmt: skip
        assert loopback.parsed_arguments(given) == seen, given
        assert loopback.normalise_call(called(arguments=given)[0])["function"]["arguments"] == seen
    absent = {"id": "z", "type": "function", "function": {"name": "f"}}
    assert loopback.normalise_call(absent)["function"]["arguments"] == {}


def test_t14_overflow_is_400_context_length_exceeded_and_a_shorter_turn_goes_on():
    engine = Engine(ids("a <eot>"), ids("b <eot>"))

    async def scenario(server, s, chat):
        said = [user("a"), (await chat(messages=[user("a")])).choices[0].message]
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(messages=[*said, user("a" * 40)])
        assert caught.value.code == "context_length_exceeded" and error_of({"error": caught.value.body})
        await chat(messages=[*said, user("b")])

    s = wire(engine, scenario, context=30)
    assert len(s.branches) == 1
    assert engine.prompts[1] == ids("<user> a <eot> NL <assistant> a <eot> NL <user> b <eot> NL <assistant>")


@pytest.mark.parametrize("fault", [RuntimeError("died"), OSError("gone"), TimeoutError("late")])
def test_an_engine_fault_is_503_to_be_retried_and_its_tokens_are_uncommitted(fault):
    engine = Engine()

    async def die(call):
        engine.say(call, ids("a b"))
        raise fault

    engine.script = [die, ids("b <eot>")]

    async def scenario(server, s, chat):
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(messages=[user("a")])
        assert caught.value.status_code == 503 and caught.value.response.headers["Retry-After"]
        assert error_of({"error": caught.value.body})["type"] == "server_error"
        assert s.failure is fault and s.uncommitted == 2
        await chat(messages=[user("a")])

    s = wire(engine, scenario)
    assert [trained(row) for row in exact(s)] == [ids("b <eot>")]


def test_g11_an_engine_reply_that_does_not_fit_together_is_503():
    engine = Engine()

    async def spoiled(call):
        engine.say(call, ids("b <eot>"))
        spoil_logprobs(call)

    engine.script = [spoiled]
    [(status, reply)] = post(engine, json.dumps({"messages": [user("a")]}).encode())
    assert status == 503 and error_of(reply)["type"] == "server_error"


def test_w13_a_closed_socket_cancels_the_call_and_its_tokens_are_in_no_row():
    engine = Engine(ids("a <eot>"))

    async def scenario(server, s, chat):
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def endless(call):
            engine.say(call, ids("b b b"))
            started.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        engine.script += [endless, ids("b <eot>")]
        said = [user("a"), (await chat(messages=[user("a")])).choices[0].message, user("b")]
        gone = asyncio.create_task(chat(messages=said))
        await started.wait()
        gone.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        assert (s.sampled, s.uncommitted) == (5, 3)
        assert s.failure is None, "a client that left is no fault of the engine"
        await chat(messages=said)

    s = wire(engine, scenario)
    [row] = exact(s)
    assert trained(row) == ids("a <eot> b <eot>") and s.uncommitted == 3


def test_w15_two_hundred_concurrent_calls_are_two_hundred_rows():
    engine = Engine()

    async def slow(call):
        await asyncio.sleep(0.05)
        engine.say(call, ids("a <eot>"))

    engine.script = [slow] * 200

    async def scenario(server, s, chat):
        replies = await asyncio.gather(*(chat(messages=[user(f"a{number}")]) for number in range(200)))
        assert {reply.choices[0].message.content for reply in replies} == {"a"}

    assert len(wire(engine, scenario).branches) == 200


def test_the_server_listens_on_127_0_0_1_only():
    async def scenario(server, s, chat):
        assert [address[0] for address in server.runner.addresses] == ["127.0.0.1"]
        socket.create_connection(("127.0.0.1", server.port), 1).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", server.port), 1).close()

    wire(Engine(), scenario)


def test_a_trace_shows_who_sampled_what_and_why_each_branch_is_there():
    """Branches with their causes; spans that add up to the branch's ids, each of one origin; calls; meters."""
    script = ids("<think> a b </think> b <eot>"), ids("a <eot>"), ids("b <eot>"), ids("b b <eot>")

    async def scenario(server, session):
        first = (await session.turn([user("a")], None, "test")).message
        told = [user("a"), first, user("b")]
        await session.turn([user("a"), first, tool("b")], None, "test")
        await session.turn(told, None, "test")
        await session.turn([user("c")], None, "test")
        async with aiohttp.ClientSession() as client, client.get(server.url(session) + "/trace") as response:
            return await response.json(), [list(branch.ids) for branch in session.branches]

    async def go():
        async with serving(Engine(*script), chat=template(DROP)) as (server, session):
            return await scenario(server, session)

    trace, rows = run(go())
    assert [branch["cause"] for branch in trace["branches"]] == ["first", "template", "new"]
    for branch, row in zip(trace["branches"], rows, strict=True):
        assert functools.reduce(operator.iadd, (span["ids"] for span in branch["spans"]), []) == row
        assert next(span["from"] for span in branch["spans"]) == 0
    spans = [[span["who"] for span in branch["spans"]] for branch in trace["branches"]]
    assert spans == [["context", "call 0", "context", "call 1"], ["context", "call 2"], ["context", "call 3"]]
    assert trace["branches"][0]["spans"][1]["text"] == "<think>ab</think>b<eot>"
    assert trace["branches"][0]["spans"][1]["versions"] == [3]
    assert [call["sampled"] for call in trace["calls"]] == [6, 2, 2, 3]
    assert trace["meters"]["turns_template"] == 1


# --------------------------------------------------------------------------------------- what a review found


def test_what_a_template_writes_inside_an_empty_reply_is_not_taken_for_what_follows_it():
    """An empty reply is a beginning of anything: the thinking mark inside its turn is not written behind its end."""
    inside = KEEP.replace("{{ m.content }}", "{{ '<think></think>' if not m.reasoning_content }}{{ m.content }}")
    s = session(engine := Engine(ids("<eot>"), ids("a <eot>")), template(inside))
    play(s, [user("b")], [user("b")])
    assert engine.prompts[1].count(EOT) == 3, "two users' and the reply's"
    exact(s)


def test_white_space_that_a_control_token_takes_in_is_not_written_behind_it():
    """Some tokenizers strip what follows a control token; the ids are those of a fresh render all the same."""
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False, rstrip=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", chat_template=KEEP)
    end = tokenizer.convert_tokens_to_ids("<eot>")
    said = [*tokenizer.encode("aa", add_special_tokens=False), end]
    s = session(engine := Engine(said, said, ends=(end,)), Template(tokenizer, (end,)))
    first, _ = play(s, [user("b")], [user("b")])
    fresh = tokenizer.apply_chat_template(
        [user("b"), first.message, user("b")], add_generation_prompt=True, tokenize=False
    )
    assert engine.prompts[1] == tokenizer.encode(fresh, add_special_tokens=False)


def test_a_control_token_that_the_model_spelled_in_letters_stays_letters_when_its_row_forks():
    """T10 for the model's own words: thinking that it sampled as a control passes, an end that it spelled does not."""
    letters = [toy(KEEP).convert_tokens_to_ids(letter) for letter in "<eot>"]
    s = session(engine := Engine([*ids("<think> a </think>"), *letters, EOT], ids("b <eot>")), template(DROP))
    play(s, [user("a")], [user("b")])
    assert len(exact(s)) == 2 and controls_in(engine.prompts[1]) == controls_in(engine.prompts[0]) * 2 + 1
    assert "<eot>" in toy(KEEP).decode([token for token in engine.prompts[1] if token not in CONTROLS])


def test_one_choice_that_cannot_be_read_leaves_no_choice_behind():
    def fails_on_b(text, tools):
        if text == "b":
            raise ValueError("unreadable")
        return parse(text, tools)

    s = session(Engine(ids("a <eot>"), ids("b <eot>"), ids("a <eot>")), parse=fails_on_b)
    with pytest.raises(RuntimeError, match="unreadable"):
        run(s.turns(Ask([user("a")], [], "test", n=3)))
    assert not s.branches and s.uncommitted == s.sampled == 6 and isinstance(s.failure, ValueError)


@pytest.mark.parametrize("ticks", range(8))
def test_a_body_that_comes_again_while_its_call_fails_is_answered_or_fails_alike(ticks):
    gate, asked = asyncio.Event(), []

    async def generate(call):
        asked.append(call)
        if len(asked) == 1:
            await gate.wait()
            raise RuntimeError("engine")
        Engine().say(call, ids("a <eot>"))

    async def scenario(s):
        body = {"messages": "the same"}
        first = asyncio.create_task(s.answer(Ask([user("a")], [], "test"), body, False))
        await asyncio.sleep(0.01)
        gate.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        second = asyncio.create_task(s.answer(Ask([user("a")], [], "test"), body, True))
        return await asyncio.gather(first, second, return_exceptions=True)

    for outcome in run(scenario(session(generate))):
        assert isinstance(outcome, loopback.Answer) or str(outcome) == "engine"


def test_what_calls_keep_does_not_grow_with_the_history():
    """A committed call's prompt is the beginning of its branch, and its routes are laid down: neither is kept twice."""
    s, _ = digits(*[([4, 5], 0)] * 12, turns=12)
    assert all(not call.sent_ids and not call.routes for call in s.calls)
    assert [len(call.prompt_ids) for call in s.calls] == [call.summary()["prompt_tokens"] for call in s.calls]
    assert not s.running


def test_noncharacters_that_the_model_samples_do_not_stop_its_conversation():
    """Only what others say may not hold the marks that break controls: what was sampled is rendered as it is."""
    marks = toy(KEEP).encode(BREAK, add_special_tokens=False)
    s = session(Engine([*marks, EOT], ids("a <eot>")))
    first, _ = play(s, [user("a")], [user("b")])
    assert first.message["content"] == BREAK and len(exact(s)) == 1
