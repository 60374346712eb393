"""The loopback: any program that speaks to an OpenAI or Anthropic address becomes a source of token-exact rows.

One session belongs to one rollout. It holds branches; a branch is an append-only sequence of token ids beside the
messages those ids stand for. A request says messages; this file decides which branch it continues and which ids
are new, lets the engine sample over exactly those ids, and appends what was sampled. Text is never tokenized back
into something that is trained: a sampled id is an id that the engine returned, in exactly one row.

Read in this order: ``Row`` (what leaves), ``normalise`` (the one shape of a message), ``Template`` (messages to ids),
``Branch`` and ``Session`` (the token accumulation), the three wires ``Chat``, ``Responses`` and ``Messages`` (their
JSON to an ``Ask``, a ``Turn`` to their JSON), ``Loopback`` (the server).

One loop lives here, the aiohttp server:
  consumes   HTTP requests on 127.0.0.1, each inside one session's address
  produces   turns committed to that session, and replies; a stream is told from a turn that is already committed
  waits for  ``generate`` (the router of rollout.py), which has a deadline of its own; a stream's client is sent a
             sign of life every ``KEEP_ALIVE_S`` meanwhile
  unblocked  by the router, or by the last client of a call closing its socket, which cancels the call
  failure    a fault of the request is 4xx in the wire's error shape; a fault of the engine is 503
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
import base64
import functools
import io
import json
import re
import secrets
import time
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any, ClassVar

import numpy as np
from aiohttp import web
from jinja2 import TemplateError
from PIL import Image

import moe_replay
from agents import ContextOverflow, Message

KEEP_ALIVE_S = 0.5
"""A stream whose turn is not there yet gets a sign of life this often, so that no client's read time-out fires."""
MAX_BODY, MAX_MESSAGES, MAX_DEPTH, MAX_PIXELS, MAX_N = 32 * 2**20, 10_000, 64, 2**24, 128
"""Bounds of a request: bytes (413), messages, nesting of a value, pixels of an image, choices (400)."""


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
    """Per call of the rollout: wire, engines, finish reason, closing tokens' place, version spans, seconds."""
    images: list[str] = field(default_factory=list)
    """Data URIs of the images among the row's context, in order."""

    def __len__(self) -> int:
        return len(self.token_ids)


ROW_ARRAYS = (*ARRAYS, "experts", "experts_known")


def pack_rows(rows: list[Row]) -> bytes:
    """Rows as safetensors bytes: each array concatenated over rows, and all else as compressed JSON in one more."""
    from safetensors.numpy import save

    arrays = {name: np.concatenate([vars(row)[name] for row in rows]) for name in ROW_ARRAYS} if rows else {}
    rest = [{key: value for key, value in vars(row).items() if key not in ROW_ARRAYS} for row in rows]
    rest = zlib.compress(json.dumps([[len(row) for row in rows], rest]).encode())
    return save(arrays | {"rest": np.frombuffer(rest, np.uint8)})


def unpack_rows(data: bytes) -> list[Row]:
    """The inverse of ``pack_rows``."""
    from safetensors.numpy import load

    arrays, rows, start = load(data), [], 0
    lengths, rest = json.loads(zlib.decompress(arrays.pop("rest")))
    for length, given in zip(lengths, rest, strict=True):
        rows.append(Row(**given, **{name: array[start : start + length] for name, array in arrays.items()}))
        start += length
    return rows


# ------------------------------------------------------------------------------------- one shape of a message

BREAK = "\ufdd0\ufdd1"
"""Two Unicode noncharacters: they mark, in rendered text, places where no control token may begin."""


class WireError(ValueError):
    """A fault of the request: ``status`` and the offending field, for the wire's own error shape."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def unsupported(name: str, value: Any, instead: str = "") -> WireError:
    """A value of a field, or of a part of it, that Instar does not take."""
    return WireError(f"{name} {str(value)[:80]} is not supported{instead}", name)


def shallow(value: Any, left: int = MAX_DEPTH) -> None:
    """Raise ``WireError`` for a value nested deeper than ``MAX_DEPTH``."""
    if not left:
        raise WireError(f"the body is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            shallow(item, left - 1)


TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
IMAGE_PARTS = ("image_url", "input_image", "image")


@functools.lru_cache(maxsize=32)
def picture(uri: str) -> Image.Image:
    """The image of a base64 data URI. Raises ``WireError`` for anything else: nothing is fetched from a network."""
    found = re.fullmatch(r"data:image/(png|jpeg|gif|webp);base64,([A-Za-z0-9+/=\r\n]*)", uri)
    if found is None:
        raise WireError(f"image {uri[:40]!r} is no base64 data URI of a png, jpeg, gif or webp", "messages")
    try:
        image = Image.open(io.BytesIO(base64.b64decode(found[2])), formats=["PNG", "JPEG", "GIF", "WEBP"])
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width}x{image.height} are more than {MAX_PIXELS} pixels")
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise WireError(f"image cannot be decoded: {error}", "messages") from None


def image_ids(config: dict) -> list[int]:
    """The ids around and in place of an image, by a model's configuration. No model may say them: they get no
    probability, in the engine and in the trainer alike."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return [config[name] for name in names if config.get(name) is not None] if "vision_config" in config else []


def content(value: Any) -> str | list[dict]:
    """A message's content: null, absent, "" and [] are one; text parts are joined, unless images stand among them."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise WireError(f"content must be a string or a list of parts, got {type(value).__name__}", "messages")
    parts = [content_part(part) for part in value]
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def content_part(part: Any) -> dict:
    """A text or image part, in the spelling of any wire."""
    sort = part.get("type") if isinstance(part, dict) else None
    if sort in TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    source = part.get("source" if sort == "image" else "image_url") if sort in IMAGE_PARTS else None
    if isinstance(source, dict):
        source = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    if not isinstance(source, str):
        raise unsupported("messages", part, ": text and image parts are")
    if not source.startswith("data:image/"):
        raise WireError(f"image {source[:40]!r} is no data URI; URLs are not fetched: send its bytes", "messages")
    return {"type": "image", "image": source}


def images_of(messages: list[Message]) -> list[str]:
    """The data URIs of all images, in the order of the messages."""
    listed = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["image"] for parts in listed for part in parts if part["type"] == "image"]


def parsed_arguments(arguments: Any) -> dict:
    """Tool arguments as a mapping, for templates and comparison: nothing and null are {}; what spells no JSON object,
    or one nested too deep, is kept whole under ``INVALID_JSON``."""
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        shallow(value)
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {} if value in (None, "") else {"INVALID_JSON": arguments}


def normalise(message: Any) -> Message:
    """A message in the one shape that is compared and rendered; unknown keys (``cache_control``, …) do not count.

    Raises ``WireError`` for a message that has no role or malformed tool calls.
    """
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise WireError("each message must be an object with a role", "messages")
    role = "system" if message["role"] == "developer" else message["role"]
    out: Message = {"role": role, "content": content(message.get("content"))}
    # Some clients sign the assistant's turns with a name, which it did not say.
    for name in ("reasoning_content",) if role == "assistant" else ("name", "tool_call_id"):
        if message.get(name):
            out[name] = str(message[name])
    if not isinstance(message.get("tool_calls") or [], list):
        raise WireError("tool_calls must be a list", "messages")
    if message.get("tool_calls"):
        out["tool_calls"] = [normalise_call(call) for call in message["tool_calls"]]
    return out


def normalise_call(call: Any) -> dict:
    """A tool call: its id, the tool's name, and its arguments as a mapping."""
    if not (isinstance(call, dict) and isinstance(call.get("function"), dict) and "name" in call["function"]):
        raise WireError(f"malformed tool call {str(call)[:80]}", "messages")
    function = {"name": str(call["function"]["name"]), "arguments": parsed_arguments(call["function"].get("arguments"))}
    return {"type": "function", "id": str(call.get("id") or ""), "function": function}


