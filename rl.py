"""The trainer: ``torchrun --nproc_per_node N rl.py --model models/toy --rollout_urls http://127.0.0.1:8700 ...``

Read ``train`` first: it is the algorithm. Everything above it is a part it names, in the order it uses them.

**Trainer step** (``train``; every rank runs it)
  consumes   groups of rollouts from the rollout nodes (rank 0 the manifest, every rank its own rows)
  produces   an optimizer step, a new policy version in every engine, one line in ledger.jsonl and metrics.jsonl
  waits for  a full batch (``GET /manifest``), other ranks' collectives, the phases of a weight sync
  unblocked  by the rollout nodes and by the other ranks
  deadline   ``wait_s`` for a batch, ``request_timeout_s`` for any other request, ``wait_s`` for a collective
  failure    any violated invariant raises; torchrun then ends the other ranks, the launcher the rollout nodes.
             A node that is gone is left out, as long as another is there; within a weight transfer it ends the run
  shutdown   after the last step rank 0 closes the ledger, evaluates, and tells the nodes to end; a trainer that was
             ended before goes on from its last checkpoint (``--resume auto``), with nodes that are started anew

Departures from the usual: the batch is scored once without gradient before the first backward, because the gate
decides over whole rollouts and the loss has one global denominator, known before any gradient is taken. A step is one
batch, and one version, however many mini-batches (optimizer steps) it is divided into; under ``--sync_minibatches`` one
version for each.

Legend: T tokens of a packed micro-batch, S sampled tokens (of a micro-batch, or of a rank's whole batch), N rollouts
of a batch, C calls of a rollout, D hidden size, V vocabulary, L mixture-of-experts layers, K experts per token.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import math
import os
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    HfArgumentParser,
)
from transformers.core_model_loading import revert_weight_conversion

import gate
import moe_replay
from agents.children import end_with_parent
from loopback import TRAINABLE, Row, image_ids, picture, unpack_rows

log = logging.getLogger("rl")

COUNTED = ("rollout/status/", "rollout/groups_dropped/", "rollout/reprefilled", "rollout/cached_tokens",
           "rollout/engine_restarts", "identity/closing", "identity/turns", "identity/overridden",
           "identity/route_conflicts", "identity/echo", "identity/retries", "identity/disconnects")  # fmt: skip
"""Meters of a node that count; the others are means."""


# -------------------------------------------------------------------------------------------------- config


def flag(default, help: str):
    """A config field with its description."""
    return field(default=default, metadata={"help": help})


@dataclass
class TrainConfig:
    """A trainer. Defaults are those of the toy on a CPU; recipes hold everything else."""

    model: str = flag("", "folder of the model (Hugging Face format) to start from")
    out: str = flag("", "the run's folder")
    recipe: str = flag("", "name of the recipe, for the records")
    rollout_urls: str = flag("http://127.0.0.1:8700", "comma-separated addresses of the rollout nodes' control APIs")
    device: str = flag("cpu", "cpu or cuda")
    dtype: str = flag("float32", "dtype of the forward and of the weights sent; master weights are float32")
    attention: str = flag("sdpa", "transformers' attention implementation: sdpa, flex_attention, flash_attention_2")
    steps: int = flag(60, "steps: a batch and a policy version each")
    seed: int = flag(0, "seed of probes and of torch")
    lr: float = flag(1e-3, "peak learning rate of AdamW")
    warmup_steps: int = flag(2, "steps of linear warm-up")
    lr_decay: bool = flag(False, "linear decay to a tenth of lr over the run")
    beta1: float = flag(0.9, "AdamW's first beta")
    beta2: float = flag(0.95, "AdamW's second beta")
    weight_decay: float = flag(0.0, "AdamW's weight decay")
    grad_clip: float = flag(1.0, "largest gradient norm")
    advantage: str = flag(
        "grpo", "reinforce, reinforce_baseline, rloo, grpo, dr_grpo, gae (with a value head) or on_policy_distill"
    )
    turn_rewards: bool = flag(False, "credit each call with its own reward and later ones, not the rollout's sum")
    discount: float = flag(1.0, "turn_rewards, gae: factor on rewards per call that lies between")
    gae_lambda: float = flag(0.95, "gae: its lambda, per token")
    value_coef: float = flag(0.5, "gae: weight of the value head's squared error in the loss")
    whiten: bool = flag(False, "bring the batch's trained tokens to mean advantage 0 and deviation 1")
    overlong_limit: int = flag(0, "sampled tokens at which a rollout's reward has lost overlong_penalty; 0: no limit")
    overlong_buffer: int = flag(0, "tokens before overlong_limit over which the penalty grows from 0")
    overlong_penalty: float = flag(1.0, "the largest penalty for length")
    gate: str = flag(
        "tis", "a preset of gate.py, or level:mode:low:high (such as geo:mask:0.5:2), with :kl, :tv or :rollout behind"
    )
    surrogate: str = flag("reinforce", "reinforce, ppo, gspo or cispo")
    clip_low: float = flag(0.2, "ppo, gspo, cispo: the ratio is clipped below 1 - clip_low")
    clip_high: float = flag(0.28, "ppo, gspo, cispo: the ratio is clipped above 1 + clip_high")
    dual_clip: float = flag(0.0, "ppo, gspo: where the advantage is negative the ratio is clipped above this; 0: never")
    minibatches: int = flag(1, "optimizer steps per batch, each on its share of the rollouts")
    sync_minibatches: bool = flag(False, "sync after each mini-batch, not once a step; the nodes' --versions_per_step")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus, per token")
    ref_model: str = flag("", "folder of a frozen model to compare with: a KL reference, or the teacher")
    kl_coef: float = flag(0.0, "weight of the KL to ref_model; 0: it is measured only")
    kl_estimator: str = flag("k2", "k2 or k3 in the loss, k1 in the reward (see gate.kl)")
    kl_as: str = flag("loss", "where the KL enters: loss or reward")
    kl_target: float = flag(0.0, "nats per token at which kl_coef is steered to hold the KL; 0: kl_coef is fixed")
    distill_coef: float = flag(1.0, "on_policy_distill: factor of the advantage")
    denominator: str = flag("token", "what a mini-batch's loss is divided by: token, rollout, group or constant")
    denominator_constant: float = flag(1.0, "the divisor where denominator is constant")
    max_lag: int = flag(0, "largest lag of a token at consumption; must equal the rollout nodes'")
    token_budget: int = flag(1024, "tokens of one packed micro-batch")
    head_chunk: int = flag(2048, "sampled positions whose logits exist at once")
    checkpoint_activations: bool = flag(False, "recompute each layer in the backward pass")
    replay: bool = flag(True, "mixture-of-experts models: replay the engine's routes")
    freeze_router: bool = flag(False, "mixture-of-experts models: train no router, and send none to the engines")
    checkpoint_steps: int = flag(0, "steps between checkpoints, from which --resume goes on; 0: none")
    checkpoint_keep: int = flag(2, "checkpoints kept, the newest")
    resume: str = flag("", "folder of the checkpoint to go on from; auto: the newest in --out, or a new start")
    keep_rows: bool = flag(False, "keep the rows of every batch and what became of them, for --retrain and tools.trace")
    retrain: str = flag("", "folder of a run that kept its rows: train again, by its config, from them, with no engine")
    eval_tasks: int = flag(128, "held-out tasks evaluated before and after training; 0: none")
    eval_steps: int = flag(0, "steps between further evaluations during training; 0: none")
    eval_samples: int = flag(1, "rollouts of each held-out task")
    eval_temperature: float = flag(0.0, "their sampling temperature; 0: greedy")
    eval_pass: float = flag(1.0, "the reward from which a rollout counts as passed, for pass@k")
    track: str = flag("", "write the metrics there too: tensorboard or wandb, whose package must be installed")
    probe_prompts: int = flag(4, "prompts of the probe after each weight sync")
    probe_tokens: int = flag(16, "tokens sampled per probe prompt")
    probe_bound: float = flag(1e-4, "largest difference of a probe's log-probs between engine and trainer")
    probe_agreement: float = flag(0.95, "least share of a layer's probe choices that the trainer's router makes too")
    sync_address: str = flag("127.0.0.1", "address at which the engines' workers reach rank 0 for the weight transfer")
    wait_s: float = flag(900.0, "deadline for a batch, for the nodes to be ready, and for a collective, seconds")
    request_timeout_s: float = flag(300.0, "deadline of any other request to a rollout node, seconds")

    @property
    def versions_per_step(self) -> int:
        """Versions that a step makes."""
        return self.minibatches if self.sync_minibatches else 1


def read_gate(text: str) -> dict:
    """``--gate`` as gate.gate's arguments: a preset's name or level:mode:low:high[:kl|tv|rollout]."""
    if ":" not in text:
        return gate.preset(text)
    level, mode, *band = text.split(":")
    more = {(): {}, ("kl",): {"statistic": "kl"}, ("tv",): {"statistic": "tv"}, ("rollout",): {"weight": "rollout"}}
    try:
        low, high, *option = band
        return {"level": level, "mode": mode, "low": float(low), "high": float(high)} | more[tuple(option)]
    except (ValueError, KeyError):
        raise ValueError(
            f"--gate {text!r} must be a preset or level:mode:low:high, low and high numbers, "
            "with :kl, :tv or :rollout behind it or nothing"
        ) from None


LEAST = {"steps": 1, "token_budget": 2, "head_chunk": 1, "minibatches": 1, "max_lag": 0, "lr": 0, "grad_clip": 1e-9,
         "kl_coef": 0, "kl_target": 0, "entropy_coef": 0, "value_coef": 0, "distill_coef": 0, "overlong_limit": 0,
         "overlong_penalty": 0, "dual_clip": 0, "denominator_constant": 1e-9, "probe_agreement": 0,
         "checkpoint_steps": 0, "checkpoint_keep": 1, "eval_tasks": 0, "eval_steps": 0, "eval_samples": 1,
         "eval_temperature": 0}  # fmt: skip
"""The smallest value of a field."""


def check_folder(name: str, path: str) -> None:
    """Raise ``ValueError`` unless a model is there."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"--{name} {path!r} holds no config.json; give a model folder (tools/toy.py builds one)")


