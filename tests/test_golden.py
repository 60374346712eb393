"""gate.py against slow_gate.py, number by number, and against laws that hold whatever the numbers are.

`all_advantages` and `step` below do with gate.py what their namesakes in slow_gate.py do in plain loops, and return
the same nested dictionaries, so that one comparison covers every function. Batches are slow_gate.make_batch's: lists,
whose floats are multiples of 1/256, so that sums of them are exact in any order and in float32, and a decision at the
very end of a band cannot depend on rounding. Hypothesis draws sizes, seeds and settings.

Suffixes as in gate.py: T tokens, N rollouts, C calls; here also F features and V vocabulary of a linear policy.
"""

import itertools
import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import slow_gate as slow

import gate

NAN, INF = math.nan, math.inf
POISONS = (NAN, INF, -INF)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
ADVANTAGES_T = (*gate.ROLLOUT_ADVANTAGES, *(f"{kind}_by_call" for kind in gate.ROLLOUT_ADVANTAGES), "gae",
                "on_policy_distill", "whitened")  # fmt: skip
# Every combination of settings that gate() accepts, as level, mode, statistic, weight.
GATES = [
    *itertools.product(("off", "token"), gate.MODES, ("ratio",), ("token",)),
    *itertools.product(("seq", "geo"), gate.MODES, ("ratio",), gate.WEIGHTS),
    *itertools.product(("token", "seq", "geo"), ("mask",), ("kl", "tv"), ("token",)),
]
every_gate = pytest.mark.parametrize("setting", GATES, ids="-".join)


def examples(count):
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


# ---------------------------------------------------------------------------------------------------------------
# Batches, and the step as gate.py does it
# ---------------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    """A batch of which a part of the sampled tokens, perhaps all of them, are masked by rule as well."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    batch = slow.make_batch(rng, draw(st.integers(1, 6)), draw(st.sampled_from((0.0, 0.5, 1.5))))
    hidden = draw(st.sampled_from((0.0, 0.0, 0.3, 1.0)))
    batch["trained_T"] = [trained and rng.random() >= hidden for trained in batch["trained_T"]]
    told = {(batch["rollout_T"][t], batch["call_T"][t]) for t, trained in enumerate(batch["trained_T"]) if trained}
    batch["reward_NC"] = [[r if (i, c) in told else 0.0 for c, r in enumerate(row)]
                          for i, row in enumerate(batch["reward_NC"])]  # fmt: skip
    return batch


@st.composite
def steps(draw, setting):
    """The arguments of `step` after the batch: a gate with a band, and the rest."""
    level, mode, statistic, weight = setting
    low, high = draw(st.sampled_from((0.0, 0.5, 0.75, 1.0))), draw(st.sampled_from((1.0, 1.5, 2.0, INF)))
    if statistic != "ratio":
        low, high = 0.0, draw(st.sampled_from((1e-9, 0.05, 0.2, INF)))
    chosen = {"level": level, "mode": mode, "low": low, "high": high, "statistic": statistic, "weight": weight}
    return (chosen, *(draw(st.sampled_from(known)) for known in (ADVANTAGES_T, gate.KLS, gate.DENOMINATORS,
                                                                 (None, 4, 1, 0))))  # fmt: skip


def tensors(batch, dtype=torch.float64, poison=NAN):
    """The batch as tensors, `poison` standing wherever a float is masked or its rollout has crashed."""
    x = {}
    for name, values in batch.items():
        if name in slow.FLOATS_T or name in ("reward_N", "reward_NC"):
            counts = batch["trained_T"] if name in slow.FLOATS_T else batch["valid_N"]
            counts = [True] * len(values) if name == "reward_NC" else counts
            values = [value if counted else poison for value, counted in zip(values, counts, strict=True)]
        x[name] = torch.tensor(values, dtype=dtype if name in slow.FLOATS_T or name[:6] == "reward" else None)
    return x


