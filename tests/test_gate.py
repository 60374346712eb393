"""Right values of gate.py, its refusals, and its gradients over ranks. Names such as g8 and h3 are the entries of the
project's list of known faults. What holds for any numbers at all is in test_golden.py, what holds in expectation in
test_estimators.py.

Shape suffixes as in gate.py: T tokens, N rollouts, C calls, G groups, V vocabulary; here also F features of a toy
policy.
"""

import doctest
import functools
import inspect
import itertools
import math
import multiprocessing
import re
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
LEVEL_MODES = list(itertools.product(gate.LEVELS, gate.MODES))


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
    assert len(public_functions()) == 24
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


def test_h4_with_advantages_by_call_every_token_carries_its_calls():
    advantage_NC, rollout_T, call_T = tensor([0.5, 0.25], [-0.5, 0.0]), torch.tensor([0, 1, 0, 0]), [1, 0, 0, -1]
    trained_T = torch.tensor([True, True, True, False])
    advantage_T = gate.token_advantages(advantage_NC, rollout_T, trained_T, torch.tensor(call_T))
    assert advantage_T.tolist() == [0.25, -0.5, 0.5, 0.0]


def test_token_advantages_refuses_an_index_outside():
    for index in (2, -1):
        with pytest.raises(ValueError, match=f"not one of 2 rollouts: position 1 has rollout={index}"):
            gate.token_advantages(tensor(0.5, -0.5), torch.tensor([0, index]), true(2))
        with pytest.raises(gate.TokenError, match=f"not one of 2 calls: position 1 has call={index}"):
            gate.token_advantages(tensor([0.5, -0.5]), torch.zeros(2).long(), true(2), torch.tensor([0, index]))
    with pytest.raises(ValueError, match="one length"):
        gate.token_advantages(tensor([0.5, -0.5]), torch.zeros(2).long(), true(2))


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
    for kind in ("gpro", "gae", "on_policy_distill"):  # the latter two are not of rollouts
        with pytest.raises(ValueError, match=r"known: reinforce, reinforce_baseline, rloo, grpo, dr_grpo$"):
            gate.advantages(kind, tensor(1.0, 0.0), group_N)


# ---------------------------------------------------------------------------------------------------------------
# Credit by call, values, distillation, whitening
# ---------------------------------------------------------------------------------------------------------------


def test_returns_discount_by_call_and_repeat_the_last():
    reward_NC, calls_N = tensor([1.0, 0.0, 2.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]), torch.tensor([3, 1, 0])
    expected = [[1.5, 1.0, 2.0], [3.0, 3.0, 3.0], [0.0, 0.0, 0.0]]
    assert gate.returns(reward_NC, calls_N, 0.5).tolist() == expected
    assert gate.returns(reward_NC, calls_N, 0.0).tolist() == [[1.0, 0.0, 2.0], [3.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("kind", gate.ROLLOUT_ADVANTAGES)
def test_the_whole_reward_on_the_last_call_is_credit_by_rollout(kind):
    reward_NC, calls_N, group_N = tensor([0.0, 0.7], [0.2, 0.0], [0.0, 0.4]), torch.tensor([2, 1, 2]), torch.zeros(3)
    by_call_NC = gate.advantages(kind, gate.returns(reward_NC, calls_N, 1.0), group_N.long())
    by_rollout_N = gate.advantages(kind, tensor(0.7, 0.2, 0.4), group_N.long())
    assert torch.equal(by_call_NC, torch.stack([by_rollout_N] * 2, 1))


def test_returns_refuse():
    with pytest.raises(ValueError, match="beyond the rollout's calls: position 1 has calls=1") as refusal:
        gate.returns(tensor([0.0, 1.0], [0.0, 1.0]), torch.tensor([2, 1]), 1.0)
    assert not isinstance(refusal.value, gate.TokenError), "1 is a rollout, not a token"
    with pytest.raises(ValueError, match="rewards must be floating"):
        gate.returns(torch.tensor([[0, 1]]), torch.tensor([2]), 0.5)
    with pytest.raises(ValueError, match="one length"):
        gate.returns(tensor([0.0, 1.0]), torch.tensor([2, 1]), 1.0)
    for discount in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match=f"discount is {discount}; it must lie in 0..1"):
            gate.returns(tensor([0.0, 1.0]), torch.tensor([2]), discount)


def test_token_rewards_lie_on_the_last_trained_token_of_a_call():
    # the last token of call 0 is closing text; rollout 2 has no token on this rank
    rollout_T, call_T = torch.tensor([1, 1, 1, 0, 0, 0]), torch.tensor([0, 0, 1, 0, 0, 0])
    trained_T = torch.tensor([True, True, True, True, True, False])
    reward_T = gate.token_rewards(tensor([0.5, 0.0], [0.25, 1.0], [9.0, 9.0]), rollout_T, call_T, trained_T)
    assert reward_T.tolist() == [0.0, 0.25, 1.0, 0.0, 0.5, 0.0]


def test_token_rewards_refuse_a_reward_that_no_token_would_carry():
    zero_T = torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"a rewarded call has no trained token: position 0 has reward=1\.5"):
        gate.token_rewards(tensor([0.5, 1.0]), zero_T, torch.tensor([0, 1]), torch.tensor([True, False]))
    for name, rollout_T, call_T in (("1 rollouts: position 1 has rollout=1", torch.tensor([0, 1]), zero_T),
                                    ("2 calls: position 1 has call=-1", zero_T, torch.tensor([0, -1]))):  # fmt: skip
        with pytest.raises(gate.TokenError, match=f"not one of {name}"):
            gate.token_rewards(tensor([0.5, 0.0]), rollout_T, call_T, true(2))


