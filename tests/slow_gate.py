"""gate.py's arithmetic once more, in plain loops over lists: to be read beside it, and what it is tested against.

Nothing here imports torch or gate.py, and nothing is vectorised: each function is the formula of its source as one
would compute it by hand, a token at a time, quadratic where that is plainer. Inputs are taken to be right; what is
refused is gate.py's own business (tests/test_gate.py). Names and suffixes are gate.py's:
    T  tokens of a batch, its rows laid end to end    V  vocabulary    N  rollouts    C  calls of a rollout
A list x_T has an entry for each token. That of a token which is not trained is never looked at: None or NaN will do.

`python tests/slow_gate.py` rewrites tests/golden_gate.json: one batch, what each function makes of it, and a whole
step for each gate in CASES. tests/test_golden.py holds gate.py to every number in it.
"""

import json
import math
import random
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden_gate.json"
REASONS = ("kept", "masked", "ratio_low", "ratio_high", "stale", "divergence")
PRESETS = {
    "off": {"level": "off", "mode": "mask", "low": 0.0, "high": math.inf},
    "tis": {"level": "token", "mode": "trunc", "low": 0.0, "high": 2.0},
    "icepop": {"level": "token", "mode": "mask", "low": 0.5, "high": 5.0},
    "seq_mask_tis": {"level": "geo", "mode": "mask", "low": 0.5, "high": 2.0},
    "mis": {"level": "seq", "mode": "mask", "low": 0.0, "high": 2.0, "weight": "rollout"},
}


def exp(x):
    return math.exp(x) if x < 709 else math.inf


def mean(values):
    return math.fsum(values) / len(values) if values else math.nan


def clip(x, low, high):
    return min(max(x, low), high)


def mates(t, rollout_T, trained_T):
    """The trained tokens of t's rollout, in whatever rows."""
    return [u for u in range(len(trained_T)) if trained_T[u] and rollout_T[u] == rollout_T[t]]


def each(trained_T, value):
    """value(t) for each trained token, 0 for the others."""
    return [value(t) if trained else 0.0 for t, trained in enumerate(trained_T)]


# ---------------------------------------------------------------------------------------------------------------
# Log-probs and advantages
# ---------------------------------------------------------------------------------------------------------------


def token_logprobs(logits_TV, target_T, temperature_T):
    logp_T, entropy_T = [], []
    for logits_V, target, temperature in zip(logits_TV, target_T, temperature_T, strict=True):
        highest = max(logits_V)
        power_V = [math.exp((logit - highest) / temperature) for logit in logits_V]
        p_V = [power / math.fsum(power_V) for power in power_V]
        logp_T.append((logits_V[target] - highest) / temperature - math.log(math.fsum(power_V)))
        entropy_T.append(-math.fsum(p * math.log(p) for p in p_V if p > 0))
    return logp_T, entropy_T


def advantages(kind, reward_N, group_N, valid_N):
    """One number per rollout, or with rewards by call [N, C] one per call, each column on its own."""
    if isinstance(reward_N[0], list):
        columns = [advantages(kind, list(column_N), group_N, valid_N) for column_N in zip(*reward_N, strict=True)]
        return [list(row_C) for row_C in zip(*columns, strict=True)]
    return [advantage(kind, reward_N, group_N, valid_N, i) for i in range(len(reward_N))]


def advantage(kind, reward_N, group_N, valid_N, i):
    if not valid_N[i]:
        return 0.0
    if kind == "reinforce":
        return reward_N[i]
    whole_batch = kind == "reinforce_baseline"
    peers = [j for j in range(len(reward_N)) if valid_N[j] and (whole_batch or group_N[j] == group_N[i])]
    if len({reward_N[j] for j in peers}) == 1:
        return 0.0
    if kind == "rloo":
        return reward_N[i] - mean([reward_N[j] for j in peers if j != i])
    centre = mean([reward_N[j] for j in peers])
    if kind == "grpo":
        return (reward_N[i] - centre) / (deviation([reward_N[j] for j in peers]) + 1e-6)
    return reward_N[i] - centre


def deviation(values):
    """Standard deviation over n − 1."""
    centre = mean(values)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1))


