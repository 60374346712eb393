"""Laws and right values of moe_replay.py. Names such as m5 are the entries of the project's list of known faults.

T tokens, L mixture-of-experts layers, K experts per token, E experts, as in moe_replay.py. Models are untrained toys;
``by_hand`` is the reference: a mixture of experts computed token by token from the modules' weights.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import sharpen
from transformers import AutoModelForCausalLM, DeepseekV3Config, HunYuanMoEV1Config, Qwen3MoeConfig

import moe_replay
from tools import toy

torch.set_num_threads(1)
E, K, L, T = 8, 2, 3, 12


def true(n):
    return torch.ones(n, dtype=torch.bool)


def blocks(model):
    return [m for m in model.modules() if type(m).__name__ == "Qwen3MoeSparseMoeBlock"]


def random_routes(layers, tokens, k=K, experts=E, seed=0):
    """``[L, T, K]`` distinct experts, in no particular order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(layers, tokens, experts, generator=generator).argsort(-1)[..., :k]


def mixture(block, chosen_TK, x_TD):
    """One Qwen3 mixture-of-experts block over given experts, token by token."""
    p_TE = (x_TD @ block.gate.weight.T).softmax(-1, dtype=torch.float32)
    out = []
    for x_D, p_E, chosen_K in zip(x_TD, p_TE, chosen_TK.tolist(), strict=True):
        total = sum(p_E[e] for e in chosen_K)
        y_D = 0
        for e in chosen_K:
            gate, up = (block.experts.gate_up_proj[e] @ x_D).chunk(2)
            y_D = y_D + (p_E[e] / total).to(x_D.dtype) * (block.experts.down_proj[e] @ (gate * gate.sigmoid() * up))
        out.append(y_D)
    return torch.stack(out)


@contextmanager
def by_hand(model, experts_LTK, known_T):
    """Inside, the model's mixtures are computed by ``mixture``; unknown rows take their own best experts."""

    def forward(block, recorded_TK, x):
        x_TD = x.reshape(-1, x.shape[-1])
        live_TK = (x_TD @ block.gate.weight.T).argsort(-1, descending=True)[:, : recorded_TK.shape[1]]
        return mixture(block, torch.where(known_T[:, None], recorded_TK, live_TK), x_TD).view_as(x)

    for block, recorded_TK in zip(blocks(model), experts_LTK, strict=True):
        block.forward = lambda x, block=block, recorded_TK=recorded_TK: forward(block, recorded_TK, x)
    yield
    for block in blocks(model):
        del block.forward


