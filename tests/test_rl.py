"""Laws and right values of rl.py. Names such as g8 are the entries of the project's list of known faults.

The invariance law runs the real ``rl.train``, in worlds of 1, 2 and 4 gloo ranks, against a scripted rollout node: each
optimizer step gets the same rollouts under another token budget or denominator, and leaves its gradient in a file. The
reference is a plain transformers forward of one row at a time and a loss written out by hand. The worlds run in
processes forked from one that imported torch once (``python test_rl.py FOLDER``), beside the tests of this process.

T, S, N, L, K as in rl.py.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from conftest import free_port, make_model
from safetensors.torch import load_file, save_file
from test_moe_replay import by_hand, deepseek
from transformers import AutoModelForCausalLM, HfArgumentParser

import gate
import rl
from loopback import Row, pack_rows, unpack_rows
from tools import toy

torch.set_num_threads(1)

CPU = torch.device("cpu")
LAYERS, EXPERTS, K = 3, 8, 2
SHAPES = {"dense": (0, 0), "moe": (LAYERS, K)}
TOLERANCE = {"float64": 1e-6, "float32": 1e-5}
"""Of a gradient's relative error, by the dtype of the forward; a lost token is 4e-3 or more."""
BUDGETS = {"tiny": 2, "medium": 64, "everything": 100_000}
CONSTANT = 50.0
CONFLICTS = 3
"""Of each node, in every step."""


def ranks_of_one():
    """What packing asks of ``Ranks`` when there is one."""
    return SimpleNamespace(rank=0, world=1, device=CPU, most=lambda value: value)


# ---------------------------------------------------------------------------------------------------------------
# A batch of rollouts
# ---------------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """One rollout of the batch: where it belongs, what it got, its rows' lengths, how stale and how far off it is."""

    node: int
    group: int
    reward: float
    lengths: tuple[int, ...]
    status: str = "ok"
    lag: tuple[int, ...] = (0, 1)
    """Lags its tokens have; each is drawn for some token."""
    shift: float = 0.0
    """Added to the behaviour log-probs: beyond ±log 2, a band of [0.5, 2] gates the rollout."""
    temperature: float = 1.0


PLANS = [
    Plan(0, 0, 1.0, (21, 9), lag=(0,), temperature=0.7),
    Plan(0, 0, 0.0, (40,), lag=(0,)),
    Plan(0, 0, 0.5, (12, 30, 7)),
    Plan(0, 0, 1.0, (18,), shift=1.0),
    Plan(0, 4, 0.0, (6,), status="truncated"),
    Plan(0, 4, 1.0, (33,), temperature=1.3),
    Plan(0, 4, 9.0, (), status="agent_error"),
    Plan(1, 0, 0.25, (16, 16), shift=-1.0),
    Plan(1, 0, 1.0, (28,), lag=(0, 1, 2)),
    Plan(1, 0, 0.0, (11, 5, 24)),
    Plan(1, 2, 1.0, (10,), lag=(1,), shift=1.2),
    Plan(1, 2, 0.0, (13,), lag=(1,), shift=-1.2),
]
"""Group (1, 2) is gated whole, rollout 8 is stale, rollout 6 crashed."""
KEPT = [0, 1, 2, 4, 5, 9]
REASON = {3: "ratio_low", 10: "ratio_low", 7: "ratio_high", 11: "ratio_high", 8: "stale"}
FEW = [0, 1]


def make_row(rng, plan: Plan, rollout: int, index: int, shape: tuple[int, int]) -> Row:
    """A random row of ``plan``; ``versions`` holds −lag until the trainer's version is known."""
    count, (layers, k) = plan.lengths[index], shape
    sampled = rng.random(count) < 0.6
    sampled[[0, -1]] = False, (rollout + index) % 3 > 0
    sampled[1 : 1 + len(plan.lag)] = True
    lag = rng.choice(plan.lag, count)
    lag[1 : 1 + len(plan.lag)] = plan.lag
    known = rng.random(count) < 0.9
    known[-1] = False
    experts = rng.random((count, layers, EXPERTS)).argsort(-1)[..., :k].astype(np.uint8)
    return Row(
        row_id=f"r{rollout}.{index}", rollout_id=f"r{rollout}", group_id=plan.group, task_id="t",
        token_ids=rng.integers(0, 256, count, dtype=np.int32), sampled=sampled,
        logprobs=np.where(sampled, 0.0, np.nan).astype(np.float32),
        versions=np.where(sampled, -lag, 1).astype(np.int32), call=np.where(sampled, index, -1).astype(np.int32),
        experts=experts, experts_known=known if layers else np.zeros(count, bool),
        temperature=plan.temperature, reward=plan.reward, status=plan.status,
    )  # fmt: skip


def plain_logp(model, row: Row) -> torch.Tensor:
    """Log-probs of a row's sampled tokens: transformers alone, one unpacked row, routes by hand."""
    ids_T = torch.from_numpy(row.token_ids).long()
    at_S = torch.from_numpy(np.flatnonzero(row.sampled))
    experts_LTK = torch.from_numpy(row.experts.astype(np.int64)).transpose(0, 1)
    routes = by_hand(model, experts_LTK, torch.from_numpy(row.experts_known)) if len(experts_LTK) else nullcontext()
    with routes:
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0]
    return (logits_TV[at_S - 1] / row.temperature).log_softmax(-1)[torch.arange(len(at_S)), ids_T[at_S]]


def make_rows(model, shape) -> list[list[Row]]:
    """Rows of every rollout of ``PLANS``; behaviour log-probs are the model's, plus noise and the plan's shift."""
    rng = np.random.default_rng(3)
    out = [[make_row(rng, plan, n, i, shape) for i in range(len(plan.lengths))] for n, plan in enumerate(PLANS)]
    for plan, rows in zip(PLANS, out, strict=True):
        for row in rows:
            with torch.no_grad():
                noise_S = rng.uniform(-0.3, 0.3, int(row.sampled.sum()))
                row.logprobs[row.sampled] = plain_logp(model, row).numpy() + noise_S + plan.shift
    return out


def split(row: Row) -> list[Row]:
    """The same sampled tokens in two rows: the second repeats the first's tokens as context."""
    cut = len(row) // 2
    names = ("token_ids", "sampled", "logprobs", "versions", "call", "experts", "experts_known")
    first = replace(row, row_id=row.row_id + "a", **{name: vars(row)[name][:cut] for name in names})
    second = replace(row, row_id=row.row_id + "b", **{name: vars(row)[name].copy() for name in names})
    second.sampled[:cut], second.logprobs[:cut], second.versions[:cut], second.call[:cut] = False, np.nan, -1, -1
    return [part for part in (first, second) if part.sampled.any()]


def reference_advantages(indices: list[int]) -> dict[int, float]:
    """GRPO by its definition: over the rollouts of a group that ended well."""
    out = dict.fromkeys(indices, 0.0)
    for n in indices:
        peers = [
            PLANS[i].reward
            for i in indices
            if (PLANS[i].node, PLANS[i].group) == (PLANS[n].node, PLANS[n].group) and PLANS[i].status != "agent_error"
        ]
        if PLANS[n].status != "agent_error":
            out[n] = (PLANS[n].reward - np.mean(peers)) / (np.std(peers, ddof=1) + 1e-6)
    return out


def reference(model, rollouts: list[list[Row]], indices: list[int]) -> SimpleNamespace:
    """Σ over kept tokens of −w·A·logp and its gradient, not yet divided, and every denominator."""
    advantage, kept, tokens, total = reference_advantages(indices), [], 0, 0.0
    model.zero_grad()
    for n in indices:
        logp = [plain_logp(model, row) for row in rollouts[n]]
        behaviour = [torch.from_numpy(row.logprobs[row.sampled]) for row in rollouts[n]]
        log_ratio = [(a - b).detach() for a, b in zip(logp, behaviour, strict=True)]
        if not logp or 2 in PLANS[n].lag or not 0.5 <= torch.cat(log_ratio).double().mean().exp() <= 2:
            continue
        kept.append(n)
        tokens += sum(map(len, logp))
        loss = sum(-(r.exp() * advantage[n] * a).sum() for r, a in zip(log_ratio, logp, strict=True))
        loss.backward()
        total += loss.item()
    groups = len({(PLANS[n].node, PLANS[n].group) for n in kept})
    return SimpleNamespace(
        kept=kept,
        loss=total,
        gradient={name: parameter.grad.clone() for name, parameter in model.named_parameters()},
        denominators={"token": tokens, "rollout": len(kept), "group": groups, "constant": CONSTANT},
    )


