"""Every recipe, as ``DRY_RUN=1 bash run_2x8.sh`` prints it for each node: the commands that would run, and no other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import replace

import pytest
from conftest import ROOT
from transformers import HfArgumentParser

import rl
import rollout
from agents.largest import HELD_OUT, Largest

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.sh"))
GPUS = {"DEVICE": "cuda", "GPU_COUNT": "8"}
HEAD, OTHER = (GPUS | {"NODE_RANK": n, "MASTER_ADDR": "head", "ROLLOUT_ADDR": "other", "INSTAR_SECRET": "s"}
               for n in "01")  # fmt: skip


def dry_run(recipe: str, **env: str) -> dict[str, list[str]]:
    """The commands by program, split as a shell splits them."""
    known = {k: v for k, v in os.environ.items() if k != "INSTAR_SECRET"}
    known |= {"DEVICE": "cpu", "RECIPE": recipe, "DRY_RUN": "1", "RUN": "dry"}
    known |= {"DATA": "train rows.jsonl", "EVAL_DATA": "eval rows.jsonl"} | env
    done = subprocess.run(["bash", "run_2x8.sh"], cwd=ROOT, text=True, capture_output=True, timeout=60, env=known)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines() if ".venv/bin/python" in line]
    programs = {next((word for word in line if word in ("rl.py", "rollout.py")), "model"): line for line in commands}
    assert len(programs) == len(commands) and not (ROOT / "runs" / "dry").exists()
    return programs


def parsed(config: type, command: list[str], program: str):
    """The program's config; an unknown flag is an error."""
    parser = HfArgumentParser(config, allow_abbrev=False)
    (cfg,) = parser.parse_args_into_dataclasses(command[command.index(program) + 1 :])
    return cfg


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_understood_by_both_programs_and_they_agree(recipe, monkeypatch, models):
    commands = dry_run(recipe)
    assert set(commands) == {"model", "rollout.py", "rl.py"}
    node = parsed(rollout.RolloutConfig, commands["rollout.py"], "rollout.py")
    trainer = parsed(rl.TrainConfig, commands["rl.py"], "rl.py")
    monkeypatch.setattr(rl.torch.cuda, "is_available", lambda: True)
    here = str(models["dense"])
    rl.validate(replace(trainer, model=here, ref_model=trainer.ref_model and here))
    assert (node.model, node.steps, node.seed, node.max_lag) == (
        trainer.model, trainer.steps, trainer.seed, trainer.max_lag)  # fmt: skip
    assert trainer.rollout_urls == f"http://127.0.0.1:{node.control_port}" and node.control_host == "127.0.0.1"
    assert (node.data, node.eval_data) == ("train rows.jsonl", "eval rows.jsonl"), "spaces survive"
    assert trainer.out == "runs/dry" and trainer.recipe == recipe
    text = (ROOT / "recipes" / f"{recipe}.sh").read_text()
    assert text.startswith(f"# {recipe}: ")
    assert re.search(r"Not measured|README\.md", text), "a recipe says what to expect, or that nobody knows"


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_nodes_share_the_work(recipe):
    """The head trains on its 8 GPUs, the other rolls out on its own; each prints what it would run itself."""
    head, other = dry_run(recipe, **HEAD), dry_run(recipe, **OTHER)
    assert set(head) == {"model", "rl.py"} and set(other) == {"model", "rollout.py"}
    ranks = head["rl.py"][head["rl.py"].index("--nproc_per_node") + 1]
    trainer = parsed(rl.TrainConfig, head["rl.py"], "rl.py")
    node = parsed(rollout.RolloutConfig, other["rollout.py"], "rollout.py")
    assert (ranks, node.engines * node.tensor_parallel, node.gpus) == ("8", 8, "")
    assert trainer.rollout_urls == f"http://other:{node.control_port}" and trainer.sync_address == "head"
    assert node.control_host == "0.0.0.0" and (node.device, trainer.device) == ("cuda", "cuda")


def test_one_node_with_gpus_is_split():
    commands = dry_run("qwen3_30b_a3b_math", **GPUS)
    node = parsed(rollout.RolloutConfig, commands["rollout.py"], "rollout.py")
    assert (node.engines, node.tensor_parallel, node.gpus) == (2, 2, "4,5,6,7")
    assert commands["rl.py"][commands["rl.py"].index("--nproc_per_node") + 1] == "4"


def test_two_nodes_by_hand_need_the_same_secret():
    env = {k: v for k, v in os.environ.items() if k != "INSTAR_SECRET"} | GPUS | {"NODE_RANK": "0", "DRY_RUN": "1"}
    done = subprocess.run(["bash", "run_2x8.sh"], cwd=ROOT, text=True, capture_output=True, timeout=60, env=env)
    assert done.returncode != 0 and "the same random INSTAR_SECRET" in done.stderr


def test_a_recipe_without_its_rows_says_what_it_needs():
    env = {k: v for k, v in os.environ.items() if k not in ("DATA", "EVAL_DATA")}
    env |= {"DEVICE": "cpu", "RECIPE": "qwen3_4b_math", "DRY_RUN": "1"}
    done = subprocess.run(["bash", "run_2x8.sh"], cwd=ROOT, text=True, capture_output=True, timeout=60, env=env)
    assert done.returncode != 0 and "DATA=train.parquet" in done.stderr


def test_the_triples_of_the_evaluation_are_never_trained():
    train, held = Largest.tasks("train", 3), Largest.tasks("eval", 3)
    assert all(sum(next(train).data["numbers"]) % HELD_OUT for _ in range(500))
    first = [next(held).data["numbers"] for _ in range(50)]
    assert all(sum(numbers) % HELD_OUT == 0 for numbers in first)
    again = Largest.tasks("eval", 4)
    assert first == [next(again).data["numbers"] for _ in range(50)], "the same for every seed"


def test_what_the_docker_image_copies_is_there():
    """The image itself is not built in tests: they run where there is no container runtime."""
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    paths = " ".join(copied).replace("${DEVICE}", "cpu").split()
    assert paths and all((ROOT / path).exists() for path in [*paths, "requirements-gpu.txt"]), paths
