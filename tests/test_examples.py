"""Rows of tasks, and the agents that need no conversation: boxed answers, a judge, a teacher's prompts, pictures. Then
every example agent on its toy with the real engine: what it is trained for rises."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import asynccontextmanager
from itertools import islice

import openai
import pytest
from conftest import ROOT
from test_agents import TOKENIZER, Model, launched, parse, said

import agents
import rollout
from agents import Task, distill, geo3k, judge, maths
from loopback import Loopback, Sampling, Template, picture
from tools import toy


class Talk:
    """A rollout's context over the real wires: the policy in ``session``, whoever is asked aside in ``others``."""

    def __init__(self, server: Loopback, policy: Model, other: Model):
        self.server, self.models, self.others = server, {}, []
        self.session = self.opened(policy, True)
        self.other, self.split = other, "train"
        self.session_url = server.url(self.session)
        self.base_url = f"{self.session_url}/v1"

    def opened(self, model: Model, fixed: bool):
        session = self.server.open(Sampling(1.0, 1.0, 100, fixed))
        session.generate = model
        return session

    async def chat(self, messages, tools):
        return await self.session.turn(messages, list(tools), "env")

    @asynccontextmanager
    async def aside(self):
        self.others.append(self.opened(self.other, False))
        yield f"{self.server.url(self.others[-1])}/v1"


def play(agent, task: Task, policy: Model, other: Model | None = None, images: bool = False):
    """One rollout: its result and its context. Raises what the agent raises."""

    async def go():
        server = Loopback(Template(TOKENIZER, [toy.END], images), parse, None, "policy", 1024)
        await server.start()
        try:
            ctx = Talk(server, policy, other)
            return await asyncio.wait_for(agent().run(task, ctx), 60), ctx
        finally:
            await server.stop()

    return asyncio.run(go())


# -------------------------------------------------------------------------------------------------------- rows


class Plain(agents.Env):
    """An agent that makes no tasks."""

    async def reset(self, task):
        return agents.opening(task.data)

    async def step(self, action):
        return agents.Result(terminated=True)


def rows_agent(tmp_path, text: str) -> type[agents.AgentRunner]:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return type("Rows", (Plain,), {"data": {"train": str(path), "eval": str(path)}})


def test_rows_of_a_file_are_tasks_whose_names_stay_and_whose_order_is_the_seeds(tmp_path):
    agent = rows_agent(tmp_path, "".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(20)) + "\n")
    first, second = list(agent.tasks("train", 1)), list(agent.tasks("train", 2))
    assert first == list(agent.tasks("train", 1)) != second
    assert sorted(first, key=str) == sorted(second, key=str)
    assert all(task.task_id == f"train-{task.data['prompt']}" for task in first)
    assert [task.data["prompt"] for task in agent.tasks("eval", 3)] == [str(n) for n in range(20)]


@pytest.mark.parametrize(("text", "words"), [
    ('{"prompt": "a"}\n{"prompt": \n', "line 2 is no JSON"), ('["a"]\n', "line 1 is no JSON object"),
])  # fmt: skip
def test_a_row_that_is_none_is_named(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        list(rows_agent(tmp_path, text).tasks("train", 0))


def test_rows_that_are_not_there_are_named_and_so_is_the_flag(tmp_path):
    agent = type("Rows", (Plain,), {"data": {"train": str(tmp_path / "none.jsonl")}})
    with pytest.raises(ValueError, match=r"no rows at .*none\.jsonl"):
        agent.tasks("train", 0)
    with pytest.raises(ValueError, match=r"Rows makes no eval tasks of its own.*--eval_data"):
        agent.tasks("eval", 0)
    with pytest.raises(ValueError, match=r"Plain makes no train tasks of its own.*--data"):
        Plain.tasks("train", 0)


def test_a_node_refuses_an_agent_without_rows_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("INSTAR_SECRET", "s")
    path = tmp_path / "agent.py"
    path.write_text("from test_examples import Plain\n\nclass AgentRunner(Plain):\n    pass\n")
    (tmp_path / "config.json").write_text("{}")
    cfg = rollout.RolloutConfig(model=str(tmp_path), agent=str(path))
    with pytest.raises(ValueError, match="AgentRunner makes no train tasks of its own"):
        rollout.validate(cfg)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "well?"}\n')
    cfg.data = str(tmp_path / "rows.jsonl")
    rollout.validate(cfg)
    assert [task.data for task in rollout.load_agent(cfg).tasks("train", 0)] == [{"prompt": "well?"}]


