"""The example agents that converse: played against a scripted model over the real wires, then trained for some steps
with the real engine.

The scripted model reads the prompt it is given and says what the toy would: the tokenizer and the template are the
toy's own, so every prompt is what the toy would see.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import agent_graders
import anthropic
import numpy as np
import openai
import pytest
from conftest import ROOT

import agents
from agents import calculator, children
from agents.external import External
from loopback import Loopback, Sampling, Template, identity_meters
from tools import toy

TOKENIZER = toy.tokenizer()
STYLES = ("openai_tools", "anthropic_tools", "external", "compact", "team")
SDK = tuple(style for style in STYLES if style != "external")
PAIR = agents.Task("12+345", {"a": 12, "b": 345})
FOUR = agents.Task("12+345+67+1000", {"numbers": [12, 345, 67, 1000]})


# --------------------------------------------------------------------------------------------- the scripted model


def call_of(a: int, b: int, name: str = "add") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def good(prompt: str) -> str:
    """Calls the tool, and repeats what it answered."""
    last = prompt.rpartition("<|im_start|>user\n")[2]
    answered = re.findall(r"<tool_response>(.*?)</tool_response>", last)
    return answered[-1] if answered else call_of(*map(int, re.findall(r"\d+", last)))


def said(*replies: str):
    """A model that says these things one after the other, the last one for ever."""
    left = list(replies)
    return lambda prompt: left.pop(0) if len(left) > 1 else left[0]


class Model:
    """``generate`` of a model whose replies are a function of the prompt's text. ``asked`` are its prompts."""

    def __init__(self, reply, ends: bool = True):
        self.reply, self.ends, self.asked = reply, ends, []

    async def __call__(self, call):
        prompt = TOKENIZER.decode(call.prompt_ids)
        self.asked.append(prompt)
        await asyncio.sleep(0.01)
        ids = TOKENIZER.encode(self.reply(prompt), add_special_tokens=False) + [toy.END] * self.ends
        call.token_ids += ids[: call.max_tokens]
        call.logprobs += [-0.5] * len(call.token_ids)
        call.versions += [0] * len(call.token_ids)
        call.finish_reason = "stop" if call.token_ids[-1] == toy.END else "length"


