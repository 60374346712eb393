"""``python -m tools.export CHECKPOINT OUT``: a run's checkpoint as a model folder that transformers and vLLM load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch.distributed import checkpoint as dcp

import rl


def export(checkpoint: Path, out: Path) -> None:
    """One process reads what any number of ranks wrote. Raises ``OSError`` where there is no whole checkpoint."""
    saved = rl.Saved(**json.loads((checkpoint / "state.json").read_text()))
    cfg = rl.TrainConfig(**saved.config)
    policy = rl.Policy(cfg)
    dcp.load({"model": policy.state_dict()}, checkpoint_id=checkpoint, no_dist=True)
    rl.save_model(policy, cfg, out, writes=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tools.export RUN/checkpoints/step-000040 OUT")
    try:
        export(Path(sys.argv[1]), Path(sys.argv[2]))
    except OSError as error:
        sys.exit(f"tools.export: error: {error}")
