"""The toy trained with the real engine under other losses than the default: a teacher's, and PPO with a value head."""

import pytest
from test_agents import launched

pytestmark = pytest.mark.engine


def test_a_larger_toy_teaches_the_small_one():
    """The reverse KL to the teacher falls by a factor of five, rewards unseen; ledger and probe hold."""
    metrics, ledger, summary = launched("distill", RECIPE="toy_distill", STEPS="30")
    kl = [line["kl/k1"] for line in metrics]
    print("reverse KL:", [round(value, 4) for value in kl], summary["seconds"])
    assert sum(kl[-4:]) / 4 <= sum(kl[:2]) / 2 / 5
    assert summary["ledger_balanced"] is True and summary["probe_max_abs_dlogp"] < 1e-4
    assert all(line["trained"] > 0 and not sum(line["gated"].values()) for line in ledger[:-1])
    assert summary["reward_after"] > summary["reward_before"] + 0.1


def test_a_teacher_is_followed_on_prompts_alone():
    """agents/distill.py: one turn a rollout, which the recipe's teacher scores."""
    metrics, _, summary = launched("prompts", RECIPE="toy_distill", AGENT="agents/distill.py", STEPS="12")
    kl = [line["kl/k1"] for line in metrics]
    print("reverse KL:", [round(value, 4) for value in kl], summary["seconds"])
    assert sum(kl[-3:]) / 3 <= sum(kl[:2]) / 2 / 2
    assert summary["ledger_balanced"] is True and all(line["rollout/calls"] == 1 for line in metrics)


def test_every_part_of_the_loss_at_once():
    """PPO over mini-batches with a value head, a KL that is steered, entropy and length; two weight syncs a step, so
    that a step's samples are of the versions before it by two, and by one or three where a sync came amid them."""
    metrics, ledger, summary = launched("losses", RECIPE="../tests/losses_recipe", STEPS="4")
    for line in metrics:
        assert line["gate/masked"] > 0.1 and line["gate/gated"] == 0
        assert line["kl/k3"] >= 0 and line["entropy"] > 0
        assert isinstance(line["loss"], float), "NaN is written as null"
    assert metrics[0]["value/mean"] == 0 < abs(metrics[-1]["value/mean"])
    assert metrics[0]["kl/k1"] == pytest.approx(0, abs=1e-5) and metrics[1]["kl/k1"] != metrics[0]["kl/k1"]
    assert metrics[0]["kl/coef"] > metrics[-1]["kl/coef"], "a KL below its target lowers the coefficient"
    assert sum(line["clip_share"] for line in metrics) > 0, "the second mini-batch meets moved weights"
    assert summary["ledger_balanced"] is True and all(line["trained"] > 0 for line in ledger[:-1])
    assert metrics[0]["gate/lag_mean"] == 0 < metrics[-1]["gate/lag_mean"] <= 3, [m["gate/lag_mean"] for m in metrics]


def test_groups_without_signal_are_replaced():
    metrics, ledger, summary = launched("filter", RECIPE="../tests/filter_recipe", STEPS="2")
    replaced = sum(number for line in metrics for key, number in line.items() if "groups_dropped" in key)
    dropped = [sum(line["dropped"].get(reason, 0) for line in ledger) for reason in ("all_pass", "all_fail")]
    print("groups replaced:", replaced, "their tokens:", dropped)
    assert replaced > 0 and sum(dropped) > 0 and summary["ledger_balanced"] is True
