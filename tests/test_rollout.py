"""The scheduler's bound, the statuses of rollouts, the router's versions: with engines and agents that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

import agents
import rollout
from loopback import Call, Row, Sampling, Session, Template
from rollout import EngineFailure, Group, Ledger, Player, Rollout, Router, Scheduler
from tools import toy

TRAIN = Sampling(1.0, 1.0, 8, fixed=True)


def config(**changes) -> rollout.RolloutConfig:
    return rollout.RolloutConfig(model="m", agent="tests/agent_turns.py", group_size=2, groups_per_step=3, **changes)


def row(rollout_id: str, versions: list[int]) -> Row:
    count = len(versions)
    return Row(rollout_id, rollout_id, 0, "t", np.arange(count, dtype=np.int32), np.ones(count, bool),
               np.zeros(count, np.float32), np.array(versions, np.int32), np.zeros(count, np.int32),
               np.zeros((count, 0, 0), np.uint8), np.zeros(count, bool), 1.0)  # fmt: skip


def ended(rollout_id: str, versions: list[int], status: str = "ok") -> Rollout:
    rows = [row(rollout_id, versions)] if status == "ok" else []
    return Rollout(rollout_id, "t", status, 1.0, [1.0], rows, len(versions) if rows else 0, None, {}, 0.1)


# ------------------------------------------------------------------------------------------------ scheduler


class InstantPlayer:
    """Rollouts that take as long as a random number says, stamped with the version they end at."""

    def __init__(self, router, rng: random.Random):
        self.router, self.rng, self.ended, self.live, self.statuses = router, rng, {}, set(), Counter()
        self.agent = SimpleNamespace(tasks=lambda split, seed: (agents.Task(str(n), {}) for n in range(5)))

    async def play(self, task, rollout_id, group_id, sampling, split):
        started = self.router.version
        for _ in range(self.rng.choice([0, 1, 1, 2, 9])):
            await asyncio.sleep(0)
        return ended(rollout_id, [started, self.router.version])

    def release(self, rollouts):
        return rollouts


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_and_no_consumed_token_lags_more(max_lag, seed):
    """submitted <= (max_lag + 1 + version) * groups_per_step at every moment; lag at consumption <= max_lag."""

    async def scenario():
        router = SimpleNamespace(version=0, fit={0})
        scheduler = Scheduler(config(max_lag=max_lag), InstantPlayer(router, random.Random(seed)), router, Ledger())
        loop = asyncio.create_task(scheduler.run())
        for _ in range(12):
            for _ in range(200):
                await asyncio.sleep(0)
                assert scheduler.submitted <= (max_lag + 1 + router.version) * 3
                if (batch := scheduler.collect()) is not None:
                    break
            assert batch is not None, "the scheduler starved the trainer"
            for group in batch:
                assert all(router.version - rollout.oldest <= max_lag for rollout in group.rollouts if rollout.rows)
                if max_lag == 0:
                    assert {int(v) for r in group.rollouts for w in r.rows for v in w.versions} == {router.version}
            router.version += 1
            scheduler.changed.set()
        loop.cancel()

    asyncio.run(scenario())


def scheduler_with(groups: list[Group], version: int, max_lag: int) -> Scheduler:
    router = SimpleNamespace(version=version, fit={0})
    scheduler = Scheduler(
        config(max_lag=max_lag), SimpleNamespace(ended={}, live=set(), statuses=Counter()), router, Ledger()
    )
    for group in groups:
        end(scheduler, group)
    scheduler.started = len(groups)
    return scheduler


def end(scheduler: Scheduler, group: Group) -> None:
    """A group's rollouts have ended."""
    scheduler.ready.append(group)
    scheduler.open[group.group_id] = None


def test_a_stale_rollout_is_dropped_counted_and_a_group_of_them_replaced():
    """Version 5, limit 1: a token of version 3 is too old even beside fresh ones; the group no longer counts."""
    stale = Group(0, [ended("0-0", [3, 5]), ended("0-1", [3])])
    mixed = Group(1, [ended("1-0", [3, 4]), ended("1-1", [4, 5])])
    scheduler = scheduler_with([stale, mixed, Group(2, [ended("2-0", [5])])], version=5, max_lag=1)
    assert scheduler.collect() is None
    assert [group.group_id for group in scheduler.ready] == [1, 2]
    assert scheduler.submitted == 2
    assert scheduler.ledger.dropped == Counter(stale=2 + 1 + 2)
    assert [rollout.status for rollout in mixed.rollouts] == ["stale", "ok"]
    assert scheduler.pending == 2 + 1


def test_groups_are_handed_out_oldest_first_and_a_group_of_failures_never():
    groups = [Group(n, [ended(f"{n}-0", [0])]) for n in (4, 2, 3)] + [Group(1, [ended("1-0", [0], "agent_error")])]
    scheduler = scheduler_with(groups, version=0, max_lag=0)
    assert [group.group_id for group in scheduler.collect()] == [2, 3, 4]
    assert scheduler.submitted == 3


def test_groups_that_all_fail_end_the_run_with_the_statuses():
    """An agent that always raises must not be played for ever."""
    scheduler = scheduler_with([], version=0, max_lag=0)
    with pytest.raises(RuntimeError, match=r"13 groups in a row .*'agent_error': 1"):
        for number in range(99):
            end(scheduler, Group(number, [ended(f"{number}-0", [0], "agent_error")]))
            assert scheduler.collect() is None