def validate(cfg: TrainConfig) -> None:
    """Refuse what cannot work, before anything starts. Raises ``ValueError`` with the values and the remedy."""
    check_folder("model", cfg.model)
    if not cfg.out:
        raise ValueError("--out is empty; name the run's folder")
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU; use --device cpu, or install the GPU requirements")
    for name, known in (
        ("device", ("cpu", "cuda")),
        ("dtype", ("float32", "bfloat16", "float16")),
        ("advantage", gate.ADVANTAGES),
        ("surrogate", gate.SURROGATES),
        ("denominator", gate.DENOMINATORS),
        ("kl_estimator", gate.KLS),
        ("kl_as", ("loss", "reward")),
    ):
        if vars(cfg)[name] not in known:
            raise ValueError(f"--{name} {vars(cfg)[name]!r} must be one of {', '.join(known)}")
    for name, least in LEAST.items():
        if not least <= vars(cfg)[name] < math.inf:  # nor NaN
            raise ValueError(f"--{name} {vars(cfg)[name]} must be finite and {least} or more")
    validate_loss(cfg)
    if cfg.track not in ("", *TRACKERS):
        raise ValueError(f"--track {cfg.track!r} is unknown; known: {', '.join(TRACKERS)}")
    if cfg.track and not find_spec(cfg.track):
        raise ValueError(f"--track {cfg.track}: the package is not installed: .venv/bin/pip install {cfg.track}")
    if cfg.eval_samples > 1 and not cfg.eval_temperature:
        raise ValueError(f"--eval_samples {cfg.eval_samples} of greedy rollouts are all alike; give --eval_temperature")
    if (path := checkpoint_of(cfg)) and not (path / "state.json").is_file():
        raise ValueError(
            f"--resume {path} holds no state.json; give auto or a folder such as RUN/checkpoints/step-000040"
        )
    if not os.environ.get("INSTAR_SECRET") and not cfg.retrain:
        raise ValueError("INSTAR_SECRET is not set; export the same random string for the trainer and every node")