def test_gae_of_two_calls():
    # call 0 says two tokens, a tool answers, call 1 says one; the discount applies only between the calls:
    # δ = (0 + 1/4 − 1/2, 0 + 1/2 · 1/2 − 1/4, 1 − 1/2), A_1 = 0 + 1/2 · 1/2 · 1/2, A_0 = −1/4 + 1 · 1/2 · A_1
    trained_T = torch.tensor([True, True, False, True])
    reward_T, value_T = tensor(0.0, 0.0, NAN, 1.0), tensor(0.5, 0.25, NAN, 0.5)
    rollout_T, call_T = torch.zeros(4).long(), torch.tensor([0, 0, -1, 1])
    advantage_T = gate.gae(reward_T, value_T, rollout_T, call_T, trained_T, discount=0.5, trace=0.5)
    assert advantage_T.tolist() == [-0.1875, 0.125, 0.0, 0.5]
    # trace 1: what follows, less the value; trace 0: one step
    assert gate.gae(reward_T, value_T, rollout_T, call_T, trained_T, 0.5, 1.0).tolist() == [0.0, 0.25, 0.0, 0.5]
    assert gate.gae(reward_T, value_T, rollout_T, call_T, trained_T, 0.5, 0.0).tolist() == [-0.25, 0.0, 0.0, 0.5]
    # the second call in an earlier row, and another rollout between
    order = torch.tensor([3, 2, 0, 1])
    split = (torch.cat([x[order[:2]], x[:1], x[order[2:]]]) for x in (reward_T, value_T, rollout_T, call_T, trained_T))
    reward_T, value_T, rollout_T, call_T, trained_T = split
    rollout_T[2] = 7
    advantage_T = gate.gae(reward_T, value_T, rollout_T, call_T, trained_T, 0.5, 0.5)
    assert advantage_T.tolist() == [0.5, 0.0, -0.5, -0.1875, 0.125]


@pytest.mark.parametrize("discount,trace,name", [(1.1, 1.0, "discount"), (-0.1, 1, "discount"), (1, NAN, "trace")])
def test_gae_refuses_a_factor(discount, trace, name):
    zero_T = torch.zeros(1).long()
    with pytest.raises(ValueError, match=f"{name} is .*; it must lie in 0..1"):
        gate.gae(tensor(1.0), tensor(1.0), zero_T, zero_T, true(1), discount, trace)


def test_distillation_is_the_log_ratio_to_the_teacher():
    given = tensor(-1.0, -2.0, NAN), tensor(-3.0, -1.5, NAN), torch.tensor([True, True, False])
    assert gate.distill(*given).tolist() == [-2.0, 0.5, 0.0]
    assert gate.distill(*given, 0.5).tolist() == [-1.0, 0.25, 0.0]


def test_distill_refuses_by_the_names_that_it_was_given():
    with pytest.raises(gate.TokenError, match=r"logp=-1\.0, teacher=nan"):
        gate.distill(tensor(-1.0), tensor(NAN), true(1))


