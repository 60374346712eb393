"""Run by tests/test_images.py, where torchvision is at hand: the trainer's log-probs of rows with images beside the
engine's. Prints, as JSON, the largest difference: of rows packed, and row by row; and what is said of wrong images."""

import json
import sys
from pathlib import Path

import torch

import rl
from loopback import unpack_rows


def worst(policy: rl.Policy, packs: list) -> float:
    """The largest difference to the engine's log-probs."""
    batches = [rl.pack([(row, 0) for row in rows], torch.device("cpu")) for rows in packs]
    behaviour_S = torch.cat([batch.behaviour_S for batch in batches])
    return float((rl.score(policy, batches, None).logp_S - behaviour_S).abs().max())


def main() -> None:
    model, path = sys.argv[1:]
    policy = rl.Policy(rl.TrainConfig(model=model))
    rows = unpack_rows(Path(path).read_bytes())
    found = {"packed": worst(policy, [rows]), "alone": worst(policy, [[row] for row in rows])}
    for row in rows:
        row.images = row.images[::-1]
    try:
        worst(policy, [rows])
    except ValueError as error:
        found["error"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