@contextmanager
def selections(model):
    """The experts and their weights that each layer's experts were asked for, in the order they ran."""
    seen = []
    experts = [m for m in model.modules() if type(m).__name__.endswith("MoeExperts") or "V3Experts" in type(m).__name__]
    hooks = [
        m.register_forward_pre_hook(lambda _m, args: seen.append((args[1].clone(), args[2].clone()))) for m in experts
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def same_sets(a, b):
    return torch.equal(a.sort(-1).values, b.sort(-1).values)


@pytest.fixture
def ids_T():
    return torch.randint(0, 256, (T,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def moe():
    """A sharpened toy and its replay."""
    model = toy.untrained(True, seed=0).train()
    sharpen(model)
    return model, replay_of(model)


def replay_of(model, experts=E, k=K):
    return moe_replay.RouteReplay(model, experts, k, lambda: model(input_ids=torch.arange(3)[None]))


def logits(model, ids_T):
    return model(input_ids=ids_T[None], use_cache=False).logits[0]


# ---------------------------------------------------------------------------------------------------------------
# Alignment
# ---------------------------------------------------------------------------------------------------------------


def numbered(tokens, layers=L, first=0):
    """Routes that tell where they come from: position and layer decide the experts."""
    route = lambda t, l: [(first + t + l) % E, (first + t + l + 3) % E]  # noqa: E731, E741
    return np.array([[route(t, l) for l in range(layers)] for t in range(tokens)], np.uint8).reshape(tokens, layers, 2)  # noqa: E741


def segment(tokens):
    return np.zeros((tokens, L, K), np.uint8), np.zeros(tokens, bool)


def grown(experts, known, tokens):
    more = tokens - len(known)
    return np.concatenate([experts, np.zeros((more, L, K), np.uint8)]), np.concatenate([known, np.zeros(more, bool)])


def test_m1_the_last_token_of_a_turn_gets_its_route_from_the_next_turn():
    experts, known = segment(5)
    assert not len(moe_replay.lay_down(experts, known, numbered(4)))
    assert known.tolist() == [True] * 4 + [False]
    experts, known = grown(experts, known, 9)
    second = numbered(8)
    second[4] = [[6, 1]] * L
    assert not len(moe_replay.lay_down(experts, known, second))
    assert known.tolist() == [True] * 8 + [False]
    assert experts[4].tolist() == [[6, 1]] * L
    assert np.array_equal(experts[[0, 1, 2, 3, 5, 6, 7]], numbered(8)[[0, 1, 2, 3, 5, 6, 7]])


def test_m2_a_cached_prefix_keeps_its_first_routes_and_a_different_one_is_counted_once():
    experts, known = segment(9)
    moe_replay.lay_down(experts, known, numbered(6))
    again = numbered(8)
    again[2], again[5, 1] = [[7, 6]] * L, [7, 6]
    assert moe_replay.lay_down(experts, known, again).tolist() == [2, 5]  # however many layers differ
    assert np.array_equal(experts[:8], numbered(8)) and known.sum() == 8


def test_m4_pausing_and_resuming_lays_down_what_an_uninterrupted_run_does():
    whole = segment(8)
    moe_replay.lay_down(*whole, numbered(7))
    paused = segment(8)
    assert not len(moe_replay.lay_down(*paused, numbered(3))) + len(moe_replay.lay_down(*paused, numbered(7)))
    assert np.array_equal(whole[0], paused[0]) and np.array_equal(whole[1], paused[1])


def test_the_same_experts_in_another_order_are_no_conflict():
    experts, known = segment(4)
    moe_replay.lay_down(experts, known, numbered(4))
    assert not len(moe_replay.lay_down(experts, known, numbered(4)[..., ::-1]))
    assert np.array_equal(experts, numbered(4))


def test_lay_down_leaves_unreported_positions_unknown():
    experts, known = segment(4)
    assert not len(moe_replay.lay_down(experts, known, numbered(0)))
    assert not known.any() and not experts.any()


@pytest.mark.parametrize("shape", [(5, L, K), (4, L - 1, K), (4, L, K + 1)])
def test_lay_down_refuses_routes_that_do_not_fit(shape):
    experts, known = segment(4)
    with pytest.raises(ValueError, match=rf"routes of shape \({shape[0]}, {shape[1]}, {shape[2]}\).*\(4, {L}, {K}\)"):
        moe_replay.lay_down(experts, known, np.zeros(shape, np.uint8))
    assert not known.any()


def test_m3_good_routes_pass():
    moe_replay.check_routes(numbered(20), E)
    moe_replay.check_routes(numbered(0), E)
    moe_replay.check_routes(np.array([[[255, 0]]], np.uint8), 256)
    with pytest.raises(ValueError, match="below 255"):
        moe_replay.check_routes(np.array([[[255, 0]]], np.uint8), 255)


@pytest.mark.parametrize("bad", [[0, 0], [5, 5], [2, E], [-1, 3]])
def test_m3_a_bad_route_raises_with_its_position_and_layer(bad):
    routes = numbered(6).astype(np.int16)
    routes[4, 1] = bad
    message = rf"position 4, layer 1 is \[{bad[0]}, {bad[1]}\].*2 distinct expert ids below {E}"
    with pytest.raises(ValueError, match=message):
        moe_replay.check_routes(routes, E)


def test_m3_an_all_zero_capture_is_rejected():
    with pytest.raises(ValueError, match=r"position 0, layer 0 is \[0, 0\]"):
        moe_replay.check_routes(np.zeros((3, L, K), np.uint8), E)


def test_route_dtype_is_the_narrowest_that_holds_an_id():
    for experts, wanted in ((2, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16)):
        assert moe_replay.route_dtype(experts) is wanted
        assert int(np.array(experts - 1).astype(wanted)) == experts - 1


# ---------------------------------------------------------------------------------------------------------------
# Packing
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1]])
def test_m8_every_token_keeps_its_route_after_packing(order):
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 200, n) for n in (5, 1, 7)]
    routes = [np.stack([(i[:, None] + np.arange(L)) % E, (i[:, None] + np.arange(L) + 1) % E], -1) for i in ids]
    known = [i % 3 > 0 for i in ids]
    packed = [(routes[r].astype(np.uint8), known[r]) for r in order]
    experts_LTK, known_T = moe_replay.pack(packed, torch.device("cpu"))
    ids_T = torch.from_numpy(np.concatenate([ids[r] for r in order]))
    assert experts_LTK.dtype == torch.uint8 and experts_LTK.shape == (L, len(ids_T), K) and known_T.dtype == torch.bool
    for layer in range(L):
        assert torch.equal(experts_LTK[layer], torch.stack([(ids_T + layer) % E, (ids_T + layer + 1) % E], -1))
    assert torch.equal(known_T, ids_T % 3 > 0)


