"""TOUR.md names what exists."""

from __future__ import annotations

import ast
import json
import re

import pytest
from conftest import ROOT

TOUR = (ROOT / "TOUR.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", TOUR)))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part)
def test_every_name_of_the_tour_exists(file, name):
    body = ast.parse((ROOT / file).read_text()).body
    for part in name.split("."):
        found = [node for node in body if vars(node).get("name") == part]
        assert found, f"{file} has no {name}"
        body = vars(found[0]).get("body", [])


def test_the_tour_names_much_of_every_module():
    files = {file for file, _ in NAMED}
    assert files == {"rl.py", "rollout.py", "loopback.py", "gate.py", "moe_replay.py", "agents/__init__.py"}
    assert len(NAMED) > 35


def without_an_entry(meters: set[str]) -> set[str]:
    """Meters that the glossary does not name."""
    named = re.findall(
        r"`([\w/<>]+)`", "".join(line.split("|")[1] for line in TOUR.splitlines() if line.startswith("| `"))
    )
    patterns = [re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in named]
    return {meter for meter in meters if not any(pattern.fullmatch(meter) for pattern in patterns)}


def test_a_meter_without_an_entry_is_found():
    assert without_an_entry({"gate/ess", "gate/lag_8plus", "rollout/dropped/stale", "gate/new", "news"}) == {
        "gate/new", "news"}  # fmt: skip


def meters_of(folder) -> set[str]:
    return {name for line in (folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