def parse(text: str, tools: list[dict] | None) -> dict:
    """Hermes calls, as vLLM's parser reads them: text in which one does not parse has none."""
    try:
        calls = [json.loads(item) for item in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S)] if tools else []
    except ValueError:
        calls = []
    message = {"role": "assistant", "content": text}
    if calls:
        message["content"] = text[: text.index("<tool_call>")] or None
        message["tool_calls"] = [
            {"id": f"call_{os.urandom(4).hex()}", "type": "function",
             "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
            for call in calls
        ]  # fmt: skip
    return message


def runner(style: str, **constants) -> type[agents.AgentRunner]:
    """The class as a rollout node loads it; ``constants`` of its file may be set to something else."""
    cls = agents.load(str(ROOT / "agents" / f"{style}.py"))
    vars(sys.modules[cls.__module__]).update(constants)
    return cls


def task_of(style: str) -> agents.Task:
    return FOUR if style in ("compact", "team") else PAIR


def play(style: str, model: Model, context: int = 1024, max_tokens: int = 200, **constants):
    """One rollout: its result, its session, its rows. What it sampled is in its rows, once."""

    async def go():
        server = Loopback(Template(TOKENIZER, [toy.END]), parse, model, "policy", context)
        await server.start()
        session = server.open(Sampling(1.0, 1.0, max_tokens, True))
        url = server.url(session)
        try:
            ctx = SimpleNamespace(session_url=url, base_url=f"{url}/v1", split="train")
            return await asyncio.wait_for(runner(style, **constants)().run(task_of(style), ctx), 120), session
        finally:
            await server.stop()

    result, session = asyncio.run(go())
    rows = session.rows("r", 0, "t")
    seen = Counter()
    for row in rows:
        for index in set(row.call[row.sampled].tolist()):
            where = np.flatnonzero(row.call == index)
            assert row.token_ids[: where[0]].tolist() == session.calls[index].prompt_ids
            assert row.token_ids[where].tolist() == session.calls[index].token_ids
            seen[index] += 1
    assert seen == {call.index: 1 for call in session.calls}
    assert identity_meters([session])["identity/echo_mismatch"] == 0
    return result, session, rows


# --------------------------------------------------------------------------------------------------- every style


@pytest.mark.parametrize(("style", "calls", "rows"), [
    ("openai_tools", 2, 1), ("anthropic_tools", 2, 1), ("external", 2, 1), ("compact", 6, 3), ("team", 6, 3),
])  # fmt: skip
def test_a_model_that_uses_the_tool_is_right(style, calls, rows):
    result, session, made = play(style, model := Model(good))
    assert (result.reward, result.truncated) == (1.0, False)
    assert (len(model.asked), len(made)) == (calls, rows)
    wire = "anthropic.messages" if style in ("anthropic_tools", "compact") else "openai.chat"
    assert {call.wire for call in session.calls} == {wire}


@pytest.mark.parametrize("style", SDK)
def test_a_model_that_guesses_is_wrong_and_not_truncated(style):
    result, _, _ = play(style, Model(said("I guess 7")))
    assert (result.reward, result.truncated) == (0.0, False)


@pytest.mark.parametrize("style", STYLES)
def test_a_model_that_says_no_number_is_wrong_and_not_truncated(style):
    result, _, _ = play(style, Model(said("")))
    assert (result.reward, result.truncated) == (0.0, False)


@pytest.mark.parametrize("style", STYLES)
def test_a_model_that_only_ever_calls_is_cut_at_the_turn_limit(style):
    result, session, _ = play(style, Model(said(call_of(1, 2))))
    assert (result.reward, result.truncated) == (0.0, True)
    assert len(session.calls) == (8 if style == "team" else 4)


@pytest.mark.parametrize("style", STYLES)
def test_a_reply_cut_by_length_truncates(style):
    """OpenAI's clients ask for no cap and get the recipe's; Anthropic's must name one, and the context cuts them."""
    result, session, _ = play(style, Model(said("1" * 5000), ends=False), context=300)
    assert (result.reward, result.truncated) == (0.0, True)
    capped = style in ("openai_tools", "team", "external")
    assert all(len(call.token_ids) == 200 or not capped for call in session.calls)


@pytest.mark.parametrize(("style", "context"), [*((style, 40) for style in SDK), *((style, 90) for style in STYLES)])
def test_a_context_that_overflows_truncates(style, context):
    """In the first prompt, and in the one after the tool's answer."""
    result, session, _ = play(style, Model(good), context=context, max_tokens=1000)
    assert (result.reward, result.truncated) == (0.0, True)
    assert len(session.calls) == (0 if context == 40 else 2 if style == "team" else 1)


@pytest.mark.parametrize(("style", "call"), [
    *((style, '<tool_call>{"name": "add", "arguments": {"a": 5}}</tool_call>') for style in SDK),
    *((style, call_of(12, 345, "multiply")) for style in STYLES),
])  # fmt: skip
def test_a_call_the_tool_cannot_make_sense_of_is_answered_and_the_rollout_goes_on(style, call):
    model = Model(said(call, "357"))
    result, _, _ = play(style, model)
    assert result.reward >= (0 if style == "team" else 1 / 3) and not result.truncated
    assert any(prompt.count("<tool_response>error</tool_response>") == 1 for prompt in model.asked)


@pytest.mark.parametrize("style", SDK)
def test_calls_of_one_turn_are_all_answered(style):
    model = Model(said(call_of(1, 2) + call_of(30, 40), "357"))
    play(style, model)
    both = "<tool_response>3</tool_response><tool_response>70</tool_response>"
    assert any(both in prompt for prompt in model.asked)


@pytest.mark.parametrize(("style", "bad", "error"), [
    ("openai_tools", "ADD", openai.BadRequestError), ("anthropic_tools", "TOOL", anthropic.BadRequestError),
])  # fmt: skip
def test_another_bad_request_is_a_fault_of_the_agent_and_not_a_truncated_rollout(style, bad, error):
    with pytest.raises(error, match="tool"):
        play(style, Model(good), **{bad: {"type": "nonsense"}})


@pytest.mark.parametrize("style", STYLES)
def test_tasks_are_stable_and_the_splits_disjoint(style):
    cls = runner(style)
    train, held = list(islice(cls.tasks("train", 3), 50)), list(cls.tasks("eval", 3))
    assert train == list(islice(cls.tasks("train", 3), 50)) != list(islice(cls.tasks("train", 4), 50))
    assert held == list(cls.tasks("eval", 4)) and len({task.task_id for task in held}) > 100
    pairs = {tuple(task.data.get("numbers", list(task.data.values()))[:2]) for task in train}
    assert not any(calculator.held_out(*pair) for pair in pairs)


@pytest.mark.parametrize(("text", "number"), [
    (None, None), ("", None), ("I guess", None), ("12 + 3 = 15.", 15), ("-4", -4), ("7" * 5000, None), ("0" * 99, 0),
])  # fmt: skip
def test_the_last_number_of_an_answer(text, number):
    assert calculator.last_number(text) == number


@pytest.mark.parametrize("arguments", [
    "", "[1]", "null", '{"a": 1}', '{"a": "x", "b": 1}', '{"a": null, "b": 1}', '{"a": 1e999, "b": 1}', "[" * 10**5,
    {"INVALID_JSON": "{"}, '{"a": ' + "1" * 5000 + ', "b": 1}',
], ids=str)  # fmt: skip
def test_no_arguments_break_the_tool(arguments):
    assert calculator.call_tool("add", arguments) == "error"
    assert calculator.call_tool("add", '{"a": 1, "b": "2"}') == "3"


# ------------------------------------------------------------------------------------------ sub-agents, compaction


def test_sub_agents_are_asked_at_the_same_time_and_the_parent_after_them():
    running, most = 0, []

    class Slow(Model):
        async def __call__(self, call):
            nonlocal running
            running += 1
            most.append(running)
            await super().__call__(call)
            running -= 1

    _, session, rows = play("team", Slow(good))
    assert most[:2] == [1, 2] and most[-2:] == [1, 1]
    asked = [re.findall(r"What is \d+ \+ \d+\?", TOKENIZER.decode(row.token_ids)) for row in rows]
    assert sorted(asked) == [["What is 12 + 345?"], ["What is 357 + 1067?"], ["What is 67 + 1000?"]]
    assert {branch.cause for branch in session.branches} <= {"first", "new"}


def test_one_sub_agents_failure_keeps_what_the_other_earned():
    result, _, rows = play("team", Model(lambda prompt: "no idea" if "1000" in prompt else good(prompt)))
    assert (result.reward, result.truncated, len(rows)) == (pytest.approx(1 / 3), False, 2)


def test_a_compacted_history_is_gone_and_the_summary_is_trained():
    _, session, rows = play("compact", model := Model(good))
    assert [re.findall(r"What is (\d+) \+", prompt) for prompt in model.asked] == [
        ["12"], ["12"], ["357"], ["357"], ["424"], ["424"]
    ]  # fmt: skip
    for row, total in zip(rows, (357, 424, 1424), strict=True):
        assert TOKENIZER.decode(row.token_ids[row.sampled]).endswith(f"</tool_call><|im_end|>{total}<|im_end|>")
    assert [branch.cause for branch in session.branches] == ["first", "new", "new"]


def test_a_history_goes_on_until_it_is_too_long():
    """Guesses call no tool: a history of one of them is below the limit, of two it is above."""
    _, _, rows = play("compact", model := Model(said("I guess 7")))
    assert len(rows) == 2
    assert [prompt.count("What is") for prompt in model.asked] == [1, 2, 1]


def test_a_history_below_the_limit_stays_one_row():
    result, _, rows = play("compact", Model(good), LIMIT=1000)
    assert (result.reward, len(rows)) == (1.0, 1)


def test_a_wrong_summary_costs_all_that_rests_on_it():
    result, _, _ = play(
        "compact", Model(said(call_of(12, 345), "357", call_of(357, 67), "425", call_of(425, 1000), "1425"))
    )
    assert (result.reward, result.truncated) == (pytest.approx(1 / 3), False)


# --------------------------------------------------------------------------------------------- external programs

NOWHERE = SimpleNamespace(session_url="http://127.0.0.1:9/s/x", base_url="http://127.0.0.1:9/s/x/v1", split="train")


def external(*command: str, data: dict | None = None, cancel_when=None, **limits) -> agents.Result:
    """One rollout of a Python program, or of ``command``, without a model."""
    command = command if len(command) > 1 else (sys.executable, "-c", *command)
    cls = type("Program", (External,), {"command": command} | limits)

    async def go():
        rollout = asyncio.create_task(cls().run(agents.Task("t", data or {"n": 1}), NOWHERE))
        if cancel_when is not None:
            while not cancel_when():
                await asyncio.sleep(0.002)
            rollout.cancel()
        return await asyncio.wait_for(rollout, 120)

    return asyncio.run(go())


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def gone(folder: Path) -> bool:
    """Whether the processes that named themselves in ``folder`` are dead, within a moment."""
    (file,) = folder.iterdir()
    pids = [int(pid) for pid in file.name.split("-")]
    assert len(pids) == 2, "the program and its child"
    for _ in range(1000):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.02)
    return False