def validate_loss(cfg: TrainConfig) -> None:
    """Refuse settings of the loss that gate.py refuses, that bend the gradient unseen, or that would do nothing."""
    chosen, none = read_gate(cfg.gate), torch.zeros(0)
    gae, distill = cfg.advantage == "gae", cfg.advantage == "on_policy_distill"
    index = none.long()
    gate.gate(**chosen, log_ratio_T=none, rollout_T=index, trained_T=none.bool(), behaviour_T=none)
    gate.surrogate(cfg.surrogate, none, none, none, none, *clips(cfg), none)
    gate.gae(none, none, index, index, none.bool(), cfg.discount, cfg.gae_lambda)
    if cfg.overlong_limit:
        gate.overlong(none, cfg.overlong_limit, cfg.overlong_buffer)
    if cfg.ref_model:
        same_tokens(cfg.model, cfg.ref_model)
    for wrong, why in (
        (cfg.max_lag > 0 and chosen["level"] == "off",
         f"--max_lag {cfg.max_lag} trains on old samples, which --gate off does not correct; use --gate tis"),
        (cfg.minibatches > 1 and cfg.surrogate == "reinforce",
         f"--minibatches {cfg.minibatches} trains on samples of before the step's earlier mini-batches, which "
         "--surrogate reinforce does not correct; use ppo, gspo or cispo"),
        (chosen["level"] == "off" and chosen != gate.preset("off"),
         f"--gate {cfg.gate}: level off has neither mode nor band; give off"),
        (chosen["mode"] == "trunc" and chosen["low"],
         f"--gate {cfg.gate}: mode trunc has no lower bound; give 0, or mode clip"),
        (not cfg.ref_model and (cfg.kl_coef or distill),
         f"--kl_coef {cfg.kl_coef}, --advantage {cfg.advantage}: no model to compare with; give --ref_model"),
        (cfg.kl_coef and (cfg.kl_as == "reward") != (cfg.kl_estimator == "k1"),
         f"--kl_estimator {cfg.kl_estimator} --kl_as {cfg.kl_as} does not give the KL's gradient (see gate.kl): "
         "use k2 or k3 in the loss, k1 in the reward"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(why)
    for used, where, names in (
        (cfg.surrogate in ("ppo", "gspo"), "--surrogate ppo or gspo", "dual_clip"),
        (cfg.surrogate != "reinforce", "--surrogate ppo, gspo or cispo", "clip_low clip_high"),
        (gae, "--advantage gae", "gae_lambda value_coef"),
        (distill, "--advantage on_policy_distill", "distill_coef"),
        (not distill, "rewards, which --advantage on_policy_distill ignores", "overlong_limit kl_as"),
        (not (distill or gae), "an advantage over rollouts", "turn_rewards"),
        (gae or cfg.turn_rewards, "--turn_rewards True or --advantage gae", "discount"),
        (cfg.overlong_limit, "--overlong_limit", "overlong_buffer overlong_penalty"),
        (cfg.kl_coef, "--kl_coef", "kl_estimator kl_as kl_target"),
        (cfg.denominator == "constant", "--denominator constant", "denominator_constant"),
    ):
        for name in names.split():
            if not used and vars(cfg)[name] != vars(TrainConfig)[name]:
                raise ValueError(f"--{name} {vars(cfg)[name]} does nothing without {where}; leave it out")


def clips(cfg: TrainConfig) -> tuple[float, float, float]:
    """gate.surrogate's three bounds."""
    return cfg.clip_low, cfg.clip_high, cfg.dual_clip or math.inf


def same_tokens(model: str, ref_model: str) -> None:
    """Raise ``ValueError`` unless both models mean the same by every token id."""
    check_folder("ref_model", ref_model)
    ours, theirs = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (model, ref_model))
    if ours != theirs:
        token = next(iter({*ours.items()} ^ {*theirs.items()}))
        raise ValueError(f"--ref_model {ref_model} has another vocabulary than {model} (first at {token}); "
                         "log-probs of the same ids would be of other tokens")  # fmt: skip


# --------------------------------------------------------------------------------------------------- ranks


class Ranks:
    """The trainer's process group and the three exchanges the loop needs (no pickles cross it)."""

    def __init__(self, cfg: TrainConfig):
        local = int(os.environ["LOCAL_RANK"])
        self.device = torch.device(cfg.device, local) if cfg.device == "cuda" else torch.device("cpu")
        if cfg.device == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        backend = "cpu:gloo,cuda:nccl" if cfg.device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=cfg.wait_s + cfg.request_timeout_s))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(cfg.device, (self.world,))

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        size = torch.tensor([len(data) if self.rank == 0 else 0])
        dist.broadcast(size, 0)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if int(size):
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == 0 else buffer
            dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def from_rank0(self, make: Callable[[], object]) -> object:
        """What ``make`` gives on rank 0 (anything JSON holds), on every rank."""
        return json.loads(self.broadcast(json.dumps(make()).encode() if self.rank == 0 else None))

    def concat(self, local_S: torch.Tensor) -> torch.Tensor:
        """The ranks' one-dimensional tensors, one after the other, on the CPU of every rank."""
        local_S = local_S.detach().cpu()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(local_S)]))
        longest = max(int(size) for size in sizes)
        padded = [torch.zeros(longest, dtype=local_S.dtype) for _ in sizes]
        dist.all_gather(padded, nn.functional.pad(local_S, (0, longest - len(local_S))))
        return torch.cat([part[: int(size)] for part, size in zip(padded, sizes, strict=True)])

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in float64."""
        value = value.detach().double().cpu()
        dist.all_reduce(value)
        return value

    def most(self, value: int) -> int:
        """The largest over ranks."""
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)


# ------------------------------------------------------------------------------------------- rollout nodes


class NodeGone(RuntimeError):
    """A rollout node does not answer."""


class Nodes:
    """Rank 0's (and, for rows, every rank's) client of the rollout nodes. Rank 0 goes on without one that is gone."""

    def __init__(self, cfg: TrainConfig):
        self.cfg = cfg
        self.urls = [url.strip().rstrip("/") for url in cfg.rollout_urls.split(",")]
        headers = {"x-instar-secret": os.environ["INSTAR_SECRET"]}
        self.http = httpx.Client(headers=headers, timeout=cfg.request_timeout_s, trust_env=False)
        self.parts: dict[str, dict] = {}
        """Manifests for the next batch, by node, of those that have one."""
        self.told = {url: {"sampled": 0, "pending": 0} for url in self.urls}
        """What each node's manifests have told of its sampled tokens: all of them, and those still pending."""
        self.unpaid: list[dict] = []
        """Ledger pieces of nodes that are gone, for the next line."""
        self.earlier = 0
        """Tokens that the nodes of before a resume sampled, as far as the run goes on from them."""

    def request(self, method: str, url: str, **kwargs) -> httpx.Response:
        """One request. Raises in one line: ``NodeGone``, or ``RuntimeError`` when the node answers with an error."""
        try:
            response = self.http.request(method, url, **kwargs)
        except httpx.HTTPError as error:
            raise NodeGone(f"rollout node {url}: {type(error).__name__}: {error}; see its log") from None
        if response.status_code >= 400:
            raise RuntimeError(f"rollout node answered {response.status_code}: {response.text[:500]}")
        return response

    def drop(self, url: str, error: NodeGone) -> None:
        """Go on without a node. Raises ``error`` when it was the last. What it had sampled since its last manifest
        nobody knows; what that one listed, if nobody has it yet, and what was pending by then is lost."""
        self.urls.remove(url)
        if not self.urls:
            raise error
        log.error("%s; the run goes on without it", error)
        owed = dict.fromkeys(LEDGER, 0) | {"pending_before": self.told[url]["pending"], "dropped": {}}
        owed |= self.parts.pop(url, {"ledger": {}})["ledger"]
        lost = owed["sampled"] + owed["pending_before"] - sum(owed["dropped"].values())
        self.unpaid.append(owed | {"pending_after": 0, "dropped": owed["dropped"] | {"node_lost": lost}})

    def surely(self, url: str, ask: Callable[[], httpx.Response]) -> httpx.Response | None:
        """The answer to a request, None of a node that is gone."""
        try:
            return ask()
        except NodeGone as error:
            self.drop(url, error)
            return None

    def each(self, path: str, bodies: list[dict] | dict) -> list[httpx.Response]:
        """POST to every node at once; one body for all, or one each. The answers of those that are still there."""
        bodies = bodies if isinstance(bodies, list) else [bodies] * len(self.urls)
        with ThreadPoolExecutor(len(self.urls)) as pool:
            asked = [(url, pool.submit(self.request, "POST", url + path, json=body))
                     for url, body in zip(self.urls, bodies, strict=True)]  # fmt: skip
        return list(filter(None, [self.surely(url, answer.result) for url, answer in asked]))

    def one(self, path: str, body: dict) -> httpx.Response:
        """POST to one node that is there, which may take as long as a batch."""
        ask = lambda: self.request("POST", self.urls[0] + path, json=body, timeout=self.cfg.wait_s)  # noqa: E731
        while not (answer := self.surely(self.urls[0], ask)):
            pass
        return answer

    def wait_ready(self) -> list[dict]:
        """Every node's /health once it is ready."""
        end = time.monotonic() + self.cfg.wait_s
        states: list[dict] = []
        for url in self.urls:
            answered = False
            while not (state := self.health(url, answered))["ready"]:
                answered = answered or "engine_seconds" in state
                if time.monotonic() > end:
                    raise RuntimeError(f"{url} was not ready within wait_s={self.cfg.wait_s:g} s; see its log")
                time.sleep(0.2)
            states.append(state)
        return states

    def health(self, url: str, answered: bool = True) -> dict:
        """/health; a node that never answered yet may not listen yet."""
        if not answered:
            try:
                self.http.get(url + "/health")
            except httpx.ConnectError:
                return {"ready": False}
        return self.request("GET", url + "/health").json()

    def manifest(self, version: int) -> dict | None:
        """The next batch of all nodes; None where a node's engines must have the weights first.

        Raises ``RuntimeError`` when it takes longer than ``wait_s``.
        """
        end = time.monotonic() + self.cfg.wait_s
        for url in [url for url in self.urls if url not in self.parts]:
            ask = functools.partial(self.request, "GET", f"{url}/manifest?version={version}")
            while (response := self.surely(url, ask)) and response.status_code == 204:
                if time.monotonic() > end:
                    raise RuntimeError(f"no batch from {url} within wait_s={self.cfg.wait_s:g} s; see its log")
            if response and "sync" in response.json():
                return None
            if response:
                self.parts[url] = response.json() | {"url": url}
                self.told[url]["sampled"] += self.parts[url]["ledger"]["sampled"]
                self.told[url]["pending"] = self.parts[url]["ledger"]["pending_after"]
        batch = merge_manifests(list(self.parts.values()))
        self.settle(batch["ledger"])
        self.parts = {}
        return {"step": version // self.cfg.versions_per_step + 1} | batch

    def resume(self, states: list[dict], saved: Saved, sampled: int, pending: int) -> None:
        """Bring new nodes to where those of a checkpoint were. What those had ``pending`` is lost."""
        for state in states:
            if f"{state['seed']}" not in saved.positions:
                raise ValueError(f"--resume: a rollout node has seed {state['seed']}, the checkpoint's had "
                                 f"{', '.join(saved.positions)}; start the nodes with these")  # fmt: skip
        version = saved.step * self.cfg.versions_per_step
        asked = [{"version": version, "position": saved.positions[f"{state['seed']}"]} for state in states]
        self.each("/resume", asked)
        self.earlier = sampled
        self.unpaid.append(dict.fromkeys(LEDGER, 0) | {"pending_before": pending, "dropped": {"resume": pending}})

    def settle(self, ledger: dict) -> None:
        """Add what nodes that are gone still owe."""
        while self.unpaid:
            add_ledger(ledger, self.unpaid.pop())

    def sampled(self) -> int:
        """Tokens that all nodes ever sampled, by their own count where it can be had."""
        return self.earlier + sum(self.health(url)["sampled"] if url in self.urls else told["sampled"]
                                  for url, told in self.told.items())  # fmt: skip

    def rows(self, url: str, row_ids: list[str], step: int) -> list[Row]:
        """Rows by id, of the step's manifest."""
        data = self.request("POST", url + "/rows", json={"ids": row_ids}).content
        if self.cfg.keep_rows:
            folder = kept_rows(self.cfg.out, url, step)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{row_ids[0]}.safetensors").write_bytes(data)
        return unpack_rows(data)


def kept_rows(run: str, url: str, step: int) -> Path:
    """Where a run keeps what its ranks fetched from a node for a step, a file for each rank."""
    return step_folder(run, "rows", step) / re.sub(r"[^0-9A-Za-z.]+", "-", url)


def step_folder(run: str | Path, kind: str, step: int) -> Path:
    """The folder of a run's rows, decisions or checkpoints that belongs to one step."""
    return Path(run) / kind / f"step-{step:06d}"


def read_lines(path: Path) -> list[dict]:
    """JSON lines. What follows the last newline is being written, or was when its writer was killed: it is left out."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Recorded:
    """In the nodes' place, a run that kept its rows: the same batches at the same versions, and no engine.

    On a CPU, with as many ranks, training from it gives the run's weights again, bit for bit; with more or fewer, all
    but for rounding.
    """

    def __init__(self, cfg: TrainConfig):
        self.cfg, self.urls = cfg, [cfg.retrain]
        *self.batches, self.end = read_lines(Path(cfg.retrain) / "schedule.jsonl")
        if "ledger" not in self.end or len(self.batches) != cfg.steps:
            raise ValueError(f"--retrain {cfg.retrain}: that run did not finish its {cfg.steps} steps")

    def wait_ready(self) -> list[dict]:
        return []

    def manifest(self, version: int) -> dict:
        return self.batches[version // self.cfg.versions_per_step]

    def resume(self, states: list[dict], saved: Saved, sampled: int, pending: int) -> None:
        pass

    def rows(self, url: str, row_ids: list[str], step: int) -> list[Row]:
        files = kept_rows(self.cfg.retrain, url, step).iterdir()
        rows = {row.row_id: row for path in files for row in unpack_rows(path.read_bytes())}
        return [rows[name] for name in row_ids]

    def each(self, path: str, bodies: dict) -> list[httpx.Response]:
        return [httpx.Response(200, json=self.end["ledger"])] if path == "/finish" else []

    def settle(self, ledger: dict) -> None:
        pass

    def sampled(self) -> int:
        return self.end["sampled"]


LEDGER = ("sampled", "pending_before", "pending_after")
"""Counts of tokens in a node's piece of the ledger, beside ``dropped`` by reason."""


def merge_manifests(parts: list[dict]) -> dict:
    """One manifest of several nodes': rollouts with their node's address; ledgers and counts summed, means averaged."""
    rollouts, ledger = [], dict.fromkeys(LEDGER, 0) | {"dropped": {}}
    meters: dict[str, float] = {}
    for node, part in enumerate(parts):
        for group in part["groups"]:
            for rollout in group["rollouts"]:
                rollouts.append(rollout | {"url": part["url"], "group": f"{node}/{group['group_id']}"})
        add_ledger(ledger, part["ledger"])
        for name, value in part["meters"].items():
            meters[name] = meters.get(name, 0.0) + (value if name.startswith(COUNTED) else value / len(parts))
    return {"rollouts": rollouts, "ledger": ledger, "meters": meters}


def add_ledger(total: dict, part: dict) -> None:
    """Add one node's ledger piece."""
    for name in LEDGER:
        total[name] += part[name]
    for reason, number in part["dropped"].items():
        total["dropped"][reason] = total["dropped"].get(reason, 0) + number


# --------------------------------------------------------------------------------------------------- policy


class Scored(NamedTuple):
    """What a model says of sampled tokens, ``[S]`` each: nats, nats, and reward (0 without a value head)."""

    logp_S: torch.Tensor
    entropy_S: torch.Tensor
    value_S: torch.Tensor


class Policy(nn.Module):
    """The model under FSDP2, and the only forward the trainer has: log-probs of chosen tokens of packed rows.

    ``--advantage gae`` adds a value head: one linear map of the last hidden state in ``dtype``, 0 at the start, sent to
    no engine.
    """

    def __init__(self, cfg: TrainConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.unsaid = image_ids(AutoConfig.from_pretrained(cfg.model).to_dict())
        kind = AutoModelForImageTextToText if self.unsaid else AutoModelForCausalLM
        self.model = kind.from_pretrained(cfg.model, dtype=dtype, attn_implementation=cfg.attention)
        self.eyes = AutoImageProcessor.from_pretrained(cfg.model) if self.unsaid else None
        """Makes a picture pixels, as the engine's does."""
        if self.eyes:  # what sees is not trained: a rank whose rows hold no image would owe its gradients to the others
            self.model.base_model.visual.requires_grad_(False)
        self.head_chunk, self.value_head = cfg.head_chunk, None
        if cfg.advantage == "gae":
            self.value_head = nn.Linear(self.model.config.get_text_config().hidden_size, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        if cfg.checkpoint_activations:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.train()

    def expert_counts(self) -> tuple[int, int] | None:
        """Experts of a layer, and of a token; None for a dense model."""
        return moe_replay.expert_counts(self.model.config.get_text_config())

    def two_tokens(self) -> Scored:
        """The shortest forward there is."""
        two = torch.arange(2, device=self.model.device)
        return self(two, two, two[:1], two[1:], torch.ones(1, device=two.device))

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, before_S: torch.Tensor, target_S: torch.Tensor,
                temperature_S: torch.Tensor, rows: Sequence[Row] = ()) -> Scored:  # fmt: skip
        """Log-prob, entropy and value of ``target_S`` after positions ``before_S``, at each row's temperature.

        Positions restart at 0 where a row starts, and there is no attention mask: that is how transformers knows
        packed rows from one long one (an all-ones mask would join them).
        """
        seen = self.look(positions_T, rows) if self.eyes else {"position_ids": positions_T[None]}
        body = self.model.base_model(input_ids=ids_T[None], use_cache=False, **seen)
        hidden_SD = body.last_hidden_state[0, before_S]
        chunks = zip(*(x.split(self.head_chunk) for x in (hidden_SD, target_S, temperature_S)), strict=True)
        pieces = [checkpoint(self.head, *chunk, use_reentrant=False) for chunk in chunks]
        return Scored(*map(torch.cat, zip(*pieces, strict=True)))

    def look(self, positions_T: torch.Tensor, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """The pixels of packed rows' images, and positions ``[4, 1, T]``: in the text, in time, height and width.

        Raises ``ValueError`` where a row's images are not as long as the engine made them.
        """
        positions, found, start = positions_T.expand(4, 1, -1).clone(), [], 0
        for row in rows:
            ids_T = torch.from_numpy(row.token_ids).long()[None]
            image_T, grid = ids_T == self.model.config.image_token_id, torch.empty(0, 3, dtype=torch.long)
            if row.images:
                found.append(self.eyes(images=[picture(uri) for uri in row.images], return_tensors="pt"))
                grid = found[-1]["image_grid_thw"]
            shown, runs = torch.unique_consecutive(image_T[0], return_counts=True)
            lengths = (grid.prod(1) // self.eyes.merge_size**2).tolist()
            if runs[shown].tolist() != lengths:
                raise ValueError(f"row {row.row_id!r} holds images of {runs[shown].tolist()} tokens, where the trainer "
                                 f"makes {lengths} of them: the engine's image processor is another one")  # fmt: skip
            if lengths:
                places, _ = self.model.base_model.get_rope_index(ids_T, image_T.int(), image_grid_thw=grid)
                positions[1:, :, start : start + len(row)] = places
            start += len(row)
        pixels = {name: torch.cat([one[name] for one in found]) for name in ("pixel_values", "image_grid_thw") if found}
        return {"position_ids": positions} | {name: value.to(positions.device) for name, value in pixels.items()}

    def head(self, hidden_SD: torch.Tensor, target_S: torch.Tensor, temperature_S: torch.Tensor):
        """The head on one chunk; its logits die with the chunk and are computed again in the backward pass."""
        logits_SV = self.model.get_output_embeddings()(hidden_SD)
        if self.unsaid:
            logits_SV = logits_SV.index_fill(1, torch.tensor(self.unsaid, device=logits_SV.device), -1e4)
        logp_S, entropy_S = gate.token_logprobs(logits_SV, target_S, temperature_S)
        value_S = self.value_head(hidden_SD)[:, 0].to(logp_S) if self.value_head else torch.zeros_like(logp_S)
        return logp_S, entropy_S, value_S


def shard(policy: Policy, cfg: TrainConfig, ranks: Ranks) -> Policy:
    """FSDP2: one unit per decoder layer, the rest (embedding, norm, head) in the root's.

    The root, too, gives its full parameters up after a forward: whoever lists parameters between forwards (the
    optimizer, the weight sync) then always finds shards, never a full copy whose memory is about to be freed.
    """
    policy.to(ranks.device)
    mixed = MixedPrecisionPolicy(vars(torch)[cfg.dtype], torch.float32, cast_forward_inputs=False)
    for module in list(policy.model.get_decoder().modules()):
        if type(module).__name__ in policy.model._no_split_modules:
            fully_shard(module, mesh=ranks.mesh, mp_policy=mixed)
    return fully_shard(policy, mesh=ranks.mesh, mp_policy=mixed, reshard_after_forward=True)


def make_reference(cfg: TrainConfig, ranks: Ranks) -> Policy | None:
    """The frozen model of ``--ref_model``, sharded like the policy; its own routers choose its experts."""
    if not cfg.ref_model:
        return None
    frozen = replace(cfg, model=cfg.ref_model, advantage="reinforce")
    return shard(Policy(frozen, vars(torch)[cfg.dtype]).requires_grad_(False).eval(), frozen, ranks)


def make_replay(policy: Policy, cfg: TrainConfig) -> moe_replay.RouteReplay | None:
    """Route replay for a mixture-of-experts model, None for a dense one."""
    counts = policy.expert_counts() if cfg.replay else None
    return moe_replay.RouteReplay(policy, *counts, policy.two_tokens) if counts else None


def freeze_routers(policy: Policy) -> None:
    """Take every router's weights from the optimizer and the weight sync: ``--freeze_router``."""
    counts = policy.expert_counts()
    if not counts:
        raise ValueError("--freeze_router True, but the model has no routers; leave it out")
    for router in moe_replay.find_routers(policy, *counts, policy.two_tokens):
        router.requires_grad_(False)


# -------------------------------------------------------------------------------------------------- packing


@dataclass
class MicroBatch:
    """Rows packed into one sequence, and what is known of each sampled token in it."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    before_S: torch.Tensor
    """Index in the packed sequence of the token before each sampled one: its hidden state predicts it."""
    target_S: torch.Tensor
    temperature_S: torch.Tensor
    behaviour_S: torch.Tensor
    version_S: torch.Tensor
    rollout_S: torch.Tensor
    """Index of the token's rollout in the manifest."""
    call_S: torch.Tensor
    """Number of the call that sampled it, within its rollout."""
    trained_S: torch.Tensor
    experts_LTK: torch.Tensor
    known_T: torch.Tensor
    rows: list[Row]


def bins(lengths: list[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: indices of rows per micro-batch; a row longer than the budget gets its own.

    Example: lengths [5, 9, 4] with budget 9 give [[1], [0, 2]].
    """
    out: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fit = next((k for k, left in enumerate(room) if left >= lengths[index]), None)
        if fit is None:
            out.append([index])
            room.append(budget - lengths[index])
        else:
            out[fit].append(index)
            room[fit] -= lengths[index]
    return out


def pack(rows: list[tuple[Row, int]], device: torch.device) -> MicroBatch:
    """One micro-batch of ``(row, index of its rollout)``."""
    starts = np.cumsum([0, *(len(row) for row, _ in rows)])[:-1]
    sampled = [np.flatnonzero(row.sampled) for row, _ in rows]
    assert not any(len(at) and at[0] == 0 for at in sampled), "no hidden state precedes a row's first token"

    def flat(make: Callable[[Row, np.ndarray, int], np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        parts = [make(row, at, index) for (row, _), at, index in zip(rows, sampled, range(len(rows)), strict=True)]
        return torch.from_numpy(np.concatenate(parts)).to(device, dtype)

    experts_LTK, known_T = moe_replay.pack([(row.experts, row.experts_known) for row, _ in rows], device)
    return MicroBatch(
        ids_T=flat(lambda row, at, i: row.token_ids, torch.int64),
        positions_T=flat(lambda row, at, i: np.arange(len(row)), torch.int64),
        before_S=flat(lambda row, at, i: at - 1 + starts[i], torch.int64),
        target_S=flat(lambda row, at, i: row.token_ids[at], torch.int64),
        temperature_S=flat(lambda row, at, i: np.full(len(at), row.temperature), torch.float32),
        behaviour_S=flat(lambda row, at, i: row.logprobs[at], torch.float32),
        version_S=flat(lambda row, at, i: row.versions[at], torch.int64),
        rollout_S=flat(lambda row, at, i: np.full(len(at), rows[i][1]), torch.int64),
        call_S=flat(lambda row, at, i: row.call[at], torch.int64),
        trained_S=flat(lambda row, at, i: np.ones(len(at)), torch.bool),
        experts_LTK=experts_LTK,
        known_T=known_T,
        rows=[row for row, _ in rows],
    )


def filler(device: torch.device, num_layers: int, counts: tuple[int, int] | None) -> MicroBatch:
    """A micro-batch that trains nothing: ranks with fewer rows still owe FSDP their collectives."""
    experts = counts or (1, 0)
    routes = moe_replay.spread(2, num_layers, experts[1], experts[0])
    row = Row("", "", -1, "", np.zeros(2, np.int32), np.array([False, True]), np.array([np.nan, 0.0], np.float32),
              np.array([-1, 0], np.int32), np.array([-1, 0], np.int32), routes, np.ones(2, bool), 1.0)  # fmt: skip
    batch = pack([(row, 0)], device)
    batch.trained_S = torch.zeros_like(batch.trained_S)
    return batch


def assign(rollouts: list[dict], world: int, minibatches: int = 1) -> list[list[int]]:
    """Rollouts of each rank, each mini-batch (index modulo ``minibatches``) balanced by tokens.

    All rows of a rollout go to one rank, so its gate is local.
    """
    tokens = [sum(row["tokens"] for row in rollout["rows"]) for rollout in rollouts]
    out = [[] for _ in range(world)]
    for part in range(minibatches):
        load = [0] * world
        for index in sorted(range(part, len(rollouts), minibatches), key=lambda index: -tokens[index]):
            if tokens[index]:
                rank = load.index(min(load))
                load[rank] += tokens[index]
                out[rank].append(index)
    return out


def fetch(manifest: dict, ranks: Ranks, nodes: Nodes) -> list[tuple[Row, int]]:
    """This rank's rows, each with the index of its rollout. A node that is gone by now takes its rollouts with it, out
    of every rank's manifest."""
    rollouts, wanted = manifest["rollouts"], {}
    urls = sorted({rollout["url"] for rollout in rollouts})
    for index in assign(rollouts, ranks.world, nodes.cfg.minibatches)[ranks.rank]:
        wanted.setdefault(rollouts[index]["url"], {}).update({row["row_id"]: index for row in rollouts[index]["rows"]})
    fetched, gone = [], torch.zeros(len(urls))
    for url, owner in wanted.items():
        try:
            rows = nodes.rows(url, list(owner), manifest["step"])
        except NodeGone as error:
            log.error("%s", error)
            gone[urls.index(url)] = 1
            continue
        if [row.row_id for row in rows] != list(owner):
            raise RuntimeError(f"asked {url} for rows {list(owner)}, got {[row.row_id for row in rows]}")
        fetched += [(row, owner[row.row_id]) for row in rows]
    lost = [url for url, ranks_without in zip(urls, ranks.sum(gone), strict=True) if ranks_without]
    for url in lost:
        nodes.drop(url, NodeGone(f"rollout node {url} does not give its rows; see its log"))
        withdraw(manifest, url)
    return fetch(manifest, ranks, nodes) if lost else fetched


def withdraw(manifest: dict, url: str) -> None:
    """Take a node's rollouts out of a batch; their tokens are dropped as ``node_lost``."""
    mine = [rollout for rollout in manifest["rollouts"] if rollout["url"] == url]
    manifest["rollouts"] = [rollout for rollout in manifest["rollouts"] if rollout["url"] != url]
    tokens = sum(row["sampled"] for rollout in mine for row in rollout["rows"])
    add_ledger(manifest["ledger"], dict.fromkeys(LEDGER, 0) | {"dropped": {"node_lost": tokens}})


def mini_batches(rows: list[tuple[Row, int]], cfg: TrainConfig, ranks: Ranks, replay) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each mini-batch. A group's rollouts are spread over the mini-batches."""
    parts = [[pair for pair in rows if pair[1] % cfg.minibatches == part] for part in range(cfg.minibatches)]
    return [micro_batches(part, cfg, ranks, replay) for part in parts]


def micro_batches(rows: list[tuple[Row, int]], cfg: TrainConfig, ranks: Ranks, replay) -> list[MicroBatch]:
    """This rank's rows in packed micro-batches, as many on every rank."""
    packed = [
        pack([rows[i] for i in some], ranks.device) for some in bins([len(row) for row, _ in rows], cfg.token_budget)
    ]
    missing = max(1, ranks.most(len(packed))) - len(packed)
    layers, counts = (len(replay.routers), (replay.num_experts, replay.experts_per_token)) if replay else (0, None)
    return packed + [filler(ranks.device, layers, counts) for _ in range(missing)]


# ------------------------------------------------------------------------------------------------- forward


def run(policy: Policy, batch: MicroBatch, replay, metered: bool = False):
    """The forward of a micro-batch, and the context its backward pass must stay in."""
    context = replay.use(batch.experts_LTK, batch.known_T, metered) if replay else nullcontext()
    named = ("ids_T", "positions_T", "before_S", "target_S", "temperature_S", "rows")
    return context, lambda: policy(**{name: vars(batch)[name] for name in named})


@torch.no_grad()
def score(policy: Policy, batches: list[MicroBatch], replay, metered: bool = False) -> Scored:
    """What the policy says now of all sampled tokens of this rank."""
    scored = []
    for batch in batches:
        context, forward = run(policy, batch, replay, metered and bool(batch.trained_S.any()))
        with context:
            scored.append(forward())
    return Scored(*map(torch.cat, zip(*scored, strict=True)))


class Batch(NamedTuple):
    """A rank's batch, flat over its micro-batches: ``[S]`` each."""

    behaviour_S: torch.Tensor
    version_S: torch.Tensor
    rollout_S: torch.Tensor
    call_S: torch.Tensor
    trained_S: torch.Tensor

    @classmethod
    def of(cls, batches: list[MicroBatch]) -> Batch:
        return cls(*(torch.cat([vars(batch)[name] for batch in batches]) for name in cls._fields))


@contextmanager
def named_rows(batches: list[MicroBatch]) -> Iterator[None]:
    """gate.py knows a token's place in the batch; whoever reads its complaint needs the row and the place in it."""
    try:
        yield
    except gate.TokenError as error:
        left = error.position
        for row in (row for batch in batches for row in batch.rows):
            at = np.flatnonzero(row.sampled)
            if left < len(at):
                raise ValueError(f"row {row.row_id!r}, token {at[left]}: {error}") from error
            left -= len(at)
        raise


# ------------------------------------------------------------------------------------------ rewards and credit


class Credit(NamedTuple):
    """What each sampled token of this rank is credited with, ``[S]``, and what its value should have been (gae)."""

    advantage_S: torch.Tensor
    target_S: torch.Tensor


def assign_credit(cfg: TrainConfig, ranks: Ranks, rollouts: list[dict], group_N: torch.Tensor, batch: Batch,
                  scored: Scored, reference_S: torch.Tensor, kl_coef: float) -> Credit:  # fmt: skip
    """Rewards of the whole batch to advantages of this rank's tokens. A crash is not a reward of 0.

    What a rule adds to the reward (length, KL) lies beside it in a table by rollout and call, alike on every rank.
    """
    valid_N = torch.tensor([rollout["status"] in TRAINABLE for rollout in rollouts])
    calls_N = torch.tensor([len(rollout["rewards"]) for rollout in rollouts])
    reward_NC = nn.utils.rnn.pad_sequence([torch.tensor(r["rewards"], dtype=torch.float64) for r in rollouts], True)
    added_NC, place = torch.zeros_like(reward_NC), (batch.rollout_S, batch.call_S, batch.trained_S)
    if cfg.overlong_limit:
        length_N = torch.tensor([sum(row["sampled"] for row in rollout["rows"]) for rollout in rollouts])
        penalty_N = cfg.overlong_penalty * gate.overlong(length_N, cfg.overlong_limit, cfg.overlong_buffer)
        added_NC[valid_N, calls_N[valid_N] - 1] = penalty_N[valid_N]
    kl_S = torch.zeros_like(scored.logp_S)
    if cfg.kl_as == "reward":
        kl_S = kl_coef * gate.kl(cfg.kl_estimator, scored.logp_S, reference_S, batch.trained_S)
    if cfg.advantage == "on_policy_distill":
        advantage_S = gate.distill(scored.logp_S, reference_S, batch.trained_S, cfg.distill_coef)
    elif cfg.advantage == "gae":
        reward_S = gate.token_rewards((reward_NC + added_NC).to(ranks.device), *place) - kl_S
        advantage_S = gate.gae(reward_S, scored.value_S, *place, cfg.discount, cfg.gae_lambda)
    else:
        if cfg.kl_as == "reward":
            cell_S = batch.rollout_S * reward_NC.shape[1] + batch.call_S
            kl_of_cell = torch.zeros(reward_NC.numel(), dtype=torch.float64, device=ranks.device)
            kl_of_cell.index_add_(0, cell_S, kl_S.double())
            added_NC -= ranks.sum(kl_of_cell).view_as(added_NC)
        gain = torch.tensor([rollout["reward"] for rollout in rollouts], dtype=torch.float64) + added_NC.sum(1)
        if cfg.turn_rewards:
            gain = gate.returns(reward_NC + added_NC, calls_N, cfg.discount)
        advantage = gate.advantages(cfg.advantage, gain, group_N, valid_N).float().to(ranks.device)
        advantage_S = gate.token_advantages(advantage, batch.rollout_S, batch.trained_S, batch.call_S)
    target_S = advantage_S + scored.value_S
    if cfg.whiten:
        advantage_S = gate.whiten(advantage_S, batch.trained_S, ranks.concat(advantage_S[batch.trained_S]))
    return Credit(advantage_S, target_S)


def groups_of(rollouts: list[dict]) -> torch.Tensor:
    """Each rollout's group, ``[N]``, numbered from 0."""
    names = {name: index for index, name in enumerate(sorted({rollout["group"] for rollout in rollouts}))}
    return torch.tensor([names[rollout["group"]] for rollout in rollouts])


# --------------------------------------------------------------------------------------------------- gradients


class Terms(NamedTuple):
    """All that meets a token's log-prob on its way into the loss, ``[S]`` each."""

    rollout_S: torch.Tensor
    trained_S: torch.Tensor
    proximal_S: torch.Tensor
    reference_S: torch.Tensor
    advantage_S: torch.Tensor
    target_S: torch.Tensor
    keep_S: torch.Tensor
    weight_S: torch.Tensor
    log_rho_S: torch.Tensor
    """gspo: the rollout's mean of log(current / proximal)."""

    def split(self, sizes: list[int]) -> list[Terms]:
        return [Terms(*pieces) for pieces in zip(*(x_S.split(sizes) for x_S in self), strict=True)]


def update(policy: Policy, optimizer, part: list[MicroBatch], terms: Terms, cfg: TrainConfig, ranks: Ranks, replay,
           group_N: torch.Tensor, kl_coef: float, moved: bool) -> dict[str, float]:  # fmt: skip
    """One optimizer step on one mini-batch, and what is logged of it. ``moved``: other weights scored it."""
    denominator = global_denominator(cfg, ranks, terms.keep_S, terms.rollout_S, group_N)
    if cfg.surrogate == "gspo" and moved:
        with named_rows(part):
            log_rho_S = gate.log_ratio(score(policy, part, replay).logp_S, terms.proximal_S, terms.trained_S)
        terms = terms._replace(log_rho_S=gate.rollout_mean(log_rho_S, terms.rollout_S, terms.trained_S))
    optimizer.zero_grad()
    loss, clipped = 0.0, 0
    for batch, mine in zip(part, terms.split([len(batch.target_S) for batch in part]), strict=True):
        context, forward = run(policy, batch, replay)
        with context, named_rows([batch]):
            loss_S, clipped_S = token_loss(cfg, forward(), mine, kl_coef)
            piece = gate.policy_loss(loss_S, mine.keep_S, denominator)
            # FSDP averages gradients over ranks; the denominator is already global.
            (piece * ranks.world).backward()
        loss += float(piece.detach())
        clipped += int((clipped_S & mine.keep_S).sum())
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip, error_if_nonfinite=True)
    totals = ranks.sum(torch.tensor([loss, clipped, int(terms.keep_S.sum())], dtype=torch.float64))
    if totals[2]:  # without a gradient the optimizer would still move the weights, by momentum
        optimizer.step()
    return {"loss": float(totals[0]), "grad_norm": float(full(grad_norm)), "denominator": float(denominator),
            "clip_share": float(totals[1]) / max(1.0, float(totals[2]))}  # fmt: skip


def token_loss(cfg: TrainConfig, scored: Scored, terms: Terms, kl_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's loss before the denominator, ``[S]``, and where the surrogate's clip is active."""
    given = scored.logp_S, terms.proximal_S, terms.advantage_S, terms.weight_S
    loss_S, clipped_S = gate.surrogate(cfg.surrogate, *given, *clips(cfg), terms.log_rho_S)
    if cfg.entropy_coef:
        loss_S = loss_S - cfg.entropy_coef * scored.entropy_S
    if kl_coef and cfg.kl_as == "loss":
        # Its expectation is over the tokens of the policy that scored the batch, to which the gate's weight corrects.
        kl_S = gate.kl(cfg.kl_estimator, scored.logp_S, terms.reference_S, terms.keep_S)
        loss_S = loss_S + kl_coef * terms.weight_S * kl_S
    if cfg.advantage == "gae":
        loss_S = loss_S + cfg.value_coef * gate.value_loss(scored.value_S, terms.target_S, terms.keep_S)
    return loss_S, clipped_S


def global_denominator(cfg: TrainConfig, ranks: Ranks, keep_S, rollout_S, group_N: torch.Tensor) -> torch.Tensor:
    """The one number a mini-batch's loss is divided by, over all ranks and micro-batches."""
    group_S = group_N.to(ranks.device)[rollout_S]
    kept_G = ranks.sum(gate.kept_per_group(keep_S, group_S, int(group_N.max()) + 1)).long().to(ranks.device)
    by = cfg.denominator, keep_S, rollout_S, group_S, cfg.denominator_constant
    local = gate.denominator(*by, kept_G=kept_G, world_size=ranks.world)
    return ranks.sum(local).to(ranks.device)


# ---------------------------------------------------------------------------------------------- weight sync


class Meta(NamedTuple):
    """Name, dtype and full shape of one tensor on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights:
    """The policy's trained weights under their checkpoint names, gathered one decoder layer at a time.

    ``metadata`` and iteration are vLLM's ``WeightSource`` protocol. Iteration gathers shards, so every rank iterates.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype):
        self.model, self.dtype = policy.model, dtype
        self.groups: dict[str | None, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in policy.model.named_parameters():
            layer = re.match(r".*?\.\d+(?=\.)", name)
            if parameter.requires_grad:  # a frozen one is in the engines since they read the model's folder
                self.groups.setdefault(layer and layer[0], []).append((name, parameter))
        shapes = self.convert(lambda parameter: torch.empty(parameter.shape, dtype=dtype, device="meta"))
        self.meta = [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in shapes]

    def convert(self, gather: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint names and tensors: transformers stacks experts, the checkpoint and vLLM do not."""
        for group in self.groups.values():
            gathered = {name: gather(parameter) for name, parameter in group}
            yield from revert_weight_conversion(self.model, gathered).items()

    def metadata(self) -> list[Meta]:
        return self.meta

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.convert(full):
            yield name, tensor.to(self.dtype)


def full(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's full tensor (a collective when it is sharded)."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


class SyncClient:
    """vLLM's ``VLLMWeightSyncClient`` over the nodes' control API."""

    def __init__(self, nodes: Nodes, workers: list[int]):
        self.nodes, self.workers = nodes, workers

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        offsets = [1 + sum(self.workers[:i]) for i in range(len(self.workers))]
        self.nodes.each("/sync/connect", [init_info | {"rank_offset": offset} for offset in offsets])

    def start_weight_update(self) -> None:
        self.nodes.each("/sync/start", {})

    def update_weights(self, update_info: dict) -> None:
        self.nodes.each("/sync/update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.nodes.each("/sync/use", {})


class Syncer:
    """Puts the trainer's weights into every engine, and proves that they arrived."""

    def __init__(self, cfg: TrainConfig, ranks: Ranks, nodes: Nodes, policy: Policy, replay):
        self.cfg, self.ranks, self.nodes, self.policy, self.replay = cfg, ranks, nodes, policy, replay
        self.weights = Weights(policy, vars(torch)[cfg.dtype])
        self.worst = self.seconds = 0.0
        vocabulary = range(policy.model.config.get_text_config().vocab_size)
        ids = [token for token in vocabulary if token not in policy.unsaid]
        rng = random.Random(cfg.seed)
        self.prompts = [[rng.choice(ids) for _ in range(24)] for _ in range(cfg.probe_prompts)]
        self.members: list[tuple] = []
        """The engines of the transfer group, by node."""
        self.positions: dict[str, dict] = {}
        """Where each node, by its seed, was in its tasks when it last stopped for a sync."""

    def connect(self, workers: list[int]):
        """A new transfer group with all engines' workers; rank 0 sends."""
        # vLLM takes ten seconds to import and only rank 0 needs it. rollout.py registers the gloo backend.
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        import rollout

        cls = rollout.NCCLTrainerInitInfo if self.cfg.device == "cuda" else rollout.GlooTrainerInitInfo
        info = cls(self.cfg.sync_address, get_free_port(), 1 + sum(workers), rank=0)
        client = SyncClient(self.nodes, workers)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self.weights)

    def sync(self, version: int) -> float:
        """The whole cycle for ``version``; returns the probe's largest log-prob difference.

        Raises ``RuntimeError`` when a phase fails or the probe exceeds its bound: the version is then not committed.
        """
        began = time.monotonic()
        if self.ranks.rank == 0:
            states = [reply.json() for reply in self.nodes.each("/sync/begin", {})]
            self.positions |= {f"{state['seed']}": state["position"] for state in states}
            members = [(url, *state["engines"]) for url, state in zip(self.nodes.urls, states, strict=True)]
            if members != self.members:  # at first; and when an engine was started again, or a node is gone
                log.info("weight transfer to %s", members)
                self.sender = self.connect([state["workers"] for state in states])
                self.members = members
            try:
                self.sender.send_weights()
            except RuntimeError as error:
                raise RuntimeError(f"weight sync to version {version}, see the nodes' logs: {error}") from error
        else:
            for _ in self.weights:
                pass
        difference = self.probe()
        if self.ranks.rank == 0:
            self.nodes.each("/sync/commit", {"version": version})
        self.seconds += time.monotonic() - began
        return difference

    def probe(self) -> float:
        """Every engine samples a few tokens; the trainer's log-probs of them must agree to ``probe_bound``.

        So must, layer by layer, what its own routers choose: that finds a layer taken for another.
        """
        asked = {"prompts": self.prompts, "max_tokens": self.cfg.probe_tokens}
        replies = self.nodes.each("/sync/probe", asked) if self.ranks.rank == 0 else []
        differences, agreements = [], []
        for index in range(self.ranks.from_rank0(lambda: len(replies))):
            rows = unpack_rows(self.ranks.broadcast(replies[index].content if replies else None))
            batch = pack([(row, 0) for row in rows], self.ranks.device)
            logp_S = score(self.policy, [batch], self.replay, metered=True).logp_S
            differences.append((logp_S - batch.behaviour_S).abs().max())
            if self.replay:
                *agreed_L, compared = self.replay.take_agreement().tolist()
                agreements.append([agreed / compared for agreed in agreed_L])
        worst = float(torch.stack(differences).max())  # Python's max would lose a NaN
        self.worst = max(self.worst, worst)
        agreed_L = [min(shares) for shares in zip(*agreements, strict=True)]
        shares = ", ".join(f"{share:.3f}" for share in agreed_L)
        experts = f", its experts are those of the trainer's routers in shares [{shares}] by layer" if shares else ""
        # "not <=" rather than ">": a NaN must not pass.
        if not worst <= self.cfg.probe_bound or not min(agreed_L, default=1.0) >= self.cfg.probe_agreement:
            raise RuntimeError(f"probe: an engine's log-probs differ from the trainer's by {worst:.3g}{experts}: its "
                               "weights, or its layers, are not the trainer's (or probe_bound "
                               f"{self.cfg.probe_bound:g}, probe_agreement {self.cfg.probe_agreement:g} are too tight "
                               "for this dtype)")  # fmt: skip
        return worst


class Unsynced(Syncer):
    """For a run without engines."""

    def sync(self, version: int) -> float:
        return 0.0


# ------------------------------------------------------------------------------------- ledger and metrics


def ledger_line(step: int, node: dict, counts_RC: torch.Tensor, listed: int) -> dict:
    """One step's ledger line, checked. ``counts_RC`` holds, per rank, sampled tokens by ``gate.REASONS``.

    The law: sampled by the engines + pending before = trained + gated + masked + dropped + pending after. Every term
    is counted where it happens. Raises ``RuntimeError`` with all of them when it does not hold.
    """
    ranks = [dict(zip(gate.REASONS, (int(n) for n in row), strict=True)) for row in counts_RC]
    total = {reason: sum(rank[reason] for rank in ranks) for reason in gate.REASONS}
    gated = {reason: number for reason, number in total.items() if reason not in ("kept", "masked")}
    line = {"step": step, **node, "trained": total["kept"], "gated": gated, "masked": total["masked"], "ranks": ranks}
    received = sum(total.values())
    left = node["sampled"] + node["pending_before"]
    right = received + sum(node["dropped"].values()) + node["pending_after"]
    if left != right or received != listed:
        found = f"{left} != {right}, rows listed {listed}: {json.dumps(line)}"
        raise RuntimeError(f"ledger does not balance at step {step}: {found}")
    return line


def to_tensorboard(cfg: TrainConfig) -> Callable[[dict], None]:
    """Writes a step's metrics into the run's folder as TensorBoard reads them."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(cfg.out, flush_secs=1)
    return lambda m: [writer.add_scalar(name, value, m["step"]) for name, value in m.items()]


def to_wandb(cfg: TrainConfig) -> Callable[[dict], None]:
    """Logs a step's metrics to Weights & Biases, in a run that has this run's name."""
    import wandb

    run = wandb.init(project="instar", name=Path(cfg.out).name, dir=cfg.out, config=asdict(cfg))
    return lambda m: run.log(m, step=m["step"])


TRACKERS = {"tensorboard": to_tensorboard, "wandb": to_wandb}


class Journal:
    """The run's files; rank 0 alone writes."""

    def __init__(self, cfg: TrainConfig, ranks: Ranks, saved: Saved):
        self.root, self.writes = Path(cfg.out), ranks.rank == 0
        self.sampled = self.pending = 0
        """Sampled tokens over the ledger's lines, and those that its last line leaves pending."""
        if self.writes:
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / "config.json").write_text(json.dumps(asdict(cfg), indent=2) + "\n")
            versions = {found.name: found.version for found in importlib.metadata.distributions()}
            (self.root / "versions.json").write_text(json.dumps(versions, indent=2, sort_keys=True) + "\n")
            self.go_on(Path(saved.run), saved.step)
        self.track = TRACKERS[cfg.track](cfg) if self.writes and cfg.track else lambda m: None

    def go_on(self, run: Path, step: int) -> None:
        """Keep what ``run`` wrote of its first steps; a run that begins keeps nothing."""
        for name in ("metrics.jsonl", "ledger.jsonl", "schedule.jsonl", "evaluations.jsonl"):
            kept = [line for line in read_lines(run / name) if line["step"] <= step] if step else []
            (self.root / name).write_text("".join(f"{json.dumps(line)}\n" for line in kept))
            if name == "ledger.jsonl":
                for line in kept:
                    self.sampled, self.pending = self.sampled + line["sampled"], line["pending_after"]
        for path in (*run.glob("rows/step-*"), *run.glob("decisions/step-*")):
            if run == self.root and int(path.name[5:]) > step:
                shutil.rmtree(path)
            elif run != self.root and int(path.name[5:]) <= step:
                shutil.copytree(path, self.root / path.parent.name / path.name, dirs_exist_ok=True)

    def ledger(self, line: dict) -> None:
        """A balanced line."""
        self.sampled += line["sampled"]
        self.append("ledger.jsonl", line)

    def append(self, name: str, line: dict) -> None:
        if self.writes:
            with (self.root / name).open("a") as file:
                file.write(json.dumps(line) + "\n")

    def evaluation(self, line: dict) -> None:
        """An evaluation's line, and one for people."""
        scores = {f"pass@{k}": found[0] for k, found in line["pass"].items() if found}
        self.track({"step": line["step"], "eval/reward": line["reward"]} | {f"eval/{k}": v for k, v in scores.items()})
        self.append("evaluations.jsonl", line)
        if self.writes:
            passes = "  ".join(f"{name} {score:.3f}" for name, score in scores.items())
            band = f" ({line['low']:.3f} to {line['high']:.3f})" if line["low"] is not None else ""
            print(f"evaluation after step {line['step']}: reward {line['reward']:.3f}{band}  {passes}  of "
                  f"{line['tasks']} tasks, {line['failed']} rollouts failed", flush=True)  # fmt: skip

    def step(self, m: dict) -> None:
        """The metrics line, and one for people."""
        self.track(m)
        self.append("metrics.jsonl", {name: value if value == value else None for name, value in m.items()})  # no NaN
        if self.writes:
            compared = f"kl {m['kl/k1']:.4f}  " if "kl/k1" in m else ""
            print(f"step {m['step']:4d}  reward {m['reward']:.3f}  {compared}lag {m['gate/lag_mean']:.2f}  "
                  f"gated {m['gate/gated']:6.1%}  mismatch {m['mismatch/mean']:.1e}  "
                  f"probe {m['sync/probe_max_abs_dlogp']:.1e}  {m['tokens_per_second']:6.0f} tok/s  "
                  f"generate {m['seconds/generate']:.2f} train {m['seconds/train']:.2f} "
                  f"sync {m['seconds/sync']:.2f} s", flush=True)  # fmt: skip
            if m["rollout/truncated"] > 0.9:
                log.warning("step %d: %.0f%% of the rollouts were truncated, so most rewards are of unfinished work; "
                            "raise the limit that cuts them", m["step"], 100 * m["rollout/truncated"])  # fmt: skip


def rollout_metrics(rollouts: list[dict]) -> dict[str, float]:
    """Mean reward and share cut short of the rollouts that can be trained on; share of their tokens not trained."""
    good = [rollout for rollout in rollouts if rollout["status"] in TRAINABLE]
    rows = [row for rollout in rollouts for row in rollout["rows"]]
    return {
        "reward": sum(rollout["reward"] for rollout in good) / len(good),
        "rollout/truncated": sum(rollout["status"] == "truncated" for rollout in good) / len(good),
        "gate/masked": 1 - sum(row["sampled"] for row in rows) / sum(row["tokens"] for row in rows),
    }


def step_metrics(batch: Batch, decision, log_ratio_S, lag_S, scored: Scored, reference_S, target_S, cfg: TrainConfig,
                 ranks: Ranks) -> dict:  # fmt: skip
    """``gate/*``, ``mismatch/*``, ``kl/*``, ``value/*`` over the tokens of all ranks."""
    local = (*decision, log_ratio_S, lag_S, batch.trained_S, batch.rollout_S)
    keep_S, weight_S, reason_S, log_ratio_S, lag_S, trained_S, rollout_S = map(ranks.concat, local)
    merged = gate.Decision(keep_S, weight_S, reason_S)
    groups = {"mismatch": gate.mismatch(log_ratio_S, trained_S),
              "gate": gate.gate_metrics(merged, log_ratio_S, lag_S, rollout_S)}  # fmt: skip
    if cfg.ref_model:
        log_ref_S = gate.log_ratio(reference_S, scored.logp_S, batch.trained_S)
        groups["kl"] = gate.mismatch(ranks.concat(log_ref_S), trained_S)
    if cfg.advantage == "gae":
        value_s, target_s = (ranks.concat(x_S[batch.trained_S]).double() for x_S in (scored.value_S, target_S))
        left = float((target_s - value_s).var() / target_s.var())  # NaN where all targets are one number
        groups["value"] = {"mean": float(value_s.mean()), "explained_variance": 1 - left}
    metrics = {f"{group}/{name}": value for group, found in groups.items() for name, value in found.items()}
    metrics["entropy"] = float(ranks.concat(scored.entropy_S)[trained_S].mean())
    return metrics


def keep_decisions(folder: Path, rank: int, micro: list[MicroBatch], **found_S: torch.Tensor) -> None:
    """``decisions/step-000040/rank-0.safetensors``: what became of each token of this rank's rows, ``[S]`` each, beside
    where it is: ``rollout`` in the manifest, ``row`` in the list ``rows`` of the file's metadata, ``at`` in that row,
    ``micro``. For tools/trace."""
    rows = [(place, row) for place, one in enumerate(micro) for row in one.rows]
    spots = [(n, at, place) for n, (place, row) in enumerate(rows) for at in np.flatnonzero(row.sampled)]
    where = dict(zip(("row", "at", "micro"), torch.tensor(spots).T, strict=True))
    where["rollout"] = torch.cat([one.rollout_S for one in micro])
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value_S.detach().cpu().contiguous() for name, value_S in (where | found_S).items()}
    save_file(tensors, folder / f"rank-{rank}.safetensors", {"rows": json.dumps([row.row_id for _, row in rows])})


def replay_metrics(policy: Policy, micro: list[MicroBatch], scored: Scored, step: int, conflicts: float, ranks: Ranks,
                   replay: moe_replay.RouteReplay) -> dict[str, float]:  # fmt: skip
    """``replay/*``: what was replayed, how often live routers agree, and what replay is for.

    Shares are of all positions of the batch's rows; a conflict is a position that a later call routed otherwise than
    the replayed one. The k3 are of one micro-batch per rank, another each step, scored by live routers as well.
    """
    rows = [row.experts_known for one in micro if one.trained_S.any() for row in one.rows]
    replayed, last, gaps = ranks.sum(moe_replay.coverage(rows)).tolist()
    total = replayed + last + gaps
    shares = {"replayed": replayed, "live/last_token": last, "live/gap": gaps, "conflicting": conflicts}
    metrics = {f"replay/{name}": number / total for name, number in shares.items()}
    *agreed_L, compared = ranks.sum(replay.take_agreement()).tolist()
    metrics |= {f"replay/agreement/{layer}": agreed / compared for layer, agreed in enumerate(agreed_L)}
    index = step % len(micro)
    one, sizes = micro[index], [len(one.target_S) for one in micro]
    trained_S = ranks.concat(one.trained_S)
    for name, logp_S in (("replayed", scored.logp_S.split(sizes)[index]), ("live", score(policy, [one], None).logp_S)):
        with named_rows([one]):
            log_ratio_S = gate.log_ratio(logp_S, one.behaviour_S, one.trained_S)
        metrics[f"replay/k3_{name}"] = gate.mismatch(ranks.concat(log_ratio_S), trained_S)["k3"]
    return metrics


def save_model(policy: Policy, cfg: TrainConfig, path: Path, writes: bool) -> None:
    """The policy as a Hugging Face folder, which transformers and vLLM load. Every rank gathers, one writes."""
    state = {}
    persistent = policy.model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in policy.model.named_buffers() if name in persistent]
    with torch.no_grad():
        for name, parameter in [*policy.model.named_parameters(), *buffers]:
            tensor = full(parameter)
            if writes:
                state[name] = tensor.cpu()
    if writes:
        policy.model.save_pretrained(path, state_dict=state)
        (AutoProcessor if policy.eyes else AutoTokenizer).from_pretrained(cfg.model).save_pretrained(path)


# --------------------------------------------------------------------------------------------- checkpoints


@dataclass
class Saved:
    """What a checkpoint holds beside the weights and the optimizer's state; of step 0 for a run that begins.

    Nothing of chance is in it: every step seeds torch anew, and the nodes' tasks follow from their seeds.
    """

    run: str
    """Folder of the run that wrote it."""
    step: int
    kl_coef: float
    reward_before: float | None
    positions: dict[str, dict]
    """Where each rollout node, by its seed, was in its tasks."""
    config: dict


def checkpoint_of(cfg: TrainConfig) -> Path | None:
    """The checkpoint that ``--resume`` means, None for a run that begins."""
    if cfg.resume == "auto":
        return max((Path(cfg.out) / "checkpoints").glob("step-*"), default=None)
    return Path(cfg.resume) if cfg.resume else None


class Checkpoints:
    """``checkpoints/step-000040`` of a run: the sharded weights and optimizer state as torch.distributed.checkpoint
    writes them, which any number of ranks can read, and ``state.json``.

    Each is written aside and renamed: a kill at any byte leaves the one before whole.
    """

    def __init__(self, cfg: TrainConfig, ranks: Ranks, policy: Policy, optimizer):
        self.cfg, self.ranks, self.parts = cfg, ranks, (policy, optimizer)
        self.folder = Path(cfg.out) / "checkpoints"

    def tensors(self) -> dict:
        """Weights and optimizer state by their names, as shards."""
        return dict(zip(("model", "optimizer"), get_state_dict(*self.parts), strict=True))

    def load(self) -> Saved:
        """Put the checkpoint of ``--resume`` into the policy and its optimizer. Raises ``ValueError`` where the
        config's versions are not the checkpoint's; whatever else of the config changed is logged."""
        cfg, path = self.cfg, checkpoint_of(self.cfg)
        if path is None:
            return Saved(cfg.out, 0, cfg.kl_coef, None, {}, asdict(cfg))
        saved = Saved(**json.loads((path / "state.json").read_text()) | {"run": f"{path.parent.parent}"})
        theirs, tensors = TrainConfig(**saved.config), self.tensors()
        if theirs.versions_per_step != cfg.versions_per_step:
            raise ValueError(f"--resume {path}: a step makes {cfg.versions_per_step} versions, in the checkpoint "
                             f"{theirs.versions_per_step}; keep --minibatches and --sync_minibatches")  # fmt: skip
        changed = {name: (old, vars(cfg)[name]) for name, old in vars(theirs).items() if old != vars(cfg)[name]}
        log.info("resuming after step %d of %s; changed since: %s", saved.step, path, changed)
        dcp.load(tensors, checkpoint_id=path)
        set_state_dict(*self.parts, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])
        return replace(saved, kl_coef=saved.kl_coef if cfg.kl_target else cfg.kl_coef)

    def save(self, saved: Saved) -> None:
        """Write a checkpoint when one is due after this step, and remove the oldest beyond ``checkpoint_keep``."""
        if not self.cfg.checkpoint_steps or saved.step % self.cfg.checkpoint_steps:
            return
        aside, writes = self.folder / "unfinished", self.ranks.rank == 0
        if writes:
            shutil.rmtree(aside, ignore_errors=True)
        dist.barrier()
        dcp.save(self.tensors(), checkpoint_id=aside)
        if writes:
            (aside / "state.json").write_text(json.dumps(asdict(saved)) + "\n")
            aside.rename(step_folder(self.cfg.out, "checkpoints", saved.step))
            for old in sorted(self.folder.glob("step-*"))[: -self.cfg.checkpoint_keep]:
                shutil.rmtree(old)
        dist.barrier()


# ------------------------------------------------------------------------------------------------- the loop


def check_nodes(states: list[dict], cfg: TrainConfig) -> None:
    """The nodes must run under the same bound as the trainer."""
    if cfg.advantage not in ("rloo", "grpo", "dr_grpo") and any(state["filter_groups"] for state in states):
        raise ValueError(f"--advantage {cfg.advantage} learns from groups of equal rewards as well, and is biased "
                         "without them; leave --filter_groups out of the rollout nodes")  # fmt: skip
    if len({state["seed"] for state in states}) < len(states):
        raise ValueError(f"rollout nodes have the seeds {[state['seed'] for state in states]}: two of them would play "
                         "the same tasks with the same samples; start each with its own --seed")  # fmt: skip
    for state in states:
        theirs = [state[name] for name in ("max_lag", "versions_per_step", "version")]
        if theirs != [cfg.max_lag, cfg.versions_per_step, 0]:
            raise ValueError(f"rollout node has max_lag, versions_per_step and version {theirs}, the trainer "
                             f"{[cfg.max_lag, cfg.versions_per_step, 0]}; start both from the same recipe")  # fmt: skip


def evaluate(cfg: TrainConfig, ranks: Ranks, nodes: Nodes, syncer: Syncer, journal: Journal, step: int) -> float | None:
    """Mean held-out reward after a step; once more, if a node lost its engines meanwhile. No rollout of it is ever a
    row. ``evaluations.jsonl`` has it all, a line for each evaluation."""
    if not cfg.eval_tasks:
        return None
    asked = {"limit": cfg.eval_tasks, "samples": cfg.eval_samples, "temperature": cfg.eval_temperature}
    while "tasks" not in (found := ranks.from_rank0(lambda: nodes.one("/evaluate", asked).json())):
        syncer.sync(step * cfg.versions_per_step)
    line = {"step": step, "version": found["version"], "failed": found["failed"]} | asked
    line |= assess(found["tasks"], cfg.eval_samples, cfg.eval_pass)
    journal.evaluation(line)
    return line["reward"]


def assess(tasks: list[dict], samples: int, passed: float) -> dict:
    """What an evaluation found: mean reward and pass@k, over all tasks and by data source, each a mean over tasks with
    its 95% interval. A task none of whose rollouts counts (they failed) is left out; one that has fewer than k of them
    is left out of pass@k.
    """
    tasks = [task for task in tasks if task["rewards"]]
    groups = {"": tasks}
    for task in tasks:
        groups.setdefault(task["source"], []).extend([task] if task["source"] else [])
    by_source = {}
    for source, some in groups.items():
        rewards = [task["rewards"] for task in some]
        mean, low, high = interval([sum(one) / len(one) for one in rewards])
        ks = sorted({*(2**n for n in range(samples.bit_length())), samples})
        passes = {f"{k}": interval([pass_at(k, one, passed) for one in rewards if len(one) >= k]) for k in ks}
        by_source[source] = {"reward": mean, "low": low, "high": high, "tasks": len(some), "pass": passes}
    return by_source.pop("") | {"sources": by_source}


def pass_at(k: int, rewards: list[float], passed: float) -> float:
    """The chance that one of ``k`` samples at least passes, unbiased from n of which c do: 1 - C(n-c, k) / C(n, k)
    (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Example: rewards [1, 0, 0, 0] with k 2 and passed 1 give 0.5.
    """
    return 1 - math.comb(sum(reward < passed for reward in rewards), k) / math.comb(len(rewards), k)


def interval(values: list[float]) -> tuple[float, float, float] | tuple[float, None, None] | None:
    """Mean over tasks, and the ends of its 95% interval by the normal approximation (Miller 2024, arXiv 2411.00640): a
    task's own samples are averaged first, so that they are not taken for independent. No ends for one value."""
    if not values:
        return None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None, None
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def make_optimizer(policy: Policy, cfg: TrainConfig):
    """AdamW, which ``steer`` sets up for each step."""
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
    return torch.optim.AdamW([parameter for parameter in policy.parameters() if parameter.requires_grad])


def steer(optimizer, cfg: TrainConfig, step: int) -> float:
    """Set the optimizer up for a step, counted from 0, by the config alone; returns the learning rate."""
    decay = 1 - 0.9 * step / cfg.steps if cfg.lr_decay else 1.0
    lr = cfg.lr * (min(1.0, (step + 1) / max(1, cfg.warmup_steps)) * decay)
    for group in optimizer.param_groups:
        group.update(lr=lr, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay)
    return lr


def train(cfg: TrainConfig) -> None:
    """The algorithm. Everything a token meets between its rollout and its gradient is called from here."""
    torch.manual_seed(cfg.seed)
    ranks, nodes = Ranks(cfg), (Recorded if cfg.retrain else Nodes)(cfg)
    policy, reference = shard(Policy(cfg), cfg, ranks), make_reference(cfg, ranks)
    replay = make_replay(policy, cfg)
    if cfg.freeze_router:
        freeze_routers(policy)
    optimizer = make_optimizer(policy, cfg)
    checkpoints = Checkpoints(cfg, ranks, policy, optimizer)
    saved = checkpoints.load()
    chosen_gate, kl_coef, journal = read_gate(cfg.gate), saved.kl_coef, Journal(cfg, ranks, saved)
    states = ranks.from_rank0(nodes.wait_ready)
    check_nodes(states, cfg)
    if saved.step and ranks.rank == 0:
        nodes.resume(states, saved, journal.sampled, journal.pending)
    syncer = (Unsynced if cfg.retrain else Syncer)(cfg, ranks, nodes, policy, replay)
    syncer.sync(saved.step * cfg.versions_per_step)
    started = max([state["engine_seconds"] for state in states], default=0.0)
    seconds = {"engine_start": started, "eval": 0.0, "train": 0.0}

    clock = time.monotonic()
    reward_before = saved.reward_before if saved.step else evaluate(cfg, ranks, nodes, syncer, journal, 0)
    seconds["eval"] += time.monotonic() - clock
    train_began = time.monotonic()

    for step in range(saved.step, cfg.steps):
        torch.manual_seed(cfg.seed + step)
        lr = steer(optimizer, cfg, step)

        # Rows: rank 0 reads the manifest, every rank fetches its own.
        clock, version = time.monotonic(), step * cfg.versions_per_step
        while not (manifest := ranks.from_rank0(lambda version=version: nodes.manifest(version))):
            syncer.sync(version)  # all engines of a node were started again
        rows = fetch(manifest, ranks, nodes)
        rollouts, group_N = manifest["rollouts"], groups_of(manifest["rollouts"])
        parts = mini_batches(rows, cfg, ranks, replay)
        micro = [one for part in parts for one in part]
        batch = Batch.of(micro)
        generated, syncer.seconds = time.monotonic(), 0.0

        # What the policy says of every sampled token now, and the reference (without one: the policy itself).
        scored = score(policy, micro, replay, metered=True)
        reference_S = score(reference, micro, None).logp_S if reference else scored.logp_S
        metrics = {}
        if replay:
            conflicts = manifest["meters"]["identity/route_conflicts"]
            metrics = replay_metrics(policy, micro, scored, step, conflicts, ranks, replay)

        with named_rows(micro):
            # Rewards to advantages, over rollouts.
            credit = assign_credit(cfg, ranks, rollouts, group_N, batch, scored, reference_S, kl_coef)

            # The gate: which tokens are trained, and with what weight.
            log_ratio_S = gate.log_ratio(scored.logp_S, batch.behaviour_S, batch.trained_S)
            lag_S = gate.lag(batch.version_S, version, batch.trained_S)
            decision = gate.gate(
                **chosen_gate, log_ratio_T=log_ratio_S, rollout_T=batch.rollout_S, trained_T=batch.trained_S,
                lag_T=lag_S, max_lag=cfg.max_lag, behaviour_T=batch.behaviour_S,
            )  # fmt: skip

        # The ledger: every sampled token is accounted for before any of them multiplies a gradient.
        counts_RC = ranks.concat(reason_counts(decision, batch)).view(ranks.world, -1)
        listed = sum(row["sampled"] for rollout in rollouts for row in rollout["rows"])
        line = ledger_line(step + 1, manifest["ledger"], counts_RC, listed)

        # Gradients: an optimizer step for each mini-batch, whose denominator is known before its first gradient.
        terms = Terms(batch.rollout_S, batch.trained_S, scored.logp_S, reference_S, *credit, decision.keep_T,
                      decision.weight_T, torch.zeros_like(scored.logp_S))  # fmt: skip
        sizes = [sum(len(one.target_S) for one in part) for part in parts]
        updates = []
        for index, (part, mine) in enumerate(zip(parts, terms.split(sizes), strict=True)):
            updates.append(update(policy, optimizer, part, mine, cfg, ranks, replay, group_N, kl_coef, moved=index > 0))
            # The new version, in every engine, or the run stops.
            if cfg.sync_minibatches or part is parts[-1]:
                version += 1
                probe_difference = syncer.sync(version)
        ended, ended_at = time.monotonic(), time.time()

        if cfg.keep_rows:
            divisors_S = torch.cat([torch.full([n], one["denominator"]) for n, one in zip(sizes, updates, strict=True)])
            keep_decisions(step_folder(cfg.out, "decisions", step + 1), ranks.rank, micro,
                           logp=scored.logp_S, lag=lag_S, reason=decision.reason_T, weight=decision.weight_T,
                           advantage=credit.advantage_S, denominator=divisors_S)  # fmt: skip
        metrics |= step_metrics(batch, decision, log_ratio_S, lag_S, scored, reference_S, credit.target_S, cfg, ranks)
        journal.ledger(line)
        journal.append("schedule.jsonl", manifest)
        journal.step({
            "step": step + 1,
            "seconds/clock": ended_at,
            **rollout_metrics(rollouts),
            **{name: sum(one[name] for one in updates) / len(updates) for name in updates[0]},
            "lr": lr,
            **({"kl/coef": kl_coef} if reference else {}),
            "sync/probe_max_abs_dlogp": probe_difference,
            "tokens_per_second": listed / (ended - clock),
            "seconds/generate": generated - clock,
            "seconds/train": ended - generated - syncer.seconds,
            "seconds/sync": syncer.seconds,
            **{f"rollout/dropped/{reason}": number for reason, number in line["dropped"].items()},
            **manifest["meters"],
            **metrics,
        })  # fmt: skip
        if cfg.kl_target:
            kl_coef = gate.adapt_kl(kl_coef, metrics["kl/k1"], cfg.kl_target)
        if cfg.eval_steps and (step + 1) % cfg.eval_steps == 0 and step + 1 < cfg.steps:
            clock = time.monotonic()
            evaluate(cfg, ranks, nodes, syncer, journal, step + 1)
            seconds["eval"] += time.monotonic() - clock
        checkpoints.save(Saved(cfg.out, step + 1, kl_coef, reward_before, syncer.positions, asdict(cfg)))

    seconds["train"] = time.monotonic() - train_began
    finish(cfg, ranks, nodes, journal, policy, syncer, reward_before, seconds)


def reason_counts(decision, batch: Batch) -> torch.Tensor:
    """Sampled tokens of this rank by ``gate.REASONS``; a filler's token was never sampled."""
    return torch.bincount(decision.reason_T[batch.trained_S].long(), minlength=len(gate.REASONS))


def finish(cfg, ranks: Ranks, nodes: Nodes, journal: Journal, policy, syncer: Syncer, reward_before, seconds) -> None:
    """Save, evaluate, close the ledger, tell the nodes to end, and write summary.json."""
    save_model(policy, cfg, journal.root / "model", journal.writes)  # first: whatever fails from here on costs nothing
    clock = time.monotonic()
    reward_after = evaluate(cfg, ranks, nodes, syncer, journal, cfg.steps)
    seconds["eval"] += time.monotonic() - clock
    last = dict.fromkeys(LEDGER, 0) | {"dropped": {}}
    if ranks.rank == 0:
        for reply in nodes.each("/finish", {}):
            add_ledger(last, reply.json())
        nodes.settle(last)
        if last["pending_after"]:
            raise RuntimeError(f"ledger: {last['pending_after']} sampled tokens still pending after the end: {last}")
        journal.ledger(ledger_line(cfg.steps + 1, last, torch.zeros(1, len(gate.REASONS)), 0))
        sampled = nodes.sampled()
        journal.append("schedule.jsonl", {"step": cfg.steps + 1, "ledger": last, "sampled": sampled})
        if sampled != journal.sampled:
            raise RuntimeError(f"ledger: its lines hold {journal.sampled} sampled tokens, the engines' count {sampled}")
        nodes.each("/shutdown", {})
        summary = {name: vars(cfg)[name] for name in ("recipe", "seed", "steps")} | {
            "reward_before": reward_before,
            "reward_after": reward_after,
            "seconds": {name: round(value, 1) for name, value in seconds.items()},
            "probe_max_abs_dlogp": syncer.worst,
            "ledger_balanced": sampled == journal.sampled,
        }
        (journal.root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Entry point: any failure ends in one line that names the cause."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    end_with_parent()  # torchrun starts ranks in sessions of their own, which no group signal reaches
    try:
        (cfg,) = HfArgumentParser(TrainConfig, allow_abbrev=False).parse_args_into_dataclasses()
        if cfg.retrain:
            recorded = json.loads((Path(cfg.retrain) / "config.json").read_text())
            own = ("retrain", "out", "resume", "checkpoint_steps", "checkpoint_keep")
            own = {name: vars(cfg)[name] for name in own}
            cfg = replace(TrainConfig(**recorded), **own, keep_rows=False, eval_tasks=0)
        validate(cfg)
        train(cfg)
    except Exception as error:
        if not isinstance(error, ValueError | RuntimeError | OSError):
            log.error("not a failure that was foreseen", exc_info=error)
        print(f"rl.py: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        # Not sys.exit: the other ranks may be inside a collective, and interpreter exit would wait for the group.
        os._exit(1)


if __name__ == "__main__":
    main()
