"""What every flag of the loss does to the weights, step by step, against the same training written out by hand.

The real ``rl.train`` runs in worlds of 1, 2 and 4 gloo ranks against test_rl.py's scripted nodes, with plain SGD, so
that the weights move from one mini-batch to the next: two batches, up to three mini-batches each, every gradient in a
file. The reference holds one unpacked row at a time, takes its log-probs from transformers alone and every number that
multiplies them from slow_gate.py's loops over lists. The worlds differ in packing, and world 2 splits each row in two.

T tokens of the whole batch in the reference's order (rollout, row, position); N rollouts.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import slow_gate
import test_rl as law
import torch
from conftest import ROOT, free_port, make_model
from safetensors.torch import load_file, save_file
from test_rl import CONSTANT, PLANS, Step
from transformers import AutoModelForCausalLM

import rl
from loopback import Row, pack_rows
from tools import toy

torch.set_num_threads(1)

BATCHES, RATE = 2, 0.02
PACKING = {1: ("all", "everything"), 2: ("all_split", "medium"), 4: ("all", "tiny")}
REFERENCED = {"ref_model": "reference"}
CASES = {
    "ppo": {"advantage": "grpo", "surrogate": "ppo", "gate": "tis", "minibatches": 3, "clip_low": 0.05,
            "clip_high": 0.05, "dual_clip": 1.1, "entropy_coef": 0.02, "kl_coef": 0.1, "kl_target": 0.05,
            **REFERENCED},
    "gspo": {"advantage": "rloo", "surrogate": "gspo", "gate": "seq:trunc:0:2", "minibatches": 2, "clip_low": 0.02,
             "clip_high": 0.02, "denominator": "rollout", "overlong_limit": 30, "overlong_buffer": 15,
             "overlong_penalty": 0.5, "kl_coef": 0.05, "kl_estimator": "k1", "kl_as": "reward", **REFERENCED},
    "cispo": {"advantage": "dr_grpo", "surrogate": "cispo", "gate": "token:mask:0:0.003:tv", "minibatches": 2,
              "clip_low": 0.05, "clip_high": 0.05, "denominator": "group", "turn_rewards": True, "discount": 0.9,
              "whiten": True, "overlong_limit": 30, "overlong_buffer": 15, "kl_coef": 0.05, "kl_estimator": "k1",
              "kl_as": "reward", **REFERENCED},
    "gae": {"advantage": "gae", "surrogate": "ppo", "gate": "off", "minibatches": 2, "denominator": "constant",
            "discount": 0.9, "gae_lambda": 0.8, "value_coef": 0.7, "whiten": True, "overlong_limit": 30,
            "overlong_buffer": 15, "kl_coef": 0.05, "kl_estimator": "k1", "kl_as": "reward", **REFERENCED},
    "distill": {"advantage": "on_policy_distill", "gate": "mis", "distill_coef": 0.3, "kl_coef": 0.1,
                "kl_estimator": "k3", **REFERENCED},
}  # fmt: skip


def rewards_of(n: int) -> list[float]:
    """A reward for each call of rollout ``n``, so that crediting the wrong call is seen; they add up to the plan's."""
    calls = len(PLANS[n].lengths)
    early = [0.25 + 0.125 * c for c in range(calls - 1)]
    return [*early, PLANS[n].reward - sum(early)] if calls else []


def config(folder: Path, name: str, world: int) -> rl.TrainConfig:
    flags = {key: str(folder / value) if key == "ref_model" else value for key, value in CASES[name].items()}
    return replace(law.config(folder, "dense", f"{name}{world}"), steps=BATCHES, max_lag=0, dtype="float64", **flags)


# ---------------------------------------------------------------------------------------------------------------
# The trainer's side
# ---------------------------------------------------------------------------------------------------------------


class Nodes(law.ScriptedNodes):
    """Rewards by call; every token as young as the trainer."""

    def manifest(self, version: int) -> dict:
        manifest = super().manifest(version)
        for rollout in manifest["rollouts"]:
            # What a rollout that was dropped would have earned is listed as well, and must not count.
            rollout["rewards"] = rewards_of(int(rollout["rollout_id"][1:])) or [7.0, 9.0]
        return manifest

    def probe_rows(self, node: int) -> bytes:
        return b""

    def rows(self, url: str, row_ids: list[str], step: int) -> list[Row]:
        found = super().rows(url, row_ids, step)
        return [replace(row, versions=np.where(row.sampled, self.version, -1)) for row in found]


class Syncer(rl.Syncer):
    """No engine to sync with."""

    def connect(self, workers):
        return None

    def probe(self) -> float:
        return 0.0

    def sync(self, version: int) -> float:
        Nodes.current.version = version
        return 0.0