def test_groups_that_came_too_late_are_replaced_however_many():
    """That the trainer was faster says nothing of the agent."""
    late = [Group(n, [ended(f"{n}-0", [3]), ended(f"{n}-1", [3], "agent_error")]) for n in range(99)]
    scheduler = scheduler_with(late, version=5, max_lag=1)
    assert scheduler.collect() is None and not scheduler.ready
    assert scheduler.reasons == Counter(stale=99) and (scheduler.barren, scheduler.submitted) == (0, 0)
    assert scheduler.ledger.dropped == Counter(stale=99)


GROUPS = {
    "all_pass": [1.0, 1.0],
    "all_fail": [0.0, 0.0],
    "one_valid": [1.0, None],
    "none_trainable": [None, None],
    None: [1.0, 0.0],
}
"""Rewards of a group's rollouts, None for a crash, by the reason for which it is replaced."""


def group_of(number: int, rewards: list) -> Group:
    rollouts = [ended(f"{number}-{i}", [0], "agent_error" if r is None else "ok") for i, r in enumerate(rewards)]
    for one, reward in zip(rollouts, rewards, strict=True):
        one.reward = reward or 0.0
    return Group(number, rollouts)


def test_groups_without_signal_are_replaced_counted_and_their_tokens_dropped_when_asked():
    groups = [group_of(number, rewards) for number, rewards in enumerate(GROUPS.values())]
    scheduler = scheduler_with(groups, version=0, max_lag=0)
    scheduler.cfg.filter_groups = True
    assert scheduler.collect() is None and [group.group_id for group in scheduler.ready] == [4]
    assert scheduler.reasons == Counter(dict.fromkeys(GROUPS, 1)) - Counter([None])
    assert scheduler.ledger.dropped == Counter(all_pass=2, all_fail=2, one_valid=1)
    assert (scheduler.submitted, scheduler.pending) == (1, 2)

    kept = scheduler_with([group_of(n, rewards) for n, rewards in enumerate(GROUPS.values())], version=0, max_lag=0)
    assert len(kept.collect()) == 3 and kept.reasons == Counter(none_trainable=1) and not kept.ledger.dropped.total()


def test_a_good_group_that_waits_does_not_hide_that_all_others_fail():
    """The trainer asks every 10 ms, and each time the waiting group is found good once more."""
    scheduler = scheduler_with([group_of(0, [1.0, 0.0])], version=0, max_lag=0)
    with pytest.raises(RuntimeError, match=r"13 groups in a row .*none_trainable; the first errors"):
        for number in range(1, 99):
            end(scheduler, group_of(number, [None, None]))
            assert scheduler.collect() is None


def test_a_group_without_signal_is_replaced_as_soon_as_it_ends():
    """Not when the trainer next asks: until then the node would idle. One group with signal ends the search."""

    async def scenario():
        scheduler = scheduler_with([], version=0, max_lag=0)
        scheduler.cfg.filter_groups, scheduler.started = True, 0

        async def play(task, rollout_id, group_id, sampling, split):
            one = ended(rollout_id, [0])
            one.reward = float(group_id >= 7 and rollout_id.endswith("-0"))
            return one

        scheduler.player.play, scheduler.player.release = play, lambda rollouts: rollouts
        scheduler.player.agent = SimpleNamespace(tasks=lambda split, seed: (agents.Task(str(n), {}) for n in count()))
        loop = asyncio.create_task(scheduler.run())
        for _ in range(200):
            await asyncio.sleep(0)
        loop.cancel()
        return scheduler

    scheduler = asyncio.run(scenario())
    assert sorted(group.group_id for group in scheduler.ready) == [7, 8, 9]
    assert scheduler.reasons == Counter(all_fail=7) and scheduler.barren == 0 and scheduler.started == 10


def test_tasks_that_are_all_alike_right_or_wrong_end_the_run_with_a_remedy():
    scheduler = scheduler_with([], version=0, max_lag=0)
    scheduler.cfg.filter_groups = True
    with pytest.raises(RuntimeError, match=r"97 groups in a row.*all_pass; give tasks that some rollouts solve"):
        for number in range(999):
            end(scheduler, group_of(number, [1.0, 1.0]))
            assert scheduler.collect() is None


def test_g16_no_two_engines_and_no_two_runs_sample_from_one_seed():
    seeds = [rollout.engine_args(config(seed=seed), False, i).seed for seed in range(3) for i in range(8)]
    assert len(set(seeds)) == len(seeds)


def test_a_fault_of_ours_in_a_group_ends_the_scheduler():
    async def scenario():
        scheduler = scheduler_with([], version=0, max_lag=0)
        scheduler.started = 0

        async def broken(*_):
            raise AssertionError("an invariant")

        scheduler.player.play = broken
        scheduler.player.agent = SimpleNamespace(tasks=lambda split, seed: [agents.Task("t", {})])
        await asyncio.wait_for(scheduler.run(), 1)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    assert "an invariant" in str(caught.value.exceptions[0])