def test_m13_coverage_names_what_is_not_replayed():
    found = moe_replay.coverage([np.array([True, True, False]), np.array([True, False, False])])
    assert found.tolist() == [3, 2, 1]
    assert moe_replay.coverage([np.array([False, True])]).tolist() == [1, 0, 1]
    assert moe_replay.coverage([]).tolist() == [0, 0, 0]


def test_wide_expert_ids_survive_packing():
    wide = np.array([[[300, 65535]]], moe_replay.route_dtype(65536))
    experts_LTK, _ = moe_replay.pack([(wide, np.ones(1, bool))], torch.device("cpu"))
    assert experts_LTK.tolist() == [[[300, 65535]]] and experts_LTK.element_size() == 2


@pytest.mark.parametrize(
    "tokens,layers,k,experts", [(2, 3, 2, 8), (7, 1, 3, 8), (5, 2, 4, 6), (1, 1, 8, 8), (40, 2, 8, 300)]
)
def test_m9_padding_is_spread_evenly(tokens, layers, k, experts):
    routes = moe_replay.spread(tokens, layers, k, experts)
    assert routes.shape == (tokens, layers, k) and routes.dtype == moe_replay.route_dtype(experts)
    moe_replay.check_routes(routes, experts)
    for layer in range(layers):
        load = np.bincount(routes[:, layer].reshape(-1), minlength=experts)
        assert load.max() - load.min() <= 1


# ---------------------------------------------------------------------------------------------------------------
# Replay
# ---------------------------------------------------------------------------------------------------------------


def test_expert_counts():
    assert moe_replay.expert_counts(toy.untrained(True, 0).config) == (E, K)
    assert moe_replay.expert_counts(toy.untrained(False, 0).config) is None
    assert moe_replay.expert_counts(deepseek().config) == (8, 2)
    assert moe_replay.expert_counts(HunYuanMoEV1Config(num_experts=64, moe_topk=[8] * 4)) == (64, 8)
    assert moe_replay.expert_counts(HunYuanMoEV1Config()) is None, "one expert is no choice"
    with pytest.raises(ValueError, match=r"moe_topk.*\[8, 4\]; replay takes one number for all"):
        moe_replay.expert_counts(HunYuanMoEV1Config(num_experts=64, moe_topk=[8, 4]))


@torch.no_grad()
def test_replaying_the_models_own_routes_is_bit_identical(moe, ids_T):
    model, replay = moe
    with selections(model) as live:
        expected = logits(model, ids_T)
    own_LTK = torch.stack([indices_TK for indices_TK, _ in live])
    with selections(model) as replayed, replay.use(own_LTK, true(T), metered=True):
        assert torch.equal(logits(model, ids_T), expected)
    assert all(torch.equal(a, b) for pair in zip(live, replayed, strict=True) for a, b in zip(*pair, strict=True))
    assert replay.take_agreement().tolist() == [T * K] * L + [T * K]
    assert torch.equal(logits(model, ids_T), expected)  # and outside the block nothing is replayed


