"""Every number that multiplies a gradient: advantages, ratios, the gate, weights, the loss, its denominator, KL.

Pure functions of tensors: no I/O, no config object, no state, no torch.distributed. The path of a number:

    reward_N ──▶ advantages (or returns, gae, distill) ─▶ token_advantages ┐
    logits_TV ─▶ token_logprobs ─▶ log_ratio ─▶ gate ─▶ Decision ──────────┼─▶ surrogate ─▶ policy_loss ─▶ backward
    version_T ─▶ lag ──────────────────────────▶  │                        │                   ▲
                                                  └─▶ kept_per_group, denominator (Σ over ranks before backward)

Three policies meet here. The *behaviour* policy sampled (the engine's log-prob, at the token's version), the
*proximal* one is the trainer's at the start of the batch, the *current* one is being trained. The gate corrects from
behaviour to proximal once a batch; a surrogate's ρ goes from proximal to current and matters from the second
mini-batch on (decoupled PPO, arXiv 2110.00641). A fourth, the frozen *reference*, is what `kl` and `distill` compare
with.

Shape suffixes:
    T  tokens of a batch, its rows laid end to end       V  vocabulary
    N  rollouts                                          G  groups
    C  calls of a rollout, by number; shorter rollouts are padded
Masks: trained_T  bool, the token was sampled and is trained by rule (prompt, tool text, closing ids are False)
       keep_T     bool, trained and survived the gate
Index tensors: rollout_T  int64, which rollout (0..N-1) a token belongs to, whatever row carries it
               call_T     int64, which call of its rollout (0..C-1) sampled the token
               group_T    int64, which group (0..G-1, dense over the whole batch, equal on every rank)

A number that is not finite where it is trained raises TokenError, a ValueError, with its position and values. Where
it is masked it is replaced by torch.where *before* any exp, so that neither the loss nor autograd ever sees it
(0 · NaN is NaN in a backward pass, so masking a loss afterwards would be too late).
Log-probs and log-ratios are in nats; lags are in policy versions. float64 inputs stay float64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

REASONS = ("kept", "masked", "ratio_low", "ratio_high", "stale", "divergence")
KEPT, MASKED, RATIO_LOW, RATIO_HIGH, STALE, DIVERGENCE = range(len(REASONS))

ROLLOUT_ADVANTAGES = ("reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo")
ADVANTAGES = (*ROLLOUT_ADVANTAGES, "gae", "on_policy_distill")
LEVELS = ("off", "token", "seq", "geo")
MODES = ("mask", "clip", "trunc")
STATISTICS = ("ratio", "kl", "tv")
WEIGHTS = ("token", "rollout")
DENOMINATORS = ("token", "rollout", "group", "constant")
SURROGATES = ("reinforce", "ppo", "gspo", "cispo")
KLS = ("k1", "k2", "k3")

EPSILON = 1e-6
LAG_BINS = 8

# tis           min(r_t, 2). Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
#               Training", with their C = 2.
# icepop        r_t inside [0.5, 5], else the token is gated. Ring-1T, arXiv 2510.18855, eq. for M(k).
# seq_mask_tis  the rollout is gated unless its geometric-mean ratio lies in [0.5, 2]; survivors carry their raw r_t,
#               untruncated in spite of the name, as OpenRLHF, Molt and NeMo-RL define it (after Liu et al. 2025,
#               "When Speed Kills Stability"). Departures: those default to [0.5, 5] or narrower bands, this band is
#               symmetric in log space; the mean runs over all rows of a rollout, not over one row.
# mis           the rollout is gated unless exp(Σ log r) ≤ 2; survivors carry that ratio on every token. Sequence-level
#               masked importance sampling, Liu et al. 2025 (as above), with C = 2.
PRESETS = {
    "off": {"level": "off", "mode": "mask", "low": 0.0, "high": math.inf},
    "tis": {"level": "token", "mode": "trunc", "low": 0.0, "high": 2.0},
    "icepop": {"level": "token", "mode": "mask", "low": 0.5, "high": 5.0},
    "seq_mask_tis": {"level": "geo", "mode": "mask", "low": 0.5, "high": 2.0},
    "mis": {"level": "seq", "mode": "mask", "low": 0.0, "high": 2.0, "weight": "rollout"},
}


class TokenError(ValueError):
    """A value broke a law. ``position`` is its index in the tensors given, for a caller that knows the row."""

    def __init__(self, position: int, message: str):
        super().__init__(message)
        self.position = position


class Decision(NamedTuple):
    """What the gate decided for each token."""

    keep_T: Tensor
    """bool: trained and survived."""
    weight_T: Tensor
    """float, detached: the importance weight that multiplies the surrogate; exactly 0 where not kept."""
    reason_T: Tensor
    """int8 index into REASONS; `masked` means not trained by rule."""


# ---------------------------------------------------------------------------------------------------------------
# Refusals and reductions shared by everything below
# ---------------------------------------------------------------------------------------------------------------


def _one_of(what: str, value: str, known) -> None:
    if value not in known:
        raise ValueError(f"{what} is {value!r}; known: {', '.join(known)}")


def _same_length(**tensors_T: Tensor) -> None:
    shapes = {name: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for name, x in tensors_T.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 or isinstance(shape, str) for shape in shapes.values()):
        raise ValueError(f"expected 1-D tensors of one length, got {shapes}")


def _refuse(bad_T: Tensor, why: str, of_tokens: bool = True, **values_T: Tensor) -> None:
    """Raise TokenError (ValueError of rollouts) naming the first position where bad_T holds and each value there."""
    if bad_T.any():
        position = int(bad_T.nonzero()[0])
        values = ", ".join(f"{name}={x[position].item()!r}" for name, x in values_T.items())
        what = f"{why}: position {position} has {values} ({int(bad_T.sum())} such positions)"
        raise TokenError(position, what) if of_tokens else ValueError(what)


def _refuse_non_finite(where_T: Tensor, of_tokens: bool = True, **values_T: Tensor) -> None:
    """Raise unless all have one length and every value is finite at each position where where_T holds. An index among
    the values, which always is, tells whose they are."""
    _same_length(where=where_T, **values_T)
    bad_T = torch.zeros_like(where_T)
    for x in values_T.values():
        bad_T = bad_T | ~torch.isfinite(x)
    _refuse(where_T & bad_T, f"{' or '.join(values_T)} is not finite where it counts", of_tokens, **values_T)


def _refuse_outside(where_T: Tensor, what: str, index_T: Tensor, count: int) -> None:
    _refuse(where_T & ((index_T < 0) | (index_T >= count)), f"not one of {count} {what}s", **{what: index_T})


def _check_floating(reward: Tensor) -> None:
    if not reward.is_floating_point():
        raise ValueError(f"rewards must be floating, got {reward.dtype}")


def _check_unit(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must lie in 0..1")


def _extent(index_T: Tensor) -> int:
    """Number of bins that a dense index needs: its maximum + 1, 0 when empty."""
    _refuse(index_T < 0, "an index is negative", index=index_T)
    return int(index_T.max()) + 1 if index_T.numel() else 0


def _sum_by(index_T: Tensor, value_T: Tensor, bins: int) -> Tensor:
    return value_T.new_zeros(bins).index_add(0, index_T, value_T)


def _max_by(index_T: Tensor, value_T: Tensor, bins: int) -> Tensor:
    return value_T.new_zeros(bins).scatter_reduce(0, index_T, value_T, "amax", include_self=False)


def _percentile(sorted_T: Tensor, percent: int) -> float:
    """Nearest-rank percentile (an element of the data), NaN when empty. torch.quantile stops at 2^24 elements."""
    count = len(sorted_T)
    return float(sorted_T[(percent * count + 99) // 100 - 1]) if count else math.nan


# ---------------------------------------------------------------------------------------------------------------
# Log-probs and advantages
# ---------------------------------------------------------------------------------------------------------------


def token_logprobs(logits_TV: Tensor, target_T: Tensor, temperature_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under the distribution that was sampled from, and that distribution's entropy.

    logp_T = log_softmax(logits_TV / temperature_T)[target_T]; entropy_T = −Σ_v p log p at the same temperature.
    Nats, float32 (float64 for float64 logits), both differentiable. The logits are divided, not the log-probs:
    only then is this what an engine with processed_logprobs recorded. A vocabulary entry at −inf adds no entropy.
    Give it trained positions only: a NaN logit yields a NaN log-prob, which `log_ratio` refuses.
    Raises ValueError when lengths differ or a temperature is not positive and finite.

    >>> logp_T, _ = token_logprobs(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor([0.5]))
    >>> round(logp_T.item(), 4)
    -0.1269
    """
    _same_length(logits=logits_TV[..., 0], target=target_T, temperature=temperature_T)
    positive_T = (temperature_T > 0) & torch.isfinite(temperature_T)
    _refuse(~positive_T, "temperature must be positive and finite", temperature=temperature_T)
    logits_TV = logits_TV.float() if logits_TV.dtype.itemsize < 4 else logits_TV
    logp_TV = torch.log_softmax(logits_TV / temperature_T.to(logits_TV.dtype)[:, None], dim=-1)
    p_TV = logp_TV.exp()
    entropy_T = -(p_TV * logp_TV.masked_fill(p_TV == 0, 0.0)).sum(-1)
    return logp_TV.gather(1, target_T.long()[:, None]).squeeze(1), entropy_T