def test_a_run_of_so_many_steps_starts_no_group_beyond_them():
    assert scheduler_with([], version=0, max_lag=9).bound == 30
    router = SimpleNamespace(version=0, fit={0})
    assert Scheduler(config(max_lag=9, steps=2), None, router, Ledger()).bound == 6


def test_a_finite_train_split_goes_round_and_an_empty_one_is_refused():
    scheduler = scheduler_with([], 0, 0)
    scheduler.player.agent = SimpleNamespace(tasks=lambda split, seed: [agents.Task(f"{seed}", {})])
    tasks = scheduler.tasks()
    assert [next(tasks).task_id for _ in range(3)] == ["0", "1", "2"]
    scheduler.player.agent = SimpleNamespace(tasks=lambda split, seed: [])
    with pytest.raises(ValueError, match="no tasks in its train split"):
        next(scheduler.tasks())


def trained_tasks(scheduler: Scheduler, steps: int, rng: random.Random) -> tuple[list[list[str]], dict]:
    """The task ids of each step's batch and the position after them, under an agent of five tasks an epoch."""

    async def scenario():
        router, batches = scheduler.router, []
        loop = asyncio.create_task(scheduler.run())
        for _ in range(steps):
            while (batch := scheduler.collect()) is None:
                await asyncio.sleep(0)
            batches.append([scheduler.known[group.group_id].task_id for group in batch])
            router.version += 1
            scheduler.changed.set()
            for _ in range(rng.randrange(9)):  # groups of later steps begin, and some end
                await asyncio.sleep(0)
        loop.cancel()
        return batches, scheduler.position

    return asyncio.run(scenario())


class Remembers(Scheduler):
    """Knows which task each group had."""

    def __init__(self, *args):
        super().__init__(*args)
        self.known = {}

    def take(self):
        number, task = super().take()
        self.known[number] = task
        return number, task


def remembering(rng: random.Random, epoch=lambda seed: [f"{seed}.{n}" for n in range(5)]) -> Remembers:
    router = SimpleNamespace(version=0, fit={0})
    player = InstantPlayer(router, rng)
    player.agent = SimpleNamespace(tasks=lambda split, seed: (agents.Task(name, {}) for name in epoch(seed)))
    return Remembers(config(max_lag=1), player, router, Ledger())


@pytest.mark.parametrize("steps", range(1, 6))  # of three groups each: the epochs' boundaries lie within and between
def test_o1_a_resumed_scheduler_trains_the_same_tasks_each_once(steps):
    """Straight on, or stopped after some steps with groups in flight and resumed by a new node."""
    rng = random.Random(steps)
    first = remembering(rng)
    before, position = trained_tasks(first, steps, rng)
    assert len(position["open"]) == first.taken - first.groups_dropped - 3 * steps > 0
    second = remembering(rng)
    second.resume(json.loads(json.dumps(position)), version=steps)
    second.router.version = steps
    assert second.submitted == 3 * steps
    after, _ = trained_tasks(second, 6, rng)
    played = [task for batch in before + after for task in batch]
    taken = {f"{n // 5}.{n % 5}" for n in range(second.taken)}
    unfinished = {task.task_id for task in second.open.values()}
    assert len(set(played)) == len(played) and set(played).isdisjoint(unfinished) and {*played, *unfinished} <= taken
    assert len(taken) - len(played) - len(unfinished) == first.groups_dropped + second.groups_dropped  # as stale


def test_o2_data_that_changed_is_refused_and_so_is_a_node_in_a_run():
    rng = random.Random(0)
    _, position = trained_tasks(remembering(rng), 2, rng)
    other = remembering(rng, lambda seed: [f"{seed}.{n}" for n in (0, 1, 2, 4, 3)])
    with pytest.raises(ValueError, match=r"the first \d+ tasks of .* are not those of the checkpoint: its data or its"):
        other.resume(position, 2)
    with pytest.raises(ValueError, match=r"in a run already: it took \d+ tasks"):
        other.resume(position, 2)


def test_no_group_starts_before_an_engine_holds_the_trainers_weights():
    scheduler = remembering(random.Random(0))
    scheduler.router.fit.clear()

    async def scenario():
        loop = asyncio.create_task(scheduler.run())
        await asyncio.sleep(0.01)
        assert scheduler.taken == 0
        scheduler.router.fit.add(0)
        scheduler.changed.set()
        await asyncio.sleep(0.01)
        assert scheduler.taken == 6
        loop.cancel()

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------- statuses


class FakeLoopback:
    """Sessions over a generate function, with the toy's template."""

    template = Template(toy.tokenizer(), [toy.END])

    def __init__(self, generate):
        self.generate = generate

    def open(self, sampling):
        parse = lambda text, tools: {"role": "assistant", "content": text}  # noqa: E731
        return Session(self.template, parse, self.generate, sampling, 512)

    def close(self, session):
        session.closed = True

    def url(self, session):
        return "http://127.0.0.1:1/s/x"


async def sample(call: Call) -> None:
    call.token_ids += [1, 2]
    call.logprobs += [-1.0, -1.0]
    call.versions += [0, 0]
    call.finish_reason = "stop"


async def one_turn(ctx) -> agents.Result:
    await ctx.chat([{"role": "user", "content": "hi"}], [])
    return agents.Result(reward=0.5)


