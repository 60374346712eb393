"""Routing replay over every router that transformers carries: one tiny random model of each family with experts.

``FAMILIES`` holds a family's tiny config, the layers that mix experts, and its rule: the weights that its router gives
to experts, written down once more from transformers' source, in float64, without moe_replay. A forward whose experts
and weights are put in by hand (``by_hand``) is then the reference for what replay computes, and for its gradient.
``NOT_SUPPORTED`` holds the families that cannot be replayed, and why. Together they are all families there are, so a
new version of transformers that brings another one fails here until somebody has looked at its router.

T tokens, L mixture-of-experts layers, K experts per token, E experts, D hidden size, as in moe_replay.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from conftest import sharpen
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import moe_replay

torch.set_num_threads(1)
E, K, T, SCALE = 8, 2, 12, 1.5
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 128, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_heads": 2, "linear_head_dim": 16, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 16,
    "mamba_head_dim": 16, "mamba_d_state": 16, "ssm_state_size": 16, "mamba_chunk_size": 16, "chunk_size": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "index_n_heads": 4,
    "unpadded_vocab_size": 128, "vocab_size_per_layer_input": 128,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "shared_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(moe_replay.EXPERTS, E), **dict.fromkeys(moe_replay.PER_TOKEN, K),
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "router_scaling_factor"), SCALE),
    **dict.fromkeys(("n_group", "num_expert_group"), 4), "topk_group": 2,
}  # fmt: skip
"""What configs call their sizes; each config takes the names it has."""

# ------------------------------------------------------------------------------------------------------- rules


def matrix(router) -> torch.nn.Parameter:
    """The only one it has (Ernie keeps its selection bias as a row)."""
    (weight_ED,) = (p for p in router.parameters() if p.ndim == 2 and len(p) > 1)
    return weight_ED


def logits(x_TD, router):
    """``[T, E]`` in float64, with a bias where the router has one of its logits."""
    bias_E = getattr(router, "bias", None)
    return x_TD.double() @ matrix(router).double().T + (0 if bias_E is None else bias_E.double())


def normalised(weights_TK):
    return weights_TK / weights_TK.sum(-1, keepdim=True)


def softmax(x_TD, router, indices_TK):
    """The probabilities of all experts, of which some are picked."""
    return logits(x_TD, router).softmax(-1).gather(1, indices_TK)


def softmax_of_picked(x_TD, router, indices_TK):
    """Softmax over the picked logits, which is also the renormalised softmax over all."""
    return logits(x_TD, router).gather(1, indices_TK).softmax(-1)


def sigmoid(x_TD, router, indices_TK):
    return logits(x_TD, router).gather(1, indices_TK).sigmoid()


def sigmoid_normalised(x_TD, router, indices_TK):
    return normalised(sigmoid(x_TD, router, indices_TK))


def gemma4(x_TD, router, indices_TK):
    """Of the normed and scaled input; each expert has a scale of its own."""
    x_TD = x_TD.double()
    x_TD = x_TD * (x_TD.square().mean(-1, keepdim=True) + router.eps).rsqrt() * router.scale.double()
    weights_TK = softmax_of_picked(x_TD * x_TD.shape[1] ** -0.5, router, indices_TK)
    return weights_TK * router.per_expert_scale.double()[indices_TK]


def inkling(x_TD, router, indices_TK):
    """The last rows of the matrix are shared experts, always picked; their weights follow the K."""
    scores_TE = logits(x_TD, router).sigmoid()
    weights_TK = torch.cat([scores_TE.gather(1, indices_TK), scores_TE[:, E:]], 1)
    return normalised(weights_TK) * router.global_scale.double()


# ---------------------------------------------------------------------------------------------------- families


@dataclass(frozen=True)
class Family:
    rule: Callable
    """``(x_TD, router, indices_TK)`` to weights ``[T, K]``, up to ``scale``."""
    scale: float = 1.0
    """What the router multiplies its weights by (some models scale the experts' sum instead)."""
    layers: tuple[int, ...] = (0, 1, 2)
    """Which of the tiny model's layers mix experts."""
    config: dict = field(default_factory=dict)


def after_dense(scale: float = SCALE, **config) -> Family:
    """As DeepSeek-V3: a dense layer first, then sigmoid scores, group-limited where the config has groups."""
    return Family(sigmoid_normalised, scale, (1, 2), config)


NEMOTRON = ["linear_attention", "moe", "full_attention", "moe"]
FAMILIES = {
    **dict.fromkeys((
        "afmoe", "axk2", "bailing_hybrid", "deepseek_v32", "exaone_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3",
        "hy_v4", "kimi_linear", "sarvam_mla", "sarvam_moe",
    ), after_dense()),
    "axk1": after_dense(head_dim=8),
    "beam": after_dense(1.0, mlp_layer_types=["dense", "sparse", "sparse"]),
    "deepseek_v3": after_dense(head_dim=8),
    "dots3_note_text": after_dense(layer_types=["full_attention"] * 3),
    "flint": after_dense(1.0, mlp_only_layers=[0]),
    "glm4_moe": after_dense(n_group=1, topk_group=1),  # its top 2 of the one group is [T, 1, 2]: not the selection
    "laguna": after_dense(1.0),
    "lfm2_moe": after_dense(layer_types=["conv", "conv", "full_attention"]),
    "mimo_v2_flash": after_dense(head_dim=24, num_key_value_heads=2),
    "nemotron_h": Family(sigmoid_normalised, SCALE, (1, 3), {"layers_block_type": NEMOTRON}),
    **dict.fromkeys(("inkling2_text", "solar_open"), Family(sigmoid_normalised, SCALE)),
    **dict.fromkeys(("minimax_m2", "minimax_m3_vl_text"), Family(sigmoid_normalised)),
    "kolibri1": Family(sigmoid),
    "llama4_text": Family(sigmoid),
    "dots1": Family(sigmoid, SCALE, (1, 2)),
    "inkling_text": Family(inkling, SCALE),
    **dict.fromkeys((
        "aria_text", "cohere2_moe", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
        "hunyuan_v1_moe", "lara_mini", "mellum", "minimax", "mixtral", "qwen3_5_moe_text", "qwen3_next",
    ), Family(softmax_of_picked)),
    "ernie4_5_moe": Family(softmax_of_picked, layers=(1, 2)),
    "qwen4_exp_text": Family(softmax_of_picked, config={"layer_types": ["linear_attention"] * 3}),
    "gemma4_text": Family(gemma4, config={"enable_moe_block": True}),
    **dict.fromkeys(("flex_olmo", "olmoe", "qwen2_moe", "qwen3_moe"), Family(softmax)),
    "jamba": Family(softmax, layers=(1, 3), config={"num_hidden_layers": 4}),
    "deepseek_v2": Family(softmax, SCALE, (1, 2), {"topk_method": "group_limited_greedy"}),
}  # fmt: skip

NOT_SUPPORTED = {
    "deepseek_v4": ("its first layers route by token id and select nothing", {"num_hidden_layers": 4}),
    "doge": ("product keys: it selects places in a table of keys, not experts", {"is_moe": True, "num_experts": 16}),
    "inkling2_loop_text": (
        "runs its looped layers, and their routers, several times per forward",
        {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2},
    ),
    "jetmoe": ("routes its attention too, two selections per layer", {}),
    "longcat_flash": ("selects among identity experts as well, which E does not count", {"head_dim": 8}),
    "phimoe": ("its sparse mixer samples one expert after the other, without a top-k", {}),
    "zaya": ("selects among the experts and one way around them, scores [B, T, E + 1]", {"num_experts_per_tok": 1}),
}
"""Model type to (why it cannot be replayed, its tiny config)."""

DENSE = {"gemma4_assistant", "musicgen", "musicgen_melody"}
"""Have no text config unless told which; none has experts."""


def build(model_type: str, **config) -> torch.nn.Module:
    """A tiny model with clear routes, whose selection biases and scales are not the neutral ones it starts with."""
    known = vars(CONFIG_MAPPING[model_type]().get_text_config())
    sizes = {name: size for name, size in SIZES.items() if name in known} | config
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes), attn_implementation="eager")
    model = model.float().train()
    sharpen(model)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if re.search(r"correction_bias|expert_bias|per_expert_scale|global_scale|router\.scale$", name):
                value.add_(torch.rand_like(value) / 2)
    return model


