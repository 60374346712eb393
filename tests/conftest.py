"""One real engine per kind of model for the whole session: a rollout node as a process, a one-rank trainer here.

The models are untrained toys (``tools.toy`` with 0 steps) whose weights are scaled up: an untrained model attends
almost evenly, so a wrong position, cache or expert would hardly show in its log-probs.
"""

from __future__ import annotations

import os
import random
import shutil
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
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                        "INSTAR_NODE": str(port)}  # fmt: skip
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


def connect(ranks, moe: bool, folder: Path, program: str = "rollout.py", synced: bool = True) -> Node:
    """Start a node on a new model and join it as its trainer; with ``synced`` it may sample."""
    import rl

    model = make_model(folder / "model", moe, dense_layers=[0] if moe else None)
    port, log = free_port(), folder / "rollout.log"
    process = start_rollout(model, log, port, program)
    cfg = rl.TrainConfig(model=str(model), out=str(folder / "run"), rollout_urls=f"http://127.0.0.1:{port}", wait_s=180)
    try:
        nodes = rl.Nodes(cfg)
        policy = rl.shard(rl.Policy(cfg), cfg, ranks)
        replay = rl.make_replay(policy, cfg)
        nodes.wait_ready()
        syncer = rl.Syncer(cfg, ranks, nodes, policy, replay)
        if synced:
            syncer.sync(0)
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


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, name == "moe") for name in ("dense", "moe")}


def processes_of(run: str) -> list[str]:
    """Live processes that name the run's folder or were started for it (the engines' workers name nothing)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_text(errors="replace")
            command = (path.parent / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if f"RUN={run}\0" in text and "pytest" not in command and command:
            found.append(command)
    return found


class Run:
    """``bash run_2x8.sh`` with three steps of an untrained model."""

    def __init__(self, name: str, model: Path, **env: str):
        self.name, self.folder = name, ROOT / "runs" / name
        variables = os.environ | {"RUN": name, "MODEL": str(model), "STEPS": "3"} | env
        self.process = subprocess.Popen(
            ["bash", "run_2x8.sh"],
            cwd=ROOT,
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell that was started in the background ignores Ctrl-C, and so would everything under it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def end(self, seconds: float) -> str:
        """What it printed, once it ended by itself."""
        return self.process.communicate(timeout=seconds)[0]

    def wait_for_step(self) -> None:
        log = self.folder / "rl.log"
        wait_for(lambda: log.is_file() and "step    1" in log.read_text(), 150)


@pytest.fixture
def launch(request):
    """Starts runs; afterwards their folders are removed, and no process of theirs may be left."""
    runs = []

    def start(model: Path, **env: str) -> Run:
        runs.append(Run(f"test-{os.getpid()}-{len(runs)}-{request.node.name.split('[')[0]}", model, **env))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.communicate(timeout=60)
        left = processes_of(run.name)
        shutil.rmtree(run.folder, ignore_errors=True)
        assert not left, left


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.2)