def parent_of_a_sleeper(folder: Path, then: str) -> tuple[str, ...]:
    """A program that starts a child, which inherits its output, and leaves both pids as one file's name."""
    return "sh", "-c", f"sleep 1000 & touch {folder}/$$-$!; {then}"


@pytest.mark.parametrize(("status", "reward"), [(0, 1.0), (1, 0.0)])
def test_an_exit_status_is_a_reward(status, reward):
    assert external(f"raise SystemExit({status})") == agents.Result(reward=reward)


@pytest.mark.parametrize(("program", "words"), [
    ("import sys; print('disk full', file=sys.stderr); sys.exit(2)", "status 2: disk full"),
    ("import os; os.kill(os.getpid(), 11)", "status -11: nothing on standard error"),
])  # fmt: skip
def test_another_status_is_a_crash_and_no_reward(program, words):
    with pytest.raises(RuntimeError, match=words):
        external(program)


@pytest.mark.parametrize(("lines", "expected"), [
    (['{"reward": 0.25}'], (0.25, False, {})),
    (['{"reward": 1, "truncated": true, "turns": 3, "note": "x", "more": [1]}'], (1, True, {"turns": 3})),
    (['{"reward": 0.1}', '{"reward": 0.5}', "", "bye {", "[1]", '{"turns": 4}', '{"reward": null}', "[" * 10**5],
     (0.5, False, {})),
    (["not json"], (0.0, False, {})),
    (['{"reward": 0.75, "note": "one\u2028line"}'], (0.75, False, {})),
])  # fmt: skip
def test_the_last_line_with_a_reward_counts(lines, expected):
    result = external(f"import sys; sys.stdout.buffer.write({chr(10).join(lines).encode()!r}); sys.exit(1)")
    assert (result.reward, result.truncated, result.info) == expected


