"""Faults, injected for real: engines that are killed, or hang, or die in a weight transfer; a node that is gone; agents
that go wrong. The run goes on, or ends in time with its cause; every token is accounted for; no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, Run, connect, free_port, start_rollout, wait_for

import rl
from loopback import unpack_rows

pytestmark = pytest.mark.engine


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def engines_of(variable: str) -> list[int]:
    """Engine processes, oldest first, that have ``variable`` (NAME=value) in their environment."""
    found = subprocess.run(["pgrep", "-f", "VLLM::EngineCore"], text=True, capture_output=True).stdout.split()
    mine = [int(pid) for pid in found if f"{variable}\0" in Path(f"/proc/{pid}/environ").read_text(errors="replace")]
    began = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]) for pid in mine}
    return sorted(mine, key=began.__getitem__)  # not by their numbers, which begin again


def steps_of(log: Path) -> int:
    return sum(line.startswith("step ") for line in log.read_text().splitlines()) if log.is_file() else 0


def check_account(folder: Path) -> Counter:
    """Every sampled token is in one place, and no token is trained twice. What was dropped, by reason."""
    dropped: Counter[str] = Counter()
    pending = 0
    for line in lines(folder / "ledger.jsonl"):
        assert line["pending_before"] == pending
        pending = line["pending_after"]
        gone = line["trained"] + line["masked"] + sum(line["gated"].values()) + sum(line["dropped"].values())
        assert line["sampled"] + line["pending_before"] == gone + pending, line
        dropped.update(line["dropped"])
    assert pending == 0
    trained = [row["row_id"] for batch in lines(folder / "schedule.jsonl")[:-1] for rollout in batch["rollouts"]
               for row in rollout["rows"]]  # fmt: skip
    assert trained
    return dropped


def test_engines_that_die_and_hang_are_replaced_and_agents_may_fail_in_every_way(models, launch):
    """One engine is killed while it samples; the other is stopped, which leaves none: the run waits for the first to
    come back, gives it the current weights, and goes on."""
    run: Run = launch(models["dense"], RECIPE="../tests/faults_recipe", STEPS="12", ENGINES="2", TRAINER_RANKS="1")
    log = run.folder / "rl.log"
    wait_for(lambda: steps_of(log) >= 2, 200)
    first, second = engines_of(f"RUN={run.name}")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: steps_of(log) >= 4, 120)
    os.kill(second, signal.SIGSTOP)
    out = run.end(400)
    assert run.process.returncode == 0, out + (run.folder / "rollout.log").read_text()[-3000:]
    metrics, dropped = lines(run.folder / "metrics.jsonl"), check_account(run.folder)
    said = (run.folder / "rollout.log").read_text()
    assert "engine 0 died (exit status -9): it is started again" in said
    assert "engine 1 gave no sign of life for 10 s: it is started again" in said
    assert metrics[-1]["rollout/engine_restarts"] == 2
    assert "'0, start 2'" in log.read_text(), "the engine that was started again has joined a weight sync"
    assert all(line["sync/probe_max_abs_dlogp"] < 1e-4 for line in metrics)
    statuses = Counter()
    for line in metrics:
        statuses.update({k.rpartition("/")[2]: v for k, v in line.items() if k.startswith("rollout/status/")})
    assert {"ok", "agent_error", "agent_timeout", "no_calls"} <= set(statuses), statuses
    assert dropped["agent_error"] > 0, dropped
    assert sum(line.get("rollout/dropped/agent_error", 0) for line in metrics) > 0
    # The kept rows: no token was handed out twice, and on the wire a batch is hardly more than its arrays.
    seen, wire, arrays = set(), 0, 0
    for path in (run.folder / "rows").glob("*/*/*"):
        wire += path.stat().st_size
        for row in unpack_rows(path.read_bytes()):
            arrays += sum(array.nbytes for array in vars(row).values() if hasattr(array, "nbytes"))
            mine = {(row.rollout_id, int(call), at) for at, call in enumerate(row.call) if call >= 0}
            assert not mine & seen, row.row_id
            seen |= mine
    assert seen
    print(f"{arrays / 1e3:.1f} kB of arrays, {wire / arrays:.3f} times as many on the wire")


def test_one_engine_too_many_ends_the_run_with_its_cause(models, launch):
    run: Run = launch(models["dense"], RECIPE="../tests/faults_recipe", STEPS="500", RESTARTS="0")
    run.wait_for_step()
    os.kill(engines_of(f"RUN={run.name}")[-1], signal.SIGKILL)
    out = run.end(60)
    assert run.process.returncode != 0
    assert "rollout.py: error: " in out
    assert "engine 0 died (exit status -9), after 0 restarts (engine_restarts)" in out


def test_a_run_goes_on_when_a_node_is_gone_or_slow(models, tmp_path):
    """Two nodes; one stands still for a while, the other is killed outright."""
    ports = [free_port(), free_port()]
    flags = {"agent": "tests/agent_turns.py", "group_size": 2, "groups_per_step": 3, "max_lag": 1, "max_tokens": 24}
    nodes = [start_rollout(models["dense"], tmp_path / f"node{i}.log", port, seed=i, **flags)
             for i, port in enumerate(ports)]  # fmt: skip
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "rl.py",
               "--model", str(models["dense"]), "--out", str(tmp_path), "--rollout_urls", ",".join(urls),
               "--max_lag", "1", "--steps", "10", "--eval_tasks", "0", "--keep_rows", "True"]  # fmt: skip
    log = tmp_path / "rl.log"
    with log.open("w") as out:
        trainer = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_for(lambda: steps_of(log) >= 2 or trainer.poll() is not None, 240)
        nodes[0].send_signal(signal.SIGSTOP)
        time.sleep(3)
        nodes[0].send_signal(signal.SIGCONT)
        wait_for(lambda: steps_of(log) >= 4 or trainer.poll() is not None, 90)
        engine = engines_of(f"INSTAR_NODE={ports[1]}")
        nodes[1].kill()
        assert trainer.wait(120) == 0, log.read_text()[-3000:]
        assert nodes[0].wait(60) == 0, (tmp_path / "node0.log").read_text()[-3000:]
        assert engine, "the node's engine was found"
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engine), 20)
    finally:
        for process in (trainer, *nodes):
            with_group(process, signal.SIGKILL)
    assert f"rollout node {urls[1]}" in log.read_text() and "the run goes on without it" in log.read_text()
    batches = lines(tmp_path / "schedule.jsonl")[:-1]
    assert {rollout["url"] for rollout in batches[1]["rollouts"]} == set(urls)
    assert {rollout["url"] for rollout in batches[-1]["rollouts"]} == {urls[0]}
    assert "node_lost" in check_account(tmp_path), "be it that nothing was pending"
    assert json.loads((tmp_path / "summary.json").read_text())["ledger_balanced"] is True


def with_group(process: subprocess.Popen, sign: int) -> None:
    """Signal a process's whole group, if any of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, sign)
    process.wait(30)