def test_a_saved_dataset_and_parquet_files_are_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    made.save_to_disk(tmp_path / "saved")
    for index in range(2):
        made.select([index]).to_parquet(tmp_path / f"train-{index}.parquet")
    for path in (tmp_path / "saved", tmp_path / "train-*.parquet"):
        assert [dict(row) for row in agents.read_rows(str(path))] == made.to_list()


def test_without_the_package_a_dataset_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match="pip install datasets"):
        agents.read_rows(str(tmp_path / "a.parquet"))


def test_a_row_opens_with_its_messages_or_its_prompt():
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert agents.opening({"messages": asked}) == agents.opening({"prompt": asked}) == asked
    assert agents.opening({"prompt": "u"}) == [{"role": "user", "content": "u"}]
    with pytest.raises(ValueError, match=r"needs messages or a prompt; this one has \['question'\]"):
        agents.opening({"question": "u"})


def test_another_class_of_a_file_is_named_behind_a_colon():
    assert agents.load(str(ROOT / "agents" / "geo3k.py:Chat")).__name__ == "Chat"
    with pytest.raises(ValueError, match="must export a class Nobody"):
        agents.load(str(ROOT / "agents" / "geo3k.py:Nobody"))


# -------------------------------------------------------------------------------------------------------- math


@pytest.mark.parametrize(("text", "found"), [
    (r"so \boxed{1}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{ 7 }.", "7"), (r"\boxed{7", None),
    ("7", None), ("", None), (r"\boxed{}", ""), (r"\boxed{a}} b", "a"),
])  # fmt: skip
def test_what_is_boxed(text, found):
    assert maths.boxed(text) == found


@pytest.mark.parametrize(("said", "answer", "right"), [
    ("7", "7", True), ("7.0", "7", True), ("1,000", "1000", True), ("3/6", "1/2", True), ("0.5", "1/2", True),
    ("8", "7", False), (None, "7", False), ("", "7", False), ("1/0", "1/0", True), ("x+1", "x+1", True),
])  # fmt: skip
def test_numbers_are_compared_as_numbers(said, answer, right, monkeypatch):
    async def in_child(function, said, answer, time_limit_s):
        assert (said, answer) == ("", "7"), "only what is no number"
        return False

    monkeypatch.setattr(maths, "in_child", in_child)
    assert asyncio.run(maths.right(said, answer)) is right


def test_formulas_are_compared_by_math_verify_in_a_child():
    pytest.importorskip("math_verify")
    assert asyncio.run(maths.right(r"\frac{\sqrt{4}}{4}", r"\frac{1}{2}")) is True
    assert asyncio.run(maths.right("x+2", "x+1")) is False


def test_an_answer_that_is_never_checked_is_wrong_and_a_crash_is_an_error(monkeypatch):
    def failing(error):
        async def in_child(*args, time_limit_s):
            raise error

        monkeypatch.setattr(maths, "in_child", in_child)

    failing(TimeoutError())
    assert asyncio.run(maths.right("x", "y")) is False
    failing(RuntimeError("verify raised"))
    with pytest.raises(RuntimeError):
        asyncio.run(maths.right("x", "y"))


@pytest.mark.parametrize(("reply", "reward"), [(r"3 + 4 = \boxed{7}", 1.0), (r"\boxed{8}", 0.0), ("7", 0.0)])
def test_a_sum_is_one_turn_and_its_answer_is_boxed(reply, reward):
    task = next(task for task in maths.sums("train", 0) if task.task_id == "3+4")
    result, ctx = play(maths.Math, task, Model(said(reply)))
    assert (result.reward, len(ctx.session.calls), result.truncated) == (reward, 1, False)
    assert result.info == {"boxed": float("boxed" in reply)}


def test_the_sums_are_split_once_and_for_all():
    train, held = ({task.task_id for task in maths.sums(split, 0)} for split in ("train", "eval"))
    assert len(train) == 90 and len(held) == 10 and not train & held
    assert [t.task_id for t in maths.sums("train", 0)] != [t.task_id for t in maths.sums("train", 1)]


