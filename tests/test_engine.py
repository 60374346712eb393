"""The invariants, against the real engine, dense and mixture-of-experts.

Every test leaves the node ready for the next: admission open, the engine's weights those of the trainer.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

import rl

pytestmark = pytest.mark.engine


def perturb(node, scale: float = 0.05) -> None:
    """Another set of weights, every one of them changed, as far from the first as ``scale``."""
    generator = torch.Generator().manual_seed(node.version)
    load(node, [base * (1 + scale * torch.randn(base.shape, generator=generator)) for base in node.base])


def load(node, tensors) -> None:
    with torch.no_grad():
        for parameter, tensor in zip(node.policy.parameters(), tensors, strict=True):
            parameter.to_local().copy_(tensor)


def sync(node) -> float:
    """A whole sync; on success the node and the trainer agree on the version."""
    difference = node.syncer.sync(node.version + 1)
    node.version += 1
    return difference


def take(node) -> tuple[dict, list]:
    """The next batch: manifest and rows."""
    manifest = node.nodes.manifest(node.version)
    return manifest, [row for row, _ in rl.fetch(manifest, node.ranks, node.nodes)]


def logprobs(node, row, replay: bool = True) -> torch.Tensor:
    """The trainer's log-probs of a row's sampled tokens."""
    context, forward = rl.run(node.policy, rl.pack([(row, 0)], node.ranks.device), node.replay if replay else None)
    with torch.no_grad(), context:
        return forward()[0]


def worst_difference(node, rows) -> float:
    return max(float((logprobs(node, row) - torch.from_numpy(row.logprobs[row.sampled])).abs().max()) for row in rows)


def test_the_probe_agrees_before_and_after_every_weight_changed(node):
    node.nodes.each("/sync/begin", {})
    assert node.syncer.probe() < 3e-5
    node.nodes.each("/sync/commit", {"version": 0})
    for _ in range(2):
        perturb(node)
        assert sync(node) < 3e-5


def test_recorded_logprobs_equal_the_trainers_forward_over_turns_and_syncs(node):
    """Rows of multi-turn rollouts, in process and over the OpenAI wire; then the same under new weights."""
    for _ in range(2):
        _, rows = take(node)
        assert all(len(set(row.call[row.sampled])) == 3 for row in rows), "three turns a row"
        fresh = [row for row in rows if set(row.versions[row.sampled]) == {node.version}]
        stale = [row for row in rows if row not in fresh]
        assert fresh or stale
        if fresh:
            assert worst_difference(node, fresh) < 1e-5
        perturb(node)
        sync(node)


def test_rows_hold_exactly_what_the_engine_sampled(node):
    """NaN, -1 and False where nothing was sampled; the ledger balances; a rollout that is not ok has no row."""
    for _ in range(4):
        manifest, rows = take(node)
        ledger = manifest["ledger"]
        received = sum(int(row.sampled.sum()) for row in rows)
        assert ledger["sampled"] + ledger["pending_before"] == (
            received + sum(ledger["dropped"].values()) + ledger["pending_after"]
        )
        for row in rows:
            assert np.isnan(row.logprobs[~row.sampled]).all()
            assert np.isfinite(row.logprobs[row.sampled]).all()
            assert (row.versions[~row.sampled] == -1).all()
            assert row.status == "ok"
        for rollout in manifest["rollouts"]:
            fails = int(rollout["task_id"].removeprefix("train-")) % 7 == 6
            reward, even = rollout["reward"], int(rollout["task_id"].removeprefix("train-")) % 2 == 0
            if rollout["rows"]:
                assert rollout["rewards"] == ([0.25, 0.5, reward - 0.75] if even else [0.0, 0.0, reward])
            # Which rollouts are too old depends on how fast this machine samples; that they have no rows does not.
            assert rollout["status"] in ({"agent_error"} if fails else {"ok", "stale"})
            assert bool(rollout["rows"]) == (rollout["status"] == "ok")
        # G16: the samples of a task are different ones.
        for group in {row.group_id for row in rows}:
            texts = [row.token_ids.tolist() for row in rows if row.group_id == group]
            assert len({tuple(text) for text in texts}) == len(texts)
        sync(node)


def steady_rows(node) -> tuple[dict, list]:
    """A batch that the node's current weights sampled, by however many versions of them, with its manifest."""
    start = node.version
    for _ in range(10):
        manifest, rows = take(node)
        sync(node)
        if rows and min(row.versions[row.sampled].min() for row in rows) >= start:
            return manifest, rows
    raise AssertionError(f"no batch of version {start} or later by version {node.version}")