def call_returns(x):
    return gate.returns(x["reward_NC"], x["calls_N"], 0.9)


def call_rewards(x):
    return gate.token_rewards(x["reward_NC"], x["rollout_T"], x["call_T"], x["trained_T"])


def token_advantage(kind, x):
    where = x["rollout_T"], x["call_T"], x["trained_T"]
    if kind == "on_policy_distill":
        return gate.distill(x["proximal_T"], x["teacher_T"], x["trained_T"], 0.5)
    if kind in ("gae", "whitened"):
        gae_T = gate.gae(call_rewards(x), x["value_T"], *where, discount=0.9, trace=0.75)
        return gate.whiten(gae_T, x["trained_T"], gae_T[x["trained_T"]]) if kind == "whitened" else gae_T
    by_call = kind.endswith("_by_call")
    reward_N = call_returns(x) if by_call else x["reward_N"]
    advantage_N = gate.advantages(kind.removesuffix("_by_call"), reward_N, x["group_N"], x["valid_N"])
    return gate.token_advantages(advantage_N, x["rollout_T"], x["trained_T"], x["call_T"] if by_call else None)


def all_advantages(x):
    found = {kind: token_advantage(kind, x) for kind in ADVANTAGES_T}
    return found | {"returns_NC": call_returns(x), "reward_T": call_rewards(x)}


def decide(x, chosen, max_lag):
    log_ratio_T = gate.log_ratio(x["proximal_T"], x["behaviour_T"], x["trained_T"])
    lag_T = gate.lag(x["version_T"], slow.TRAINER_VERSION, x["trained_T"])
    given = {"behaviour_T": x["behaviour_T"], "lag_T": lag_T, "max_lag": max_lag, **chosen}
    decision = gate.gate(**given, log_ratio_T=log_ratio_T, rollout_T=x["rollout_T"], trained_T=x["trained_T"])
    return decision, log_ratio_T, lag_T


def all_denominators(decision, x):
    kept_G = gate.kept_per_group(decision.keep_T, x["group_T"], 3)
    given = {"group_T": x["group_T"], "constant": slow.CONSTANT, "kept_G": kept_G, "world_size": 1}
    return {kind: gate.denominator(kind, decision.keep_T, x["rollout_T"], **given) for kind in gate.DENOMINATORS}


def step(x, chosen, advantage, kl_kind, denominator_kind, max_lag):
    trained_T, rollout_T = x["trained_T"], x["rollout_T"]
    logp_T, value_T = x["logp_T"].clone().requires_grad_(), x["value_T"].clone().requires_grad_()
    advantage_T = token_advantage(advantage, x | {"value_T": value_T})
    decision, log_ratio_T, lag_T = decide(x, chosen, max_lag)
    keep_T = decision.keep_T
    denominators = all_denominators(decision, x)
    log_rho_T = gate.log_ratio(logp_T, x["proximal_T"], trained_T)
    mean_T = gate.rollout_mean(log_rho_T, rollout_T, trained_T)
    kl_T = gate.kl(kl_kind, logp_T, x["reference_T"], trained_T)
    value_loss_T = gate.value_loss(value_T, advantage_T + value_T, keep_T)
    surrogates = {}
    for kind in gate.SURROGATES:
        loss_T, clipped_T = gate.surrogate(kind, logp_T, x["proximal_T"], advantage_T, decision.weight_T, **slow.CLIPS,
                                           rollout_log_rho_T=mean_T)  # fmt: skip
        whole_T = loss_T + slow.KL_SHARE * kl_T + slow.VALUE_SHARE * value_loss_T
        loss = gate.policy_loss(whole_T, keep_T, denominators[denominator_kind])
        gradient_T, value_gradient_T = torch.autograd.grad(loss, (logp_T, value_T), retain_graph=True)
        surrogates[kind] = {"loss_T": loss_T, "clipped_T": clipped_T, "gradient_T": gradient_T, "loss": loss}
    metrics = gate.gate_metrics(decision, log_ratio_T, lag_T, rollout_T)
    return {"keep_T": keep_T, "weight_T": decision.weight_T,
            "reason_T": [gate.REASONS[i] for i in decision.reason_T.tolist()], "denominators": denominators,
            "kl_T": kl_T, "value_loss_T": value_loss_T, "value_gradient_T": value_gradient_T,
            "surrogates": surrogates, "metrics": metrics}  # fmt: skip