def token_advantages(advantage_N, rollout_T, trained_T, call_T=None):
    if call_T is not None:
        return each(trained_T, lambda t: advantage_N[rollout_T[t]][call_T[t]])
    return each(trained_T, lambda t: advantage_N[rollout_T[t]])


def returns(reward_NC, calls_N, discount):
    """Σ_k discount^k r_{c+k}; after a rollout's last call, that call's return again."""
    return_NC = []
    for reward_C, calls in zip(reward_NC, calls_N, strict=True):
        firsts = [min(c, max(calls - 1, 0)) for c in range(len(reward_C))]
        return_NC.append([math.fsum(discount**k * r for k, r in enumerate(reward_C[first:])) for first in firsts])
    return return_NC


def token_rewards(reward_NC, rollout_T, call_T, trained_T):
    def reward(t):
        later = [u for u in mates(t, rollout_T, trained_T) if u > t and call_T[u] == call_T[t]]
        return 0.0 if later else reward_NC[rollout_T[t]][call_T[t]]

    return each(trained_T, reward)


def gae(reward_T, value_T, rollout_T, call_T, trained_T, discount, trace):
    """A_t = Σ_k (Π of γ · trace between t and k) δ_k, written out; γ is 1 inside a call."""

    def advantage(t):
        order = sorted(mates(t, rollout_T, trained_T), key=lambda u: (call_T[u], u))
        terms, factor = [], 1.0
        for u, after in list(zip(order, [*order[1:], None], strict=True))[order.index(t) :]:
            step = 0.0 if after is None else 1.0 if call_T[after] == call_T[u] else discount
            terms.append(factor * (reward_T[u] + step * (0.0 if after is None else value_T[after]) - value_T[u]))
            factor *= step * trace
        return math.fsum(terms)

    return each(trained_T, advantage)


def distill(logp_T, teacher_T, trained_T, coefficient=1.0):
    return each(trained_T, lambda t: -coefficient * (logp_T[t] - teacher_T[t]))


def whiten(advantage_T, trained_T, whole_t):
    if len(set(whole_t)) < 2:
        return [0.0] * len(trained_T)
    centre, scale = mean(whole_t), deviation(whole_t) + 1e-6
    return each(trained_T, lambda t: (advantage_T[t] - centre) / scale)


def overlong(length_N, limit, buffer):
    """DAPO, eq. 13, its three cases."""
    penalty_N = []
    for length in length_N:
        if length <= limit - buffer:
            penalty_N.append(0.0)
        elif length <= limit:
            penalty_N.append(((limit - buffer) - length) / buffer)
        else:
            penalty_N.append(-1.0)
    return penalty_N


def no_signal(reward_n):
    if len(reward_n) < 2:
        return "one_valid"
    if any(reward != reward_n[0] for reward in reward_n):
        return None
    return "all_pass" if reward_n[0] > 0 else "all_fail"


# ---------------------------------------------------------------------------------------------------------------
# Ratios, lags and the gate
# ---------------------------------------------------------------------------------------------------------------


def log_ratio(logp_T, behaviour_T, trained_T):
    return each(trained_T, lambda t: logp_T[t] - behaviour_T[t])


def lag(version_T, trainer_version, trained_T):
    return [trainer_version - version_T[t] if trained else 0 for t, trained in enumerate(trained_T)]


def rollout_mean(value_T, rollout_T, trained_T):
    """Masked tokens of a rollout get its mean too, for a rollout has one."""
    mates_T = [mates(t, rollout_T, trained_T) for t in range(len(trained_T))]
    return [mean([value_T[u] for u in own]) if own else 0.0 for own in mates_T]


def divergence(statistic, log_r, behaviour):
    """Between two Bernoulli variables, "this token": q at the sampler, p at the trainer. 0 log 0 is 0."""
    q, p = (min(1 - 2**-24, exp(logp)) for logp in (behaviour, behaviour + log_r))  # float32 knows no nearer to 1
    if statistic == "tv":
        return abs(p - q)
    if q > 0 and p == 0:
        return math.inf
    return sum(a * math.log(a / b) for a, b in ((q, p), (1 - q, 1 - p)) if a > 0)


