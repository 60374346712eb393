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


def lay_down(experts_TLK: np.ndarray, known_T: np.ndarray, routes_SLK: np.ndarray) -> int:
    """Write the routes of positions 0..S-1 into a segment's arrays, first writer wins, in place.

    Returns the number of conflicts: positions already known with a different route (they happen when a pause lets
    new weights prefill old tokens again). Example: 5 known-to-be tokens of a first turn give 4 rows, so position 4
    stays unknown until the second turn's call, whose row 4 is then the first to be written there.

    Raises ``ValueError`` when there are more routes than tokens or the layer or expert counts differ.
    """
    count = len(routes_SLK)
    if count > len(known_T) or routes_SLK.shape[1:] != experts_TLK.shape[1:]:
        raise ValueError(f"routes of shape {routes_SLK.shape} do not fit a segment of shape {experts_TLK.shape}")
    known_S = known_T[:count]
    # A set of experts is a route: engines list it by descending score, which rounding may reorder.
    differs_S = (np.sort(experts_TLK[:count], -1) != np.sort(routes_SLK, -1)).any((1, 2))
    conflicts = int((differs_S & known_S).sum())
    experts_TLK[:count][~known_S] = routes_SLK[~known_S]
    known_T[:count] = True
    return conflicts


# ------------------------------------------------------------------------------------------------ packing


def spread(num_tokens: int, num_layers: int, experts_per_token: int, num_experts: int) -> np.ndarray:
    """Routes for padding tokens, ``[T, L, K]``: distinct experts, loads that differ by at most one per layer."""
    ids_TK = np.arange(num_tokens * experts_per_token).reshape(num_tokens, experts_per_token) % num_experts
    return np.repeat(ids_TK[:, None], num_layers, axis=1).astype(route_dtype(num_experts))


def pack(routes: list[tuple[np.ndarray, np.ndarray]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate rows' ``(experts [T, L, K], known [T])`` in row order, as the rows' tokens are.

    Returns ``experts_LTK`` int64 (layer first: a router reads its own layer) and ``known_T`` bool.
    """
    experts_TLK = np.concatenate([experts for experts, _ in routes]).astype(np.int64)
    known_T = np.concatenate([known for _, known in routes])
    experts_LTK = torch.from_numpy(np.ascontiguousarray(experts_TLK.transpose(1, 0, 2)))
    return experts_LTK.to(device), torch.from_numpy(known_T).to(device)


# ------------------------------------------------------------------------------------------------- replay


class Select(TorchFunctionMode):
    """While active, answers ``topk(k=K)`` over E scores with given experts and counts how often they agree."""

    def __init__(self, num_experts: int, experts_per_token: int, answer: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.num_experts, self.experts_per_token, self.answer = num_experts, experts_per_token, answer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # Group-limited routers also take top-k over groups and top-2 within a group: shapes tell them apart.
        if func not in TOPK or out.indices.shape[-1] != self.experts_per_token:
            return out
        scores_TE = args[0] if args else kwargs["input"]
        if scores_TE.shape[-1] != self.num_experts:
            return out
        indices_TK = self.answer(out.indices)
        return torch.return_types.topk((scores_TE.gather(-1, indices_TK), indices_TK))


def expert_counts(config) -> tuple[int, int] | None:
    """``(num_experts, experts_per_token)`` of a transformers config, or None for a dense model."""
    names = vars(config)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if names.get(name):
            return names[name], config.num_experts_per_tok
    return None


class RouteReplay:
    """Replays recorded routes in a transformers model's own routers.

    Routers are found by running ``forward`` once and noting which module asked for the top K of E scores, so any
    router that selects with top-k is supported and no model is named here. ``routers`` is in layer order.
    """

    def __init__(self, model: nn.Module, num_experts: int, experts_per_token: int, forward: Callable[[], object]):
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.current: tuple[torch.Tensor, torch.Tensor, bool] | None = None
        self.modes: list[Select] = []
        self.routers = self.find_routers(model, forward)
        self.reset_meters()
        for layer, router in enumerate(self.routers):
            router.register_forward_pre_hook(lambda _module, _args, layer=layer: self.enter(layer))
            router.register_forward_hook(lambda _module, _args, _out: self.leave(), always_call=True)

    def find_routers(self, model: nn.Module, forward: Callable[[], object]) -> list[nn.Module]:
        """The modules that select experts, in the order they run. Raises ``ValueError`` when there are none."""
        running: list[nn.Module] = []
        found: list[nn.Module] = []

        def note(live_TK: torch.Tensor) -> torch.Tensor:
            found.append(running[-1])
            return live_TK

        hooks: list[RemovableHandle] = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(lambda module, _args: running.append(module)))
            hooks.append(module.register_forward_hook(lambda _module, _args, _out: (running.pop(), None)[1]))
        with torch.no_grad(), Select(self.num_experts, self.experts_per_token, note):
            forward()
        for hook in hooks:
            hook.remove()
        if not found or len(set(found)) != len(found):
            raise ValueError(
                f"expected each router to take the top {self.experts_per_token} of {self.num_experts} scores once per "
                f"forward, found {len(found)} selections by {len(set(found))} modules; this model cannot be replayed"
            )
        return found

    def reset_meters(self) -> None:
        """Start counting agreement anew."""
        self.agreed_L = torch.zeros(len(self.routers), dtype=torch.float64)
        self.live_rows = self.replayed_rows = 0

    @contextmanager
    def use(self, experts_LTK: torch.Tensor, known_T: torch.Tensor, metered: bool = False) -> Iterator[None]:
        """Replay these routes in every forward, and recomputation, inside the block; unknown rows route live.

        ``metered`` adds the block's one forward to the meters (a training forward runs twice under checkpointing).
        Raises ``ValueError`` when the routes' layers are not the model's, or K differs.
        """
        if experts_LTK.shape[0] != len(self.routers) or experts_LTK.shape[2] != self.experts_per_token:
            raise ValueError(
                f"routes have {experts_LTK.shape[0]} layers of {experts_LTK.shape[2]} experts, "
                f"the model has {len(self.routers)} routers of {self.experts_per_token}"
            )
        self.current = experts_LTK, known_T, metered
        if metered:
            self.replayed_rows += int(known_T.sum())
            self.live_rows += int((~known_T).sum())
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
            recorded_TK = experts_LTK[layer]
            if live_TK.shape != recorded_TK.shape:
                raise ValueError(
                    f"routes of shape {tuple(recorded_TK.shape)} for a selection of {tuple(live_TK.shape)}"
                )
            if metered:
                same_TK = (live_TK[:, :, None] == recorded_TK[:, None, :]).any(-1)
                self.agreed_L[layer] += same_TK[known_T].sum().item()
            return torch.where(known_T[:, None], recorded_TK, live_TK)

        mode = Select(self.num_experts, self.experts_per_token, answer)
        self.modes.append(mode)
        mode.__enter__()

    def leave(self) -> None:
        """A router ended (or raised)."""
        if self.modes:
            self.modes.pop().__exit__(None, None, None)