def test_m2_m5_routes_over_turns_and_cached_prefixes_equal_the_live_ones(node):
    """Layer 0 is dense; all positions but the last are known. What the engine found in its cache has routes as well."""
    if node.replay is None:
        pytest.skip("a dense model has no routes")
    cached = 0
    for _ in range(5):  # a prefix is cached by whole blocks, and not every rollout gets as long as one
        manifest, rows = steady_rows(node)
        if cached := manifest["meters"]["rollout/cached_tokens"]:
            break
    assert cached, "no prefix was cached: the test saw nothing"
    assert manifest["meters"]["identity/route_conflicts"] == 0, "a cached position's routes are those it had before"
    node.replay.take_agreement()
    for row in rows:
        assert row.experts.shape == (len(row), 2, 2) and row.experts.dtype == np.uint8
        assert row.experts_known[:-1].all() and not row.experts_known[-1]
        rl.score(node.policy, [rl.pack([(row, 0)], node.ranks.device)], node.replay, metered=True)
    *agreed_L, compared = node.replay.take_agreement().tolist()
    assert compared == sum(2 * (len(row) - 1) for row in rows)
    assert min(agreed_L) / compared > 0.999


def test_m2_a_cached_prompt_has_the_routes_of_its_first_run(node):
    """Whole blocks of a prompt come from the cache the second time; nothing is sampled in between."""
    if node.replay is None:
        pytest.skip("a dense model has no routes")
    prompts = torch.randint(0, 256, (4, 300), generator=torch.Generator().manual_seed(3)).tolist()
    take(node)  # the meters start anew
    node.nodes.each("/sync/begin", {})
    runs = []
    for _ in range(2):
        [reply] = node.nodes.each("/sync/probe", {"prompts": prompts, "max_tokens": 4})
        runs.append({tuple(row.token_ids[:300]): row for row in rl.unpack_rows(reply.content)})
    node.nodes.each("/sync/commit", {"version": node.version})
    for prompt, first in runs[0].items():
        again = runs[1][prompt]
        assert first.experts_known[:300].all() and again.experts_known[:300].all()
        assert np.array_equal(first.experts[:300], again.experts[:300])
    manifest, _ = take(node)
    sync(node)
    assert manifest["meters"]["rollout/cached_tokens"] >= 4 * 256, "the prompts were not cached"


def test_replay_holds_in_a_packed_recomputed_step(node):
    """Several rows in one micro-batch: the engine's log-probs; and by other experts than the routers would choose, the
    same log-probs and gradient with recomputation as without."""
    _, rows = steady_rows(node)
    batch = rl.pack([(row, 0) for row in rows], node.ranks.device)
    recorded_S = rl.score(node.policy, [batch], node.replay).logp_S
    assert (recorded_S - batch.behaviour_S).abs().max() < 1e-4
    batch.experts_LTK = (batch.experts_LTK + 1) % 8

    def gradients() -> tuple[torch.Tensor, torch.Tensor]:
        context, forward = rl.run(node.policy, batch, node.replay)
        node.policy.zero_grad()
        with context:
            logp_S = forward().logp_S
            logp_S.sum().backward()
        return logp_S.detach(), torch.cat([rl.full(p.grad).flatten() for p in node.policy.parameters()])

    logp_S, plain = gradients()
    node.policy.model.activation_checkpointing_enable({"use_reentrant": False})
    try:
        again_S, recomputed = gradients()
    finally:
        node.policy.model.activation_checkpointing_disable()
        node.policy.zero_grad()
    assert torch.equal(again_S, logp_S)
    assert node.replay is None or (logp_S - recorded_S).abs().max() > 0.1, "other experts, another function"
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=float(plain.abs().max()) * 1e-6)


def test_the_probe_refuses_a_layer_that_is_taken_for_another(node, monkeypatch):
    if node.replay is None:
        pytest.skip("a dense model has no routes")
    pack = rl.moe_replay.pack
    monkeypatch.setattr(rl.moe_replay, "pack", lambda *args: (pack(*args)[0].flip(0), pack(*args)[1]))
    node.nodes.each("/sync/begin", {})
    with pytest.raises(RuntimeError, match=r"in shares \[0\.[0-5]\d*, 0\.[0-5]\d*\] by layer: its weights, or its"):
        node.syncer.probe()
    monkeypatch.undo()
    assert node.syncer.probe() < 3e-5
    node.nodes.each("/sync/commit", {"version": node.version})


def test_routers_that_are_not_sent_stay_in_the_engine(node):
    """What ``--freeze_router`` does to a sync, here of every other weight."""
    if node.replay is None:
        pytest.skip("a dense model has no routers")
    routers = [parameter for router in node.replay.routers for parameter in router.parameters()]
    kept = [parameter.detach().to_local().clone() for parameter in routers]
    perturb(node)
    with torch.no_grad():
        for parameter, before in zip(routers, kept, strict=True):
            parameter.requires_grad_(False).to_local().copy_(before)
    weights, frozen = node.syncer.weights, rl.Weights(node.policy, torch.float32)
    assert len(frozen.meta) == len(weights.meta) - 2
    whole = weights.groups, weights.meta
    weights.groups, weights.meta = frozen.groups, frozen.meta
    try:
        assert sync(node) < 3e-5
    finally:
        weights.groups, weights.meta = whole
        for parameter in routers:
            parameter.requires_grad_(True)


