"""The launcher and its processes, run as a user runs them: to the end, and into each failure.

Models are untrained, so rewards mean nothing here; what is tested is that the whole loop carries real data and that
every failure ends in one line, in time, with no process left behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Run, free_port, processes_of, start_rollout, wait_for
from safetensors.torch import load_file

import gate
import rl

torch.set_num_threads(1)
pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_three_steps_end_to_end(kind, models, launch):
    run = launch(models[kind], RECIPE="toy_moe" if kind == "moe" else "toy", SEED="5")
    out = run.end(240)
    assert run.process.returncode == 0, out
    folder = run.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["seed"] == 5
    assert summary["ledger_balanced"] is True
    assert summary["probe_max_abs_dlogp"] < 1e-4
    assert {"setup", "toy", "engine_start", "train", "eval"} <= set(summary["seconds"])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["mismatch/max"] < 1e-4 and line["gate/lag_max"] == 0 for line in metrics)
    if kind == "moe":
        for line in metrics:  # two trainer ranks; every position but each row's last is replayed
            assert all(line[f"replay/agreement/{layer}"] > 0.999 for layer in range(3))
            assert line["replay/live/gap"] == line["replay/conflicting"] == 0 < line["replay/live/last_token"] < 0.1
            assert line["replay/replayed"] + line["replay/live/last_token"] == pytest.approx(1)
            # A near tie that falls the other way in the live forward would show in its k3 alone.
            assert line["replay/k3_replayed"] < 1e-8 and line["replay/k3_live"] < 1e-3
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    sampled = sum(line["sampled"] for line in ledger)
    assert sampled == sum(
        line["trained"] + line["masked"] + sum(line["gated"].values()) + sum(line["dropped"].values())
        for line in ledger
    )
    assert sampled > 0
    assert sum(line["trained"] for line in ledger) > 0
    for name in ("config.json", "rollout.log", "rl.log", "model/config.json", "model/model.safetensors"):
        assert (folder / name).is_file(), name
    assert "held-out reward" in out
    assert "saved runs/" in out


def trained_by_hand(run: Path, ranks: int) -> dict[str, torch.Tensor]:
    """The run's training as one synchronous loop in one process: no scheduler, no engine, no shards, no collectives.

    It adds up what the ranks add up, in their order: FSDP reduces each micro-batch's gradients before it keeps them.
    """
    cfg = rl.TrainConfig(**json.loads((run / "config.json").read_text()))
    nodes = rl.Recorded(replace(cfg, retrain=str(run)))
    policy = rl.Policy(cfg)
    parameters = list(policy.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step, batch in enumerate(nodes.batches):
        rollouts = batch["rollouts"]
        reward_N = torch.tensor([rollout["reward"] for rollout in rollouts], dtype=torch.float64)
        valid_N = torch.tensor([rollout["status"] in ("ok", "truncated") for rollout in rollouts])
        advantage_N = gate.advantages("reinforce", reward_N, rl.groups_of(rollouts), valid_N).float()
        tokens = sum(row["sampled"] for rollout in rollouts for row in rollout["rows"])
        packed = [micro_batches_of(nodes, rollouts, mine, step) for mine in rl.assign(rollouts, ranks)]
        weights = [gate_weights(policy, micro) for micro in packed]
        gradient = [torch.zeros_like(parameter) for parameter in parameters]
        for index in range(max(map(len, packed))):
            parts = []
            for micro, weight in zip(packed, weights, strict=True):
                if index < len(micro):
                    one = micro[index]
                    loss = -(weight[index] * advantage_N[one.rollout_S] * said(policy, one)).sum() / tokens
                    parts.append(torch.autograd.grad(loss, parameters))
            for total, *some in zip(gradient, *parts, strict=True):
                total += sum(some)
        for parameter, total in zip(parameters, gradient, strict=True):
            parameter.grad = total
        decay = 1 - 0.9 * step / cfg.steps
        optimizer.param_groups[0]["lr"] = cfg.lr * (min(1.0, (step + 1) / cfg.warmup_steps) * decay)
        optimizer.step()
    return policy.model.state_dict()


def micro_batches_of(nodes: rl.Recorded, rollouts: list[dict], mine: list[int], version: int) -> list[rl.MicroBatch]:
    """A rank's rows, packed; every token is of this version."""
    owner = {row["row_id"]: n for n in mine for row in rollouts[n]["rows"]}
    rows = nodes.rows(rollouts[0]["url"], list(owner), version + 1)
    assert {v for row in rows for v in row.versions[row.sampled]} == {version}
    bins = rl.bins([len(row) for row in rows], nodes.cfg.token_budget)
    return [rl.pack([(rows[i], owner[rows[i].row_id]) for i in some], torch.device("cpu")) for some in bins]


def gate_weights(policy: rl.Policy, micro: list[rl.MicroBatch]) -> tuple[torch.Tensor, ...]:
    """Each micro-batch's weights under the preset tis."""
    flat = rl.Batch.of(micro)
    with torch.no_grad():
        logp_S = torch.cat([said(policy, one) for one in micro])
    log_ratio_S = gate.log_ratio(logp_S, flat.behaviour_S, flat.trained_S)
    decision = gate.gate(**gate.preset("tis"), log_ratio_T=log_ratio_S, rollout_T=flat.rollout_S,
                         trained_T=flat.trained_S, behaviour_T=flat.behaviour_S)  # fmt: skip
    assert decision.keep_T.all()
    return decision.weight_T.split([len(one.target_S) for one in micro])