def normalise_tool(tool: Any) -> dict:
    """A function tool, in the spelling of any wire, by its function alone: no ``cache_control`` beside it counts."""
    shallow(tool)
    sort = tool.get("type") if isinstance(tool, dict) else "none"
    named = sort in ("function", None) or (sort == "custom" and "input_schema" in tool)
    inner = tool.get("function", tool) if named else None
    if not (isinstance(inner, dict) and isinstance(inner.get("name"), str)):
        raise unsupported("tools", tool, ": named functions are")
    given = inner | {"parameters": inner.get("input_schema", inner.get("parameters"))}
    sorts = {"name": str, "description": str, "parameters": dict, "strict": bool}
    function = {name: given[name] for name in sorts if given.get(name) is not None}
    if not all(isinstance(value, sorts[name]) for name, value in function.items()):
        raise WireError(f"malformed tool {str(tool)[:80]}", "tools")
    return {"type": "function", "function": function}


def key(message: Message) -> dict:
    """What two normalised messages must share to be the same: all but the thinking, which clients drop, and the ids
    that tie tool results to calls, which clients may invent anew."""
    same = {name: message[name] for name in ("role", "content", "name") if name in message}
    return same | {"calls": [call["function"] for call in message.get("tool_calls", ())]}


# ---------------------------------------------------------------------------------------- messages to ids