def test_abort_and_resume_stamps_each_token_with_the_weights_that_sampled_it(node):
    """Sync again and again, at random moments, while rollouts run: each token's log-prob is that of its own version's
    weights. Versions of one rollout are as many as ``max_lag`` lets through."""
    snapshots, rng = {}, random.Random(0)

    def keep() -> None:
        snapshots[node.version] = [parameter.detach().to_local().clone() for parameter in node.policy.parameters()]

    keep()
    rows, mixed, deadline = [], [], time.monotonic() + 60
    while max((len(set(row.versions[row.sampled])) for row in mixed), default=0) < 3:
        assert time.monotonic() < deadline, "no rollout was interrupted twice"
        _, part = take(node)
        rows += part
        for _ in range(3):
            perturb(node, 0.02)
            sync(node)
            keep()
            time.sleep(rng.uniform(0, 0.15))
        known = [row for row in rows if set(row.versions[row.sampled]) <= set(snapshots)]
        mixed = [row for row in known if len(set(row.versions[row.sampled])) > 1]
    current = [parameter.detach().to_local().clone() for parameter in node.policy.parameters()]
    own, other = [], []
    try:
        for row in mixed:
            recorded, versions = row.logprobs[row.sampled], row.versions[row.sampled]
            assert (np.diff(versions) >= 0).all()
            for version in sorted(set(versions)):
                # A row keeps the first route of a position, so the first version's tokens are replayed. Later versions
                # prefilled the same positions by routes of their own, which no row holds: they are scored by live
                # routing, where a near tie that falls the other way changes the tokens after it a little.
                first = version == versions[0]
                at = versions == version

                def difference(weights, row=row, first=first, recorded=recorded, at=at) -> np.ndarray:
                    load(node, weights)
                    return np.abs(logprobs(node, row, replay=first).numpy() - recorded)[at]

                mine = difference(snapshots[version])
                if first or node.replay is None:
                    assert mine.max() < 1e-4, (row.row_id, version, mine)
                else:
                    own += mine.tolist()
                    other += difference(snapshots[version - 1 if version - 1 in snapshots else version + 1]).tolist()
    finally:
        load(node, current)
    # With ties and all, the version before, whose weights are 3% away, is a far worse account of the same tokens.
    assert not own or np.mean(own) < 0.1 * np.mean(other), (np.mean(own), np.mean(other))


def test_a_pause_changes_no_route(node):
    """M4: under unchanged weights, the routes of interrupted calls are those of an uninterrupted run."""
    if node.replay is None:
        pytest.skip("a dense model has no routes")
    start, interrupted, conflicts = node.version + 1, 0, 0.0
    sync(node)  # whatever the test before left in the trainer
    for _ in range(8):
        manifest, rows = take(node)
        sync(node)
        steady = [row for row in rows if min(row.versions[row.sampled]) >= start]
        interrupted += sum(len(set(row.versions[row.sampled])) > 1 for row in steady)
        conflicts += manifest["meters"]["identity/route_conflicts"] if len(steady) == len(rows) else 0.0
    assert interrupted, "no rollout was interrupted: the test saw nothing"
    assert conflicts == 0


@pytest.mark.parametrize("left_out", ["norm", "embed"])
def test_the_probe_catches_a_tensor_that_was_left_out(node, left_out):
    """The version is then not committed, and a whole sync afterwards mends the engine."""
    perturb(node)
    whole = rl.Weights.__iter__
    victim = next(meta.name for meta in node.syncer.weights.meta if left_out in meta.name)
    kept = [meta for meta in node.syncer.weights.meta if meta.name != victim]
    node.syncer.weights.meta, everything = kept, node.syncer.weights.meta
    rl.Weights.__iter__ = lambda self: (pair for pair in whole(self) if pair[0] != victim)
    try:
        with pytest.raises(RuntimeError, match="probe: an engine's log-probs differ"):
            node.syncer.sync(node.version + 1)
    finally:
        rl.Weights.__iter__, node.syncer.weights.meta = whole, everything
    assert node.nodes.wait_ready()[0]["version"] == node.version
    assert sync(node) < 3e-5


def test_what_a_client_asks_for_in_evaluation_the_engine_does(node):
    """A JSON schema, stop strings, seeds, several choices, log-probs, top_p: agent_turns.py asserts each."""
    asked = {"limit": 4, "samples": 2, "temperature": 1.0}
    answer = node.nodes.request("POST", node.nodes.urls[0] + "/evaluate", json=asked).json()
    assert answer["failed"] == 0, node.log.read_text()[-3000:]
    assert [task["rewards"] for task in answer["tasks"]] == [[1.0, 1.0]] * 4 and answer["version"] == node.version


def test_a_request_without_the_secret_is_refused(node):
    import httpx

    url = node.nodes.urls[0]
    assert httpx.get(url + "/health", trust_env=False).status_code == 401
    assert httpx.post(url + "/shutdown", headers={"x-instar-secret": "guess"}, trust_env=False).status_code == 401


def test_admission_is_closed_between_begin_and_commit(node):
    """Nothing at all is sampled by half-loaded weights."""
    node.nodes.each("/sync/begin", {})
    before = node.nodes.wait_ready()[0]["sampled"]
    time.sleep(0.5)
    after = node.nodes.wait_ready()[0]["sampled"]
    node.nodes.each("/sync/commit", {"version": node.version})
    assert after == before