# ---------------------------------------------------------------------------------------------------------------
# The trainer in worlds of several ranks, and the scripted node
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One optimizer step: which rollouts, packed and divided how."""

    rows: str
    budget: str = "medium"
    denominator: str = "token"
    surrogate: str = "reinforce"

    @property
    def indices(self) -> list[int]:
        return FEW if self.rows.startswith("few") else list(range(len(PLANS)))


def steps_of(world: int, kind: str) -> list[Step]:
    """The first two steps hold tokens of lag 0 only: there is no version −1."""
    out = [Step("few"), Step("few_split")] + [Step("all", budget) for budget in BUDGETS]
    if world == 2:
        out += [Step("all_split")]
    if world == 2 and kind == "dense":
        out += [Step("all", denominator=kind) for kind in gate.DENOMINATORS[1:]] + [Step("all", surrogate="ppo")]
    return out


def config(folder: Path, kind: str, run: str, **changes) -> rl.TrainConfig:
    return rl.TrainConfig(
        model=str(folder / kind / "model"), out=str(folder / kind / run), rollout_urls="http://a,http://b",
        advantage="grpo", gate="geo:mask:0.5:2", max_lag=1, denominator_constant=CONSTANT, head_chunk=5, grad_clip=1e9,
        lr=1e-2, warmup_steps=0, eval_tasks=0, wait_s=60, steps=len(ScriptedNodes.steps) or 1,
        probe_agreement=0.0, **changes,
    )  # fmt: skip


class ScriptedNodes:
    """Two rollout nodes' answers, from a file. Every rank has one; ``version`` follows the trainer's."""

    steps: list[Step] = []  # noqa: RUF012
    rows_file: Path
    current: ScriptedNodes

    def __init__(self, cfg):
        self.cfg, self.version, self.total = cfg, 0, 0
        self.urls = ["http://a", "http://b"]
        self.known = {row.row_id: row for row in unpack_rows(self.rows_file.read_bytes())}
        ScriptedNodes.current = self
        self.apply()

    def apply(self) -> None:
        """The current step's settings, on every rank."""
        step = self.steps[min(self.version, len(self.steps) - 1)]
        self.cfg.token_budget = BUDGETS[step.budget]
        self.cfg.denominator, self.cfg.surrogate = step.denominator, step.surrogate

    def wait_ready(self) -> list[dict]:
        state = {"ready": True, "max_lag": self.cfg.max_lag, "version": 0, "engine_seconds": 0.0}
        return [state | {"seed": seed, "filter_groups": False, "versions_per_step": 1} for seed in (0, 1)]

    def sampled(self) -> int:
        """What the engines count themselves."""
        return self.total

    def settle(self, ledger: dict) -> None:
        """No node is ever gone."""

    def row_ids(self, rollout: int) -> list[str]:
        ids = [f"r{rollout}.{i}" for i in range(len(PLANS[rollout].lengths))]
        if self.steps[self.version].rows.endswith("split"):
            ids = [part for name in ids for part in (name + "a", name + "b")]
        return [name for name in ids if name in self.known]

    def manifest(self, version: int) -> dict:
        assert version == self.version
        parts = []
        for node, url in enumerate(self.urls):
            groups: dict[int, list[dict]] = {}
            for n in self.steps[version].indices:
                rows = [self.known[name] for name in self.row_ids(n)]
                listed = [{"row_id": r.row_id, "tokens": len(r), "sampled": int(r.sampled.sum())} for r in rows]
                rollout = {
                    "rollout_id": f"r{n}",
                    "status": PLANS[n].status,
                    "reward": PLANS[n].reward,
                    "rows": listed,
                    "rewards": [0.0] * (len(PLANS[n].lengths) - 1) + [PLANS[n].reward] if rows else [],
                }
                if PLANS[n].node == node:
                    groups.setdefault(PLANS[n].group, []).append(rollout)
            sampled = sum(r["sampled"] for group in groups.values() for rollout in group for r in rollout["rows"])
            self.total += sampled + 7
            ledger = {"sampled": sampled + 7, "pending_before": 2, "pending_after": 5, "dropped": {"agent_error": 4}}
            listed = [{"group_id": name, "rollouts": rollouts} for name, rollouts in groups.items()]
            parts.append(
                {"url": url, "groups": listed, "ledger": ledger, "meters": {"identity/route_conflicts": CONFLICTS}}
            )
        return {"step": version + 1} | rl.merge_manifests(parts)

    def rows(self, url: str, row_ids: list[str], step: int) -> list[Row]:
        assert step == self.version + 1
        assert all(PLANS[int(name[1:].split(".")[0])].node == self.urls.index(url) for name in row_ids)
        rows = [self.known[name] for name in row_ids]
        return [replace(row, versions=np.where(row.sampled, row.versions + self.version, -1)) for row in rows]

    def each(self, path: str, bodies) -> list[SimpleNamespace]:
        ledger = {"sampled": 0, "pending_before": 0, "pending_after": 0, "dropped": {}}
        return [SimpleNamespace(json=lambda: ledger, content=self.probe_rows(i)) for i in range(len(self.urls))]

    def probe_rows(self, node: int) -> bytes:
        """What an engine that agrees with the trainer would answer, plus ``offset``."""
        row = self.known[f"probe{node}"]
        return pack_rows([replace(row, logprobs=row.logprobs + np.float32(self.offset))])

    offset = 0.0


class Observer:
    """Takes the places of rl.Syncer and of the optimizer, and writes down what they meet."""

    folder: Path

    def __init__(self, optimizer, policy):
        self.optimizer, self.policy, self.param_groups = optimizer, policy, optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        """The gradients to a file; the weights change in world 2's last step only."""
        nodes = ScriptedNodes.current
        gradients = {name: rl.full(p.grad) for name, p in self.policy.model.named_parameters() if p.grad is not None}
        if torch.distributed.get_rank() == 0:
            save_file(gradients, self.folder / f"gradient{nodes.version}.safetensors")
        if nodes.version == len(nodes.steps) - 1 and torch.distributed.get_world_size() == 2:
            self.optimizer.step()


class ObservedSyncer(rl.Syncer):
    """The real one without an engine: it gathers the weights as the real one does, and probes where it can."""

    def connect(self, workers):
        return None

    def sync(self, version: int) -> float:
        nodes, folder = ScriptedNodes.current, Observer.folder
        last = version == len(nodes.steps)
        if not last:
            difference = self.probe()
        else:
            sent = dict(self.weights)
            if self.ranks.rank == 0:
                save_file({name: tensor.contiguous() for name, tensor in sent.items()}, folder / "sent.safetensors")
                meta = [[meta.name, str(meta.dtype), list(meta.shape)] for meta in self.weights.metadata()]
                order = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in sent.items()]
                (folder / "meta.json").write_text(json.dumps({"metadata": meta, "iteration": order}))
            difference = self.refused_probe(folder)
        nodes.version = version
        nodes.apply()
        return difference

    def refused_probe(self, folder: Path) -> float:
        """The node's answer is not that of weights that have just changed, or is NaN: every rank must refuse it."""
        for name, offset in (("changed", 0.0), ("nan", math.nan)):
            ScriptedNodes.current.offset = offset
            try:
                self.probe()
            except RuntimeError as error:
                (folder / f"{name}{self.ranks.rank}.txt").write_text(str(error))
        return 0.0


class EagerPolicy(rl.Policy):
    """torch has no grouped matrix product in float64; float32 runs use it as the trainer does."""

    def __init__(self, cfg, *args):
        super().__init__(cfg, *args)
        if cfg.dtype == "float64":
            self.model.set_experts_implementation("eager")


def rank_main(rank: int, world: int, folder: Path, port: int) -> None:
    """What one rank of one world does, for both models."""
    rl.Nodes, rl.Syncer, rl.Policy = ScriptedNodes, ObservedSyncer, EagerPolicy
    make_optimizer = rl.make_optimizer

    def observed(policy, cfg):
        return Observer(make_optimizer(policy, cfg), policy)

    rl.make_optimizer = observed
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    runs = [("dense", f"world{world}", {}), ("moe", f"world{world}", {})]
    if world == 2:
        recompute = {"checkpoint_activations": True, "dtype": "float32"}
        runs += [("dense", "recomputed", recompute), ("moe", "recomputed", recompute)]
        runs += [("moe", "frozen", {"freeze_router": True})]
    for offset, (kind, run, changes) in enumerate(runs):
        os.environ["MASTER_PORT"] = str(port + offset)
        ScriptedNodes.steps = [Step("few")] if changes else steps_of(world, kind)
        Observer.folder = folder / kind / run
        Observer.folder.mkdir(exist_ok=True)
        ScriptedNodes.rows_file = folder / kind / "rows.safetensors"
        rl.train(config(folder, kind, run, **{"dtype": "float64"} | changes))
    if world == 1:
        half_precision(folder, port + len(runs))