def advantages(kind: str, reward_N: Tensor, group_N: Tensor, valid_N: Tensor | None = None) -> Tensor:
    """Advantage of each *rollout* of the whole batch; rows do not enter, so a rollout with four rows counts once.

    With R over the valid rollouts of a group, n their number:
      reinforce           R                                     Williams 1992
      reinforce_baseline  R − mean of the batch                 Williams 1992; not whitened, not REINFORCE++
      rloo                R − mean of the n − 1 others          Kool et al. 2019; arXiv 2402.14740
      grpo                (R − mean) / (std + 1e-6)             arXiv 2402.03300; std over n − 1, as in TRL and verl
      dr_grpo             R − mean                              arXiv 2503.20783
    reward_N float[N] in the task's unit, group_N int64[N] any ids, valid_N bool[N] (None: all). A rollout that is
    not valid (a crash) enters no baseline and gets exactly 0, as does every rollout whose baseline has one valid
    rollout or no spread: never NaN, and never the rounding error of a mean. Given `returns` [N, C] instead of
    rewards, each column is compared with its like: call c of a rollout with call c of the others.
    Raises ValueError when lengths differ, rewards are not floating, or a valid reward is not finite.

    >>> advantages("dr_grpo", torch.tensor([1.0, 0.0, 0.0]), torch.tensor([7, 7, 7])).tolist()
    [0.6666666269302368, -0.3333333432674408, -0.3333333432674408]
    """
    _one_of("advantage", kind, ROLLOUT_ADVANTAGES)
    if reward_N.ndim == 2:
        return torch.stack([advantages(kind, column_N, group_N, valid_N) for column_N in reward_N.unbind(1)], 1)
    valid_N = torch.ones_like(group_N, dtype=torch.bool) if valid_N is None else valid_N
    _check_floating(reward_N)
    _refuse_non_finite(valid_N, False, reward=reward_N, group=group_N)
    reward_N = torch.where(valid_N, reward_N, 0.0)
    if kind == "reinforce":
        return reward_N
    cohort_N = group_N.unique(return_inverse=True)[1]
    return _centred(kind, reward_N, torch.zeros_like(cohort_N) if kind == "reinforce_baseline" else cohort_N, valid_N)


def _centred(kind: str, reward_N: Tensor, cohort_N: Tensor, valid_N: Tensor) -> Tensor:
    """Rewards less the mean of their cohort (the rollouts that share a baseline), scaled as `kind` asks."""
    cohorts = _extent(cohort_N)
    count_N = _sum_by(cohort_N, valid_N.to(reward_N.dtype), cohorts)[cohort_N]
    mean_N = _sum_by(cohort_N, reward_N, cohorts)[cohort_N] / count_N
    highest_N = _max_by(cohort_N, reward_N.masked_fill(~valid_N, -math.inf), cohorts)[cohort_N]
    lowest_N = -_max_by(cohort_N, (-reward_N).masked_fill(~valid_N, -math.inf), cohorts)[cohort_N]
    # Spread is decided on the rewards themselves: three rewards of 0.1 have a mean that is not 0.1.
    advantage_N = torch.where(valid_N & (highest_N > lowest_N), reward_N - mean_N, 0.0)
    others_N = (count_N - 1).clamp(min=1)
    if kind == "rloo":
        return advantage_N * count_N / others_N
    if kind == "grpo":
        std_N = (_sum_by(cohort_N, advantage_N.square(), cohorts)[cohort_N] / others_N).sqrt()
        return advantage_N / (std_N + EPSILON)
    return advantage_N


