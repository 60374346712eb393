"""Speed, as ratios within one run: ``python -m tools.bench [NAME …]`` runs the named comparisons, or all of them.

loopback   the server's own time per turn, the engine's excluded, as a session grows. The engine is a stub that replies
           at once; the client is a bare HTTP client that sends the whole history each turn, as the SDKs do. Reported is
           the median over sessions and, from turn 8 on, over the eight turns up to the one that is named; and the
           dearest turn of all, in which the template is asked about the whole history.
replay     how far the trainer's log-probs are from a bfloat16 engine's, with and without the engine's routes. The
           model is a random Qwen3 mixture of experts, not sharpened: once at transformers' own initial deviation, 0.02,
           and once at the one with which its width of 128 has the activations that 0.02 gives a width of 2,048. The
           tokens are vLLM's samples after random prompts; the trainer is rl.py's, in a world of one rank, with float32
           weights and its forward in float32 or bfloat16. Choices that differ are the live routers' beside the
           engine's, at every position that the engine forwarded: recorded in the live forward itself, and metered by
           the replay in the other, where the layers below are replayed.
replay_cost  what replay costs the trainer: a forward and backward pass of one packed micro-batch on one thread,
           replaying the routes that the model chooses itself, so that both do the same work; live and replayed in
           turn, the order swapped from pair to pair. CPU time, which what else the machine does disturbs less. Then
           bytes: of a row on the wire, and of the tensors that a micro-batch holds for replay.
replay_training  what replay does to training: recipe toy_moe_bf16 with replay and without, from the same seeds, through
           run_2x8.sh (ten minutes on two cores). Means over the seeds and over windows of steps.
lag        what asynchrony buys where one rollout in eight has twenty turns and the others one (tools/long_tail.py): an
           untrained toy, whose answers are all cut at eight tokens, so that steps and runs are as much work; through
           run_2x8.sh with one trainer rank and one engine, at max_lag 0, 1, 2 and 4, with partial rollouts and without
           (twelve minutes on two cores). Means over the steps of a run, then medians over the runs; left out are
           the steps until rollouts of every age within the bound are there. The ideal is the longer of generating, and
           training and syncing, each as long as it takes at max_lag 0, where neither waits for the other's core. It is
           no bound: under a lag, what is long in one step is sampled beside the next step's rollouts. Nor is it within
           reach of two cores, of which the engine's own scheduler and the node take some. Only a run that had the
           machine to itself compares: the last column says what other work took of it.
affinity   the prefix cache under two engines: sessions of a dozen turns with short pauses, which send a hundred tokens
           more each turn; the share of prompt tokens found in the engines' caches, and the first engine's share of all
           tokens; with sessions that stay with their engine (--affinity_factor 4) and with calls that go to the idler
           one (1). The most that can be found are the whole blocks of what the session sent before.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import torch
from transformers import AutoModelForCausalLM

import gate
import moe_replay
import rl
from loopback import Call, Loopback, Row, Sampling, Template, pack_rows
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


# --------------------------------------------------------------------------------------------- replay

PROMPTS, PROMPT, SAMPLED = 64, 32, 64
"""Prompts, their tokens, and the tokens sampled after each."""
MOE, TOY = (6, 64, 8), (3, 8, 2)
"""Layers, experts of a layer, and of a token."""
INITIAL = 0.02, 0.08
"""Standard deviations of the initial weights: transformers' own, and with sqrt(128) what that is with sqrt(2048)."""
SEEDS, STEPS, WINDOW = (0, 1), 20, 5
ROWS, ROW, PAIRS = 2, 512, 41
"""Rows of the timed micro-batch, their tokens, and timed pairs."""


def table(head: list[str], body: list[list[str]]) -> None:
    """Prints Markdown; all columns but the first are numbers."""
    for row in (head, ["---", *["--:"] * (len(head) - 1)], *body):
        print("| " + " | ".join(row) + " |")


def random_model(path: Path, shape: tuple[int, int, int], deviation: float = INITIAL[0]) -> str:
    """A mixture of experts as wide as the toy, with random weights, in folder ``path``."""
    config = toy.untrained(moe=True, seed=0).config
    config.update(dict(zip(("num_hidden_layers", "num_experts", "num_experts_per_tok"), shape, strict=True)))
    config.initializer_range = deviation
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    toy.tokenizer().save_pretrained(path)
    return str(path)