async def dying_engine(call: Call) -> None:
    raise EngineFailure("gone")


async def swallow(ctx) -> agents.Result:
    with contextlib.suppress(EngineFailure):
        await one_turn(ctx)
    return agents.Result(reward=1.0)


async def fail(ctx):
    await one_turn(ctx)
    raise ZeroDivisionError


async def hang(ctx):
    await one_turn(ctx)
    await asyncio.sleep(60)


async def returning(value):
    return value


CASES = {
    "ok": (one_turn, sample, "ok", 0.5, 0),
    "a cut rollout": (lambda ctx: cut(ctx), sample, "truncated", 0.5, 0),
    "an agent that raises": (fail, sample, "agent_error", 0.0, 2),
    "an agent that never returns": (hang, sample, "agent_timeout", 0.0, 2),
    "an agent that calls nothing": (lambda ctx: returning(agents.Result(reward=1.0)), sample, "no_calls", 0.0, 0),
    "a reward that is NaN": (lambda ctx: nan(ctx), sample, "agent_error", 0.0, 2),
    "no result": (lambda ctx: returning(None), sample, "agent_error", 0.0, 0),
    "an agent that leaks its own task's cancellation": (lambda ctx: leak(ctx), sample, "agent_error", 0.0, 2),
    "an agent that exits": (lambda ctx: leave(ctx), sample, "agent_error", 0.0, 2),
    "rewards by call that cancel": (lambda ctx: by_call(ctx, [0.8, -0.3]), sample, "ok", 0.5, 0),
    "rewards by call that are too few": (lambda ctx: by_call(ctx, [0.5]), sample, "agent_error", 0.0, 4),
    "rewards by call that add up otherwise": (lambda ctx: by_call(ctx, [0.5, 0.5]), sample, "agent_error", 0.0, 4),
    "info that is no number": (lambda ctx: words(ctx), sample, "agent_error", 0.0, 2),
    "a dead engine": (one_turn, dying_engine, "engine_error", 0.0, 0),
    "a dead engine whose error the agent swallows": (swallow, dying_engine, "engine_error", 0.0, 0),
}


async def leak(ctx):
    await one_turn(ctx)
    task = asyncio.create_task(asyncio.sleep(9))
    task.cancel()
    await task


async def leave(ctx):
    await one_turn(ctx)
    raise SystemExit(0)


async def by_call(ctx, rewards) -> agents.Result:
    await one_turn(ctx)
    await one_turn(ctx)
    return agents.Result(reward=0.5, rewards=rewards)


async def words(ctx) -> agents.Result:
    result = await one_turn(ctx)
    result.info["answer"] = "many"
    return result


async def cut(ctx) -> agents.Result:
    result = await one_turn(ctx)
    result.truncated = True
    return result


async def nan(ctx) -> agents.Result:
    await one_turn(ctx)
    return agents.Result(reward=float("nan"))


def test_a_call_that_the_agent_left_running_is_stopped_and_counted():
    """It would go on sampling after the rollout's tokens were accounted for."""

    async def scenario():
        engine = FakeEngine(ticks=1000)
        router = Router([engine], config(), [9], 0)
        player = Player.__new__(Player)
        player.cfg, player.loopback, player.ledger = config(), FakeLoopback(router.generate), Ledger()
        player.router, player.live, player.ended = router, set(), {}
        player.statuses, player.errors_logged = Counter(), 0

        class AgentRunner(agents.AgentRunner):
            @classmethod
            def tasks(cls, split, seed):
                return []

            async def run(self, task, ctx):
                say = [{"role": "user", "content": "x"}]
                engine.ticks = 2
                await ctx.chat(say, [])
                engine.ticks = 1000
                self.left = asyncio.create_task(ctx.chat(say, []))
                await asyncio.sleep(0.01)
                return agents.Result()

        player.agent = AgentRunner
        result = await player.play(agents.Task("t", {}), "0-0", 0, TRAIN, "train")
        assert not router.running
        counted = result.sampled + player.ledger.dropped.total()
        await asyncio.sleep(0.02)
        return router.sampled, counted, player.ledger.dropped

    sampled, counted, dropped = asyncio.run(scenario())
    assert sampled == counted
    assert dropped["disconnect"] > 0


@pytest.mark.parametrize(
    "given,found", [([], [0.0, 0.0, 0.0, 1.5]), ([0.25, 1.25], [0.0, 0.25, 0.0, 1.25])], ids=["sum", "by call"]
)
def test_rewards_go_to_the_answered_calls(given, found):
    """Calls 0 and 2 were aborted; without rewards by call, the last answered one earned all of it."""
    session = SimpleNamespace(calls=[SimpleNamespace(index=i, committed=i in (1, 3)) for i in range(5)])
    assert rollout.by_call(session, agents.Result(reward=1.5, rewards=given)) == found