def same(actual, expected, tolerance, path="result"):
    """Every number of two nested structures agrees; tolerance 0 asks for the very same value. NaN equals NaN."""
    actual, expected = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (actual, expected))
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key in expected:
            same(actual[key], expected[key], tolerance, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            same(*pair, tolerance, f"{path}[{i}]")
    elif isinstance(expected, float):
        both_nan = math.isnan(actual) and math.isnan(expected)
        near = actual == expected or math.isclose(actual, expected, rel_tol=tolerance, abs_tol=tolerance)
        assert both_nan or near, f"{path} is {actual!r}, not {expected!r}"
    else:
        assert actual == expected, f"{path} is {actual!r}, not {expected!r}"


# ---------------------------------------------------------------------------------------------------------------
# The golden file
# ---------------------------------------------------------------------------------------------------------------

GOLDEN = json.loads(slow.GOLDEN.read_text())


def test_the_golden_file_is_what_slow_gate_writes():
    """To the last digit but one: two machines' exp and log may differ in the last."""
    same(json.loads(slow.written(slow.golden())), GOLDEN, 1e-14)
    assert slow.written(GOLDEN) + "\n" == slow.GOLDEN.read_text()
    assert len(slow.GOLDEN.read_text()) < 200_000


def test_the_golden_file_shows_every_outcome():
    cases = GOLDEN["cases"].values()
    assert {reason for case in cases for reason in case["reason_T"]} == set(gate.REASONS)
    for kind in gate.SURROGATES:
        assert any(any(case["surrogates"][kind]["clipped_T"]) for case in cases) == (kind != "reinforce")
    for values_T in GOLDEN["parts"]["advantages"].values():
        assert any(values_T)
    assert not all(GOLDEN["batch"]["valid_N"])


def test_names_and_presets_are_those_of_gate():
    assert slow.REASONS == gate.REASONS and slow.PRESETS == gate.PRESETS and set(gate.PRESETS) < set(slow.CASES)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_gate_reproduces_every_step(name, dtype):
    case = dict(GOLDEN["cases"][name])
    chosen, *others = case.pop("settings").values()
    chosen = gate.preset(chosen) if isinstance(chosen, str) else chosen
    same(step(tensors(GOLDEN["batch"], dtype), chosen, *others), case, TOLERANCE[dtype], name)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gate_reproduces_every_part(dtype):
    x, parts, tolerance = tensors(GOLDEN["batch"], dtype), GOLDEN["parts"], TOLERANCE[dtype]
    same(all_advantages(x), parts["advantages"], tolerance)
    log_ratio_T = gate.log_ratio(x["proximal_T"], x["behaviour_T"], x["trained_T"])
    same(log_ratio_T, parts["log_ratio_T"], tolerance)
    same(gate.lag(x["version_T"], slow.TRAINER_VERSION, x["trained_T"]), parts["lag_T"], 0)
    same(gate.mismatch(log_ratio_T, x["trained_T"]), parts["mismatch"], tolerance)
    logits = {name: torch.tensor(values) for name, values in parts["token_logprobs"].items()}
    found = gate.token_logprobs(logits["logits_TV"].to(dtype), logits["target_T"], logits["temperature_T"].to(dtype))
    same(list(found), [parts["token_logprobs"][name] for name in ("logp_T", "entropy_T")], tolerance)
    *given, penalty_N = parts["overlong"].values()
    same(gate.overlong(torch.tensor(given[0]), *given[1:]), penalty_N, tolerance)
    for group in parts["no_signal"]:
        assert gate.no_signal(torch.tensor(group["reward_n"], dtype=dtype)) == group["why"]
    for *given, coefficient in parts["adapt_kl"]:
        same(gate.adapt_kl(*given), coefficient, tolerance)


# ---------------------------------------------------------------------------------------------------------------
# Random batches against slow_gate.py
# ---------------------------------------------------------------------------------------------------------------


@every_gate
def test_a_step_equals_the_slow_one(setting):
    @examples(10)
    @given(batches(), steps(setting))
    def check(batch, arguments):
        same(step(tensors(batch), *arguments), slow.step(batch, *arguments), 1e-12)

    check()


@examples(60)
@given(batches())
def test_advantages_equal_the_slow_ones(batch):
    same(all_advantages(tensors(batch)), slow.all_advantages(batch), 1e-9)  # grpo divides rounding by std + 1e-6


@examples(60)
@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 1))
def test_returns_and_gae_equal_the_slow_ones_for_any_factor(seed, discount, trace):
    batch = slow.make_batch(random.Random(seed), 4, 1.0)
    x, where = tensors(batch), ("rollout_T", "call_T", "trained_T")
    same(gate.returns(x["reward_NC"], x["calls_N"], discount),
         slow.returns(batch["reward_NC"], batch["calls_N"], discount), 1e-12)  # fmt: skip
    reward_T = slow.token_rewards(batch["reward_NC"], *(batch[name] for name in where))
    fast_T = gate.gae(torch.tensor(reward_T).double(), x["value_T"], *(x[name] for name in where), discount, trace)
    same(fast_T, slow.gae(reward_T, batch["value_T"], *(batch[name] for name in where), discount, trace), 1e-12)