def test_output_that_is_no_text_is_no_result_and_no_crash():
    assert (
        external("import os; os.write(1, bytes(range(256)) * 100); os.write(1, b'\\n{\"reward\": 0.5}')").reward == 0.5
    )


def test_the_task_is_on_standard_input_which_need_not_be_read():
    data = {"n": 3, "long": "x" * 10**6}
    assert external("import json, sys; sys.exit(json.load(sys.stdin)['n'] != 3)", data=data).reward == 1
    assert external("import os; os.close(0)", data=data).reward == 1


def test_the_environment_has_the_addresses_and_not_our_secret(monkeypatch):
    monkeypatch.setenv("INSTAR_SECRET", "never to be seen")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-real")
    external(
        "import os, subprocess\n"
        "everything = str(os.environ) + subprocess.run(['env'], capture_output=True, text=True).stdout\n"
        "assert 'never to be seen' not in everything and 'INSTAR_' not in everything and 'sk-real' not in everything\n"
        f"assert os.environ['OPENAI_BASE_URL'] == {NOWHERE.base_url!r}\n"
        f"assert os.environ['ANTHROPIC_BASE_URL'] == {NOWHERE.session_url!r}\n"
        "raise SystemExit(0)"
    )


def test_a_program_that_sleeps_for_ever_is_killed_with_its_children_at_its_limit(tmp_path):
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        external(*parent_of_a_sleeper(tmp_path, "wait"), time_limit_s=2.0)
    assert time.monotonic() - began < 60 and gone(tmp_path)