@contextmanager
def one_rank() -> Iterator[rl.Ranks]:
    """A trainer's process group of one rank."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    yield rl.Ranks(rl.TrainConfig())
    torch.distributed.destroy_process_group()


def random_call(rng: random.Random, prompt: int, sampled: int) -> Call:
    """A call with a prompt of random bytes, for so many tokens."""
    return Call(0, "", rng.choices(range(256), k=prompt), sampled, 1.0, 1.0, "")


def sample(model: str, shape: tuple[int, int, int]) -> list[Row]:
    """Rows that a bfloat16 engine sampled, with its log-probs and routes; the engine is gone afterwards."""
    from vllm import LLM, SamplingParams

    import rollout

    layers, experts, _ = shape
    router = rollout.Router([], rollout.RolloutConfig(), [], experts, range(layers))
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "HF_HUB_OFFLINE": "1"}
    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=PROMPT + SAMPLED,
        max_num_seqs=PROMPTS,
        enforce_eager=True,
        enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    rng = random.Random(0)
    calls = [random_call(rng, PROMPT, SAMPLED) for _ in range(PROMPTS)]
    params = SamplingParams(max_tokens=SAMPLED, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = engine.generate([rollout.TokensPrompt(prompt_token_ids=call.sent_ids) for call in calls], params)
    engine.llm_engine.engine_core.shutdown()
    for call, output in zip(calls, outputs, strict=True):
        router.append(call, 0, 0, output.outputs[0])
    return [rollout.probe_row(call) for call in calls]


def live_choices(policy: rl.Policy, batches: list[rl.MicroBatch], shape: tuple[int, int, int]):
    """``score`` without replay, and the experts that the routers chose, ``[L, T, K]``."""
    layers, experts, per_token = shape
    chosen: list[torch.Tensor] = []

    def note(live_TK: torch.Tensor) -> torch.Tensor:
        chosen.append(live_TK)
        return live_TK

    with moe_replay.Select(experts, per_token, note):
        scored = rl.score(policy, batches, None)
    parts = [torch.stack(chosen[start : start + layers]) for start in range(0, len(chosen), layers)]
    return scored, torch.cat(parts, 1)


def distances(model: str, rows: list[Row], ranks: rl.Ranks) -> Iterator[list[str]]:
    """The table's rows for one model: trainer, mismatch, k3's quotient, ratios outside, choices that differ."""
    for dtype in ("float32", "bfloat16"):
        cfg = rl.TrainConfig(model=model, dtype=dtype)
        policy = rl.shard(rl.Policy(cfg), cfg, ranks)
        replayer = rl.make_replay(policy, cfg)
        batches = rl.micro_batches([(row, 0) for row in rows], cfg, ranks, replayer)
        behaviour_S = rl.Batch.of(batches).behaviour_S
        known_T = torch.cat([batch.known_T for batch in batches])
        live, chosen_LTK = live_choices(policy, batches, MOE)
        engine_LTK = torch.cat([batch.experts_LTK for batch in batches], 1).long()
        same_LTK = (chosen_LTK[..., :, None] == engine_LTK[..., None, :]).any(-1)[:, known_T]
        replayed = rl.score(policy, batches, replayer, metered=True)
        *agreed_L, compared = replayer.take_agreement().tolist()
        agreed = float(same_LTK.double().mean()), sum(agreed_L) / (len(agreed_L) * compared)
        ratios = [scored.logp_S - behaviour_S for scored in (live, replayed)]
        sizes = [gate.mismatch(log_ratio_S, torch.ones_like(log_ratio_S, dtype=torch.bool)) for log_ratio_S in ratios]
        for routes, log_ratio_S, size, share in zip(("live", "replayed"), ratios, sizes, agreed, strict=True):
            outside = float((log_ratio_S.abs() > math.log(2)).double().mean())
            yield [f"{dtype}, {routes}", *(f"{size[name]:.4f}" for name in ("mean", "p99", "max")),
                   f"{size['k3']:.1e}", f"{sizes[0]['k3'] / size['k3']:.1f}", f"{outside:.2%}",
                   f"{1 - share:.2%}"]  # fmt: skip


def replay() -> None:
    """Prints the table of the trainer's distance from the engine."""
    body = []
    with TemporaryDirectory() as folder, one_rank() as ranks:
        for deviation in INITIAL:
            model = random_model(Path(folder) / str(deviation), MOE, deviation)
            body += [[f"{deviation}", *row] for row in distances(model, sample(model, MOE), ranks)]
    print(f"{PROMPTS * SAMPLED} tokens sampled by a bfloat16 engine; random model: {named(MOE)}")
    table(["initial deviation", "trainer, routes", "mean \\|Δlogp\\|", "p99", "max", "k3", "k3 live / this",
           "ratio outside [0.5, 2]", "choices that differ"], body)  # fmt: skip


