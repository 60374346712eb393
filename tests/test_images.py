"""Images through the wires into a real engine: a tiny untrained Qwen2.5-VL and its own processor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from conftest import ROOT, free_port

from loopback import unpack_rows
from tools import toy

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """The control address of a rollout node with that model; its environment, and its folder."""
    folder, port = tmp_path_factory.mktemp("sees"), free_port()
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tools" / "vision", ROOT / ".venv" / "vision")))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    build = [sys.executable, "-m", "tools.toy_shapes", "--steps", "0", "--out", folder / "model"]
    subprocess.run(build, env=env, cwd=ROOT, check=True, timeout=120)
    flags = {"model": folder / "model", "agent": "tests/agent_sees.py", "max_model_len": 512, "max_tokens": 12,
             "group_size": 2, "groups_per_step": 3, "control_port": port, "tool_parser": ""}  # fmt: skip
    command = [
        sys.executable,
        "rollout.py",
        *(part for name, value in flags.items() for part in (f"--{name}", str(value))),
    ]
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
    yield f"http://127.0.0.1:{port}", env, folder
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) is not None
    print(log.read_text()[-3000:])


def test_images_reach_the_engine_and_the_trainer(node):
    """Each rollout is one row: what an image was expanded to in one turn begins the next turn's prompt unchanged. The
    trainer computes what the engine computed, and refuses images that are not those of the row's tokens."""
    url, env, folder = node
    client = httpx.Client(
        base_url=url, headers={"x-instar-secret": os.environ["INSTAR_SECRET"]}, timeout=60, trust_env=False
    )
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if client.get("/health").json()["ready"]:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    for phase, body in (("begin", {}), ("commit", {"version": 0})):  # no trainer: the folder's weights are the policy's
        client.post(f"/sync/{phase}", json=body).raise_for_status()
    while (reply := client.get("/manifest?version=0")).status_code == 204:
        assert time.monotonic() < end
    rollouts = [rollout for group in reply.json()["groups"] for rollout in group["rollouts"]]
    assert [rollout["status"] for rollout in rollouts] == ["ok"] * 6
    names = [row["row_id"] for rollout in rollouts for row in rollout["rows"]]
    assert len(names) == 6, "one row a rollout"
    data = client.post("/rows", json={"ids": names}).content
    rows = unpack_rows(data)
    pad = 256 + len(toy.SPECIAL) + len(toy.MARKERS) + 2
    for row in rows:
        assert len(row.images) == 3
        context = np.where(row.sampled, -1, row.token_ids)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], context == pad, [0]])))
        assert (edges[1::2] - edges[::2]).tolist() == [6, 8, 9], "patches of 28 pixels"
        assert sorted(set(row.call[row.sampled])) == [0, 1, 2]
    assert len({tuple(row.token_ids[~row.sampled].tolist()) for row in rows}) == 1, "three ways to say the same"
    (folder / "rows").write_bytes(data)
    score = [sys.executable, "tests/score_images.py", folder / "model", folder / "rows"]
    found = json.loads(subprocess.run(score, env=env, cwd=ROOT, check=True, timeout=120, stdout=subprocess.PIPE).stdout)
    print(found)
    assert max(found["packed"], found["alone"]) < 1e-4
    assert "holds images of [6, 8, 9] tokens, where the trainer makes [9, 8, 6] of them" in found["error"]
