"""A rollout node: vLLM engines, the router in front of them, the scheduler that feeds them, and the control API.

    python rollout.py --model models/toy --agent agents/calculator.py --control_port 8700 ...

The loops of this file:

**Scheduler** (``Scheduler.run``)
  consumes   tasks of the agent's "train" split
  produces   finished groups, oldest first, for ``GET /manifest``
  waits for  room under the staleness bound
  unblocked  by a commit (the version rises) or by a dropped group
  deadline   the node's watchdog: a trainer silent for ``trainer_timeout_s`` ends the node
  failure    a rollout that fails is dropped with its status; when group after group has none that can be trained
             on, the next manifest says so and the run ends; the scheduler itself failing ends the node
  shutdown   its task is cancelled; what was in flight is dropped with reason ``run_end``

**Router** (``Router.generate``, one per call)
  consumes   a ``Call`` of a session
  produces   its tokens, log-probs, routes, each with the version that sampled it
  waits for  admission (closed during a weight sync), then for the engine
  unblocked  by commit, by the engine, or by its deadline ``call_timeout_s``
  failure    a dead engine's calls go on, from what it had returned, on another one, or wait for one;
             ``EngineFailure`` otherwise, and the rollout is then dropped as ``engine_error``
  shutdown   the rollout's task is cancelled, which aborts the engine's request

**Keeper** (``Node.keep``, one per engine)
  consumes   the engine's signs of life, asked for once a second outside of a weight sync
  produces   a new engine in place of one that died or hangs; it joins, and may sample, from the next weight sync on
  waits for  the engine's answer, ``engine_timeout_s``; then for the new engine to start, one at a time
  unblocked  by the engine
  deadline   a node whose engines all wait to join tells the trainer, which then syncs at once
  failure    more than ``engine_restarts`` restarts end the node
  shutdown   its task is cancelled; an engine that is starting is awaited, and shut down with the others

**Weight sync** (begin, connect/start/update/finish, probe, commit; driven by rank 0 of rl.py)
  begin closes admission and aborts what runs (partial outputs are kept with their version), so no request ever
  spans two versions; its answer says which engines take part, and where they are others than the last time the
  trainer makes a new transfer group; commit raises the version and opens admission. A failure in between leaves the
  version as it is and ends the run, within ``sync_timeout_s``: engines may hold a mixture of weights.

Legend: S tokens of a call, L mixture-of-experts layers, K experts per token.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import hmac
import json
import logging
import math
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any

# vLLM's default on a GPU is to fork, which is not safe beside threads and would register the gloo backend twice.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
# Python's tracker of shared memory would have the last word of a node that fails, after the cause.
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")

import numpy as np
import torch
import torch.distributed as dist
from aiohttp import web
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.executor.uniproc_executor import UniProcExecutor

import agents
import gate
import moe_replay
from agents.children import end_with_parent
from loopback import (
    TRAINABLE,
    Branch,
    Call,
    Loopback,
    Row,
    Sampling,
    Session,
    Template,
    WireError,
    identity_meters,
    image_ids,
    pack_rows,
    picture,
)

log = logging.getLogger("rollout")

LONG_POLL_S = 20.0
"""A manifest request that finds no full batch is answered 204 after this long; the trainer asks again."""
SHUT_TIMEOUT_S = 10.0
"""How long cancelled rollouts may take to end."""
PULSE_S, STALL_S = 0.05, 2.0
"""How often the event loop's lateness is measured, and from when on it is said in the log."""
GROUP_TIMEOUT_S = 120
"""Deadline of one collective of the weight-transfer group."""


class EngineFailure(RuntimeError):
    """An engine could not finish a call."""


# -------------------------------------------------------------------------------------------------- config


def flag(default, help: str):
    """A config field with its description."""
    return field(default=default, metadata={"help": help})


@dataclass
class RolloutConfig:
    """A rollout node. Defaults are those of the toy on a CPU; recipes hold everything else."""

    model: str = flag("", "folder of the model (Hugging Face format) that the engines load at version 0")
    agent: str = flag("", "Python file that exports AgentRunner")
    data: str = flag("", "the agent's train rows, where it makes none: a .jsonl file, .parquet files, a saved dataset")
    eval_data: str = flag("", "its held-out rows, likewise")
    device: str = flag("cpu", "cpu or cuda")
    dtype: str = flag("float32", "the engines' dtype: float32, bfloat16, ...")
    engines: int = flag(1, "number of vLLM engines on this node")
    tensor_parallel: int = flag(1, "GPUs per engine")
    gpus: str = flag("", "comma-separated GPU ids the engines share out; empty: 0, 1, 2, ...")
    gpu_memory_utilization: float = flag(0.85, "share of GPU memory an engine may take")
    kv_cache_gib: float = flag(1.0, "KV cache of an engine on a CPU, GiB")
    max_model_len: int = flag(1024, "context, tokens")
    max_tokens: int = flag(96, "cap of sampled tokens per call, where the client asks for none")
    max_num_seqs: int = flag(128, "sequences an engine decodes at once")
    temperature: float = flag(1.0, "sampling temperature of training rollouts")
    tool_parser: str = flag("hermes", "name of vLLM's tool parser; empty: none")
    reasoning_parser: str = flag("", "name of vLLM's reasoning parser; empty: none")
    group_size: int = flag(8, "rollouts per task")
    filter_groups: bool = flag(False, "replace groups of equal rewards, which have no advantage by rloo, grpo, dr_grpo")
    groups_per_step: int = flag(8, "groups the trainer consumes per optimizer step")
    max_lag: int = flag(0, "largest lag, in versions, of a token when it is consumed; 0: synchronous")
    versions_per_step: int = flag(1, "weight syncs of one step: the trainer's --minibatches under --sync_minibatches")
    partial_rollouts: bool = flag(True, "a weight sync interrupts calls, which go on under the new weights; or waits")
    steps: int = flag(0, "optimizer steps of the run: no group beyond them is started; 0: no limit")
    seed: int = flag(0, "seed of tasks and engines")
    affinity_factor: float = flag(4.0, "a session leaves an engine at so many times the idlest's outstanding tokens")
    rollout_timeout_s: float = flag(300.0, "deadline of one rollout, seconds")
    call_timeout_s: float = flag(240.0, "deadline of one call, seconds, syncs included")
    engine_timeout_s: float = flag(60.0, "an engine that gives no sign of life for this long is started again, seconds")
    engine_restarts: int = flag(3, "engines that may be started again in a run, after they died or hung")
    sync_timeout_s: float = flag(120.0, "deadline of each phase of a weight sync, seconds")
    trainer_timeout_s: float = flag(1800.0, "the node ends when no trainer spoke for this long, seconds")
    control_host: str = flag("127.0.0.1", "address the control API binds")
    control_port: int = flag(8700, "port of the control API")


def validate(cfg: RolloutConfig) -> None:
    """Refuse what cannot work, before anything starts. Raises ``ValueError`` with the values and the remedy."""
    if not (Path(cfg.model) / "config.json").is_file():
        raise ValueError(f"--model {cfg.model!r} holds no config.json; give a model folder (tools/toy.py builds one)")
    next(iter(load_agent(cfg).tasks("train", cfg.seed)), None)  # its rows are there
    if cfg.device not in ("cpu", "cuda"):
        raise ValueError(f"--device {cfg.device!r} must be cpu or cuda")
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU; use --device cpu, or install the GPU requirements")
    for name in ("engines", "tensor_parallel", "group_size", "groups_per_step", "max_tokens", "max_num_seqs",
                 "versions_per_step"):  # fmt: skip
        if vars(cfg)[name] < 1:
            raise ValueError(f"--{name} {vars(cfg)[name]} must be at least 1")
    if cfg.max_lag < 0:
        raise ValueError(f"--max_lag {cfg.max_lag} must be 0 (synchronous) or more")
    if cfg.filter_groups and cfg.group_size < 2:
        raise ValueError("--filter_groups with --group_size 1 would drop every group; leave it out")
    if not cfg.affinity_factor >= 1:
        raise ValueError(f"--affinity_factor {cfg.affinity_factor} must be 1 (no affinity) or more")
    if cfg.temperature <= 0:
        raise ValueError(f"--temperature {cfg.temperature} must be above 0: greedy rollouts have no log-prob to train")
    if cfg.max_tokens >= cfg.max_model_len:
        raise ValueError(f"--max_tokens {cfg.max_tokens} leaves no prompt in --max_model_len {cfg.max_model_len}")
    if not os.environ.get("INSTAR_SECRET"):
        raise ValueError("INSTAR_SECRET is not set; export the same random string for the trainer and every node")