@examples(60)
@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from((0.25, 1.0, 3.0)))
def test_token_logprobs_equal_the_slow_ones(seed, vocabulary, scale):
    rng = random.Random(seed)
    logits_TV = [[rng.uniform(-scale, scale) * 20 for _ in range(vocabulary)] for _ in range(5)]
    target_T, temperature_T = [rng.randrange(vocabulary) for _ in range(5)], [rng.uniform(0.2, 2) for _ in range(5)]
    found = gate.token_logprobs(torch.tensor(logits_TV, dtype=torch.float64), torch.tensor(target_T),
                                torch.tensor(temperature_T, dtype=torch.float64))  # fmt: skip
    same(list(found), list(slow.token_logprobs(logits_TV, target_T, temperature_T)), 1e-12)


@examples(80)
@given(st.lists(st.integers(0, 40), min_size=1), st.integers(1, 30), st.integers(1, 30))
def test_overlong_equals_the_slow_one(length_N, buffer, more):
    limit = buffer + more - 1
    same(gate.overlong(torch.tensor(length_N), limit, buffer), slow.overlong(length_N, limit, buffer), 1e-12)


@examples(80)
@given(st.lists(st.sampled_from((-1.0, 0.0, 0.1, 1.0)), max_size=4))
def test_no_signal_equals_the_slow_one_and_means_that_no_advantage_is_left(reward_n):
    reward_n, group_n = torch.tensor(reward_n).double(), torch.zeros(len(reward_n)).long()
    why = gate.no_signal(reward_n)
    assert why == slow.no_signal(reward_n.tolist())
    assert (why is None) == bool(gate.advantages("dr_grpo", reward_n, group_n).any())


@examples(80)
@given(st.floats(1e-3, 10), st.floats(-1, 10), st.floats(1e-3, 10))
def test_adapt_kl_equals_the_slow_one(coefficient, observed, target):
    same(gate.adapt_kl(coefficient, observed, target), slow.adapt_kl(coefficient, observed, target), 1e-12)


