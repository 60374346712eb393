"""``python -m tools.curve RUN OUT.svg``: a run's reward and held-out score by step, as a picture.

Needs matplotlib: ``.venv/bin/pip install matplotlib`` (the tests' requirements have it).
"""

from __future__ import annotations

import sys
from pathlib import Path

from rl import read_lines


def draw(run: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "instar"  # the same run gives the same file
    from matplotlib import pyplot

    metrics, held_out = read_lines(run / "metrics.jsonl"), read_lines(run / "evaluations.jsonl")
    figure, axes = pyplot.subplots(figsize=(6, 3))
    axes.plot([m["step"] for m in metrics], [m["reward"] for m in metrics], color="0.7", label="reward in training")
    steps, rewards = [e["step"] for e in held_out], [e["reward"] for e in held_out]
    spread = [[e["reward"] - e["low"] for e in held_out], [e["high"] - e["reward"] for e in held_out]]
    axes.errorbar(steps, rewards, spread, marker="o", capsize=3, label="held-out tasks, greedy, 95%")
    axes.set(xlabel="step", ylim=(0, 1.02))
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tools.curve RUN OUT.svg")
    try:
        draw(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ImportError) as error:
        sys.exit(f"tools.curve: error: {error}")