def load_agent(cfg: RolloutConfig) -> type[agents.AgentRunner]:
    """The agent's class, which knows where its rows are."""
    agent = agents.load(cfg.agent)
    agent.data = {"train": cfg.data, "eval": cfg.eval_data}
    return agent


# ---------------------------------------------------------------------------------- weight transfer over gloo


def gloo_group(address: str, port: int, rank: int, world_size: int) -> dist.ProcessGroupGloo:
    """A group of the trainer (rank 0) and the engines' workers, apart from any default group."""
    deadline = timedelta(seconds=GROUP_TIMEOUT_S)
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=deadline)
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, deadline)


class GlooWorker(NCCLWeightTransferEngine):
    """The worker's side of vLLM's dense weight transfer, with gloo in NCCL's place."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = gloo_group(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def update_weights(self, update_info: dict) -> None:
        # The parent ends with a device synchronisation, which a CPU has no need of.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info) -> None:
        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                tensor = torch.empty(shape, dtype=vars(torch)[dtype])
                self.group.broadcast(tensor, 0).wait()
                yield name, tensor

        self.model.load_weights(received())

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        repack(self.model)


def repack(model: torch.nn.Module) -> None:
    """Prepack for the CPU kernels what vLLM 0.30.0's layerwise reload leaves packed from the old weights.

    Experts are reloaded but not packed again; a head tied to the embedding shares its weight but keeps a packed copy
    of its own. Either way the engine computes with a mixture of weights and nothing raises: the probe notices.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
        elif isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


@dataclass
class GlooTrainerInitInfo(NCCLTrainerInitInfo):
    """What the trainer's side needs to join."""

    backend = "gloo"


class GlooTrainer(NCCLTrainerWeightTransferEngine):
    """The sender's side; rank 0 of rl.py alone constructs it."""

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInitInfo, *, client, source) -> GlooTrainer:
        engine = cls(client=client, source=source, packed=False)
        where = {"master_address": init_info.master_address, "master_port": init_info.master_port}
        worker = NCCLWeightTransferInitInfo(**where, rank_offset=1, world_size=init_info.world_size)
        # The workers block until rank 0 joins, so the request to join runs beside our own joining.
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(client.init_weight_transfer_engine, worker_init_payload(worker))
            engine.model_update_group = gloo_group(*where.values(), 0, init_info.world_size)
            joined.result()
        return engine

    def _broadcast(self, source, meta) -> None:
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.contiguous(), 0).wait()


class WorkerExtension:
    """Named by ``worker_extension_cls`` so that each engine's worker imports this file, which registers gloo."""

    def moe_layers(self) -> list[int]:
        """Indices of the layers that have experts: the engine returns zeros as the routes of all others."""
        return sorted(module.layer_id for module in self.get_model().modules() if isinstance(module, MoERunner))


# A spawned process imports this file twice: as __mp_main__, and by name for WorkerExtension. Names register once.
if __name__ == "__mp_main__":
    end_with_parent()
else:
    WeightTransferEngineFactory.register_engine("gloo", GlooWorker)
    WeightTransferTrainerFactory.register_engine("gloo", GlooTrainer)


# ------------------------------------------------------------------------------------------ engines and router


def engine_args(cfg: RolloutConfig, moe: bool, index: int) -> AsyncEngineArgs:
    """How engine ``index`` is started: processed log-probs, token ids in and out, routes when there are experts.

    Each engine has its own seed: two with one seed would sample the same answers to a group's shared prompt.
    """
    return AsyncEngineArgs(
        model=cfg.model, dtype=cfg.dtype, max_model_len=cfg.max_model_len, max_num_seqs=cfg.max_num_seqs,
        gpu_memory_utilization=cfg.gpu_memory_utilization, tensor_parallel_size=cfg.tensor_parallel,
        enforce_eager=cfg.device == "cpu",
        enable_prefix_caching=True,
        enable_return_routed_experts=moe,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        weight_transfer_config=WeightTransferConfig(backend="nccl" if cfg.device == "cuda" else "gloo"),
        worker_extension_cls="rollout.WorkerExtension",
        # vLLM would add a process that spins while it waits, to bind threads to cores; here an engine has one thread.
        distributed_executor_backend=UniProcExecutor if cfg.device == "cpu" else None,
        seed=cfg.seed + 100_003 * index,
        disable_log_stats=True,
    )  # fmt: skip


def gpu_ids(cfg: RolloutConfig) -> list[str]:
    """The GPUs that the engines share out, as ``CUDA_VISIBLE_DEVICES`` spells them."""
    gpus = cfg.gpus.split(",") if cfg.gpus else [str(gpu) for gpu in range(cfg.engines * cfg.tensor_parallel)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if cfg.device == "cuda" else None
    return [visible.split(",")[int(gpu)] for gpu in gpus] if visible else gpus


def start_engine(cfg: RolloutConfig, moe: bool, index: int, gpus: list[str]) -> AsyncLLM:
    """Start engine ``index``. What tells its process its device is the environment: never start two at a time."""
    if cfg.device == "cuda":
        mine = gpus[index * cfg.tensor_parallel : (index + 1) * cfg.tensor_parallel]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    else:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(cfg.kv_cache_gib))
        os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a crash in native code leaves its stack in the log
    log.info("starting engine %d of %d", index + 1, cfg.engines)
    return AsyncLLM.from_engine_args(engine_args(cfg, moe, index))


def how_ended(engine: AsyncLLM) -> str:
    """`` (exit status -9)`` of an engine's process that has ended, which is all there is when a signal ended it."""
    return "".join(f" (exit status {status})"
                   for status in engine.engine_core.resources.engine_manager.finished_procs().values())  # fmt: skip