def token_advantages(advantage_N: Tensor, rollout_T: Tensor, trained_T: Tensor, call_T: Tensor | None = None) -> Tensor:
    """Give each trained token of every row its rollout's advantage, and exactly 0 to every other token.

    advantage_T = advantage_N[rollout_T] where trained_T, else 0; advantages by call [N, C] need call_T as well.
    Raises ValueError when lengths differ or an index lies outside 0..N-1 (or 0..C-1).

    >>> token_advantages(torch.tensor([0.5, -0.5]), torch.tensor([0, 1, 0]), torch.tensor([True, True, False])).tolist()
    [0.5, -0.5, 0.0]
    """
    if advantage_N.ndim == 1:
        advantage_N, call_T = advantage_N[:, None], torch.zeros_like(rollout_T)
    _same_length(rollout=rollout_T, trained=trained_T, call=call_T)
    _refuse_outside(trained_T, "rollout", rollout_T, advantage_N.shape[0])
    _refuse_outside(trained_T, "call", call_T, advantage_N.shape[1])
    at_T = torch.where(trained_T, rollout_T, 0), torch.where(trained_T, call_T, 0)
    return torch.where(trained_T, advantage_N[at_T], 0.0)


def returns(reward_NC: Tensor, calls_N: Tensor, discount: float) -> Tensor:
    """What each call leads to: G_c = r_c + discount · G_{c+1}, float[N, C], for credit by call instead of by rollout.

    reward_NC float[N, C] holds the reward of each call, 0 beyond the calls_N int64[N] that a rollout has (at least
    one, unless it has no tokens); the discount applies per call (an environment's step), whatever its length. A
    rollout that ended before call c stands there with its last call's return, so that with the whole reward on the
    last call and discount 1 every column is the rollout's reward, and `advantages` gives what it gives without calls.
    Below 1 the usual bias: the state a call acts in is not discounted (Thomas 2014, "Bias in natural actor-critic").
    Raises ValueError for lengths that differ, rewards that are not floating, a discount outside 0..1, or a reward
    beyond a rollout's calls.

    >>> returns(torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]), torch.tensor([3, 1]), 0.5).tolist()
    [[1.5, 1.0, 2.0], [3.0, 3.0, 3.0]]
    """
    _check_unit(discount=discount)
    _check_floating(reward_NC)
    _same_length(reward=reward_NC[:, 0], calls=calls_N)
    call_C = torch.arange(reward_NC.shape[1], device=calls_N.device)
    beyond_N = ((call_C >= calls_N[:, None]) & (reward_NC != 0)).any(1)
    _refuse(beyond_N, "a reward lies beyond the rollout's calls", False, calls=calls_N)
    return_NC, ahead_N = torch.empty_like(reward_NC), torch.zeros_like(reward_NC[:, 0])
    for call in reversed(range(reward_NC.shape[1])):
        return_NC[:, call] = ahead_N = reward_NC[:, call] + discount * ahead_N
    return return_NC.gather(1, torch.minimum(call_C, (calls_N - 1).clamp(min=0)[:, None]))


def token_rewards(reward_NC: Tensor, rollout_T: Tensor, call_T: Tensor, trained_T: Tensor) -> Tensor:
    """Put the reward of each call on the last trained token of that call, 0 on every other: what `gae` takes.

    reward_NC float[N, C]; a call's tokens lie in sampling order. Rollouts without a token here are another rank's.
    Raises ValueError when lengths differ, an index is outside, or a rewarded call of a rollout has no trained token.

    >>> rollout_T, call_T, trained_T = torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1]), torch.ones(3).bool()
    >>> token_rewards(torch.tensor([[0.5, 1.0]]), rollout_T, call_T, trained_T).tolist()
    [0.0, 0.5, 1.0]
    """
    _same_length(rollout=rollout_T, call=call_T, trained=trained_T)
    rollouts, calls = reward_NC.shape
    _refuse_outside(trained_T, "rollout", rollout_T, rollouts)
    _refuse_outside(trained_T, "call", call_T, calls)
    at = trained_T.nonzero().squeeze(1)
    last = torch.full((rollouts * calls,), -1, device=at.device)
    last = last.scatter_reduce(0, rollout_T[at] * calls + call_T[at], at, "amax")
    here_N = (last.view(rollouts, calls) >= 0).any(1)
    lost_N = ((last.view(rollouts, calls) < 0) & (reward_NC != 0)).any(1) & here_N
    _refuse(lost_N, "a rewarded call has no trained token", False, reward=reward_NC.sum(1))
    reward_T = torch.zeros(len(trained_T), dtype=reward_NC.dtype, device=at.device)
    reward_T[last[last >= 0]] = reward_NC.flatten()[last >= 0]
    return reward_T


def gae(reward_T: Tensor, value_T: Tensor, rollout_T: Tensor, call_T: Tensor, trained_T: Tensor,
        discount: float, trace: float) -> Tensor:  # fmt: skip
    """Generalised advantage estimation, float[T], over the trained tokens of a rollout in sampling order, detached.

    δ_t = r_t + γ_t V_{t+1} − V_t and A_t = δ_t + γ_t · trace · A_{t+1}, with V = A = 0 after the last token
    (arXiv 1506.02438; trace is its λ). A_t + V_t is what the value should have been. Order: by call, then as laid out
    (a call's tokens lie in one row).
    Departures: γ_t is `discount` where the next token belongs to another call and 1 inside a call, so a reward's worth
    does not depend on how many tokens it takes to say a word; a truncated rollout ends like any other, for no value
    of what would have followed is known.
    Raises ValueError when lengths differ, a trained value or reward is not finite, or a factor is outside 0..1.

    >>> zeros_T, trained_T, value_T = torch.zeros(3).long(), torch.ones(3).bool(), torch.full((3,), 0.5)
    >>> gae(torch.tensor([0.0, 0.0, 1.0]), value_T, zeros_T, zeros_T, trained_T, discount=1.0, trace=0.5).tolist()
    [0.125, 0.25, 0.5]
    """
    _check_unit(discount=discount, trace=trace)
    _refuse_non_finite(trained_T, reward=reward_T, value=value_T, rollout=rollout_T, call=call_T)
    at = trained_T.nonzero().squeeze(1)
    for index_T in (call_T, rollout_T):  # stable sorts, the last key first
        at = at[index_T[at].argsort(stable=True)]
    columns = [x_T[at].double() for x_T in (reward_T, value_T.detach(), rollout_T, call_T)]
    found, next_value, ahead, after = [], 0.0, 0.0, (-1, -1)
    for reward, value, rollout, call in reversed(torch.stack(columns, 1).tolist()):
        decay = 0.0 if after[0] != rollout else 1.0 if after[1] == call else discount
        ahead = reward + decay * next_value - value + decay * trace * ahead
        next_value, after = value, (rollout, call)
        found.append(ahead)
    advantage_T = torch.zeros_like(value_T)
    advantage_T[at] = torch.tensor(found[::-1], dtype=value_T.dtype, device=value_T.device)
    return advantage_T