def half_precision(folder: Path, port: int) -> None:
    """What reaches the log-softmax when the forward runs in bfloat16."""
    os.environ["MASTER_PORT"] = str(port)
    cfg = config(folder, "dense", "bfloat16", dtype="bfloat16")
    ranks = rl.Ranks(cfg)
    policy = rl.shard(rl.Policy(cfg), cfg, ranks)
    seen, original = [], gate.token_logprobs
    gate.token_logprobs = lambda *args: seen.append(args) or original(*args)
    three = torch.arange(3)
    policy(three, three, three[:2], three[1:], torch.tensor([0.7, 0.9]))
    weights = rl.Weights(policy, torch.bfloat16)
    found = {
        "temperature": seen[0][2].tolist(),
        "logits": str(seen[0][0].dtype),
        "master": str(next(policy.parameters()).dtype),
        "sent": sorted({str(tensor.dtype) for _, tensor in weights} | {str(m.dtype) for m in weights.metadata()}),
    }
    (folder / "bfloat16.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def worlds_main(folder: Path) -> None:
    """Fork each world from this process, which has imported everything and computed nothing."""
    for kind in SHAPES:
        AutoModelForCausalLM.from_pretrained(folder / kind / "model")
    contexts = {
        world: torch.multiprocessing.start_processes(
            rank_main, (world, folder, free_port()), world, join=False, start_method="fork"
        )
        for world in (1, 2, 4)
    }
    for world, context in contexts.items():
        while not context.join():
            pass
        (folder / f"world{world}.done").touch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rl")


@pytest.fixture(scope="module")
def models(folder) -> dict[str, tuple]:
    """Per kind: a plain transformers model, and the rollouts' rows."""
    out = {}
    for kind, shape in SHAPES.items():
        path = make_model(folder / kind / "model", kind == "moe")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
        model.set_experts_implementation("eager")  # torch has no grouped matrix product in float64
        out[kind] = model, make_rows(model, shape)
    return out


@pytest.fixture(scope="module", autouse=True)
def worlds(folder, models):
    """Start the worlds; the tests of this process run beside them."""
    for kind, (model, rollouts) in models.items():
        rows = [row for rows in rollouts for row in rows]
        probes = [replace(rows[0], row_id="probe0"), replace(rows[4], row_id="probe1")]
        for probe in probes:
            probe.logprobs = probe.logprobs.copy()
            with torch.no_grad():
                probe.logprobs[probe.sampled] = plain_logp(model, probe).numpy()
        everything = rows + [part for row in rows for part in split(row)] + probes
        (folder / kind / "rows.safetensors").write_bytes(pack_rows(everything))
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "worlds.log").open("w") as out:
        command = [sys.executable, __file__, str(folder)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(folder: Path, process, world: int) -> None:
    """Until a world is done; 120 s is far more than it takes."""
    end = time.monotonic() + 120
    while not (folder / f"world{world}.done").exists():
        dead = process.poll() is not None and not (folder / f"world{world}.done").exists()
        if dead or time.monotonic() > end:
            pytest.fail(f"world {world} did not finish:\n" + (folder / "worlds.log").read_text()[-2000:])
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------------------
# Packing, and the one forward
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policies(folder, models):
    """Per kind: an unsharded policy and its replay."""
    out = {}
    for kind in SHAPES:
        policy = rl.Policy(config(folder, kind, "unused"))
        out[kind] = policy, rl.make_replay(policy, config(folder, kind, "unused"))
    return out


def packed_logp(policy, replay, batch) -> torch.Tensor:
    context, forward = rl.run(policy, batch, replay)
    with torch.no_grad(), context:
        return forward()[0]


@pytest.mark.parametrize("kind", SHAPES)
def test_rows_packed_together_equal_each_alone_and_a_plain_forward(models, policies, kind):
    (model, rollouts), (policy, replay) = models[kind], policies[kind]
    rows = [(row, n) for n in (5, 0, 4, 2) for row in rollouts[n]]
    assert len({row.temperature for row, _ in rows}) == 3
    with torch.no_grad():
        plain_S = torch.cat([plain_logp(model, row) for row, _ in rows])
    alone_S = torch.cat([packed_logp(policy, replay, rl.pack([row], CPU)) for row in rows])
    batch = rl.pack(rows, CPU)
    torch.testing.assert_close(alone_S, plain_S, rtol=0, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(packed_logp(policy, replay, batch), plain_S, rtol=0, atol=1e-5, check_dtype=False)

    # The comparison can fail: positions that do not restart join the rows, and the model notices.
    joined = replace(batch, positions_T=torch.arange(len(batch.ids_T)))
    first = int(rows[0][0].sampled.sum())
    off_S = (packed_logp(policy, replay, joined) - plain_S).abs()
    assert off_S[:first].max() < 1e-5 and off_S[first:].max() > 0.1
    if replay:
        assert (packed_logp(policy, None, batch) - plain_S).abs().max() > 0.1  # and so do other experts


def test_pack_lays_out_every_array(models):
    _, rollouts = models["moe"]
    rows = [(rollouts[2][1], 2), (rollouts[8][0], 8), (rollouts[4][0], 4)]
    batch, start, taken = rl.pack(rows, CPU), 0, 0
    for row, n in rows:
        whole = slice(start, start + len(row))
        assert batch.ids_T[whole].tolist() == row.token_ids.tolist()
        assert batch.positions_T[whole].tolist() == list(range(len(row)))
        assert batch.known_T[whole].tolist() == row.experts_known.tolist()
        assert np.array_equal(batch.experts_LTK[:, whole].permute(1, 0, 2).numpy(), row.experts)
        for at in np.flatnonzero(row.sampled):
            assert batch.before_S[taken] == start + at - 1
            found = [vars(batch)[name][taken].item() for name in ("target_S", "behaviour_S", "version_S")]
            assert found == [row.token_ids[at], row.logprobs[at], row.versions[at]]
            assert (batch.rollout_S[taken], batch.trained_S[taken]) == (n, True)
            assert batch.temperature_S[taken] == np.float32(row.temperature)
            taken += 1
        start += len(row)
    assert start == len(batch.ids_T) and taken == len(batch.target_S)


@pytest.fixture(scope="module")
def exact(folder, models):
    """The dense policy in float64."""
    return rl.Policy(config(folder, "dense", "unused")).double()


def test_temperature_divides_the_logits(models, exact):
    model, rollouts = models["dense"]
    row = rollouts[1][0]
    temperatures = (0.5, 1.0, 2.0)
    batch = rl.pack([(replace(row, temperature=t), i) for i, t in enumerate(temperatures)], CPU)
    at = np.flatnonzero(row.sampled)
    with torch.no_grad():
        logits_SV = model(input_ids=torch.from_numpy(row.token_ids).long()[None]).logits[0, at - 1]
    target_S = torch.from_numpy(row.token_ids[at]).long()[:, None]
    expected = [(logits_SV / t).log_softmax(-1).gather(1, target_S)[:, 0] for t in temperatures]
    torch.testing.assert_close(packed_logp(exact, None, batch), torch.cat(expected), rtol=0, atol=1e-6)
    assert (expected[0] - expected[1] / 0.5).abs().max() > 0.1  # dividing log-probs would be something else


def test_o9_a_chunked_head_has_the_same_gradient_and_bounds_the_logits(models, exact, monkeypatch):
    (_, rollouts), policy = models["dense"], exact
    batch = rl.pack([(row, n) for n in FEW for row in rollouts[n]], CPU)
    heads, original = [], gate.token_logprobs

    def recorded(logits_SV, target_S, temperature_S):
        heads.append(tuple(logits_SV.shape))
        return original(logits_SV, target_S, temperature_S)

    monkeypatch.setattr(gate, "token_logprobs", recorded)

    def gradient(chunk):
        heads.clear()
        monkeypatch.setattr(policy, "head_chunk", chunk)
        policy.zero_grad()
        logp_S, entropy_S, _ = policy(
            batch.ids_T, batch.positions_T, batch.before_S, batch.target_S, batch.temperature_S
        )
        (logp_S * torch.linspace(-1, 1, len(logp_S))).sum().backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters()}, logp_S.detach(), entropy_S.detach()

    trained, vocabulary = len(batch.target_S), policy.model.config.vocab_size
    assert trained < len(batch.ids_T)
    whole, logp_S, entropy_S = gradient(10_000)
    assert heads == [(trained, vocabulary)] * 2, "trained positions only: once forward, once recomputed"
    chunked, chunked_logp_S, chunked_entropy_S = gradient(3)
    assert {rows for rows, _ in heads} <= {3, trained % 3}
    assert sum(rows for rows, _ in heads) == 2 * trained
    torch.testing.assert_close((chunked_logp_S, chunked_entropy_S), (logp_S, entropy_S), rtol=0, atol=1e-6)
    for name, grad in whole.items():
        assert (chunked[name] - grad).norm() <= 1e-6 * grad.norm(), name


def test_bins_example():
    assert rl.bins([5, 9, 4], 9) == [[1], [0, 2]]
    assert rl.bins([], 9) == []
    assert rl.bins([3, 20, 3], 6) == [[1], [0, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_bins_hold_every_row_once_and_keep_the_budget(seed):
    lengths = np.random.default_rng(seed).integers(1, 40, 60).tolist()
    for budget in (1, 10, 39, 100, 10_000):
        packed = rl.bins(lengths, budget)
        assert sorted(i for some in packed for i in some) == list(range(60))
        for some in packed:
            assert sum(lengths[i] for i in some) <= budget or len(some) == 1
        totals = [sum(lengths[i] for i in some) for some in packed]
        assert sum(2 * total <= budget for total in totals) <= 1, "two half-empty micro-batches would be one"


def listed(*tokens_of_rollouts: list[int]) -> list[dict]:
    return [{"rows": [{"tokens": tokens} for tokens in rows]} for rows in tokens_of_rollouts]


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_assign_gives_each_rollout_to_one_rank_and_balances_tokens(world):
    rng = np.random.default_rng(world)
    rollouts = listed(*(rng.integers(1, 50, rng.integers(0, 4)).tolist() for _ in range(40)))
    tokens = [sum(row["tokens"] for row in rollout["rows"]) for rollout in rollouts]
    shares = rl.assign(rollouts, world)
    assert sorted(i for share in shares for i in share) == [i for i in range(40) if tokens[i]]
    loads = [sum(tokens[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens)
    assert max(loads) <= 1.1 * sum(loads) / world


def test_assign_leaves_ranks_empty_rather_than_split_a_rollout():
    assert rl.assign(listed([5, 5], [], [30]), 4) == [[2], [0], [], []]


@pytest.mark.parametrize("kind", SHAPES)
def test_a_rank_with_nothing_gets_fillers_that_train_nothing(policies, kind):
    policy, replay = policies[kind]
    ranks = SimpleNamespace(**vars(ranks_of_one()) | {"most": lambda value: 2})
    batches = rl.micro_batches([], config(Path("/"), kind, "unused"), ranks, replay)
    assert len(batches) == 2
    batch = rl.Batch.of(batches)
    assert not batch.trained_S.any()
    logp_S = rl.score(policy, batches, replay).logp_S
    assert torch.isfinite(logp_S).all()
    decision = gate.gate("geo", "mask", 0.5, 2, gate.log_ratio(logp_S, batch.behaviour_S, batch.trained_S),
                         batch.rollout_S, batch.trained_S)  # fmt: skip
    assert not decision.keep_T.any() and not rl.reason_counts(decision, batch).any()
    if replay:
        for layer in batches[0].experts_LTK:
            assert len(layer.unique()) == layer.numel()


def test_m11_a_reference_chooses_its_own_experts(models, policies, folder):
    """Scored beside a policy whose routes are replayed, it gives what transformers gives without any."""
    (_, rollouts), (policy, replay) = models["moe"], policies["moe"]
    plain = AutoModelForCausalLM.from_pretrained(folder / "moe" / "model", dtype=torch.float32)
    batch, row = rl.pack([(rollouts[5][0], 5)], CPU), rollouts[5][0]
    reference = rl.Policy(config(folder, "moe", "unused"))
    replayed_S = rl.score(policy, [batch], replay).logp_S
    with torch.no_grad(), replay.use(batch.experts_LTK, batch.known_T, False):
        own_S = rl.score(reference, [batch], None).logp_S
    with torch.no_grad():
        live_S = plain_logp(plain, replace(row, experts=row.experts[:, :0]))
    torch.testing.assert_close(own_S, live_S, rtol=0, atol=1e-5, check_dtype=False)
    assert (replayed_S - own_S).abs().max() > 0.1


def test_a_mini_batch_of_which_nothing_is_kept_moves_nothing(models, policies, monkeypatch):
    """The optimizer's momentum would move the weights without a gradient."""
    _, rollouts = models["dense"]
    policy, batch = policies["dense"][0], rl.pack([(rollouts[5][0], 0)], CPU)
    none_S, false_S = torch.zeros(len(batch.target_S)), torch.zeros(len(batch.target_S), dtype=torch.bool)
    terms = rl.Terms(batch.rollout_S, batch.trained_S, none_S, none_S, none_S, none_S, false_S, none_S, none_S)
    ranks = SimpleNamespace(**vars(ranks_of_one()) | {"sum": lambda value: value.double()})
    monkeypatch.setattr(rl, "full", lambda tensor: tensor)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0, momentum=0.9)
    for parameter in policy.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    cfg = replace(rl.TrainConfig(), denominator="token")
    found = rl.update(policy, optimizer, [batch], terms, cfg, ranks, None, torch.zeros(1).long(), 0.0, False)
    assert found == {"loss": 0.0, "grad_norm": 0.0, "denominator": 0.0, "clip_share": 0.0}
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_token_that_breaks_a_law_is_named_by_its_row_and_its_place_there(models):
    _, rollouts = models["dense"]
    rows = [(rollouts[2][1], 2), (rollouts[8][0], 8), (rollouts[4][0], 4)]
    batches = [rl.pack(rows[:2], CPU), rl.pack(rows[2:], CPU)]
    batch = rl.Batch.of(batches)
    counts = [int(row.sampled.sum()) for row, _ in rows]
    for number, (row, _) in enumerate(rows):
        logp_S = batch.behaviour_S.clone()
        logp_S[sum(counts[:number]) + 1] = math.nan
        place = np.flatnonzero(row.sampled)[1]
        named = rf"row '{row.row_id}', token {place}: logp or .* logp=nan, behaviour=-"
        with pytest.raises(ValueError, match=named), rl.named_rows(batches):
            gate.log_ratio(logp_S, batch.behaviour_S, batch.trained_S)


def test_g15_a_batch_that_is_nearly_all_cut_short_is_warned_of(caplog, capsys, tmp_path):
    cfg = rl.TrainConfig(out=str(tmp_path))
    journal = rl.Journal(cfg, ranks_of_one(), rl.Saved(cfg.out, 0, 0.0, None, {}, {}))
    m = dict.fromkeys(("gate/lag_mean", "gate/gated", "mismatch/mean", "sync/probe_max_abs_dlogp", "tokens_per_second",
                       "seconds/generate", "seconds/train", "seconds/sync"), 0.0)  # fmt: skip
    for truncated, warned in ((18, False), (19, True)):
        rows = [{"row_id": "r", "tokens": 4, "sampled": 1}]
        rollouts = [{"status": "truncated" if n < truncated else "ok", "reward": 1.0, "rows": rows} for n in range(20)]
        found = rl.rollout_metrics([*rollouts, {"status": "agent_error", "reward": 0.0, "rows": []}])
        assert found == {"reward": 1.0, "rollout/truncated": truncated / 20, "gate/masked": 0.75}
        caplog.clear()
        journal.step({"step": 3} | m | found)
        assert ("95% of the rollouts were truncated" in caplog.text) == warned


def test_a_reference_of_another_vocabulary_is_refused(good, tmp_path):
    other = toy.tokenizer()
    other.add_tokens(["<|more|>"])
    other.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((Path(good.model) / "config.json").read_text())
    with pytest.raises(ValueError, match=r"another vocabulary.*<\|more\|>"):
        rl.validate(replace(good, ref_model=str(tmp_path)))
    rl.validate(replace(good, ref_model=good.model, advantage="on_policy_distill"))


# ---------------------------------------------------------------------------------------------------------------
# The invariance law
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def references(models):
    """Per kind and per set of rollouts."""
    return {
        (kind, name): reference(model, rollouts, indices)
        for kind, (model, rollouts) in models.items()
        for name, indices in (("all", list(range(len(PLANS)))), ("few", FEW))
    }


def gradient_error(actual: dict, expected: dict, denominator: float) -> float:
    """The largest error of a parameter's gradient, relative to its length."""
    assert set(actual) == set(expected)
    errors = [(actual[n] * denominator - expected[n]).norm() / expected[n].norm() for n in expected]
    return float(torch.stack(errors).max())


def test_the_batch_is_what_the_law_needs(models, references):
    for kind, (_, rollouts) in models.items():
        whole, few = references[kind, "all"], references[kind, "few"]
        assert whole.kept == KEPT and few.kept == FEW
        assert len(set(whole.denominators.values())) == 4
        assert whole.denominators["token"] == sum(int(row.sampled.sum()) for n in KEPT for row in rollouts[n])
        assert all(grad.norm() > 1e-3 for grad in whole.gradient.values())
        assert gradient_error(few.gradient, whole.gradient, 1.0) > 0.1


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", SHAPES)
def test_the_gradient_is_the_reference_for_every_world_budget_and_denominator(folder, worlds, references, kind, world):
    wait_for(folder, worlds, world)
    for version, step in enumerate(steps_of(world, kind)):
        expected = references[kind, step.rows.removesuffix("_split")]
        actual = load_file(folder / kind / f"world{world}" / f"gradient{version}.safetensors")
        error = gradient_error(actual, expected.gradient, expected.denominators[step.denominator])
        assert error <= TOLERANCE["float64"], f"{step}: {error:.1e}"


@pytest.mark.parametrize("kind", SHAPES)
def test_m6_recomputed_activations_give_the_same_gradient(folder, worlds, references, kind):
    wait_for(folder, worlds, 2)
    expected = references[kind, "few"]
    actual = load_file(folder / kind / "recomputed" / "gradient0.safetensors")
    assert gradient_error(actual, expected.gradient, expected.denominators["token"]) <= TOLERANCE["float32"]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", SHAPES)
def test_ledger_and_metrics_of_every_world_are_the_references(folder, worlds, models, references, kind, world):
    wait_for(folder, worlds, world)
    run, rollouts = folder / kind / f"world{world}", models[kind][1]
    steps, ledger, metrics = steps_of(world, kind), read_lines(run / "ledger.jsonl"), read_lines(run / "metrics.jsonl")
    assert len(ledger) == len(steps) + 1 and len(metrics) == len(steps)
    for step, line, m in zip(steps, ledger, metrics, strict=False):
        expected = references[kind, step.rows.removesuffix("_split")]
        sampled = {n: sum(int(row.sampled.sum()) for row in rollouts[n]) for n in step.indices}
        gated = {reason: sum(sampled.get(n, 0) for n in REASON if REASON[n] == reason) for reason in line["gated"]}
        total = sum(sampled.values())
        assert line["trained"] == expected.denominators["token"] and line["gated"] == gated and line["masked"] == 0
        assert line["sampled"] == total + 14 and line["dropped"] == {"agent_error": 8}
        assert len(line["ranks"]) == world and sum(sum(rank.values()) for rank in line["ranks"]) == total
        if step.rows == "few":
            assert sum(not any(rank.values()) for rank in line["ranks"]) == max(0, world - len(FEW))
        denominator = expected.denominators[step.denominator]
        assert m["denominator"] == pytest.approx(denominator, rel=1e-12)
        assert m["gate/kept"] == pytest.approx(line["trained"] / total)
        assert m["sync/probe_max_abs_dlogp"] < 1e-5
        if step.surrogate == "reinforce":
            assert m["loss"] == pytest.approx(expected.loss / denominator, rel=1e-4)
    assert ledger[-1]["sampled"] == 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_m13_replay_meters_count_rows_of_the_batch_once(folder, worlds, models, world):
    """Fillers are no rows: they are neither replayed nor live, and lower no router's agreement."""
    wait_for(folder, worlds, world)
    metrics = read_lines(folder / "moe" / f"world{world}" / "metrics.jsonl")
    wait_for(folder, worlds, 1)
    alone = read_lines(folder / "moe" / "world1" / "metrics.jsonl")
    for version, step in enumerate(steps_of(world, "moe")):
        if step.rows.endswith("split"):
            continue
        rows = [row for n in step.indices for row in models["moe"][1][n]]
        known, total = sum(int(row.experts_known.sum()) for row in rows), sum(len(row) for row in rows)
        ends = sum(not row.experts_known[-1] for row in rows)
        m, shares = metrics[version], {"replayed": known, "live/last_token": ends, "live/gap": total - known - ends}
        for name, number in (shares | {"conflicting": 2 * CONFLICTS}).items():
            assert m[f"replay/{name}"] == pytest.approx(number / total, rel=1e-12), (step, name)
        for layer in range(LAYERS):
            same = alone[0 if step.rows == "few" else 2][f"replay/agreement/{layer}"]
            assert m[f"replay/agreement/{layer}"] == pytest.approx(same, abs=2 / known), step


def test_a_nan_is_named_by_its_row_where_replay_is_measured(models, policies):
    (_, rollouts), (policy, replay) = models["moe"], policies["moe"]
    batch = rl.pack([(rollouts[4][0], 4), (rollouts[5][0], 5)], CPU)
    scored = rl.score(policy, [batch], replay, metered=True)
    place = int(rollouts[4][0].sampled.sum())
    scored.logp_S[place] = math.nan
    ranks = SimpleNamespace(sum=lambda value: value, concat=lambda value: value)
    named = rf"row 'r5.0', token {np.flatnonzero(rollouts[5][0].sampled)[0]}: .* logp=nan"
    with pytest.raises(ValueError, match=named):
        rl.replay_metrics(policy, [batch], scored, 0, 0.0, ranks, replay)


def test_k3_with_and_without_replay_is_of_one_micro_batch(folder, worlds, models):
    """Where one micro-batch holds everything, it is the k3 of the batch."""
    wait_for(folder, worlds, 1)
    model, rollouts = models["moe"]
    steps = steps_of(1, "moe")
    m = read_lines(folder / "moe" / "world1" / "metrics.jsonl")[steps.index(Step("all", "everything"))]
    rows = [row for some in rollouts for row in some]
    behaviour = [row.logprobs[row.sampled] for row in rows]
    for name, routed in (("replayed", rows), ("live", [replace(row, experts=row.experts[:, :0]) for row in rows])):
        with torch.no_grad():
            log_ratio = np.concatenate(
                [plain_logp(model, r).numpy() - b for r, b in zip(routed, behaviour, strict=True)]
            )
        assert m[f"replay/k3_{name}"] == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-5), name
    assert m["replay/k3_live"] > 2 * m["replay/k3_replayed"]
    tiny = read_lines(folder / "moe" / "world1" / "metrics.jsonl")[steps.index(Step("all", "tiny"))]
    assert tiny["replay/k3_replayed"] != m["replay/k3_replayed"]


# ---------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------


def checkpoint(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("kind", SHAPES)
def test_s4_weights_sent_after_a_step_are_the_saved_ones_under_checkpoint_names(folder, worlds, kind):
    """The list was made after one no-grad forward and read after many, an optimizer step and another forward."""
    wait_for(folder, worlds, 2)
    run, before = folder / kind / "world2", checkpoint(folder / kind / "model")
    sent, saved = load_file(run / "sent.safetensors"), checkpoint(run / "model")
    assert set(sent) == set(saved) == set(before)
    for name, tensor in sent.items():
        assert torch.equal(tensor.float(), saved[name]) and tensor.shape == before[name].shape
        assert not torch.equal(saved[name], before[name]), f"{name} did not change in the optimizer step"
    described = json.loads((run / "meta.json").read_text())
    assert described["metadata"] == described["iteration"], "the receiver posts its buffers in this order"
    assert sorted(name for name, _, _ in described["metadata"]) == sorted(before)


def test_frozen_routers_are_neither_trained_nor_sent(folder, worlds):
    """All else is trained by the gradient that it has beside routers that learn, in a world of two shards."""
    wait_for(folder, worlds, 2)
    run, before = folder / "moe" / "frozen", checkpoint(folder / "moe" / "model")
    sent, saved = load_file(run / "sent.safetensors"), checkpoint(run / "model")
    routers = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(LAYERS)}
    assert set(sent) == set(before) - routers and set(saved) == set(before)
    for name, tensor in before.items():
        assert torch.equal(saved[name], tensor) == (name in routers), name
    gradients = load_file(run / "gradient0.safetensors")
    free = load_file(folder / "moe" / "world2" / "gradient0.safetensors")
    assert set(gradients) == set(free) - routers and free[min(routers)].abs().max() > 0
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, free[name], rtol=1e-9, atol=1e-12)


def test_a_dense_model_has_no_routers_to_freeze(folder, models):
    with pytest.raises(ValueError, match="--freeze_router True, but the model has no routers; leave it out"):
        rl.freeze_routers(rl.Policy(config(folder, "dense", "unused")))


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("kind", SHAPES)
def test_gathered_weights_are_the_checkpoints_in_any_world(folder, worlds, kind, world):
    wait_for(folder, worlds, world)
    run, before = folder / kind / f"world{world}", checkpoint(folder / kind / "model")
    sent, saved = load_file(run / "sent.safetensors"), checkpoint(run / "model")
    assert set(sent) == set(saved) == set(before)
    for name, tensor in before.items():
        assert torch.equal(sent[name].float(), tensor) and torch.equal(saved[name], tensor), name


@pytest.mark.parametrize("kind", SHAPES)
def test_a_saved_model_gives_identical_logits(folder, tmp_path, kind):
    cfg = config(folder, kind, "unused")
    policy = rl.Policy(cfg).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    rl.save_model(policy, cfg, tmp_path, True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    assert toy.tokenizer().get_vocab() == rl.AutoTokenizer.from_pretrained(tmp_path).get_vocab()


def test_a_saved_model_keeps_what_is_no_parameter(tmp_path):
    """DeepSeek's routing bias is a buffer; a model saved without it would route by zeros."""
    model = deepseek()
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.uniform_(-0.5, 0.5)
    model.save_pretrained(tmp_path / "before")
    toy.tokenizer().save_pretrained(tmp_path / "before")
    cfg = rl.TrainConfig(model=str(tmp_path / "before"))
    policy = rl.Policy(cfg)
    rl.save_model(policy, cfg, tmp_path / "after", True)
    before, after = checkpoint(tmp_path / "before"), checkpoint(tmp_path / "after")
    assert set(after) == set(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("tied", [True, False])
def test_s5_s7_weights_of_plain_tensors_and_of_an_untied_head(tmp_path, kind, tied):
    config = toy.untrained(kind == "moe", 0).config
    config.tie_word_embeddings = tied
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = rl.Weights(rl.Policy(rl.TrainConfig(model=str(tmp_path))), torch.float32)
    sent, expected = list(weights), checkpoint(tmp_path)
    assert len(sent) == len(dict(sent)) and set(dict(sent)) == set(expected)
    assert ("lm_head.weight" in dict(sent)) == (not tied)
    assert ("model.layers.1.mlp.experts.7.down_proj.weight" in dict(sent)) == (kind == "moe")
    assert not any("experts.gate_up_proj" in name for name in dict(sent))
    for (name, tensor), meta in zip(sent, weights.metadata(), strict=True):
        assert torch.equal(tensor, expected[name]), name
        assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))


@pytest.mark.parametrize("kind", SHAPES)
def test_s7_a_probe_of_other_weights_is_refused_on_every_rank(folder, worlds, kind):
    wait_for(folder, worlds, 2)
    for rank in range(2):
        error = (folder / kind / "world2" / f"changed{rank}.txt").read_text()
        difference = float(re.search("differ from the trainer's by ([^:,]+)", error)[1])
        assert difference > 1e-2 and "probe_bound 0.0001" in error
        assert ("in shares [" in error) == (kind == "moe")


def test_a_probe_that_is_nan_is_refused(folder, worlds):
    wait_for(folder, worlds, 1)
    refusal = folder / "dense" / "world1" / "nan0.txt"
    assert refusal.exists(), "a probe whose difference is NaN passed"
    assert "differ from the trainer's by nan" in refusal.read_text()
    assert not (folder / "dense" / "world1" / "changed0.txt").exists()  # the weights are the node's


def test_g1_half_precision_touches_neither_temperature_nor_master_weights(folder, worlds):
    wait_for(folder, worlds, 1)
    found = json.loads((folder / "bfloat16.json").read_text())
    assert (found["logits"], found["master"], found["sent"]) == ("torch.bfloat16", "torch.float32", ["torch.bfloat16"])
    assert found["temperature"] == pytest.approx([0.7, 0.9], rel=1e-6), "0.7 is 0.69921875 in bfloat16"


# ---------------------------------------------------------------------------------------------------------------
# Ledger and manifests
# ---------------------------------------------------------------------------------------------------------------

NODE = {"sampled": 20, "pending_before": 3, "pending_after": 4, "dropped": {"stale": 2, "agent_error": 1}}
COUNTS_RC = [[5, 1, 2, 0, 3, 0], [3, 0, 0, 1, 0, 1]]
"""Two ranks' sampled tokens by ``gate.REASONS``: 16, so 20 + 3 = 16 + 3 + 4."""


def test_a_balanced_ledger_line():
    line = rl.ledger_line(7, NODE, torch.tensor(COUNTS_RC), 16)
    assert line["step"] == 7 and line["trained"] == 8 and line["masked"] == 1
    assert line["gated"] == {"ratio_low": 2, "ratio_high": 1, "stale": 3, "divergence": 1}
    assert [sum(rank.values()) for rank in line["ranks"]] == [11, 5]
    assert json.loads(json.dumps(line)) == line


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("term", ["sampled", "pending_before", "pending_after", "stale", "agent_error"])
def test_a_ledger_off_by_one_token_at_a_node_raises(term, by):
    node = json.loads(json.dumps(NODE))
    (node["dropped"] if term in node["dropped"] else node)[term] += by
    with pytest.raises(RuntimeError, match=r"ledger does not balance at step 7: \d+ != \d+, rows listed 16"):
        rl.ledger_line(7, node, torch.tensor(COUNTS_RC), 16)


@pytest.mark.parametrize("reason", gate.REASONS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_ledger_off_by_one_token_at_a_rank_raises(rank, reason):
    counts_RC = torch.tensor(COUNTS_RC)
    counts_RC[rank, gate.REASONS.index(reason)] += 1
    with pytest.raises(RuntimeError, match="ledger does not balance at step 7: 23 != 24"):
        rl.ledger_line(7, NODE, counts_RC, 16)
    with pytest.raises(RuntimeError, match="ledger does not balance"):
        rl.ledger_line(7, NODE, counts_RC, 17)


@pytest.mark.parametrize("listed_tokens", [15, 17])
def test_rows_listed_but_not_received_raise(listed_tokens):
    with pytest.raises(RuntimeError, match=f"23 != 23, rows listed {listed_tokens}"):
        rl.ledger_line(7, NODE, torch.tensor(COUNTS_RC), listed_tokens)


def two_manifests(**meters) -> dict:
    """Two nodes that number their groups and rollouts alike. ``meters``: name → the two nodes' values."""
    parts = []
    for node, url in enumerate(("http://a", "http://b")):
        group = {"group_id": 3, "rollouts": [{"rollout_id": "3-0", "reward": float(node)}]}
        ledger = {"sampled": 10 + node, "pending_before": 1, "pending_after": 2 + node, "dropped": {"stale": 1 + node}}
        ledger["dropped"] |= {"probe": 5} if node else {}
        values = {name.replace("__", "/"): pair[node] for name, pair in meters.items() if pair[node] is not None}
        parts.append({"url": url, "groups": [group], "ledger": ledger, "meters": values})
    return rl.merge_manifests(parts)


def test_manifests_of_two_nodes_are_merged():
    merged = two_manifests()
    assert [(r["url"], r["group"], r["reward"]) for r in merged["rollouts"]] == [
        ("http://a", "0/3", 0.0),
        ("http://b", "1/3", 1.0),
    ]
    dropped = {"stale": 3, "probe": 5}
    assert merged["ledger"] == {"sampled": 21, "pending_before": 2, "pending_after": 5, "dropped": dropped}


def test_a_run_that_did_not_finish_cannot_be_trained_again(tmp_path):
    cfg = rl.TrainConfig(retrain=str(tmp_path), steps=2)
    batch, end = {"rollouts": []}, {"ledger": {}, "sampled": 3}
    for lines, ok in (([batch, batch, end], True), ([batch, batch], False), ([batch, end], False)):
        (tmp_path / "schedule.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with nullcontext() if ok else pytest.raises(ValueError, match="did not finish its 2 steps"):
            assert rl.Recorded(cfg).sampled() == 3


def test_meters_of_two_nodes_are_summed_when_they_count_and_averaged_when_they_are_means():
    merged = two_manifests(
        rollout__status__ok=(4, 2), rollout__status__agent_error=(None, 2), identity__closing_tokens=(3, 5),
        rollout__reprefilled_tokens=(10, 0), rollout__cached_tokens=(3, 4),
        identity__segments_per_rollout=(1.0, 2.0), rollout__calls=(2.0, 3.0),
    )["meters"]  # fmt: skip
    assert merged["identity/segments_per_rollout"] == 1.5 and merged["rollout/calls"] == 2.5
    assert merged["rollout/status/ok"] == 6 and merged["rollout/status/agent_error"] == 2
    assert merged["identity/closing_tokens"] == 8 and merged["rollout/reprefilled_tokens"] == 10
    assert merged["rollout/cached_tokens"] == 7


# ---------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------


def test_metrics_go_to_a_tracker_whose_package_is_there(monkeypatch, tmp_path):
    """TensorBoard and Weights & Biases, as fakes of the few calls that they get."""
    told = []
    fake = types.SimpleNamespace(
        init=lambda **given: told.append(given) or types.SimpleNamespace(log=lambda m, step: told.append((step, m))),
        SummaryWriter=lambda folder, flush_secs: types.SimpleNamespace(add_scalar=lambda *one: told.append(one)),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    cfg = rl.TrainConfig(model="m", out=str(tmp_path / "a run"))
    rl.TRACKERS["wandb"](cfg)({"step": 3, "reward": 0.5})
    assert told[0]["name"] == "a run" and told[0]["config"]["model"] == "m"
    assert told.pop() == (3, {"step": 3, "reward": 0.5})
    rl.TRACKERS["tensorboard"](cfg)({"step": 3, "reward": 0.5})
    assert told[-1] == ("reward", 0.5, 3)
    journal = rl.Journal(
        rl.replace(cfg, track="wandb"), types.SimpleNamespace(rank=0), types.SimpleNamespace(run="", step=0)
    )
    journal.evaluation(
        {"step": 4, "reward": 0.5, "low": None, "pass": {"1": [0.25, None, None]}, "tasks": 1, "failed": 0}
    )
    assert told[-1] == (4, {"step": 4, "eval/reward": 0.5, "eval/pass@1": 0.25})
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(rl, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--track wandb: the package is not installed: .venv/bin/pip install wandb"):
        rl.validate(rl.replace(cfg, track="wandb", model=str(tmp_path)))


def test_an_evaluation_by_task_by_source_and_with_intervals():
    assert rl.pass_at(2, [1, 0, 0, 0], 1) == 0.5
    assert rl.pass_at(4, [1, 0, 0, 0], 1) == 1.0 and rl.pass_at(1, [0.5, 0.0], 1) == 0.0
    rewards = {"a": ("x", [1.0, 0.0]), "b": ("x", [1.0]), "c": ("y", [0.0, 0.0]), "d": ("", [])}
    tasks = [{"task_id": name, "source": source, "rewards": some} for name, (source, some) in rewards.items()]
    found = rl.assess(tasks, samples=2, passed=1.0)
    mean, half = (0.5 + 1 + 0) / 3, 1.96 * 0.5 / 3**0.5
    assert (found["reward"], found["low"], found["high"]) == pytest.approx((mean, mean - half, mean + half))
    assert found["tasks"] == 3 and found["pass"]["1"] == pytest.approx((mean, mean - half, mean + half))
    half = 1.96 * 0.5**0.5 / 2**0.5
    assert found["pass"]["2"] == pytest.approx((0.5, 0.5 - half, 0.5 + half)), "task b has one rollout that counts"
    assert found["sources"]["x"]["reward"] == 0.75 and found["sources"]["x"]["tasks"] == 2
    assert found["sources"]["y"] == {"reward": 0.0, "low": None, "high": None, "tasks": 1,
                                     "pass": {"1": (0.0, None, None), "2": (0.0, None, None)}}  # fmt: skip


def test_pass_at_k_is_what_drawing_k_of_n_gives():
    """All draws enumerated."""
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 0.3]
    for k in range(1, 7):
        draws = list(itertools.combinations(rewards, k))
        assert rl.pass_at(k, rewards, 1.0) == pytest.approx(sum(max(draw) >= 1.0 for draw in draws) / len(draws))


def test_a_line_that_was_cut_anywhere_is_left_out(tmp_path):
    """Also where what is left of it ends like a whole one."""
    first, second = (json.dumps({"step": n, "dropped": {"stale": n}}) + "\n" for n in (1, 2))
    for cut in range(len(second)):
        (tmp_path / "lines").write_text(first + second[:cut])
        assert rl.read_lines(tmp_path / "lines") == [{"step": 1, "dropped": {"stale": 1}}]
    (tmp_path / "lines").write_text(first + second)
    assert [line["step"] for line in rl.read_lines(tmp_path / "lines")] == [1, 2]
    assert rl.read_lines(tmp_path / "none") == []


def checkpoints_of(cfg: rl.TrainConfig, ranks) -> rl.Checkpoints:
    """Those of a new policy."""
    policy = rl.shard(rl.Policy(cfg), cfg, ranks)
    return rl.Checkpoints(cfg, ranks, policy, rl.make_optimizer(policy, cfg))


def train_a_little(checkpoints: rl.Checkpoints) -> None:
    policy, optimizer = checkpoints.parts
    rl.steer(optimizer, checkpoints.cfg, 3)
    policy.two_tokens().logp_S.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("cut", ["within the tensors", "before state.json", "before the rename"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_whole(cut, folder, tmp_path, world, monkeypatch):
    """And the next one is not disturbed by what was left. Weights and AdamW's moments come back bit for bit."""
    cfg = replace(config(folder, "dense", "unused"), out=str(tmp_path), resume="auto", checkpoint_steps=1)
    cfg = replace(cfg, checkpoint_keep=2, kl_target=0.1, kl_coef=1.0)
    first = checkpoints_of(cfg, world)
    saved = first.load()
    assert (saved.step, saved.kl_coef, saved.reward_before) == (0, 1.0, None), "nothing to resume: a new run"
    train_a_little(first)
    first.save(replace(saved, step=1, kl_coef=0.7, reward_before=0.5, positions={"0": {"taken": 3}}))
    kept = {name: rl.full(tensor).clone() for name, tensor in first.parts[0].state_dict().items()}
    moments = [{name: rl.full(x).clone() for name, x in one.items()} for one in first.parts[1].state.values()]
    train_a_little(first)

    with monkeypatch.context() as patch:
        if cut == "within the tensors":

            def half(state, checkpoint_id):
                checkpoint_id.mkdir(parents=True)
                (checkpoint_id / "__0_0.distcp").write_bytes(b"half of it")
                raise KeyboardInterrupt

            patch.setattr(rl.dcp, "save", half)
        else:
            name = "write_text" if cut == "before state.json" else "rename"
            real = getattr(Path, name)

            def broken(path, *args):
                if path.name in ("state.json", "unfinished"):
                    raise KeyboardInterrupt
                return real(path, *args)

            patch.setattr(Path, name, broken)
        with pytest.raises(KeyboardInterrupt):
            first.save(replace(saved, step=2))

    again = checkpoints_of(cfg, world)
    back = again.load()
    assert (back.step, back.kl_coef, back.reward_before, back.positions) == (1, 0.7, 0.5, {"0": {"taken": 3}})
    assert all(torch.equal(rl.full(x), kept[name]) for name, x in again.parts[0].state_dict().items())
    for mine, theirs in zip(again.parts[1].state.values(), moments, strict=True):
        assert all(torch.equal(rl.full(x), theirs[name]) for name, x in mine.items()) and theirs["step"] == 1
    for step in (2, 3, 4):
        again.save(replace(saved, step=step))
    assert sorted(path.name for path in again.folder.iterdir()) == ["step-000003", "step-000004"]
    assert checkpoints_of(cfg, world).load().step == 4


def test_a_checkpoint_of_other_versions_is_refused(folder, tmp_path, world):
    cfg = replace(config(folder, "dense", "unused"), out=str(tmp_path), checkpoint_steps=1)
    first = checkpoints_of(cfg, world)
    first.save(replace(first.load(), step=1))
    other = replace(cfg, resume="auto", minibatches=2, sync_minibatches=True, surrogate="ppo")
    with pytest.raises(ValueError, match="a step makes 2 versions, in the checkpoint 1; keep --minibatches"):
        checkpoints_of(other, world).load()


@pytest.fixture
def good(folder, models) -> rl.TrainConfig:
    """A configuration that validates."""
    cfg = replace(config(folder, "dense", "unused"), denominator_constant=1.0)
    rl.validate(cfg)
    return cfg


REFUSALS = [
    ({"model": "nowhere/at/all"}, "nowhere/at/all", "give a model folder"),
    ({"model": ""}, "--model ''", "give a model folder"),
    ({"out": ""}, "--out", "name the run's folder"),
    ({"device": "tpu"}, "'tpu'", "one of cpu, cuda"),
    ({"resume": "nowhere"}, "--resume nowhere holds no state.json", "RUN/checkpoints/step-"),
    ({"checkpoint_steps": -1}, "--checkpoint_steps -1", "0 or more"),
    ({"track": "mlflow"}, "'mlflow'", "tensorboard, wandb"),
    ({"eval_samples": 2}, "--eval_samples 2", "give --eval_temperature"),
    ({"checkpoint_keep": 0}, "--checkpoint_keep 0", "1 or more"),
    ({"steps": 0}, "--steps 0", "1 or more"),
    ({"token_budget": 1}, "--token_budget 1", "2 or more"),
    ({"head_chunk": 0}, "--head_chunk 0", "1 or more"),
    ({"minibatches": 0}, "--minibatches 0", "1 or more"),
    ({"minibatches": 2}, "--minibatches 2", "use ppo, gspo or cispo"),
    ({"kl_coef": -0.1, "ref_model": "x"}, "--kl_coef -0.1", "0 or more"),
    ({"kl_coef": 0.1}, "--kl_coef 0.1", "give --ref_model"),
    ({"advantage": "on_policy_distill"}, "on_policy_distill", "give --ref_model"),
    ({"ref_model": "nowhere"}, "'nowhere'", "give a model folder"),
    ({"kl_coef": 0.1, "kl_estimator": "k1", "ref_model": "MODEL"}, "k1 --kl_as loss", "use k2 or k3 in the loss"),
    ({"kl_coef": 0.1, "kl_estimator": "k3", "kl_as": "reward", "ref_model": "MODEL"}, "k3", "k1 in the reward"),
    ({"kl_target": 0.1}, "--kl_target 0.1", "does nothing without --kl_coef"),
    ({"dual_clip": 3.0}, "--dual_clip 3.0", "does nothing without --surrogate ppo or gspo"),
    ({"dual_clip": 3.0, "surrogate": "cispo"}, "--dual_clip 3.0", "does nothing without --surrogate ppo or gspo"),
    ({"clip_low": 0.1}, "--clip_low 0.1", "does nothing without --surrogate"),
    ({"value_coef": 0.1}, "--value_coef 0.1", "does nothing without --advantage gae"),
    ({"distill_coef": 0.1}, "--distill_coef 0.1", "does nothing without --advantage on_policy_distill"),
    ({"overlong_penalty": 0.5}, "--overlong_penalty 0.5", "does nothing without --overlong_limit"),
    ({"kl_as": "reward", "kl_estimator": "k1"}, "--kl_estimator k1", "does nothing without --kl_coef"),
    ({"denominator_constant": 2.0}, "--denominator_constant 2.0", "does nothing without --denominator constant"),
    (
        {"advantage": "on_policy_distill", "ref_model": "MODEL", "overlong_limit": 9, "overlong_buffer": 3},
        "--overlong_limit 9",
        "ignores",
    ),
    (
        {
            "advantage": "on_policy_distill",
            "ref_model": "MODEL",
            "kl_coef": 0.1,
            "kl_as": "reward",
            "kl_estimator": "k1",
        },
        "--kl_as reward",
        "ignores",
    ),
    ({"gate": "off:clip:0.5:2", "max_lag": 0}, "off:clip:0.5:2", "give off"),
    ({"gate": "token:trunc:0.5:2"}, "token:trunc:0.5:2", "give 0, or mode clip"),
    ({"gate": "token:mask:0.5:2:"}, "token:mask:0.5:2:", "with :kl, :tv or :rollout"),
    ({"entropy_coef": math.nan}, "--entropy_coef nan", "finite"),
    ({"overlong_penalty": -1.0}, "--overlong_penalty -1.0", "0 or more"),
    ({"grad_clip": 0.0}, "--grad_clip 0.0", "1e-09 or more"),
    ({"kl_coef": math.inf, "ref_model": "MODEL"}, "--kl_coef inf", "finite"),
    ({"kl_as": "penalty"}, "--kl_as 'penalty'", "loss, reward"),
    ({"kl_estimator": "k4"}, "--kl_estimator 'k4'", "k1, k2, k3"),
    ({"discount": 0.9}, "--discount 0.9", "does nothing without --turn_rewards True or --advantage gae"),
    ({"discount": 1.1, "turn_rewards": True}, "1.1", "0..1"),
    ({"gae_lambda": -0.1}, "-0.1", "0..1"),
    ({"turn_rewards": True, "advantage": "gae"}, "--turn_rewards True", "leave it out"),
    ({"overlong_limit": 10}, "buffer 0", "1..10"),
    ({"overlong_limit": 10, "overlong_buffer": 11}, "buffer 11", "1..10"),
    ({"surrogate": "ppo", "clip_low": 1.5}, "clip_low=1.5", "need 0 <= clip_low <= 1"),
    ({"surrogate": "ppo", "dual_clip": 1.1}, "dual_clip=1.1", "clip_high < dual_clip - 1"),
    ({"gate": "token:mask:0:0.1:js"}, "token:mask:0:0.1:js", ":kl, :tv or :rollout"),
    ({"gate": "token:mask:0.5:2:tv"}, "[0.5, 2.0]", "a band [0, high]".replace("[", r"\[")),
    ({"gate": "token:mask:0.5:2:rollout"}, "'token'", "level seq or geo"),
    ({"advantage": "gae2"}, "--advantage 'gae2'", "rloo, grpo"),
    ({"surrogate": "gspo2"}, "--surrogate 'gspo2'", "reinforce, ppo"),
    ({"denominator": "row"}, "--denominator 'row'", "token, rollout, group, constant"),
    ({"gate": "tiss"}, "'tiss'", "icepop, seq_mask_tis"),
    ({"gate": "geo:mask:0.5"}, "--gate 'geo:mask:0.5'", "level:mode:low:high"),
    ({"gate": "off", "max_lag": 1}, "--max_lag 1", "use --gate tis"),
    ({"gate": "geo:mask:half:2"}, "half", "low and high numbers"),
    ({"gate": "word:mask:0.5:2"}, "word", "off, token, seq, geo"),
    ({"gate": "geo:mask:2:0.5"}, "2", "low <= 1 <= high"),
    ({"dtype": "fp16"}, "fp16", "float32|bfloat16"),
    ({"max_lag": -1}, "-1", "max_lag"),
    ({"denominator": "constant", "denominator_constant": 0.0}, "0", "finite and 1e-09 or more"),
]


@pytest.mark.parametrize("changes,value,remedy", REFUSALS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_validate_refuses_with_the_value_and_a_remedy(good, changes, value, remedy):
    changes = {key: good.model if value == "MODEL" else value for key, value in changes.items()}
    with pytest.raises(ValueError, match=remedy) as refusal:
        rl.validate(replace(good, **changes))
    assert value in str(refusal.value)


def test_validate_refuses_to_start_without_a_secret(good, monkeypatch):
    for secret in (None, ""):
        monkeypatch.delenv("INSTAR_SECRET", raising=False)
        if secret is not None:
            monkeypatch.setenv("INSTAR_SECRET", secret)
        with pytest.raises(ValueError, match="INSTAR_SECRET is not set; export the same random string"):
            rl.validate(good)


@pytest.mark.parametrize("denominator", gate.DENOMINATORS)
@pytest.mark.parametrize("chosen", [*gate.PRESETS, "geo:mask:0.5:2", "token:clip:0.5:2", "seq:mask:0:inf",
                                    "seq:trunc:0:2", "token:mask:0:0.1:tv", "geo:mask:0:0.1:kl",
                                    "seq:mask:0:inf:rollout"])  # fmt: skip
def test_validate_accepts_what_works(good, chosen, denominator):
    good = replace(good, denominator_constant=3.0 if denominator == "constant" else 1.0)
    rl.validate(replace(good, gate=chosen, denominator=denominator, max_lag=0))
    if chosen != "off":
        rl.validate(replace(good, gate=chosen, denominator=denominator, max_lag=3))


def test_read_gate():
    expected = {"level": "geo", "mode": "mask", "low": 0.25, "high": 4.0}
    assert rl.read_gate("geo:mask:0.25:4") == expected
    assert rl.read_gate("geo:mask:0.25:4:rollout") == expected | {"weight": "rollout"}
    assert rl.read_gate("geo:mask:0.25:4:tv") == expected | {"statistic": "tv"}
    assert rl.read_gate("tis") == gate.PRESETS["tis"] and rl.read_gate("mis") == gate.PRESETS["mis"]


def test_flags_are_the_fields_and_an_unknown_one_is_an_error():
    parser = HfArgumentParser(rl.TrainConfig)
    (cfg,) = parser.parse_args_into_dataclasses(["--steps", "3", "--replay", "false", "--gate", "icepop"])
    assert (cfg.steps, cfg.replay, cfg.gate) == (3, False, "icepop")
    with pytest.raises(ValueError, match="--stepz"):
        parser.parse_args_into_dataclasses(["--stepz", "3"])
    assert all(field.metadata["help"] for field in fields(rl.TrainConfig))


def told_manifest(sampled: int, pending: int, node: int) -> dict:
    """Of a node that handed out one rollout of ``sampled`` tokens, all it sampled but what is pending."""
    row = {"row_id": f"r{node}", "tokens": sampled + 1, "sampled": sampled}
    rollout = {"rollout_id": f"r{node}", "rows": [row], "status": "ok", "reward": 1.0, "rewards": [1.0]}
    ledger = {"sampled": sampled + pending, "pending_before": 0, "pending_after": pending, "dropped": {}}
    return {"groups": [{"group_id": 0, "rollouts": [rollout]}], "ledger": ledger, "meters": {}}


def nodes_that_answer(answers: dict[str, list], **changes) -> rl.Nodes:
    """``rl.Nodes`` whose nodes give these answers to the requests for a path, one after the other; an exception is one
    as well, and the last is given for ever."""
    nodes = rl.Nodes(rl.TrainConfig(rollout_urls="http://a,http://b", **changes))

    def handle(request: httpx.Request) -> httpx.Response:
        left = answers[request.url.host + request.url.path]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    nodes.http = httpx.Client(transport=httpx.MockTransport(handle))
    return nodes


GONE = httpx.ConnectError("refused")


def test_a_node_that_is_gone_is_left_out_and_what_it_owed_is_lost():
    """Node b hands out 5 tokens with 3 pending, and is not there the next time; a goes on alone until it is gone."""
    nodes = nodes_that_answer({"a/manifest": [told_manifest(10, 2, 0), told_manifest(10, 2, 0), GONE],
                               "b/manifest": [httpx.Response(204), told_manifest(5, 3, 1), GONE],
                               "a/health": [{"sampled": 24}]})  # fmt: skip
    first = nodes.manifest(0)
    assert [rollout["url"] for rollout in first["rollouts"]] == ["http://a", "http://b"]
    assert first["ledger"] == {"sampled": 20, "pending_before": 0, "pending_after": 5, "dropped": {}}
    second = nodes.manifest(1)
    assert [rollout["url"] for rollout in second["rollouts"]] == ["http://a"] and nodes.urls == ["http://a"]
    owed = {"sampled": 12, "pending_before": 3, "pending_after": 2, "dropped": {"node_lost": 3}}
    assert second["ledger"] == owed, "what b had pending is dropped in the next line, once"
    assert nodes.sampled() == 24 + 8, "a's own count, and what b told"
    with pytest.raises(rl.NodeGone, match=r"rollout node http://a/manifest.*ConnectError"):
        nodes.manifest(2)


def test_engines_that_are_back_are_given_weights_before_the_batch_is_whole():
    """What node a handed out is kept meanwhile: it would not hand it out again."""
    nodes = nodes_that_answer({"a/manifest": [told_manifest(10, 2, 0), AssertionError("asked twice")],
                               "b/manifest": [{"sync": True}, told_manifest(5, 3, 1)]})  # fmt: skip
    assert nodes.manifest(0) is None
    assert len(nodes.manifest(0)["rollouts"]) == 2


def test_a_node_that_is_gone_before_its_batch_was_whole_owes_all_of_it():
    """Node a had listed 10 tokens, and 2 were pending, when b asked for weights; the sync then finds a gone."""
    nodes = nodes_that_answer({"a/manifest": [told_manifest(10, 2, 0)], "a/sync/begin": [GONE],
                               "b/manifest": [{"sync": True}, told_manifest(5, 3, 1)], "b/sync/begin": [{}],
                               "b/health": [{"sampled": 8}]})  # fmt: skip
    assert nodes.manifest(0) is None
    assert len(nodes.each("/sync/begin", {})) == 1
    batch = nodes.manifest(0)
    assert [rollout["url"] for rollout in batch["rollouts"]] == ["http://b"]
    assert batch["ledger"] == {"sampled": 20, "pending_before": 0, "pending_after": 3, "dropped": {"node_lost": 12}}
    assert nodes.sampled() == 20


def test_one_node_answers_for_all_and_each_goes_on_without_those_that_are_gone():
    nodes = nodes_that_answer({"a/evaluate": [GONE], "b/evaluate": [{"reward": 0.5}], "b/finish": [{"x": 1}]})
    assert nodes.one("/evaluate", {}).json() == {"reward": 0.5}
    assert [reply.json() for reply in nodes.each("/finish", {})] == [{"x": 1}]
    refused = nodes_that_answer({"a/finish": [{"x": 1}], "b/finish": [httpx.Response(500, text="a fault")]})
    with pytest.raises(RuntimeError, match="answered 500: a fault"):
        refused.each("/finish", {})


@pytest.mark.parametrize("elsewhere", [False, True])
def test_rows_that_cannot_be_fetched_take_their_nodes_rollouts_out_of_every_ranks_batch(elsewhere):
    """On the rank that asked for them in vain, and on one that did not."""
    nodes = nodes_that_answer({"a/manifest": [told_manifest(4, 0, 0)], "b/manifest": [told_manifest(4, 1, 1)]})
    manifest = nodes.manifest(0)
    given = {url: SimpleNamespace(row_id=name, images=[]) for url, name in (("http://a", "r0"), ("http://b", "r1"))}

    def rows(url, row_ids, step):
        assert step == 1
        if url == "http://b":
            raise rl.NodeGone("b")
        return [given[url]]

    nodes.rows = rows
    world = 2 if elsewhere else 1
    other = [torch.tensor([0.0, 1.0]), torch.zeros(1)]
    ranks = SimpleNamespace(world=world, rank=0, sum=lambda gone: gone + (other.pop(0) if elsewhere else 0))
    fetched = rl.fetch(manifest, ranks, nodes)
    assert [(row.row_id, index) for row, index in fetched] == [("r0", 0)]
    assert [rollout["url"] for rollout in manifest["rollouts"]] == ["http://a"]
    assert manifest["ledger"]["dropped"] == {"node_lost": 4} and nodes.urls == ["http://a"]
    assert rl.ledger_line(1, manifest["ledger"], torch.tensor([[4, *[0] * (len(gate.REASONS) - 1)]]), 4)["trained"] == 4


@pytest.mark.parametrize("state", [{"max_lag": 2}, {"version": 3}, {"versions_per_step": 2}])
def test_a_node_under_another_bound_or_version_is_refused(good, state):
    agreed = {"max_lag": 1, "versions_per_step": 1, "version": 0, "seed": 0, "filter_groups": False}
    rl.check_nodes([agreed, agreed | {"seed": 1}], good)
    with pytest.raises(ValueError, match=r"has max_lag, versions_per_step and version \[.*same recipe"):
        rl.check_nodes([agreed, agreed | state | {"seed": 1}], good)
    rl.check_nodes([agreed | {"versions_per_step": 2}], replace(good, minibatches=2, sync_minibatches=True))
    with pytest.raises(ValueError, match=r"seeds \[0, 0\].*own --seed"):
        rl.check_nodes([agreed, agreed], good)
    rl.check_nodes([agreed | {"filter_groups": True}], good)
    with pytest.raises(ValueError, match=r"--advantage gae .* leave --filter_groups out"):
        rl.check_nodes([agreed | {"filter_groups": True}], replace(good, advantage="gae"))


if __name__ == "__main__":
    worlds_main(Path(sys.argv[1]))