def gate(level, mode, low, high, log_ratio_T, rollout_T, trained_T, lag_T=None, max_lag=None, statistic="ratio",
         weight="token", behaviour_T=None):  # fmt: skip
    """keep_T, weight_T, and reason_T as names. A ratio is compared with its band in log space."""
    keep_T, weight_T, reason_T = [], [], []
    for t, trained in enumerate(trained_T):
        own = mates(t, rollout_T, trained_T)
        if statistic == "ratio":
            values = {u: log_ratio_T[u] for u in own}
        else:
            values = {u: divergence(statistic, log_ratio_T[u], behaviour_T[u]) for u in own}
        total = math.fsum(values.values())
        s = {"off": 0.0, "token": values.get(t), "seq": total, "geo": total / max(len(own), 1)}[level]
        if not trained:
            reason = "masked"
        elif max_lag is not None and max(lag_T[u] for u in own) > max_lag:
            reason = "stale"
        elif level == "off" or mode != "mask":
            reason = "kept"
        elif statistic != "ratio":
            reason = "divergence" if s > high else "kept"
        elif low > 0 and s < math.log(low):
            reason = "ratio_low"
        else:
            reason = "ratio_high" if s > math.log(high) else "kept"
        keep_T.append(reason == "kept")
        weight_T.append(carried(level, mode, low, high, s, log_ratio_T[t], weight) if reason == "kept" else 0.0)
        reason_T.append(reason)
    return keep_T, weight_T, reason_T


def carried(level, mode, low, high, s, log_r, weight):
    """The importance weight of a kept token."""
    if level == "off":
        return 1.0
    if mode == "mask":
        return exp(s if weight == "rollout" else log_r)
    return clip(exp(s), low if mode == "clip" else 0.0, high)


# ---------------------------------------------------------------------------------------------------------------
# The loss and its denominator
# ---------------------------------------------------------------------------------------------------------------


def denominator(kind, keep_T, rollout_T, group_T, constant):
    """The global number; gate.py's is this rank's part of it."""
    if kind == "constant":
        return constant
    counted_T = {"token": range(len(keep_T)), "rollout": rollout_T, "group": group_T}[kind]
    return len({i for i, keep in zip(counted_T, keep_T, strict=True) if keep})


def surrogate(kind, logp_T, proximal_T, advantage_T, weight_T, clip_low, clip_high, dual_clip=math.inf,
              rollout_log_rho_T=None):  # fmt: skip
    """loss_T, clipped_T, and slope_T, the derivative of each loss by its logp with the weights held fixed."""
    found = []
    for t, w in enumerate(weight_T):
        if w == 0:
            found.append((0.0, False, 0.0))
            continue
        a, logp = advantage_T[t], logp_T[t]
        if kind == "reinforce":
            found.append((-w * a * logp, False, -w * a))
            continue
        rho = exp(rollout_log_rho_T[t] if kind == "gspo" else logp - proximal_T[t])
        bounded = clip(rho, 1 - clip_low, 1 + clip_high)
        if kind == "cispo":
            found.append((-w * bounded * a * logp, bounded != rho, -w * bounded * a))
            continue
        gain = min(rho * a, bounded * a)
        if a < 0:
            gain = max(gain, dual_clip * a)
        clipped = gain != rho * a
        found.append((-w * gain, clipped, 0.0 if clipped else -w * rho * a))
    return [[entry[i] for entry in found] for i in range(3)]


def value_loss(value_T, target_T, keep_T):
    return each(keep_T, lambda t: (value_T[t] - target_T[t]) ** 2 / 2)


def policy_loss(loss_T, keep_T, denominator):
    return math.fsum(loss for loss, keep in zip(loss_T, keep_T, strict=True) if keep) / (denominator or 1)


def kl(kind, logp_T, reference_T, trained_T):
    """kl_T, and its slope by logp."""

    def value(t):
        log_r = reference_T[t] - logp_T[t]
        return {"k1": -log_r, "k2": log_r**2 / 2, "k3": exp(log_r) - 1 - log_r}[kind]

    def slope(t):
        log_r = reference_T[t] - logp_T[t]
        return {"k1": 1.0, "k2": -log_r, "k3": 1 - exp(log_r)}[kind]

    return each(trained_T, value), each(trained_T, slope)


def adapt_kl(coefficient, observed, target):
    return coefficient * (1 + 0.1 * clip(observed / target - 1, -0.2, 0.2))