def test_a_cancelled_rollout_kills_its_program_with_its_children(tmp_path):
    with pytest.raises(asyncio.CancelledError):
        external(*parent_of_a_sleeper(tmp_path, "wait"), cancel_when=lambda: any(tmp_path.iterdir()))
    assert gone(tmp_path)


def test_a_rollout_that_is_cancelled_while_its_program_starts_leaves_nothing_running(tmp_path):
    for ticks in range(6):
        folder = tmp_path / str(ticks)
        folder.mkdir()
        left = iter(range(ticks))
        with pytest.raises(asyncio.CancelledError):
            external(*parent_of_a_sleeper(folder, "wait"), cancel_when=lambda left=left: next(left, None) is None)
        time.sleep(0.1)
        assert not list(folder.iterdir()) or gone(folder)


def test_a_child_left_behind_keeps_nobody_waiting(tmp_path):
    began = time.monotonic()
    assert external(*parent_of_a_sleeper(tmp_path, "echo '{\"reward\": 0.5}'")).reward == 0.5
    assert time.monotonic() - began < 60 and gone(tmp_path)


@pytest.mark.parametrize("then", ["yes", "yes >&2"])
def test_endless_output_ends_the_program(then, tmp_path):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="wrote more than 1048576 bytes"):
        external(*parent_of_a_sleeper(tmp_path, then))
    assert time.monotonic() - began < 60 and gone(tmp_path)


def test_a_traceback_is_a_crash_and_not_a_bad_result():
    with pytest.raises(RuntimeError, match="ended with status 1: ZeroDivisionError"):
        external(sys.executable, "-c", "1 / 0")


def test_a_program_that_does_not_exist_is_a_crash():
    cls = type("Missing", (External,), {"command": ("/no/such/program",)})
    with pytest.raises(FileNotFoundError):
        asyncio.run(cls().run(PAIR, NOWHERE))


def test_the_example_program_is_an_ordinary_one():
    source = (ROOT / "agents" / "external_program.py").read_text()
    modules = set(re.findall(r"^(?:import|from) (\w+)", source, re.M))
    assert modules == {"json", "re", "sys", "openai"} and "OpenAI()" in source


# -------------------------------------------------------------------------------------------- code in a child process


@pytest.fixture(autouse=True)
def own_children(monkeypatch):
    """A semaphore belongs to the event loop in which somebody first waited for it."""
    monkeypatch.setattr(children, "CHILDREN", asyncio.Semaphore(2))


def graded(function, *args, limit: float = 60.0):
    return asyncio.run(agents.in_child(function, *args, time_limit_s=limit))


def test_a_function_runs_in_a_child_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("INSTAR_SECRET", "s")
    assert graded(agent_graders.add, 2, 3) == 5
    assert graded(agent_graders.Held.inside, 7) == {"a": [7, None]}
    assert graded(calculator.last_number, "so it is 12") == 12
    assert graded(agent_graders.secrets) == [], "neither the node's secrets nor its libraries"
    assert len(graded(agent_graders.much)) == 500_000
    by_path = children.module_of(str(ROOT / "tests" / "agent_graders.py"))
    assert graded(by_path.add, -1, 1) == 0, "an agent's own file is loaded by its path"