def distill(logp_T: Tensor, teacher_T: Tensor, trained_T: Tensor, coefficient: float = 1.0) -> Tensor:
    """Advantage of on-policy distillation, float[T], detached: −coefficient · (logp − teacher), 0 where not trained.

    teacher_T is a frozen model's log-prob of the token that the student sampled. In expectation the gradient is that
    of KL(student ‖ teacher) at each state that the student visits, the states held fixed: no token is credited with
    what follows it (arXiv 2306.13649 with reverse KL; Lu et al. 2025, "On-Policy Distillation"). Reward plays no part.
    Raises ValueError when lengths differ or a trained value is not finite.

    >>> distill(torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([True])).tolist()
    [-2.0]
    """
    _refuse_non_finite(trained_T, logp=logp_T, teacher=teacher_T)
    return torch.where(trained_T, coefficient * (teacher_T - logp_T).detach(), 0.0)


def whiten(advantage_T: Tensor, trained_T: Tensor, whole_t: Tensor) -> Tensor:
    """(A − mean) / (std + 1e-6) where trained, 0 elsewhere, with the moments of whole_t: every rank's trained values.

    The mean is subtracted too, so what was exactly 0 (a group without spread) is no longer. std over n − 1, as in TRL.
    Values without spread give exactly 0. Raises ValueError when lengths differ or a value is not finite.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), torch.tensor([1.0, 3.0])).tolist()[2]
    0.0
    """
    _refuse_non_finite(trained_T, advantage=advantage_T)
    _refuse_non_finite(torch.ones_like(whole_t, dtype=torch.bool), False, whole=whole_t)
    if len(whole_t) < 2 or whole_t.max() == whole_t.min():
        return torch.zeros_like(advantage_T)
    centre, scale = whole_t.double().mean().item(), whole_t.double().std().item() + EPSILON
    return torch.where(trained_T, (advantage_T - centre) / scale, 0.0)


