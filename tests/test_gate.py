"""Laws and right values of gate.py. Names such as g8 and h3 are the entries of the project's list of known faults.

Shape suffixes as in gate.py: T tokens, N rollouts, G groups, V vocabulary; here also F features and C contexts of
toy policies.
"""

import doctest
import functools
import inspect
import itertools
import math
import multiprocessing
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gate

NAN, INF = math.nan, math.inf
LEVEL_MODES = [
    ("off", "mask"),
    ("token", "mask"),
    ("token", "clip"),
    ("token", "trunc"),
    ("seq", "mask"),
    ("geo", "mask"),
]


def true(n):
    return torch.ones(n, dtype=torch.bool)


def tensor(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def decide(level, low, high, log_ratio_T, rollout_T=None, mode="mask", **kwargs):
    rollout_T = torch.zeros(len(log_ratio_T), dtype=torch.long) if rollout_T is None else rollout_T
    return gate.gate(level, mode, low, high, log_ratio_T, rollout_T, true(len(log_ratio_T)), **kwargs)


# ---------------------------------------------------------------------------------------------------------------
# Documentation
# ---------------------------------------------------------------------------------------------------------------


def public_functions():
    return [f for name, f in inspect.getmembers(gate, inspect.isfunction) if f.__module__ == "gate" and name[0] != "_"]


def test_every_public_function_has_a_worked_example_that_holds():
    assert len(public_functions()) == 14
    for function in public_functions():
        assert ">>>" in function.__doc__ and "Raises ValueError" in function.__doc__, function.__name__
    results = doctest.testmod(gate)
    assert results.failed == 0 and results.attempted >= len(public_functions())


# ---------------------------------------------------------------------------------------------------------------
# Log-probs
# ---------------------------------------------------------------------------------------------------------------


def test_g1_temperature_divides_logits():
    logits_TV = torch.tensor([[1.0, 0.0]], requires_grad=True)
    logp_T, entropy_T = gate.token_logprobs(logits_TV, torch.tensor([0]), torch.tensor([0.5]))
    assert round(logp_T.item(), 4) == -0.1269
    p = 1 / (1 + math.exp(-2))
    close(entropy_T.item(), -p * math.log(p) - (1 - p) * math.log(1 - p), 1e-6)
    logp_T.sum().backward()
    close(logits_TV.grad, torch.tensor([[(1 - p) / 0.5, -(1 - p) / 0.5]]), 1e-6)


def test_token_logprobs_precision_follows_the_logits():
    dtypes = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    for given, wanted in dtypes.items():
        for temperature in (torch.float32, torch.float64):
            logits_TV = torch.ones(1, 3, dtype=given)
            logp_T, entropy_T = gate.token_logprobs(logits_TV, torch.tensor([1]), torch.ones(1, dtype=temperature))
            assert logp_T.dtype == entropy_T.dtype == wanted


def test_token_logprobs_entropy_with_an_excluded_vocabulary_entry():
    logits_TV = tensor([0.0, 0.0, -INF]).requires_grad_()
    logp_T, entropy_T = gate.token_logprobs(logits_TV, torch.tensor([1]), tensor(1.0))
    close(entropy_T, tensor(math.log(2)))
    (logp_T + entropy_T).sum().backward()
    close(logits_TV.grad, tensor([-0.5, 0.5, 0.0]))


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_token_logprobs_refuses_a_temperature(temperature):
    with pytest.raises(ValueError, match=r"temperature must be positive.*position 1 has temperature="):
        gate.token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([1.0, temperature]))


def test_token_logprobs_refuses_lengths_that_differ():
    with pytest.raises(ValueError, match="one length"):
        gate.token_logprobs(torch.zeros(2, 3), torch.tensor([0]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="one length"):
        gate.token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([1.0]))


# ---------------------------------------------------------------------------------------------------------------
# Advantages
# ---------------------------------------------------------------------------------------------------------------


def slow_advantage(kind, reward, group, valid, i):
    """The definition of one rollout's advantage, in plain Python."""
    peers = [j for j in range(len(reward)) if valid[j] and (kind == "reinforce_baseline" or group[j] == group[i])]
    others = [j for j in peers if j != i]
    if not valid[i]:
        return 0.0
    if kind == "reinforce":
        return reward[i]
    if not others or len({reward[j] for j in peers}) == 1:
        return 0.0
    if kind == "rloo":
        return reward[i] - sum(reward[j] for j in others) / len(others)
    mean = sum(reward[j] for j in peers) / len(peers)
    std = math.sqrt(sum((reward[j] - mean) ** 2 for j in peers) / len(others))
    return (reward[i] - mean) / (std + 1e-6) if kind == "grpo" else reward[i] - mean


@pytest.mark.parametrize("kind", gate.ADVANTAGES)
@pytest.mark.parametrize("seed", range(4))
def test_advantages_equal_their_definition(kind, seed):
    torch.manual_seed(seed)
    group_N = torch.tensor([40, -2, 40, 7, 7, 40, -2, 7, 99, 40])
    reward_N = torch.randint(0, 3, (10,)).double() / 10
    valid_N = torch.rand(10) > 0.25
    lists = reward_N.tolist(), group_N.tolist(), valid_N.tolist()
    expected_N = tensor(*(slow_advantage(kind, *lists, i) for i in range(10)))
    assert expected_N.abs().sum() > 0
    close(gate.advantages(kind, reward_N, group_N, valid_N), expected_N)


def test_h3_baseline_counts_rollouts_not_rows():
    advantage_N = gate.advantages("dr_grpo", tensor(1.0, 0.0, 0.0), torch.tensor([7, 7, 7]))
    close(advantage_N, tensor(2 / 3, -1 / 3, -1 / 3))
    # rollout 0 has four rows of one token; the row-wise mean of 4/6 appears nowhere
    advantage_T = gate.token_advantages(advantage_N, torch.tensor([0, 0, 0, 0, 1, 2]), true(6))
    close(advantage_T, tensor(*[2 / 3] * 4, -1 / 3, -1 / 3))


def test_h4_every_trained_token_of_every_row_carries_its_rollouts_advantage():
    # rows: rollout 0, rollout 1, rollout 0 again; untrained tokens at 1 and 4
    rollout_T, trained_T = torch.tensor([0, 0, 1, 1, 0, 0]), torch.tensor([True, False, True, True, False, True])
    advantage_T = gate.token_advantages(tensor(0.5, -0.5), rollout_T, trained_T)
    assert advantage_T.tolist() == [0.5, 0.0, -0.5, -0.5, 0.0, 0.5]
    logp_T = tensor(*[-1.0] * 6).requires_grad_()
    loss_T, _ = gate.surrogate("reinforce", logp_T, None, advantage_T, trained_T.double())
    gate.policy_loss(loss_T, trained_T, 4).backward()
    assert logp_T.grad.tolist() == [-0.125, 0.0, 0.125, 0.125, 0.0, -0.125]


def test_token_advantages_refuses_an_index_outside_the_rollouts():
    for index in (2, -1):
        with pytest.raises(ValueError, match=f"not one of 2 rollouts: position 1 has rollout={index}"):
            gate.token_advantages(tensor(0.5, -0.5), torch.tensor([0, index]), true(2))