def run(model) -> torch.Tensor:
    """Logits ``[T, V]`` of twelve fixed tokens."""
    return model(input_ids=torch.arange(3, 3 + 9 * T, 9)[None], use_cache=False).logits[0]


def replay_of(model):
    return moe_replay.RouteReplay(model, *moe_replay.expert_counts(model.config.get_text_config()), lambda: run(model))


def experts_of(model) -> dict[str, torch.nn.Module]:
    """The routed experts of each layer by their parent's name, without a router's help."""
    return {n.rpartition(".")[0]: m for n, m in model.named_modules() if n.rpartition(".")[2] == "experts"}


def names_of(model, modules) -> list[str]:
    """Their parents' names."""
    names = {module: name for name, module in model.named_modules()}
    return [names[module].rpartition(".")[0] for module in modules]


@dataclass
class Tiny:
    family: Family
    model: torch.nn.Module
    replay: moe_replay.RouteReplay

    @contextmanager
    def by_hand(self, pick=None):
        """Note ``(indices_TK, weights_TK, the rule's weights)`` of each layer; ``pick(layer, live_TK)`` replaces them.

        They are read where the router hands them to the experts. Llama 4 hands over its scores, zero where not picked,
        and Inkling's rule weighs its shared experts too.
        """
        seen, inputs, shared, hooks = [], {}, {}, []

        def choose(layer, live_TK, weights_TK):
            indices_TK = pick(layer, live_TK) if pick else live_TK
            rule_TK = self.family.rule(inputs[layer], self.replay.routers[layer], indices_TK) * self.family.scale
            rule_TK, shared[layer] = rule_TK.to(weights_TK.dtype).tensor_split([K], 1)
            seen.append((indices_TK, weights_TK, rule_TK))
            return indices_TK, rule_TK if pick else weights_TK

        def router_starts(layer, _router, args):
            inputs[layer] = args[0].reshape(-1, args[0].shape[-1])

        def experts_start(layer, _experts, args):
            return args[0], *choose(layer, *args[1:3]), *args[3:]

        def llama4_router_ends(layer, _router, _args, out):
            weights_TK, live_TK = out[0].topk(K)
            indices_TK, weights_TK = choose(layer, live_TK, weights_TK)
            return torch.zeros_like(out[0]).scatter(1, indices_TK, weights_TK), *out[1:]

        def inkling_shared_start(layer, _shared, args, kwargs):
            return args, {"gammas": shared[layer]} if pick else kwargs

        for layer, (name, experts) in enumerate(experts_of(self.model).items()):
            router = self.replay.routers[layer]
            hooks.append(router.register_forward_pre_hook(partial(router_starts, layer)))
            if self.family is FAMILIES["llama4_text"]:
                hooks.append(router.register_forward_hook(partial(llama4_router_ends, layer)))
            else:
                hooks.append(experts.register_forward_pre_hook(partial(experts_start, layer)))
            if self.family is FAMILIES["inkling_text"]:
                beside = self.model.get_submodule(f"{name}.shared_experts")
                hooks.append(beside.register_forward_pre_hook(partial(inkling_shared_start, layer), with_kwargs=True))
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def gradients(self) -> list[torch.Tensor]:
        """Of a likelihood, by each router's matrix."""
        self.model.zero_grad()
        run(self.model).log_softmax(-1)[:, 7].mean().backward()
        return [matrix(router).grad.clone() for router in self.replay.routers]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request):
    family = FAMILIES[request.param]
    model = build(request.param, **family.config)
    return Tiny(family, model, replay_of(model))