def said(policy: rl.Policy, one: rl.MicroBatch) -> torch.Tensor:
    """The policy's log-probs of a micro-batch's sampled tokens."""
    return policy(one.ids_T, one.positions_T, one.before_S, one.target_S, one.temperature_S).logp_S


def test_max_lag_0_is_a_synchronous_loop_and_a_kept_run_trains_again(models, launch, tmp_path):
    """Bit for bit, after five steps of the real engine's samples, on two ranks."""
    run = launch(models["dense"], RECIPE="../tests/kept_recipe", STEPS="5")
    out = run.end(300)
    assert run.process.returncode == 0, out
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "rl.py"]
    again = subprocess.run([*command, "--retrain", str(run.folder), "--out", str(tmp_path)], cwd=ROOT, text=True,
                           capture_output=True, timeout=300)  # fmt: skip
    assert again.returncode == 0, again.stderr[-3000:]
    before, weights, retrained = (
        load_file(path / "model.safetensors") for path in (models["dense"], run.folder / "model", tmp_path / "model")
    )
    by_hand = trained_by_hand(run.folder, ranks=2)
    for name, tensor in weights.items():
        assert torch.equal(retrained[name], tensor), name
        assert torch.equal(by_hand[name], tensor), (name, (by_hand[name] - tensor).abs().max())
        assert not torch.equal(before[name], tensor), name
    ledgers = [(folder / "ledger.jsonl").read_text() for folder in (run.folder, tmp_path)]
    assert ledgers[0] == ledgers[1]


def test_ctrl_c_stops_everything(models, launch):
    run = launch(models["dense"])
    wait_for(lambda: len(processes_of(run.name)) >= 5, 60)
    os.kill(run.process.pid, signal.SIGINT)
    out = run.end(40)
    assert run.process.returncode == 130, out
    assert "interrupted" in out


@pytest.mark.parametrize("victim", ["rl.py --model", "torch.distributed.run"])
def test_the_trainers_death_ends_the_run(victim, models, launch):
    """One rank is killed, then torchrun itself, whose ranks sit in sessions of their own."""
    run = launch(models["dense"], STEPS="500")
    run.wait_for_step()
    kill(victim, run)
    out = run.end(60)
    assert run.process.returncode != 0
    assert "error: the run failed" in out


def kill(pattern: str, run: Run) -> None:
    """SIGKILL the last process of a run that matches."""
    pids = subprocess.run(["pgrep", "-f", pattern], text=True, capture_output=True).stdout.split()
    mine = [pid for pid in pids if f"RUN={run.name}\0" in Path(f"/proc/{pid}/environ").read_text(errors="replace")]
    os.kill(int(mine[-1]), signal.SIGKILL)


def run_program(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=ROOT, text=True, capture_output=True, timeout=120)


def last_line(done: subprocess.CompletedProcess) -> str:
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_a_taken_port_is_named_before_engines_are_paid_for(models, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start_rollout(models["dense"], tmp_path / "log", port)
        assert process.wait(60) == 1
    line = (tmp_path / "log").read_text().strip().splitlines()[-1]
    assert line.startswith(f"rollout.py: error: cannot listen on 127.0.0.1:{port}")
    assert "--control_port" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "nowhere", "--agent", "agents/calculator.py"], ["nowhere", "config.json"]),
        (["--model", "MODEL", "--agent", "missing.py"], ["missing.py", "does not exist"]),
        (["--model", "MODEL", "--agent", "agents/calculator.py", "--max_lagg", "1"], ["--max_lagg"]),
        (["--model", "MODEL", "--agent", "agents/calculator.py", "--temperature", "0"], ["--temperature 0", "above 0"]),
    ],
)
def test_a_bad_flag_of_the_node_is_named(flags, words, models):
    line = last_line(run_program("rollout.py", *(str(models["dense"]) if flag == "MODEL" else flag for flag in flags)))
    assert line.startswith("rollout.py: error: ")
    assert all(word in line for word in words), line


def test_an_engine_that_cannot_start_ends_the_node(models, tmp_path):
    process = start_rollout(models["dense"], tmp_path / "log", free_port(), dtype="float3")
    assert process.wait(90) == 1
    assert (tmp_path / "log").read_text().strip().splitlines()[-1].startswith("rollout.py: error: ")


def test_the_probe_catches_experts_that_were_not_packed_again(world, tmp_path):
    """vLLM 0.30.0's own reload on a CPU, without our mend: the sync must not commit (see rollout.repack)."""
    import torch
    from conftest import connect

    node = connect(world, True, tmp_path, program="tests/node_without_repack.py", synced=False)
    try:
        with torch.no_grad():
            for name, parameter in node.policy.named_parameters():
                if "experts" in name:
                    parameter.to_local().mul_(1.05)
        with pytest.raises(RuntimeError, match="probe: an engine's log-probs differ"):
            node.syncer.sync(1)
        assert node.nodes.wait_ready()[0]["version"] == 0
    finally:
        node.stop()