class Mover(torch.optim.SGD):
    """Writes the gradients down, then moves the weights."""

    folder: Path

    def __init__(self, policy):
        super().__init__(policy.parameters(), lr=RATE)
        self.policy, self.count = policy, 0

    def step(self) -> None:
        gradients = {name: rl.full(p.grad).contiguous() for name, p in self.policy.named_parameters()}
        if torch.distributed.get_rank() == 0:
            save_file(gradients, self.folder / f"gradient{self.count}.safetensors")
        self.count += 1
        super().step()


def make_mover(policy, cfg):
    return Mover(policy)


def rank_main(rank: int, world: int, folder: Path, ports: list[int]) -> None:
    rl.Nodes, rl.Syncer, rl.Policy, rl.make_optimizer = Nodes, Syncer, law.EagerPolicy, make_mover
    rl.steer = lambda optimizer, cfg, step: RATE
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    for port, name in zip(ports, CASES, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        cfg = config(folder, name, world)
        # gae's order of tokens is by call, and a call lies in one row: only rows that hold calls whole can be cut up.
        rows, budget = ("all", "medium") if name == "gae" else PACKING[world]
        Nodes.steps = [Step(rows, budget, cfg.denominator, cfg.surrogate)] * (BATCHES + 1)
        Nodes.rows_file, Mover.folder = folder / "rows.safetensors", Path(cfg.out)
        Mover.folder.mkdir(parents=True, exist_ok=True)
        rl.train(cfg)


def worlds_main(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder / "dense" / "model")
    for world in PACKING:
        ports = [free_port() for _ in CASES]
        torch.multiprocessing.start_processes(rank_main, (world, folder, ports), world, start_method="fork")


# ---------------------------------------------------------------------------------------------------------------
# The same by hand
# ---------------------------------------------------------------------------------------------------------------


class ByHand:
    """float32 weights, a float64 forward of one row at a time, SGD."""

    def __init__(self, path: Path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
        self.head = torch.nn.Linear(self.model.config.hidden_size, 1, dtype=torch.float64)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.named = {f"model.{name}": p for name, p in self.model.named_parameters()}
        self.named |= {f"value_head.{name}": p for name, p in self.head.named_parameters()}

    def forward(self, rows: list[Row]) -> list[torch.Tensor]:
        """Log-probs, entropies and values of the rows' sampled tokens, one after the other."""
        pieces = []
        for row in rows:
            ids_T, at_S = torch.from_numpy(row.token_ids).long(), torch.from_numpy(np.flatnonzero(row.sampled))
            hidden_SD = self.model.base_model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0, at_S - 1]
            logp_SV = (self.model.lm_head(hidden_SD) / float(np.float32(row.temperature))).log_softmax(-1)
            logp_S = logp_SV[torch.arange(len(at_S)), ids_T[at_S]]
            pieces.append((logp_S, -(logp_SV.exp() * logp_SV).sum(-1), self.head(hidden_SD)[:, 0]))
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    @torch.no_grad()
    def move(self) -> dict[str, torch.Tensor]:
        """One SGD step; returns the gradients it took."""
        taken = {}
        for name, p in self.named.items():
            if p.grad is not None:
                taken[name] = p.grad.clone()
                p.copy_((p - RATE * p.grad).float())
                p.grad = None
        return taken


def tokens_of(rollouts: list[list[Row]]) -> SimpleNamespace:
    """What is known of the batch's tokens before any model sees them, as lists."""
    rows = [(n, row) for n, rows in enumerate(rollouts) for row in rows]
    known = {name: [] for name in ("rollout", "call", "behaviour")}
    for n, row in rows:
        at = np.flatnonzero(row.sampled)
        known["rollout"] += [n] * len(at)
        known["call"] += row.call[at].tolist()
        known["behaviour"] += [float(x) for x in row.logprobs[at]]
    return SimpleNamespace(**known, rows=[row for _, row in rows], trained=[True] * len(known["rollout"]))


def advantages_of(cfg: rl.TrainConfig, b, logp, reference, value, kl_coef: float) -> tuple[list, list]:
    """Advantages and what the values should have been."""
    valid_N = [plan.status != "agent_error" for plan in PLANS]
    names = sorted({(plan.node, plan.group) for plan in PLANS})
    group_N = [names.index((plan.node, plan.group)) for plan in PLANS]
    width, calls_N = max(len(plan.lengths) for plan in PLANS), [len(plan.lengths) for plan in PLANS]
    reward_NC = [rewards_of(n) + [0.0] * (width - calls_N[n]) for n in range(len(PLANS))]
    kl_T = slow_gate.kl(cfg.kl_estimator, logp, reference, b.trained)[0]
    kl_T = [kl_coef * x * (cfg.kl_as == "reward") for x in kl_T]
    if cfg.overlong_limit:
        penalty_N = slow_gate.overlong([b.rollout.count(n) for n in range(len(PLANS))], cfg.overlong_limit,
                                       cfg.overlong_buffer)  # fmt: skip
        for n, calls in enumerate(calls_N):
            if calls:
                reward_NC[n][calls - 1] += cfg.overlong_penalty * penalty_N[n]
    where = b.rollout, b.call, b.trained
    if cfg.advantage == "on_policy_distill":
        advantage_T = slow_gate.distill(logp, reference, b.trained, cfg.distill_coef)
    elif cfg.advantage == "gae":
        reward_T = [r - k for r, k in zip(slow_gate.token_rewards(reward_NC, *where), kl_T, strict=True)]
        advantage_T = slow_gate.gae(reward_T, value, *where, cfg.discount, cfg.gae_lambda)
    else:
        for n, c, k in zip(b.rollout, b.call, kl_T, strict=True):
            reward_NC[n][c] -= k
        if cfg.turn_rewards:
            gain_NC = slow_gate.returns(reward_NC, calls_N, cfg.discount)
            advantage_NC = slow_gate.advantages(cfg.advantage, gain_NC, group_N, valid_N)
            advantage_T = slow_gate.token_advantages(advantage_NC, b.rollout, b.trained, b.call)
        else:
            gain_N = [sum(reward_C) if valid else 9.0 for reward_C, valid in zip(reward_NC, valid_N, strict=True)]
            advantage_N = slow_gate.advantages(cfg.advantage, gain_N, group_N, valid_N)
            advantage_T = slow_gate.token_advantages(advantage_N, b.rollout, b.trained)
    target_T = [a + v for a, v in zip(advantage_T, value, strict=True)]
    return slow_gate.whiten(advantage_T, b.trained, advantage_T) if cfg.whiten else advantage_T, target_T


def train_by_hand(cfg: rl.TrainConfig, rollouts: list[list[Row]]) -> tuple[list[dict], list[dict]]:
    """The gradients of every optimizer step, and some of what each batch's line of metrics must say."""
    policy, teacher, b = ByHand(Path(cfg.model)), ByHand(Path(cfg.ref_model)), tokens_of(rollouts)
    kl_coef, gradients, lines = cfg.kl_coef, [], []
    for _ in range(BATCHES):
        with torch.no_grad():
            logp, entropy, value = (x.tolist() for x in policy.forward(b.rows))
            reference = teacher.forward(b.rows)[0].tolist()
        advantage, target = advantages_of(cfg, b, logp, reference, value, kl_coef)
        log_ratio = slow_gate.log_ratio(logp, b.behaviour, b.trained)
        keep, weight, _ = slow_gate.gate(**rl.read_gate(cfg.gate), log_ratio_T=log_ratio, rollout_T=b.rollout,
                                         trained_T=b.trained, behaviour_T=b.behaviour)  # fmt: skip
        given = SimpleNamespace(logp=logp, reference=reference, advantage=advantage, target=target, weight=weight)
        parts = [update_by_hand(cfg, policy, b, given, part, kl_coef) for part in range(cfg.minibatches)]
        gradients += [part.gradients for part in parts]
        k1 = -slow_gate.mean([r - x for r, x in zip(reference, logp, strict=True)])
        lines.append({"loss": slow_gate.mean([part.loss for part in parts]), "kl/k1": k1, "kl/coef": kl_coef,
                      "clip_share": slow_gate.mean([part.clipped for part in parts]), "entropy": np.mean(entropy),
                      "gate/kept": np.mean(keep)})  # fmt: skip
        kl_coef = slow_gate.adapt_kl(kl_coef, k1, cfg.kl_target) if cfg.kl_target else kl_coef
    return gradients, lines


def update_by_hand(cfg: rl.TrainConfig, policy: ByHand, b, given, part: int, kl_coef: float) -> SimpleNamespace:
    """One mini-batch: the rollouts whose number leaves the remainder ``part``."""
    owners = [n for n in range(len(PLANS)) for _ in PLANS[n].lengths]
    rows = [row for n, row in zip(owners, b.rows, strict=True) if n % cfg.minibatches == part]
    here = [t for t, n in enumerate(b.rollout) if n % cfg.minibatches == part]

    def pick(values: list) -> list:
        return [values[t] for t in here]

    rollout, old, weight, trained = pick(b.rollout), pick(given.logp), pick(given.weight), pick(b.trained)
    keep = [w != 0 for w in weight]
    names = sorted({(plan.node, plan.group) for plan in PLANS})
    group = [names.index((PLANS[n].node, PLANS[n].group)) for n in rollout]
    denominator = slow_gate.denominator(cfg.denominator, keep, rollout, group, CONSTANT)
    logp_T, entropy_T, value_T = policy.forward(rows)
    now = logp_T.tolist()
    rho = slow_gate.rollout_mean([x - y for x, y in zip(now, old, strict=True)], rollout, trained)
    loss, clipped, slope = slow_gate.surrogate(
        cfg.surrogate,
        now,
        old,
        pick(given.advantage),
        weight,
        cfg.clip_low,
        cfg.clip_high,
        cfg.dual_clip or math.inf,
        rho,
    )
    kl, kl_slope = slow_gate.kl(cfg.kl_estimator, now, pick(given.reference), trained)
    share = [kl_coef * w * (cfg.kl_as == "loss") for w in weight]
    error = [v - y for v, y in zip(value_T.tolist(), pick(given.target), strict=True)]
    used = cfg.value_coef * (cfg.advantage == "gae")
    factor = [k * (s + c * d) for k, s, c, d in zip(keep, slope, share, kl_slope, strict=True)]
    keep_T = torch.tensor(keep)
    whole = (torch.tensor(factor) * logp_T).sum() - cfg.entropy_coef * entropy_T[keep_T].sum()
    if used:
        whole = whole + used * (torch.tensor(error) * value_T)[keep_T].sum()
    (whole / denominator).backward()
    terms = zip(keep, loss, share, kl, entropy_T.tolist(), error, strict=True)
    total = sum(k * (x + c * d - cfg.entropy_coef * h + used * e * e / 2) for k, x, c, d, h, e in terms)
    return SimpleNamespace(gradients=policy.move(), loss=total / denominator, clipped=sum(clipped) / sum(keep))


# ---------------------------------------------------------------------------------------------------------------
# The comparison
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two models, the rollouts' rows, and the worlds' runs."""
    folder = tmp_path_factory.mktemp("updates")
    model = AutoModelForCausalLM.from_pretrained(make_model(folder / "dense" / "model", False), dtype=torch.float64)
    other = toy.untrained(False, seed=3)
    other.load_state_dict({k: v + 0.3 * other.state_dict()[k] for k, v in model.float().state_dict().items()})
    other.save_pretrained(folder / "reference")
    toy.tokenizer().save_pretrained(folder / "reference")
    rollouts = law.make_rows(model.double(), (0, 0))
    rows = [row for rows in rollouts for row in rows]
    everything = rows + [part for row in rows for part in law.split(row)]
    (folder / "rows.safetensors").write_bytes(pack_rows(everything))
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "GLOO_SOCKET_IFNAME": "lo",
                        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}  # fmt: skip
    command = [sys.executable, __file__, str(folder)]
    with (folder / "worlds.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            assert process.wait(1200) == 0, (folder / "worlds.log").read_text()[-3000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return folder


@pytest.fixture(scope="module")
def by_hand(folder):
    """Per case, the gradients and lines of the reference."""
    rows = {row.row_id: row for row in rl.unpack_rows((folder / "rows.safetensors").read_bytes())}
    rollouts = [[rows[f"r{n}.{i}"] for i in range(len(plan.lengths))] for n, plan in enumerate(PLANS)]
    return {name: train_by_hand(config(folder, name, 1), rollouts) for name in CASES}


@pytest.mark.parametrize("world", PACKING)
@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_the_one_written_out_by_hand(folder, by_hand, name, world):
    gradients, lines = by_hand[name]
    out = Path(config(folder, name, world).out)
    files = sorted(out.glob("gradient*.safetensors"), key=lambda path: int(path.stem[8:]))
    assert len(files) == len(gradients) == BATCHES * CASES[name].get("minibatches", 1)
    for number, (file, expected) in enumerate(zip(files, gradients, strict=True)):
        actual = load_file(file)
        assert set(actual) == set(expected)
        errors = {key: float((actual[key] - right).norm() / right.norm()) for key, right in expected.items()}
        worst = max(errors, key=errors.get)
        # Weights that moved are rounded to float32 by either side, and no two roundings are one.
        assert errors[worst] < (1e-4 if number else 2e-6), f"gradient {number} of {worst}: {errors[worst]:.1e}"
    for line, expected in zip(law.read_lines(out / "metrics.jsonl"), lines, strict=True):
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_the_cases_are_what_the_comparison_needs(by_hand):
    """Ratios have moved, clips bite, gates gate, coefficients change: otherwise equality would say little."""
    lines = {name: lines for name, (_, lines) in by_hand.items()}
    for name in ("ppo", "gspo", "cispo"):
        assert all(0.02 < line["clip_share"] < 0.9 for line in lines[name]), lines[name]
    for name in ("cispo", "distill"):
        assert all(0.2 < line["gate/kept"] < 0.95 for line in lines[name]), lines[name]
    assert lines["ppo"][0]["kl/coef"] < lines["ppo"][1]["kl/coef"]
    for name, (gradients, _) in by_hand.items():
        for one, two in itertools.pairwise(gradients):
            assert all((one[key] - two[key]).norm() > 0.01 * one[key].norm() for key in one), name


if __name__ == "__main__":
    worlds_main(Path(sys.argv[1]))