def test_an_env_says_what_each_of_its_turns_earned():
    class Counting(agents.Env):
        @classmethod
        def tasks(cls, split, seed):
            return []

        async def reset(self, task):
            self.turns = 0
            return []

        async def step(self, action):
            self.turns += 1
            return agents.Result(reward=np.float32(self.turns / 4), terminated=self.turns == 3)

    def context(longest):
        async def chat(messages, tools):
            cut = "length" if len(messages) > longest else "stop"
            return SimpleNamespace(message={"role": "assistant", "content": ""}, finish_reason=cut)

        return SimpleNamespace(chat=chat)

    for longest, rewards in ((9, [0.25, 0.5, 0.75]), (1, [0.25, 0.5, 0.0])):
        result = asyncio.run(Counting().run(agents.Task("t", {}), context(longest)))
        assert result.rewards == rewards and result.reward == sum(rewards)


@pytest.mark.parametrize("name", CASES)
def test_statuses(name):
    """H8, H9: whatever goes wrong has a name, is never a reward of 0, and its sampled tokens are counted."""
    play, generate, status, reward, dropped = CASES[name]

    class AgentRunner(agents.AgentRunner):
        @classmethod
        def tasks(cls, split, seed):
            return []

        async def run(self, task, ctx):
            return await play(ctx)

    async def scenario():
        player = Player.__new__(Player)
        player.cfg, player.loopback, player.ledger = config(rollout_timeout_s=0.2), FakeLoopback(generate), Ledger()
        player.router = SimpleNamespace(settle=lambda calls: asyncio.sleep(0), home={}, fit={0})
        player.agent, player.live, player.ended = AgentRunner, set(), {}
        player.statuses, player.errors_logged = Counter(), 0
        return player, await player.play(agents.Task("t", {}), "0-0", 0, TRAIN, "train")

    player, result = asyncio.run(scenario())
    assert result.status == status
    trainable = status in rollout.TRAINABLE
    assert result.reward == (reward if trainable else 0.0)
    assert result.sampled == ((4 if "cancel" in name else 2) if trainable else 0)
    assert len(result.rows) == ((2 if "cancel" in name else 1) if trainable else 0)
    assert all(r.reward == reward and r.status == status for r in result.rows)
    assert player.ledger.dropped.total() == dropped
    assert not player.live


# --------------------------------------------------------------------------------------------------- router


@dataclass
class FakeEngine:
    """Emits ids 1, 2, 3 … one per tick, and aborts like AsyncLLM: a final output with what there is so far."""

    ticks: int = 6
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    aborts: int = 0
    paused: bool = False
    late: int = 0
    """Requests that reach the engine only after a pause, as they may over a socket."""
    logprob: float = -0.5

    async def generate(self, prompt, params, request_id):
        for _ in range(self.late):
            await asyncio.sleep(0.01)
        self.late, aborts = 0, self.aborts
        ids: list[int] = []
        while len(ids) < min(self.ticks, params.max_tokens) and self.aborts == aborts:
            await asyncio.sleep(0.002)
            if not self.paused:
                ids.append(len(prompt["prompt_token_ids"]) + len(ids))
        reason = "abort" if self.aborts > aborts else "length"
        logprobs = [{token: SimpleNamespace(logprob=self.logprob)} for token in ids]
        output = SimpleNamespace(token_ids=ids, logprobs=logprobs, routed_experts=None, finish_reason=reason)
        yield SimpleNamespace(outputs=[output], num_cached_tokens=None)

    async def pause_generation(self, mode):
        assert mode == "abort"
        self.paused = True
        self.aborts += 1
        await asyncio.sleep(0.001)

    async def abort(self, request_id):
        self.aborts += 1
        self.aborted.set()


def a_call(**changes) -> Call:
    values = {"index": 0, "wire": "t", "sent_ids": [0], "max_tokens": 6, "temperature": 1.0, "top_p": 1.0,
              "affinity": "s"} | changes  # fmt: skip
    return Call(**values)


def commit(router: Router, engine: FakeEngine) -> None:
    engine.paused = False
    router.commit(router.version + 1)


@pytest.mark.parametrize("late", [0, 3])
def test_a_call_goes_on_through_syncs_and_every_token_has_its_version(late):
    """G7: [0 … 0, 1 … 1, 2 …], ids contiguous, none lost or twice; pause returns only when no request is left."""

    async def scenario():
        engine = FakeEngine(ticks=100, late=late)
        router = Router([engine], config(), [9], 0)
        call = a_call(max_tokens=12)
        running = asyncio.create_task(router.generate(call))
        for _ in range(2):
            await asyncio.sleep(0.009)
            await router.pause()
            assert not router.running
            before = list(call.token_ids)
            await asyncio.sleep(0.01)
            assert call.token_ids == before, "sampled while admission was closed"
            commit(router, engine)
        await running
        return router, call

    router, call = asyncio.run(scenario())
    assert call.token_ids == list(range(1, 13))
    assert call.versions == sorted(call.versions)
    assert call.versions[-1] == 2
    assert len(call.logprobs) == len(call.versions) == router.sampled == 12
    assert call.finish_reason == "length"
    assert router.load == [0]