@torch.no_grad()
def test_replaying_other_routes_equals_the_forward_by_hand(moe, ids_T):
    model, replay = moe
    experts_LTK, known_T = random_routes(L, T), torch.arange(T) % 4 != 1
    with by_hand(model, experts_LTK, known_T):
        expected = logits(model, ids_T)
    with replay.use(experts_LTK, known_T), selections(model) as seen:
        actual = logits(model, ids_T)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert (logits(model, ids_T) - expected).abs().max() > 0.1  # live routes are another function
    for layer, (indices_TK, weights_TK) in enumerate(seen):
        assert torch.equal(indices_TK[known_T], experts_LTK[layer][known_T])
        torch.testing.assert_close(weights_TK.sum(-1), torch.ones(T))


@torch.no_grad()
def test_an_unknown_row_routes_live_and_m13_is_counted(moe, ids_T):
    model, replay = moe
    known_T = true(T)
    known_T[T - 1] = False  # the last token: nothing after it attends to it, so all others stay as replayed
    with selections(model) as live:
        logits(model, ids_T)
    experts_LTK = torch.stack([indices_TK for indices_TK, _ in live])
    wrong_LTK = experts_LTK.clone()
    wrong_LTK[:, T - 1] = (experts_LTK[:, T - 1] + 1) % E
    with replay.use(wrong_LTK, known_T, metered=True), selections(model) as seen:
        logits(model, ids_T)
    assert torch.equal(torch.stack([indices_TK for indices_TK, _ in seen]), experts_LTK)
    assert replay.take_agreement().tolist() == [(T - 1) * K] * L + [(T - 1) * K]
    replayed, last, gaps = moe_replay.coverage([known_T.numpy()]).tolist()
    assert (last + gaps) / (replayed + last + gaps) == 1 / T


@torch.no_grad()
def test_agreement_counts_shared_experts_whatever_their_order(moe, ids_T):
    model, replay = moe
    with selections(model) as live:
        logits(model, ids_T)
    experts_LTK = torch.stack([indices_TK for indices_TK, _ in live]).flip(-1)
    spare = next(e for e in range(E) if e not in experts_LTK[L - 1, 4].tolist())
    experts_LTK[L - 1, 4, 0] = spare  # the last layer, so the layers before it agree as they did
    with replay.use(experts_LTK, true(T), metered=True):
        logits(model, ids_T)
    with replay.use(experts_LTK, true(T)):
        logits(model, ids_T)
    assert replay.take_agreement().tolist() == [T * K] * (L - 1) + [T * K - 1, T * K], "unmetered is not counted"
    assert not replay.take_agreement().any()


def test_the_gradient_is_that_of_the_forward_by_hand_and_reaches_the_router(moe, ids_T):
    model, replay = moe
    experts_LTK = random_routes(L, T, seed=3)
    with selections(model) as live, torch.no_grad():
        logits(model, ids_T)
    outside = (experts_LTK[0][:, :, None] != live[0][0][:, None, :]).all(-1).any()
    assert outside, "some replayed expert is outside the live selection"

    def gradients(context):
        model.zero_grad()
        with context:
            logits(model, ids_T).log_softmax(-1)[:-1].gather(1, ids_T[1:, None]).mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected, actual = gradients(by_hand(model, experts_LTK, true(T))), gradients(replay.use(experts_LTK, true(T)))
    assert sum("gate.weight" in name for name in actual) == L
    for name, grad in actual.items():
        scale = expected[name].abs().max()
        assert scale > 0, name
        torch.testing.assert_close(grad / scale, expected[name] / scale, rtol=0, atol=1e-5, msg=name)