def test_packages_that_are_missing_are_named_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(maths, "find_spec", lambda name: None)
    monkeypatch.setattr(geo3k, "find_spec", lambda name: None)
    for agent, data, package in ((maths.Math, "rows.jsonl", "math-verify"), (geo3k.Geo3k, "rows.jsonl", "math-verify"),
                                 (maths.Math, "reasoning_gym:chain_sum", "reasoning-gym")):  # fmt: skip
        with pytest.raises(ValueError, match=f"pip install {package}"):
            next(iter(type("A", (agent,), {"data": {"train": data}}).tasks("train", 0)))


def test_puzzles_are_graded_by_their_own_graders():
    pytest.importorskip("reasoning_gym")
    agent = type("A", (maths.Math,), {"data": dict.fromkeys(("train", "eval"), "reasoning_gym:chain_sum")})
    task, *more = islice(agent.tasks("train", 0), 300)
    answer = task.data["entry"]["answer"]
    assert play(agent, task, Model(said(rf"\boxed{{{answer}}}")))[0].reward == 1.0
    assert play(agent, task, Model(said(rf"\boxed{{{int(answer) + 1}}}")))[0].reward < 0.5
    assert len(list(agent.tasks("eval", 0))) == maths.HELD_OUT
    assert not {one.data["prompt"] for one in (task, *more)} & {one.data["prompt"] for one in agent.tasks("eval", 0)}


# ------------------------------------------------------------------------------------------------------- judge

REQUEST = Task("r", {"prompt": "Ask for the red cup."})


@pytest.mark.parametrize(("grade", "reward"), [("yes", 1.0), ("No.", 0.0), ("no, wait: yes", 1.0)])
def test_the_judges_words_are_the_reward_and_never_in_a_row(grade, reward):
    policy, other = Model(said("The red cup, please.")), Model(said(grade))
    result, ctx = play(judge.Judged, REQUEST, policy, other)
    assert result.reward == reward
    assert "Is it polite? The red cup, please." in other.asked[0]
    [row] = ctx.session.rows("r", 0, "t")
    assert "polite" not in TOKENIZER.decode(row.token_ids) and len(ctx.session.calls) == 1
    [call] = ctx.others[0].calls
    assert (call.temperature, call.max_tokens) == (0.0, 64), "its own sampling parameters"


def test_a_judge_that_gives_no_grade_fails_the_rollout():
    with pytest.raises(RuntimeError, match="no grade, one of yes, no: 'perhaps'"):
        play(judge.Judged, REQUEST, Model(said("please")), Model(said("perhaps")))


