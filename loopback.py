"""The loopback: any program that speaks to an OpenAI address becomes a source of token-exact rows.

One session belongs to one rollout. It holds branches; a branch is an append-only sequence of token ids beside the
messages those ids stand for. A request says messages; this file decides which branch it continues and which ids
are new, lets the engine sample over exactly those ids, and appends what was sampled. Text is never tokenized back
into something that is trained: a sampled id is an id that the engine returned, in exactly one row.

Read in this order: ``Row`` (what leaves), ``Template`` (messages to ids), ``Branch`` and ``Session`` (the token
accumulation), ``Parser`` (ids to a reply), ``Loopback`` (the wire).

One loop lives here, the aiohttp server:
  consumes   HTTP requests on 127.0.0.1, each inside one session's address
  produces   turns committed to that session, and replies
  waits for  ``generate`` (the router of rollout.py), which has a deadline of its own
  unblocked  by the router, or by the client closing its socket, which cancels the call
  failure    a fault of the request is 400/404 in the wire's error shape; a fault of the engine is 503
  shutdown   ``stop()`` closes the listener; sessions are closed by the rollouts that own them

Worked example, a length stop in turn 1 (``<eot>`` is id 9, the newline after it 10; ``*`` marks sampled ids):
  turn 1   prompt [1 2 3]                  sampled *4 *5          -> [1 2 3 *4 *5]
  turn 2   closing [9 10], new [6 7]       sampled *8 *9          -> [1 2 3 *4 *5 9 10 6 7 *8 *9]
  resample of turn 2 with the same body    sampled *5 *9          -> [1 2 3 4 5 9 10 6 7 *5 *9], a second row whose
  copies of 4 and 5 are context: they are trained in the first row only.

Legend: T tokens of a row, S tokens of one call, L mixture-of-experts layers, K experts per token.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from jinja2 import TemplateError

import moe_replay
from agents import ContextOverflow, Message

# ------------------------------------------------------------------------------------------------- rows

ARRAYS = {"token_ids": np.int32, "sampled": np.bool_, "logprobs": np.float32, "versions": np.int32, "call": np.int32}
"""The per-token arrays of a row; where a token was not sampled its log-prob is NaN, its version and call are -1."""


TRAINABLE = ("ok", "truncated")
"""Statuses that enter a baseline. The others are dropped: agent_error, agent_timeout, engine_error, no_calls, and
stale for a rollout that was too old when it was consumed."""


@dataclass
class Row:
    """One segment as the trainer receives it."""

    row_id: str
    rollout_id: str
    group_id: int
    task_id: str
    token_ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    call: np.ndarray
    experts: np.ndarray
    """``[T, L, K]``; L is 0 for a dense model."""
    experts_known: np.ndarray
    temperature: float
    reward: float = 0.0
    status: str = ""
    truncated: bool = False
    calls: list[dict] = field(default_factory=list)
    """Per call of the rollout: wire, engine, finish reason, version spans, seconds."""

    def __len__(self) -> int:
        return len(self.token_ids)


ROW_ARRAYS = (*ARRAYS, "experts", "experts_known")


def pack_rows(rows: list[Row]) -> bytes:
    """Rows as safetensors bytes: each array concatenated over rows, all else as JSON in the header."""
    from safetensors.numpy import save

    arrays = {name: np.concatenate([vars(row)[name] for row in rows]) for name in ROW_ARRAYS} if rows else {}
    rest = [{key: value for key, value in vars(row).items() if key not in ROW_ARRAYS} for row in rows]
    return save(arrays, {"lengths": json.dumps([len(row) for row in rows]), "rows": json.dumps(rest)})


def unpack_rows(data: bytes) -> list[Row]:
    """The inverse of ``pack_rows``."""
    from safetensors.numpy import load

    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    arrays, rows, start = load(data), [], 0
    for length, rest in zip(json.loads(header["lengths"]), json.loads(header["rows"]), strict=True):
        rows.append(Row(**rest, **{name: arrays[name][start : start + length] for name in ROW_ARRAYS}))
        start += length
    return rows


# ---------------------------------------------------------------------------------------- messages to ids

BREAK = "\ufdd0\ufdd1"
"""Two Unicode noncharacters: they mark, in rendered text, places where no control token may begin."""


class WireError(ValueError):
    """A fault of the request: ``status`` and the offending field, for the wire's own error shape."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def content_text(content: Any) -> str:
    """The text of a message's content: null, absent, "" and [] are one; text parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise WireError(f"content must be a string or a list of parts, got {type(content).__name__}", "messages")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise WireError(f"content part {str(part)[:80]} is not supported: this model takes text parts", "messages")
    return "".join(part["text"] for part in content)


def parsed_arguments(arguments: Any) -> Any:
    """Tool arguments as templates want them: the JSON object they spell, or the text itself when they spell none."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def normalise(message: Any) -> Message:
    """A message in the one shape that is compared and rendered; unknown keys (``cache_control``, …) do not count.

    Raises ``WireError`` for a message that has no role or malformed tool calls.
    """
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise WireError("each message must be an object with a role", "messages")
    role = "system" if message["role"] == "developer" else message["role"]
    out: Message = {"role": role, "content": content_text(message.get("content"))}
    if message.get("reasoning_content"):
        out["reasoning_content"] = str(message["reasoning_content"])
    if not isinstance(message.get("tool_calls") or [], list):
        raise WireError("tool_calls must be a list", "messages")
    if message.get("tool_calls"):
        out["tool_calls"] = [normalise_call(call) for call in message["tool_calls"]]
    return out