@examples(40)
@given(batches(), st.sampled_from(ADVANTAGES_T))
def test_whiten_equals_the_slow_one_with_values_of_other_ranks(batch, advantage):
    x = tensors(batch)
    advantage_T, whole_t = token_advantage(advantage, x), [0.5, -1.0, 2.0]
    slow_T = slow.whiten(advantage_T.tolist(), batch["trained_T"], whole_t)
    same(gate.whiten(advantage_T, x["trained_T"], torch.tensor(whole_t).double()), slow_T, 1e-12)


# ---------------------------------------------------------------------------------------------------------------
# Laws: what is masked, what is gated
# ---------------------------------------------------------------------------------------------------------------


@every_gate
def test_poison_at_masked_slots_changes_nothing(setting):
    @examples(8)
    @given(batches(), steps(setting), st.sampled_from(POISONS))
    def check(batch, arguments, poison):
        clean, dirty = (step(tensors(batch, poison=value), *arguments) for value in (-1.0, poison))
        same(dirty, clean, 0)

    check()


@examples(40)
@given(batches(), st.sampled_from(POISONS))
def test_poison_at_masked_slots_changes_no_advantage(batch, poison):
    same(*(all_advantages(tensors(batch, poison=value)) for value in (poison, -1.0)), 0)


@every_gate
def test_the_ledger_adds_up_and_a_gated_token_has_no_gradient(setting):
    @examples(8)
    @given(batches(), steps(setting))
    def check(batch, arguments):
        x = tensors(batch)
        chosen, *_, max_lag = arguments
        decision, *_ = decide(x, chosen, max_lag)
        total = len(x["trained_T"])
        counts = dict(zip(gate.REASONS, decision.reason_T.long().bincount(minlength=len(gate.REASONS)).tolist(),
                          strict=True))  # fmt: skip
        gated = sum(counts[reason] for reason in gate.REASONS if reason not in ("kept", "masked"))
        assert counts["kept"] == decision.keep_T.sum() and counts["masked"] == (~x["trained_T"]).sum()
        assert counts["kept"] + gated + counts["masked"] == total
        assert not (decision.keep_T & ~x["trained_T"]).any()
        assert not decision.weight_T[~decision.keep_T].any() and not decision.weight_T.requires_grad
        found = step(x, *arguments)
        for gradient_T in (found["value_gradient_T"], *(s["gradient_T"] for s in found["surrogates"].values())):
            assert not gradient_T[~decision.keep_T].any()

    check()


@every_gate
def test_on_policy_every_gate_keeps_everything_with_weight_one(setting):
    @examples(8)
    @given(batches(), steps(setting), st.sampled_from((torch.float32, torch.float64)))
    def check(batch, arguments, dtype):
        x = tensors(batch, dtype)
        decision, *_ = decide(x | {"proximal_T": x["behaviour_T"]}, arguments[0], None)
        assert torch.equal(decision.keep_T, x["trained_T"])
        assert torch.equal(decision.weight_T, x["trained_T"].to(dtype))

    check()


@every_gate
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_weights_are_detached_and_keep_the_precision(setting, dtype):
    x = tensors(GOLDEN["batch"], dtype)
    x["proximal_T"].requires_grad_()
    level, mode, statistic, weight = setting
    chosen = {"level": level, "mode": mode, "low": 0.0, "high": 2.0, "statistic": statistic, "weight": weight}
    decision, log_ratio_T, _ = decide(x, chosen, 4)
    assert log_ratio_T.requires_grad and decision.keep_T.any()
    assert not decision.weight_T.requires_grad and decision.weight_T.dtype == dtype


def test_targets_of_learning_carry_no_gradient():
    x = tensors(GOLDEN["batch"])
    for name in slow.FLOATS_T:
        x[name].requires_grad_()
    assert not any(found.requires_grad for found in all_advantages(x).values())
    value_T, target_T = x["value_T"], x["teacher_T"]
    gate.value_loss(value_T, target_T, x["trained_T"]).sum().backward()
    assert value_T.grad.any() and target_T.grad is None


# ---------------------------------------------------------------------------------------------------------------
# Laws: what is trained and not finite is refused
# ---------------------------------------------------------------------------------------------------------------


