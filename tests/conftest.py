"""One real engine per kind of model for the whole session: a rollout node as a process, a one-rank trainer here.

The models are untrained toys (``tools.toy`` with 0 steps) whose weights are scaled up: an untrained model attends
almost evenly, so a wrong position, cache or expert would hardly show in its log-probs.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("INSTAR_SECRET", "the tests' own secret")


def free_port() -> int:
    """A port that nothing listens on, below those that the system hands to clients, so that none takes it first."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def sharpen(model: torch.nn.Module) -> None:
    """Make a random model opinionated: distinct attention, distinct next tokens, clear routes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
            elif "q_norm" in name or "k_norm" in name:
                parameter.mul_(2.0)


def make_model(path: Path, moe: bool, dense_layers: list[int] | None = None) -> Path:
    """``dense_layers`` of a mixture of experts have none."""
    from tools import toy

    model = toy.untrained(moe, seed=0)
    if dense_layers:
        model = type(model)(type(model.config)(**model.config.to_dict() | {"mlp_only_layers": dense_layers}))
    sharpen(model)
    model.save_pretrained(path)
    toy.tokenizer().save_pretrained(path)
    return path


@dataclass
class Node:
    """A rollout node process and a trainer connected to it."""

    process: subprocess.Popen
    log: Path
    model: Path
    cfg: object
    ranks: object
    nodes: object
    policy: object
    replay: object
    syncer: object
    base: list[torch.Tensor]
    """The weights at the start."""
    version: int = 0

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


def start_rollout(model: Path, log: Path, port: int, program: str = "rollout.py", **flags) -> subprocess.Popen:
    """``python rollout.py`` in a process group of its own."""
    settings = {"agent": "tests/agent_turns.py", "max_model_len": 512, "max_tokens": 48, "group_size": 2,
                "groups_per_step": 4, "max_lag": 3, "control_port": port} | flags  # fmt: skip
    command = [sys.executable, program, "--model", str(model)]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def connect(ranks, moe: bool, folder: Path, program: str = "rollout.py") -> Node:
    """Start a node on a new model and join it as its trainer."""
    import rl

    model = make_model(folder / "model", moe, dense_layers=[0] if moe else None)
    port, log = free_port(), folder / "rollout.log"
    process = start_rollout(model, log, port, program)
    cfg = rl.TrainConfig(model=str(model), out=str(folder / "run"), rollout_urls=f"http://127.0.0.1:{port}", wait_s=180)
    try:
        nodes = rl.Nodes(cfg)
        policy = rl.shard(rl.Policy(cfg), cfg, ranks)
        replay = rl.make_replay(policy, cfg)
        states = nodes.wait_ready()
        syncer = rl.Syncer(cfg, ranks, nodes, policy, replay, [state["workers"] for state in states])
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        print(log.read_text()[-3000:])
        raise
    base = [parameter.detach().to_local().clone() for parameter in policy.parameters()]
    return Node(process, log, model, cfg, ranks, nodes, policy, replay, syncer, base)


@pytest.fixture(scope="session")
def world():
    """A trainer's process group of one rank, for the whole session."""
    values = {
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    os.environ.update(values)
    import rl

    yield rl.Ranks(rl.TrainConfig(wait_s=180))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session", params=["dense", "moe"])
def node(request, world, tmp_path_factory):
    """A node with a real engine, dense and mixture-of-experts in turn, and a trainer connected to it."""
    began = time.monotonic()
    node = connect(world, request.param == "moe", tmp_path_factory.mktemp(request.param))
    print(f"{request.param} engine ready after {time.monotonic() - began:.0f} s")
    yield node
    node.stop()
