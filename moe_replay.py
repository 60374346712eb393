"""Rollout routing replay (R3, arXiv 2510.11370): the trainer uses the experts that the engine chose.

The engine and the trainer compute the same router scores up to rounding, and near a tie rounding picks another
expert. A token whose experts differ is a different function of the weights, so its importance ratio is noise.
Replay removes that: while a router runs in the trainer, its final top-k *selection* is answered with the recorded
experts; scores, normalisation and gradients stay the model's own.

Three parts, in the order a route travels:
  1. alignment: routes of one engine call are laid down by absolute position in a segment (``lay_down``);
  2. packing: routes of several rows become one micro-batch, exactly as their tokens do (``pack``);
  3. replay: ``RouteReplay`` answers the routers' top-k during forward *and* recomputation.

Legend: T tokens, L mixture-of-experts layers, K experts per token, E experts in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

TOPK = (torch.topk, torch.Tensor.topk)
MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""What transformers' configs call E and K."""


# ---------------------------------------------------------------------------------------------- alignment


def route_dtype(num_experts: int) -> type[np.unsignedinteger]:
    """The narrowest dtype that holds an expert id: uint8 up to 256 experts, else uint16."""
    return np.uint8 if num_experts <= 256 else np.uint16


def check_routes(experts_TLK: np.ndarray, num_experts: int) -> None:
    """Raise ``ValueError`` unless every row holds K distinct expert ids below E.

    An engine that failed to capture returns zeros, which are not distinct for K > 1, so they cannot pass as routes.
    """
    ordered_TLK = np.sort(experts_TLK, axis=-1)
    bad_TL = (ordered_TLK[..., 1:] == ordered_TLK[..., :-1]).any(-1)
    bad_TL |= (ordered_TLK[..., 0] < 0) | (ordered_TLK[..., -1] >= num_experts)
    if bad_TL.any():
        position, layer = np.argwhere(bad_TL)[0]
        raise ValueError(
            f"route at position {position}, layer {layer} is {experts_TLK[position, layer].tolist()}: "
            f"expected {experts_TLK.shape[-1]} distinct expert ids below {num_experts}"
        )