def normalise_call(call: Any) -> dict:
    """A tool call by what it asks for: name and parsed arguments."""
    if not (isinstance(call, dict) and isinstance(call.get("function"), dict) and "name" in call["function"]):
        raise WireError(f"malformed tool call {str(call)[:80]}", "messages")
    function = {"name": str(call["function"]["name"]), "arguments": parsed_arguments(call["function"].get("arguments"))}
    return {"type": "function", "function": function}


def normalise_tool(tool: Any) -> dict:
    """A tool by its function alone: ``cache_control`` and other marks beside it do not count."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters") or {}, dict)
        and isinstance(function.get("description") or "", str)
    ):
        raise WireError(f"malformed tool {str(tool)[:80]}", "tools")
    return {"type": "function", "function": tool["function"]}


def key(message: Message) -> str:
    """What two normalised messages must share to be the same: all but the thinking, which clients drop."""
    return json.dumps({name: value for name, value in message.items() if name != "reasoning_content"}, sort_keys=True)


class Template:
    """A model's chat template and tokenizer, and the two facts about them that token identity needs."""

    def __init__(self, tokenizer, eos_ids: Iterable[int]):
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.controls = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        mark = "INSTAR-REPLY"
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
        self.turn_end = self.render(turns, None, prompt=False).partition(mark)[2]
        """What the template puts after an assistant's text."""

    def guard(self, value: Any) -> Any:
        """Break control-token text inside what a message says, so that it stays text (no control id is injected)."""
        if isinstance(value, str):
            if BREAK in value:
                raise WireError("messages may not hold the noncharacters U+FDD0 U+FDD1", "messages")
            for control in self.controls:
                # One pass is not enough for a token that overlaps itself, such as ** in ***.
                while len(control) > 1 and control in value:
                    value = value.replace(control, control[0] + BREAK + control[1:])
            return value
        if isinstance(value, dict):
            return {self.guard(name): self.guard(item) for name, item in value.items()}
        return [self.guard(item) for item in value] if isinstance(value, list) else value

    def render(self, messages: list[Message], tools: list[dict] | None, prompt: bool) -> str:
        """The template's text, with ``BREAK`` where control-token text was quoted by a user, tool or system message."""
        # The assistant's own words may hold control ids that it sampled (thinking marks): they pass as they are.
        guarded = [message if message["role"] == "assistant" else self.guard(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                guarded, tools=self.guard(tools) if tools else None, add_generation_prompt=prompt, tokenize=False
            )
            text.encode()
        except TemplateError as error:
            raise WireError(f"the chat template refuses these messages: {error}", "messages") from None
        except UnicodeEncodeError:
            raise WireError("messages may not hold half a surrogate pair", "messages") from None
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; pieces at a ``BREAK`` are tokenized apart."""
        ids: list[int] = []
        for piece in text.split(BREAK):
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of sampled ids without the end token they stopped at."""
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def after_reply(self, last_id: int, new_text: str) -> tuple[list[int], int]:
        """The ids that follow a reply ending in ``last_id``, and how many of them close that reply.

        ``new_text`` is what the template renders after the reply's turn. An end token that the model sampled is not
        written twice, whether the template counts it to the reply or to the next turn's opening.
        """
        closing, rest = self.turn_end, self.turn_end + new_text
        if last_id in self.eos_ids:
            sampled_end = self.tokenizer.decode([last_id], skip_special_tokens=False)
            closing, rest = closing.removeprefix(sampled_end), rest.removeprefix(sampled_end)
        return self.encode(rest), len(self.encode(closing))


# ------------------------------------------------------------------------------------ branches and sessions


@dataclass(frozen=True)
class Sampling:
    """How a rollout samples."""

    temperature: float
    top_p: float
    max_tokens: int
    """Cap of one call, unless the client asks for its own."""
    fixed: bool
    """Training: temperature and top_p win over what the client asks for, else the ratio would be wrong."""


@dataclass
class Call:
    """One generation requested inside a rollout. ``generate`` fills the lists as the engine delivers."""

    index: int
    wire: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    affinity: str
    """Calls of one session prefer the engine that holds their prefix."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    """Per engine request, ``[S, L, K]`` from position 0 of prompt + tokens so far."""
    engines: list[int] = field(default_factory=list)
    finish_reason: str = ""
    committed: bool = False
    started: float = field(default_factory=time.time)
    seconds: float = 0.0

    def check(self) -> None:
        """Raise ``ValueError`` unless what the engine filled in fits together."""
        count, shapes = len(self.token_ids), {routes.shape[1:] for routes in self.routes}
        if not len(self.logprobs) == len(self.versions) == count:
            raise ValueError(
                f"engine returned {count} tokens, {len(self.logprobs)} log-probs, {len(self.versions)} versions"
            )
        if len(shapes) > 1 or any(len(routes) > len(self.prompt_ids) + count for routes in self.routes):
            raise ValueError(f"engine returned routes of shapes {[routes.shape for routes in self.routes]}")

    def summary(self) -> dict:
        """What a row keeps about the call."""
        spans = [[version, count] for version, count in sorted(Counter(self.versions).items())]
        return {
            "wire": self.wire,
            "engines": self.engines,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.prompt_ids),
            "sampled": len(self.token_ids),
            "version_spans": spans,
            "seconds": round(self.seconds, 4),
        }


Generate = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True)
class Mark:
    """A committed turn's end: so many messages stand for so many ids."""

    messages: int
    ids: int


@dataclass
class Branch:
    """An append-only id sequence and the messages it stands for. ``arrays`` are those of ``ARRAYS``."""

    tools_key: str
    messages: list[Message] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    arrays: dict[str, list] = field(default_factory=lambda: {name: [] for name in ARRAYS})
    experts: np.ndarray | None = None
    known: np.ndarray | None = None

    @property
    def ids(self) -> list[int]:
        return self.arrays["token_ids"]

    def fork(self, mark: Mark) -> Branch:
        """A new branch over the same beginning, every id of it context: it is trained where it was sampled."""
        new = Branch(self.tools_key, self.messages[: mark.messages], self.keys[: mark.messages], [mark])
        new.add_context(self.ids[: mark.ids])
        if self.experts is not None:
            new.experts, new.known = self.experts[: mark.ids].copy(), self.known[: mark.ids].copy()
        return new

    def add_context(self, ids: list[int]) -> None:
        """Append ids that were not sampled."""
        for name, filler in (("sampled", False), ("logprobs", np.nan), ("versions", -1), ("call", -1)):
            self.arrays[name] += [filler] * len(ids)
        self.arrays["token_ids"] += ids

    def add_sampled(self, call: Call) -> None:
        """Append what the engine sampled. Raises ``ValueError`` when its lists differ in length."""
        call.check()
        count = len(call.token_ids)
        self.arrays["token_ids"] += call.token_ids
        self.arrays["sampled"] += [True] * count
        self.arrays["logprobs"] += call.logprobs
        self.arrays["versions"] += call.versions
        self.arrays["call"] += [call.index] * count

    def add_routes(self, routes_SLK: np.ndarray) -> int:
        """Lay down one engine request's routes; returns the number of conflicting positions."""
        if self.experts is None:
            self.experts, self.known = routes_SLK[:0], np.zeros(0, bool)
        self.experts, self.known = moe_replay.extend(self.experts, self.known, len(self.ids))
        return moe_replay.lay_down(self.experts, self.known, routes_SLK)

    def row_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of a row. A dense model's routes have no layers; a token past the last call is unknown."""
        out = {name: np.array(values, ARRAYS[name]) for name, values in self.arrays.items()}
        dense = np.zeros((0, 0, 0), np.uint8), np.zeros(0, bool)
        routes = dense if self.experts is None else (self.experts, self.known)
        experts, known = moe_replay.extend(*routes, len(self.ids))
        return out | {"experts": experts, "experts_known": known}


@dataclass
class Plan:
    """Where a request's turn will go, decided before sampling."""

    parent: Branch | None
    mark: Mark | None
    context: list[int]
    """Ids after the mark (all of them when there is no parent)."""
    closing: int
    messages: list[Message]
    keys: list[str]
    tools_key: str
    cause: str
    """continue, or what is special about the turn: new, resample, template, edit (a reply that is not ours)."""

    @property
    def prompt_ids(self) -> list[int]:
        return [*(self.parent.ids[: self.mark.ids] if self.parent else []), *self.context]


@dataclass
class Turn:
    """A committed turn, as a wire reports it."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    overridden: list[str]


class Session:
    """All that one rollout said and sampled. Public: ``turn``, ``rows``, ``meters``, ``sampled``."""

    def __init__(self, template: Template, parse: Parse, generate: Generate, sampling: Sampling, context: int):
        self.id = secrets.token_urlsafe(24)
        self.template, self.parse, self.generate = template, parse, generate
        self.sampling, self.context = sampling, context
        self.branches: list[Branch] = []
        self.calls: list[Call] = []
        self.meters: Counter[str] = Counter()
        self.running: set[asyncio.Task] = set()
        self.closed = False
        self.failure: BaseException | None = None
        """An engine fault met by a call: the rollout's status is then engine_error, whatever the agent made of it."""

    async def turn(
        self, messages: list[Any], tools: list[dict] | None, wire: str, requested: dict | None = None
    ) -> Turn:
        """One turn: match, generate, commit. The one site of token identity; every wire and ``Env`` end here.

        ``requested`` may hold temperature, top_p and max_tokens. Raises ``WireError`` or ``ContextOverflow`` before
        anything is sampled.
        """
        requested, tools = requested or {}, [normalise_tool(tool) for tool in tools or []]
        plan = self.plan([normalise(message) for message in messages], tools)
        call = self.new_call(plan.prompt_ids, wire, requested)
        overridden = [
            name for name in ("temperature", "top_p") if requested.get(name, vars(call)[name]) != vars(call)[name]
        ]
        self.meters["overridden"] += len(overridden)
        try:
            await self.sample(call)
            call.check()  # before the branch is touched: a turn is committed whole or not at all
        except ValueError as error:
            self.failure = error
            raise RuntimeError(str(error)) from error
        except (RuntimeError, OSError, TimeoutError) as error:
            self.failure = error
            raise
        message = self.parse(self.template.decode(call.token_ids), tools)
        self.commit(plan, call, message)
        finish = "tool_calls" if message.get("tool_calls") else call.finish_reason
        return Turn(message, finish, len(call.prompt_ids), len(call.token_ids), overridden)

    async def sample(self, call: Call) -> None:
        """Let the engine fill ``call``, unless the rollout ends first."""
        if self.closed:
            raise WireError("its rollout has ended", status=404)
        running = asyncio.create_task(self.generate(call))
        self.running.add(running)
        running.add_done_callback(self.running.discard)
        try:
            await running
        except asyncio.CancelledError:
            if self.closed:
                raise WireError("its rollout has ended", status=404) from None
            raise

    async def shut(self) -> None:
        """The rollout is over: stop the calls that its agent left running, so that nothing is sampled unaccounted."""
        self.closed = True
        left = list(self.running)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    def new_call(self, prompt_ids: list[int], wire: str, requested: dict) -> Call:
        """A call over ``prompt_ids``. Raises ``ContextOverflow`` when no room is left to sample."""
        room = self.context - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(f"the prompt has {len(prompt_ids)} tokens, the context holds {self.context}")
        honoured = {} if self.sampling.fixed else requested
        call = Call(
            index=len(self.calls),
            wire=wire,
            prompt_ids=prompt_ids,
            max_tokens=min(room, requested.get("max_tokens") or self.sampling.max_tokens),
            temperature=honoured.get("temperature", self.sampling.temperature),
            top_p=honoured.get("top_p", self.sampling.top_p),
            affinity=self.id,
        )
        self.calls.append(call)
        return call

    # -- match, continue, fork

    def match(self, keys: list[str], tools_key: str) -> tuple[Branch, Mark] | None:
        """The longest committed beginning of any branch that is a proper beginning of the request."""
        best = None
        for branch in self.branches:
            if branch.tools_key != tools_key:
                continue
            for mark in branch.marks:
                count = mark.messages
                longer = (
                    best is None or count > best[1].messages or (count == best[1].messages and mark == branch.marks[-1])
                )
                if longer and count < len(keys) and branch.keys[:count] == keys[:count]:
                    best = branch, mark
        return best

    def plan(self, messages: list[Message], tools: list[dict] | None) -> Plan:
        """Decide which branch the request continues, and which ids are new."""
        if not messages:
            raise WireError("messages must not be empty", "messages")
        keys, tools_key = [key(message) for message in messages], json.dumps(tools or [], sort_keys=True)
        found = self.match(keys, tools_key)
        # Replies that no branch of ours stands behind: the client changed or invented them.
        foreign = any(message["role"] == "assistant" for message in messages[found[1].messages if found else 0 :])
        cause = "edit" if foreign else "new"
        if found is not None:
            branch, mark = found
            # Replies are rendered as they were returned: a client may echo them without their thinking.
            whole = [*branch.messages[: mark.messages], *messages[mark.messages :]]
            before = self.template.render(whole[: mark.messages], tools, prompt=False)
            text = self.template.render(whole, tools, prompt=True)
            if text.startswith(before) and before.endswith(self.template.turn_end):
                context, closing = self.template.after_reply(branch.ids[mark.ids - 1], text[len(before) :])
                cause = "edit" if foreign else "continue" if mark == branch.marks[-1] else "resample"
                return Plan(branch, mark, context, closing, whole, keys, tools_key, cause)
            cause, messages = "template", whole
        context = self.template.encode(self.template.render(messages, tools, prompt=True))
        return Plan(None, None, context, 0, messages, keys, tools_key, cause)

    def commit(self, plan: Plan, call: Call, reply: Message) -> None:
        """Append the turn. No await between looking at the branch and extending it, so turns cannot interleave."""
        branch, cause, reply = plan.parent, plan.cause, normalise(reply)
        if branch is None:
            branch = Branch(plan.tools_key)
            self.branches.append(branch)
        elif plan.mark != branch.marks[-1]:
            # Another call continued this branch while ours ran (or it is a resample): ours becomes a branch.
            cause = "resample" if cause == "continue" else cause
            branch = branch.fork(plan.mark)
            self.branches.append(branch)
        branch.add_context(plan.context)
        branch.add_sampled(call)
        for routes in call.routes:
            self.meters["route_conflicts"] += branch.add_routes(routes)
        branch.messages, branch.keys = [*plan.messages, reply], [*plan.keys, key(reply)]
        branch.marks.append(Mark(len(branch.messages), len(branch.ids)))
        call.committed = True
        self.meters["closing_tokens"] += plan.closing
        self.meters[f"turns_{cause}"] += 1

    # -- what leaves

    @property
    def sampled(self) -> int:
        """Tokens the engine sampled for this rollout so far, committed or not."""
        return sum(len(call.token_ids) for call in self.calls)

    @property
    def uncommitted(self) -> int:
        """Sampled tokens of calls that never became a turn (client gone, engine fault)."""
        return sum(len(call.token_ids) for call in self.calls if not call.committed)

    def rows(self, rollout_id: str, group_id: int, task_id: str) -> list[Row]:
        """One row per branch that sampled anything."""
        calls = [call.summary() for call in self.calls]
        rows = [
            Row(f"{rollout_id}.{index}", rollout_id, group_id, task_id, **branch.row_arrays(),
                temperature=self.sampling.temperature, calls=calls)
            for index, branch in enumerate(self.branches)
        ]  # fmt: skip
        return [row for row in rows if row.sampled.any()]


# ------------------------------------------------------------------------------------------- ids to a reply

Parse = Callable[[str, list[dict] | None], Message]


class Parser:
    """Sampled text to an assistant message, with vLLM's own tool and reasoning parsers. Never changes ids.

    Raises ``ValueError`` at construction when vLLM knows no parser of that name.
    """

    def __init__(self, tokenizer, tool_parser: str, reasoning_parser: str):
        # vLLM takes ten seconds to import; nothing else in this file needs it.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        self.request = ChatCompletionRequest
        self.tokenizer = tokenizer
        try:
            self.tool_parser = ToolParserManager.get_tool_parser(tool_parser) if tool_parser else None
            self.reasoning_parser = (
                ReasoningParserManager.get_reasoning_parser(reasoning_parser) if reasoning_parser else None
            )
        except KeyError as error:
            raise ValueError(f"vLLM has no parser of that name: {error}; see vllm serve --help for the names") from None

    def __call__(self, text: str, tools: list[dict] | None) -> Message:
        request = self.request(model="policy", messages=[], tools=tools or None)
        message: Message = {"role": "assistant", "content": text}
        if self.reasoning_parser is not None:
            reasoning, text = self.reasoning_parser(self.tokenizer).extract_reasoning(text, request)
            message |= {"content": text or ""} | ({"reasoning_content": reasoning} if reasoning else {})
        if tools and self.tool_parser is not None:
            parsed = self.tool_parser(self.tokenizer, request.tools).extract_tool_calls(message["content"], request)
            if parsed.tools_called and parsed.tool_calls:
                message["content"] = parsed.content
                message["tool_calls"] = [call.model_dump() for call in parsed.tool_calls]
        return message


# ------------------------------------------------------------------------------------------------- the wire

CHAT_FIELDS = {"model", "messages", "tools", "temperature", "top_p", "max_tokens", "max_completion_tokens"}
CHAT_FIELDS |= {"user", "metadata", "store"}  # labels for the provider's own books: nothing to do with the reply
CHAT_DEFAULTS = {
    "n": 1,
    "stream": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "response_format": {"type": "text"},
}
"""Fields understood only at the value that asks for nothing; any other value is refused by name, never ignored."""


def read_json(data: bytes) -> Any:
    """The body. Raises ``WireError`` for bytes that are no JSON, no Unicode, or nested too deep."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}") from None


def read_chat(body: Any) -> tuple[list[Any], list[dict] | None, dict]:
    """Messages, tools and sampling requests of a chat/completions body. Raises ``WireError`` naming the field."""
    if not isinstance(body, dict):
        raise WireError("the body must be a JSON object")
    for name, value in body.items():
        if name not in CHAT_FIELDS and value is not None and CHAT_DEFAULTS.get(name, body) != value:
            raise WireError(f"{name}={json.dumps(value)[:60]} is not supported", name)
    for name in ("messages", "tools"):
        if not isinstance(body.get(name) or [], list):
            raise WireError(f"{name} must be a list", name)
    asked = {}
    for name in ("temperature", "top_p", "max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        whole = name.startswith("max")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value >= whole:
            raise WireError(f"{name} must be {'a positive integer' if whole else 'at least 0'}, got {value!r}", name)
        asked["max_tokens" if whole else name] = value
    return body.get("messages") or [], body.get("tools") or None, asked


def chat_completion(turn: Turn, model: str) -> dict:
    """The reply, built from the SDK's own types, so one that the SDK would reject cannot be sent."""
    from openai.types.chat import ChatCompletion

    message = {**turn.message, "content": turn.message["content"] or None}
    usage = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }
    choice = {"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": None}
    return ChatCompletion.model_validate(
        {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": usage,
        }
    ).model_dump(exclude_unset=True)