def surrogate_of(kind):
    return lambda x: gate.surrogate(kind, *(x[name] for name in ("logp_T", "proximal_T", "advantage_T", "weight_T")),
                                    rollout_log_rho_T=x["log_rho_T"])  # fmt: skip


def gate_of(setting):
    level, mode, statistic, weight = setting
    return lambda x: gate.gate(level, mode, 0.0, INF, x["log_ratio_T"], x["rollout_T"], x["trained_T"],
                               statistic=statistic, weight=weight, behaviour_T=x["behaviour_T"])  # fmt: skip


# what is called, and the inputs that it must refuse
REFUSALS = {
    "log_ratio": (lambda x: gate.log_ratio(x["logp_T"], x["behaviour_T"], x["trained_T"]), "logp behaviour"),
    "rollout_mean": (lambda x: gate.rollout_mean(x["value_T"], x["rollout_T"], x["trained_T"]), "value"),
    "gae": (lambda x: gate.gae(x["reward_T"], x["value_T"], x["rollout_T"], x["call_T"], x["trained_T"], 1, 1),
            "reward value"),
    "distill": (lambda x: gate.distill(x["logp_T"], x["teacher_T"], x["trained_T"]), "logp teacher"),
    "whiten": (lambda x: gate.whiten(x["advantage_T"], x["trained_T"], torch.tensor([0.0, 1.0])), "advantage"),
    "value_loss": (lambda x: gate.value_loss(x["value_T"], x["target_T"], x["trained_T"]), "value target"),
    "policy_loss": (lambda x: gate.policy_loss(x["loss_T"], x["trained_T"], 1), "loss"),
    "mismatch": (lambda x: gate.mismatch(x["log_ratio_T"], x["trained_T"]), "log_ratio"),
    **{f"kl_{kind}": (lambda x, kind=kind: gate.kl(kind, x["logp_T"], x["reference_T"], x["trained_T"]),
                      "logp reference") for kind in gate.KLS},
    **{f"surrogate_{kind}": (surrogate_of(kind), names) for kind, names in {
        "reinforce": "logp advantage weight", "ppo": "logp proximal advantage weight",
        "cispo": "logp proximal advantage weight", "gspo": "logp proximal advantage weight log_rho"}.items()},
    **{f"gate_{'-'.join(setting)}": (gate_of(setting), "log_ratio" if setting[2] == "ratio" else "log_ratio behaviour")
       for setting in GATES},
}  # fmt: skip
# what the message calls an input, where that is not its name here
CALLED = {"log_rho": "rollout_log_rho"}


@pytest.mark.parametrize("name", REFUSALS)
def test_poison_at_any_trained_slot_of_any_input_is_refused_by_position_and_value(name):
    call, inputs = REFUSALS[name]

    @examples(10)
    @given(batches(), st.sampled_from(inputs.split()), st.sampled_from(POISONS), st.randoms(use_true_random=False))
    def check(batch, poisoned, poison, rng):
        x = tensors(batch)
        for other in ("advantage", "loss", "target", "log_ratio", "log_rho", "reward"):
            x[f"{other}_T"] = torch.zeros_like(x["logp_T"])
        x["weight_T"] = x["trained_T"].double()
        call(x)
        slots = x["trained_T"].nonzero().flatten().tolist()
        if not slots:
            return
        slot = rng.choice(slots)
        x[f"{poisoned}_T"][slot] = poison
        with pytest.raises(gate.TokenError) as refusal:
            call(x)
        assert refusal.value.position == slot and f"position {slot} has " in str(refusal.value)
        assert f"={poison!r}" in str(refusal.value)
        if name != "distill":
            assert f"{CALLED.get(poisoned, poisoned)}={poison!r}" in str(refusal.value)

    check()