def overlong(length_N: Tensor, limit: int, buffer: int) -> Tensor:
    """Penalty in [−1, 0] to add to a rollout's reward: 0 up to limit − buffer tokens, then linearly to −1 at limit.

    DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13. length_N counts the sampled tokens of all calls.
    Raises ValueError unless 0 < buffer ≤ limit.

    >>> overlong(torch.tensor([70, 90, 101]), limit=100, buffer=20).tolist()
    [0.0, -0.5, -1.0]
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"overlong buffer {buffer} must lie in 1..{limit}, its limit")
    return ((limit - buffer - length_N.double()) / buffer).clamp(-1, 0)


def no_signal(reward_n: Tensor) -> str | None:
    """Why the valid rewards of one group teach nothing (every baseline equals every reward), or None when they do.

    "one_valid" (or none), "all_pass": all equal and positive, "all_fail": all equal and not positive. Such groups are
    what DAPO's dynamic sampling replaces, arXiv 2503.14476 section 3.2; there rewards are 1 and −1.
    Raises ValueError when a reward is not finite.

    >>> [no_signal(torch.tensor(rewards)) for rewards in ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0])]
    ['all_pass', 'all_fail', None, 'one_valid']
    """
    _refuse_non_finite(torch.ones_like(reward_n, dtype=torch.bool), False, reward=reward_n)
    if len(reward_n) < 2:
        return "one_valid"
    if reward_n.max() > reward_n.min():
        return None
    return "all_pass" if reward_n[0] > 0 else "all_fail"


# ---------------------------------------------------------------------------------------------------------------
# Ratios, lags and the gate
# ---------------------------------------------------------------------------------------------------------------


def log_ratio(logp_T: Tensor, behaviour_T: Tensor, trained_T: Tensor) -> Tensor:
    """log r_t = logp_T − behaviour_T where trained, exactly 0 elsewhere. Nats; differentiable in logp_T.

    logp_T is the trainer's log-prob, behaviour_T the engine's at sampling. Whatever stands at a masked position
    (NaN included) reaches neither the value nor the gradient.
    Raises ValueError when lengths differ or either is not finite at a trained position.

    >>> round(log_ratio(torch.tensor([-0.7]), torch.tensor([-1.0]), torch.tensor([True])).exp().item(), 4)
    1.3499
    """
    _refuse_non_finite(trained_T, logp=logp_T, behaviour=behaviour_T)
    return torch.where(trained_T, logp_T - behaviour_T, 0.0)


def lag(version_T: Tensor, trainer_version: int, trained_T: Tensor) -> Tensor:
    """Policy versions between the weights that sampled a token and the trainer's now; 0 where not trained.

    lag_T = trainer_version − version_T, int64, at consumption: time in a queue counts.
    Raises ValueError when lengths differ, when a trained token carries no version (negative), or when it was sampled
    by a version that the trainer has not reached.

    >>> lag(torch.tensor([3, 3, 4, -1]), 4, torch.tensor([True, True, True, False])).tolist()
    [1, 1, 0, 0]
    """
    _same_length(version=version_T, trained=trained_T)
    _refuse(trained_T & (version_T < 0), "a trained token carries no version", version=version_T)
    ahead_T = trained_T & (version_T > trainer_version)
    _refuse(ahead_T, f"a token is newer than trainer version {trainer_version}", version=version_T)
    return torch.where(trained_T, trainer_version - version_T.long(), 0)


def preset(name: str) -> dict:
    """A named gate as keyword arguments of `gate` (sources beside PRESETS).

    Raises ValueError for an unknown name, listing the known ones.

    >>> preset("tis")
    {'level': 'token', 'mode': 'trunc', 'low': 0.0, 'high': 2.0}
    """
    _one_of("gate preset", name, PRESETS)
    return dict(PRESETS[name])


def gate(level: str, mode: str, low: float, high: float, log_ratio_T: Tensor, rollout_T: Tensor, trained_T: Tensor,
         lag_T: Tensor | None = None, max_lag: int | None = None, *, statistic: str = "ratio", weight: str = "token",
         behaviour_T: Tensor | None = None) -> Decision:  # fmt: skip
    """Decide which trained tokens are kept, and with which importance weight.

    The statistic s of a token: level `token` its own, `seq` the product and `geo` the geometric mean over the trained
    tokens of its *rollout* (in float64, so the split into rows is immaterial). By default it is the ratio r:
      off               keep every trained token, weight 1 (mode and band unused)
      token mask        keep where low ≤ r_t ≤ high, weight r_t       IcePop, arXiv 2510.18855
      token clip        keep all, weight min(max(r_t, low), high)
      token trunc       keep all, weight min(r_t, high)               TIS, Yao et al. 2025; Ionides 2008
      seq, geo mask     keep the rollout where low ≤ s ≤ high; each token carries its own r_t, or with weight "rollout"
                        every token carries s: with `seq` and no band the unbiased estimator, with one `mis`
      seq, geo clip     keep all; every token carries s, clipped (trunc: from above, low unused)
    statistic "tv" or "kl" gates by the divergence of the sampled token taken alone, a Bernoulli variable of
    probability q = exp(behaviour) at the sampler and p = q·r at the trainer (arXiv 2602.04879, eqs. 13 and 14):
      tv  |p − q|            kl  q log(q/p) + (1 − q) log((1 − q)/(1 − p))
    kept where ≤ high (per token, the sum for `seq`, the mean for `geo`), weight r_t; mode mask, low 0. Departure: both
    directions are gated, whatever the advantage's sign, for a decision about a token must not depend on its reward.
    Bands are compared in log space and include their ends. max_lag (versions): a rollout whose oldest trained token
    lags more is gated whole, with reason stale, which wins over the others. Nothing here carries a gradient.
    log_ratio_T, behaviour_T float[T] nats, rollout_T int64[T], trained_T bool[T], lag_T int64[T].
    Raises ValueError for an unknown or unfitting setting, a band without 0 ≤ low ≤ 1 ≤ high (it would gate on-policy
    tokens), max_lag negative or without lag_T, lengths that differ, a value that is not finite where trained, or a
    kept weight that overflows.

    >>> hundred_T, rollout_T, trained_T = torch.full((100,), 0.1), torch.zeros(100).long(), torch.ones(100).bool()
    >>> [int(gate(level, "mask", 0.5, 2, hundred_T, rollout_T, trained_T).keep_T.sum()) for level in ("geo", "seq")]
    [100, 0]
    """
    _check_gate(level, mode, low, high, lag_T, max_lag, statistic, weight, behaviour_T)
    _same_length(rollout=rollout_T, trained=trained_T)
    _refuse_non_finite(trained_T, log_ratio=log_ratio_T)
    log_ratio_T = torch.where(trained_T, log_ratio_T.detach(), 0.0)
    reason_T = torch.full_like(trained_T, MASKED, dtype=torch.int8).masked_fill(trained_T, KEPT)
    own_T = log_ratio_T if statistic == "ratio" else _divergence(statistic, log_ratio_T, behaviour_T, trained_T)
    statistic_T = _statistic(level, own_T, rollout_T, trained_T)
    if level != "off" and mode == "mask":
        least, most, beyond = -math.inf, high, DIVERGENCE
        if statistic == "ratio":
            least, most, beyond = math.log(low) if low else -math.inf, math.log(high), RATIO_HIGH
        reason_T = reason_T.masked_fill(trained_T & (statistic_T < least), RATIO_LOW)
        reason_T = reason_T.masked_fill(trained_T & (statistic_T > most), beyond)
    if max_lag is not None:
        _same_length(lag=lag_T, rollout=rollout_T)
        oldest_T = _max_by(rollout_T, torch.where(trained_T, lag_T, 0), _extent(rollout_T))[rollout_T]
        reason_T = reason_T.masked_fill(trained_T & (oldest_T > max_lag), STALE)
    keep_T = reason_T == KEPT
    carried_T = statistic_T if mode != "mask" or weight == "rollout" else log_ratio_T
    return Decision(keep_T, _weight(level, mode, low, high, carried_T, keep_T), reason_T)


def _check_gate(level, mode, low, high, lag_T, max_lag, statistic, weight, behaviour_T) -> None:
    for what, value, known in (("level", level, LEVELS), ("mode", mode, MODES),
                               ("statistic", statistic, STATISTICS), ("weight", weight, WEIGHTS)):  # fmt: skip
        _one_of(f"gate {what}", value, known)
    if statistic == "ratio" and not 0 <= low <= 1 <= high:
        raise ValueError(f"gate band [{low}, {high}] must satisfy 0 <= low <= 1 <= high")
    divergence = level in LEVELS[1:] and mode == "mask" and low == 0 <= high and weight == "token"
    if statistic != "ratio" and (not divergence or behaviour_T is None):
        raise ValueError(f"gate statistic {statistic!r} needs a level, mode mask, weight token, a band [0, high] and "
                         f"behaviour_T; got {level}, {mode}, {weight}, [{low}, {high}]")  # fmt: skip
    if weight == "rollout" and level not in ("seq", "geo"):
        raise ValueError(f"gate weight 'rollout' needs level seq or geo, got {level!r}")
    if max_lag is not None and (lag_T is None or max_lag < 0):
        raise ValueError(f"max_lag={max_lag} needs lag_T and must not be negative")


def _divergence(statistic: str, log_ratio_T: Tensor, behaviour_T: Tensor, trained_T: Tensor) -> Tensor:
    """Divergence between sampler and trainer of "this token or another", float64; 0 where not trained."""
    _refuse_non_finite(trained_T, behaviour=behaviour_T)
    sampler_T = torch.where(trained_T, behaviour_T.detach().double(), 0.0)
    # Rounding may lift a probability to 1 or above: a certainty in float32, and any step from it infinitely far.
    q_T, p_T = (logp_T.exp().clamp(max=1 - 2**-24) for logp_T in (sampler_T, sampler_T + log_ratio_T))
    if statistic == "tv":
        return (p_T - q_T).abs()
    pairs = ((q_T, p_T), (1 - q_T, 1 - p_T))
    return sum(torch.xlogy(a_T, a_T) - torch.xlogy(a_T, b_T) for a_T, b_T in pairs)


def rollout_mean(value_T: Tensor, rollout_T: Tensor, trained_T: Tensor) -> Tensor:
    """Mean over the trained tokens of a rollout, whatever rows they lie in, given to every token of it; float64 inside.

    Of log r it is the logarithm of `geo`; of log ρ it is what the surrogate `gspo` takes. A rollout without trained
    tokens gets 0. Raises ValueError when lengths differ or a trained value is not finite.

    >>> rollout_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([0, 0, 1]), torch.tensor([True, True, False])).tolist()
    [2.0, 2.0, 0.0]
    """
    _same_length(rollout=rollout_T, trained=trained_T)
    _refuse_non_finite(trained_T, value=value_T)
    return _statistic("geo", torch.where(trained_T, value_T, 0.0), rollout_T, trained_T)


def _statistic(level: str, value_T: Tensor, rollout_T: Tensor, trained_T: Tensor) -> Tensor:
    """The gated statistic (of a ratio: its logarithm), given to every token of its rollout."""
    if level in ("off", "token"):
        return value_T
    rollouts = _extent(rollout_T)
    total_N = _sum_by(rollout_T, value_T.double(), rollouts)
    if level == "geo":
        total_N = total_N / _sum_by(rollout_T, trained_T.double(), rollouts).clamp(min=1)
    # Back in the input's precision, a one-token rollout meets the band exactly as a token does.
    return total_N.to(value_T.dtype)[rollout_T]


def _weight(level: str, mode: str, low: float, high: float, carried_T: Tensor, keep_T: Tensor) -> Tensor:
    if level == "off":
        return keep_T.to(carried_T.dtype)
    ratio_T = carried_T.exp()
    if mode != "mask":
        ratio_T = ratio_T.clamp(min=low if mode == "clip" else None, max=high)
    _refuse(keep_T & ~torch.isfinite(ratio_T), "an importance weight overflows", log_ratio=carried_T)
    return torch.where(keep_T, ratio_T, 0.0)


# ---------------------------------------------------------------------------------------------------------------
# The loss and its denominator
# ---------------------------------------------------------------------------------------------------------------


def kept_per_group(keep_T: Tensor, group_T: Tensor, groups: int) -> Tensor:
    """Kept tokens of each group on this rank, int64[G]; its sum over ranks is what `denominator("group")` needs.

    Raises ValueError when lengths differ or an index lies outside 0..G-1.

    >>> kept_per_group(torch.tensor([True, True, False]), torch.tensor([0, 1, 1]), 3).tolist()
    [1, 1, 0]
    """
    _same_length(keep=keep_T, group=group_T)
    _refuse_outside(torch.ones_like(keep_T), "group", group_T, groups)
    return _sum_by(group_T, keep_T.long(), groups)


def denominator(kind: str, keep_T: Tensor, rollout_T: Tensor, group_T: Tensor | None = None,
                constant: float | None = None, *, kept_G: Tensor | None = None,
                world_size: int | None = None) -> Tensor:  # fmt: skip
    """This rank's part of the one global denominator D, a float64 scalar; the sum over ranks is D, exact for counts.

    For every kind the batch's loss is Σ over kept tokens of loss_T, divided by D:
      token     D = kept tokens                            a mean over tokens
      rollout   D = rollouts with at least one kept token  a mean over rollouts of the *sum* over their tokens
      group     D = groups with at least one kept token    a mean over groups of the sum over all their tokens
      constant  D = constant                               Dr. GRPO, arXiv 2503.20783 (its length bound × rollouts)
    What the gate removes leaves D too, except for `constant`. Lengths are not divided out per rollout: a mean of
    means weighs a token by the length of its neighbours.
    A rollout lives on one rank, a group may not: the part of a group is the share of its kept tokens held here, so
    `group` needs group_T and kept_G, `kept_per_group` already summed over ranks. `constant` needs world_size, and
    each rank's part is constant / world_size. A rank without tokens gives 0 (or its share of the constant).
    Raises ValueError for an unknown kind, a missing argument, a constant that is not positive, or kept_G smaller
    than this rank's own count (it was not summed).

    >>> keep_T, rollout_T = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 2])
    >>> [denominator(kind, keep_T, rollout_T).item() for kind in ("token", "rollout")]
    [3.0, 2.0]
    """
    _one_of("denominator", kind, DENOMINATORS)
    _same_length(keep=keep_T, rollout=rollout_T)
    if kind == "token":
        return keep_T.sum().double()
    if kind == "rollout":
        return (_sum_by(rollout_T, keep_T.long(), _extent(rollout_T)) > 0).sum().double()
    if kind == "group":
        if group_T is None or kept_G is None:
            raise ValueError("denominator group needs group_T and kept_G, the sum of kept_per_group over ranks")
        own_G = kept_per_group(keep_T, group_T, len(kept_G))
        _refuse(own_G > kept_G, "kept_G is smaller than this rank's own count", own=own_G, kept=kept_G)
        return (own_G.double() / kept_G.clamp(min=1)).sum()
    if not constant or not world_size or constant <= 0 or world_size <= 0:
        raise ValueError(f"denominator constant needs constant > 0 and world_size > 0, got {constant} and {world_size}")
    return torch.tensor(constant / world_size, dtype=torch.float64, device=keep_T.device)


def surrogate(kind: str, logp_T: Tensor, proximal_T: Tensor | None, advantage_T: Tensor, weight_T: Tensor,
              clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = math.inf,
              rollout_log_rho_T: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Per-token loss before the denominator, and where its clip is active.

      reinforce  −w · A · logp                                                    Williams 1992
      ppo        −w · min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high) · A)           arXiv 1707.06347
                 and where A < 0 not below dual_clip · A: dual clip               arXiv 1912.09729
      gspo       ppo with ρ = the rollout's geometric mean of ρ, clipped as one   arXiv 2507.18071, its GSPO-token
      cispo      −w · clip(ρ, 1 − clip_low, 1 + clip_high) · A · logp             arXiv 2506.13585, eqs. 4 and 5
    with ρ = exp(logp − proximal), proximal_T the trainer's own log-prob at the start of the batch, and w the gate's
    weight (proximal over behaviour), held constant: decoupled PPO, arXiv 2110.00641. reinforce needs no proximal_T
    (it may be None), gspo needs rollout_log_rho_T = `rollout_mean` of log ρ under the current weights; its value is
    that mean's, its gradient each token's own. Departure: the paper's gspo divides by the rollout's length, here the
    denominator alone decides. Where ppo or gspo clips, the gradient is 0; where cispo clips, only its factor stops.
    All float[T]; loss_T is differentiable in logp_T, clipped_T is bool.
    A token of weight 0 contributes a loss and a gradient of exactly 0, whatever its other values.
    Raises ValueError for an unknown kind, lengths that differ, a value that is not finite where the weight is not 0,
    or a clip range outside 0 ≤ clip_low ≤ 1, 0 ≤ clip_high < dual_clip − 1.

    >>> loss_T, clipped_T = surrogate("ppo", torch.tensor([1.5]).log(), torch.zeros(1), torch.ones(1), torch.ones(1))
    >>> round(loss_T.item(), 4), clipped_T.item()
    (-1.2, True)
    """
    _one_of("surrogate", kind, SURROGATES)
    if not (0 <= clip_low <= 1 and 0 <= clip_high < dual_clip - 1):
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}, dual_clip={dual_clip}: "
                         "need 0 <= clip_low <= 1 and 0 <= clip_high < dual_clip - 1")  # fmt: skip
    proximal_T = logp_T.detach() if kind == "reinforce" else proximal_T
    mean_T = rollout_log_rho_T if kind == "gspo" else torch.zeros_like(logp_T)
    live_T = weight_T != 0
    _refuse_non_finite(live_T, logp=logp_T, proximal=proximal_T, advantage=advantage_T, weight=weight_T,
                       rollout_log_rho=mean_T)  # fmt: skip
    scale_T = -weight_T * torch.where(live_T, advantage_T, 0.0)
    own_T, log_rho_T = torch.where(live_T, logp_T, 0.0), torch.where(live_T, logp_T - proximal_T, 0.0)
    if kind == "reinforce":
        return scale_T * own_T, torch.zeros_like(live_T)
    if kind == "cispo":
        rho_T = log_rho_T.detach().exp()
        bound_T = rho_T.clamp(1 - clip_low, 1 + clip_high)
        return scale_T * bound_T * own_T, bound_T != rho_T
    if kind == "gspo":
        log_rho_T = torch.where(live_T, mean_T.detach(), 0.0) + (own_T - own_T.detach())  # adds exactly 0, with a slope
    gain_T, clipped_T = _clipped_ratio(log_rho_T, scale_T, 1 - clip_low, 1 + clip_high, dual_clip)
    return scale_T * gain_T, clipped_T


