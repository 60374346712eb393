"""Every template by every shape of history: what the model is conditioned on is what a fresh full render says.

The reference here is slow and knows nothing of ``loopback``: the tokenizer's own ``apply_chat_template`` over the
whole history, as text. Where the text that the last reply was sampled under, and the reply, begin the new render, the
turn must go on in its row with exactly the render's ids; where the template changed anything before the reply, or lost
the reply's thinking, it must be a new row; where it only spells the reply anew, the row goes on, and all that was not
sampled is the render's. ``test_loopback.exact`` is checked on every session besides.

The tokenizer is bytes and control tokens, so ids and text say the same.
"""

import contextlib
import copy
import functools
import importlib.util
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_loopback import BARE, DROP, FORGETS, KEEP, LINES, exact, run, tool, user
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loopback import Sampling, Session, Template, WireError

# ----------------------------------------------------------------------------------------------------- templates


def folder(package: str, *parts: str) -> Path:
    """A folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    assert found is not None, f"{package} is not installed"
    return Path(found.submodule_search_locations[0], *parts)


def but(old: str, new: str, text: str = KEEP) -> str:
    """A template with something else in it."""
    assert old in text
    return text.replace(old, new)


OVER, END, ROLE = "for m in messages", "{{ '<eot>\n' }}{%- elif m.role in", "'<' + m.role + '>'"
TOOL_LIST = "{%- if tools -%}{{ '<system>' + (tools | tojson) + '<eot>\n' }}{%- endif -%}"
ADVERSARIAL = {
    "keeps": KEEP,
    "drops old thinking": DROP,
    "drops all thinking": but("m.reasoning_content and", "false and"),
    "spaces calls anew": but("a | tojson", "a | tojson(separators=(' , ', ' : '))"),
    "sorts the keys of calls": but("a | tojson", "a | tojson(sort_keys=true)"),
    "moves the system into the first user turn": (
        "{%- set sys = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}"
        + but(OVER, "for m in (messages[1:] if sys else messages)", but(ROLE, ROLE + "+ (sys if loop.first else '')"))
    ),
    "trims replies": but("{{ m.content }}", "{{ m.content | trim }}"),
    "writes the date": "{{ '<system>' + strftime_now('%d %b %Y') + '<eot>\n' }}" + KEEP,
    "puts a line before an end": but(END, END.replace("<eot>", "\n<eot>")),
    "ends a turn by the next one's role": BARE,
    "ends a turn by a newline": LINES,
    "leaves out empty replies": but(
        "m.role == 'assistant' -%}", "m.role == 'assistant' and (m.content or m.tool_calls) -%}"
    ).replace("{%- else -%}", "{%- elif m.role != 'assistant' -%}"),
    "closes a call by what follows": but(
        END,
        END.replace(
            "'<eot>", "'<call>' if m.tool_calls and loop.nextitem and loop.nextitem.role == 'tool' else '<eot>"
        ),
    ),
    "closes the last reply otherwise": but(END, END.replace("'<eot>", "'<eos>' if loop.last else '<eot>")),
    "writes the ids of calls": but("c.function.name +", "c.id + c.function.name +").replace(
        "'<tool>' +", "'<tool>' + m.tool_call_id +"
    ),
    "tools before the last user message": but(
        "{{ " + ROLE, "{{ (tools | tojson if tools and loop.index0 == ns.last else '') + " + ROLE, but(TOOL_LIST, "")
    ),
    "empties tool results of long histories": FORGETS,
    "marks empty thinking in the prompt": but(
        "'<assistant>' if add_generation_prompt", "'<assistant><think></think>' if add_generation_prompt"
    ),
    "marks replies once a tool was used": but(
        "'<assistant>'", "'<assistant>' + ('!' if messages | selectattr('role', 'equalto', 'tool') | list else '')"
    ),
    "keeps the last six messages": but(OVER, OVER + "[-6:]"),
}
REWRITES = but(ROLE, "('<long>' if loop.first and messages | length > 40 else '') + " + ROLE)
SLIDES = but(OVER, OVER + "[-24:]")
LONG_ONLY = {
    "marks replies under a system": but(
        "'<assistant>'", "'<assistant>' + ('!' if messages | selectattr('role', 'equalto', 'system') | list else '')"
    ),
    "refuses a cut history": "{{ raise_exception('cut') if messages | length > 2 and messages[1].content != 'a0.' }}"
    + KEEP,
}
PACKAGED = {
    f"{package}/{path.stem}": path.read_text()
    for package, *parts in (("trl", "chat_templates"), ("vllm", "transformers_utils", "chat_templates"))
    for path in sorted(folder(package, *parts).glob("*.jinja"))
}
SILENT = [name for name in PACKAGED if re.search("idefics3|smolvlm|llava_next|kimi_audio", name)]
"""They read text from parts alone, or write none."""
TEMPLATES = {name: text for name, text in (ADVERSARIAL | PACKAGED).items() if name not in SILENT}

# ------------------------------------------------------------------------------------------------- the reference

CONTROL = re.compile(r"<[^<>\s'\"{}%+]+>")
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|eot|>", "<|return|>", "<|call|>",
        "<|end|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|observation|>",
        "<|user|>", "<eot>", "<call>", "<user>", "<eos>")  # fmt: skip
"""What models of these templates stop at."""
ARGUMENTS = {"b": 1, "a": [2]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": {
    "type": "object", "properties": {"b": {"type": "integer", "description": "One."}, "a": {
        "type": "array", "items": {"type": "integer"}, "description": "Many."}}, "required": ["b"]}}}]  # fmt: skip


def says(text: str, thinking: str = "", calls: int = 0, turn: int = 0) -> dict:
    """A reply."""
    message = {"role": "assistant", "content": text} | ({"reasoning_content": thinking} if thinking else {})
    asked = [
        {"type": "function", "id": f"call{turn:04d}{n}", "function": {"name": "f", "arguments": ARGUMENTS | {"b": n}}}
        for n in range(calls)
    ]
    return message | ({"tool_calls": asked} if calls else {})


def result(text: str, turn: int = 0, n: int = 0) -> dict:
    """A tool's result."""
    return tool(text) | {"tool_call_id": f"call{turn:04d}{n}"}


