"""Completes a run's summary.json with the launcher's own seconds, and prints the before/after table.

python -m tools.summary runs/NAME --setup 93 --toy 101
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def number(value: float | None) -> str:
    """A reward, or a dash where nothing was evaluated."""
    return "–" if value is None else f"{value:.3f}"


def table(summary: dict) -> str:
    """The lines a person reads at the end of a run."""
    seconds = "  ".join(f"{name} {value:g}" for name, value in summary["seconds"].items())
    lines = [
        f"{'':22s}{'before':>8s}{'after':>8s}",
        f"{'held-out reward':22s}{number(summary['reward_before']):>8s}{number(summary['reward_after']):>8s}",
        f"worst probe |dlogp| {summary['probe_max_abs_dlogp']:.1e}, ledger balanced: {summary['ledger_balanced']}",
        f"seconds: {seconds}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--setup", type=float, required=True, help="seconds of set-up")
    parser.add_argument("--toy", type=float, required=True, help="seconds of building the model")
    args = parser.parse_args()
    path = args.run / "summary.json"
    summary = json.loads(path.read_text())
    summary["seconds"] = {"setup": args.setup, "toy": args.toy} | summary["seconds"]
    path.write_text(json.dumps(summary, indent=2) + "\n")
    print(table(summary))
    print(f"saved {args.run}: config.json metrics.jsonl ledger.jsonl summary.json *.log model/")


if __name__ == "__main__":
    main()