def _clipped_ratio(log_rho_T: Tensor, scale_T: Tensor, low: float, high: float, dual: float) -> tuple[Tensor, Tensor]:
    """The ρ or the bound that PPO's minimum selects, and where it is the bound. scale_T = −w·A has the sign of −A."""
    rho_T = log_rho_T.detach().exp()
    over_T, under_T = (scale_T < 0) & (rho_T > high), (scale_T > 0) & (rho_T < low)
    worst_T = (scale_T > 0) & (rho_T > dual)
    bound_T = torch.full_like(rho_T, low).masked_fill(over_T, high).masked_fill(worst_T, dual)
    clipped_T = over_T | under_T | worst_T
    # Clipped entries, and those that nothing multiplies, leave before the exp that carries a gradient: an overflowing ρ
    # would be 0 · inf.
    idle_T = clipped_T | (scale_T == 0)
    return torch.where(clipped_T, bound_T, log_rho_T.masked_fill(idle_T, 0.0).exp()), clipped_T


def value_loss(value_T: Tensor, target_T: Tensor, keep_T: Tensor) -> Tensor:
    """(value − target)² / 2 where kept, exactly 0 elsewhere, before coefficient and denominator.

    target_T float[T] is gae's advantage plus the value then, held fixed.
    Raises ValueError when lengths differ or a kept value is not finite.

    >>> value_loss(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([True])).tolist()
    [2.0]
    """
    _refuse_non_finite(keep_T, value=value_T, target=target_T)
    return torch.where(keep_T, value_T - target_T.detach(), 0.0).square() / 2