# ---------------------------------------------------------------------------------------------------------------
# Meters
# ---------------------------------------------------------------------------------------------------------------


def percentile(values, percent):
    """Nearest rank: the smallest value that at least this percentage of the values does not exceed."""
    return float(sorted(values)[math.ceil(percent * len(values) / 100) - 1]) if values else math.nan


def mismatch(log_ratio_T, trained_T):
    log_r = [x for x, trained in zip(log_ratio_T, trained_T, strict=True) if trained]
    size = [abs(x) for x in log_r]
    return {"mean": mean(size), "p99": percentile(size, 99), "max": percentile(size, 100),
            "k1": mean([-x for x in log_r]), "k3": mean([exp(x) - 1 - x for x in log_r])}  # fmt: skip


def gate_metrics(keep_T, weight_T, reason_T, log_ratio_T, lag_T, rollout_T):
    trained = [t for t, reason in enumerate(reason_T) if reason != "masked"]
    metrics = {name: mean([float(reason_T[t] == name) for t in trained]) for name in REASONS if name != "masked"}
    metrics["gated"] = mean([float(not keep_T[t]) for t in trained])
    with_trained, with_kept = {rollout_T[t] for t in trained}, {rollout_T[t] for t in trained if keep_T[t]}
    metrics["rollouts_gated"] = mean([float(i not in with_kept) for i in with_trained])
    kept = [w for w, keep in zip(weight_T, keep_T, strict=True) if keep]
    squares = len(kept) * math.fsum(w * w for w in kept)
    metrics["ess"] = math.fsum(kept) ** 2 / squares if squares else math.nan
    for name, percent in (("p01", 1), ("p50", 50), ("p99", 99), ("max", 100)):
        metrics[f"ratio_{name}"] = percentile([exp(log_ratio_T[t]) for t in trained], percent)
    lags = [lag_T[t] for t in trained]
    metrics |= {"lag_mean": mean(lags), "lag_max": percentile(lags, 100)}
    metrics |= {f"lag_{i}": mean([float(x == i) for x in lags]) for i in range(8)}
    return metrics | {"lag_8plus": mean([float(x >= 8) for x in lags])}


# ---------------------------------------------------------------------------------------------------------------
# A batch, a step, and the golden file
# ---------------------------------------------------------------------------------------------------------------

TRAINER_VERSION, CONSTANT, KL_SHARE, VALUE_SHARE = 12, 16.0, 0.05, 0.5
CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.5}
FLOATS_T = ("behaviour_T", "proximal_T", "logp_T", "reference_T", "teacher_T", "value_T")