def test_whiten():
    trained_T, unit = torch.tensor([True, True, False]), 1 / (math.sqrt(2) + 1e-6)
    close(gate.whiten(tensor(1.0, 3.0, NAN), trained_T, tensor(1.0, 3.0)), tensor(-unit, unit, 0.0))
    # other ranks hold 5, 5 and 1: a mean of 3 and squares of 4 · 4 / 4
    close(gate.whiten(tensor(1.0, 3.0), true(2), tensor(1.0, 3.0, 5.0, 5.0, 1.0)), tensor(-2 / (2 + 1e-6), 0.0))
    for whole in ((0.1, 0.1, 0.1), (0.1,), ()):
        assert gate.whiten(tensor(0.1, 0.1), true(2), tensor(*whole)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("poison", [NAN, INF])
def test_whiten_refuses_another_ranks_poison(poison):
    with pytest.raises(ValueError, match="not finite"):
        gate.whiten(tensor(1.0, 3.0), true(2), tensor(1.0, 3.0, poison))


def test_overlong_is_dapos_equation_13():
    length_N = torch.tensor([0, 80, 81, 90, 99, 100, 101, 500])
    expected = tensor(0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0, -1.0)
    close(gate.overlong(length_N, limit=100, buffer=20), expected)
    close(gate.overlong(torch.tensor([0, 5, 10]), limit=10, buffer=10), tensor(0.0, -0.5, -1.0))
    for buffer in (0, -1, 11):
        with pytest.raises(ValueError, match=f"overlong buffer {buffer} must lie in 1..10"):
            gate.overlong(length_N, 10, buffer)


@pytest.mark.parametrize(
    "rewards,why",
    [
        ((), "one_valid"),
        ((1.0,), "one_valid"),
        ((1.0, 1.0), "all_pass"),
        ((0.1, 0.1, 0.1), "all_pass"),
        ((0.0, 0.0), "all_fail"),
        ((-1.0, -1.0), "all_fail"),
        ((1.0, 0.0), None),
        ((0.0, 0.0, 1e-9), None),
    ],
)
def test_no_signal(rewards, why):
    assert gate.no_signal(tensor(*rewards)) == why


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
    for level, mode, high, position in (("geo", "mask", 2, 1), ("token", "clip", INF, 1), ("token", "trunc", INF, 1)):
        with pytest.raises(gate.TokenError, match=r"weight overflows: position 1 has log_ratio=1000\.0") as refusal:
            decide(level, 0.5, high, torch.tensor([-1000.0, 1000.0]), mode=mode)
        assert refusal.value.position == position


def test_a_rollout_without_trained_tokens_is_masked_and_gates_nothing():
    decision = gate.gate("geo", "mask", 0.5, 2, tensor(0.0, 0.1), torch.tensor([0, 1]), torch.tensor([False, True]))
    assert decision.reason_T.tolist() == [gate.MASKED, gate.KEPT]


@pytest.mark.parametrize(
    "level,mode,low,high,others,message",
    [
        ("sequence", "mask", 0.5, 2, {}, "gate level is 'sequence'; known: off, token, seq, geo"),
        ("token", "drop", 0.5, 2, {}, "known: mask, clip, trunc"),
        ("token", "mask", 0, 2, {"statistic": "js"}, "gate statistic is 'js'; known: ratio, kl, tv"),
        ("seq", "mask", 0, 2, {"weight": "row"}, "gate weight is 'row'; known: token, rollout"),
        ("token", "mask", 2, 0.5, {}, "0 <= low <= 1 <= high"),
        ("token", "mask", 1.1, 2, {}, "0 <= low <= 1 <= high"),
        ("token", "mask", 0.5, 0.9, {}, "0 <= low <= 1 <= high"),
        ("token", "mask", -0.1, 2, {}, "0 <= low <= 1 <= high"),
        ("token", "mask", 0.5, NAN, {}, "0 <= low <= 1 <= high"),
        ("off", "mask", 0, INF, {"weight": "rollout"}, "weight 'rollout' needs level seq or geo, got 'off'"),
        ("token", "mask", 0, INF, {"weight": "rollout"}, "weight 'rollout' needs level seq or geo, got 'token'"),
        ("off", "mask", 0, 0.1, {"statistic": "tv", "behaviour_T": tensor(0.0, 0.0)}, "needs a level, mode mask"),
        ("token", "trunc", 0, 0.1, {"statistic": "kl", "behaviour_T": tensor(0.0, 0.0)}, "got token, trunc, token"),
        ("seq", "mask", 0, 1, {"statistic": "kl", "weight": "rollout", "behaviour_T": tensor(0, 0)}, "mask, rollout"),
        ("geo", "mask", 0.5, 2, {"statistic": "tv", "behaviour_T": tensor(0.0, 0.0)}, r"token, \[0.5, 2\]"),
        ("geo", "mask", 0, -0.1, {"statistic": "tv", "behaviour_T": tensor(0.0, 0.0)}, r"token, \[0, -0.1\]"),
        ("token", "mask", 0, 0.1, {"statistic": "tv"}, "and behaviour_T; got token"),
        ("token", "mask", 0, 0.1, {"statistic": "tv", "behaviour_T": tensor(0.0)}, "one length"),
    ],
)
def test_gate_refuses_settings(level, mode, low, high, others, message):
    with pytest.raises(ValueError, match=message):
        decide(level, low, high, torch.zeros(2), mode=mode, **others)


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
        "seq_mask_tis": [0.2, 0.5, 1.5, 4, 6],  # their geometric mean is 1.29
        "mis": [0, 0, 0, 0, 0],  # their product is 3.6
    }
    assert set(weights) == set(gate.PRESETS)
    for name, expected in weights.items():
        decision = decide(**gate.preset(name), log_ratio_T=log_ratio_T)
        close(decision.weight_T, tensor(*map(float, expected)))
    with pytest.raises(ValueError, match="known: off, tis, icepop, seq_mask_tis, mis"):
        gate.preset("ppo")
    gate.preset("tis")["high"] = 9.0
    assert gate.preset("tis") == {"level": "token", "mode": "trunc", "low": 0.0, "high": 2.0}


