"""The invariants, against the real engine, dense and mixture-of-experts."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.engine


def perturb(node, scale: float = 0.05) -> None:
    """A step that changes every weight."""
    generator = torch.Generator().manual_seed(node.version)
    with torch.no_grad():
        for parameter in node.policy.parameters():
            local = parameter.to_local()
            local.mul_(1 + scale * torch.randn(local.shape, generator=generator))


def sync(node) -> float:
    node.version += 1
    return node.syncer.sync(node.version)


def test_probe_agrees_at_the_start_and_after_syncs(node):
    """The engine's log-probs equal the trainer's to 1e-5 in fp32, before and after every weight changed."""
    node.nodes.each("/sync/begin", {})
    assert node.syncer.probe() < 1e-5
    node.nodes.each("/sync/commit", {"version": 0})
    for _ in range(2):
        perturb(node)
        assert sync(node) < 1e-5