@pytest.mark.parametrize("seed", range(5))
def test_a_call_that_is_paused_at_random_tokens_thirty_times_keeps_each_tokens_version(seed):
    """Ids are numbered by the engine, so a lost or doubled token shows; what was sampled before a pause has a version
    below what comes after it."""

    async def scenario():
        engine, rng = FakeEngine(ticks=1000), random.Random(seed)
        router, call, marks = Router([engine], config(), [9], 0), a_call(max_tokens=200), []
        running = asyncio.create_task(router.generate(call))
        for _ in range(30):
            await asyncio.sleep(rng.choice([0, 0.001, 0.004, 0.009]))
            await router.pause()
            marks.append(len(call.token_ids))
            commit(router, engine)
        await running
        return call, marks

    call, marks = asyncio.run(scenario())
    assert call.token_ids == list(range(1, 201))
    assert call.versions == [sum(at >= mark for mark in marks) for at in range(200)]
    assert len(set(marks)) > 5


def test_partial_rollouts_may_be_left_out():
    """The sync then waits for the call, which has one version; a call that begins meanwhile waits for the sync."""

    async def scenario():
        engine = FakeEngine(ticks=20)
        router = Router([engine], config(partial_rollouts=False), [9], 0)
        first, second = a_call(max_tokens=20), a_call(max_tokens=20)
        running = [asyncio.create_task(router.generate(first))]
        await asyncio.sleep(0.006)
        pausing = asyncio.create_task(router.pause())
        await asyncio.sleep(0.006)
        running.append(asyncio.create_task(router.generate(second)))
        await pausing
        assert running[0].done() and not second.token_ids
        commit(router, engine)
        await asyncio.gather(*running)
        return first, second

    first, second = asyncio.run(scenario())
    assert (set(first.versions), set(second.versions)) == ({0}, {1})


def test_a_lost_engines_call_goes_on_elsewhere_with_what_it_had():
    """The first engine is paused after some tokens, then given up in the middle of more; nobody saw those."""

    async def scenario():
        engines = [FakeEngine(ticks=1000), FakeEngine(ticks=1000)]
        router, call = Router(engines, config(), [9], 0), a_call(max_tokens=30)
        running = asyncio.create_task(router.generate(call))
        await asyncio.sleep(0.02)
        await router.pause()
        before = len(call.token_ids)
        for engine in engines:
            engine.paused = False
        router.commit(1)
        await asyncio.sleep(0.01)
        router.lose(0)
        await running
        return router, call, before

    router, call, before = asyncio.run(scenario())
    assert 0 < before < 30 and call.token_ids == list(range(1, 31))
    assert call.versions == [0] * before + [1] * (30 - before)
    assert call.engines == [0, 1] and router.load == [0, 0] and router.sampled == 30


def test_without_a_fit_engine_calls_wait_and_one_that_is_back_samples_only_after_a_sync():
    async def scenario():
        router, call = Router([FakeEngine()], config(), [9], 0), a_call()
        router.lose(0)
        running = asyncio.create_task(router.generate(call))
        await asyncio.sleep(0.02)
        assert not call.token_ids and not router.admission.is_set()
        router.revive(0, FakeEngine())
        await asyncio.sleep(0.02)
        assert not call.token_ids and router.fit == set(), "its weights are those of the model's folder"
        await router.pause()
        router.engines[0].paused = False
        router.commit(3)
        await running
        return call

    assert asyncio.run(scenario()).versions == [3] * 6


class SyncEngine(FakeEngine):
    """Each phase of a weight sync works, fails, or never ends; ``errored`` as AsyncLLM has it."""

    phase, way, errored, status = "", "", False, None

    @property
    def engine_core(self):
        manager = SimpleNamespace(finished_procs=lambda: {"EngineCore": self.status} if self.status else {})
        return SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))

    def __getattr__(self, name):
        if name not in PHASES.values():
            raise AttributeError(name)
        return lambda *given: self.do(name)

    async def do(self, name):
        if name == self.phase and self.way == "fails":
            raise RuntimeError("the link is down")
        if name == self.phase:
            await asyncio.Event().wait()
        return True


PHASES = {"connect": "init_weight_transfer_engine", "start": "start_weight_update", "update": "update_weights",
          "use": "finish_weight_update", "commit": "resume_generation"}  # fmt: skip
ASKED = {
    "connect": {"rank_offset": 1},
    "commit": {"version": 1},
    "evaluate": {"temperature": 0.0, "limit": 1, "samples": 1},
}


def synced_node(monkeypatch, engines: list) -> rollout.Node:
    monkeypatch.setenv("INSTAR_SECRET", "s")
    node = rollout.Node(config(sync_timeout_s=0.3, engine_timeout_s=0.2, engines=len(engines)))
    node.engines, node.ledger = engines, Ledger()
    node.router = Router(engines, node.cfg, [9], 0)
    node.scheduler = SimpleNamespace(changed=asyncio.Event(), position={})
    return node


PLACE = {"seed": 0, "position": {}}
"""What the node of ``synced_node`` says of its tasks."""


async def ask(node, phase: str) -> dict:
    async def body():
        return ASKED.get(phase, {})

    return json.loads((await getattr(node, phase)(SimpleNamespace(json=body))).text)