@pytest.mark.parametrize("kind", ["reinforce_baseline", "rloo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("crash_reward", [0.0, NAN])
def test_h9_a_crash_is_not_a_reward(kind, crash_reward):
    valid_N = torch.tensor([True, True, False])
    advantage_N = gate.advantages(kind, tensor(1.0, 0.0, crash_reward), torch.tensor([0, 0, 0]), valid_N)
    unit = {"rloo": 1.0, "grpo": 0.5 / (math.sqrt(0.5) + 1e-6)}.get(kind, 0.5)
    close(advantage_N, tensor(unit, -unit, 0.0))
    assert advantage_N[2].item() == 0.0


@pytest.mark.parametrize("kind", ["rloo", "grpo", "dr_grpo"])
def test_g13_degenerate_groups_give_exactly_zero(kind):
    # group 0: one valid rollout; group 1: three equal rewards whose float mean differs from them; group 2: none valid
    reward_N = tensor(0.7, 0.0, 0.1, 0.1, 0.1, 5.0)
    assert sum([0.1] * 3) / 3 != 0.1
    group_N = torch.tensor([0, 0, 1, 1, 1, 2])
    valid_N = torch.tensor([True, False, True, True, True, False])
    assert torch.equal(gate.advantages(kind, reward_N, group_N, valid_N), torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["rloo", "grpo", "dr_grpo", "reinforce_baseline"])
@pytest.mark.parametrize("sign", [1, -1])
def test_g13_a_crash_is_no_spread(kind, sign):
    reward_N, valid_N = sign * tensor(0.1, 0.1, 0.1, 0.0), torch.tensor([True, True, True, False])
    advantage_N = gate.advantages(kind, reward_N, torch.zeros(4).long(), valid_N)
    assert torch.equal(advantage_N, torch.zeros(4, dtype=torch.float64))


def test_g13_a_degenerate_batch_gives_exactly_zero_to_its_baseline():
    for reward_N in (tensor(0.3), tensor(0.1, 0.1, 0.1)):
        advantage_N = gate.advantages("reinforce_baseline", reward_N, torch.arange(len(reward_N)))
        assert torch.equal(advantage_N, torch.zeros_like(reward_N))


def test_g14_mean_only_reaches_the_loss_once():
    advantage_N = gate.advantages("dr_grpo", torch.tensor([1.0, 0.0]), torch.tensor([3, 3]))
    assert advantage_N.tolist() == [0.5, -0.5]
    logp_T = torch.tensor([-1.0, -1.0], requires_grad=True)
    advantage_T = gate.token_advantages(advantage_N, torch.tensor([0, 1]), true(2))
    loss_T, _ = gate.surrogate("reinforce", logp_T, None, advantage_T, torch.ones(2))
    assert loss_T.tolist() == [0.5, -0.5]
    gate.policy_loss(loss_T, true(2), 1).backward()
    assert logp_T.grad.tolist() == [-0.5, 0.5]


def test_advantages_refuse_bad_rewards():
    group_N = torch.tensor([0, 0])
    for bad in (NAN, INF):
        with pytest.raises(ValueError, match=f"position 1 has reward={bad}"):
            gate.advantages("grpo", tensor(1.0, bad), group_N)
    with pytest.raises(ValueError, match="floating"):
        gate.advantages("grpo", torch.tensor([1, 0]), group_N)
    with pytest.raises(ValueError, match="one length"):
        gate.advantages("grpo", tensor(1.0), group_N)
    with pytest.raises(ValueError, match="known: reinforce, reinforce_baseline, rloo, grpo, dr_grpo"):
        gate.advantages("gpro", tensor(1.0, 0.0), group_N)


# ---------------------------------------------------------------------------------------------------------------
# Ratios and lags
# ---------------------------------------------------------------------------------------------------------------


def test_g4_ratio_is_trainer_over_behaviour():
    ratio_T = gate.log_ratio(tensor(-0.7), tensor(-1.0), true(1)).exp()
    assert round(ratio_T.item(), 4) == 1.3499


def test_log_ratio_is_exactly_zero_where_masked():
    logp_T = tensor(-0.7, NAN, -0.7).requires_grad_()
    log_ratio_T = gate.log_ratio(logp_T, tensor(-1.0, -1.0, NAN), torch.tensor([True, False, False]))
    assert log_ratio_T[1:].tolist() == [0.0, 0.0]
    log_ratio_T.sum().backward()
    assert logp_T.grad.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("behaviour", [tensor(-1.0), tensor(-1.0, -1.0, -1.0), None, [-1.0, -1.0]])
def test_g11_a_wrong_length_or_null_is_an_error(behaviour):
    with pytest.raises(ValueError, match="one length"):
        gate.log_ratio(tensor(-1.0, -1.0), behaviour, true(2))


def test_g7_g6_lag_is_per_token_and_one_update_is_one():
    lag_T = gate.lag(torch.tensor([3, 3, 4, -1], dtype=torch.int32), 4, torch.tensor([True, True, True, False]))
    assert lag_T.tolist() == [1, 1, 0, 0] and lag_T.dtype == torch.int64


def test_g6_a_negative_lag_raises_only_where_trained():
    version_T = torch.tensor([4, 5])
    with pytest.raises(ValueError, match="newer than trainer version 4: position 1 has version=5"):
        gate.lag(version_T, 4, true(2))
    assert gate.lag(version_T, 4, torch.tensor([True, False])).tolist() == [0, 0]
    with pytest.raises(ValueError, match="no version: position 0 has version=-1"):
        gate.lag(torch.tensor([-1]), 4, true(1))


def test_g6_limit_zero_forbids_mixed_versions_in_a_rollout():
    rollout_T, lag_T = torch.tensor([0, 1, 0, 1]), gate.lag(torch.tensor([3, 4, 4, 4]), 4, true(4))
    strict = decide("off", 0, INF, torch.zeros(4), rollout_T, lag_T=lag_T, max_lag=0)
    assert [gate.REASONS[i] for i in strict.reason_T] == ["stale", "kept", "stale", "kept"]
    assert strict.weight_T.tolist() == [0, 1, 0, 1]
    assert decide("off", 0, INF, torch.zeros(4), rollout_T, lag_T=lag_T, max_lag=1).keep_T.all()


def test_stale_wins_over_a_ratio_reason_and_ignores_masked_lags():
    lag_T, trained_T = torch.tensor([9, 0, 0, 9]), torch.tensor([True, True, True, False])
    decision = gate.gate(
        "token", "mask", 0.5, 2, torch.tensor([0.0, 5.0, 5.0, 0.0]), torch.tensor([0, 0, 1, 1]), trained_T, lag_T, 3
    )
    assert [gate.REASONS[i] for i in decision.reason_T] == ["stale", "stale", "ratio_high", "masked"]


# ---------------------------------------------------------------------------------------------------------------
# The gate
# ---------------------------------------------------------------------------------------------------------------


def test_g2_geo_and_seq_statistics_of_a_hundred_tokens():
    log_ratio_T = torch.full((100,), 0.1)
    for level, statistic in (("geo", math.exp(0.1)), ("seq", math.exp(10.0))):
        assert round(statistic, 3 if level == "geo" else 0) == {"geo": 1.105, "seq": 22026}[level]
        assert decide(level, 0.5, 2, log_ratio_T).keep_T.all() == (level == "geo")
        # the statistic itself, located from both sides
        assert decide(level, 0.5, statistic * 1.001, log_ratio_T).keep_T.all()
        assert not decide(level, 0.5, statistic * 0.999, log_ratio_T).keep_T.any()


def test_g3_seq_statistic_is_the_exp_of_the_sum():
    log_ratio_T = tensor(0.1, -0.1)
    decision = decide("seq", 1.0, 1.0, log_ratio_T)  # the sum of exps, 2.01, is outside this band
    assert decision.keep_T.all()
    close(decision.weight_T, log_ratio_T.exp())


def test_the_band_includes_its_ends_and_compares_in_log_space():
    for dtype in (torch.float32, torch.float64):
        ends_T = torch.tensor([math.log(0.5), math.log(2.0)], dtype=dtype)
        assert decide("token", 0.5, 2, ends_T).keep_T.all()
        for level in ("seq", "geo"):
            assert decide(level, 0.5, 2, ends_T, torch.tensor([0, 1])).keep_T.all()
    # exp(±1000) overflows or vanishes in either precision; the decision does not
    huge_T = torch.cat([torch.ones(1000), -torch.ones(1000)])
    reasons = decide("seq", 0.5, 2, huge_T, torch.arange(2).repeat_interleave(1000)).reason_T
    assert reasons.tolist() == [gate.RATIO_HIGH] * 1000 + [gate.RATIO_LOW] * 1000
    assert decide("token", 0, 2, torch.tensor([1000.0]), mode="trunc").weight_T.tolist() == [2.0]


def test_a_kept_weight_that_overflows_is_refused():
    with pytest.raises(ValueError, match=r"weight overflows: position 0 has log_ratio=1000\.0"):
        decide("geo", 0.5, 2, torch.tensor([1000.0, -1000.0]))


def slow_gate(level, mode, low, high, log_ratio, rollout, trained, lag, max_lag):
    """gate() as plain loops over tokens, in linear space: lists of keep, weight and reason."""
    keep, weight, reason = [], [], []
    for t in range(len(log_ratio)):
        mates = [s for s in range(len(log_ratio)) if rollout[s] == rollout[t] and trained[s]]
        if not trained[t]:
            outcome = "masked"
        elif max_lag is not None and max(lag[s] for s in mates) > max_lag:
            outcome = "stale"
        elif level == "off" or mode != "mask":
            outcome = "kept"
        else:
            total = sum(log_ratio[s] for s in mates)
            statistic = math.exp({"token": log_ratio[t], "seq": total, "geo": total / len(mates)}[level])
            outcome = "ratio_low" if statistic < low else "ratio_high" if statistic > high else "kept"
        ratio = math.exp(log_ratio[t]) if trained[t] and level != "off" else 1.0
        ratio = {"mask": ratio, "clip": min(max(ratio, low), high), "trunc": min(ratio, high)}[mode]
        keep.append(outcome == "kept")
        weight.append(ratio if outcome == "kept" else 0.0)
        reason.append(gate.REASONS.index(outcome))
    return keep, weight, reason


@pytest.mark.parametrize("level,mode", LEVEL_MODES)
@pytest.mark.parametrize("max_lag", [None, 2])
def test_gate_equals_the_slow_reference(level, mode, max_lag):
    outcomes = set()
    for seed in range(6):
        torch.manual_seed(seed)
        rollout_T, trained_T = torch.randint(0, 9, (60,)), torch.rand(60) > 0.3
        log_ratio_T = torch.randn(60, dtype=torch.float64) * 0.5
        log_ratio_T[~trained_T] = NAN
        lag_T = torch.randint(0, 3, (60,)) + (rollout_T == 4).long()
        decision = gate.gate(level, mode, 0.6, 1.7, log_ratio_T, rollout_T, trained_T, lag_T, max_lag)
        lists = log_ratio_T.tolist(), rollout_T.tolist(), trained_T.tolist(), lag_T.tolist()
        keep, weight, reason = slow_gate(level, mode, 0.6, 1.7, *lists, max_lag)
        assert decision.keep_T.tolist() == keep
        assert decision.reason_T.tolist() == reason and decision.reason_T.dtype == torch.int8
        torch.testing.assert_close(decision.weight_T, tensor(*weight), rtol=1e-15, atol=0)
        outcomes |= set(reason)
    expected = {gate.KEPT, gate.MASKED} | ({gate.STALE} if max_lag else set())
    assert outcomes == expected | ({gate.RATIO_LOW, gate.RATIO_HIGH} if level != "off" and mode == "mask" else set())


def test_weights_are_detached():
    logp_T = tensor(-1.0, -2.0).requires_grad_()
    log_ratio_T = gate.log_ratio(logp_T, tensor(-1.1, -2.2), true(2))
    assert log_ratio_T.requires_grad and not decide("token", 0.5, 2, log_ratio_T).weight_T.requires_grad


def test_a_rollout_without_trained_tokens_is_masked_and_gates_nothing():
    decision = gate.gate("geo", "mask", 0.5, 2, tensor(0.0, 0.1), torch.tensor([0, 1]), torch.tensor([False, True]))
    assert decision.reason_T.tolist() == [gate.MASKED, gate.KEPT]


@pytest.mark.parametrize(
    "level,mode,low,high,message",
    [
        ("sequence", "mask", 0.5, 2, "known: off, token, seq, geo"),
        ("token", "drop", 0.5, 2, "known: mask, clip, trunc"),
        ("seq", "clip", 0.5, 2, "'seq' only masks, got mode 'clip'"),
        ("geo", "trunc", 0.5, 2, "'geo' only masks, got mode 'trunc'"),
        ("token", "mask", 2, 0.5, "0 <= low <= 1 <= high"),
        ("token", "mask", 1.1, 2, "0 <= low <= 1 <= high"),
        ("token", "mask", -0.1, 2, "0 <= low <= 1 <= high"),
        ("token", "mask", 0.5, NAN, "0 <= low <= 1 <= high"),
    ],
)
def test_gate_refuses_settings(level, mode, low, high, message):
    with pytest.raises(ValueError, match=message):
        decide(level, low, high, torch.zeros(2), mode=mode)


def test_gate_refuses_a_lag_bound_without_lags():
    for lag_T, max_lag in ((None, 1), (torch.zeros(2).long(), -1)):
        with pytest.raises(ValueError, match=f"max_lag={max_lag} needs lag_T"):
            decide("off", 0, INF, torch.zeros(2), lag_T=lag_T, max_lag=max_lag)
    with pytest.raises(ValueError, match="one length"):
        decide("off", 0, INF, torch.zeros(2), lag_T=torch.zeros(3).long(), max_lag=1)
    with pytest.raises(ValueError, match="index is negative"):
        decide("geo", 0.5, 2, torch.zeros(2), torch.tensor([0, -1]))


def test_presets():
    log_ratio_T = tensor(0.2, 0.5, 1.5, 4.0, 6.0).log()
    weights = {
        "off": [1, 1, 1, 1, 1],
        "tis": [0.2, 0.5, 1.5, 2, 2],
        "icepop": [0, 0.5, 1.5, 4, 0],
        "seq_mask_tis": [0.2, 0.5, 1.5, 4, 6],
    }  # their geometric mean is 1.29
    assert set(weights) == set(gate.PRESETS)
    for name, expected in weights.items():
        decision = decide(**gate.preset(name), log_ratio_T=log_ratio_T)
        close(decision.weight_T, tensor(*map(float, expected)))
    assert not decide("geo", 0.5, 2, log_ratio_T[3:]).keep_T.any()
    with pytest.raises(ValueError, match="known: off, tis, icepop, seq_mask_tis"):
        gate.preset("ppo")
    gate.preset("tis")["high"] = 9.0
    assert gate.preset("tis") == {"level": "token", "mode": "trunc", "low": 0.0, "high": 2.0}


# ---------------------------------------------------------------------------------------------------------------
# Denominators and the loss
# ---------------------------------------------------------------------------------------------------------------


def all_denominators(keep_T, rollout_T, group_T, groups, constant=8.0):
    kept_G = gate.kept_per_group(keep_T, group_T, groups)
    return {
        kind: gate.denominator(kind, keep_T, rollout_T, group_T, constant, kept_G=kept_G, world_size=1).item()
        for kind in gate.DENOMINATORS
    }


def test_denominators_count_what_is_kept():
    keep_T, rollout_T = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 2])
    group_T = torch.tensor([0, 0, 0, 2])
    assert all_denominators(keep_T, rollout_T, group_T, 3) == {"token": 3, "rollout": 2, "group": 2, "constant": 8}
    assert gate.denominator("token", keep_T, rollout_T).dtype == torch.float64
    assert gate.kept_per_group(keep_T, group_T, 3).tolist() == [2, 0, 1]