@pytest.mark.parametrize(("function", "words"), [
    (agent_graders.fails, r"^fails raised ValueError: no such problem$"),
    (agent_graders.crashes, r"crashes ended with status -6"),
])  # fmt: skip
def test_a_child_that_fails_is_an_error_with_its_last_words(function, words):
    with pytest.raises(RuntimeError, match=words):
        graded(function)


GRADER = """
import functools, os, subprocess, sys

def quits():
    os._exit(0)

def notes():
    print("what it prints is not its error")
    error = KeyError("k")
    error.add_note("a note")
    raise error

def exits():
    sys.exit("so it says")

@functools.lru_cache
def cached(a):
    return a

def path():
    return os.environ.get("PYTHONPATH")

class Held:
    def bound(self, a=1):
        return a
"""


def grader(folder: Path, name: str = "grader"):
    """The module that a user's file makes."""
    (folder / f"{name}.py").write_text(GRADER)
    return children.module_of(str(folder / f"{name}.py"))


def test_a_child_that_ends_without_a_result_says_so_and_an_error_is_told_by_type(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    module = grader(tmp_path)
    for function, words in (
        (module.quits, "^quits ended with status 0: nothing on standard error$"),
        (module.notes, "^notes raised KeyError: 'k'$"),
        (module.exits, "^exits ended with status 1: so it says$"),
    ):
        with pytest.raises(RuntimeError, match=words):
            graded(function)


def test_a_child_finds_decorated_functions_and_packages_whatever_stands_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/as/it/was")
    (tmp_path / "agents.py").write_text("raise SystemExit('not these')")
    module = grader(tmp_path)
    assert graded(module.cached, 3) == 3
    assert graded(module.path) == "/as/it/was", "programs of the grader's own keep their own libraries"
    assert graded(json.dumps, [1]) == "[1]"
    assert graded(ElementTree.iselement, 1) is False, "its module imports by relative names"


def test_a_function_that_cannot_be_found_again_is_refused(tmp_path):
    bound = grader(tmp_path).Held().bound
    for function in (lambda: 1, said("a"), len, partial(agent_graders.add, 1), bound):
        with pytest.raises(ValueError, match="takes a function at the top of a file"):
            graded(function)


def test_a_child_that_never_returns_is_killed_at_its_deadline_and_what_it_started_too(tmp_path, monkeypatch):
    """The one that waits for its place has all of its own time."""
    monkeypatch.setattr(children, "CHILDREN", asyncio.Semaphore(1))

    async def go():
        stuck = agents.in_child(agent_graders.never, str(tmp_path), time_limit_s=5)
        return await asyncio.gather(
            stuck, agents.in_child(agent_graders.add, 1, 1, time_limit_s=5), return_exceptions=True
        )

    stuck, added = asyncio.run(go())
    assert isinstance(stuck, TimeoutError) and added == 2
    assert gone(tmp_path)


def test_a_program_never_sees_our_secrets_even_if_asked_to():
    out, _, status = asyncio.run(agents.run_program(["env"], b"", 60, {"INSTAR_SECRET": "s", "SHOWN": "1"}))
    assert status == 0 and b"SHOWN=1" in out and b"INSTAR_" not in out


def test_a_cancelled_caller_leaves_no_child(tmp_path):
    async def go():
        grading = asyncio.create_task(agents.in_child(agent_graders.never, str(tmp_path), time_limit_s=60))
        while not any(tmp_path.iterdir()):
            await asyncio.sleep(0.01)
        grading.cancel()
        await asyncio.wait({grading})

    asyncio.run(go())
    assert gone(tmp_path)


def test_children_leave_the_event_loop_alone_and_are_so_many_at_once_and_no_more():
    """Six of them, two at a time; meanwhile a sleeper is woken on time, or nearly: the cores are busy."""

    async def go():
        late = []

        async def sleeper():
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.05)
                late.append(time.monotonic() - began - 0.05)

        task = asyncio.create_task(sleeper())
        spans = await asyncio.gather(*(agents.in_child(agent_graders.burns, 0.5, time_limit_s=60) for _ in range(6)))
        task.cancel()
        return late, spans

    late, spans = asyncio.run(go())
    for began, _ in spans:
        assert sum(one <= began < ended for one, ended in spans) <= 2
    assert sorted(late)[len(late) // 2] < 0.25


# ------------------------------------------------------------------------------------------------ the real engine


def launched(run: str, **variables: str) -> tuple[list[dict], list[dict], dict]:
    """Metrics, ledger and summary of a run of the launcher, whose folder is then removed."""
    name = f"test-{os.getpid()}-{run}"
    folder = ROOT / "runs" / name
    launcher = subprocess.Popen(["bash", "run_2x8.sh"], cwd=ROOT, env=os.environ | variables | {"RUN": name}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    try:
        out, _ = launcher.communicate(timeout=1200)  # a slow machine builds the toy in five minutes
        logs = "".join(f"\n{log}\n{log.read_text()[-6000:]}" for log in folder.glob("*.log"))
        assert launcher.returncode == 0, out + logs
        metrics, ledger = (
            [json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines()]
            for file in ("metrics", "ledger")
        )
        return metrics, ledger, json.loads((folder / "summary.json").read_text())
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
            launcher.communicate(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def trained(agent: str, steps: int, groups: int = 8) -> list[dict]:
    """The metrics of some steps that the launcher trained ``agent`` for, by groups of four."""
    metrics, ledger, summary = launched(
        Path(agent).stem, TEST_GROUPS=str(groups), AGENT=agent, RECIPE="../tests/agents_recipe", STEPS=str(steps)
    )
    print(agent, [round(line["reward"], 3) for line in metrics], summary["seconds"])
    assert summary["ledger_balanced"] is True and summary["probe_max_abs_dlogp"] < 1e-4
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    for line in metrics:
        assert line["mismatch/max"] < 1e-4 and line["gate/lag_max"] == 0
        assert line["identity/echo_mismatch"] == line["identity/turns_template"] == 0
    assert all(line["trained"] > 0 for line in ledger[:-1])
    return metrics


@pytest.mark.engine
@pytest.mark.parametrize(("style", "steps", "rise"), [
    ("calculator", 12, 0.15), ("external", 10, 0.05), ("compact", 18, 0.03), ("team", 10, 0.15),
])  # fmt: skip
def test_the_reward_rises_with_the_real_engine(style, steps, rise, monkeypatch):
    """The two loops over the SDKs are those of compact and team."""
    monkeypatch.setenv("TEST_LR", "1e-3" if style == "team" else "4e-4")
    groups = 4 if style == "external" else 8  # each of its rollouts starts a Python and imports the SDK: 1 s of a core
    metrics = trained(f"agents/{style}.py", steps, groups)
    for line in metrics:
        assert line["rollout/status/ok"] + line.get("rollout/status/truncated", 0) == 4 * groups
        # A row for each history; a row for each of two or three conversations.
        least, most = {"compact": (1.0, 3.0), "team": (2.0, 3.0)}.get(style, (1.0, 1.0))
        assert least <= line["identity/segments_per_rollout"] <= most
        assert style != "compact" or line["identity/segments_per_rollout"] > 1
    reward = [line["reward"] for line in metrics]
    print(style, [round(value, 2) for value in reward])
    assert sum(reward[-4:]) / 4 > sum(reward[:3]) / 3 + rise, reward


@pytest.mark.engine
def test_every_client_trains_with_the_real_engine():
    """Both SDKs, blocking and not, streamed and not, over all three APIs, and an agent library: a row a rollout."""
    metrics = trained("tests/agent_clients.py", 3)
    for line in metrics:
        assert line["rollout/status/ok"] + line.get("rollout/status/truncated", 0) == 32
        assert line["identity/segments_per_rollout"] == 1 and line["identity/retries_joined"] == 0