def test_a_replayed_expert_outside_the_live_selection_moves_the_router(moe):
    """One token, one expert never chosen live: its router row has a gradient only because it was replayed."""
    model, replay = moe
    with selections(model) as live, torch.no_grad():
        logits(model, torch.tensor([5]))
    chosen = live[L - 1][0][0].tolist()
    spare = next(e for e in range(E) if e not in chosen)
    experts_LTK = torch.stack([indices_TK for indices_TK, _ in live])
    experts_LTK[L - 1, 0] = torch.tensor([chosen[0], spare])
    with replay.use(experts_LTK, true(1)):
        logits(model, torch.tensor([5]))[0, 7].backward()
    experts = model.model.layers[L - 1].mlp.experts.gate_up_proj.grad
    assert experts[spare].abs().max() > 0 and experts[chosen[1]].abs().max() == 0
    assert model.model.layers[L - 1].mlp.gate.weight.grad[spare].abs().max() > 0


@pytest.mark.parametrize("layers,k", [(L - 1, K), (L + 1, K), (L, K + 1), (0, 0)])
def test_m5_m10_routes_of_another_shape_raise(moe, layers, k):
    _, replay = moe
    message = f"routes have {layers} layers of {k} experts, the model has {L} routers of {K}"
    with pytest.raises(ValueError, match=message), replay.use(torch.zeros(layers, T, k).long(), true(T)):
        pass
    assert replay.current is None and replay.compared == 0


def test_routes_of_another_length_raise(moe, ids_T):
    model, replay = moe
    with pytest.raises(ValueError, match="routes of shape"), replay.use(random_routes(L, T - 1), true(T - 1)):
        logits(model, ids_T)
    assert replay.current is None and not replay.modes


def test_m5_a_dense_first_layer_shifts_no_routes(ids_T):
    config = toy.untrained(True, 0).config.to_dict() | {"mlp_only_layers": [0]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config))
    sharpen(model)
    replay = replay_of(model)
    assert replay.routers == [layer.mlp.gate for layer in model.model.layers[1:]]
    experts_LTK = random_routes(2, T)
    with torch.no_grad(), replay.use(experts_LTK, true(T)), selections(model) as seen:
        logits(model, ids_T)
    assert len(seen) == 2
    for (indices_TK, _), recorded_TK in zip(seen, experts_LTK, strict=True):
        assert torch.equal(indices_TK, recorded_TK)
    with pytest.raises(ValueError, match="routes have 3 layers"), replay.use(random_routes(3, T), true(T)):
        pass


def test_m6_reading_does_not_consume(moe, ids_T):
    model, replay = moe
    with torch.no_grad(), replay.use(random_routes(L, T), true(T)), selections(model) as seen:
        first, second = logits(model, ids_T), logits(model, ids_T)
    assert torch.equal(first, second)
    assert torch.equal(torch.stack([i for i, _ in seen[:L]]), torch.stack([i for i, _ in seen[L:]]))


def test_m6_checkpointing_recomputes_with_the_same_experts(moe, ids_T):
    model, replay = moe

    def gradients(experts_LTK):
        model.zero_grad()
        with replay.use(experts_LTK, true(T)), selections(model) as seen:
            logits(model, ids_T)[:, 7].sum().backward()
        assert not replay.modes and torch._C._len_torch_function_stack() == 0
        return torch.cat([p.grad.flatten() for p in model.parameters()]), [indices_TK for indices_TK, _ in seen]

    experts_LTK = random_routes(L, T)
    plain, seen = gradients(experts_LTK)
    assert len(seen) == L
    model.activation_checkpointing_enable({"use_reentrant": False})
    recomputed, seen = gradients(experts_LTK)
    # Forward in layer order, recomputation from the last layer back.
    assert len(seen) == 2 * L
    assert all(torch.equal(a, b) for a, b in zip(seen, [*experts_LTK, *experts_LTK.flip(0)], strict=True))
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=float(plain.abs().max()) * 1e-6)
    other, _ = gradients(random_routes(L, T, seed=9))
    assert (other - plain).abs().max() > plain.abs().max() * 1e-2


