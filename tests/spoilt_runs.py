"""Kept runs that were tampered with, one way each: what ``tools.trace --check`` has to notice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from loopback import pack_rows, unpack_rows
from tools import trace


def edit_rows(path: Path, change) -> None:
    """Unpack a file of rows, change them in place, and pack them again."""
    rows = unpack_rows(path.read_bytes())
    for row in rows:
        row.__dict__.update({k: v.copy() for k, v in vars(row).items() if hasattr(v, "dtype")})
    change(rows)
    path.write_bytes(pack_rows(rows))


def edit_decisions(path: Path, change) -> None:
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    save_file(change(tensors) or tensors, path, metadata)


def edit_lines(path: Path, change) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def a_file(run: Path, pattern: str) -> Path:
    return sorted(run.glob(pattern))[0]


def first_logprob(by: float):
    def change(rows) -> None:
        rows[0].logprobs[rows[0].sampled.nonzero()[0][0]] += by

    return change


def of_another_call(rows) -> None:
    """The first token of a call becomes the last of the call before."""
    at = rows[0].call.tolist().index(1)
    rows[0].call[at] = 0


def once_more(run: Path) -> None:
    """A step's rows are listed and fetched in the next step as well."""
    for folder in ("rows", "decisions"):
        shutil.rmtree(run / folder / "step-000002")
        shutil.copytree(run / folder / "step-000001", run / folder / "step-000002")
    edit_lines(run / "schedule.jsonl", lambda lines: lines[1].update(rollouts=lines[0]["rollouts"]))


def set_first(name: str, value: float):
    def change(tensors) -> None:
        tensors[name][0] = value

    return change


def without_last(tensors) -> dict:
    return {name: tensor[:-1] for name, tensor in tensors.items()}


def scale(name: str, by: float):
    def change(tensors) -> None:
        tensors[name] *= by

    return change


def add(line: int, name: str, number: int):
    def change(lines) -> None:
        lines[line][name] += number

    return change


ROWS, DECISIONS = "rows/step-000001/*/*", "decisions/step-000001/rank-0.safetensors"


def wrong_logprobs(run: Path) -> None:
    """Sampler's and trainer's log-probs that agree with each other and not with the weights."""
    path = a_file(run, ROWS)
    edit_rows(path, first_logprob(0.01))
    name = unpack_rows(path.read_bytes())[0].row_id
    for path in run.glob("decisions/step-000001/*"):
        with safe_open(path, "pt") as file:
            names = json.loads(file.metadata()["rows"])

        def same(tensors, names=names) -> None:
            tensors["logp"][(tensors["row"] == names.index(name)).nonzero()[0]] += 0.01

        if name in names:
            edit_decisions(path, same)


WRONG = {
    "a token without a decision": (lambda run: edit_decisions(a_file(run, DECISIONS), without_last),
                                   "without a decision"),
    "a token of another call": (lambda run: edit_rows(a_file(run, ROWS), of_another_call),
                                "tokens of call 0, which sampled"),
    "a token twice": (once_more, "are in another row as well"),
    "a row that is gone": (lambda run: a_file(run, ROWS).unlink(), "listed but not fetched"),
    "another log-prob of the engine": (lambda run: edit_rows(a_file(run, ROWS), first_logprob(0.01)),
                                       "weight of token"),
    "another weight": (lambda run: edit_decisions(a_file(run, DECISIONS), set_first("weight", 1.5)), "the gate says"),
    "another reason": (lambda run: edit_decisions(a_file(run, DECISIONS), set_first("reason", 2)), "reason of token"),
    "another denominator": (lambda run: edit_decisions(a_file(run, DECISIONS), scale("denominator", 1.01)),
                            "the token rule gives"),
    "a ledger that does not balance": (lambda run: edit_lines(run / "ledger.jsonl", add(0, "sampled", 1)), "!="),
    "a ledger that forgets": (lambda run: edit_lines(run / "ledger.jsonl", lambda lines: (
        add(1, "sampled", -1)(lines), add(1, "pending_before", 1)(lines))), "the line before left"),
    "another count at the end": (lambda run: edit_lines(run / "schedule.jsonl", add(-1, "sampled", 1)),
                                 "the engines' own count"),
    "log-probs that are not those of the weights": (wrong_logprobs, "scored again"),
}  # fmt: skip


def check_notices(run: Path, tmp_path: Path) -> None:
    """Every copy of a kept run that was tampered with is found out."""
    for what, (spoil, says) in WRONG.items():
        copy = tmp_path / "spoilt"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "model", "*.log"))
        spoil(copy)
        with pytest.raises(ValueError) as caught:
            trace.check(trace.Run(copy))
        assert says in str(caught.value), (what, str(caught.value))