@pytest.mark.parametrize("way", ["fails", "never ends", "is lost"])
@pytest.mark.parametrize("broken", PHASES)
def test_a_weight_sync_that_is_interrupted_ends_the_node_in_time_and_commits_nothing(broken, way, monkeypatch):
    """One of two engines, in each phase. What the engines hold by then nobody knows."""
    monkeypatch.setattr(rollout, "WeightTransferInitRequest", SimpleNamespace)
    monkeypatch.setattr(rollout, "WeightTransferUpdateRequest", SimpleNamespace)

    async def scenario():
        engines = [SyncEngine(), SyncEngine()]
        engines[1].phase, engines[1].way = PHASES[broken], way
        engines[0].reset_prefix_cache = engines[1].reset_prefix_cache = lambda: asyncio.sleep(0, True)
        node = synced_node(monkeypatch, engines)
        assert await ask(node, "begin") == {"engines": ["0, start 1", "1, start 1"], "workers": 2} | PLACE
        if way == "is lost":
            asyncio.get_running_loop().call_later(0.05, node.router.lose, 1)
            engines[1].status = -11
        for phase in list(PHASES)[: list(PHASES).index(broken)]:
            await ask(node, phase)
        began = time.monotonic()
        with pytest.raises((RuntimeError, TimeoutError, rollout.EngineDeadError)):
            await ask(node, broken)
        return node, time.monotonic() - began

    node, seconds = asyncio.run(scenario())
    assert node.stop.is_set() and node.failure.startswith("weight sync to version 1, engines [0, 1]: ")
    assert {"fails": "the link is down", "never ends": "TimeoutError", "is lost": "EngineDead"}[way] in node.failure
    assert (way == "is lost") == node.failure.endswith(" (exit status -11)")
    assert (node.router.version, node.router.admission.is_set()) == (0, False) and seconds < 5


def test_a_sync_goes_on_without_an_engine_that_died_before_it_and_waits_when_that_was_the_last(monkeypatch):
    class Dead(SyncEngine):
        async def pause_generation(self, mode):
            raise rollout.EngineDeadError

    async def scenario():
        node = synced_node(monkeypatch, [SyncEngine(), Dead()])
        assert (await ask(node, "begin"))["engines"] == ["0, start 1"]
        await ask(node, "commit")
        assert (node.router.version, node.router.fit, node.syncing) == (1, {0}, False)
        node = synced_node(monkeypatch, [Dead()])
        begin = asyncio.create_task(ask(node, "begin"))
        await asyncio.sleep(0.2)
        assert not begin.done()
        node.router.revive(0, SyncEngine())
        assert (await begin)["engines"] == ["0, start 2"]

    asyncio.run(scenario())


def test_a_node_whose_engines_wait_for_weights_asks_for_a_sync(monkeypatch):
    """Instead of a batch, and of an evaluation, which would both wait for ever; not while no engine is there."""
    monkeypatch.setattr(rollout, "LONG_POLL_S", 0.05)

    async def scenario():
        node = synced_node(monkeypatch, [SyncEngine()])
        node.scheduler.collect = lambda: None
        lost = ended("eval-0", [0], "engine_error")
        tasks = lambda split, seed: [agents.Task("t", {})]  # noqa: E731
        node.player = SimpleNamespace(agent=SimpleNamespace(tasks=tasks), play=lambda *_: asyncio.sleep(0, lost),
                                      release=lambda rollouts: rollouts)  # fmt: skip
        manifest = lambda: node.manifest(SimpleNamespace(query={"version": "0"}))  # noqa: E731
        assert (await manifest()).status == 204
        node.router.lose(0)
        assert (await manifest()).status == 204
        node.router.revive(0, SyncEngine())
        assert json.loads((await manifest()).text) == {"sync": True}
        assert await ask(node, "evaluate") == {"sync": True}
        await ask(node, "begin")
        await ask(node, "commit")
        with pytest.raises(RuntimeError, match=r"no evaluation rollout succeeded: \{'engine_error': 1\}"):
            await ask(node, "evaluate")

    asyncio.run(scenario())


def test_an_engine_that_gives_no_sign_of_life_or_died_is_started_again_but_not_for_ever(monkeypatch):
    """The first hangs, the second dies, the third is one too many. In a weight sync a busy engine is left alone."""

    class Engine(SyncEngine):
        async def is_paused(self):
            await asyncio.sleep(0 if self.way == "works" else 9)

        def shutdown(self, timeout):
            self.errored = True

    async def scenario():
        hangs, dies = Engine(), Engine()
        hangs.way, dies.errored, dies.way, dies.status = "hangs", True, "works", -9
        node = synced_node(monkeypatch, [hangs])
        node.cfg.engine_restarts, node.syncing = 1, True
        node.engine = lambda index: asyncio.sleep(0, dies)
        keeping = asyncio.create_task(node.keep(0))
        await asyncio.sleep(2.5)
        assert node.router.alive == {0} and not hangs.errored
        node.syncing = False
        with pytest.raises(EngineFailure, match=r"engine 0 died \(exit status -9\), after 1 restarts"):
            await asyncio.wait_for(keeping, 9)
        assert hangs.errored and node.router.starts == [2] and node.router.fit == set()

    asyncio.run(scenario())


def test_a_step_of_several_versions_has_its_own_bound():
    """Two versions a step, groups_per_step 3: the step after next may be started a version before its turn."""
    cfg = config(versions_per_step=2)
    for lag, found in ((0, [3, 3, 6, 6, 9]), (1, [3, 6, 6, 9, 9]), (2, [6, 6, 9, 9, 12])):
        routers = [SimpleNamespace(version=version, fit={0}) for version in range(5)]
        assert [Scheduler(replace(cfg, max_lag=lag), None, router, Ledger()).bound for router in routers] == found