class Router:
    """Sends each call to an engine, and stamps each token with the version that sampled it."""

    def __init__(self, engines: list[AsyncLLM], cfg: RolloutConfig, eos_ids: list[int], num_experts: int,
                 moe_layers: Sequence[int] = (), unsaid: Sequence[int] = ()):  # fmt: skip
        self.engines, self.cfg, self.eos_ids = engines, cfg, eos_ids
        self.unsaid = dict.fromkeys(unsaid, -100.0) or None
        """Logit biases of ids that no model may say."""
        self.num_experts, self.moe_layers = num_experts, list(moe_layers)
        self.version = 0
        self.alive = set(range(len(engines)))
        """Engines that run."""
        self.members = set(self.alive)
        """Of these, the ones that take part in the weight sync that is under way, or did in the last one."""
        self.fit = set(self.alive)
        """Engines that hold the weights of ``version``: no other may sample."""
        self.lost = [asyncio.Event() for _ in engines]
        self.starts = [1] * len(engines)
        self.admission = asyncio.Event()
        """Set while no weight sync runs and an engine is fit."""
        self.admission.set()
        self.load = [0] * len(engines)
        """Tokens asked of each engine and not yet sampled."""
        self.home: dict[str, int] = {}
        self.running: dict[asyncio.Task, Call] = {}
        self.sampled = 0
        """Tokens ever sampled, counted where the engine's output arrives: the ledger's left side."""
        self.prompts = Counter()
        """Prompt tokens: prefilled again because a sync interrupted their call, and found in the engines' caches."""
        self.violation: str | None = None
        self.ids = count()

    async def generate(self, call: Call) -> None:
        """Fill ``call`` until it stops, through as many syncs as come. Raises ``EngineFailure``."""
        try:
            async with asyncio.timeout(self.cfg.call_timeout_s):
                reason = "abort"
                while reason == "abort":
                    while not self.admission.is_set():
                        await self.admission.wait()
                    reason = await self.request(call)
                    if reason == "abort" and len(call.token_ids) >= call.max_tokens:
                        reason = "length"  # the abort met a call that had just had its last token
                    if reason == "abort" and call.schema and call.token_ids:
                        raise EngineFailure("a weight sync interrupted a call with a JSON schema, which cannot resume")
        except TimeoutError:
            raise EngineFailure(f"call not finished in call_timeout_s={self.cfg.call_timeout_s:g}") from None
        call.finish_reason = reason

    def pick(self, affinity: str, asked: int) -> int:
        """The engine for a call that asks for so many tokens: its session's own, which holds the prefix, unless that
        would have ``affinity_factor`` times the outstanding tokens of the idlest; the session then moves there."""
        idlest = min(sorted(self.fit), key=self.load.__getitem__)
        own = self.home.setdefault(affinity, idlest)
        if own not in self.fit or self.load[own] + asked > self.cfg.affinity_factor * (self.load[idlest] + asked):
            own = self.home[affinity] = idlest
        return own

    async def request(self, call: Call) -> str:
        """One engine request over prompt + tokens so far; returns why it ended."""
        asked = call.max_tokens - len(call.token_ids)
        index, request_id = self.pick(call.affinity, asked), f"{next(self.ids)}"
        self.load[index] += asked
        task = asyncio.create_task(self.consume(index, request_id, call))
        self.running[task] = call
        task.add_done_callback(lambda task: self.ended(task, index, asked))
        try:
            # Shielded: when the caller goes away, what the engine sampled so far must still be counted.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await self.engines[index].abort(request_id)
            raise

    def ended(self, task: asyncio.Task, index: int, asked: int) -> None:
        """A request is over, however it ended."""
        del self.running[task]
        self.load[index] -= asked

    async def consume(self, index: int, request_id: str, call: Call) -> str:
        """Run one request to its end and append its output to the call."""
        version, remaining = self.version, call.max_tokens - len(call.token_ids)
        prompt = TokensPrompt(prompt_token_ids=[*call.sent_ids, *call.token_ids])
        if call.images:
            prompt["multi_modal_data"] = {"image": [picture(uri) for uri in call.images]}
        self.prompts["reprefilled"] += len(prompt["prompt_token_ids"]) if call.engines else 0
        self.prompts["sent"] += len(prompt["prompt_token_ids"])
        try:
            stream = self.engines[index].generate(prompt, self.params(call, remaining), request_id)
            output = await self.unless_lost(index, last_of(stream))
            final = output.outputs[0]
        except EngineDeadError:
            self.lose(index)  # with what it had sampled of this request, which nobody has seen
            return "abort"
        except EngineGenerateError as error:
            raise EngineFailure(f"engine {index}: {type(error).__name__}: {error.__cause__ or error}") from None
        except VLLMClientError as error:
            # Images count in full only once the engine has expanded them.
            if call.images and "longer than the maximum" in str(error):
                raise agents.ContextOverflow(str(error)) from None
            raise WireError(f"the engine refuses this request: {error}") from None
        except ValueError as error:
            if call.images:  # an image processor's complaint, of an extreme shape for one
                raise WireError(f"the engine cannot take these images: {error}", "messages") from None
            raise
        if call.images and not call.token_ids:
            call.expanded = list(output.prompt_token_ids)
        self.prompts["cached"] += output.num_cached_tokens or 0
        self.append(call, index, version, final)
        return final.finish_reason

    def params(self, call: Call, remaining: int) -> SamplingParams:
        """How the engine samples for a call."""
        return SamplingParams(
            **{name: vars(call)[name] for name in ("temperature", "top_p", "top_k", "seed", "stop")},
            max_tokens=remaining,
            logprobs=0,
            stop_token_ids=self.eos_ids,
            logit_bias=self.unsaid,
            detokenize=bool(call.stop),
            structured_outputs=StructuredOutputsParams(json=call.schema) if call.schema else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def append(self, call: Call, index: int, version: int, final) -> None:
        """Take over one request's tokens, log-probs and routes. An invariant that does not hold ends the node."""
        ids, entries = list(final.token_ids), final.logprobs or []
        self.sampled += len(ids)
        if len(entries) != len(ids):
            self.violated(f"engine {index} returned {len(ids)} tokens and {len(entries)} log-probs")
        logprobs = [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]
        call.token_ids += ids
        call.logprobs += logprobs
        call.versions += [version] * len(ids)
        call.engines.append(index)
        if version != self.version:
            self.violated(f"a request spanned versions {version} and {self.version} on engine {index}")
        if not all(math.isfinite(value) for value in logprobs):
            self.violated(f"engine {index} returned a log-prob that is not finite: {logprobs}")
        if self.num_experts and ids:
            if final.routed_experts is None:
                self.violated(f"engine {index} returned no routes for a mixture-of-experts model")
            forwarded = len(call.prompt_ids) + len(call.token_ids) - 1
            routes = np.asarray(final.routed_experts)[:forwarded, self.moe_layers]
            try:
                moe_replay.check_routes(routes, self.num_experts)
            except ValueError as error:
                self.violated(f"engine {index}: {error}")
            call.routes.append(routes.astype(moe_replay.route_dtype(self.num_experts)))

    def violated(self, what: str) -> None:
        """An invariant is broken: not one rollout's failure but the run's (``Node.watch`` ends it)."""
        self.violation = self.violation or what
        raise EngineFailure(what)

    async def settle(self, calls: list[Call]) -> None:
        """Wait for what the engines still do for these calls: an aborted request delivers what it had sampled."""
        mine = [task for task, call in self.running.items() if any(call is one for one in calls)]
        if mine:
            await asyncio.wait(mine, timeout=self.cfg.call_timeout_s)

    async def pause(self) -> None:
        """Close admission and empty the engines; the calls keep what they have and wait."""
        self.admission.clear()
        if self.running and not self.cfg.partial_rollouts:
            await asyncio.wait(list(self.running))
        self.members = set(self.alive)
        # A request that was on its way when the engine paused would be queued there and be sampled by the next
        # weights: abort again until nothing is left.
        while True:
            await asyncio.gather(*map(self.empty, list(self.members)))
            if not self.running:
                return
            await asyncio.wait(list(self.running), timeout=0.5)

    async def empty(self, index: int) -> None:
        """Abort what an engine does, and keep it from doing more."""
        try:
            await self.unless_lost(index, self.engines[index].pause_generation(mode="abort"))
        except EngineDeadError:
            self.lose(index)

    async def unless_lost(self, index: int, doing: Coroutine) -> Any:
        """What ``doing`` returns. Raises ``EngineDeadError`` when the engine is given up meanwhile: a killed or hung
        engine leaves whoever waits for it waiting."""
        task, lost = asyncio.create_task(doing), asyncio.create_task(self.lost[index].wait())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDeadError
            return task.result()
        finally:
            task.cancel()
            lost.cancel()

    def lose(self, index: int) -> None:
        """Give an engine up: its calls go on elsewhere, and nothing is sent to it any more."""
        for engines in (self.alive, self.members, self.fit):
            engines.discard(index)
        self.lost[index].set()
        if not self.fit:
            self.admission.clear()

    def revive(self, index: int, engine: AsyncLLM) -> None:
        """Take an engine in that was started again. Its weights are those of the model's folder: it is not fit."""
        self.engines[index], self.lost[index] = engine, asyncio.Event()
        self.starts[index] += 1
        self.alive.add(index)

    def commit(self, version: int) -> None:
        """The engines that took part in the weight sync hold ``version`` now; calls go on."""
        self.version, self.fit = version, set(self.members)
        if self.fit:
            self.admission.set()


async def last_of(stream: AsyncIterator) -> Any:
    """The last item of a stream."""
    return [item async for item in stream][-1]


class Parser:
    """Sampled text to an assistant message, with vLLM's own tool and reasoning parsers. Never changes ids.

    Raises ``ValueError`` at construction when vLLM knows no parser of that name.
    """

    def __init__(self, tokenizer, tool_parser: str, reasoning_parser: str):
        self.tokenizer = get_cached_tokenizer(tokenizer)  # parsers ask for the whole vocabulary every time
        try:
            self.tool_parser = ToolParserManager.get_tool_parser(tool_parser) if tool_parser else None
            find = ReasoningParserManager.get_reasoning_parser
            self.reasoning_parser = find(reasoning_parser) if reasoning_parser else None
        except KeyError as error:
            raise ValueError(f"vLLM has no parser of that name: {error}; see vllm serve --help for the names") from None

    def __call__(self, text: str, tools: list[dict] | None) -> agents.Message:
        try:
            return self.parsed(text, tools)
        except Exception as error:  # parsers are many, and raise what they like on text that no model should write
            raise RuntimeError(f"a parser of vLLM failed: {type(error).__name__}: {error}") from error

    def parsed(self, text: str, tools: list[dict] | None) -> agents.Message:
        """The message that the parsers find in ``text``."""
        request = ChatCompletionRequest(model="policy", messages=[], tools=tools or None)
        message: agents.Message = {"role": "assistant", "content": text}
        if self.reasoning_parser is not None:
            reasoning, text = self.reasoning_parser(self.tokenizer).extract_reasoning(text, request)
            message |= {"content": text or ""} | ({"reasoning_content": reasoning} if reasoning else {})
        if tools and self.tool_parser is not None:
            parsed = self.tool_parser(self.tokenizer, request.tools).extract_tool_calls(message["content"], request)
            if parsed.tools_called and parsed.tool_calls:
                message["content"] = parsed.content
                message["tool_calls"] = [call.model_dump() for call in parsed.tool_calls]
        return message


# ------------------------------------------------------------------------------------- rollouts and scheduler


@dataclass
class Rollout:
    """One attempt at a task, ended."""

    rollout_id: str
    task_id: str
    status: str
    reward: float
    rewards: list[float]
    """Of each call, by its number in the session; what an aborted call would have earned is 0."""
    rows: list[Row]
    sampled: int
    """Sampled tokens in ``rows``."""
    session: Session
    info: dict
    seconds: float
    ended: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def oldest(self) -> int:
        """The smallest version among its sampled tokens."""
        return min(int(row.versions[row.sampled].min()) for row in self.rows)


@dataclass
class Group:
    """The ended rollouts of one task."""

    group_id: int
    rollouts: list[Rollout]


class SessionContext:
    """The agent's view of its session (``agents.Context``)."""

    def __init__(self, session: Session, player: Player, split: str):
        self._session, self._player, self.split = session, player, split
        self.session_url = player.loopback.url(session)
        self.base_url = f"{self.session_url}/v1"

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[str]:
        cfg = self._player.cfg
        session = self._player.open(Sampling(cfg.temperature, 1.0, cfg.max_tokens, fixed=False))
        try:
            yield f"{self._player.loopback.url(session)}/v1"
        finally:
            await self._player.end(session, "aside")

    async def chat(self, messages: list[agents.Message], tools: Sequence[dict]) -> agents.Reply:
        return await self._session.turn(messages, list(tools), "env")


class Ledger:
    """Where every sampled token went, by reason, since the node started."""

    def __init__(self):
        self.dropped: Counter[str] = Counter()
        self.handed = 0
        """Sampled tokens in rows that a manifest listed."""


class Player:
    """Plays rollouts: one agent instance, one session, one status each."""

    def __init__(self, cfg: RolloutConfig, loopback: Loopback, router: Router, ledger: Ledger):
        self.cfg, self.loopback, self.router, self.ledger = cfg, loopback, router, ledger
        self.agent = load_agent(cfg)
        self.live: set[Session] = set()
        self.ended: dict[str, Rollout] = {}
        """Ended rollouts whose group has not: their tokens are pending too."""
        self.statuses: Counter[str] = Counter()
        """Training rollouts that ended since the last manifest, by status."""
        self.errors_logged = 0

    async def play(self, task: agents.Task, rollout_id: str, group_id: int, sampling: Sampling, split: str) -> Rollout:
        """Play one rollout to its end. Its sampled tokens are afterwards in its rows or in ``ledger.dropped``."""
        session = self.open(sampling)
        try:
            return await self.attempt(session, task, rollout_id, group_id, split)
        except asyncio.CancelledError:
            await self.end(session, "run_end")
            raise

    def open(self, sampling: Sampling) -> Session:
        """A new session, whose tokens are pending from now on."""
        session = self.loopback.open(sampling)
        self.live.add(session)
        return session

    async def attempt(self, session: Session, task: agents.Task, rollout_id: str, group_id: int, split: str) -> Rollout:
        """Run the agent, find the status, close the session."""
        started, result = time.monotonic(), agents.Result()
        try:
            async with asyncio.timeout(self.cfg.rollout_timeout_s):
                result = await self.agent().run(task, SessionContext(session, self, split))
                status = self.status(session, result)
        except TimeoutError:
            status = "engine_error" if session.failure or not self.router.fit else "agent_timeout"
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # An agent is any program: whatever it raises becomes the rollout's status. A cancellation is ours only
            # when this task was cancelled; agents leak those of their own tasks.
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise
            status = "engine_error" if session.failure else "agent_error"
            if self.errors_logged < 5:
                self.errors_logged += 1
                log.error("rollout %s: %s", rollout_id, status, exc_info=error)
        if split == "train":
            self.statuses[status] += 1
        return await self.finish(session, task, rollout_id, group_id, status, result, time.monotonic() - started)

    def status(self, session: Session, result: agents.Result) -> str:
        """The status of a rollout whose agent returned. Raises ``ValueError`` for a result that is no result."""
        if not isinstance(result, agents.Result) or not math.isfinite(float(result.reward)):
            raise ValueError(f"run() must return a Result with a finite reward, got {result!r}")
        result.reward, result.rewards = float(result.reward), [float(reward) for reward in result.rewards]
        result.info = {name: float(value) for name, value in result.info.items()}
        if session.failure:
            return "engine_error"
        answered = sum(call.committed for call in session.calls)
        if not answered:
            return "no_calls"
        close = math.isclose(math.fsum(result.rewards), result.reward, rel_tol=1e-5, abs_tol=1e-6)
        if result.rewards and (len(result.rewards) != answered or not close):
            raise ValueError(f"Result.rewards {result.rewards} must hold one reward for each of {answered} answered "
                             f"calls, and add up to the reward {result.reward}; or leave it empty")  # fmt: skip
        return "truncated" if result.truncated else "ok"

    async def end(self, session: Session, reason: str) -> None:
        """Close the session and drop all it sampled."""
        await self.close(session)
        self.ledger.dropped[reason] += session.sampled
        self.live.discard(session)

    async def close(self, session: Session) -> None:
        """After this nothing more is sampled for the session, and all that was is counted in its calls."""
        self.loopback.close(session)
        await session.shut()
        await self.router.settle(session.calls)
        self.router.home.pop(session.id, None)

    async def finish(self, session, task, rollout_id, group_id, status, result, seconds) -> Rollout:
        """Turn an ended session into a ``Rollout``."""
        if status not in TRAINABLE:
            await self.end(session, status)
            return Rollout(rollout_id, task.task_id, status, 0.0, [], [], 0, session, {}, seconds)
        await self.close(session)
        rows = session.rows(rollout_id, group_id, task.task_id)
        for row in rows:
            row.reward, row.status, row.truncated = result.reward, status, result.truncated
        self.ledger.dropped["disconnect"] += session.uncommitted
        self.live.discard(session)
        sampled = sum(int(row.sampled.sum()) for row in rows)
        ended = Rollout(rollout_id, task.task_id, status, result.reward, by_call(session, result), rows, sampled,
                        session, result.info, seconds)  # fmt: skip
        self.ended[rollout_id] = ended
        return ended

    def release(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Hand ended rollouts over to whoever accounts for them from now on."""
        for rollout in rollouts:
            self.ended.pop(rollout.rollout_id, None)
        return rollouts


def by_call(session: Session, result: agents.Result) -> list[float]:
    """The rewards of a session's calls by number; without any by call, all of it goes to the last answered one."""
    answered = [call.index for call in session.calls if call.committed]
    rewards = [0.0] * (answered[-1] + 1)
    given = result.rewards or [0.0] * (len(answered) - 1) + [result.reward]
    for index, reward in zip(answered, given, strict=True):
        rewards[index] = reward
    return rewards


class Scheduler:
    """Tasks become groups of rollouts, never more than the staleness bound allows."""

    def __init__(self, cfg: RolloutConfig, player: Player, router: Router, ledger: Ledger):
        self.cfg, self.player, self.router, self.ledger = cfg, player, router, ledger
        self.ready: deque[Group] = deque()
        self.stream, self.digest = self.tasks(), hashlib.sha256()
        self.taken = 0
        """Tasks taken from the stream. A task's number in it is its group's id."""
        self.open: dict[int, agents.Task] = {}
        """Those of them that no batch has had and that were not dropped."""
        self.again: list[int] = []
        """Of these, the ones that a run before this one left."""
        self.started = self.groups_dropped = 0
        self.barren = 0
        """Groups dropped one after the other."""
        self.reasons: Counter[str] = Counter()
        """Groups dropped since the last manifest."""
        self.changed = asyncio.Event()
        self.groups: set[asyncio.Task] = set()
        self.failure: BaseException | None = None

    @property
    def submitted(self) -> int:
        """Groups started and not dropped."""
        return self.started - self.groups_dropped

    @property
    def bound(self) -> int:
        """``submitted`` never exceeds ``(floor((max_lag + version) / V) + 1) * G``: V versions and G groups a step.

        Proof that lag is then at most max_lag, numbering the groups that are not dropped (a drop only lowers later
        numbers): step s, at version s*V, consumes groups s*G .. (s+1)*G - 1 in the order they were started, so group i
        is consumed at version floor(i/G)*V; it was started at a version u with floor(i/G) <= floor((max_lag + u) / V),
        hence floor(i/G)*V <= max_lag + u. Finished groups may overtake a slow one; the slow one's lag is then checked
        when it is consumed (``collect``), and it is dropped as stale.
        """
        steps = (self.cfg.max_lag + self.router.version) // self.cfg.versions_per_step + 1
        limit = steps * self.cfg.groups_per_step
        return min(limit, self.cfg.steps * self.cfg.groups_per_step) if self.cfg.steps else limit

    def tasks(self) -> Iterator[agents.Task]:
        """The train split, again and again when it is finite. Raises ``ValueError`` when it is empty."""
        for epoch in count():
            task = None
            for task in self.player.agent.tasks("train", self.cfg.seed + epoch):
                yield task
            if task is None:
                raise ValueError(f"{self.cfg.agent} has no tasks in its train split")

    def take(self) -> tuple[int, agents.Task]:
        """The next task with its number; first those that were left over when the run was resumed."""
        if self.again:
            number = self.again.pop(0)
            return number, self.open[number]
        number, task = self.taken, next(self.stream)
        content = json.dumps([task.task_id, task.data], sort_keys=True, default=lambda value: type(value).__name__)
        self.digest.update(content.encode())
        self.taken, self.open[number] = number + 1, task
        return number, task

    @property
    def position(self) -> dict:
        """Where the run is in its tasks, as ``resume`` takes it."""
        return {"taken": self.taken, "open": sorted(self.open), "digest": self.digest.hexdigest()}

    def resume(self, position: dict, version: int) -> None:
        """Go on from where a run of before was at ``version``. Raises ``ValueError`` when its tasks were others."""
        if self.taken:
            raise ValueError(f"this node is in a run already: it took {self.taken} tasks")
        while self.taken < position["taken"]:
            self.take()
        if self.position["digest"] != position["digest"]:
            raise ValueError(f"the first {self.taken} tasks of {self.cfg.agent} are not those of the checkpoint: its "
                             "data or its code changed; bring them back, or start a new run from the exported "
                             "model")  # fmt: skip
        self.again = position["open"]
        self.open = {number: self.open[number] for number in self.again}
        self.started = version // self.cfg.versions_per_step * self.cfg.groups_per_step

    async def run(self) -> None:
        """Start groups while the bound allows and an engine may sample, for ever."""
        while True:
            while self.router.fit and self.submitted < self.bound:
                group = asyncio.create_task(self.play_group(*self.take()))
                self.started += 1
                self.groups.add(group)
                group.add_done_callback(self.group_ended)
            self.changed.clear()
            await self.changed.wait()
            if self.failure is not None:
                raise self.failure

    def group_ended(self, group: asyncio.Task) -> None:
        """A rollout's failure is a status; an exception that reaches this far is a fault of ours and ends the node."""
        self.groups.discard(group)
        if not group.cancelled() and group.exception() is not None:
            self.failure = self.failure or group.exception()
        self.changed.set()

    async def play_group(self, group_id: int, task: agents.Task) -> None:
        """The rollouts of one task, side by side."""
        cfg = self.cfg
        sampling = Sampling(cfg.temperature, 1.0, cfg.max_tokens, fixed=True)
        async with asyncio.TaskGroup() as group:
            names = [f"{group_id}-{index}" for index in range(cfg.group_size)]
            plays = [group.create_task(self.player.play(task, name, group_id, sampling, "train")) for name in names]
        self.ready.append(ended := Group(group_id, self.player.release([play.result() for play in plays])))
        # A group of failures waits until the trainer asks: by then the node may have found their cause.
        if any(rollout.rows for rollout in ended.rollouts) and self.screen(ended):
            self.barren = 0

    def collect(self) -> list[Group] | None:
        """``groups_per_step`` finished groups, oldest first, for the current version; None while there are too few.

        Consumption is here: rollouts whose oldest token lags by more than ``max_lag`` are dropped as stale, and a
        group left with no trainable rollout is dropped whole, so the scheduler replaces it.
        """
        kept: list[Group] = []
        for group in sorted(self.ready, key=lambda group: group.group_id):
            self.drop_stale(group)
            if self.screen(group):
                kept.append(group)
        batch = kept[: self.cfg.groups_per_step]
        if len(batch) < self.cfg.groups_per_step:
            return None
        for group in batch:
            self.ready.remove(group)
            del self.open[group.group_id]
        return batch

    def screen(self, group: Group) -> bool:
        """Whether the group is worth training on; if not it is dropped, and the scheduler starts another."""
        rewards = [rollout.reward for rollout in group.rollouts if rollout.status in TRAINABLE]
        late = any(rollout.status == "stale" for rollout in group.rollouts)
        reason = None if rewards else "stale" if late else "none_trainable"
        if rewards and self.cfg.filter_groups:
            reason = gate.no_signal(torch.tensor(rewards, dtype=torch.float64))
        if reason:
            self.drop(group, reason)
        return not reason

    def drop(self, group: Group, reason: str) -> None:
        """Give up a group; another takes its place. Raises when no group is any better."""
        self.ready.remove(group)
        del self.open[group.group_id]
        self.ledger.dropped[reason] += sum(rollout.sampled for rollout in group.rollouts)
        self.reasons[reason] += 1
        self.groups_dropped += 1
        # As many as the bound allows may be late, those that follow are not; and without an engine no agent can work.
        self.barren += reason != "stale" and bool(self.router.fit)
        self.changed.set()
        if self.barren > (4 if reason == "none_trainable" else 32) * self.cfg.groups_per_step:
            statuses = dict(Counter(rollout.status for rollout in group.rollouts))
            remedy = "give tasks that some rollouts solve and some do not, or leave --filter_groups out"
            if reason == "none_trainable":
                remedy = "the first errors are in the rollout node's log"
            raise RuntimeError(f"{self.barren} groups in a row taught nothing, the last {statuses}: {reason}; {remedy}")

    def drop_stale(self, group: Group) -> None:
        """Drop rollouts that are too old to train on."""
        for rollout in group.rollouts:
            if rollout.rows and self.router.version - rollout.oldest > self.cfg.max_lag:
                self.ledger.dropped["stale"] += rollout.sampled
                rollout.status, rollout.rows, rollout.sampled = "stale", [], 0
                self.player.statuses["stale"] += 1

    @property
    def pending(self) -> int:
        """Sampled tokens neither handed out nor dropped: in running sessions, ended rollouts, finished groups."""
        running = sum(session.sampled for session in self.player.live)
        return running + sum(rollout.sampled for rollout in self.waiting())

    def waiting(self) -> list[Rollout]:
        """Ended rollouts that no manifest has listed."""
        return [*self.player.ended.values(), *(rollout for group in self.ready for rollout in group.rollouts)]


# ---------------------------------------------------------------------------------------------- control API


@web.middleware
async def guard(request: web.Request, handler: Callable) -> web.StreamResponse:
    """401 without the shared secret; a fault of the request or of a sync phase answers in one line."""
    given = request.headers.get("x-instar-secret", "")
    if not hmac.compare_digest(given.encode(errors="replace"), request.app["node"].secret.encode()):
        return web.Response(status=401, text="missing or wrong x-instar-secret")
    request.app["node"].last_seen = time.monotonic()
    try:
        return await handler(request)
    except (ValueError, KeyError) as error:
        return web.Response(status=400, text=f"{type(error).__name__}: {error}")
    except Exception as error:  # answered, logged, and raised by the trainer
        log.error("%s failed", request.path, exc_info=error)
        return web.Response(status=500, text=f"{request.path}: {type(error).__name__}: {error}")


class Pulse:
    """How late the event loop wakes a sleeper (what code that blocks it costs every rollout), and how often that one
    finds no request at the engines."""

    def __init__(self):
        self.late_s: list[float] = []
        self.idle: list[bool] = []

    async def run(self, router: Router) -> None:
        """Measure, for ever."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(PULSE_S)
            self.late_s.append(time.monotonic() - began - PULSE_S)
            self.idle.append(not router.running)
            if self.late_s[-1] > STALL_S:
                log.warning("the event loop stood still for %.1f s: an agent runs code that blocks it, which belongs "
                            "into asyncio.to_thread, or this machine has no core left", self.late_s[-1])  # fmt: skip

    def meters(self) -> dict[str, float]:
        """Milliseconds, and a share of time, since the last time."""
        late_ms, self.late_s = 1e3 * np.array(self.late_s or [0.0]), []
        idle, self.idle = self.idle or [False], []
        return {"rollout/engines_idle": float(np.mean(idle)),
                "rollout/loop_late_ms_p99": float(np.quantile(late_ms, 0.99)),
                "rollout/loop_late_ms_max": float(late_ms.max())}  # fmt: skip


class Node:
    """The whole node: what it holds, its control API, its start and stop."""

    def __init__(self, cfg: RolloutConfig):
        self.cfg = cfg
        # Out of the environment, which programs that agents start inherit.
        self.secret = os.environ.pop("INSTAR_SECRET")
        self.stop = asyncio.Event()
        self.failure: str | None = None
        self.last_seen = time.monotonic()
        self.engines: list[AsyncLLM] = []
        self.moe, self.gpus = False, gpu_ids(cfg)
        self.starting = asyncio.Lock()
        self.syncing, self.restarts = False, 0
        self.ready = False
        self.engine_seconds = 0.0
        self.pulse = Pulse()
        self.handed: dict[str, Row] = {}
        self.snapshot = {"sampled": 0, "pending": 0, "dropped": Counter()}
        self.background: list[asyncio.Task] = []

    def fail(self, cause: str) -> None:
        """End the node with one line: the first cause."""
        self.failure = self.failure or cause
        self.stop.set()

    # -- life

    async def run(self) -> None:
        """Serve until told to stop. Raises ``RuntimeError`` naming the cause when something failed."""
        async with self.control():
            try:
                await self.launch()
                await self.stop.wait()
            finally:
                await self.shut()
        if self.failure:
            raise RuntimeError(self.failure)

    @asynccontextmanager
    async def control(self) -> AsyncIterator[None]:
        """The control API listens first, so that a taken port is known before engines are paid for."""
        app = web.Application(middlewares=[guard], client_max_size=64 * 2**20)
        app["node"] = self
        app.add_routes([web.get("/health", self.health), web.get("/manifest", self.manifest)])
        for act in (self.resume, self.rows, self.evaluate, self.finish, self.shutdown):
            app.router.add_post(f"/{act.__name__}", act)
        for phase in (self.begin, self.connect, self.start, self.update, self.use, self.probe, self.commit):
            app.router.add_post(f"/sync/{phase.__name__}", phase)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.cfg.control_host, self.cfg.control_port).start()
        except OSError as error:
            raise RuntimeError(f"cannot listen on {self.cfg.control_host}:{self.cfg.control_port}: {error.strerror}; "
                               "choose another --control_port") from None  # fmt: skip
        try:
            yield
        finally:
            await runner.cleanup()

    async def launch(self) -> None:
        """Engines, loopback, scheduler, watchdog."""
        cfg, began = self.cfg, time.monotonic()
        config = AutoConfig.from_pretrained(cfg.model)
        counts = moe_replay.expert_counts(config.get_text_config())
        self.moe = counts is not None
        for index in range(cfg.engines):
            self.engines.append(await self.engine(index))
        tokenizer = AutoTokenizer.from_pretrained(cfg.model)
        eos_ids = end_ids(cfg.model, tokenizer)
        unsaid = image_ids(config.to_dict())
        template = Template(tokenizer, eos_ids, images=bool(unsaid))
        self.ledger = Ledger()
        [moe_layers, *_] = await self.engines[0].collective_rpc("moe_layers")
        self.router = Router(self.engines, cfg, eos_ids, counts[0] if counts else 0, moe_layers, unsaid)
        self.router.fit.clear()  # the trainer's first sync brings its weights, or proves that they are the folder's
        self.router.admission.clear()
        parser = Parser(tokenizer, cfg.tool_parser, cfg.reasoning_parser)
        self.loopback = Loopback(template, parser, self.router.generate, Path(cfg.model).name, cfg.max_model_len)
        await self.loopback.start()
        self.player = Player(cfg, self.loopback, self.router, self.ledger)
        self.scheduler = Scheduler(cfg, self.player, self.router, self.ledger)
        self.engine_seconds = time.monotonic() - began
        self.last_seen = time.monotonic()
        loops = self.scheduler.run(), self.watch(), self.pulse.run(self.router), *map(self.keep, range(cfg.engines))
        self.background = [asyncio.create_task(loop) for loop in loops]
        for task in self.background:
            task.add_done_callback(self.background_ended)
        # What is there by now stays, and a request's JSON is no cycle: collections would only stop the loop.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000)
        self.ready = True
        log.info("ready after %.1f s, loopback on port %d", self.engine_seconds, self.loopback.port)

    def background_ended(self, task: asyncio.Task) -> None:
        """A background loop never ends by itself."""
        if not task.cancelled():
            self.fail(f"{task.get_coro().__qualname__}: {task.exception()!r}")

    async def engine(self, index: int) -> AsyncLLM:
        """A new engine, started in a thread, so that the control API answers and signals arrive meanwhile."""
        async with self.starting:
            start = asyncio.create_task(asyncio.to_thread(start_engine, self.cfg, self.moe, index, self.gpus))
            try:
                return await asyncio.shield(start)
            except asyncio.CancelledError:
                (await start).shutdown()
                raise

    async def keep(self, index: int) -> None:
        """Put another engine in the place of one that died or hangs, for ever."""
        while True:
            await asyncio.sleep(1.0)
            if not (fault := await self.fault(self.engines[index])):
                continue
            self.router.lose(index)
            if self.restarts == self.cfg.engine_restarts:
                raise EngineFailure(f"engine {index} {fault}, after {self.restarts} restarts (engine_restarts); its "
                                    "own last words are above in this log")  # fmt: skip
            self.restarts += 1
            log.error("engine %d %s: it is started again, and joins at the next weight sync", index, fault)
            await asyncio.to_thread(self.engines[index].shutdown, 1.0)
            self.router.revive(index, await self.engine(index))

    async def fault(self, engine: AsyncLLM) -> str | None:
        """What is wrong with an engine. A weight sync may keep it busy for long, and has deadlines of its own.

        The time counted is what this loop has seen pass: when the whole machine stood still, an engine is not to blame.
        """
        silent_s, alive = 0.0, asyncio.create_task(engine.is_paused())
        while not engine.errored and not (await asyncio.wait({alive}, timeout=0.5))[0]:
            silent_s += 0.5
            if silent_s > self.cfg.engine_timeout_s and not self.syncing:
                alive.cancel()
                return f"gave no sign of life for {self.cfg.engine_timeout_s:g} s"
        alive.cancel()
        return f"died{how_ended(engine)}" if engine.errored else None

    async def watch(self) -> None:
        """Notice a broken invariant or a silent trainer, once a second."""
        while True:
            await asyncio.sleep(1.0)
            if self.router.violation:
                raise RuntimeError(self.router.violation)
            silent = time.monotonic() - self.last_seen
            if silent > self.cfg.trainer_timeout_s:
                raise TimeoutError(f"no trainer spoke for {silent:.0f} s (trainer_timeout_s)")

    async def shut(self) -> None:
        """Stop what was started, in the reverse order."""
        self.ready = False
        for task in self.background:
            task.cancel()
        await self.cancel_rollouts()
        if self.background:
            await self.loopback.stop()
        await asyncio.gather(*self.background, return_exceptions=True)
        for engine in self.engines:
            engine.shutdown()

    async def cancel_rollouts(self) -> None:
        """End what is in flight; its tokens are dropped with reason ``run_end``."""
        if not self.background:
            return
        self.background[0].remove_done_callback(self.background_ended)
        self.background[0].cancel()
        groups = list(self.scheduler.groups)
        for group in groups:
            group.cancel()
        if groups:
            _, stuck = await asyncio.wait(groups, timeout=SHUT_TIMEOUT_S)
            if stuck:
                self.fail(f"{len(stuck)} groups did not end {SHUT_TIMEOUT_S:g} s after they were cancelled; an agent "
                          "catches CancelledError")  # fmt: skip
        self.ledger.dropped["run_end"] += sum(rollout.sampled for rollout in self.scheduler.waiting())
        self.player.ended.clear()
        self.scheduler.ready.clear()

    # -- rows

    async def health(self, request: web.Request) -> web.Response:
        """GET: what the node is, and whether it is ready."""
        now = {name: vars(self.router)[name] if self.ready else 0 for name in ("version", "sampled")}
        same = {name: vars(self.cfg)[name] for name in ("max_lag", "versions_per_step", "seed", "filter_groups")}
        return web.json_response({"ready": self.ready, "engine_seconds": self.engine_seconds} | now | same)

    async def resume(self, request: web.Request) -> web.Response:
        """POST {version, position}: go on at a checkpoint; before the first weight sync."""
        asked = await request.json()
        self.scheduler.resume(asked["position"], asked["version"])
        self.router.version = asked["version"]
        return web.json_response({})

    async def manifest(self, request: web.Request) -> web.Response:
        """GET ?version=v: the next batch, for a trainer at version v; 204 when it is not complete yet."""
        version = int(request.query["version"])
        if version != self.router.version:
            raise ValueError(f"trainer is at version {version}, this node at {self.router.version}")
        self.handed.clear()
        end = time.monotonic() + LONG_POLL_S
        while (batch := self.scheduler.collect()) is None:
            if self.router.alive and not self.router.fit:
                return web.json_response({"sync": True})  # nothing is sampled until engines that are back have weights
            if time.monotonic() > end or self.stop.is_set():
                return web.Response(status=204)
            await asyncio.sleep(0.01)
        self.handed = {row.row_id: row for group in batch for rollout in group.rollouts for row in rollout.rows}
        self.ledger.handed += sum(rollout.sampled for group in batch for rollout in group.rollouts)
        sessions = [rollout.session for group in batch for rollout in group.rollouts if rollout.rows]
        meters = identity_meters(sessions) | self.loopback.meters() | self.rollout_meters(batch)
        groups = [describe(group) for group in batch]
        return web.json_response({"groups": groups, "ledger": self.ledger_delta(), "meters": meters})

    def rollout_meters(self, batch: list[Group]) -> dict[str, float]:
        """``rollout/*`` of a batch."""
        good = [rollout for group in batch for rollout in group.rollouts if rollout.status in TRAINABLE]
        info, prompts, self.router.prompts = Counter(), self.router.prompts, Counter()
        for rollout in good:
            info.update({f"rollout/{name}": value / len(good) for name, value in rollout.info.items()})
        statuses, self.player.statuses = self.player.statuses, Counter()
        reasons, self.scheduler.reasons = self.scheduler.reasons, Counter()
        return {
            **{f"rollout/status/{status}": number for status, number in statuses.items()},
            **{f"rollout/groups_dropped/{reason}": number for reason, number in reasons.items()},
            **info,
            "rollout/calls": sum(len(rollout.session.calls) for rollout in good) / len(good),
            "rollout/seconds": sum(rollout.seconds for rollout in good) / len(good),
            "rollout/reprefilled_tokens": prompts["reprefilled"],
            "rollout/cached_tokens": prompts["cached"],
            "rollout/cached_share": prompts["cached"] / max(1, prompts["sent"]),
            "rollout/engine_restarts": self.restarts,
            **self.pulse.meters(),
        }

    def ledger_delta(self) -> dict:
        """The node's side of a step's ledger line. Raises ``RuntimeError`` when its own totals do not balance."""
        ledger, sampled, pending = self.ledger, self.router.sampled, self.scheduler.pending
        dropped = sum(ledger.dropped.values())
        if sampled != ledger.handed + dropped + pending:
            right = f"handed {ledger.handed} + dropped {dict(ledger.dropped)} + pending {pending}"
            self.fail(f"ledger: sampled {sampled} != {right}")
            raise RuntimeError(self.failure)
        before = self.snapshot
        self.snapshot = {"sampled": sampled, "pending": pending, "dropped": Counter(ledger.dropped)}
        return {
            "sampled": sampled - before["sampled"],
            "pending_before": before["pending"],
            "pending_after": pending,
            "dropped": dict(ledger.dropped - before["dropped"]),
        }

    async def rows(self, request: web.Request) -> web.Response:
        """POST {ids}: those rows of the last manifest, as safetensors bytes."""
        ids = (await request.json())["ids"]
        return web.Response(body=pack_rows([self.handed[name] for name in ids]))

    async def evaluate(self, request: web.Request) -> web.Response:
        """POST {limit, samples, temperature}: rollouts of the "eval" split's tasks at the current version; their
        rewards by task, without those of failed ones."""
        asked = await request.json()
        sampling = Sampling(asked["temperature"], 1.0, self.cfg.max_tokens, fixed=False)
        tasks = list(islice(self.player.agent.tasks("eval", self.cfg.seed), asked["limit"]))
        names = [(n, task, f"eval-{n}-{sample}") for n, task in enumerate(tasks) for sample in range(asked["samples"])]
        rollouts = await asyncio.gather(
            *(self.player.play(task, name, -1, sampling, "eval") for _, task, name in names)
        )
        self.ledger.dropped["eval"] += sum(rollout.sampled for rollout in self.player.release(rollouts))
        scored = [rollout for rollout in rollouts if rollout.status in TRAINABLE]
        if not self.router.fit:
            return web.json_response({"sync": True})
        if not scored:
            raise RuntimeError(f"no evaluation rollout succeeded: {dict(Counter(r.status for r in rollouts))}")
        found = [{"task_id": task.task_id, "source": task.data.get("source", ""), "rewards": []} for task in tasks]
        for (n, _, _), rollout in zip(names, rollouts, strict=True):
            found[n]["rewards"] += [rollout.reward] if rollout.status in TRAINABLE else []
        failed = len(rollouts) - len(scored)
        return web.json_response({"version": self.router.version, "tasks": found, "failed": failed})

    # -- weight sync, in the order the trainer calls it

    async def on_engines(self, act: Callable) -> None:
        """Do one thing on every engine of this sync. One that fails, or is late, ends the node: there is no telling
        which weights the engines hold, and their trainer may wait in a broadcast that will never end."""
        members = sorted(self.router.members)
        try:
            async with asyncio.timeout(self.cfg.sync_timeout_s):
                doing = (self.router.unless_lost(i, act(place, self.engines[i])) for place, i in enumerate(members))
                await asyncio.gather(*doing)
            if self.router.members != set(members) or not members:
                raise EngineFailure("an engine died")
        except Exception as error:
            ends = "".join(how_ended(self.engines[index]) for index in members)
            self.fail(f"weight sync to version {self.router.version + 1}, engines {members}: "
                      f"{type(error).__name__}: {error}{ends}")  # fmt: skip
            raise

    async def connect(self, request: web.Request) -> web.Response:
        """Join a new transfer group. Each engine's workers take the next ranks after ``rank_offset``."""
        info = await request.json()

        async def join(place: int, engine: AsyncLLM) -> None:
            offset = info["rank_offset"] + place * self.cfg.tensor_parallel
            mine = WeightTransferInitRequest(init_info=info | {"rank_offset": offset})
            await engine.init_weight_transfer_engine(mine)

        await self.on_engines(join)
        return web.json_response({})

    async def begin(self, request: web.Request) -> web.Response:
        """Close admission, keep partial outputs, and tell which engines take part, how many workers they have, and
        where the node is in its tasks."""
        async with asyncio.timeout(self.cfg.sync_timeout_s + self.cfg.call_timeout_s * (not self.cfg.partial_rollouts)):
            await self.router.pause()
        while not self.router.members:  # until one that is being started is there; the trainer's request has a deadline
            await asyncio.sleep(0.1)
            await self.router.pause()
        self.syncing, members = True, sorted(self.router.members)
        engines = [f"{index}, start {self.router.starts[index]}" for index in members]
        place = {"seed": self.cfg.seed, "position": self.scheduler.position}
        return web.json_response({"engines": engines, "workers": len(members) * self.cfg.tensor_parallel} | place)

    async def start(self, request: web.Request) -> web.Response:
        """The engines make ready to load."""
        await self.on_engines(lambda _, engine: engine.start_weight_update())
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        """The engines receive; runs beside the trainer's broadcast."""
        info = WeightTransferUpdateRequest(update_info=await request.json())
        await self.on_engines(lambda _, engine: engine.update_weights(info))
        return web.json_response({})

    async def use(self, request: web.Request) -> web.Response:
        """The engines put the weights to use. No old key or value may serve them: a failed cache reset raises."""

        async def put_to_use(place: int, engine: AsyncLLM) -> None:
            await engine.finish_weight_update()
            if not await engine.reset_prefix_cache():
                raise RuntimeError("an engine did not reset its prefix cache")

        await self.on_engines(put_to_use)
        return web.json_response({})

    async def probe(self, request: web.Request) -> web.Response:
        """Every engine samples from the given prompts; admission stays closed. Returns ids, log-probs and routes."""
        asked = await request.json()
        calls: list[Call] = []

        async def sample(place: int, engine: AsyncLLM) -> None:
            index = self.engines.index(engine)
            await engine.resume_generation()
            mine = [Call(-1, "probe", prompt, asked["max_tokens"], 1.0, 1.0, "") for prompt in asked["prompts"]]
            calls.extend(mine)
            await asyncio.gather(*(self.router.consume(index, f"probe-{next(self.router.ids)}", call) for call in mine))

        await self.on_engines(sample)
        self.ledger.dropped["probe"] += sum(len(call.token_ids) for call in calls)
        return web.Response(body=pack_rows([probe_row(call) for call in calls]))

    async def commit(self, request: web.Request) -> web.Response:
        """The version becomes ``version`` (or stays, after the first probe); calls go on."""
        version = (await request.json())["version"]
        if version - self.router.version not in (0, 1):
            raise ValueError(f"cannot commit version {version} after {self.router.version}")
        await self.on_engines(lambda _, engine: engine.resume_generation())
        self.syncing = False
        self.router.commit(version)
        self.scheduler.changed.set()
        return web.json_response({})

    # -- end

    async def finish(self, request: web.Request) -> web.Response:
        """POST: drop what is in flight and return the last piece of the ledger."""
        await self.cancel_rollouts()
        return web.json_response(self.ledger_delta())

    async def shutdown(self, request: web.Request) -> web.Response:
        """POST: end the node."""
        self.stop.set()
        return web.json_response({})


def probe_row(call: Call) -> Row:
    """A probe's call as a row, with the arrays a rollout's row has."""
    branch = Branch("")
    call.check([])
    branch.add(call.prompt_ids)
    branch.add(call.token_ids, call)
    for routes in call.routes:
        branch.add_routes(routes)
    return Row("probe", "probe", -1, "probe", **branch.row_arrays(), temperature=call.temperature)


def describe(group: Group) -> dict:
    """A group as the manifest lists it: enough for rank 0 to balance rows and compute advantages."""
    same, rollouts = ("rollout_id", "task_id", "status", "reward", "rewards", "seconds", "ended"), []
    for one in group.rollouts:
        rows = [{"row_id": row.row_id, "tokens": len(row), "sampled": int(row.sampled.sum())} for row in one.rows]
        rollouts.append({name: vars(one)[name] for name in same} | {"rows": rows})
    return {"group_id": group.group_id, "rollouts": rollouts}


def end_ids(model: str, tokenizer) -> list[int]:
    """Every id that ends a turn: the tokenizer's, and those of generation_config.json."""
    ids = {tokenizer.eos_token_id}
    path = Path(model) / "generation_config.json"
    if path.is_file():
        declared = json.loads(path.read_text()).get("eos_token_id")
        ids |= set(declared) if isinstance(declared, list) else {declared}
    return sorted(ids - {None})


async def serve(cfg: RolloutConfig) -> None:
    """Run a node until it ends; SIGTERM and SIGINT end it too."""
    node = Node(cfg)
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, node.fail, f"stopped by {sign.name}")
    await node.run()


def main() -> None:
    """Entry point: any failure ends in one line that names the cause."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    # vLLM's parsers log a traceback for each malformed tool call; malformed calls are data here.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    # Agents' clients speak to 127.0.0.1, whatever proxy the environment names.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    try:
        (cfg,) = HfArgumentParser(RolloutConfig, allow_abbrev=False).parse_args_into_dataclasses()
        validate(cfg)
        asyncio.run(serve(cfg))
    except Exception as error:
        if not isinstance(error, ValueError | RuntimeError | OSError):
            log.error("not a failure that was foreseen", exc_info=error)
        print(f"rollout.py: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(1)  # what libraries have to say at an interpreter's end would stand after the cause


if __name__ == "__main__":
    main()
