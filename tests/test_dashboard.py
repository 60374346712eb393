"""tools/dashboard: what it serves of a small run, and its page in a real headless Chromium, where there is one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from conftest import ROOT, free_port
from transformers import AutoTokenizer

import rl
from loopback import Row, pack_rows, unpack_rows
from tools import curve, dashboard, trace


def row_of(name: str, ids: list[int]) -> Row:
    """Eight tokens, the last of them sampled by two calls, in turn under versions 0 and 1."""
    call = np.array([-1, -1, -1, 0, 0, -1, 1, 1], np.int32)
    sampled, logprobs = call >= 0, np.where(call >= 0, -0.5, np.nan).astype(np.float32)
    calls = [{"wire": "chat", "engines": [0], "finish_reason": "stop", "prompt_tokens": n, "sampled": 2,
              "version_spans": [[n, 2]], "seconds": 0.1, "closing": [5, 5 + n * (name == "7-1")]}
             for n in range(2)]  # fmt: skip
    arrays = np.array(ids, np.int32), sampled, logprobs, call, call, np.zeros((8, 2, 1), np.uint8), np.ones(8, bool)
    return Row(f"{name}.0", name, 0, "task", *arrays, 1.0, 1.0, "ok", False, calls)


@pytest.fixture
def run(models, tmp_path) -> Path:
    """Two steps, the second of which is kept."""
    folder = tmp_path / "small"
    ids = AutoTokenizer.from_pretrained(models["dense"]).encode("ask<b>no", add_special_tokens=False)
    rows = [row_of("7-0", ids), row_of("7-1", ids)]
    kept = rl.kept_rows(str(folder), "http://node:1", 2)
    kept.mkdir(parents=True)
    (kept / "7-0.0.safetensors").write_bytes(pack_rows(rows))
    micro, s = [rl.pack([(row, n) for n, row in enumerate(rows)], torch.device("cpu"))], torch.ones(8)
    found_S = {"logp": -0.4 * s, "lag": s.long(), "weight": 1.1 * s, "reason": torch.tensor([0, 3] * 4),
               "advantage": torch.tensor([-1.0, 1.0] * 4), "denominator": 8 * s}  # fmt: skip
    rl.keep_decisions(folder / "decisions" / "step-000002", 0, micro, **found_S)
    (folder / "config.json").write_text(json.dumps(asdict(rl.TrainConfig(model=str(models["dense"]), steps=9))))
    listed = [{"rollout_id": row.rollout_id, "task_id": "task", "group": "0/7", "status": "ok", "reward": 1.0,
               "rewards": [1.0], "url": "http://node:1",
               "seconds": 2.0, "ended": 1005.0, "rows": [{"row_id": row.row_id, "tokens": 8, "sampled": 4}]}
              for row in rows]  # fmt: skip
    metrics = {"mismatch/max": None, "gate/lag_0": 0.5, "gate/lag_1": 0.5, "seconds/clock": 1010.0,
               "seconds/generate": 3.0, "seconds/train": 2.0, "seconds/sync": 0.5}  # fmt: skip
    evaluation = {"low": 0.0, "high": 1.0, "pass": {"1": [0.5, 0.0, 1.0]}}
    account = {"trained": 4, "masked": 0, "gated": {"ratio_high": 4}, "dropped": {"probe": 2}}
    files = {
        "schedule": [{"step": n, "rollouts": listed} for n in (1, 2)],
        "metrics": [{"step": n, "reward": n / 2} | metrics for n in (1, 2)],
        "evaluations": [{"step": n, "reward": n / 4} | evaluation for n in (0, 2)],
        "ledger": [{"step": n} | account for n in (1, 2)],
    }
    for name, some in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
    (folder / "metrics.jsonl").open("a").write('{"step": 3, "rew')  # a line that is being written
    return folder


def ask(run: Path, *paths: str) -> list:
    """Status and text of the answers."""

    async def go() -> list:
        async with TestClient(TestServer(dashboard.make_app(run))) as client:
            answers = [await client.get(path) for path in paths]
            return [(answer.status, await answer.text()) for answer in answers]

    return asyncio.run(go())


def test_what_it_serves(run):
    (_, whole), (_, rollouts), (_, tokens), (_, metrics) = ask(
        run, "/run", "/rollouts?step=0", "/tokens?step=2&id=7-1", "/metrics"
    )
    whole = json.loads(whole)
    assert [line["step"] for line in whole["metrics"]] == [1, 2] and whole["ended"] is False
    assert json.loads(rollouts)["step"] == 2 and len(json.loads(rollouts)["rollouts"]) == 2
    [row] = json.loads(tokens)["rows"]
    assert "".join(token["text"] for token in row["tokens"]) == "ask<b>no"
    kinds = [token["kind"] for token in row["tokens"]]
    assert kinds == ["prompt"] * 3 + ["sampled"] * 2 + ["closing"] + ["sampled"] * 2
    [(_, other)] = ask(run, "/tokens?step=2&id=7-0")
    assert json.loads(other)["rows"][0]["tokens"][5]["kind"] == "message", "that rollout's call closed nothing"
    last = row["tokens"][-1]
    assert (last["version"], last["reason"], last["lag"], last["routes"]) == (1, "ratio_high", 1, [[0], [0]])
    assert last["ratio"] == pytest.approx(np.exp(0.1)) and last["weight"] == pytest.approx(1.1)
    [(_, when)] = ask(run, "/timeline?step=2")
    when = json.loads(when)
    assert when["trainer"][1] == {"step": 2, "from": 1004.5, "seconds": [3.0, 2.0, 0.5]}
    assert len(when["nodes"]["http://node:1"]) == 4 and when["nodes"]["http://node:1"][0]["from"] == 1003.0
    assert "# TYPE instar_reward gauge\ninstar_reward 1.0\n" in metrics and "instar_gate_lag_1 0.5\n" in metrics
    assert "None" not in metrics and not re.search(r"[^\w\s.#+-]", metrics), "nothing Prometheus would refuse"


def test_two_nodes_may_give_their_rollouts_the_same_names(run):
    """Their rows and decisions stay apart, in the page and in a trace."""
    first = rl.kept_rows(str(run), "http://node:1", 2) / "7-0.0.safetensors"
    rows = [replace(row, reward=0.25) for row in unpack_rows(first.read_bytes())]
    other = rl.kept_rows(str(run), "http://other:1", 2)
    other.mkdir()
    (other / "7-0.0.safetensors").write_bytes(pack_rows(rows))
    *_, last = schedule = rl.read_lines(run / "schedule.jsonl")
    last["rollouts"] += [one | {"url": "http://other:1", "group": "1/7"} for one in last["rollouts"]]
    (run / "schedule.jsonl").write_text("".join(json.dumps(line) + "\n" for line in schedule))
    both = [*unpack_rows(first.read_bytes()), *rows]
    micro = [rl.pack([(row, n) for n, row in enumerate(both)], torch.device("cpu"))]
    rl.keep_decisions(run / "decisions" / "step-000002", 0, micro, logp=-torch.arange(16.0), lag=torch.zeros(16),
                      weight=torch.ones(16), reason=torch.zeros(16).long(), advantage=torch.ones(16),
                      denominator=torch.ones(16))  # fmt: skip
    (_, all_of), (_, one) = ask(run, "/tokens?step=2&id=7-1", "/tokens?step=2&id=7-1&url=http://other:1")
    assert [row["reward"] for row in json.loads(all_of)["rows"]] == [1.0, 0.25]
    [row] = json.loads(one)["rows"]
    said = [token["trainer"] for token in row["tokens"] if token["kind"] == "sampled"]
    assert row["reward"] == 0.25 and said == [-12.0, -13.0, -14.0, -15.0]
    found = [(row.reward, found["row"][0], found["logp"]) for _, row, _, found in trace.Run(run).step(2).tokens()]
    assert found == [(1.0, "http://node:1", -n) for n in range(8)] + [
        (0.25, "http://other:1", -n) for n in range(8, 16)
    ]


def test_what_is_not_there_is_answered_in_one_line(run, tmp_path):
    missing = ask(run, "/tokens?step=1&id=7-1", "/rollouts?step=5", "/tokens?step=2")
    assert [status for status, _ in missing] == [404] * 3
    assert all(text and "\n" not in text for _, text in missing)
    assert "no step 5" in missing[1][1]
    assert ask(run, "/tokens?step=2&id=9-9") == [(404, "no rollout 9-9 in step 2: 7-0, 7-1")]
    with pytest.raises(ValueError, match="no config"):
        dashboard.make_app(tmp_path)


def test_the_curve_is_the_same_file_each_time(run, tmp_path):
    for name in "ab":
        curve.draw(run, tmp_path / f"{name}.svg")
    first, second = ((tmp_path / f"{name}.svg").read_bytes() for name in "ab")
    assert first == second and b"<svg" in first


def test_the_page_in_a_real_browser(run):
    """It draws the charts, and shows a rollout's tokens; nothing but this server is asked for anything."""
    browser = shutil.which("chromium")
    if not browser:
        pytest.skip("no chromium; on Debian: apt-get install chromium")
    assert not re.search(r"https?://", dashboard.PAGE.read_text()), "nothing from outside"
    port = free_port()
    command = [sys.executable, "-m", "tools.dashboard", str(run), "--port", str(port)]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline().strip() == f"http://127.0.0.1:{port}"
        end = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
                break
            except httpx.TransportError:
                assert time.monotonic() < end
                time.sleep(0.1)
        look = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
        seen = subprocess.run([*look, f"http://127.0.0.1:{port}/#2/7-1"], capture_output=True, text=True, timeout=60)
    finally:
        server.terminate()
        server.wait(10)
    page = seen.stdout
    assert "running, step 2 of 9" in page
    for title in ("reward", "evaluation, 95%", "pass@k", "lag of tokens, share", "where every sampled token went"):
        assert f"<figcaption>{title}<" in page, title
    assert page.count("<polyline") >= 5 and page.count("<polygon") >= 5
    [tokens] = re.findall(r'<div class="row">.*?</div>', page, re.DOTALL)
    assert len(re.findall(r'<span style="background:', tokens)) == 8 and "&lt;" in tokens
    assert 'class="error"' not in page
    for kind in ("prompt", "sampled", "closing: put there by the template", "wait for rows", "sync"):
        assert re.search(rf'class="key"[^>]*>{kind}<', page), kind
    assert "rollout 7-1 of step 2, ok, 2.00 s</title>" in page and "step 1: train 2.00 s</title>" in page