def close(actual, expected, tolerance):
    return (actual - expected).abs().max() <= tolerance * expected.abs().max()


# ------------------------------------------------------------------------------------------------------- tests


def test_the_tables_list_every_family_with_experts():
    found, unreadable = set(), set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]().get_text_config()
        except (ValueError, StrictDataclassError):
            unreadable.add(name)
            continue
        names = vars(config).keys() - {"_experts_implementation_internal"}
        if any("expert" in name or "moe" in name for name in names):
            found.add(config.model_type)
    listed = FAMILIES.keys() | NOT_SUPPORTED.keys()
    assert found - listed == set(), "families of this transformers version that no table lists: look at their routers"
    assert listed - found == set(), "listed families that this transformers version does not have"
    assert unreadable == DENSE and not FAMILIES.keys() & NOT_SUPPORTED.keys()


@pytest.mark.parametrize("model_type", NOT_SUPPORTED)
def test_an_unsupported_family_has_no_router_for_each_layers_experts(model_type):
    model = build(model_type, **NOT_SUPPORTED[model_type][1])
    try:
        routers = replay_of(model).routers
    except ValueError as error:
        assert "this model cannot be replayed" in str(error)
    else:
        assert names_of(model, routers) != list(experts_of(model)), NOT_SUPPORTED[model_type][0]