def test_mis_gives_every_token_the_ratio_of_its_rollout():
    # products 1.5, 2.25 and 0.1; there is no lower end
    log_ratio_T, rollout_T = tensor(0.5, 1.5, 3.0, 1.5, 0.5, 0.2).log(), torch.tensor([0, 1, 0, 1, 2, 2])
    decision = decide(**gate.preset("mis"), log_ratio_T=log_ratio_T, rollout_T=rollout_T)
    close(decision.weight_T, tensor(1.5, 0.0, 1.5, 0.0, 0.1, 0.1))
    assert [gate.REASONS[i] for i in decision.reason_T] == ["kept", "ratio_high"] * 2 + ["kept"] * 2


@pytest.mark.parametrize(
    "level,mode,low,high,others,expected",
    [
        # the products are 8 and 0.04, the geometric means 2.83 and 0.2
        ("seq", "clip", 0.5, 4, {}, [4, 4, 0.5, 0.5]),
        ("seq", "trunc", 0.5, 4, {}, [4, 4, 0.04, 0.04]),
        ("geo", "clip", 0.5, 2, {}, [2, 2, 0.5, 0.5]),
        ("geo", "clip", 0.1, 4, {}, [math.sqrt(8), math.sqrt(8), 0.2, 0.2]),
        ("geo", "trunc", 0.5, 2, {}, [2, 2, 0.2, 0.2]),
        ("seq", "mask", 0, INF, {"weight": "rollout"}, [8, 8, 0.04, 0.04]),
        ("geo", "mask", 0.5, 4, {"weight": "rollout"}, [math.sqrt(8), math.sqrt(8), 0, 0]),
        ("geo", "mask", 0.5, 4, {}, [2, 4, 0, 0]),
        ("token", "clip", 0.5, 3, {}, [2, 3, 0.5, 0.5]),
    ],
)
def test_weights_of_rollouts(level, mode, low, high, others, expected):
    decision = decide(level, low, high, tensor(2.0, 4.0, 0.1, 0.4).log(), torch.tensor([0, 0, 1, 1]), mode, **others)
    close(decision.weight_T, tensor(*map(float, expected)))
    assert decision.keep_T.tolist() == [weight != 0 for weight in expected]


# A token of probability 0.2 at the sampler and 0.3 or 0.1 at the trainer; one of 0.5 that became 0.75.
DIVERGENCES = {
    "tv": [0.1, 0.1, 0.25],
    "kl": [
        0.2 * math.log(2 / 3) + 0.8 * math.log(8 / 7),
        0.2 * math.log(2) + 0.8 * math.log(8 / 9),
        0.5 * math.log(2 / 3) + 0.5 * math.log(2),
    ],
}


@pytest.mark.parametrize("statistic", DIVERGENCES)
@pytest.mark.parametrize("level", ["token", "seq", "geo"])
def test_divergences_are_those_of_the_token_against_all_others(statistic, level):
    behaviour_T, log_ratio_T = tensor(0.2, 0.2, 0.5).log(), tensor(1.5, 0.5, 1.5).log()
    own = DIVERGENCES[statistic]
    assert [round(x, 4) for x in DIVERGENCES["kl"]] == [0.0257, 0.0444, 0.1438]
    for i, value in enumerate(own):
        value = {"token": value, "seq": sum(own), "geo": sum(own) / 3}[level]
        # located from both sides; the ratio may have risen or fallen
        for high, kept in ((value * (1 + 1e-9), True), (value * (1 - 1e-9), False)):
            decision = decide(level, 0, high, log_ratio_T, statistic=statistic, behaviour_T=behaviour_T)
            assert decision.keep_T[i].item() == kept
            assert decision.reason_T[i].item() == (gate.KEPT if kept else gate.DIVERGENCE)
            close(decision.weight_T[i].item(), log_ratio_T[i].exp().item() if kept else 0.0)