def test_group_parts_of_ranks_sum_to_the_number_of_groups():
    # group 0 has 1 kept token on rank A and 2 on rank B; group 1 only on B; group 2 nowhere
    ranks = [
        (tensor(1, dtype=torch.bool), torch.tensor([0])),
        (torch.tensor([True, True, True, False]), torch.tensor([0, 0, 1, 2])),
    ]
    kept_G = sum(gate.kept_per_group(keep_T, group_T, 3) for keep_T, group_T in ranks)
    parts = [gate.denominator("group", keep_T, group_T, group_T, kept_G=kept_G).item() for keep_T, group_T in ranks]
    close(parts, [1 / 3, 2 / 3 + 1])


def test_g5_a_gated_row_leaves_loss_gradient_and_denominator():
    rollout_T = torch.tensor([0, 0, 1, 1, 1])
    log_ratio_T = tensor(0.0, 0.1, 3.0, 3.0, 3.0)
    decision = decide("geo", 0.5, 2, log_ratio_T, rollout_T)
    assert decision.keep_T.tolist() == [True, True, False, False, False]
    logp_T = tensor(*[-1.0] * 5).requires_grad_()
    loss_T, _ = gate.surrogate("ppo", logp_T, logp_T.detach(), tensor(*[1.0] * 5), decision.weight_T)
    gate.policy_loss(loss_T, decision.keep_T, 2).backward()
    assert torch.equal(logp_T.grad[2:], torch.zeros(3, dtype=torch.float64))
    assert (logp_T.grad[:2] != 0).all()
    before, after = (all_denominators(keep_T, rollout_T, rollout_T, 2) for keep_T in (true(5), decision.keep_T))
    assert before == {"token": 5, "rollout": 2, "group": 2, "constant": 8}
    assert after == {"token": 2, "rollout": 1, "group": 1, "constant": 8}