def either(tokens: Iterable[str]) -> re.Pattern:
    """What finds any of the tokens, the longest first; nothing where there is none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def as_parts(said: str | list[dict]) -> list[dict]:
    """A content as a list of parts."""
    return [{"type": "text", "text": said}] if isinstance(said, str) else said


def squeeze(text: str) -> str:
    """Text without its white space and marks."""
    return "".join(text.replace(BREAK, "").split())


def kind(message: Message) -> tuple:
    """What a template may treat alike: messages of one kind differ only in what they say."""
    said = message["content"]
    return (message["role"], isinstance(said, str), bool(said), "reasoning_content" in message, "tool_calls" in message)


class Template:
    """A model's chat template and tokenizer, and what token identity needs to know about them.

    A template is any program, so whether it rewrites what it wrote before can only be seen by rendering. Rendering a
    long history on every turn would cost more than the turn, so a ``window`` of it is rendered instead, and the whole
    of it whenever its length has doubled; a template that treats the two differently is rendered whole from then on.
    """

    WHOLE = 8
    """Histories of up to so many messages are always rendered whole."""

    def __init__(self, tokenizer, eos_ids: Iterable[int], images: bool = False):
        self.tokenizer, self.eos_ids, self.images = tokenizer, frozenset(eos_ids), images
        self.controls = either(token for token in tokenizer.get_added_vocab() if token.strip() and len(token) > 1)
        self.windows = True
        """False once a window was seen to be treated unlike its whole history."""
        self.parts = False
        """Whether the template reads text from a list of parts alone, as some templates for images do."""
        self.parts = not self.closes()[0]
        found, self.turn_end = self.closes()
        """What the template puts after an assistant's text."""
        if not found:
            raise ValueError("the model's chat template does not write what an assistant says: it is not for chat")

    def closes(self) -> tuple[bool, str]:
        """Whether the template writes what an assistant says, and what it writes behind it."""
        mark, shown = "INSTAR-REPLY", ""
        with suppress(WireError):  # refuses text that is no list of parts, or a list
            turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
            shown = self.render(turns, None, prompt=False)
        return mark in shown, shown.partition(mark)[2]

    def guard(self, value: Any, controls: re.Pattern) -> Any:
        """Break control-token text inside what a message says, so that it stays text (no control id is injected)."""
        if isinstance(value, str):
            if BREAK in value:
                raise WireError("messages may not hold the noncharacters U+FDD0 U+FDD1", "messages")
            while controls.search(value):  # one pass is not enough for a token that overlaps itself, as ** in ***
                value = controls.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {
                self.guard(name, controls): item if name == "image" else self.guard(item, controls)
                for name, item in value.items()
            }
        return [self.guard(item, controls) for item in value] if isinstance(value, list) else value

    def guarded(self, message: Message) -> Message:
        """A message with its controls broken. The assistant's own words may hold control ids that it sampled (thinking
        marks): they pass as they are, but for those that it spelled in letters."""
        if message["role"] != "assistant":
            return self.guard(message, self.controls)
        return self.guard(message, either(message["spelled"])) if "spelled" in message else message

    def spelled(self, text: str, ids: list[int]) -> list[str]:
        """The control tokens that sampled text spells in letters, without having sampled them."""
        found = set(self.controls.findall(text))
        return sorted(control for control in found if self.tokenizer.convert_tokens_to_ids(control) not in ids)

    def render(self, messages: list[Message], tools: list[dict] | None, prompt: bool) -> str:
        """The template's text, with ``BREAK`` where control-token text was quoted by a user, tool or system message.

        The template runs in the sandbox of ``apply_chat_template``. Raises ``WireError`` when it refuses the messages.
        """
        guarded = [self.guarded(message) for message in messages]
        if self.parts:
            guarded = [message | {"content": as_parts(message["content"])} for message in guarded]
        how = {"add_generation_prompt": prompt, "tokenize": False}
        try:
            text = self.tokenizer.apply_chat_template(
                guarded, tools=self.guard(tools, self.controls) if tools else None, **how
            )
            text.encode()
        except (TemplateError, TypeError) as error:
            raise WireError(f"the chat template refuses these messages: {error}", "messages") from None
        except UnicodeEncodeError:
            raise WireError("messages may not hold half a surrogate pair", "messages") from None
        return text

    def behind(self, history: list[Message], mark: Mark, text: str, tools) -> tuple[str, str] | None:
        """What stands behind the last reply of ``history`` in ``text``, the render of it and what follows: the close of
        that reply's turn, and all of it. None when what stands before is not what the reply was sampled under.

        The reply itself may come out spelled otherwise (trimmed, its tool call's JSON spaced anew) as long as its turn
        is there and its thinking is not lost: the ids are those that were sampled, whatever the template makes of them.
        """
        prompt = self.render(history[:-1], tools, prompt=True)
        rest, verbatim = text[len(prompt + mark.said) :], None
        if text.startswith(prompt + mark.said):
            verbatim = self.turn_end if rest.startswith(self.turn_end) else "", rest
        # Behind an empty reply, anything might be a part of how the template writes it.
        if verbatim and (mark.said or not mark.end or rest.startswith(mark.end)):
            return verbatim
        before = self.render(history, tools, prompt=False)
        if not (text.startswith(before) and before.startswith(prompt)):
            return verbatim
        reply = before[len(prompt) :]
        close = reply.rfind(mark.end) if mark.end and mark.end in reply else len(reply) - len(self.turn_end)
        thinking_kept = squeeze(history[-1].get("reasoning_content", "")) in squeeze(reply)
        if not thinking_kept or not (reply.endswith(self.turn_end) or (mark.end and mark.end in reply)):
            return None
        return reply[close:], text[len(prompt) + close :]

    def window(self, history: list[Message], kinds: list[tuple]) -> list[Message]:
        """A short history that a template should treat like ``history``: its beginning past the first message that is
        not the system's, and a tail that holds every kind of message there is, starting where kinds and parity fit.
        """
        first = next((i for i, message in enumerate(history) if message["role"] != "system"), 0) + 1
        missing, tail = set(kinds[first:]), len(history)
        while tail > first and (missing or len(history) - tail < self.WHOLE // 2):
            tail -= 1
            missing.discard(kinds[tail])
        for head, back in product(range(first, first + self.WHOLE), range(self.WHOLE)):
            start = tail - back
            if start > head and kinds[start] == kinds[head] and (start - head) % 2 == 0:
                return [*history[:head], *history[start:]]
        return history

    def rest(self, branch: Branch, mark: Mark, new: list[Message], tools) -> tuple[tuple[str, str] | None, str | None]:
        """``behind``, for what ``branch`` holds up to ``mark`` and ``new`` after it, by a window of it where that will
        do; and the render of all of it where that was needed, as it always is when the answer is None."""
        history = branch.messages[: mark.messages]
        short = self.window(history, branch.kinds) if self.windows and len(history) > self.WHOLE else history
        found = None
        if short is not history:
            with suppress(WireError):  # a template that refuses the window is asked about the whole
                found = self.behind(short, mark, self.render([*short, *new], tools, prompt=True), tools)
            if found is not None and mark.doubled is None:
                return found, None
        text = self.render([*history, *new], tools, prompt=True)
        whole = self.behind(history, mark, text, tools)
        # The window cannot tell what it does not hold, so all that came since the last time is looked at again.
        since = mark.doubled
        if whole and since and self.behind(history[: since.messages], since, text, tools) is None:
            whole = None
        agreed = found is None or found == whole
        self.windows &= agreed
        # Where they differ, turns since the last doubling may stand on what the template does not write.
        return whole if agreed else None, text

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; pieces at a ``BREAK`` are tokenized apart."""
        ids: list[int] = []
        for piece in text.split(BREAK):
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> tuple[str, str]:
        """The text of sampled ids, and the text of the end token they stopped at."""
        cut_at = len(ids) - (bool(ids) and ids[-1] in self.eos_ids)
        how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(ids[:cut_at], **how), self.tokenizer.decode(ids[cut_at:], **how)

    def follow(self, end: str, closing: str, rest: str) -> tuple[list[int], int]:
        """The ids of ``rest``, which follows a reply, and how many of them close that reply's turn.

        The end token that the model sampled, if any, is ``end``. It is not written twice, whether the template counts
        it to the reply's turn or to the next one's opening.
        """
        written = closing.find(end) + len(end) if end in closing else 0
        closing, rest = closing[written:], rest[written:]
        rest, left = rest if written else rest.removeprefix(end), self.encode(end)
        # The tokenizer sees the end as well: some take in the white space behind a control token.
        return self.encode(end + rest)[len(left) :], len(self.encode(end + closing)) - len(left)


# ------------------------------------------------------------------------------------ branches and sessions


@dataclass(frozen=True)
class Sampling:
    """How a rollout samples."""

    temperature: float
    top_p: float
    max_tokens: int
    """Cap of one call, unless the client asks for its own."""
    fixed: bool
    """Training: the client's temperature, top_p, top_k and seed do not count, else ratio and group would be wrong."""


@dataclass
class Ask:
    """What a request asks for, whatever its wire. ``asked`` may hold temperature, top_p, top_k, max_tokens, seed,
    stop (strings) and schema (of a JSON reply)."""

    messages: list[Any]
    """In OpenAI's chat shape."""
    tools: list[Any]
    wire: str
    asked: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    most_calls: int | None = None
    """Tool calls a reply may hold: 0 for tool_choice none, 1 where parallel calls are switched off."""
    stream: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """What only the wire's own reply needs."""
    work: float = 0.0
    """Seconds that the server itself worked on it: neither the engine's time nor the time that others' work took."""


@dataclass
class Call:
    """One generation requested inside a rollout. ``generate`` fills the lists as the engine delivers."""

    index: int
    wire: str
    sent_ids: list[int]
    """The prompt as it goes to the engine: one id for each image."""
    max_tokens: int
    temperature: float
    top_p: float
    affinity: str
    """Calls of one session prefer the engine that holds their prefix."""
    top_k: int = 0
    """0: no limit."""
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    schema: dict | None = None
    """JSON schema that the engine's structured output enforces; never in training, where it would bend the ratio."""
    images: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    """Per engine request, ``[S, L, K]`` from position 0 of prompt + tokens so far."""
    engines: list[int] = field(default_factory=list)
    finish_reason: str = ""
    expanded: list[int] | None = None
    """The prompt with each image at its full length, once the engine has said so."""
    branch: Branch | None = None
    """Where it was committed."""
    prompt_tokens: int = 0
    closing: list[int] = field(default_factory=list)
    """From and to which position of its branch stands what the template put behind the turn before."""
    seconds: float = 0.0

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt as the model sees it. A committed one is the beginning of a branch, and is kept nowhere else."""
        return self.branch.ids[: self.prompt_tokens] if self.branch else self.expanded or self.sent_ids

    @property
    def committed(self) -> bool:
        return self.branch is not None

    def keep(self, branch: Branch) -> None:
        """It is a turn of ``branch`` now."""
        self.prompt_tokens, self.branch = len(self.prompt_ids), branch
        self.sent_ids, self.expanded, self.routes = [], None, []

    def check(self, begun: list[int]) -> None:
        """Raise ``ValueError`` unless what the engine filled in fits together; ``begun`` is what its branch holds."""
        if self.expanded and self.expanded[: len(begun)] != begun:
            raise ValueError("the engine expanded the images of a prompt otherwise than a turn before; did the policy "
                             "sample an image's placeholder?")  # fmt: skip
        counts = {"tokens": len(self.token_ids), "log-probs": len(self.logprobs), "versions": len(self.versions)}
        shapes = [routes.shape for routes in self.routes]
        if len(set(counts.values())) > 1:
            raise ValueError(f"engine returned {counts}")
        longest = len(self.prompt_ids) + len(self.token_ids)
        if len({shape[1:] for shape in shapes}) > 1 or any(shape[0] > longest for shape in shapes):
            raise ValueError(f"engine returned routes of shapes {shapes}")

    def summary(self) -> dict:
        """What a row keeps about the call."""
        spans = [[version, count] for version, count in sorted(Counter(self.versions).items())]
        kept = {name: vars(self)[name] for name in ("wire", "engines", "finish_reason", "closing")}
        sizes = {"prompt_tokens": self.prompt_tokens or len(self.prompt_ids), "sampled": len(self.token_ids)}
        return kept | sizes | {"version_spans": spans, "seconds": round(self.seconds, 4)}


Generate = Callable[[Call], Awaitable[None]]
Parse = Callable[[str, list[dict] | None], Message]
"""Sampled text to an assistant message; parsing never changes ids."""


@dataclass(frozen=True)
class Mark:
    """A committed turn's end: so many messages stand for so many ids, of which the engine was sent ``sent``."""

    messages: int
    ids: int
    sent: int
    said: str = field(compare=False)
    """The turn's sampled text, without the end token."""
    end: str = field(compare=False)
    """The text of the end token that it stopped at; empty where it was cut."""
    doubled: Mark | None = field(compare=False)
    """Where the messages have doubled (from WHOLE on): the mark at which they last had."""


@dataclass
class Branch:
    """An append-only id sequence and the messages it stands for. ``arrays`` are those of ``ARRAYS``."""

    tools_key: str
    cause: str = "first"
    """Why there is this branch: ``Plan.cause``."""
    messages: list[Message] = field(default_factory=list)
    keys: list[dict] = field(default_factory=list)
    kinds: list[tuple] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """The ids with one id for each image, as a next request sends them; without images, the ids."""
    arrays: dict[str, list] = field(default_factory=lambda: {name: [] for name in ARRAYS})
    experts: np.ndarray | None = None
    known: np.ndarray | None = None
    conflicts: set[int] = field(default_factory=set)
    """Positions that a later call routed otherwise."""

    @property
    def ids(self) -> list[int]:
        return self.arrays["token_ids"]

    def fork(self, mark: Mark, cause: str) -> Branch:
        """A new branch over the same beginning, every id of it context: it is trained where it was sampled."""
        new = Branch(
            self.tools_key, cause, marks=[mark], sent=self.sent[: mark.sent], kinds=self.kinds[: mark.messages]
        )
        new.add(self.ids[: mark.ids])
        if self.experts is not None:
            new.experts, new.known = self.experts[: mark.ids].copy(), self.known[: mark.ids].copy()
        return new

    def longest(self, keys: list[dict]) -> Mark | None:
        """The last mark whose messages all begin ``keys``."""
        common = shared(self.keys, keys)
        return next((mark for mark in reversed(self.marks) if mark.messages <= common), None)

    def add(self, ids: list[int], call: Call | None = None) -> None:
        """Append ids: those that ``call`` sampled, or context."""
        count = len(ids)
        given = [[np.nan] * count, [-1] * count, [-1] * count]
        given = [call.logprobs, call.versions, [call.index] * count] if call else given
        for array, values in zip(self.arrays.values(), (ids, [call is not None] * count, *given), strict=True):
            array += values

    def add_routes(self, routes_SLK: np.ndarray) -> int:
        """Lay down one engine request's routes; returns the number of positions that conflict for the first time."""
        if self.experts is None:
            self.experts, self.known = routes_SLK[:0], np.zeros(0, bool)
        self.experts, self.known = moe_replay.extend(self.experts, self.known, len(self.ids))
        before = len(self.conflicts)
        self.conflicts.update(moe_replay.lay_down(self.experts, self.known, routes_SLK).tolist())
        return len(self.conflicts) - before

    def row_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of a row. A dense model's routes have no layers; a token past the last call is unknown."""
        out = {name: np.array(values, ARRAYS[name]) for name, values in self.arrays.items()}
        dense = np.zeros((0, 0, 0), np.uint8), np.zeros(0, bool)
        routes = dense if self.experts is None else (self.experts, self.known)
        experts, known = moe_replay.extend(*routes, len(self.ids))
        return out | {"experts": experts, "experts_known": known}

    def spans(self, tokenizer) -> Iterator[dict]:
        """The ids in runs of one origin, for a reader."""
        calls = self.arrays["call"]
        for call, run in groupby(range(len(calls)), key=calls.__getitem__):
            start, *rest = run
            ids, versions = ([self.arrays[name][i] for i in (start, *rest)] for name in ("token_ids", "versions"))
            who, text = "context" if call < 0 else f"call {call}", tokenizer.decode(ids)
            yield {"from": start, "who": who, "versions": sorted(set(versions)), "ids": ids, "text": text}


@dataclass
class Plan:
    """Where a request's turn will go, decided before sampling."""

    parent: Branch | None
    mark: Mark | None
    context: list[int]
    """Ids after the mark (all of them when there is no parent), as they go to the engine."""
    closing: int
    messages: list[Message]
    keys: list[dict]
    tools: list[dict]
    tools_key: str
    cause: str
    """continue, or why the turn is not the next of a branch: first (of the session), new (another conversation:
    a sub-agent, a compacted history), resample, template (it rewrites what it wrote), edit (a reply not of ours)."""
    asked: list[Any] = field(default_factory=list)
    """The request's messages as they came."""

    @property
    def sent_ids(self) -> list[int]:
        ids = self.parent.sent[: self.mark.sent] if self.parent else []
        ids += self.context
        return ids


@dataclass
class Turn:
    """A committed turn, as a wire reports it."""

    message: Message
    """As the parser has it."""
    normal: Message
    """In normal form."""
    finish_reason: str
    """stop, length or tool_calls."""
    call: Call
    text: str
    """Sampled text, without the end token."""
    end: str
    """The text of the end token that it stopped at; empty where it was cut."""
    stop: str | None = None
    """The stop string that ended the reply."""

    @property
    def used(self) -> tuple[int, int]:
        """Tokens of the prompt, and tokens sampled."""
        return self.call.prompt_tokens, len(self.call.token_ids)


@dataclass(eq=False)
class Answer:
    """The turns of one request body: running, or recorded for a client that asks again."""

    body: dict
    task: asyncio.Task
    stream: bool
    waiting: int = 0
    delivered: bool = False


class Session:
    """All that one rollout said and sampled."""

    def __init__(self, template: Template, parse: Parse, generate: Generate, sampling: Sampling, context: int):
        self.id = secrets.token_urlsafe(24)
        self.template, self.parse, self.generate = template, parse, generate
        self.sampling, self.context = sampling, context
        self.branches: list[Branch] = []
        self.calls: list[Call] = []
        self.meters: Counter[str] = Counter()
        self.replies: list[dict] = []
        """Keys of all replies given."""
        self.running: set[asyncio.Task] = set()
        self.answers: list[Answer] = []
        self.read_before: deque[tuple[list[Any], list[Message], list[dict]]] = deque(maxlen=8)
        """Message lists of the last committed turns: as they came, in normal form, and their keys."""
        self.responses: dict[str, list[Message]] = {}
        """What each id of the Responses API stands for."""
        self.closed = False
        self.failure: BaseException | None = None
        """An engine fault met by a call: the rollout's status is then engine_error, whatever the agent made of it."""

    # -- one turn

    async def turn(self, messages: list[Any], tools: list[dict] | None, wire: str, asked: dict | None = None) -> Turn:
        """One turn, as ``Env`` takes it. The messages are copied, as a wire does: the caller may change its own."""
        [turn] = await self.turns(Ask(json.loads(json.dumps(messages)), tools or [], wire, asked or {}))
        return turn

    async def turns(self, ask: Ask) -> list[Turn]:
        """Match, generate, commit. The one site of token identity; every wire and ``Env`` end here.

        ``n`` turns are samples of one prompt. Raises ``WireError`` or ``ContextOverflow`` before anything is sampled.
        """
        began = time.perf_counter()
        plan = self.plan(ask)
        calls = [self.new_call(plan, ask, choice) for choice in range(ask.n)]
        self.meters["overridden"] += len(self.overridden(ask))
        ask.work += time.perf_counter() - began
        try:
            await self.sample(plan, calls)
            began = time.perf_counter()
            turns = [self.reply(plan, call, ask) for call in calls]
            for index, turn in enumerate(turns):
                self.commit(replace(plan, cause="resample") if index else plan, turn)
            ask.work += time.perf_counter() - began
            return turns
        except (WireError, ContextOverflow):
            raise
        except (ValueError, RuntimeError, OSError, TimeoutError) as error:
            self.failure = error
            if isinstance(error, ValueError):
                raise RuntimeError(str(error)) from error
            raise

    def overridden(self, ask: Ask) -> list[str]:
        """The sampling parameters for which the rollout's own values win over those asked for."""
        own = {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p, "top_k": 0, "seed": None}
        return [name for name in own if self.sampling.fixed and ask.asked.get(name, own[name]) != own[name]]

    def reply(self, plan: Plan, call: Call, ask: Ask) -> Turn:
        """What a sampled call says."""
        text, end = self.template.decode(call.token_ids)
        said, stop = cut(text, call.stop)
        message = self.parse(said, plan.tools if ask.most_calls != 0 else [])
        if ask.most_calls and message.get("tool_calls"):
            message["tool_calls"] = message["tool_calls"][: ask.most_calls]
        normal, spelled = normalise(message), self.template.spelled(text, call.token_ids[: -1 if end else None])
        normal |= {"spelled": spelled} if spelled else {}
        finish = "tool_calls" if message.get("tool_calls") else "stop" if stop else call.finish_reason
        return Turn(message, normal, finish, call, text, end, stop)

    async def sample(self, plan: Plan, calls: list[Call]) -> None:
        """Let the engine fill the calls, unless the rollout ends first."""
        if self.closed:
            raise WireError("its rollout has ended", status=404)
        began, tasks = time.perf_counter(), [asyncio.create_task(self.generate(call)) for call in calls]
        self.running.update(tasks)
        for task in tasks:
            task.add_done_callback(self.running.discard)
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if self.closed:
                raise WireError("its rollout has ended", status=404) from None
            raise
        finally:
            for task, call in zip(tasks, calls, strict=True):
                task.cancel()
                call.seconds = time.perf_counter() - began
        if self.closed:
            raise WireError("its rollout has ended", status=404)
        for call in calls:  # before a branch is touched: a turn is committed whole or not at all
            call.check(plan.parent.ids[: plan.mark.ids] if plan.parent else [])

    async def shut(self) -> None:
        """The rollout is over: stop the calls that its agent left running, so that nothing is sampled unaccounted."""
        self.closed = True
        if left := list(self.running):
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    def new_call(self, plan: Plan, ask: Ask, choice: int) -> Call:
        """A call over the plan's ids. Raises ``ContextOverflow`` when no room is left to sample."""
        sent_ids, asked, rule = plan.sent_ids, ask.asked, self.sampling
        room = self.context - len(sent_ids)
        if room < 1:
            raise ContextOverflow(f"the prompt has {len(sent_ids)} tokens, the context holds {self.context}")
        granted = {} if rule.fixed else asked
        call = Call(len(self.calls), ask.wire, sent_ids, min(room, asked.get("max_tokens") or rule.max_tokens),
                    granted.get("temperature", rule.temperature), max(granted.get("top_p", rule.top_p), 1e-6), self.id,
                    top_k=granted.get("top_k", 0), stop=asked.get("stop", []),
                    seed=granted["seed"] + choice if "seed" in granted else None, schema=asked.get("schema"),
                    images=images_of(plan.messages) if self.template.images else [])  # fmt: skip
        self.calls.append(call)
        return call

    # -- retries

    async def answer(self, ask: Ask, body: dict, retry: bool) -> Answer:
        """The finished answer to a request body: a body whose call runs joins it, a retry gets the recorded turns.

        A caller that is cancelled while others wait leaves the call running; the last one to go aborts it.
        """
        found = next((one for one in self.answers if one.body == body and repr(one.body) == repr(body)), None)
        # After an answer has arrived, the same body in the same mode is a wish for another sample.
        if found and (not found.task.done() or retry or not found.delivered or ask.stream != found.stream):
            self.meters["retries_joined"] += 1
            found.stream = ask.stream  # a stream's plain fallback is served once, not for ever
        else:
            old = [one for one in self.answers if one is not found and one.task.done()]
            found = Answer(body, asyncio.create_task(self.turns(ask)), ask.stream)
            self.answers = [one for one in self.answers if not one.task.done()] + old[-8:] + [found]
        found.waiting += 1
        try:
            await asyncio.shield(found.task)
        except BaseException:  # who asks again must not get a call that failed or is dying
            if found.task.done() or found.waiting == 1:
                self.answers = [one for one in self.answers if one is not found]
            raise
        finally:
            found.waiting -= 1
            if not found.waiting and not found.task.done():
                self.meters["disconnects"] += 1
                found.task.cancel()
        return found

    # -- match, continue, fork

    def read(self, asked: list[Any]) -> tuple[list[Message], list[dict]]:
        """The messages in normal form, and their keys. What a request repeats of an earlier one is not read again."""
        if not 0 < len(asked) <= MAX_MESSAGES:
            raise WireError(f"{len(asked)} messages: from 1 to {MAX_MESSAGES} are accepted", "messages")
        messages, keys = [], []
        for before, read, read_keys in self.read_before:
            count = shared(before, asked)
            if count > len(messages):
                messages, keys = read[:count], read_keys[:count]
            if count == len(before):
                break
        for message in asked[len(messages) :]:
            shallow(message)
            messages.append(normalise(message))
            keys.append(key(messages[-1]))
            for uri in images_of(messages[-1:]):
                if not self.template.images:
                    raise WireError("this model takes text, not images", "messages")
                picture(uri)
        return messages, keys

    def match(self, keys: list[dict], tools_key: str) -> tuple[Branch, Mark] | None:
        """The longest committed beginning of the request among all branches; of equals, one that can be continued."""
        found = [(branch, branch.longest(keys)) for branch in self.branches if branch.tools_key == tools_key]
        found = [(branch, mark) for branch, mark in found if mark is not None]
        return max(found, key=lambda pair: (pair[1].messages, pair[1] == pair[0].marks[-1]), default=None)

    def plan(self, ask: Ask) -> Plan:
        """Decide which branch the request continues, and which ids are new."""
        tools = [normalise_tool(tool) for tool in ask.tools]
        (messages, keys), tools_key = self.read(ask.messages), json.dumps(tools, sort_keys=True)
        found = self.match(keys, tools_key)
        new = messages[found[1].messages if found else 0 :]
        # Replies that the policy never gave: the client changed or invented them.
        foreign = any(same["role"] == "assistant" and same not in self.replies for same in keys[len(keys) - len(new) :])
        if found is None:
            cause = "edit" if foreign else self.begins(keys, tools_key)
            text = self.template.render(messages, tools, prompt=True)
        else:
            branch, mark = found
            # Replies are rendered as they were returned: a client may echo them without their thinking.
            messages = [*branch.messages[: mark.messages], *new]
            behind, text = self.template.rest(branch, mark, new, tools)
            if behind is not None:
                context, closing = self.template.follow(mark.end, *behind)
                cause = "edit" if foreign else "continue" if mark == branch.marks[-1] else "resample"
                return Plan(branch, mark, context, closing, messages, keys, tools, tools_key, cause, ask.messages)
            cause = "template"
        context = self.template.encode(text)
        return Plan(None, None, context, 0, messages, keys, tools, tools_key, cause, ask.messages)

    def begins(self, keys: list[dict], tools_key: str) -> str:
        """What a request that continues nothing is: the same beginning again, another conversation, or the first."""
        again = any(branch.tools_key == tools_key and branch.keys[: len(keys)] == keys for branch in self.branches)
        return "resample" if again else "new" if self.branches else "first"

    def commit(self, plan: Plan, turn: Turn) -> None:
        """Append the turn. No await between looking at the branch and extending it, so turns cannot interleave."""
        branch, cause, start, call = plan.parent, plan.cause, plan.mark.ids if plan.mark else 0, turn.call
        if branch is None:
            cause = "new" if cause == "first" and self.branches else cause
            branch = Branch(plan.tools_key, cause)
            self.branches.append(branch)
        elif plan.mark != branch.marks[-1]:
            # Another call continued this branch while ours ran (or it is a resample): ours becomes a branch.
            cause = "resample" if cause == "continue" else cause
            branch = branch.fork(plan.mark, cause)
            self.branches.append(branch)
        branch.add(call.prompt_ids[start:])
        branch.add(call.token_ids, call)
        for routes in call.routes:
            self.meters["route_conflicts"] += branch.add_routes(routes)
        branch.sent += [*plan.context, *call.token_ids]
        self.read_before.appendleft((plan.asked, plan.messages, plan.keys))
        before = plan.mark.messages if plan.mark else 0
        del branch.kinds[before:]
        branch.messages, branch.keys = [*plan.messages, turn.normal], [*plan.keys, key(turn.normal)]
        branch.kinds += map(kind, branch.messages[before:])
        count, bits = len(branch.messages), before.bit_length()
        doubled = next((mark for mark in branch.marks if mark.messages.bit_length() == bits), None)
        doubled = doubled if count.bit_length() > bits and count > self.template.WHOLE else None
        branch.marks.append(Mark(count, len(branch.ids), len(branch.sent), turn.text, turn.end, doubled))
        self.replies.append(branch.keys[-1])
        call.keep(branch)
        call.closing = [start, start + plan.closing]
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
        rest = {"temperature": self.sampling.temperature, "calls": [call.summary() for call in self.calls]}
        used = {f"{rollout_id}.{i}": one for i, one in enumerate(self.branches) if any(one.arrays["sampled"])}
        rest |= {"rollout_id": rollout_id, "group_id": group_id, "task_id": task_id}
        return [Row(name, **rest, **one.row_arrays(), images=images_of(one.messages)) for name, one in used.items()]

    def trace(self) -> dict:
        """The session's branches with their tokens, who sampled what, and why each branch exists."""
        branches = [
            {"cause": one.cause, "messages": one.messages, "spans": list(one.spans(self.template.tokenizer))}
            for one in self.branches
        ]
        calls = [call.summary() | {"committed": call.committed} for call in self.calls]
        return {"branches": branches, "calls": calls, "meters": dict(self.meters)}


def shared(before: list[Any], asked: list[Any]) -> int:
    """How many messages two requests begin with in common."""
    pairs = enumerate(zip(before, asked, strict=False))
    return next((i for i, (a, b) in pairs if a is not b and a != b), min(len(before), len(asked)))


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string in it, and that string. The sampled ids are not cut."""
    found = min(((text.index(stop), stop) for stop in stops if stop in text), default=None)
    return (text[: found[0]], found[1]) if found else (text, None)


# ------------------------------------------------------------------------------------------------ the wires

LABELS = {"model", "metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key",
          "prompt_cache_retention", "cache_control", "inference_geo", "user_profile_id"}  # fmt: skip
"""Labels for the provider's own books: they have nothing to do with the reply."""
PIECE = 256
"""Characters of one streamed delta."""


def between(low: float, high: float, *sorts: type) -> tuple[Callable[[Any], bool], str]:
    """The rule of a number."""
    what = "a number" if float in sorts else "an integer"
    return lambda value: type(value) in sorts and low <= value <= high, f"{what} from {low} to {high}"


def one_of(*sorts: type) -> tuple[Callable[[Any], bool], str]:
    """The rule of a field that has one of these types."""
    return lambda value: isinstance(value, sorts), "of type " + " or ".join(sort.__name__ for sort in sorts)


def stops(value: Any) -> bool:
    """The rule of stop strings."""
    given = [value] if isinstance(value, str) else value if isinstance(value, list) else [None]
    return len(given) <= 64 and all(isinstance(item, str) and item for item in given)


STOPS = stops, "a string or a list of at most 64 strings, none empty"
RULES = {"temperature": between(0, 2, int, float), "top_p": between(0, 1, int, float), "top_k": between(1, 2**31, int),
         "seed": between(-(2**63), 2**63, int), "n": between(1, MAX_N, int), "stop": STOPS, "stop_sequences": STOPS,
         "input": one_of(str, list), "instructions": one_of(str), "previous_response_id": one_of(str)}  # fmt: skip
RULES |= {name: between(1, 2**31, int) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")}
RULES |= {name: one_of(bool) for name in ("stream", "logprobs", "parallel_tool_calls", "store")}
RULES |= {name: one_of(list) for name in ("messages", "tools")}
RULES |= {name: one_of(dict) for name in ("stream_options", "text")}
"""What a field's value must be, and how to say so."""
SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop")}
SAMPLING |= {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "stop_sequences": "stop"}
"""Fields about sampling, in any wire, and what ``Ask.asked`` calls them."""


def read_json(data: bytes) -> dict:
    """The body. Raises ``WireError`` for bytes that are no JSON object, no Unicode, or nested too deep."""
    try:
        body = json.loads(data)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no character
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise WireError("the body must be a JSON object")
    return body


def schema_of(form: Any, name: str, session: Session) -> dict:
    """``{"schema": …}`` of a response format that asks for JSON; empty for text."""
    sort = form.get("type") if isinstance(form, dict) else "text" if form is None else None
    if sort == "text":
        return {}
    inner = {"schema": {"type": "object"}} if sort == "json_object" else form
    inner = form.get("json_schema", form) if sort == "json_schema" else inner
    known = sort in ("json_object", "json_schema") and isinstance(inner, dict)
    if not (known and isinstance(inner.get("schema"), dict)):
        raise unsupported(name, form, ": text, json_object and json_schema are")
    if session.sampling.fixed:
        raise WireError(f"{name}: a JSON schema cannot be enforced in a training rollout, where it would change the "
                        "distribution that the log-probs are of", name)  # fmt: skip
    return {"schema": inner["schema"]}


def most_calls(body: dict) -> int | None:
    """How many tool calls a body lets a reply hold. A forced call would need constrained sampling: refused."""
    choice = body.get("tool_choice") or "auto"
    choice = choice if isinstance(choice, dict) else {"type": choice}
    if choice.get("type") not in ("auto", "none"):
        raise unsupported("tool_choice", body["tool_choice"], ": auto and none are")
    single = body.get("parallel_tool_calls") is False or choice.get("disable_parallel_tool_use")
    return 0 if choice["type"] == "none" else 1 if single else None


def dumped(model: type, value: dict) -> dict:
    """A reply checked against the SDK's own type, so that one the SDK would reject cannot be sent."""
    return model.model_validate(value).model_dump(mode="json", exclude_unset=True, by_alias=True)


def pieces(text: str) -> Iterator[str]:
    """Text in the sizes that deltas have."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


class Wire:
    """A wire format. Each has ``ask`` (JSON to an ``Ask``), ``reply`` (turns to JSON), ``events`` (that reply as the
    names and data of a stream) and ``fault`` (a fault in the wire's shape)."""

    name: str
    taken: frozenset[str]
    """Fields that are read."""
    idle: ClassVar[dict[str, Any]]
    """Fields understood only at the value that asks for nothing."""
    ping = b": the engine is at work\n\n"
    """A comment of a server-sent stream."""

    def check(self, body: dict) -> None:
        """Raise ``WireError`` naming a field that is set and not supported, or malformed: nothing is ignored."""
        for name, value in body.items():
            right, what = RULES.get(name, one_of(object))
            if name not in self.taken | LABELS and value is not None and not (
                name in self.idle and value == self.idle[name]
            ):  # fmt: skip
                raise WireError(f"{name}={str(value)[:60]} is not supported", name)
            if value is not None and not right(value):
                raise WireError(f"{name} must be {what}, got {str(value)[:40]}", name)
        shallow({name: value for name, value in body.items() if name not in ("messages", "input", "tools")})

    def asks(self, body: dict, messages: list[Any], schema: dict, **extra: Any) -> Ask:
        """What a checked body asks for."""
        asked = {SAMPLING[name]: body[name] for name in SAMPLING if body.get(name) not in (None, [])}
        if caps := [body[name] for name in SAMPLING if SAMPLING[name] == "max_tokens" and body.get(name)]:
            asked["max_tokens"] = min(caps)
        if isinstance(asked.get("stop"), str):
            asked["stop"] = [asked["stop"]]
        rest = body.get("n") or 1, most_calls(body), bool(body.get("stream")), extra
        return Ask(messages, body.get("tools") or [], self.name, asked | schema, *rest)

    def frames(self, events: Iterable[tuple[str, dict]]) -> bytes:
        """Events as the bytes of a server-sent stream."""
        return b"".join(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in events)


class Chat(Wire):
    """OpenAI's chat/completions."""

    name = "openai.chat"
    taken = frozenset({"messages", "tools", "temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "n",
                       "stop", "stream", "stream_options", "logprobs", "response_format", "tool_choice",
                       "parallel_tool_calls"})  # fmt: skip
    idle: ClassVar = {"presence_penalty": 0, "frequency_penalty": 0, "top_logprobs": 0, "logit_bias": {},
                      "modalities": ["text"]}  # fmt: skip

    def ask(self, session: Session, body: dict) -> Ask:
        self.check(body)
        usage = (body.get("stream_options") or {}).get("include_usage")
        schema = schema_of(body.get("response_format"), "response_format", session)
        return self.asks(body, body.get("messages") or [], schema, usage=usage, logprobs=body.get("logprobs"))

    def reply(self, session: Session, ask: Ask, turns: list[Turn], model: str) -> dict:
        from openai.types.chat import ChatCompletion

        choices = []
        for index, turn in enumerate(turns):
            message = {**turn.message, "content": turn.message["content"] or None}
            scores = {"content": token_logprobs(session, turn.call)} if ask.extra["logprobs"] else None
            choice = {"index": index, "message": message, "finish_reason": turn.finish_reason, "logprobs": scores}
            choices.append(choice)
        prompt, sampled = turns[0].used[0], sum(turn.used[1] for turn in turns)
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        reply = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion", "created": int(time.time()),
                 "model": model, "choices": choices, "usage": usage}  # fmt: skip
        return dumped(ChatCompletion, reply)

    def events(self, ask: Ask, reply: dict) -> Iterator[tuple[str, dict]]:
        head = {name: reply[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        with_usage = ask.extra["usage"]
        head |= {"usage": None} if with_usage else {}
        for choice in reply["choices"]:
            for delta in chat_deltas(choice["message"]):
                part = {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": None}
                yield "chunk", head | {"choices": [part]}
            last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
            yield "chunk", head | {"choices": [last | {"logprobs": choice["logprobs"]}]}
        if with_usage:
            yield "chunk", head | {"choices": [], "usage": reply["usage"]}

    def frames(self, events: Iterable[tuple[str, dict]]) -> bytes:
        frames = list(events)
        done = b"data: [DONE]\n\n" if frames[-1][0] == "chunk" else b""
        return b"".join(f"data: {json.dumps(data)}\n\n".encode() for _, data in frames) + done

    def fault(self, error: WireError) -> dict:
        sort = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": sort, "param": error.param, "code": error.code}}


def token_logprobs(session: Session, call: Call) -> list[dict]:
    """Sampled tokens as OpenAI tells them; the bytes of one that is a part of a character are null."""
    texts = [session.template.tokenizer.decode([token]) for token in call.token_ids]
    told = [(text, None if "\ufffd" in text else list(text.encode())) for text in texts]
    return [
        {"token": text, "logprob": logprob, "bytes": whole, "top_logprobs": []}
        for (text, whole), logprob in zip(told, call.logprobs, strict=True)
    ]


def chat_deltas(message: dict) -> Iterator[dict]:
    """A message as the deltas that add up to it."""
    yield {"role": "assistant", "content": message["content"] and ""}
    for piece in pieces(message.get("reasoning_content") or ""):
        yield {"reasoning_content": piece}
    for piece in pieces(message["content"] or ""):
        yield {"content": piece}
    for index, call in enumerate(message.get("tool_calls") or []):
        yield {"tool_calls": [call | {"index": index, "function": call["function"] | {"arguments": ""}}]}
        for piece in pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


class Responses(Wire):
    """OpenAI's responses."""

    name = "openai.responses"
    taken = frozenset({"input", "instructions", "previous_response_id", "tools", "temperature", "top_p", "stream",
                       "text", "max_output_tokens", "tool_choice", "parallel_tool_calls", "store"})  # fmt: skip
    idle: ClassVar = {"include": [], "truncation": "disabled", "background": False, "top_logprobs": 0, "reasoning": {},
                      "stream_options": {"include_obfuscation": False}}  # fmt: skip

    def ask(self, session: Session, body: dict) -> Ask:
        self.check(body)
        form, before, given = body.get("text") or {}, body.get("previous_response_id"), body.get("input") or []
        if form.keys() - {"format"}:
            raise WireError(f"text={str(form)[:60]} is not supported: text.format is", "text")
        if before is not None and before not in session.responses:
            raise WireError(f"previous_response_id {before[:60]!r} is not of this session", "previous_response_id")
        said = [*session.responses.get(before, [])]
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            add_item(said, item)
        system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        echo = {name: body[name] for name in ("instructions", "previous_response_id") if name in body}
        schema = schema_of(form.get("format"), "text.format", session)
        echo["tools"] = [{"type": "function", **normalise_tool(tool)["function"]} for tool in body.get("tools") or []]
        return self.asks(body, [*system, *said], schema, said=said, echo=echo, store=body.get("store") is not False)

    def reply(self, session: Session, ask: Ask, turns: list[Turn], model: str) -> dict:
        from openai.types.responses import Response

        [turn] = turns
        thought = len(session.template.encode(turn.message.get("reasoning_content") or ""))
        ident, cut_short = f"resp_{secrets.token_hex(12)}", turn.finish_reason == "length"
        if ask.extra["store"]:
            session.responses[ident] = [*ask.extra["said"], turn.message]
        usage = {"input_tokens": turn.used[0], "output_tokens": turn.used[1], "total_tokens": sum(turn.used),
                 "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                 "output_tokens_details": {"reasoning_tokens": thought}}  # fmt: skip
        status = "incomplete" if cut_short else "completed"
        reply = {"id": ident, "object": "response", "created_at": time.time(), "model": model, "status": status,
                 "error": None, "incomplete_details": {"reason": "max_output_tokens"} if cut_short else None,
                 "output": list(output_items(turn.message, status)), "parallel_tool_calls": ask.most_calls != 1,
                 "tool_choice": "none" if ask.most_calls == 0 else "auto",
                 "temperature": turn.call.temperature, "top_p": turn.call.top_p, "usage": usage}  # fmt: skip
        return dumped(Response, reply | ask.extra["echo"])

    def events(self, ask: Ask, reply: dict) -> Iterator[tuple[str, dict]]:
        for number_, (name, data) in enumerate(response_events(reply)):
            yield name, {"type": name, "sequence_number": number_} | data

    fault = Chat.fault


def add_item(said: list[Message], item: Any) -> None:
    """Append one input item. The items of one assistant turn (reasoning, text, calls) are one message."""
    sort = item.get("type", "message") if isinstance(item, dict) else None
    if sort == "function_call_output":
        part = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    elif sort == "message":
        part = {"role": item.get("role"), "content": item.get("content")}
    elif sort == "reasoning":
        part = {"role": "assistant", "reasoning_content": content(item.get("content") or item.get("summary"))}
    elif sort == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        part = {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
    else:
        raise unsupported("input", item)
    last = said[-1] if said else {}
    joins = "tool_calls" in part or not (last.get("content") or last.get("tool_calls"))
    if part["role"] == last.get("role") == "assistant" and joins:
        calls = [*(last.get("tool_calls") or []), *part.get("tool_calls", [])]
        part = last | part | ({"tool_calls": calls} if calls else {})
        said.pop()
    said.append(part)


def output_items(message: Message, status: str) -> Iterator[dict]:
    """A turn's message as output items."""
    if message.get("reasoning_content"):
        thought = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        yield {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "content": thought}
    if message["content"] or not message.get("tool_calls"):
        part = {"type": "output_text", "text": message["content"] or "", "annotations": []}
        item = {"type": "message", "role": "assistant", "status": status, "content": [part]}
        yield {"id": f"msg_{secrets.token_hex(12)}"} | item
    for call in message.get("tool_calls") or []:
        item = {"type": "function_call", "status": "completed", "call_id": call["id"]}
        yield {"id": f"fc_{secrets.token_hex(12)}"} | item | call["function"]


def response_events(reply: dict) -> Iterator[tuple[str, dict]]:
    """A response as its stream tells it: opened, item by item, closed."""
    begun = reply | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(reply["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield "response.output_item.added", {"output_index": index, "item": item | empty | {"status": "in_progress"}}
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield "response.function_call_arguments.delta", at | {"delta": piece}
            yield "response.function_call_arguments.done", at | {"name": item["name"], "arguments": item["arguments"]}
        for part in item.get("content") or []:
            yield from part_events(at | {"content_index": 0}, part)
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{reply['status']}", {"response": reply}


def part_events(at: dict, part: dict) -> Iterator[tuple[str, dict]]:
    """One part of a message or of reasoning."""
    text, extra = f"response.{part['type']}", {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", at | {"part": part | {"text": ""}}
    for piece in pieces(part["text"]):
        yield f"{text}.delta", at | {"delta": piece} | extra
    yield f"{text}.done", at | {"text": part["text"]} | extra
    yield "response.content_part.done", at | {"part": part}


class Messages(Wire):
    """Anthropic's messages."""

    name = "anthropic.messages"
    taken = frozenset({"messages", "system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k",
                       "stop_sequences", "stream", "thinking"})  # fmt: skip
    idle: ClassVar = {"output_config": {}}
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def ask(self, session: Session, body: dict) -> Ask:
        self.check(body)
        messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        for message in body.get("messages") or []:
            messages += chat_messages(message)
        if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            raise WireError("the last message is the assistant's: prefill is not supported", "messages")
        thinking = body.get("thinking") or {"type": "disabled"}
        if not isinstance(thinking, dict) or thinking.get("type") not in ("enabled", "adaptive", "disabled"):
            raise WireError(f"thinking={str(thinking)[:60]} is not supported", "thinking")
        return self.asks(body, messages, {}, thinking=thinking["type"] != "disabled")

    def reply(self, session: Session, ask: Ask, turns: list[Turn], model: str) -> dict:
        from anthropic.types import Message as AnthropicMessage

        [turn] = turns
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(turn.finish_reason, "end_turn")
        reply = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model,
                 "content": list(blocks(turn.message, ask.extra["thinking"])),
                 "stop_reason": "stop_sequence" if turn.stop and reason == "end_turn" else reason,
                 "stop_sequence": turn.stop if reason == "end_turn" else None,
                 "usage": {"input_tokens": turn.used[0], "output_tokens": turn.used[1],
                           "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}}  # fmt: skip
        return dumped(AnthropicMessage, reply)

    def events(self, ask: Ask, reply: dict) -> Iterator[tuple[str, dict]]:
        begun = reply | {"content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = reply["usage"] | {"output_tokens": 0}
        yield "message_start", {"type": "message_start", "message": begun}
        for index, block in enumerate(reply["content"]):
            empty, deltas = block_deltas(block)
            yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
            for delta in deltas:
                yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
            yield "content_block_stop", {"type": "content_block_stop", "index": index}
        why = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
        yield "message_delta", {"type": "message_delta", "delta": why, "usage": reply["usage"]}
        yield "message_stop", {"type": "message_stop"}

    def fault(self, error: WireError) -> dict:
        sorts = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
        sort = sorts.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": sort, "message": str(error)}}


def chat_messages(message: Any) -> Iterator[Message]:
    """An Anthropic message in chat's shape: each tool_result is a message of its own, and text around it a user's."""
    given = message.get("content") if isinstance(message, dict) else None
    if not (given and isinstance(given, list) and all(isinstance(block, dict) for block in given)):
        yield message
    elif message.get("role") == "assistant":
        thoughts = [str(block.get("thinking")) for block in given if block.get("type") == "thinking"]
        uses = [block for block in given if block.get("type") == "tool_use"]
        calls = [{"id": b.get("id"), "function": {"name": b.get("name"), "arguments": b.get("input")}} for b in uses]
        rest = [block for block in given if block.get("type") not in ("thinking", "tool_use")]
        yield {"role": "assistant", "content": rest, "reasoning_content": "".join(thoughts), "tool_calls": calls}
    else:
        for results, run in groupby(given, lambda block: block.get("type") == "tool_result"):
            parts = list(run)
            yield from map(tool_message, parts) if results else [{"role": message.get("role"), "content": parts}]


def tool_message(block: dict) -> Message:
    """A tool_result. An error without a word of its own says that it is one."""
    said = block.get("content") or ("error" if block.get("is_error") else "")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}


def blocks(message: Message, thinking: bool) -> Iterator[dict]:
    """A turn's message as content blocks; thinking is shown to those who asked for it."""
    if message.get("reasoning_content") and thinking:
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": "instar"}
    if message["content"]:
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls") or []:
        arguments = parsed_arguments(call["function"]["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def block_deltas(block: dict) -> tuple[dict, list[dict]]:
    """A content block as it opens, and the deltas that fill it."""
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    if block["type"] == "thinking":
        thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return block | {"thinking": "", "signature": ""}, [*thoughts, signed]
    spelled = pieces(json.dumps(block["input"]))
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in spelled]


# ----------------------------------------------------------------------------------------------- the server


def fault_of(error: Exception) -> WireError:
    """Each fault once, at the wire's boundary: the status tells the client whether to retry."""
    if isinstance(error, ContextOverflow):
        return WireError(f"prompt is too long: {error}", "messages", code="context_length_exceeded")
    if isinstance(error, RecursionError):
        return WireError("the body is nested too deep")
    if isinstance(error, web.HTTPException):
        return WireError(error.text or error.reason, status=error.status)
    return error if isinstance(error, WireError) else WireError(f"engine: {error}", status=503)


FAULTS = (WireError, ContextOverflow, RecursionError, web.HTTPException, RuntimeError, OSError, TimeoutError)


class Loopback:
    """The server. ``open`` gives a rollout its session and address; ``close`` ends it (then it is 404)."""

    def __init__(self, template: Template, parse: Parse, generate: Generate, model: str, context: int):
        self.template, self.parse, self.generate, self.model, self.context = template, parse, generate, model, context
        self.sessions: dict[str, Session] = {}
        self.runner: web.AppRunner | None = None
        self.port = 0
        self.costs: deque[float] = deque(maxlen=10_000)
        """``Ask.work`` of the last calls."""

    async def start(self) -> None:
        """Listen on 127.0.0.1, on a port the system picks."""
        app = web.Application(middlewares=[self.faults], client_max_size=MAX_BODY)
        for path, wire in (("chat/completions", Chat()), ("responses", Responses()), ("messages", Messages())):
            app.router.add_post(f"/s/{{session}}/v1/{path}", functools.partial(self.serve, wire))
        app.router.add_post("/s/{session}/v1/messages/count_tokens", self.count_tokens)
        app.router.add_get("/s/{session}/v1/models", self.models)
        app.router.add_get("/s/{session}/v1/models/{model}", self.models)
        app.router.add_get("/s/{session}/trace", self.trace)
        # A closed socket cancels its handler, which aborts its engine call.
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0, backlog=4096)
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

    @web.middleware
    async def faults(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        """Answer a fault in the shape of the wire whose client asked."""
        try:
            return await handler(request)
        except FAULTS as error:
            fault = fault_of(error)
            anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.path
            headers = {"Retry-After": "1"} if fault.status == 503 else {}
            body = (Messages() if anthropic else Chat()).fault(fault)
            return web.json_response(body, status=fault.status, headers=headers)

    async def serve(self, wire: Wire, request: web.Request) -> web.StreamResponse:
        """POST to a wire: one turn, or ``n``. The turns are committed before the first byte of a reply is sent."""
        session, data, stream = self.session(request), await request.read(), None
        began = time.perf_counter()
        body = read_json(data)
        ask = wire.ask(session, body)
        ask.work = time.perf_counter() - began
        overridden = session.overridden(ask)
        headers = {"x-instar-overridden": ",".join(overridden)} if overridden else {}
        # Two bodies are the same request whether or not the reply is streamed. The SDKs say when they ask again.
        asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        answering = asyncio.create_task(session.answer(ask, {"wire": wire.name, **dict(sorted(asked.items()))}, retry))
        try:
            while ask.stream and not (await asyncio.wait({answering}, timeout=KEEP_ALIVE_S))[0]:
                stream = stream or await open_stream(request, headers)
                await stream.write(wire.ping)
            answer = await answering
            began, turns = time.perf_counter(), answer.task.result()
            reply = wire.reply(session, ask, turns, self.model)
            frames = wire.frames(wire.events(ask, reply)) if ask.stream else json.dumps(reply).encode()
            self.costs.append(ask.work + time.perf_counter() - began)
            if not ask.stream:
                headers |= {"Content-Type": "application/json", "Content-Length": str(len(frames))}
            stream = stream or await open_stream(request, headers)
            await stream.write(frames)
            await stream.write_eof()
            answer.delivered = True
        except FAULTS as error:
            if stream is None:
                raise
            await stream.write(wire.frames([("error", wire.fault(fault_of(error)))]))
        finally:
            answering.cancel()
        return stream

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST Anthropic's messages/count_tokens: the ids that the same messages would be sent with."""
        session, body = self.session(request), read_json(await request.read())
        plan = session.plan(Messages().ask(session, body))
        if images_of(plan.messages):
            raise WireError("tokens of images are counted by the engine alone, when it is called", "messages")
        return web.json_response({"input_tokens": len(plan.sent_ids)})

    async def models(self, request: web.Request) -> web.Response:
        """GET models, or one of them: there is one, and its description serves both wires."""
        self.session(request)
        if request.match_info.get("model", self.model) != self.model:
            raise WireError(f"the model here is {self.model}", "model", status=404, code="model_not_found")
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "instar", "type": "model",
                 "display_name": self.model, "lifecycle": "active", "created_at": "1970-01-01T00:00:00Z"}  # fmt: skip
        page = {"object": "list", "data": [model], "has_more": False, "first_id": self.model, "last_id": self.model}
        return web.json_response(model if "model" in request.match_info else page)

    async def trace(self, request: web.Request) -> web.Response:
        """GET: the session's branches, for a reader."""
        return web.json_response(self.session(request).trace())

    def meters(self) -> dict[str, float]:
        """``loopback/*``: the server's own milliseconds per call since the last time, mean and 99th percentile, and
        whether the template is still asked about windows."""
        told, costs = {"loopback/windows": float(self.template.windows)}, np.array(self.costs) * 1e3
        self.costs.clear()
        if len(costs):
            told["loopback/own_ms_mean"] = float(costs.mean())
            told["loopback/own_ms_p99"] = float(np.quantile(costs, 0.99))
        return told


async def open_stream(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    """Begin a reply, a server-sent stream unless the headers say otherwise."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"} | headers)
    await response.prepare(request)
    return response


METERS = ("closing_tokens", "overridden", "turns_continue", "turns_new", "turns_resample", "turns_template",
          "route_conflicts", "retries_joined", "disconnects")  # fmt: skip


def identity_meters(sessions: list[Session]) -> dict[str, float]:
    """``identity/*`` of a step: sums over its rollouts, and segments per rollout."""
    total: Counter[str] = Counter()
    for session in sessions:
        total.update(session.meters)
    meters = {f"identity/{name}": float(total[name]) for name in METERS}
    meters["identity/echo_mismatch"] = float(total["turns_edit"])
    meters["identity/segments_per_rollout"] = sum(len(s.branches) for s in sessions) / max(1, len(sessions))
    return meters