@pytest.mark.parametrize("statistic", DIVERGENCES)
@pytest.mark.parametrize("level", ["token", "seq", "geo"])
def test_a_confident_token_that_rounds_to_certainty_is_not_infinitely_far(statistic, level):
    """The engine's float32 log-prob is one step below 0, the trainer's is 0: the same policy to any purpose."""
    behaviour_T = torch.cat([torch.full((99,), -0.5), torch.tensor([-(2.0**-24)])])
    log_ratio_T = torch.cat([torch.full((99,), 1e-7), -behaviour_T[99:]])
    assert decide(level, 0, 1e-3, log_ratio_T, statistic=statistic, behaviour_T=behaviour_T).keep_T.all()


@pytest.mark.parametrize("statistic", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divergences_of_extreme_ratios_are_numbers(statistic, dtype):
    behaviour_T = torch.tensor([-1.0, -1.0, 0.0, 0.0, -1000.0, -1000.0, 0.0, 1e-7], dtype=dtype)
    log_ratio_T = torch.tensor([1000.0, -1000.0, -1000.0, 1000.0, 1000.0, -1000.0, 0.0, 0.0], dtype=dtype)
    rollout_T = torch.arange(8)
    # A ratio that lifts a probability to 1 or more is at most a certainty: 1000 nats on top of certainty are none.
    expected = [False, False, False, True, False, True, True, True]
    keep_T = torch.ones(8, dtype=torch.bool)
    keep_T[3] = False  # its weight would overflow
    given = {"statistic": statistic, "behaviour_T": behaviour_T}
    with pytest.raises(gate.TokenError, match=r"weight overflows: position 3 has log_ratio=1000\.0"):
        decide("token", 0, 0.3, log_ratio_T, rollout_T, **given)
    for level in ("token", "seq", "geo"):
        decision = gate.gate(level, "mask", 0, 0.3, log_ratio_T, rollout_T, keep_T, **given)
        assert decision.keep_T.tolist() == [kept and i != 3 for i, kept in enumerate(expected)]
        assert decision.weight_T.tolist() == [0.0] * 6 + [1.0, 1.0]
    with pytest.raises(gate.TokenError, match="weight overflows: position 0"):
        decide("token", 0, INF, log_ratio_T, rollout_T, **given)


@pytest.mark.parametrize("statistic", DIVERGENCES)
def test_a_divergence_of_at_most_zero_keeps_what_is_on_policy(statistic):
    given = {"statistic": statistic, "behaviour_T": tensor(-1.0, -1.0)}
    assert decide("token", 0.0, 0.0, tensor(0.0, 0.1), **given).keep_T.tolist() == [True, False]


def test_rollout_mean_runs_over_trained_tokens_of_all_rows():
    rollout_T, trained_T = torch.tensor([0, 1, 0, 1, 2]), torch.tensor([True, True, True, False, False])
    found_T = gate.rollout_mean(tensor(1.0, 5.0, 2.0, NAN, INF), rollout_T, trained_T)
    assert found_T.tolist() == [1.5, 5.0, 1.5, 5.0, 0.0]


def test_statistics_of_a_rollout_do_not_depend_on_the_order_of_its_tokens():
    # In float32, 4096 + 3/8192 is 4096; the sum of these three is 3/8192 in float64 only.
    for values in itertools.permutations((4096.0, 3 / 8192, -4096.0)):
        log_ratio_T, zero_T = torch.tensor(values, dtype=torch.float32), torch.zeros(3).long()
        mean_T = gate.rollout_mean(log_ratio_T, zero_T, true(3))
        assert mean_T.tolist() == [1 / 8192] * 3 and mean_T.dtype == torch.float32
        for level, statistic in (("seq", 3 / 8192), ("geo", 1 / 8192)):
            decision = decide(level, 0, 2, log_ratio_T, weight="rollout")
            close(decision.weight_T, torch.full((3,), math.exp(statistic)), 1e-7)


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


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    logp_T = tensor(5.0, 2.0, 5.0, 0.5).log().requires_grad_()
    given = torch.zeros(4).double(), tensor(-1.0, -1.0, 1.0, -1.0), torch.ones(4).double()
    loss_T, clipped_T = gate.surrogate("ppo", logp_T, *given, dual_clip=3.0)
    loss_T.sum().backward()
    close(loss_T, tensor(3.0, 2.0, -1.2, 0.8))
    assert clipped_T.tolist() == [True, False, True, True]
    close(logp_T.grad, tensor(0.0, 2.0, 0.0, 0.0))
    close(gate.surrogate("ppo", logp_T, *given)[0], tensor(5.0, 2.0, -1.2, 0.8))


def test_gspo_surrogate_takes_and_clips_one_ratio_for_a_rollout():
    # log ρ is 0.1 and 0.3: the ratio of both is exp(0.2) = 1.2214; a second rollout stays where it was
    logp_T, proximal_T = tensor(-0.9, -0.7, -3.0), tensor(-1.0, -1.0, -3.0)
    mean_T = gate.rollout_mean(logp_T - proximal_T, torch.tensor([0, 0, 1]), true(3))
    for clip_high, ratio, slope in ((0.3, math.exp(0.2), math.exp(0.2)), (0.2, 1.2, 0.0)):
        logp_T = logp_T.detach().requires_grad_()
        loss_T, clipped_T = gate.surrogate("gspo", logp_T, proximal_T, tensor(1.0, 1.0, 1.0), tensor(1.0, 2.0, 1.0),
                                           clip_high=clip_high, rollout_log_rho_T=mean_T)  # fmt: skip
        loss_T.sum().backward()
        close(loss_T, tensor(-ratio, -2 * ratio, -1.0))
        assert clipped_T.tolist() == [slope == 0] * 2 + [False]
        close(logp_T.grad, tensor(-slope, -2 * slope, -1.0))


def test_gspo_clips_the_tokens_of_a_rollout_as_one_also_in_float32():
    # GSPO's own clip range is 4e-4: a ratio at its end must not be clipped by the luck of each token's log-prob
    logp_T, one_T = torch.linspace(-20, -1, 100), torch.ones(100)
    mean_T = torch.full((100,), math.log(1 + 4e-4))
    loss_T, clipped_T = gate.surrogate("gspo", logp_T, logp_T, one_T, one_T, 3e-4, 4e-4, rollout_log_rho_T=mean_T)
    assert len(set(clipped_T.tolist())) == 1 and len(set(loss_T.tolist())) == 1


def test_cispo_surrogate_clips_the_factor_and_keeps_the_gradient():
    logp_T = tensor(-1.0, -1.0, -1.0).requires_grad_()
    proximal_T = logp_T.detach() - tensor(1.5, 0.5, 1.1).log()
    loss_T, clipped_T = gate.surrogate("cispo", logp_T, proximal_T, tensor(1.0, 1.0, -1.0), tensor(2.0, 1.0, 1.0))
    loss_T.sum().backward()
    close(loss_T, tensor(2.4, 0.8, -1.1))
    assert clipped_T.tolist() == [True, True, False]
    close(logp_T.grad, tensor(-2.4, -0.8, 1.1))


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_no_advantage_is_no_loss_even_where_the_ratio_overflows(kind):
    far_T, none_T = tensor(-1000.0), tensor(0.0)
    loss_T, _ = gate.surrogate(kind, none_T, far_T, none_T, tensor(1.0), rollout_log_rho_T=-far_T)
    assert loss_T.tolist() == [0.0]


@pytest.mark.parametrize("kind", gate.SURROGATES)
@pytest.mark.parametrize("poisoned", ["logp", "proximal", "advantage", "log_rho"])
def test_surrogate_of_weight_zero_is_exactly_zero_whatever_else_is_there(kind, poisoned):
    values = {name: tensor(-1.0, NAN if name == poisoned else -1.0) for name in ("logp", "proximal", "advantage")}
    mean_T, logp_T = tensor(0.0, NAN if poisoned == "log_rho" else 0.0), values["logp"].requires_grad_()
    loss_T, _ = gate.surrogate(kind, logp_T, values["proximal"], values["advantage"], tensor(1.0, 0.0),
                               rollout_log_rho_T=mean_T)  # fmt: skip
    loss_T.sum().backward()
    assert loss_T[1].item() == logp_T.grad[1].item() == 0.0 and logp_T.grad[0].item() == 1.0


def test_surrogate_refuses_settings():
    one = tensor(-1.0)
    with pytest.raises(ValueError, match="known: reinforce, ppo, gspo, cispo"):
        gate.surrogate("dpo", one, one, one, one)
    for kind in ("ppo", "cispo"):
        with pytest.raises(ValueError, match="one length"):
            gate.surrogate(kind, one, None, one, one)
    with pytest.raises(ValueError, match=r"one length.*'rollout_log_rho': 'NoneType'"):
        gate.surrogate("gspo", one, one, one, one)
    for low, high, dual in ((-0.1, 0.2, INF), (1.1, 0.2, INF), (0.2, -0.1, INF), (NAN, 0.2, INF), (0.2, INF, INF),
                            (0.2, 0.2, 1.2), (0.2, 0.2, 1.0), (0.2, 0.2, NAN)):  # fmt: skip
        with pytest.raises(ValueError, match="need 0 <= clip_low <= 1 and 0 <= clip_high < dual_clip - 1"):
            gate.surrogate("ppo", one, one, one, one, low, high, dual)


def test_value_loss():
    value_T, target_T = tensor(1.0, NAN, 2.0).requires_grad_(), tensor(3.0, 0.0, 1.0).requires_grad_()
    loss_T = gate.value_loss(value_T, target_T, torch.tensor([True, False, True]))
    loss_T.sum().backward()
    assert loss_T.tolist() == [2.0, 0.0, 0.5] and value_T.grad.tolist() == [-2.0, 0.0, 1.0]
    assert target_T.grad is None


@pytest.mark.parametrize("observed,factor", [(0.0, 0.98), (0.079, 0.98), (0.09, 0.99), (0.1, 1.0), (0.11, 1.01),
                                             (0.121, 1.02), (50.0, 1.02), (-1.0, 0.98)])  # fmt: skip
def test_adapt_kl_moves_by_two_percent_at_most(observed, factor):
    close(gate.adapt_kl(0.5, observed, 0.1), 0.5 * factor)


@pytest.mark.parametrize("observed,target", [(NAN, 0.1), (INF, 0.1), (0.1, 0.0), (0.1, -1.0), (0.1, NAN)])
def test_adapt_kl_refuses(observed, target):
    with pytest.raises(ValueError, match=f"observed KL {observed} must be finite, its target {target} positive"):
        gate.adapt_kl(0.5, observed, target)


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


@pytest.mark.parametrize("surrogate", gate.SURROGATES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_g10_masked_poison_reaches_neither_loss_nor_gradient(surrogate, poison):
    trained_T, index_T = torch.tensor([True, False, True]), torch.zeros(3).long()
    given = [tensor(-1.0, poison, -2.0), tensor(-1.1, poison, -1.9), tensor(-1.05, poison, -2.0)]
    logp_T, behaviour_T, proximal_T = (x.requires_grad_() for x in given)
    advantage_T = tensor(0.7, poison, -0.6)
    decision = gate.gate("token", "mask", 0.5, 2, gate.log_ratio(logp_T, behaviour_T, trained_T), index_T, trained_T)
    mean_T = gate.rollout_mean(gate.log_ratio(logp_T, proximal_T, trained_T), index_T, trained_T)
    loss_T, _ = gate.surrogate(surrogate, logp_T, proximal_T, advantage_T, decision.weight_T, rollout_log_rho_T=mean_T)
    loss = gate.policy_loss(loss_T + gate.kl("k3", logp_T, behaviour_T, trained_T), decision.keep_T, 2)
    loss.backward()
    assert loss.isfinite() and loss.item() != 0 and (logp_T.grad[trained_T] != 0).all()
    for x in (logp_T, behaviour_T, proximal_T):
        assert x.grad is None or (x.grad.isfinite().all() and x.grad[1].item() == 0.0)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_g10_trained_poison_raises_with_position_and_values(poison):
    # every function and setting: test_golden.py; here the messages as a person meets them
    good, bad, keep_T, zero_T = tensor(-1.0, -2.0), tensor(-1.0, poison), true(2), torch.zeros(2).long()
    given = {"proximal": bad, "advantage": good, "weight": good}
    calls = {
        f"logp or behaviour is not finite where it counts: position 1 has logp={poison}, behaviour=-2.0 (1 such "
        "positions)": lambda: gate.log_ratio(bad, good, keep_T),
        f"logp=-2.0, proximal={poison}, advantage=-2.0": lambda: gate.surrogate("ppo", good, *given.values()),
        f"1 has reward=-2.0, value={poison}": lambda: gate.gae(good, bad, zero_T, zero_T, keep_T, 1, 1),
        f"position 1 has loss={poison}": lambda: gate.policy_loss(bad, keep_T, 2),
    }
    for message, call in calls.items():
        with pytest.raises(gate.TokenError, match=re.escape(message)) as refusal:
            call()
        assert refusal.value.position == 1


# ---------------------------------------------------------------------------------------------------------------
# Empty input, meters
# ---------------------------------------------------------------------------------------------------------------


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
        "divergence": 0.0,
        "gated": 0.5,
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


def test_gate_metrics_of_a_divergence():
    # |p − q| is 0, 0.5, 0.225 and 0.147
    log_ratio_T, behaviour_T = tensor(0.0, math.log(3.0), math.log(0.1), 5.0), tensor(0.5, 0.25, 0.25, 0.001).log()
    rollout_T, lag_T = torch.tensor([0, 0, 1, 2]), torch.zeros(4).long()
    decision = decide("token", 0, 0.2, log_ratio_T, statistic="tv", behaviour_T=behaviour_T)
    metrics = gate.gate_metrics(decision, log_ratio_T, lag_T, rollout_T)
    expected = {"kept": 0.5, "divergence": 0.5, "ratio_low": 0.0, "ratio_high": 0.0, "gated": 0.5, "stale": 0.0}
    close({name: metrics[name] for name in expected}, expected)
    close(metrics["rollouts_gated"], 1 / 3)


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
    elsewhere_NC = tensor([0.0, 1.0], dtype=torch.float32)  # rollouts of other ranks
    reward_T = gate.token_rewards(elsewhere_NC, index_T, index_T, mask_T)
    for found_T in (
        reward_T,
        gate.gae(reward_T, none_T, index_T, index_T, mask_T, 1, 1),
        gate.distill(none_T, none_T, mask_T),
        gate.whiten(advantage_T, mask_T, tensor(1.0, 2.0)),
        gate.rollout_mean(none_T, index_T, mask_T),
        gate.value_loss(none_T, none_T, mask_T),
    ):
        assert found_T.shape == (0,) and found_T.dtype == torch.float32
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
    assert all(math.isnan(value) for value in metrics.values()) and len(metrics) == 14 + 9 + 5


# ---------------------------------------------------------------------------------------------------------------
# World sizes and micro-batches
# ---------------------------------------------------------------------------------------------------------------

LENGTHS = [2, 6, 1, 3, 4, 2, 5]
GROUPS = [0, 0, 1, 1, 2, 2, 2]
UNTRAINED, STALE_ROLLOUT, FAR_ROLLOUT = 3, 5, 4  # in a world of four, rank 3 owns the untrained rollout only


# Denominator and surrogate: every one of either.
WAYS = [*((kind, "ppo") for kind in gate.DENOMINATORS), *(("token", kind) for kind in gate.SURROGATES if kind != "ppo")]


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


def train_step(rank, world, micro, kind, surrogate, reduce):
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
    log_rho_T = gate.log_ratio(policy_logp(weights(1), batch), proximal_T, batch["trained_T"])
    mean_T = gate.rollout_mean(log_rho_T, batch["rollout_T"], batch["trained_T"])
    w_FV, loss, clipped = weights(1).requires_grad_(), torch.zeros((), dtype=torch.float64), torch.tensor(0)
    for first in range(0, len(indices), micro):
        mask_T = (batch["rollout_T"] >= first) & (batch["rollout_T"] < first + micro)
        part = {key: value[mask_T] for key, value in batch.items()}
        logp_T = policy_logp(w_FV, part)
        given_T = proximal_T[mask_T], advantage_T[mask_T], decision.weight_T[mask_T]
        loss_T, clipped_T = gate.surrogate(surrogate, logp_T, *given_T, 0.1, 0.1, rollout_log_rho_T=mean_T[mask_T])
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
        "reasons": reduce(torch.bincount(decision.reason_T.long(), minlength=len(gate.REASONS))),
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
        for way, micro in itertools.product(WAYS, (1, 2, len(LENGTHS))):
            results[world, micro, way] = train_step(rank, world, micro, *way, reduce)
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


def alone(micro, way):
    return train_step(0, 1, micro, *way, lambda x: x)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_gradient_is_the_same_for_every_world_and_micro_batch_size(distributed, way):
    reference = alone(len(LENGTHS), way)
    # 23 tokens: rollouts 1, 4 and 6 have one masked, rollout 3 all three; rollout 4 is far, 5 stale
    assert reference["reasons"].tolist() == [12, 6, 0, 3, 2, 0]
    assert reference["denominator"].item() == {"token": 12, "rollout": 4, "group": 3, "constant": 9}[way[0]]
    assert reference["grad_FV"].abs().max() > 1e-2 and (reference["clipped"] > 0) == (way[1] != "reinforce")
    for micro in (1, 2):
        close(alone(micro, way), reference)
    for world, micro in itertools.product((2, 4), (1, 2, len(LENGTHS))):
        close(distributed[world, micro, way], reference)


def test_g8_value_in_every_world(distributed):
    assert g8_loss(0, 1, lambda x: x).item() == distributed[2, "g8"].item() == distributed[4, "g8"].item() == 0.5