def test_an_engine_that_dies_in_a_weight_transfer_ends_node_and_trainer(world, tmp_path, monkeypatch):
    """Which weights the others hold by then nobody knows. The version is not committed."""
    node = connect(world, False, tmp_path, synced=False)
    [engine] = engines_of(f"INSTAR_NODE={node.cfg.rollout_urls.rpartition(':')[2]}")
    node.syncer.sync(0)
    whole = rl.Weights.__iter__

    def killing(weights):
        for index, pair in enumerate(whole(weights)):
            if index == 3:
                os.kill(engine, signal.SIGKILL)
                time.sleep(1)
            yield pair

    monkeypatch.setattr(rl.Weights, "__iter__", killing)
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError) as caught:
            node.syncer.sync(1)
        print("the trainer says:", caught.value)
        assert node.process.wait(60) == 1
        assert time.monotonic() - began < 150
        last = node.log.read_text().strip().splitlines()[-1]
        assert last.startswith("rollout.py: error: weight sync to version 1, engines [0]: "), last
    finally:
        with_group(node.process, signal.SIGKILL)


def test_a_trainer_with_another_secret_is_told_so(node, tmp_path):
    command = [sys.executable, "rl.py", "--model", str(node.model), "--out", str(tmp_path), "--rollout_urls",
               node.cfg.rollout_urls]  # fmt: skip
    ranks = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = os.environ | ranks | {"MASTER_PORT": str(free_port()), "INSTAR_SECRET": "that of last week"}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == "rl.py: error: rollout node answered 401: missing or wrong x-instar-secret", last


def test_a_full_queue_stops_the_engines_until_the_trainer_comes(node):
    """As much as the staleness bound allows is sampled ahead, and no more."""
    sampled = lambda: node.nodes.wait_ready()[0]["sampled"]  # noqa: E731

    def still() -> bool:
        before = sampled()
        time.sleep(1.5)
        return sampled() == before

    wait_for(still, 90)
    manifest = node.nodes.manifest(node.version)
    groups = {rollout["group"] for rollout in manifest["rollouts"]}
    assert len(groups) == 4
    assert manifest["ledger"]["pending_after"] > 0, "the groups of later steps are there as well"
    node.syncer.sync(node.version + 1)
    node.version += 1
    before = sampled()
    wait_for(lambda: sampled() > before, 60)