def test_g9_masking_one_of_two_equal_rows_halves_the_denominator():
    rollout_T, half_T = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True] * 3 + [False] * 3)
    whole, half = (all_denominators(keep_T, rollout_T, rollout_T, 2) for keep_T in (true(6), half_T))
    shares = {kind: half[kind] / whole[kind] for kind in whole}
    assert shares == {"token": 0.5, "rollout": 0.5, "group": 0.5, "constant": 1}


def test_g8_token_denominator_weighs_tokens_not_rows():
    loss_T = -tensor(*[1.0] * 2, *[-1.0] * 6)
    assert gate.policy_loss(loss_T, true(8), 8).item() == 0.5
    for micro in (1, 2, 8):
        parts = [gate.policy_loss(loss_T[i : i + micro], true(micro), 8) for i in range(0, 8, micro)]
        close(sum(parts), tensor(0.5)[0])


@pytest.mark.parametrize(
    "kwargs,message",
    [
        ({"kind": "tokens"}, "known: token, rollout, group, constant"),
        ({"kind": "group"}, "needs group_T and kept_G"),
        ({"kind": "group", "group_T": torch.tensor([0, 0])}, "needs group_T and kept_G"),
        (
            {"kind": "group", "group_T": torch.tensor([0, 0]), "kept_G": torch.tensor([1])},
            "position 0 has own=2, kept=1",
        ),
        ({"kind": "group", "group_T": torch.tensor([0, 1]), "kept_G": torch.tensor([1])}, "not one of 1 groups"),
        ({"kind": "constant", "constant": 4.0}, "got 4.0 and None"),
        ({"kind": "constant", "world_size": 2}, "got None and 2"),
        ({"kind": "constant", "constant": -1.0, "world_size": 2}, "got -1.0 and 2"),
    ],
)
def test_denominator_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        gate.denominator(**kwargs, keep_T=true(2), rollout_T=torch.tensor([0, 0]))


def test_policy_loss_ignores_what_is_not_kept_even_nan():
    loss_T = tensor(2.0, NAN, INF).requires_grad_()
    loss = gate.policy_loss(loss_T, torch.tensor([True, False, False]), torch.tensor(4.0))
    loss.backward()
    assert loss.item() == 0.5 and loss_T.grad.tolist() == [0.25, 0.0, 0.0]