def bare(messages: list[dict]) -> list:
    """What is compared of messages."""
    return [(m["role"], m["content"], [c["function"] for c in m.get("tool_calls", ())]) for m in messages]


def letters(text: str) -> Counter:
    """Text but for its order and white space."""
    return Counter("".join(text.split()))


class Watched(Template):
    """Counts the histories that were cut to a window."""

    cut = 0

    def window(self, history, *rest):
        short = super().window(history, *rest)
        self.cut += len(short) < len(history)
        return short


@functools.cache
class Model:
    """A tokenizer under one template, and what a model trained on that template would sample."""

    def __init__(self, chat_template: str):
        vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        inner = Tokenizer(models.BPE(vocab, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        controls = sorted({"<eos>", "<bos>", *CONTROL.findall(chat_template)})
        inner.add_tokens([AddedToken(token, normalized=False) for token in controls])
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token="<eos>", bos_token="<bos>", chat_template=chat_template
        )
        known = [end for end in ENDS if end in controls and not (end == "<|end|>" and "<|return|>" in controls)]
        self.ends = {end: self.ids(end)[0] for end in known}
        self.rendered: dict[str, str] = {}

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def fresh(self, messages: list[dict], tools=None, prompt=True) -> str:
        """The full render."""
        key = repr((messages, tools, prompt))
        if key not in self.rendered:
            self.rendered[key] = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
        return self.rendered[key]

    def says(self, prompt: str, history: list[dict], reply: dict, new: list[dict], tools) -> tuple[str, str]:
        """The reply's text as the template itself writes it, together with what the template leaves out, and the token
        that the model stops at."""
        text, after = "", ""
        try:
            text = self.fresh([*history, reply], tools, prompt=False)
            after = self.fresh([*history, reply, *new], tools)
        except Exception:
            pass
        text = text[len(prompt) :] if text.startswith(prompt) else ""
        after = after[len(prompt) :] if after.startswith(prompt + text) else ""
        found = sorted((at, end) for end in self.ends if (at := (text or after).find(end)) >= 0)
        later = sorted((at, end) for end in self.ends if (at := after.find(end)) >= 0)
        end = (found or later or [(0, "<eos>")])[0][1]
        text = text[: found[0][0]] if found and text else text
        if reply["content"].strip() not in text:
            text += reply["content"]
        if (thinking := reply.get("reasoning_content", "")) not in text:
            text = ("" if prompt.endswith("<think>\n") else "<think>\n") + f"{thinking}\n</think>\n\n{text}"
        if reply.get("tool_calls") and "2]" not in text:
            text += "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in reply["tool_calls"])
        return text, end


@dataclass
class Said:
    """A turn of the reference: the messages up to its reply, the render it was sampled under, its text and end."""

    messages: list
    prompt: str
    alone: str
    """The render that ends in the reply."""
    text: str
    end: str
    ids: list[int]
    """Prompt and sampled."""
    content: str
    thinking: str
    length: bool
    right: bool
    """Whether the model saw the ids that it should have."""
    faithful: bool
    """Whether the ids so far are a fresh render's."""
    continued: bool = False


def behind(said: Said, render: str) -> list[str] | None:
    """What ``render`` writes behind the turn; None where that turn cannot go on. Several, where a control or white
    space may be the reply's or what closes it."""
    start = len(said.prompt)
    shown = said.alone[start:] if said.alone.startswith(said.prompt) and render.startswith(said.alone) else None
    if render.startswith(said.prompt + said.text):
        cuts = [len(said.text)]
    elif shown is None or "".join(said.thinking.split()) not in "".join(shown.split()):
        return None
    else:
        cuts = [at for at in range(len(shown) + 1) if letters(shown[:at]) == letters(said.text)]
        if not cuts:  # the template leaves out a part of the reply, and closes the rest
            cuts = [at for at in range(len(shown) + 1) if letters(shown[:at]) <= letters(said.text)]
            cuts = [at for at in cuts if not said.content or said.content not in shown[at:]]
    rests = []
    for at in cuts:
        # An end that the model sampled is not written twice, even where the template writes something ahead of it.
        closing, end, _ = (shown or "")[at:].partition(said.end)
        closed = len(closing + end) if end else 0
        rest = render[start + at :]
        rests.append(rest if said.length else rest[closed:] if end else rest.removeprefix(said.end))
    return rests


@dataclass
class Step:
    """A request of conversation ``who``, and the model's reply to it."""

    new: list[dict]
    reply: dict
    spell: tuple[str, str] = ("", "")
    """What the model spells otherwise than the template, and how."""
    length: bool = False
    """Stopped by length."""
    who: str = "a"


@dataclass
class Outcome:
    """What one conversation met."""

    turns: int = 0
    same: int = 0
    """Turns that had to go on in their row."""
    forks: int = 0
    respelled: int = 0
    refused: bool = False
    wrong: dict[int, str] = field(default_factory=dict)
    """Messages of a request that was decided wrongly, and how."""
    short: int = 0
    windows: bool = True


async def converse(chat_template: str, steps: list[Step], tools=None, forgetful=False) -> Outcome:
    """Play the steps; compare each turn's ids with the reference. ``forgetful`` clients echo no thinking."""
    model, out, told, says_now = Model(chat_template), Outcome(), [], {}

    async def generate(call):
        text, end = says_now["text"]
        call.token_ids = model.ids(text) + ([model.ids(end)[0]] if end else [])
        call.logprobs, call.versions = [-0.5] * len(call.token_ids), [0] * len(call.token_ids)
        call.finish_reason = "stop" if end else "length"

    template = Watched(model.tokenizer, {*model.ends.values(), model.ids("<eos>")[0]})
    s = Session(template, lambda text, tools: says_now["reply"], generate, Sampling(1.0, 1.0, 10**6, True), 10**7)
    histories: dict[str, list] = {}
    for index, step in enumerate(steps):
        history = histories.setdefault(step.who, [])
        history += step.new
        sent = [{k: v for k, v in m.items() if k != "reasoning_content"} if forgetful else m for m in history]
        try:
            render = model.fresh(history, tools)
        except Exception:
            with pytest.raises(WireError) as refused:
                await s.turn(sent, tools, "test")
            assert refused.value.status == 400 and len(s.calls) == out.turns
            out.refused = True
            break
        later = next((other.new for other in steps[index + 1 :] if other.who == step.who), [])
        text, end = model.says(render, history, step.reply, later, tools)
        said, spelled = step.spell
        text = text.replace(said, spelled) if said and (said not in spelled or spelled not in text) else text
        alone = ""
        with contextlib.suppress(Exception):
            alone = model.fresh([*history, step.reply], tools, prompt=False)
        says_now |= {"text": (text, "" if step.length else end), "reply": step.reply}
        asked = bare(history)
        parent = max((one for one in told if asked[: len(one.messages)] == one.messages),
                     key=lambda one: (len(one.messages), not one.continued), default=None)  # fmt: skip
        before = len(s.branches)
        await s.turn(sent, tools, "test")
        call, out.turns, faithful = s.calls[-1], out.turns + 1, True
        rests = behind(parent, render) if parent and parent.right else None
        if rests is None:
            expected, rows = [model.ids(render)], before + 1
            out.forks += parent is not None
        else:
            expected = [parent.ids + model.ids(rest) for rest in rests]
            rows = before + parent.continued
            ended = "" if parent.length else parent.end
            strict = render.startswith(parent.prompt + parent.text + ended)
            faithful, parent.continued = parent.faithful and strict, True
            out.same, out.respelled = out.same + faithful, out.respelled + (not faithful)
            assert not faithful or expected == [model.ids(render)], "the reference contradicts itself"
        caused = rests is not None or parent is None or s.branches[-1].cause == "template"
        if not (call.prompt_ids in expected and len(s.branches) == rows and caused):
            seen, right = model.text(call.prompt_ids), model.text(expected[0])
            out.wrong[len(history)] = (
                f"{len(s.branches)} rows, expected {rows}\n sampled under {seen!r}\n not {right!r}"
            )
        history.append(step.reply)
        told.append(Said(bare(history), render, alone, text, end, [*call.prompt_ids, *call.token_ids], step.reply[
            "content"].strip(), step.reply.get("reasoning_content", ""), step.length, len(history) - 1 not in out.wrong,
                         faithful))  # fmt: skip
    exact(s)
    assert sum(int(row.sampled.sum()) for row in s.rows("r", 0, "t")) == sum(len(call.token_ids) for call in s.calls)
    out.short, out.windows = template.cut, template.windows
    return out


# ---------------------------------------------------------------------------------------------------- histories


def chat(turns: int, thinking=lambda turn: "", **kwargs) -> list[Step]:
    return [Step([user(f"u{n}.")], says(f"a{n}.", thinking(n)), **kwargs) for n in range(turns)]


def loop(turns: int, calls: int = 1, thinking=lambda turn: "", **kwargs) -> list[Step]:
    """A user's question, then calls and their results, then an answer and another question."""
    steps = [Step([user("u.")], says("", thinking(0), calls, 0), **kwargs)]
    for n in range(1, turns):
        new = [result(f"r{n}{c}.", n - 1, c) for c in range(calls)]
        steps.append(Step(new, says("", thinking(n), calls, n), **kwargs))
    return steps


def answered(steps: list[Step]) -> list[Step]:
    """A tool loop that ends in an answer, and goes on with another question."""
    last = len(steps) - 1
    calls = len(steps[-1].reply["tool_calls"])
    thinking = steps[-1].reply.get("reasoning_content", "")
    results = [result(f"r{last + 1}{c}.", last, c) for c in range(calls)]
    return [*steps, Step(results, says("done.", thinking)), *[Step([user("v.")], says("w.", thinking))]]


def system(steps: list[Step]) -> list[Step]:
    steps[0].new.insert(0, {"role": "system", "content": "s."})
    return steps


def thought(turn: int) -> str:
    return f"t{turn}."


SHAPES: dict[str, tuple] = {
    "chat": (chat(6),),
    "system": (system(chat(3)),),
    "tool loop": (answered(loop(2)), TOOLS),
    "parallel calls": (answered(loop(2, calls=2)), TOOLS),
    "system and tools": (system(answered(loop(1))), TOOLS),
    "text beside a call": ([Step([user("u.")], says("look.", calls=1)), Step([result("r.")], says("b."))], TOOLS),
    "thinking": (chat(4, thought),),
    "thinking first": (chat(3, lambda turn: "" if turn else "t."),),
    "thinking, not echoed": (chat(3, thought), None, True),
    "thinking in a tool loop": (answered(loop(2, thinking=thought)), TOOLS),
    "empty reply": ([Step([user("u.")], says("")), Step([user("v.")], says("b.")), Step([user("w.")], says("c."))],),
    "end without its line": ([Step(s.new, s.reply, (".\n", ".")) for s in chat(3)],),
    "white space": ([Step([user(f"u{n}.")], says(f"  a{n}. \n"), (f"a{n}.", f"  a{n}. \n")) for n in range(3)],),
    "calls spelled otherwise": ([Step(s.new, s.reply, (": ", ":")) for s in answered(loop(2))], TOOLS),
    "stopped by length": (chat(3, length=True),),
    "stopped at a line": ([Step([user(f"u{n}.")], says(f"a{n}.\n"), ("\n\n", "\n"), True) for n in range(3)],),
    "call stopped by length": ([Step(s.new, s.reply, length=True) for s in answered(loop(2))], TOOLS),
    "another turn of the assistant": ([*chat(2), Step([], says("more.")), Step([user("w.")], says("c."))],),
    "sub-agent": ([Step([user(f"{who}{n}.")], says(f"{who}a{n}."), who=who) for n in range(3) for who in "ab"],),
    "compaction": ([*chat(3), Step([user("summary.")], says("a."), who="b"), Step([user("v.")], says("b."), who="b")],),
    "two users": ([Step([user("u."), user("v.")], says("a.")), Step([user("w."), user("x.")], says("b."))],),
    "resample": ([*chat(2), *[Step([*chat(1)[0].new, says("a0."), user("u1.")], says("b."), who="b")]],),
}


# --------------------------------------------------------------------------------------------------------- tests


def play(chat_template: str, steps: list[Step], tools=None, forgetful=False) -> Outcome:
    return run(converse(chat_template, copy.deepcopy(steps), tools, forgetful))


FEWER = {"trl/deepseekv3": 15, "trl/llama3_1": 21, "trl/llama3_2": 21, "trl/cohere2": 21, "trl/cohere": 14,
         "trl/gemma": 13, "trl/gemma3": 14, "vllm/template_deepseek_ocr": 14,
         "vllm/template_deepseek_vl2": 14}  # fmt: skip
FEWER |= {f"trl/{name}_training": FEWER[f"trl/{name}"] for name in ("cohere", "cohere2", "gemma", "gemma3")}
"""Templates that refuse some of the shapes (roles must alternate, no system or tool role), and how many are left."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_goes_on_exactly_where_the_template_is_append_only(name):
    """By every shape of history; a history that the template itself refuses is a 400, and is not counted."""
    bad, checked, met = [], 0, Counter()
    for shape, (steps, *rest) in SHAPES.items():
        out = play(TEMPLATES[name], steps, *rest)
        checked += out.same + out.forks + out.respelled > 0
        met.update(same=out.same, forks=out.forks, respelled=out.respelled, refused=out.refused)
        bad += [f"{shape} at {n} messages: {what}" for n, what in out.wrong.items()]
    print(f"{name}: {checked} shapes, turns {dict(met)}")
    assert not bad, "\n".join(bad)
    assert checked == FEWER.get(name, len(SHAPES))


def test_what_the_shapes_are_for():
    """The reference itself tells the templates apart: a row for each dropped thinking, one row where all is kept."""
    thinkers = "keeps", "drops old thinking", "drops all thinking"
    for shape, forks in (("thinking", [0, 3, 3]), ("thinking in a tool loop", [0, 1, 3])):
        assert [play(TEMPLATES[name], *SHAPES[shape]).forks for name in thinkers] == forks
    for name, shape in (("trims replies", "white space"), ("spaces calls anew", "calls spelled otherwise")):
        out = play(TEMPLATES[name], *SHAPES[shape])
        assert (out.same, out.forks) == (0, 0) and out.respelled


@pytest.mark.parametrize("name", SILENT)
def test_a_template_that_writes_no_text_is_refused_or_given_what_it_reads(name):
    """A model must not be asked about messages that it does not see."""
    model = Model(PACKAGED[name])
    try:
        text = Template(model.tokenizer, model.ends.values()).render([user("u0.")], None, prompt=True)
    except (WireError, ValueError):
        return
    assert "u0." in text


def test_midnight_does_not_fork(monkeypatch):
    """A conversation keeps the date it began with; the next one has the new date."""
    model, prompts, days = Model("{{ '<system>' + strftime_now('%d') + '<eot>\n' }}" + KEEP), [], [8]
    clock = SimpleNamespace(now=lambda: datetime(2026, 7, days[0]))
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
    template = Template(model.tokenizer, model.ends.values())

    async def generate(call):
        prompts.append(call.prompt_ids)
        call.token_ids, call.logprobs, call.versions = model.ids("a.<eot>"), [-1.0] * 3, [0] * 3

    async def go(s, history):
        for turn in range(20):
            days[0] = 8 + turn // 7
            history.append(user("u."))
            history.append((await s.turn(history, None, "test")).message)
        return len(s.branches)

    s = Session(template, lambda text, tools: says("a."), generate, Sampling(1.0, 1.0, 9, True), 9999)
    assert run(go(s, [])) == 1
    assert all(prompt[: len(prompts[0])] == prompts[0] for prompt in prompts)


LONG = {"chat": (chat(70),), "tool loop": (loop(70), TOOLS), "thinking": (system(loop(42, 2, thought)), TOOLS),
        "a call amid chat": ([*chat(5), *answered(loop(1)), *chat(20)], TOOLS)}  # fmt: skip
LONG_PAIRS = [
    *(("chat", name) for name in ("keeps", "trims replies", "keeps the last six messages", "trl/llama3")),
    *(("tool loop", name) for name in ("keeps", "closes a call by what follows", "trl/qwen3_training")),
    ("chat", "refuses a cut history"),
    ("thinking", "marks replies under a system"),
    ("a call amid chat", "marks replies once a tool was used"),
    *(("thinking", name) for name in ("drops old thinking", "tools before the last user message", "trl/glm4moe")),
]


@pytest.mark.parametrize("shape, name", LONG_PAIRS)
def test_a_window_does_where_the_template_treats_it_like_the_whole(shape, name):
    """Every turn of a long conversation has the ids of the whole render, though most turns render a window."""
    out = play((TEMPLATES | LONG_ONLY)[name], *LONG[shape])
    assert not out.wrong, "\n".join(out.wrong.values())
    assert out.turns == len(LONG[shape][0]) and out.same + out.forks + out.respelled == out.turns - 1
    assert out.windows and out.short > out.turns / 2


def test_ids_that_a_window_got_wrong_are_not_gone_on_from():
    """A template that numbers its messages is found out at a doubling: the row ends there, and the next is right."""
    numbers = KEEP.replace("'<' + m.role + '>'", "'<' + m.role + '>' + (loop.index | string) + ':'")
    out = play(numbers, chat(70))
    assert out.wrong and max(out.wrong) < 32 and out.turns == 70 and not out.windows


@pytest.mark.parametrize("text, wrong", [(REWRITES, range(41, 65, 2)), (SLIDES, range(25, 33, 2))])
@pytest.mark.parametrize("shape", ["chat", "tool loop"])
def test_a_template_that_treats_a_window_otherwise_is_found_out_when_the_history_has_doubled(shape, text, wrong):
    """Its turns until then may stand on another beginning than the whole render's, still trained once each; from then
    on every turn is right."""
    out = play(text, *LONG[shape])
    assert sorted(out.wrong) == list(wrong)
    assert not out.windows and out.turns == 70 and out.short