def make_batch(rng, rollouts, drift):
    """A batch of rollouts in groups of three. Each call is a prompt token and up to three sampled ones, a row some
    calls of one rollout; rows come in any order. Some rollouts have crashed. A rollout's trainer has moved up to
    `drift` nats from its sampler. All floats are multiples of 1/256, thus exact in float32 as well."""

    def grid(low, high):
        return rng.randrange(round(256 * low), round(256 * high) + 1) / 256

    rows, calls_N = [], [rng.randrange(1, 4) for _ in range(rollouts)]
    for rollout, calls in enumerate(calls_N):
        cut = rng.randrange(calls + 1)
        rows += [[(rollout, call) for call in part] for part in (range(cut), range(cut, calls))]
    rng.shuffle(rows)
    drift_N, age_N = ([sample() for _ in range(rollouts)] for sample in (
        lambda: grid(-drift, drift), lambda: rng.choice((0, 0, 1, 9))))  # fmt: skip
    batch = {name: [] for name in ("rollout_T", "call_T", "group_T", "trained_T", "version_T", *FLOATS_T)}
    for rollout, call in (token for row in rows for token in row):
        for trained in [False] + [True] * rng.randrange(1, 4):
            behaviour = grid(-4, -0.25)
            proximal, current = (min(0.0, behaviour + drift_N[rollout] + grid(-0.25, 0.25)), grid(-0.5, 0.5))
            floats = (behaviour, proximal, min(0.0, proximal + current), *(grid(-4, 0) for _ in range(2)), grid(-1, 1))
            version = TRAINER_VERSION - age_N[rollout] - rng.randrange(2)
            batch["rollout_T"].append(rollout)
            batch["group_T"].append(rollout // 3)
            batch["trained_T"].append(trained)
            batch["call_T"].append(call if trained else -1)
            batch["version_T"].append(version if trained else -1)
            for name, x in zip(FLOATS_T, floats, strict=True):
                batch[name].append(x if trained else None)
    valid_N = [rng.random() < 0.8 for _ in range(rollouts)]
    reward_NC = [[rng.choice((0.0, 0.5, 1.0)) if c < calls else 0.0 for c in range(3)] for calls in calls_N]
    reward_N = [sum(reward_C) if valid else None for reward_C, valid in zip(reward_NC, valid_N, strict=True)]
    return batch | {"reward_N": reward_N, "valid_N": valid_N, "group_N": [40 - 7 * (i // 3) for i in range(rollouts)],
                    "calls_N": calls_N, "reward_NC": reward_NC}  # fmt: skip


def all_advantages(b):
    """Every kind of token advantage of a batch, and the intermediate values worth having."""
    where = b["rollout_T"], b["trained_T"]
    found = {"returns_NC": returns(b["reward_NC"], b["calls_N"], 0.9)}
    for kind in ("reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo"):
        advantage_N = advantages(kind, b["reward_N"], b["group_N"], b["valid_N"])
        by_call_NC = advantages(kind, found["returns_NC"], b["group_N"], b["valid_N"])
        found[kind] = token_advantages(advantage_N, *where)
        found[f"{kind}_by_call"] = token_advantages(by_call_NC, *where, b["call_T"])
    found["reward_T"] = token_rewards(b["reward_NC"], b["rollout_T"], b["call_T"], b["trained_T"])
    indices = b["rollout_T"], b["call_T"], b["trained_T"]
    found["gae"] = gae(found["reward_T"], b["value_T"], *indices, discount=0.9, trace=0.75)
    found["on_policy_distill"] = distill(b["proximal_T"], b["teacher_T"], b["trained_T"], 0.5)
    whole = [a for a, trained in zip(found["gae"], b["trained_T"], strict=True) if trained]
    return found | {"whitened": whiten(found["gae"], b["trained_T"], whole)}


def step(b, gate_settings, advantage, kl_kind, denominator_kind, max_lag):
    """All that happens to a batch between the advantage of its tokens and its loss, for each surrogate."""
    trained_T, rollout_T, advantage_T = b["trained_T"], b["rollout_T"], all_advantages(b)[advantage]
    log_ratio_T = log_ratio(b["proximal_T"], b["behaviour_T"], trained_T)
    lag_T = lag(b["version_T"], TRAINER_VERSION, trained_T)
    given = {"behaviour_T": b["behaviour_T"], "lag_T": lag_T, "max_lag": max_lag, **gate_settings}
    decision = keep_T, weight_T, reason_T = gate(**given, log_ratio_T=log_ratio_T, rollout_T=rollout_T,
                                                 trained_T=trained_T)  # fmt: skip
    denominators = {kind: denominator(kind, keep_T, rollout_T, b["group_T"], CONSTANT)
                    for kind in ("token", "rollout", "group", "constant")}  # fmt: skip
    total = denominators[denominator_kind]
    mean_T = rollout_mean(log_ratio(b["logp_T"], b["proximal_T"], trained_T), rollout_T, trained_T)
    kl_T, kl_slope_T = kl(kl_kind, b["logp_T"], b["reference_T"], trained_T)
    target_T = each(trained_T, lambda t: b["value_T"][t] + advantage_T[t])
    value_loss_T = value_loss(b["value_T"], target_T, keep_T)
    value_gradient_T = each(keep_T, lambda t: VALUE_SHARE * (b["value_T"][t] - target_T[t]) / total)
    surrogates = {}
    for kind in ("reinforce", "ppo", "gspo", "cispo"):
        loss_T, clipped_T, slope_T = surrogate(kind, b["logp_T"], b["proximal_T"], advantage_T, weight_T, **CLIPS,
                                               rollout_log_rho_T=mean_T)  # fmt: skip
        whole_T = [x + KL_SHARE * y + VALUE_SHARE * z for x, y, z in zip(loss_T, kl_T, value_loss_T, strict=True)]
        slope_T = [x + KL_SHARE * y for x, y in zip(slope_T, kl_slope_T, strict=True)]
        gradient_T = each(keep_T, lambda t, slope_T=slope_T: slope_T[t] / total)
        surrogates[kind] = {"loss_T": loss_T, "clipped_T": clipped_T, "gradient_T": gradient_T,
                            "loss": policy_loss(whole_T, keep_T, total)}  # fmt: skip
    return {"keep_T": keep_T, "weight_T": weight_T, "reason_T": reason_T, "denominators": denominators,
            "kl_T": kl_T, "value_loss_T": value_loss_T, "value_gradient_T": value_gradient_T, "surrogates": surrogates,
            "metrics": gate_metrics(*decision, log_ratio_T, lag_T, rollout_T)}  # fmt: skip


def band(level, mode, low, high, **others):
    return {"level": level, "mode": mode, "low": low, "high": high, **others}


# name: the gate (a preset by its name), and the rest of `step`'s settings
CASES = {
    "off": ("off", "reinforce_baseline", "k1", "token", 4),
    "tis": ("tis", "grpo", "k2", "rollout", None),
    "icepop": ("icepop", "rloo_by_call", "k3", "group", 4),
    "seq_mask_tis": ("seq_mask_tis", "dr_grpo", "k2", "constant", None),
    "mis": ("mis", "gae", "k2", "rollout", None),
    "tv": (band("token", "mask", 0.0, 0.15, statistic="tv"), "whitened", "k3", "token", 4),
    "kl": (band("geo", "mask", 0.0, 0.05, statistic="kl"), "on_policy_distill", "k1", "group", None),
    "seq_trunc": (band("seq", "trunc", 0.0, 2.0), "reinforce", "k2", "token", 4),
    "geo_clip": (band("geo", "clip", 0.75, 1.5), "dr_grpo_by_call", "k2", "rollout", None),
}
STEP = ("gate", "advantage", "kl", "denominator", "max_lag")


def golden():
    batch = make_batch(random.Random(114), rollouts=9, drift=1.25)
    lengths, logits = [5, 8, 9, 10, 11], ([[1.0, 0.0], [2.0, -1.0], [0.5, 0.5]], [0, 1, 0], [0.5, 1.0, 2.0])
    log_ratio_T = log_ratio(batch["proximal_T"], batch["behaviour_T"], batch["trained_T"])
    groups = [[r for r, g, v in zip(batch["reward_N"], batch["group_N"], batch["valid_N"], strict=True) if v and g == i]
              for i in sorted(set(batch["group_N"]))]  # fmt: skip
    parts = {
        "token_logprobs": dict(zip(("logits_TV", "target_T", "temperature_T"), logits, strict=True))
        | dict(zip(("logp_T", "entropy_T"), token_logprobs(*logits), strict=True)),
        "overlong": {"length_N": lengths, "limit": 10, "buffer": 4, "penalty_N": overlong(lengths, 10, 4)},
        "no_signal": [{"reward_n": g, "why": no_signal(g)} for g in [*groups, [1.0, 1.0], [0.0, 0.0], [1.0]]],
        "adapt_kl": [[0.5, x, 0.1, adapt_kl(0.5, x, 0.1)] for x in (0.0, 0.09, 0.11, 0.3)],
        "log_ratio_T": log_ratio_T,
        "lag_T": lag(batch["version_T"], TRAINER_VERSION, batch["trained_T"]),
        "mismatch": mismatch(log_ratio_T, batch["trained_T"]),
        "advantages": all_advantages(batch),
    }  # fmt: skip
    cases = {}
    for name, settings in CASES.items():
        chosen = PRESETS[settings[0]] if isinstance(settings[0], str) else settings[0]
        cases[name] = {"settings": dict(zip(STEP, settings, strict=True)), **step(batch, chosen, *settings[1:])}
    return {"batch": batch, "parts": parts, "cases": cases}


def written(value, indent=""):
    """JSON with one line for each list of numbers; floats as repr writes them, so none is rounded."""
    if not isinstance(value, dict):
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    lines = [f'{indent} "{key}": {written(entry, indent + " ")}' for key, entry in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def main():
    GOLDEN.write_text(written(golden()) + "\n")


if __name__ == "__main__":
    main()