def named(shape: tuple[int, int, int]) -> str:
    """A model's shape in words."""
    return "{} layers, {} experts, top {}".format(*shape)


def timed_batch(policy: rl.Policy, shape: tuple[int, int, int], ranks: rl.Ranks) -> tuple[list[Row], rl.MicroBatch]:
    """Random rows, half of each sampled, and both without routes and packed with those that the model chooses."""
    import rollout

    rng = random.Random(0)
    calls = [random_call(rng, ROW // 2, ROW // 2) for _ in range(ROWS)]
    for call in calls:
        call.token_ids = rng.choices(range(256), k=call.max_tokens)
        call.logprobs, call.versions = [0.0] * call.max_tokens, [0] * call.max_tokens
    bare = [rollout.probe_row(call) for call in calls]
    _, chosen_LTK = live_choices(policy, [rl.pack([(row, 0) for row in bare], ranks.device)], shape)
    for call, routes_LTK in zip(calls, chosen_LTK.split(ROW, 1), strict=True):
        routes_TLK = routes_LTK.transpose(0, 1)[:-1].numpy()  # the last token is never forwarded by an engine
        call.routes = [routes_TLK.astype(moe_replay.route_dtype(shape[1]))]
    return bare, rl.pack([(rollout.probe_row(call), 0) for call in calls], ranks.device)


def step_time(policy: rl.Policy, batch: rl.MicroBatch, replayer: moe_replay.RouteReplay | None) -> float:
    """CPU seconds of a forward and a backward pass."""
    policy.zero_grad()
    began = time.process_time()
    context, forward = rl.run(policy, batch, replayer)
    with context:
        forward().logp_S.mean().backward()
    return time.process_time() - began


def replay_cost() -> None:
    """Prints the tables of what replay costs."""
    times, sizes = [], []
    with TemporaryDirectory() as folder, one_rank() as ranks:
        for shape in (MOE, TOY):
            cfg = rl.TrainConfig(model=random_model(Path(folder) / str(shape[0]), shape))
            policy = rl.shard(rl.Policy(cfg), cfg, ranks)
            arms = {"live": None, "replayed": rl.make_replay(policy, cfg)}
            bare, batch = timed_batch(policy, shape, ranks)
            spent: dict[str, list[float]] = {name: [] for name in arms}
            for pair in range(-1, PAIRS):  # the first is a warm-up
                for name in list(arms)[:: 1 if pair % 2 else -1]:
                    seconds = step_time(policy, batch, arms[name])
                    spent[name] += [seconds] if pair >= 0 else []
            median = {name: statistics.median(values) for name, values in spent.items()}
            ratios = [b / a for a, b in zip(spent["live"], spent["replayed"], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            times.append([named(shape), *(f"{1e3 * value:.0f}" for value in median.values()),
                          f"{median['replayed'] / median['live']:.3f}", f"{low:.3f} to {high:.3f}"])  # fmt: skip
            wire = [len(pack_rows([row])) for row in (bare[0], batch.rows[0])]
            routes, held = batch.rows[0].experts.nbytes, batch.experts_LTK.nbytes + batch.known_T.nbytes
            sizes.append([named(shape), f"{routes // ROW}", f"{wire[0] / ROW:.1f}", f"{wire[1] / ROW:.1f}",
                          *(f"{value:,}" for value in (*wire, held))])  # fmt: skip
    print(f"forward and backward pass of {ROWS * ROW} packed tokens, CPU ms on one thread, medians of {PAIRS} pairs")
    table(["model", "live", "replayed", "ratio", "middle half of the pairs' ratios"], times)
    print(
        f"\nbytes: a row of {ROW} tokens on the wire, without routes and with, and held for replay by the micro-batch"
    )
    table(["model", "a token's routes", "a token without", "with", "the row without", "with", "held"], sizes)


def trained(replay: bool, seed: int) -> tuple[list[dict], float]:
    """Metrics of a run's steps, and its last held-out reward."""
    run = f"bench-{os.getpid()}-replay-{replay}-{seed}"
    asked = {"RUN": run, "RECIPE": "toy_moe_bf16", "SEED": str(seed), "STEPS": str(STEPS), "REPLAY": str(replay)}
    subprocess.run(["bash", "run_2x8.sh"], env=os.environ | asked, stdout=subprocess.DEVNULL, check=True)
    metrics = rl.read_lines(Path("runs") / run / "metrics.jsonl")
    return metrics, json.loads((Path("runs") / run / "summary.json").read_text())["reward_after"]


def replay_training() -> None:
    """Prints reward and mismatch by steps, replayed beside live."""
    arms = {replay: [trained(replay, seed) for seed in SEEDS] for replay in (True, False)}
    body = []
    for start in range(0, STEPS, WINDOW):
        cells = [f"{start + 1} to {start + WINDOW}"]
        for name, form in (
            ("reward", ".3f"),
            ("mismatch/mean", ".1e"),
            ("mismatch/max", ".2f"),
            ("mismatch/k3", ".1e"),
        ):
            for runs in arms.values():
                values = [line[name] for metrics, _ in runs for line in metrics[start : start + WINDOW]]
                cells.append(format(statistics.mean(values), form))
        body.append(cells)
    both = [
        f"{name}, {routes}" for name in ("reward", "mean \\|Δlogp\\|", "max", "k3") for routes in ("replayed", "live")
    ]
    print(f"toy_moe with a bfloat16 engine, seeds {SEEDS}")
    table(["steps", *both], body)
    print("held-out reward after:", {"replayed" if arm else "live": [after for _, after in arms[arm]] for arm in arms})


# ---------------------------------------------------------------------------------------- lag, affinity

CONTEXT = 2048


def untrained(folder: str) -> str:
    """The toy with random weights, which seldom ends its turn, in ``folder``."""
    model = toy.untrained(moe=False, seed=0)
    model.config.max_position_embeddings = CONTEXT
    model.save_pretrained(folder)
    toy.tokenizer().save_pretrained(folder)
    return folder


LAGS = [(0, True), *((lag, partial) for lag in (1, 2, 4) for partial in (True, False))]
REPEATS, WARM, MEASURED = 1, 2, 10
"""Runs of each; steps left out of a run, besides ``max_lag``, and steps measured."""
MEANS = ("seconds/generate", "seconds/train", "seconds/sync", "rollout/engines_idle", "gate/lag_mean", "gate/ess",
         "rollout/reprefilled_tokens")  # fmt: skip


def busy_s() -> float:
    """CPU seconds that this machine has spent since it started, whatever on."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def lagged(model: str, lag: int, partial: bool, seed: int) -> dict[str, float]:
    """What a run under a bound came to: means over its measured steps, and the share dropped as stale."""
    run, left_out = f"bench-{os.getpid()}-lag-{lag}-{partial}-{seed}", WARM + lag
    asked = {"RUN": run, "RECIPE": "../tools/long_tail", "SEED": str(seed), "STEPS": str(left_out + MEASURED),
             "MODEL": model, "ENGINES": "1", "TRAINER_RANKS": "1", "LAG": str(lag),
             "PARTIAL": str(partial)}  # fmt: skip
    before, busy = os.times(), busy_s()
    subprocess.run(["bash", "run_2x8.sh"], env=os.environ | asked, stdout=subprocess.DEVNULL, check=True)
    after, busy = os.times(), busy_s() - busy
    own = after.children_user + after.children_system - before.children_user - before.children_system
    metrics, ledger = (
        rl.read_lines(Path("runs") / run / name)[left_out:] for name in ("metrics.jsonl", "ledger.jsonl")
    )
    found = {name: statistics.mean(line[name] for line in metrics) for name in MEANS}
    found["trained"] = found["seconds/train"] + found["seconds/sync"]
    found["seconds"] = found["seconds/generate"] + found["trained"]
    found["others"] = (busy - own) / (after.elapsed - before.elapsed)
    found["waits"] = found["seconds/generate"] / found["seconds"]
    ledger = ledger[:MEASURED]  # its last line is of the end
    stale, probe = (sum(line["dropped"].get(reason, 0) for line in ledger) for reason in ("stale", "probe"))
    return found | {"stale": stale / (sum(line["sampled"] for line in ledger) - probe)}


def lag() -> None:
    """Prints the table of what asynchrony buys."""
    runs: dict[tuple[int, bool], list[dict]] = {arm: [] for arm in LAGS}
    with TemporaryDirectory() as folder:
        untrained(folder)
        for seed in range(REPEATS):  # in turn, so that whatever else the machine does meets all of them
            for arm in LAGS:
                runs[arm].append(lagged(folder, *arm, seed))
    medians = {arm: {name: statistics.median(run[name] for run in found) for name in found[0]}
               for arm, found in runs.items()}  # fmt: skip
    alone = medians[LAGS[0]]
    ideal = max(alone["seconds/generate"], alone["trained"])
    print(f"64 rollouts a step; alone, generating takes {alone['seconds/generate']:.2f} s, training and syncing "
          f"{alone['trained']:.2f} s; medians of {REPEATS} runs, means of {MEASURED} steps each")  # fmt: skip
    body = []
    for (bound, partial), m in medians.items():
        spread = sorted(run["seconds"] for run in runs[bound, partial])
        body.append([f"{bound}", ("yes" if partial else "no") if bound else "–", f"{m['seconds']:.2f}",
                     f"{spread[0]:.2f} to {spread[-1]:.2f}", f"{m['seconds'] / ideal:.2f}", f"{m['waits']:.0%}",
                     f"{m['rollout/engines_idle']:.0%}", f"{m['seconds/train']:.2f}", f"{m['seconds/sync']:.2f}",
                     f"{m['gate/lag_mean']:.2f}", f"{m['gate/ess']:.3f}", f"{m['rollout/reprefilled_tokens']:.0f}",
                     f"{m['stale']:.1%}", f"{m['others']:.1f}"])  # fmt: skip
    table(["max_lag", "partial rollouts", "seconds a step", "of the runs", "of the ideal", "trainer waits",
           "engine idle", "train, s", "sync, s", "mean lag", "effective sample size", "tokens prefilled again a step",
           "dropped as stale", "cores that others took"], body)  # fmt: skip


TALKERS, TALKS, BLOCK = 16, 12, 128
"""Sessions, their turns, and the tokens of a block of the CPU engine's cache."""


async def talk(router, name: str, rng: random.Random) -> list[tuple[int, int, int]]:
    """One session: of each call the engine, the tokens sent and sampled, and of those how many could be cached."""
    history, done, known = rng.choices(range(256), k=100), [], 0
    for turn in range(TALKS):
        call = Call(turn, "bench", list(history), 32, 1.0, 1.0, name)
        await router.generate(call)
        history += call.token_ids
        done.append((call.engines[0], len(history), known // BLOCK * BLOCK))
        known = len(history) - 1  # the last token was never forwarded
        history += rng.choices(range(256), k=68)
        await asyncio.sleep(rng.uniform(0, 0.1))
    return done


async def talks(cfg, engines: list, factor: float, seed: int) -> list[str]:
    """A line of the table."""
    import rollout

    router = rollout.Router(engines, replace(cfg, affinity_factor=factor), [toy.END], 0)
    for engine in engines:
        await engine.reset_prefix_cache()
    began = time.monotonic()
    names = [f"{seed}-{number}" for number in range(TALKERS)]
    sessions = await asyncio.gather(*(talk(router, name, random.Random(name)) for name in names))
    seconds = time.monotonic() - began
    calls = [call for session in sessions for call in session]
    moves = sum(one[0] != two[0] for session in sessions for one, two in pairwise(session))
    on_first = sum(tokens for engine, tokens, _ in calls if engine == 0)
    sent = router.prompts["sent"]
    return [f"{factor:g}", f"{router.prompts['cached'] / sent:.1%}", f"{sum(most for *_, most in calls) / sent:.1%}",
            f"{seconds:.1f}", f"{on_first / sum(tokens for _, tokens, _ in calls):.0%}",
            f"{moves / TALKERS:.1f}"]  # fmt: skip


def affinity() -> None:
    """Prints the table of the prefix caches' hits."""
    import rollout

    async def go() -> list[list[str]]:
        engines = []
        with TemporaryDirectory() as folder:
            cfg = rollout.RolloutConfig(model=untrained(folder), engines=2, max_tokens=32, max_model_len=CONTEXT)
            try:
                for index in range(cfg.engines):
                    engines.append(await asyncio.to_thread(rollout.start_engine, cfg, False, index, []))
                await talks(cfg, engines, 4.0, -1)  # warm-up
                return [await talks(cfg, engines, factor, seed) for seed in range(2) for factor in (4.0, 1.0)]
            finally:
                for engine in engines:
                    engine.shutdown()

    print(f"{TALKERS} sessions of {TALKS} turns, two engines; blocks of {BLOCK} tokens are cached")
    table(["affinity_factor", "prompt tokens found in a cache", "the most that can be", "seconds",
           "tokens of the first engine", "moves of a session"], asyncio.run(go()))  # fmt: skip


BENCHES = {"loopback": loopback, "replay": replay, "replay_cost": replay_cost, "replay_training": replay_training,
           "lag": lag, "affinity": affinity}  # fmt: skip


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