def test_policy_loss_with_nothing_kept_anywhere_is_zero_and_backward_runs():
    loss_T = tensor(2.0, NAN).requires_grad_()
    loss = gate.policy_loss(loss_T, ~true(2), 0)
    loss.backward()
    assert loss.item() == 0 and torch.equal(loss_T.grad, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("denominator", [0, -1, NAN])
def test_policy_loss_refuses_a_denominator(denominator):
    with pytest.raises(ValueError, match="for 1 kept tokens"):
        gate.policy_loss(tensor(1.0), true(1), denominator)


# ---------------------------------------------------------------------------------------------------------------
# Surrogates and KL
# ---------------------------------------------------------------------------------------------------------------


def test_ppo_surrogate_equals_the_textbook_minimum():
    torch.manual_seed(0)
    proximal_T, advantage_T = -torch.rand(200, dtype=torch.float64), torch.randn(200, dtype=torch.float64)
    advantage_T[:5] = 0
    weight_T = torch.rand(200, dtype=torch.float64) * 2
    step_T = torch.linspace(-1, 1, 200, dtype=torch.float64)
    logp_T, other_T = ((proximal_T + step_T).requires_grad_() for _ in range(2))
    loss_T, clipped_T = gate.surrogate("ppo", logp_T, proximal_T, advantage_T, weight_T, 0.2, 0.3)
    rho_T = (other_T - proximal_T).exp()
    free_T, bound_T = rho_T * advantage_T, rho_T.clamp(0.8, 1.3) * advantage_T
    close(loss_T, -weight_T * torch.minimum(free_T, bound_T))
    assert torch.equal(clipped_T, bound_T < free_T) and 0 < clipped_T.sum() < 200
    loss_T.sum().backward()
    (-weight_T * torch.minimum(free_T, bound_T)).sum().backward()
    close(logp_T.grad, other_T.grad)
    assert torch.equal(logp_T.grad[clipped_T], torch.zeros_like(logp_T.grad[clipped_T]))


def test_ppo_surrogate_worked_values():
    arguments = tensor(1.5, 1.5, 0.5, 0.5, 1.1).log(), torch.zeros(5).double(), tensor(1.0, -1.0, 1.0, -1.0, 1.0)
    loss_T, clipped_T = gate.surrogate("ppo", *arguments, torch.ones(5).double())
    close(loss_T, tensor(-1.2, 1.5, -0.5, 0.8, -1.1))
    assert clipped_T.tolist() == [True, False, False, True, False]


def test_ppo_surrogate_survives_a_ratio_that_overflows_when_it_is_clipped():
    logp_T = torch.tensor([0.0], requires_grad=True)
    loss_T, clipped_T = gate.surrogate("ppo", logp_T, torch.tensor([-1000.0]), torch.ones(1), torch.ones(1))
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(-1.2) and clipped_T.item() and logp_T.grad.item() == 0.0
    loss_T, _ = gate.surrogate("ppo", logp_T, torch.tensor([-1000.0]), -torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="position 0 has loss=inf"):
        gate.policy_loss(loss_T, true(1), 1)


def test_reinforce_surrogate():
    logp_T = tensor(-1.0, -3.0).requires_grad_()
    loss_T, clipped_T = gate.surrogate("reinforce", logp_T, None, tensor(2.0, -1.0), tensor(1.5, 0.5))
    loss_T.sum().backward()
    assert loss_T.tolist() == [3.0, -1.5] and not clipped_T.any()
    assert logp_T.grad.tolist() == [-3.0, 0.5]


@pytest.mark.parametrize("kind", gate.SURROGATES)
@pytest.mark.parametrize("poisoned", ["logp", "proximal", "advantage"])
def test_surrogate_of_weight_zero_is_exactly_zero_whatever_else_is_there(kind, poisoned):
    values = {name: tensor(-1.0, NAN if name == poisoned else -1.0) for name in ("logp", "proximal", "advantage")}
    logp_T = values["logp"].requires_grad_()
    loss_T, _ = gate.surrogate(kind, logp_T, values["proximal"], values["advantage"], tensor(1.0, 0.0))
    loss_T.sum().backward()
    assert loss_T[1].item() == logp_T.grad[1].item() == 0.0 and logp_T.grad[0].item() == 1.0


def test_surrogate_refuses_settings():
    one = tensor(-1.0)
    with pytest.raises(ValueError, match="known: reinforce, ppo"):
        gate.surrogate("dpo", one, one, one, one)
    with pytest.raises(ValueError, match="one length"):
        gate.surrogate("ppo", one, None, one, one)
    for low, high in ((-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (NAN, 0.2)):
        with pytest.raises(ValueError, match="0 <= clip_low <= 1"):
            gate.surrogate("ppo", one, one, one, one, low, high)


def test_kl_worked_values():
    logp_T, reference_T = tensor(-1.0), tensor(-1.5)
    values = {kind: gate.kl(kind, logp_T, reference_T).item() for kind in gate.KLS}
    close(values, {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 1 + 0.5})
    assert round(values["k3"], 4) == 0.1065
    with pytest.raises(ValueError, match="known: k1, k2, k3"):
        gate.kl("k4", logp_T, reference_T)


def test_kl_values_and_gradients_in_expectation_are_what_the_docstring_says():
    torch.manual_seed(1)
    logits_V = torch.randn(5, dtype=torch.float64).requires_grad_()
    reference_V = torch.randn(5, dtype=torch.float64).log_softmax(0)

    def policy():
        return logits_V.log_softmax(0)

    def gradient(scalar):
        return torch.autograd.grad(scalar, logits_V)[0]

    p_V = policy().exp().detach()
    forward = (policy().exp() * (policy() - reference_V)).sum()  # KL(policy ‖ reference)
    backward = (reference_V.exp() * (reference_V - policy())).sum()  # KL(reference ‖ policy)
    expected = {kind: (p_V * gate.kl(kind, policy(), reference_V)).sum() for kind in gate.KLS}
    close(expected["k1"], forward)
    close(expected["k3"], forward)
    assert abs(expected["k2"] - forward) > 1e-3
    close(gradient(expected["k1"]), torch.zeros(5, dtype=torch.float64))
    close(gradient(expected["k2"]), gradient(forward))
    close(gradient(expected["k3"]), gradient(backward))


# ---------------------------------------------------------------------------------------------------------------
# NaN laws
# ---------------------------------------------------------------------------------------------------------------


def chain(logp_T, behaviour_T, proximal_T, reference_T, advantage_T, trained_T, level, mode, surrogate, kl):
    """Everything between a trainer's log-prob and a scalar loss."""
    log_ratio_T = gate.log_ratio(logp_T, behaviour_T, trained_T)
    decision = gate.gate(level, mode, 0.5, 2, log_ratio_T, torch.zeros_like(trained_T, dtype=torch.long), trained_T)
    loss_T, _ = gate.surrogate(surrogate, logp_T, proximal_T, advantage_T, decision.weight_T)
    loss_T = loss_T + gate.kl(kl, logp_T, reference_T, trained_T)
    return gate.policy_loss(loss_T, decision.keep_T, gate.denominator("token", decision.keep_T, decision.keep_T.long()))


@pytest.mark.parametrize("level,mode", LEVEL_MODES)
@pytest.mark.parametrize("surrogate", gate.SURROGATES)
@pytest.mark.parametrize("kl", gate.KLS)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_g10_masked_poison_reaches_neither_loss_nor_gradient(level, mode, surrogate, kl, poison):
    trained_T = torch.tensor([True, False, True])
    clean = [
        tensor(-1.0, 0.0, -2.0),
        tensor(-1.1, 0.0, -1.9),
        tensor(-1.05, 0.0, -2.0),
        tensor(-1.5, 0.0, -1.0),
        tensor(0.7, 0.0, -0.6),
    ]
    expected = chain(*clean, trained_T, level, mode, surrogate, kl)
    dirty = [x.masked_fill(~trained_T, poison).requires_grad_() for x in clean]
    loss = chain(*dirty, trained_T, level, mode, surrogate, kl)
    assert torch.equal(loss, expected) and loss.item() != 0
    loss.backward()
    assert dirty[0].grad.isfinite().all() and (dirty[0].grad[trained_T] != 0).all()
    for x in dirty:
        assert x.grad is None or x.grad[1].item() == 0.0


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_g10_trained_poison_raises_with_position_and_values(poison):
    good, bad, keep_T = tensor(-1.0, -2.0), tensor(-1.0, poison), true(2)
    calls = {
        f"logp={poison}, behaviour=-2.0": lambda: gate.log_ratio(bad, good, keep_T),
        f"logp=-2.0, behaviour={poison}": lambda: gate.log_ratio(good, bad, keep_T),
        f"log_ratio={poison}": lambda: decide("token", 0.5, 2, bad),
        f"logp={poison}, proximal=-2.0": lambda: gate.surrogate("ppo", bad, good, good, good),
        f"logp=-2.0, proximal={poison}": lambda: gate.surrogate("ppo", good, bad, good, good),
        f"advantage={poison}": lambda: gate.surrogate("reinforce", good, None, bad, good),
        f"weight={poison}": lambda: gate.surrogate("reinforce", good, None, good, bad),
        f"loss={poison}": lambda: gate.policy_loss(bad, keep_T, 2),
        f"logp={poison}, reference=-2.0": lambda: gate.kl("k3", bad, good),
        f"logp=-2.0, reference={poison}": lambda: gate.kl("k1", good, bad, keep_T),
        f" log_ratio={poison} ": lambda: gate.mismatch(bad, keep_T),
    }
    for values, call in calls.items():
        with pytest.raises(ValueError, match=f"position 1 has.*{values.strip()}"):
            call()


# ---------------------------------------------------------------------------------------------------------------
# Rows, empty input, meters
# ---------------------------------------------------------------------------------------------------------------


def step_on_rows(order, level):
    """Loss, gradient and meters of one batch whose tokens are laid out in `order`; results in the original order."""
    torch.manual_seed(3)
    rollout_T = torch.tensor([0] * 6 + [1] * 4 + [2] * 5)
    trained_T = torch.rand(15) > 0.2
    log_ratio_T, advantage_N = torch.randn(15) * 0.1 + 0.5 * (rollout_T == 1), torch.tensor([1.0, -0.5, 0.25])
    logp_T, lag_T = -torch.rand(15), torch.randint(0, 2, (15,)) + (rollout_T == 2).long()
    rollout_T, trained_T, log_ratio_T, lag_T = (x[order] for x in (rollout_T, trained_T, log_ratio_T, lag_T))
    logp_T = logp_T[order].requires_grad_()
    decision = gate.gate(level, "mask", 0.7, 1.4, log_ratio_T, rollout_T, trained_T, lag_T, 1)
    advantage_T = gate.token_advantages(advantage_N, rollout_T, trained_T)
    loss_T, _ = gate.surrogate("ppo", logp_T, logp_T.detach() - 0.1, advantage_T, decision.weight_T)
    denominators = all_denominators(decision.keep_T, rollout_T, rollout_T, 3)
    loss = gate.policy_loss(loss_T, decision.keep_T, denominators["rollout"])
    loss.backward()
    metrics = gate.gate_metrics(decision, log_ratio_T, lag_T, rollout_T) | gate.mismatch(log_ratio_T, trained_T)
    back_T = torch.argsort(order)
    return decision.reason_T[back_T], decision.weight_T[back_T], logp_T.grad[back_T], loss, denominators, metrics


@pytest.mark.parametrize("level", gate.LEVELS)
def test_h6_splitting_rollouts_into_rows_leaves_gate_and_loss_unchanged(level):
    whole = step_on_rows(torch.arange(15), level)
    assert {gate.KEPT, gate.STALE, gate.MASKED} <= set(whole[0].tolist())
    assert (gate.RATIO_HIGH in whole[0]) == (level != "off")
    # rollout 0 as rows of 2 and 4 tokens, rollout 1 as rows of 1 and 3, interleaved with the rest
    for rows in (
        [range(2, 6), range(6, 7), range(10, 15), range(0, 2), range(7, 10)],
        [range(7, 10), range(0, 2), range(2, 6), range(6, 7), range(10, 15)],
    ):
        split = step_on_rows(torch.tensor([t for row in rows for t in row]), level)
        assert all(torch.equal(a, b) for a, b in zip(whole[:3], split[:3], strict=True))
        close(split[3], whole[3], 1e-6)
        close(split[4], whole[4])
        close(split[5], whole[5])


def test_g12_mismatch_does_not_change_when_tool_text_lengthens():
    log_ratio_T, trained_T = tensor(0.25, -0.75, 0.0), torch.tensor([True, True, False])
    short = gate.mismatch(log_ratio_T, trained_T)
    k3 = (math.expm1(0.25) - 0.25 + math.expm1(-0.75) + 0.75) / 2
    close(short, {"mean": 0.5, "p99": 0.75, "max": 0.75, "k1": 0.25, "k3": k3})
    tool_T = torch.full((500,), NAN, dtype=torch.float64)
    longer_T, longer_trained_T = torch.cat([log_ratio_T, tool_T]), torch.cat([trained_T, ~true(500)])
    assert gate.mismatch(longer_T, longer_trained_T) == short
    for log_r_T, mask_T in ((log_ratio_T, trained_T), (longer_T, longer_trained_T)):
        index_T = torch.zeros(len(log_r_T), dtype=torch.long)
        decision = gate.gate("token", "mask", 0.5, 2, log_r_T, index_T, mask_T)
        metrics = gate.gate_metrics(decision, log_r_T, index_T, index_T)
        assert metrics["kept"] == metrics["ratio_low"] == 0.5 and metrics["ratio_p50"] == pytest.approx(math.exp(-0.75))


def test_gate_metrics_values():
    log_ratio_T = tensor(0.0, math.log(3.0), math.log(0.1), 5.0, 7.0)
    trained_T = torch.tensor([True, True, True, True, False])
    rollout_T, lag_T = torch.tensor([0, 0, 1, 2, 3]), torch.tensor([0, 1, 12, 8, 99])
    decision = gate.gate("token", "mask", 0.5, 4, log_ratio_T, rollout_T, trained_T, lag_T, 9)
    metrics = gate.gate_metrics(decision, log_ratio_T, lag_T, rollout_T)
    expected = {
        "kept": 0.5,
        "ratio_low": 0.0,
        "ratio_high": 0.25,
        "stale": 0.25,
        "rollouts_gated": 2 / 3,
        "ess": 16 / (2 * 10),
        "ratio_p01": 0.1,
        "ratio_p50": 1.0,
        "ratio_p99": math.exp(5),
        "ratio_max": math.exp(5),
        "lag_mean": 21 / 4,
        "lag_max": 12.0,
        "lag_0": 0.25,
        "lag_1": 0.25,
        "lag_8plus": 0.5,
    }
    close(metrics, {**expected, **{f"lag_{i}": 0.0 for i in range(2, 8)}})
    assert all(type(value) is float for value in metrics.values())
    assert sum(metrics[f"lag_{i}"] for i in [*range(8), "8plus"]) == 1


def test_percentiles_are_nearest_rank():
    log_ratio_T = torch.arange(1, 301, dtype=torch.float64) / 1000
    close(gate.mismatch(log_ratio_T, true(300))["p99"], 0.297)
    index_T = torch.zeros(300, dtype=torch.long)
    metrics = gate.gate_metrics(decide("off", 0, INF, log_ratio_T), log_ratio_T, index_T, index_T)
    close(
        [metrics[key] for key in ("ratio_p01", "ratio_p50", "ratio_p99", "ratio_max")],
        [math.exp(x) for x in (0.003, 0.150, 0.297, 0.300)],
    )


def test_a_rank_without_tokens():
    none_T, index_T, mask_T = torch.zeros(0), torch.zeros(0, dtype=torch.long), true(0)
    logits_TV = torch.zeros(0, 3, requires_grad=True)
    logp_T, entropy_T = gate.token_logprobs(logits_TV, index_T, none_T)
    log_ratio_T, lag_T = gate.log_ratio(logp_T, none_T, mask_T), gate.lag(index_T, 4, mask_T)
    advantage_T = gate.token_advantages(gate.advantages("grpo", none_T, index_T), index_T, mask_T)
    for level, mode in LEVEL_MODES:
        decision = gate.gate(level, mode, 0.5, 2, log_ratio_T, index_T, mask_T, lag_T, 1)
        assert len(decision.keep_T) == len(decision.weight_T) == len(decision.reason_T) == 0
    loss_T, _ = gate.surrogate("ppo", logp_T, none_T, advantage_T, decision.weight_T)
    loss = gate.policy_loss(loss_T + gate.kl("k3", logp_T, none_T), mask_T, 7)
    loss.backward()
    assert loss.item() == 0 and logits_TV.grad.shape == (0, 3) and len(entropy_T) == 0
    kept_G = gate.kept_per_group(mask_T, index_T, 2) + torch.tensor([3, 0])
    parts = [
        gate.denominator(kind, mask_T, index_T, index_T, 8.0, kept_G=kept_G, world_size=2).item()
        for kind in gate.DENOMINATORS
    ]
    assert parts == [0, 0, 0, 4]
    metrics = gate.gate_metrics(decision, log_ratio_T, lag_T, index_T) | gate.mismatch(log_ratio_T, mask_T)
    assert all(math.isnan(value) for value in metrics.values()) and len(metrics) == 10 + 11 + 5


# ---------------------------------------------------------------------------------------------------------------
# Unbiasedness, by enumeration
# ---------------------------------------------------------------------------------------------------------------

PAIRS_N2 = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # every rollout of two tokens, as one batch
ROLLOUT_T = torch.arange(9).repeat_interleave(2)


class TablePolicy:
    """Two tokens over a vocabulary of three: one logit row for the first, one per first token for the second."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.logits_CV = torch.randn(4, 3, dtype=torch.float64).requires_grad_()

    def logp_T(self):
        first_N, second_N = PAIRS_N2.unbind(1)
        logp_CV = self.logits_CV.log_softmax(-1)
        return torch.stack([logp_CV[0, first_N], logp_CV[1 + first_N, second_N]], 1).flatten()

    def gradient(self, scalar):
        return torch.autograd.grad(scalar, self.logits_CV)[0]


def p_N(logp_T):
    return logp_T.view(9, 2).sum(1).exp()


def make_rewards():
    torch.manual_seed(9)
    return torch.randn(9, dtype=torch.float64)


def exact_gradient(policy, reward_N):
    return policy.gradient(-(p_N(policy.logp_T()) * reward_N).sum())


def sampled_gradient(policy, sampler, reward_N, weigh):
    """Expectation under the sampler of the gradient of one rollout's loss: Σ over its tokens, denominator 1."""
    logp_T, behaviour_T = policy.logp_T(), sampler.logp_T().detach()
    weight_T = weigh(gate.log_ratio(logp_T, behaviour_T, true(18)))
    advantage_T = gate.token_advantages(reward_N, ROLLOUT_T, true(18))
    loss_T, _ = gate.surrogate("reinforce", logp_T, None, advantage_T, weight_T)
    return policy.gradient(gate.policy_loss(loss_T * p_N(behaviour_T)[ROLLOUT_T], true(18), 1))


@pytest.mark.parametrize("level,mode", LEVEL_MODES)
def test_on_policy_expected_gradient_is_the_policy_gradient(level, mode):
    policy, reward_N = TablePolicy(0), make_rewards()
    exact = exact_gradient(policy, reward_N)
    assert exact.abs().max() > 0.05
    sampled = sampled_gradient(
        policy, policy, reward_N, lambda log_r_T: decide(level, 0.5, 2, log_r_T, ROLLOUT_T, mode=mode).weight_T
    )
    close(sampled, exact, 1e-9)


def token_weight(level, log_ratio_T):
    return decide(level, 0, INF, log_ratio_T, ROLLOUT_T).weight_T


def test_stale_sampler_token_weights_are_first_order_and_sequence_weights_exact():
    """Per-token r_t corrects the action, not the state that the action is taken in, nor what follows it.

    Its expected gradient is that of Σ_t E[R] with only token t drawn from the policy and the rest from the sampler:
    the true gradient at zero distance, biased away from it. The product of the ratios of the whole rollout has no
    bias. gate() offers the first as weights and the second only as a gate, so this bias is measured here: it shrinks
    in proportion to the distance between the policies, and is smaller than that of no correction.
    """
    reward_N, errors = make_rewards(), []
    for distance in (0.2, 0.02):
        policy, sampler = TablePolicy(0), TablePolicy(0)
        with torch.no_grad():
            sampler.logits_CV += distance * TablePolicy(5).logits_CV
        exact = exact_gradient(policy, reward_N)

        sampled = functools.partial(sampled_gradient, policy, sampler, reward_N)
        close(sampled(lambda log_r_T: p_N(log_r_T.detach())[ROLLOUT_T]), exact, 1e-9)
        others_N2, own_N2 = sampler.logp_T().detach().view(9, 2).flip(1), policy.logp_T().view(9, 2)
        first_order = policy.gradient(-((others_N2 + own_N2).exp().sum(1) * reward_N).sum())
        for level in ("token", "seq", "geo"):
            close(sampled(functools.partial(token_weight, level)), first_order, 1e-9)
        errors.append((first_order - exact).norm() / exact.norm())
        uncorrected = sampled(functools.partial(token_weight, "off"))
        assert (uncorrected - exact).norm() / exact.norm() > errors[-1]
    assert 0.01 < errors[0] < 0.5 and 5 < errors[0] / errors[1] < 20


@pytest.mark.parametrize("level", ["token", "seq", "geo"])
def test_stale_sampler_is_unbiased_for_rollouts_of_one_token(level):
    torch.manual_seed(2)
    logits_V = torch.randn(3, dtype=torch.float64).requires_grad_()
    behaviour_V, reward_V = torch.randn(3, dtype=torch.float64).log_softmax(0), torch.randn(3, dtype=torch.float64)
    logp_V = logits_V.log_softmax(0)  # the three outcomes as three rollouts of one token
    decision = decide(level, 0, INF, gate.log_ratio(logp_V, behaviour_V, true(3)), torch.arange(3))
    loss_V, _ = gate.surrogate("reinforce", logp_V, None, reward_V, decision.weight_T)
    sampled = torch.autograd.grad((behaviour_V.exp() * loss_V).sum(), logits_V, retain_graph=True)[0]
    exact = torch.autograd.grad(-(logp_V.exp() * reward_V).sum(), logits_V)[0]
    assert exact.abs().max() > 0.05
    close(sampled, exact, 1e-9)


# ---------------------------------------------------------------------------------------------------------------
# World sizes and micro-batches
# ---------------------------------------------------------------------------------------------------------------

LENGTHS = [2, 6, 1, 3, 4, 2, 5]
GROUPS = [0, 0, 1, 1, 2, 2, 2]
UNTRAINED, STALE_ROLLOUT, FAR_ROLLOUT = 3, 5, 4  # in a world of four, rank 3 owns the untrained rollout only


def make_rollout(i):
    """Features, targets and what the engine recorded for one rollout, the same on every rank."""
    generator = torch.Generator().manual_seed(100 + i)
    length = LENGTHS[i]
    x_TF = torch.randn(length, 5, generator=generator, dtype=torch.float64)
    noise_T = torch.randn(length, generator=generator, dtype=torch.float64) * 0.1 - (2.0 if i == FAR_ROLLOUT else 0.0)
    trained_T = true(length) if i != UNTRAINED else ~true(length)
    if length > 2:
        trained_T[1] = False
    return {
        "x_TF": x_TF,
        "target_T": torch.randint(0, 4, (length,), generator=generator),
        "noise_T": noise_T,
        "trained_T": trained_T,
        "version_T": torch.full((length,), 2 if i == STALE_ROLLOUT else 6),
        "group_T": torch.full((length,), GROUPS[i]),
        "temperature_T": torch.full((length,), 0.5 + 0.25 * i),
    }


def concatenate(indices):
    """The rollouts of one rank as one flat batch; rollout_T counts the rank's own rollouts."""
    rollouts = [make_rollout(i) for i in indices]
    batch = {key: torch.cat([r[key] for r in rollouts]) for key in rollouts[0]}
    batch["rollout_T"] = torch.arange(len(indices)).repeat_interleave(torch.tensor([LENGTHS[i] for i in indices]))
    return batch


def policy_logp(w_FV, batch):
    return gate.token_logprobs(batch["x_TF"] @ w_FV, batch["target_T"], batch["temperature_T"])[0]


def weights(epoch):
    generator = torch.Generator().manual_seed(7)
    start_FV = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return start_FV + epoch * 0.2 * torch.randn(5, 4, generator=generator, dtype=torch.float64)


def train_step(rank, world, micro, kind, reduce):
    """One rank's part of a step, as the trainer does it: gate, global denominator, micro-batches, sum of gradients."""
    indices = list(range(rank, len(LENGTHS), world))
    batch = concatenate(indices)
    proximal_T = policy_logp(weights(0), batch)
    behaviour_T = (proximal_T + batch["noise_T"]).masked_fill(~batch["trained_T"], NAN)
    log_ratio_T = gate.log_ratio(proximal_T, behaviour_T, batch["trained_T"])
    lag_T = gate.lag(batch["version_T"], 7, batch["trained_T"])
    decision = gate.gate("geo", "mask", 0.5, 2, log_ratio_T, batch["rollout_T"], batch["trained_T"], lag_T, 3)
    advantage_N = gate.advantages("rloo", tensor(1, 0, 0.5, 1, 0, 1, 1), torch.tensor(GROUPS))[indices]
    advantage_T = gate.token_advantages(advantage_N, batch["rollout_T"], batch["trained_T"])
    kept_G = reduce(gate.kept_per_group(decision.keep_T, batch["group_T"], 3))
    total = reduce(
        gate.denominator(
            kind, decision.keep_T, batch["rollout_T"], batch["group_T"], 9.0, kept_G=kept_G, world_size=world
        )
    )
    w_FV, loss, clipped = weights(1).requires_grad_(), torch.zeros((), dtype=torch.float64), torch.tensor(0)
    for first in range(0, len(indices), micro):
        mask_T = (batch["rollout_T"] >= first) & (batch["rollout_T"] < first + micro)
        part = {key: value[mask_T] for key, value in batch.items()}
        logp_T = policy_logp(w_FV, part)
        given_T = proximal_T[mask_T], advantage_T[mask_T], decision.weight_T[mask_T]
        loss_T, clipped_T = gate.surrogate("ppo", logp_T, *given_T)
        loss_T = loss_T + 0.1 * gate.kl("k2", logp_T, proximal_T[mask_T], part["trained_T"])
        part_loss = gate.policy_loss(loss_T, decision.keep_T[mask_T], total)
        part_loss.backward()
        loss += part_loss.detach()
        clipped += clipped_T.sum()
    return {
        "loss": reduce(loss),
        "grad_FV": reduce(w_FV.grad),
        "denominator": total,
        "clipped": reduce(clipped),
        "reasons": reduce(torch.bincount(decision.reason_T.long(), minlength=5)),
    }


def g8_loss(rank, world, reduce):
    """G8 spread over ranks: a row of 2 tokens with advantage +1 on one rank, of 6 with −1 on another."""
    loss_T = torch.cat(
        [-row_T for i, row_T in enumerate((torch.ones(2), -torch.ones(6))) if i % world == rank] or [torch.zeros(0)]
    )
    keep_T = true(len(loss_T))
    total = reduce(gate.denominator("token", keep_T, torch.zeros(len(loss_T), dtype=torch.long)))
    return reduce(gate.policy_loss(loss_T, keep_T, total))


def all_reduced(group, x):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4, timeout=timedelta(seconds=30)
    )
    worlds, results = {4: dist.group.WORLD, 2: dist.new_group([0, 1])}, {}
    for world, group in worlds.items():
        if rank >= world:
            continue
        reduce = functools.partial(all_reduced, group)
        for kind, micro in itertools.product(gate.DENOMINATORS, (1, 2, len(LENGTHS))):
            results[world, micro, kind] = train_step(rank, world, micro, kind, reduce)
        results[world, "g8"] = g8_loss(rank, world, reduce)
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("gloo"))
    # A fork server imports torch once for the four ranks; forking this process would fork its autograd threads.
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed"])
    context = mp.start_processes(worker, args=(folder,), nprocs=4, join=False, start_method="forkserver")
    deadline = time.monotonic() + 60
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the gloo worlds did not finish within 60 s")
    return torch.load(f"{folder}/results.pt")


def alone(micro, kind):
    return train_step(0, 1, micro, kind, lambda x: x)


@pytest.mark.parametrize("kind,expected", [("token", 12), ("rollout", 4), ("group", 3), ("constant", 9)])
def test_gradient_is_the_same_for_every_world_and_micro_batch_size(distributed, kind, expected):
    reference = alone(len(LENGTHS), kind)
    # 23 tokens: rollouts 1, 4 and 6 have one masked, rollout 3 all three; rollout 4 is far, 5 stale
    assert reference["reasons"].tolist() == [12, 6, 0, 3, 2]
    assert reference["denominator"].item() == expected
    assert reference["grad_FV"].abs().max() > 1e-2 and reference["clipped"] > 0
    for micro in (1, 2):
        close(alone(micro, kind), reference)
    for world, micro in itertools.product((2, 4), (1, 2, len(LENGTHS))):
        close(distributed[world, micro, kind], reference)


def test_g8_value_in_every_world(distributed):
    assert g8_loss(0, 1, lambda x: x).item() == distributed[2, "g8"].item() == distributed[4, "g8"].item() == 0.5