def test_a_request_that_spans_two_versions_is_refused():
    async def scenario():
        router = Router([FakeEngine()], config(), [9], 0)
        running = asyncio.create_task(router.generate(a_call()))
        await asyncio.sleep(0.005)
        router.version = 1
        await running

    with pytest.raises(EngineFailure, match="spanned versions 0 and 1"):
        asyncio.run(scenario())


def test_a_broken_invariant_is_remembered_and_its_tokens_are_counted():
    """``Node.watch`` ends the run on it: it is not one rollout's failure."""
    router, call = Router([FakeEngine(logprob=float("inf"))], config(), [9], 0), a_call()
    with pytest.raises(EngineFailure):
        asyncio.run(router.generate(call))
    assert "not finite" in router.violation
    assert router.sampled == len(call.token_ids) == 6


def test_a_logprob_that_is_not_finite_and_missing_routes_are_refused():
    with pytest.raises(EngineFailure, match="not finite"):
        asyncio.run(Router([FakeEngine(logprob=float("nan"))], config(), [9], 0).generate(a_call()))
    with pytest.raises(EngineFailure, match="no routes for a mixture-of-experts model"):
        asyncio.run(Router([FakeEngine()], config(), [9], 8).generate(a_call()))


def test_a_cancelled_call_aborts_its_request_and_its_tokens_are_still_counted():
    """W13: the engine is told within a second; what it had sampled is in the router's count and in the call."""

    async def scenario():
        engine = FakeEngine(ticks=1000)
        router = Router([engine], config(), [9], 0)
        call = a_call(max_tokens=1000)
        running = asyncio.create_task(router.generate(call))
        await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running])
        await asyncio.wait_for(router.settle([call]), 1)
        return router, call, engine

    router, call, engine = asyncio.run(scenario())
    assert engine.aborted.is_set()
    assert router.sampled == len(call.token_ids) > 0


def test_a_call_that_outlasts_its_deadline_fails():
    router = Router([FakeEngine(ticks=1000)], config(call_timeout_s=0.05), [9], 0)
    with pytest.raises(EngineFailure, match=r"call_timeout_s=0\.05"):
        asyncio.run(router.generate(a_call(max_tokens=1000)))


def test_sessions_stay_with_their_engine_and_new_ones_go_to_the_idle_one():
    async def scenario():
        router = Router([FakeEngine(), FakeEngine()], config(), [9], 0)
        calls = [a_call(affinity=name) for name in ("a", "b", "a", "b")]
        await asyncio.gather(*(router.generate(call) for call in calls))
        return [call.engines for call in calls]

    first, second, third, fourth = asyncio.run(scenario())
    assert first == third != second == fourth


def test_a_session_leaves_its_engine_when_that_is_far_busier():
    """Factor 2: with 100 more tokens, 300 + 100 is more than twice 50 + 100, 200 + 100 is not."""
    router = Router([FakeEngine(), FakeEngine()], config(affinity_factor=2.0), [9], 0)
    assert router.pick("s", 100) == 0
    router.load = [200, 50]
    assert router.pick("s", 100) == 0 and router.pick("other", 100) == 1
    router.load = [300, 50]
    assert router.pick("s", 100) == 1
    router.load = [50, 50]
    assert router.pick("s", 100) == 1, "it moved, and stays there"


def test_a_call_that_an_abort_interrupts_does_not_count_as_its_own_burden():
    """A lone session stays at home, however long its call."""
    router = Router([FakeEngine(), FakeEngine()], config(affinity_factor=1.0), [9], 0)
    assert [router.pick("s", asked) for asked in (1, 10**6, 1)] == [0, 0, 0]


def test_code_that_blocks_the_event_loop_is_measured_and_told(monkeypatch, caplog):
    async def scenario() -> tuple[dict, dict]:
        pulse = rollout.Pulse()
        router = SimpleNamespace(running={})
        running = asyncio.create_task(pulse.run(router))
        await asyncio.sleep(0.2)
        router.running = {"a request": 1}
        time.sleep(0.7)
        await asyncio.sleep(0.1)
        running.cancel()
        return pulse.meters(), pulse.meters()

    monkeypatch.setattr(rollout, "STALL_S", 0.6)
    found, again = asyncio.run(scenario())
    assert found["rollout/loop_late_ms_max"] > 600 and "event loop stood still for" in caplog.text
    assert 0 < found["rollout/engines_idle"] < 1
    assert set(again.values()) == {0.0}


def test_whatever_a_parser_raises_is_the_engines_fault_and_not_the_servers():
    """A parser of vLLM may raise anything on odd text; its rollout is then dropped as engine_error."""
    parser = rollout.Parser(toy.tokenizer(), "hermes", "")

    class Broken:
        def __init__(self, *_):
            pass

        def extract_tool_calls(self, text, request):
            return [][1]

    parser.tool_parser = Broken
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert parser("fine", None)["content"] == "fine"
    with pytest.raises(RuntimeError, match="a parser of vLLM failed: IndexError"):
        parser("odd", tools)