def test_the_routers_are_those_beside_the_experts_in_layer_order(tiny):
    assert moe_replay.expert_counts(tiny.model.config) == (E, K)
    beside = names_of(tiny.model, tiny.replay.routers)
    assert [int(re.search(r"layers\.(\d+)", name)[1]) for name in beside] == list(tiny.family.layers)
    assert beside == list(experts_of(tiny.model))


@torch.no_grad()
def test_own_experts_replayed_change_no_bit(tiny):
    with tiny.by_hand() as seen:
        live = run(tiny.model)
    with tiny.replay.use(torch.stack([indices_TK for indices_TK, _, _ in seen]), torch.ones(T).bool()):
        assert torch.equal(run(tiny.model), live)


@torch.no_grad()
def test_other_experts_replayed_are_the_forward_by_hand(tiny):
    with tiny.by_hand() as seen:
        live = run(tiny.model)
    assert len(seen) == len(tiny.family.layers)
    for _, weights_TK, rule_TK in seen:
        assert weights_TK.shape == (T, K) and close(rule_TK, weights_TK, 1e-5), "the rule is not this router's"
    experts_LTK = torch.rand(len(seen), T, E, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :K]
    with tiny.by_hand(lambda layer, _live_TK: experts_LTK[layer]):
        expected = run(tiny.model)
    with tiny.replay.use(experts_LTK, torch.ones(T).bool()), tiny.by_hand() as seen:
        actual = run(tiny.model)
    for (indices_TK, weights_TK, rule_TK), recorded_TK in zip(seen, experts_LTK, strict=True):
        in_order = tiny.family is not FAMILIES["llama4_text"]  # its scores tell which experts, not in which order
        assert torch.equal(*(x if in_order else x.sort(-1).values for x in (indices_TK, recorded_TK)))
        assert close(weights_TK, rule_TK, 1e-5)
    assert close(actual, expected, 1e-5) and not close(actual, live, 1e-3)


def test_experts_outside_the_live_selection_move_every_router_as_by_hand(tiny):
    def outside(_layer, live_TK):
        return torch.rand(T, E).scatter(1, live_TK, -1.0).argsort(-1, descending=True)[:, :K]

    torch.manual_seed(2)
    with tiny.by_hand(outside) as seen:
        expected = tiny.gradients()
    tiny.replay.take_agreement()
    with tiny.replay.use(torch.stack([i for i, _, _ in seen]), torch.ones(T).bool(), metered=True):
        actual = tiny.gradients()
    *agreed_L, compared = tiny.replay.take_agreement().tolist()
    assert agreed_L == [0] * len(seen) and compared == T * K, "no replayed expert is the router's own choice"
    for gradient, by_hand in zip(actual, expected, strict=True):
        assert by_hand.abs().max() > 0 and close(gradient, by_hand, 1e-4)


def test_m12_the_policys_forward_takes_no_auxiliary_loss(tiny, monkeypatch):
    """rl.Policy reads the body's hidden states; the losses that a config asks for are the causal model's own."""
    model, ids_1T = tiny.model, torch.arange(3, 3 + T)[None]
    if model.config.model_type == "llama4_text":
        assert model.base_model is model, "rl.Policy can run it by now: test it as the others"
        return

    def gradient():
        model.zero_grad()
        hidden_TD = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
        model.get_output_embeddings()(hidden_TD).log_softmax(-1)[:, 7].mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    def loss():
        return model(input_ids=ids_1T, labels=ids_1T, use_cache=False).loss

    off, loss_off = gradient(), loss()
    flags = {"output_router_logits": True, "router_aux_loss_coef": 100.0}
    for owner, name in itertools.product((model.config, model), flags):
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, flags[name])
    assert torch.equal(gradient(), off)
    has_one = hasattr(model.config, "router_aux_loss_coef")
    assert (loss() > 2 * loss_off) == has_one, "the loss that the trainer does not take"