@examples(20)
@given(st.integers(0, 3), st.sampled_from(POISONS))
def test_poison_in_a_valid_reward_is_refused(slot, poison):
    reward_n = torch.tensor([0.0, 1.0, 1.0, 0.5])
    reward_n[slot] = poison
    calls = [lambda kind=kind: gate.advantages(kind, reward_n, torch.zeros(4).long()) for kind in
             gate.ROLLOUT_ADVANTAGES]  # fmt: skip
    for call in (*calls, lambda: gate.no_signal(reward_n)):
        with pytest.raises(ValueError, match=f"position {slot} has reward={poison}") as refusal:
            call()
        assert not isinstance(refusal.value, gate.TokenError), "a rollout's place is no token's"


@examples(60)
@given(batches(), st.sampled_from(slow.FLOATS_T), st.sampled_from(POISONS), st.data())
def test_poison_at_a_trained_slot_stops_a_whole_step(batch, poisoned, poison, data):
    slots = [t for t, trained in enumerate(batch["trained_T"]) if trained]
    if not slots:
        return
    x, slot = tensors(batch), data.draw(st.sampled_from(slots))
    arguments = data.draw(steps(data.draw(st.sampled_from(GATES))))
    x[poisoned][slot] = poison
    with pytest.raises(gate.TokenError) as refusal:
        all_advantages(x)  # a step looks at a teacher only to distil
        step(x, *arguments)
    assert refusal.value.position == slot


# ---------------------------------------------------------------------------------------------------------------
# Laws: rows and micro-batches
# ---------------------------------------------------------------------------------------------------------------


def cut(batch, rng, within_calls):
    """The tokens of each rollout, in sampling order, cut into rows at random; rows in any order: lists of tokens."""
    rows = []
    for rollout in set(batch["rollout_T"]):
        own = [t for t, i in enumerate(batch["rollout_T"]) if i == rollout]
        for t in own:
            starts_a_call = batch["call_T"][t] == -1
            if t == own[0] or ((within_calls or starts_a_call) and rng.random() < 0.5):
                rows.append([])
            rows[-1].append(t)
    rng.shuffle(rows)
    return rows


def reordered(batch, order):
    return {name: [values[t] for t in order] if name[-2:] == "_T" else values for name, values in batch.items()}


def sorted_calls(batch):
    """The batch with each rollout's calls in their order, as if it were one row."""
    first = [t if batch["call_T"][t] == -1 else None for t in range(len(batch["call_T"]))]
    for t, start in enumerate(first):
        first[t] = t if start is not None else first[t - 1]
    key = [(batch["rollout_T"][t], batch["call_T"][first[t] + 1], t) for t in range(len(first))]
    return reordered(batch, sorted(range(len(key)), key=key.__getitem__))


@every_gate
def test_h6_cutting_rollouts_into_rows_changes_nothing(setting):
    @examples(8)
    @given(batches(), steps(setting), st.integers(0, 2**32))
    def check(batch, arguments, seed):
        batch = sorted_calls(batch)
        by_position = arguments[1] in ("gae", "whitened")  # within a call, these need the order of its tokens
        order = [t for row in cut(batch, random.Random(seed), not by_position) for t in row]
        whole, split = (step(tensors(b), *arguments) for b in (batch, reordered(batch, order)))
        same(restored(split, order), plain(whole), 1e-12)

    check()