def chat_error(error: WireError) -> web.Response:
    """OpenAI's error shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return web.json_response(body, status=error.status, headers=headers)


@web.middleware
async def wire_errors(request: web.Request, handler: Callable) -> web.StreamResponse:
    """Each fault once, at the wire's boundary: the status tells the client whether to retry."""
    try:
        return await handler(request)
    except WireError as error:
        return chat_error(error)
    except ContextOverflow as error:
        return chat_error(WireError(str(error), "messages", code="context_length_exceeded"))
    except RecursionError:
        return chat_error(WireError("the body is nested too deep"))
    except web.HTTPException as error:
        return chat_error(WireError(error.text or error.reason, status=error.status))
    except (RuntimeError, OSError, TimeoutError) as error:
        return chat_error(WireError(f"engine: {error}", status=503))


class Loopback:
    """The server. ``open`` gives a rollout its session and address; ``close`` ends it (then it is 404)."""

    def __init__(self, template: Template, parse: Parse, generate: Generate, model: str, context: int):
        self.template, self.parse, self.generate, self.model, self.context = template, parse, generate, model, context
        self.sessions: dict[str, Session] = {}
        self.runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen on 127.0.0.1, on a port the system picks."""
        app = web.Application(middlewares=[wire_errors], client_max_size=32 * 2**20)
        app.router.add_post("/s/{session}/v1/chat/completions", self.chat)
        app.router.add_get("/s/{session}/v1/models", self.models)
        # A closed socket cancels its handler, which aborts its engine call.
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the listener and its connections."""
        await self.runner.cleanup()

    def open(self, sampling: Sampling) -> Session:
        """A new session."""
        session = Session(self.template, self.parse, self.generate, sampling, self.context)
        self.sessions[session.id] = session
        return session

    def close(self, session: Session) -> None:
        """End a session."""
        self.sessions.pop(session.id, None)

    def url(self, session: Session) -> str:
        """The session's address."""
        return f"http://127.0.0.1:{self.port}/s/{session.id}"

    def session(self, request: web.Request) -> Session:
        """The session an address names."""
        session = self.sessions.get(request.match_info["session"])
        if session is None:
            raise WireError("no such session, or its rollout has ended", status=404)
        return session

    async def chat(self, request: web.Request) -> web.Response:
        """POST chat/completions."""
        session = self.session(request)
        messages, tools, asked = read_chat(read_json(await request.read()))
        turn = await session.turn(messages, tools, "openai.chat", asked)
        headers = {"x-instar-overridden": ",".join(turn.overridden)} if turn.overridden else {}
        return web.json_response(chat_completion(turn, self.model), headers=headers)

    async def models(self, request: web.Request) -> web.Response:
        """GET models."""
        self.session(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "instar"}
        return web.json_response({"object": "list", "data": [model]})


def identity_meters(sessions: list[Session]) -> dict[str, float]:
    """``identity/*`` of a step: sums over its rollouts, and segments per rollout."""
    total: Counter[str] = Counter()
    for session in sessions:
        total.update(session.meters)
    names = ("closing_tokens", "overridden", "turns_continue", "turns_resample", "turns_template", "route_conflicts")
    meters = {f"identity/{name}": float(total[name]) for name in names}
    meters["identity/echo_mismatch"] = float(total["turns_edit"])
    meters["identity/segments_per_rollout"] = sum(len(s.branches) for s in sessions) / max(1, len(sessions))
    return meters