def policy_loss(loss_T: Tensor, keep_T: Tensor, denominator: Tensor | float) -> Tensor:
    """Σ loss_T over kept tokens / denominator: this micro-batch's part of the batch's loss, a scalar.

    denominator is the *global* number, summed over ranks and micro-batches before the first backward; parts of the
    loss then add up (sum gradients over ranks, do not average them). A token that is not kept has gradient exactly
    0, even where its loss is NaN. With a denominator of 0 nothing was kept anywhere: the loss is 0, attached to the
    graph, with zero gradient, so that every rank can still run backward.
    Raises ValueError when lengths differ, a kept loss is not finite, the denominator is negative or NaN, or it is 0
    while a token is kept.

    >>> policy_loss(torch.tensor([-1.0] * 2 + [1.0] * 6), torch.ones(8).bool(), 8).item()
    0.5
    """
    _refuse_non_finite(keep_T, loss=loss_T)
    total = torch.where(keep_T, loss_T, 0.0).sum()
    scale = float(denominator)
    if not scale >= 0 or (scale == 0 and keep_T.any()):
        raise ValueError(f"denominator {scale} for {int(keep_T.sum())} kept tokens")
    return total / scale if scale else total


def kl(kind: str, logp_T: Tensor, reference_T: Tensor, trained_T: Tensor | None = None) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) on tokens sampled from the policy; exactly 0 where not trained.

    With log r = reference − logp (nats; Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx):
      k1  −log r             unbiased value, can be negative; as a loss its expected gradient is 0, not the KL's
      k2  (log r)² / 2       biased value; as a loss its expected gradient is the KL's, the states visited held fixed
      k3  r − 1 − log r      unbiased value, never negative; as a loss its gradient is that of KL(reference ‖ policy)
    Inside the reward only k1 gives the KL's gradient, and gives it for whole sequences: an unbiased value does not make
    an unbiased gradient, and k3 there can point uphill (tests/test_estimators.py). So k1 belongs inside the reward, k2
    in the loss; k3 in the loss pulls the other way around (GRPO's choice). trained_T None: every token is trained.
    Raises ValueError for an unknown kind, lengths that differ, or a value that is not finite where trained.

    >>> round(kl("k3", torch.tensor([-1.0]), torch.tensor([-1.5])).item(), 4)
    0.1065
    """
    _one_of("kl", kind, KLS)
    trained_T = torch.ones_like(logp_T, dtype=torch.bool) if trained_T is None else trained_T
    _refuse_non_finite(trained_T, logp=logp_T, reference=reference_T)
    log_r_T = torch.where(trained_T, reference_T - logp_T, 0.0)
    return {"k1": lambda: -log_r_T, "k2": lambda: log_r_T.square() / 2, "k3": lambda: log_r_T.expm1() - log_r_T}[kind]()


def adapt_kl(coefficient: float, observed: float, target: float) -> float:
    """The next KL coefficient: β (1 + 0.1 · clip(observed / target − 1, −0.2, 0.2)), once a step.

    Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with their K_β = 0.1; observed and target in nats per token
    (there per sample). Raises ValueError unless observed is finite and target positive.

    >>> round(adapt_kl(0.5, observed=0.3, target=0.1), 4), round(adapt_kl(0.5, observed=0.1, target=0.1), 4)
    (0.51, 0.5)
    """
    if not (math.isfinite(observed) and target > 0):
        raise ValueError(f"observed KL {observed} must be finite, its target {target} positive")
    return coefficient * (1 + 0.1 * min(0.2, max(-0.2, observed / target - 1)))


# ---------------------------------------------------------------------------------------------------------------
# Meters. They take whole tensors: concatenate over ranks (rollout_T offset per rank), then call once. An empty
# input gives NaN, which says "no value"; a share of nothing is not 0.
# ---------------------------------------------------------------------------------------------------------------


def mismatch(log_ratio_T: Tensor, trained_T: Tensor) -> dict[str, float]:
    """How far the trainer's log-probs are from the sampler's, over trained tokens only (nats).

    mean, p99 (nearest rank) and max of |log r|; k1 = mean(−log r) and k3 = mean(r − 1 − log r) estimate
    KL(sampler ‖ trainer) (Schulman 2020). Masked text of any length changes nothing.
    Raises ValueError when lengths differ or a trained value is not finite.

    >>> mismatch(torch.tensor([0.25, -0.75]), torch.tensor([True, True]))["mean"]
    0.5
    """
    _refuse_non_finite(trained_T, log_ratio=log_ratio_T)
    log_r = log_ratio_T.detach()[trained_T].double()
    size = log_r.abs().sort().values
    return {"mean": float(size.mean()), "p99": _percentile(size, 99), "max": _percentile(size, 100),
            "k1": float(-log_r.mean()), "k3": float((log_r.expm1() - log_r).mean())}  # fmt: skip


def gate_metrics(decision: Decision, log_ratio_T: Tensor, lag_T: Tensor, rollout_T: Tensor) -> dict[str, float]:
    """What the gate did, over the trained tokens (masked ones are no part of any share).

    kept, ratio_low, ratio_high, stale, divergence  share of trained tokens with that reason; they sum to 1
    gated                               1 − kept
    rollouts_gated                      share of rollouts with trained tokens of which none is kept
    ess                                 (Σw)² / (n Σw²) over the n kept tokens, 1 when all weights are equal
                                        (Kish 1965); it measures survivors, so read it beside `kept`
    ratio_p01, _p50, _p99, _max         nearest-rank percentiles of r_t, before the gate
    lag_mean, lag_max                   policy versions
    lag_0 … lag_7, lag_8plus            share of trained tokens at that lag
    Raises ValueError when lengths differ.

    >>> decision = gate(**preset("icepop"), log_ratio_T=torch.tensor([0.0, 3.0]), rollout_T=torch.tensor([0, 1]),
    ...                 trained_T=torch.tensor([True, True]))
    >>> metrics = gate_metrics(decision, torch.tensor([0.0, 3.0]), torch.tensor([0, 2]), torch.tensor([0, 1]))
    >>> [metrics[key] for key in ("kept", "ratio_high", "rollouts_gated", "ess", "lag_max", "lag_2")]
    [0.5, 0.5, 0.5, 1.0, 2.0, 0.5]
    """
    _same_length(keep=decision.keep_T, log_ratio=log_ratio_T, lag=lag_T, rollout=rollout_T)
    trained_T = decision.reason_T != MASKED
    reason = decision.reason_T[trained_T]
    shares = {name: float((reason == i).double().mean()) for i, name in enumerate(REASONS) if i != MASKED}
    rollouts, survivors = (len(rollout_T[mask_T].unique()) for mask_T in (trained_T, decision.keep_T))
    weight = decision.weight_T[decision.keep_T].double()
    ratio = log_ratio_T.detach()[trained_T].double().exp().sort().values
    lag = lag_T[trained_T]
    lags = torch.bincount(lag.clamp(max=LAG_BINS), minlength=LAG_BINS + 1).double() / len(lag)
    bins = [*map(str, range(LAG_BINS)), f"{LAG_BINS}plus"]
    return {**shares, "gated": 1 - shares["kept"], "rollouts_gated": 1 - survivors / rollouts if rollouts else math.nan,
            "ess": float(weight.sum().square() / (len(weight) * weight.square().sum())),
            **{f"ratio_p{percent:02}": _percentile(ratio, percent) for percent in (1, 50, 99)},
            "ratio_max": _percentile(ratio, 100), "lag_mean": float(lag.double().mean()),
            "lag_max": _percentile(lag.sort().values, 100),
            **{f"lag_{name}": share for name, share in zip(bins, lags.tolist(), strict=True)}}  # fmt: skip