def plain(value):
    """Tensors as lists."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def restored(found, order):
    """What `step` found, with its lists over tokens put back from the order of the rows."""
    back = {t: i for i, t in enumerate(order)}
    return {name: restored(value, order) if isinstance(value, dict)
            else [value[back[t]] for t in range(len(order))] if name[-2:] == "_T" else value
            for name, value in plain(found).items()}  # fmt: skip


def policy_logp(x, w_FV):
    return gate.token_logprobs(x["feature_TF"] @ w_FV, x["target_T"], torch.ones(len(x["target_T"])))[0]


def train(x, start_FV, moved_FV, kind, rows, micro):
    """Loss and gradient of a linear policy from micro-batches of some rows each, as the trainer forms them."""
    trained_T, proximal_T = x["trained_T"], policy_logp(x, start_FV)
    log_ratio_T = gate.log_ratio(proximal_T, proximal_T - x["noise_T"], trained_T)
    decision = gate.gate("geo", "mask", 0.7, 1.4, log_ratio_T, x["rollout_T"], trained_T)
    log_rho_T = gate.log_ratio(policy_logp(x, moved_FV), proximal_T, trained_T)
    mean_T = gate.rollout_mean(log_rho_T, x["rollout_T"], trained_T)
    total = gate.denominator("rollout", decision.keep_T, x["rollout_T"])
    w_FV, loss, clipped = moved_FV.clone().requires_grad_(), 0.0, 0
    for first in range(0, len(rows), micro):
        part = torch.tensor([t for row in rows[first : first + micro] for t in row])
        logp_T = policy_logp({name: x[name][part] for name in ("feature_TF", "target_T")}, w_FV)
        loss_T, clipped_T = gate.surrogate(kind, logp_T, proximal_T[part], x["advantage_T"][part],
                                           decision.weight_T[part], 0.1, 0.1, 3.0, mean_T[part])  # fmt: skip
        loss_T = loss_T + 0.1 * gate.kl("k2", logp_T, proximal_T[part], trained_T[part])
        part_loss = gate.policy_loss(loss_T, decision.keep_T[part], total)
        part_loss.backward()
        loss, clipped = loss + part_loss.item(), clipped + int(clipped_T.sum())
    return {"loss": loss, "gradient_FV": w_FV.grad, "clipped": clipped}


@pytest.mark.parametrize("kind", gate.SURROGATES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_rows_and_micro_batches_leave_loss_and_gradient_unchanged(kind, dtype, tolerance):
    clipped = []

    @examples(12)
    @given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 2**32))
    def check(seed, rollouts, cuts):
        batch = slow.make_batch(random.Random(seed), rollouts, 0.5)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        tokens, x = len(batch["trained_T"]), {name: torch.tensor(batch[name]) for name in ("rollout_T", "trained_T")}
        x |= {"feature_TF": normal(tokens, 4) / 2, "target_T": torch.randint(0, 3, (tokens,), generator=generator),
              "noise_T": 0.2 * normal(tokens) + 0.2 * normal(rollouts)[x["rollout_T"]]}  # fmt: skip
        x["advantage_T"] = gate.token_advantages(normal(rollouts), x["rollout_T"], x["trained_T"])
        weights = normal(4, 3), normal(4, 3)
        weights = weights[0], weights[0] + 0.3 * weights[1]
        whole = train(x, *weights, kind, [list(range(tokens))], 1)
        clipped.append(whole["clipped"])
        rows = cut(batch, random.Random(cuts), within_calls=True)
        for micro in (1, 2, len(rows)):
            same(train(x, *weights, kind, rows, micro), whole, tolerance)

    check()
    assert any(clipped) == (kind != "reinforce")


@pytest.mark.parametrize("kind", gate.DENOMINATORS)
def test_denominators_of_ranks_add_up_to_the_slow_one(kind):
    @examples(30)
    @given(batches(), st.integers(1, 4))
    def check(batch, world):
        x, keep_T = tensors(batch), torch.tensor(batch["trained_T"])
        ranks = [x["rollout_T"] % world == rank for rank in range(world)]
        kept_G = sum(gate.kept_per_group(keep_T[own_T], x["group_T"][own_T], 3) for own_T in ranks)
        parts = [gate.denominator(kind, keep_T[own_T], x["rollout_T"][own_T], x["group_T"][own_T], 16.0, kept_G=kept_G,
                                  world_size=world) for own_T in ranks]  # fmt: skip
        same(sum(parts), float(slow.denominator(kind, keep_T.tolist(), batch["rollout_T"], batch["group_T"], 16.0)),
             1e-12)  # fmt: skip

    check()