def extend(experts_TLK: np.ndarray, known_T: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """A segment's arrays made as long as its ``num_tokens`` tokens; the added rows are unknown."""
    missing = num_tokens - len(known_T)
    blank = np.zeros((missing, *experts_TLK.shape[1:]), experts_TLK.dtype)
    return np.concatenate([experts_TLK, blank]), np.concatenate([known_T, np.zeros(missing, bool)])


def lay_down(experts_TLK: np.ndarray, known_T: np.ndarray, routes_SLK: np.ndarray) -> np.ndarray:
    """Write the routes of positions 0..S-1 into a segment's arrays, first writer wins, in place.

    Returns the conflicts: positions already known with a different route (they happen when a pause lets new weights
    prefill old tokens again). Example: 5 known-to-be tokens of a first turn give 4 rows, so position 4
    stays unknown until the second turn's call, whose row 4 is then the first to be written there.

    Raises ``ValueError`` when there are more routes than tokens or the layer or expert counts differ.
    """
    count = len(routes_SLK)
    if count > len(known_T) or routes_SLK.shape[1:] != experts_TLK.shape[1:]:
        raise ValueError(f"routes of shape {routes_SLK.shape} do not fit a segment of shape {experts_TLK.shape}")
    known_S = known_T[:count]
    # A set of experts is a route: engines list it by descending score, which rounding may reorder.
    differs_S = (np.sort(experts_TLK[:count], -1) != np.sort(routes_SLK, -1)).any((1, 2))
    conflicts = np.flatnonzero(differs_S & known_S)
    experts_TLK[:count][~known_S] = routes_SLK[~known_S]
    known_T[:count] = True
    return conflicts


# ------------------------------------------------------------------------------------------------ packing


def spread(num_tokens: int, num_layers: int, experts_per_token: int, num_experts: int) -> np.ndarray:
    """Routes for padding tokens, ``[T, L, K]``: distinct experts, loads that differ by at most one per layer."""
    ids_TK = np.arange(num_tokens * experts_per_token).reshape(num_tokens, experts_per_token) % num_experts
    return np.repeat(ids_TK[:, None], num_layers, axis=1).astype(route_dtype(num_experts))


def coverage(known: list[np.ndarray]) -> torch.Tensor:
    """Positions of rows (``known_T`` each) that are replayed, live as a row's last, and live elsewhere, ``[3]``.

    The last token of a row was sampled and never forwarded, so it has no route, and nothing behind it would need one.
    Any other gap is the engine's. Example: ``[[True, True, False], [True, False, False]]`` gives 3, 2 and 1.
    """
    unknown, last = sum(int((~known_T).sum()) for known_T in known), sum(int(~known_T[-1]) for known_T in known)
    return torch.tensor([sum(map(len, known)) - unknown, last, unknown - last], dtype=torch.float64)


def pack(routes: list[tuple[np.ndarray, np.ndarray]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate rows' ``(experts [T, L, K], known [T])`` in row order, as the rows' tokens are.

    Returns ``experts_LTK`` (layer first: a router reads its own layer; as narrow as they came, because a batch's wait
    on the device) and ``known_T`` bool.
    """
    experts_TLK = np.concatenate([experts for experts, _ in routes])
    known_T = np.concatenate([known for _, known in routes])
    experts_LTK = torch.from_numpy(np.ascontiguousarray(experts_TLK.transpose(1, 0, 2)))
    return experts_LTK.to(device), torch.from_numpy(known_T).to(device)


# ------------------------------------------------------------------------------------------------- replay


class Select(TorchFunctionMode):
    """While active, answers ``topk(k=K)`` over ``scores_TE`` with ``answer(live_TK)`` and the scores of those experts.

    Group-limited routers take other top-k as well (of groups, of a group's experts): shapes tell them apart. They mask
    the scores of groups that lost before the final selection; an expert that is given has its score, masked or not.
    """

    def __init__(self, num_experts: int, experts_per_token: int, answer: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.num_experts, self.experts_per_token, self.answer = num_experts, experts_per_token, answer
        self.masked: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What a masked fill gave, and what of."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func not in TOPK + MASKED_FILL:
            return out
        scores_TE = args[0] if args else kwargs["input"]
        if func in MASKED_FILL:
            self.masked.append((out, scores_TE))
            return out
        shape = scores_TE.ndim, scores_TE.shape[-1], out.indices.shape[-1]
        if shape != (2, self.num_experts, self.experts_per_token):
            return out
        indices_TK = self.answer(out.indices)
        scores_TE = next((whole for masked, whole in self.masked if masked is scores_TE), scores_TE)
        return torch.return_types.topk((scores_TE.gather(1, indices_TK), indices_TK))


def expert_counts(config) -> tuple[int, int] | None:
    """``(num_experts, experts_per_token)`` of a transformers config, or None for a dense model.

    Raises ``ValueError`` where a config lists a number for each layer (HunYuan's may) and they differ.
    """
    counts = []
    for names in (EXPERTS, PER_TOKEN):
        value = next((vars(config)[name] for name in names if vars(config).get(name)), 0)
        alike = {*value} if isinstance(value, list) else {value}
        if len(alike) > 1:
            raise ValueError(f"layers differ in {' or '.join(names)}: {value}; replay takes one number for all")
        counts.append(alike.pop())
    return (counts[0], counts[1]) if counts[0] > 1 and counts[1] else None


def find_routers(model: nn.Module, num_experts: int, experts_per_token: int, forward: Callable[[], object]):
    """The modules that select experts, in the order they run, found by running ``forward`` once: no model is named.

    Raises ``ValueError`` unless each of them takes the top K of E scores once.
    """
    running: list[nn.Module] = []
    found: list[nn.Module] = []

    def note(live_TK: torch.Tensor) -> torch.Tensor:
        found.append(running[-1])
        return live_TK

    hooks: list[RemovableHandle] = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, _args: running.append(module)))
        hooks.append(module.register_forward_hook(lambda _module, _args, _out: (running.pop(), None)[1]))
    try:
        with torch.no_grad(), Select(num_experts, experts_per_token, note):
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    if not found or len(set(found)) != len(found):
        raise ValueError(
            f"expected each router to take the top {experts_per_token} of {num_experts} scores once per forward, found "
            f"{len(found)} selections by {len(set(found))} modules; this model cannot be replayed (--replay False)"
        )
    return found


class RouteReplay:
    """Replays recorded routes in a transformers model's own routers (``routers``, in layer order)."""

    def __init__(self, model: nn.Module, num_experts: int, experts_per_token: int, forward: Callable[[], object]):
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.current: tuple[torch.Tensor, torch.Tensor, bool] | None = None
        self.modes: list[Select] = []
        self.routers = find_routers(model, num_experts, experts_per_token, forward)
        self.agreed_L: list[torch.Tensor | int] = [0] * len(self.routers)
        """Choices that live routers would have made alike, and below, of how many. Sums stay on the device."""
        self.compared = 0
        for layer, router in enumerate(self.routers):
            router.register_forward_pre_hook(lambda _module, _args, layer=layer: self.enter(layer))
            router.register_forward_hook(lambda _module, _args, _out: self.leave(), always_call=True)

    def take_agreement(self) -> torch.Tensor:
        """Choices that agreed in each layer and, last, the number compared, ``[L + 1]``; the count starts anew."""
        out = torch.tensor([*map(float, self.agreed_L), self.compared], dtype=torch.float64)
        self.agreed_L, self.compared = [0] * len(self.routers), 0
        return out

    @contextmanager
    def use(self, experts_LTK: torch.Tensor, known_T: torch.Tensor, metered: bool = False) -> Iterator[None]:
        """Replay these routes in every forward, and recomputation, inside the block; unknown rows route live.

        ``metered`` adds the block's one forward to the meter (a training forward runs twice under checkpointing).
        Raises ``ValueError`` when the routes' layers are not the model's, or K differs.
        """
        if experts_LTK.shape[0] != len(self.routers) or experts_LTK.shape[2] != self.experts_per_token:
            raise ValueError(
                f"routes have {experts_LTK.shape[0]} layers of {experts_LTK.shape[2]} experts, "
                f"the model has {len(self.routers)} routers of {self.experts_per_token}"
            )
        self.current = experts_LTK, known_T, metered
        if metered:
            self.compared += int(known_T.sum()) * self.experts_per_token
        try:
            yield
        finally:
            self.current = None

    def enter(self, layer: int) -> None:
        """A router starts: answer its selection until it ends."""
        if self.current is None:
            return
        experts_LTK, known_T, metered = self.current

        def answer(live_TK: torch.Tensor) -> torch.Tensor:
            recorded_TK = experts_LTK[layer].long()
            if live_TK.shape != recorded_TK.shape:
                raise ValueError(
                    f"routes of shape {tuple(recorded_TK.shape)} for a selection of {tuple(live_TK.shape)}"
                )
            if metered:
                same_TK = (live_TK[:, :, None] == recorded_TK[:, None, :]).any(-1)
                self.agreed_L[layer] = self.agreed_L[layer] + (same_TK & known_T[:, None]).sum()
            return torch.where(known_T[:, None], recorded_TK, live_TK)

        mode = Select(self.num_experts, self.experts_per_token, answer)
        self.modes.append(mode)
        mode.__enter__()

    def leave(self) -> None:
        """A router ended (or raised)."""
        if self.modes:
            self.modes.pop().__exit__(None, None, None)