def deepseek():
    """Groups of 2 experts, the best 2 of 4 groups, the best 2 experts of those: every top-k takes 2."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(
        vocab_size=256, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, n_group=4,
        topk_group=2, n_shared_experts=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, first_k_dense_replace=1, max_position_embeddings=128,
    ))  # fmt: skip
    sharpen(model)
    return model


@torch.no_grad()
def test_m7_of_a_group_limited_router_only_the_final_selection_is_replaced(ids_T):
    model = deepseek()
    replay = replay_of(model, 8, 2)
    assert replay.routers == [layer.mlp.gate for layer in model.model.layers[1:]]
    with selections(model) as live:
        expected = logits(model, ids_T)
    own_LTK = torch.stack([indices_TK for indices_TK, _ in live])
    with replay.use(own_LTK, true(T)):
        assert torch.equal(logits(model, ids_T), expected)

    asked = []
    original = moe_replay.Select.__torch_function__

    class Spy(moe_replay.Select):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = original(self, func, types, args, kwargs)
            if func in moe_replay.TOPK:
                plain = func(*args, **(kwargs or {}))
                asked.append((tuple(args[0].shape[1:]), torch.equal(out[1], plain[1])))
            return out

    experts_LTK = random_routes(2, T, 2, 8)
    with pytest.MonkeyPatch.context() as patch, replay.use(experts_LTK, true(T)), selections(model) as seen:
        patch.setattr(moe_replay, "Select", Spy)
        gate = model.model.layers[1].mlp.gate
        inputs = []
        hook = gate.register_forward_pre_hook(lambda _m, args: inputs.append(args[0].reshape(T, -1)))
        logits(model, ids_T)
        hook.remove()
    # Per layer: two of a group, two of the groups, two of all. Only the last is not the router's own.
    assert asked == [((4, 2), True), ((4,), True), ((8,), False)] * 2
    indices_TK, weights_TK = seen[0]
    assert torch.equal(indices_TK, experts_LTK[0])
    scores_TK = (inputs[0] @ gate.weight.T).sigmoid().gather(1, experts_LTK[0])
    torch.testing.assert_close(weights_TK, scores_TK / scores_TK.sum(-1, keepdim=True) * gate.routed_scaling_factor)


def test_a_router_that_raises_leaves_no_mode_active(moe, ids_T, monkeypatch):
    model, replay = moe
    router = replay.routers[1]

    def fail(*_args):
        assert torch._C._len_torch_function_stack() == 1
        raise OSError("router failed")

    monkeypatch.setattr(router, "forward", fail)
    with pytest.raises(OSError, match="router failed"), replay.use(random_routes(L, T), true(T)):
        try:
            logits(model, ids_T)
        finally:
            assert not replay.modes and torch._C._len_torch_function_stack() == 0
    assert replay.current is None
    assert torch.topk(torch.arange(float(E)), K).indices.tolist() == [E - 1, E - 2]


def test_a_body_that_raises_ends_the_replay(moe, ids_T):
    model, replay = moe
    with pytest.raises(KeyError), replay.use(random_routes(L, T), true(T)):
        raise KeyError("loss")
    with torch.no_grad(), selections(model) as seen:
        logits(model, ids_T)
    assert not same_sets(seen[0][0], random_routes(L, T)[0])


def test_a_model_that_does_not_select_with_topk_is_refused():
    dense = toy.untrained(False, 0)
    with pytest.raises(ValueError, match="top 2 of 8 scores once per forward, found 0 selections by 0 modules"):
        replay_of(dense)
    moe = toy.untrained(True, 0)
    forward = lambda: (moe(input_ids=torch.arange(3)[None]), moe(input_ids=torch.arange(3)[None]))  # noqa: E731
    with pytest.raises(ValueError, match="found 6 selections by 3 modules; this model cannot be replayed"):
        moe_replay.RouteReplay(moe, E, K, forward)


def test_finding_routers_leaves_no_hook_behind():
    model = toy.untrained(True, 0)
    replay = replay_of(model)
    hooked = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert hooked == replay.routers
