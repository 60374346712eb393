"""A run that is killed with everything it started, and goes on from its checkpoint; with the real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, wait_for
from safetensors.torch import load_file
from spoilt_runs import check_notices
from test_faults import check_account, lines, steps_of
from test_tour import meters_of, without_an_entry
from transformers import AutoModelForCausalLM, AutoTokenizer

import rl
from tools import trace
from tools.export import export

torch.set_num_threads(1)
pytestmark = pytest.mark.engine


def retrain(run: Path, out: Path, ranks: int, *flags: str) -> dict[str, torch.Tensor]:
    """Weights after training again from a run's rows."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "rl.py",
               "--retrain", str(run), "--out", str(out), *flags]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out / "model" / "model.safetensors")


def stepping(folder: Path, steps: int):
    return lambda: steps_of(folder / "rl.log") >= steps


def test_a_killed_run_goes_on_where_it_was(models, launch, tmp_path):
    """Killed after step 3 of 6, so that step 3 is taught again from the checkpoint of step 2; and each checkpoint gives
    the weights that the run went on with, to as many ranks as there are."""
    run = launch(models["dense"], RECIPE="../tests/resume_recipe", STEPS="6")
    folder = run.folder
    wait_for(stepping(folder, 3), 240)
    family = subprocess.run(["pgrep", "-f", run.name], text=True, capture_output=True).stdout.split()
    for pid in map(int, family):
        os.kill(pid, signal.SIGKILL)
    run.process.communicate(timeout=60)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    saved = json.loads((folder / "checkpoints" / "step-000002" / "state.json").read_text())
    before = lines(folder / "schedule.jsonl")
    (folder / "metrics.jsonl").open("a").write('{"step": 4, "rew')  # a line that the kill cut in two

    again = launch(models["dense"], RECIPE="../tests/resume_recipe", STEPS="6", RUN=run.name, RESUME="auto")
    assert again.end(300) and again.process.returncode == 0, (folder / "rl.log").read_text()[-3000:]

    # The files are those of one run of six steps, whose ledger balances over the kill.
    dropped = check_account(folder)
    ledger = lines(folder / "ledger.jsonl")
    assert dropped["resume"] == ledger[2]["pending_before"]
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert json.loads((folder / "summary.json").read_text())["ledger_balanced"] is True
    schedule = lines(folder / "schedule.jsonl")
    assert [line["step"] for line in schedule] == [1, 2, 3, 4, 5, 6, 7] and schedule[:2] == before[:2]
    assert len(list((folder / "rows").glob("step-*"))) == 6

    # O10: each evaluation has its line, also that of the checkpoint's step, and none is there twice.
    evaluations = lines(folder / "evaluations.jsonl")
    assert [(line["step"], line["version"], line["failed"]) for line in evaluations] == [
        (n, n, 0) for n in (0, 2, 4, 6)
    ]
    assert all(line["pass"] == {"1": [1.0, 1.0, 1.0], "2": [1.0, 1.0, 1.0]} for line in evaluations)
    assert dropped["eval"] > 0, "evaluation's tokens are in the ledger, and in no row"

    # O1: the tasks that were open at the checkpoint come first, then those that follow; none twice.
    tasks = [rollout["task_id"] for batch in schedule[:-1] for rollout in batch["rollouts"]]
    groups = [[one["rollout_id"].split("-")[0] for one in batch["rollouts"]] for batch in schedule[:-1]]
    assert all(tasks.count(task) == 2 for task in tasks), "a group of two rollouts each"
    position = saved["positions"]["0"]
    first = {int(group) for group in groups[2]}
    assert first <= {*position["open"], *range(position["taken"], position["taken"] + 24)}
    assert min(position["open"]) in first

    # O3: what was sampled first has the checkpoint's version.
    cfg = rl.TrainConfig(**saved["config"])
    nodes = rl.Recorded(rl.replace(cfg, retrain=str(folder)))
    owner = {row["row_id"]: 0 for rollout in schedule[2]["rollouts"] for row in rollout["rows"]}
    kept = [rl.unpack_rows(path.read_bytes()) for path in (folder / "rows" / "step-000003").glob("*/*")]
    rows = [row for some in kept for row in some]
    assert {row.row_id for row in rows} == set(owner) and len(nodes.batches) == 6
    assert {int(version) for row in rows for version in row.versions[row.sampled]} == {2}

    # The whole run, killed and resumed, holds offline; a trace leads from a sampled token to its share of the loss.
    said = trace.check(trace.Run(folder))
    assert said[0].startswith("6 steps") and [line.split(",")[0] for line in said[2:]] == ["version 0", "version 4"], (
        said
    )
    kept_run, tokenizer = trace.Run(folder), AutoTokenizer.from_pretrained(cfg.model)
    step = kept_run.step(3)
    found = list(step.tokens())
    text = trace.chain(step, 5, tokenizer)
    _, row, at, decision = found[5]
    for piece in (f"token 5 of {len(found)}", row.row_id, f"position {at} of", f"{row.logprobs[at]:.6f}", "version 2",
                  f"{decision['logp']:.6f}", "engine 0", f"denominator {decision['denominator']:g}"):  # fmt: skip
        assert piece in text, (piece, text)
    mine = [number for number, (_, row, _, _) in enumerate(found) if row.rollout_id == found[5][1].rollout_id]
    assert [int(line.split()[0]) for line in trace.table(step, row.rollout_id, tokenizer).splitlines()[1:]] == mine
    check_notices(folder, tmp_path)
    assert not without_an_entry(meters_of(folder)), "every meter that a run writes is in TOUR.md"

    # Four steps on end are two, a resume, and the others; bit for bit, and nearly so with another number of ranks.
    straight = load_file(folder / "model" / "model.safetensors")
    whole = retrain(folder, tmp_path / "whole", 2, "--checkpoint_steps", "2", "--checkpoint_keep", "9")
    half = str(tmp_path / "whole" / "checkpoints" / "step-000002")
    resumed = retrain(folder, tmp_path / "resumed", 2, "--resume", half)
    alone = retrain(folder, tmp_path / "alone", 1, "--resume", half)
    for name, tensor in straight.items():
        assert torch.equal(whole[name], tensor) and torch.equal(resumed[name], tensor), name
        assert torch.allclose(alone[name], tensor, atol=2e-4), (name, (alone[name] - tensor).abs().max())
    for name in ("metrics.jsonl", "ledger.jsonl"):
        wholes, rests = (lines(tmp_path / which / name) for which in ("whole", "resumed"))
        same = [{key: value for key, value in line.items() if "second" not in key} for line in wholes]
        assert same == [{key: value for key, value in line.items() if "second" not in key} for line in rests]

    # A checkpoint as a model: what the run saved at its end; vLLM's probe agreed with these weights before.
    export(tmp_path / "whole" / "checkpoints" / "step-000006", tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in straight.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")