def test_a_judge_that_does_not_answer_fails_the_rollout(monkeypatch):
    monkeypatch.setenv("INSTAR_JUDGE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(openai.APIConnectionError):
        play(judge.Judged, REQUEST, Model(said("please")), Model(said("yes")))


def test_a_reply_that_was_cut_is_not_judged():
    result, ctx = play(judge.Judged, REQUEST, Model(said("x" * 300)), Model(said("yes")))
    assert result.truncated and not ctx.others


def test_any_address_can_judge(monkeypatch):
    """Here the judge is a session of another server."""

    async def go():
        server = Loopback(Template(TOKENIZER, [toy.END]), parse, Model(said("yes")), "judge", 1024)
        await server.start()
        try:
            url = f"{server.url(server.open(Sampling(1.0, 1.0, 100, False)))}/v1"
            return await judge.grade(url, "judge", "please")
        finally:
            await server.stop()

    assert asyncio.run(go()) == 1.0


# ------------------------------------------------------------------------------------------------------ distil


def test_a_teachers_prompts_are_one_turn_with_tools():
    [task] = islice(distill.Distill.tasks("train", 0), 1)
    call = '<tool_call>{{"name": "add", "arguments": {{"a": {}, "b": {}}}}}</tool_call>'
    numbers = task.task_id.split("+")
    model = Model(said(call.format(*numbers)))
    result, ctx = play(distill.Distill, task, model)
    assert (result.reward, len(ctx.session.calls)) == (1.0, 1) and "add(a, b)" in model.asked[0]
    assert play(distill.Distill, task, Model(said(call.format(1, 1))))[0].reward == 0.0
    assert play(distill.Distill, task, Model(said("I guess 7")))[0].reward == 0.0


def test_a_teachers_prompts_may_be_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Well?"}\n')
    agent = type("A", (distill.Distill,), {"data": {"train": str(path)}})
    [task] = agent.tasks("train", 0)
    assert play(agent, task, Model(said("hm")))[0].reward == 0.0


# ---------------------------------------------------------------------------------------------------- pictures


def shape(sides: int) -> Task:
    return next(task for task in geo3k.shapes("train", 0) if task.data["answer"] == str(sides))


@pytest.mark.parametrize(("replies", "reward", "calls"), [
    ([r"\boxed{4}"], 1.0, 1), ([r"\boxed{3}", r"\boxed{4}"], 0.5, 2), (["four", "4"], 0.0, 2),
])  # fmt: skip
@pytest.mark.parametrize("agent", [geo3k.Geo3k, geo3k.Chat])
def test_a_second_try_is_worth_half_by_either_loop(agent, replies, reward, calls):
    result, ctx = play(agent, shape(4), Model(said(*replies)), images=True)
    assert (result.reward, result.truncated, len(ctx.session.calls)) == (reward, False, calls)
    [row] = ctx.session.rows("r", 0, "t")
    [image] = row.images
    assert picture(image).size == (56, 56)


def test_shapes_differ_and_the_held_out_ones_stay():
    held = [task.data["images"][0].tobytes() for task in geo3k.shapes("eval", 1)]
    assert held == [task.data["images"][0].tobytes() for task in geo3k.shapes("eval", 2)]
    assert len(set(held)) == geo3k.EVAL_TASKS
    seen = {task.data["images"][0].tobytes() for task in islice(geo3k.shapes("train", 1), 200)}
    assert not seen & set(held)
    [three, six] = (geo3k.draw(sides, random.Random(0)) for sides in (3, 6))
    assert three.tobytes() != six.tobytes()


def test_a_picture_stands_where_its_problem_says():
    row = {"problem": "In <image>, and <image>: x?", "images": [geo3k.draw(3, random.Random(n)) for n in (0, 1)]}
    kinds = [part.get("text", "image") for part in geo3k.question(row, " Box it.")["content"]]
    assert kinds == ["In ", "image", ", and ", "image", ": x?", " Box it."]
    bare = geo3k.question(row | {"problem": "x?"})
    assert [part.get("text", "image") for part in bare["content"]] == ["image", "image", "x?"]


def test_rows_of_the_data_set_are_played_as_they_are(tmp_path):
    """A local copy of geometry3k: parquet files whose pictures are encoded."""
    datasets = pytest.importorskip("datasets")
    row = {"images": [geo3k.draw(4, random.Random(0))], "problem": "<image>Find x.", "answer": "4"}
    kinds = datasets.Features({"images": [datasets.Image()], "problem": datasets.Value("string"),
                               "answer": datasets.Value("string")})  # fmt: skip
    datasets.Dataset.from_list([row], features=kinds).to_parquet(tmp_path / "train-0.parquet")
    agent = type("A", (geo3k.Geo3k,), {"data": {"train": str(tmp_path / "train-*.parquet")}})
    [task] = agent.tasks("train", 0)
    model = Model(said(r"\boxed{4.0}"))
    result, ctx = play(agent, task, model, images=True)
    assert result.reward == 1.0 and "Find x. Put your answer in" in model.asked[0]
    [[image]] = [row.images for row in ctx.session.rows("r", 0, "t")]
    assert picture(image).tobytes() == row["images"][0].tobytes()


# ------------------------------------------------------------------------------------------------ the real engine


@pytest.mark.engine
@pytest.mark.parametrize(("recipe", "steps", "rise"), [
    ("maths", 24, 0.15), ("judge", 14, 0.15), ("coder", 12, 0.15), ("shapes", 14, 0.15),
])  # fmt: skip
def test_the_reward_rises_with_the_real_engine(recipe, steps, rise):
    metrics, ledger, summary = launched(recipe, RECIPE=f"toy_{recipe}", STEPS=str(steps))
    reward = [line["reward"] for line in metrics]
    print(recipe, [round(value, 2) for value in reward], summary["seconds"])
    assert summary["ledger_balanced"] is True and summary["probe_max_abs_dlogp"] < 1e-4
    assert all(line["mismatch/max"] < 1e-4 for line in metrics), "with images, too"
    assert all(line["identity/segments_per_rollout"] == 1 for line in metrics), "what a judge says is no row"
    assert (sum(line["dropped"].get("aside", 0) for line in ledger) > 0) == (recipe == "judge")
    assert sum(reward[-4:]) / 4 > sum(reward[:4]) / 4 + rise, reward
