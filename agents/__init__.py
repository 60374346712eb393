"""The contract between Instar and what people train.

A user names a Python file that exports ``AgentRunner``; one instance of it plays one rollout.

* ``Env``: the framework owns the loop (Gymnasium's reset and step, made async).
* ``ChatAgent``: the user owns the loop and talks to ``ctx.base_url`` with a stock OpenAI client, or hands
  that address to any external program.

Neither ever sees a token. Both speak through one session of ``loopback.py``. Programs that an agent starts are the
business of ``children.py``.
"""

from __future__ import annotations

import glob
import inspect
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from agents.children import in_child, module_of, run_program

__all__ = ["AgentRunner", "ChatAgent", "Context", "ContextOverflow", "Env", "Message", "Reply", "Result", "Task",
           "in_child", "load", "opening", "read_rows", "run_program"]  # fmt: skip

Message = dict
"""One chat message in OpenAI's shape: ``role``, ``content``, and ``tool_calls`` or ``tool_call_id``."""


@dataclass(frozen=True)
class Task:
    """One row of data handed to an agent."""

    task_id: str
    """Stable name of the row: the same row has the same id in every run."""
    data: dict
    """Whatever the agent needs to play and grade it. ``data["source"]`` names its data source, where there is one:
    evaluation reports each by itself."""


@dataclass
class Result:
    """What one step, or a whole rollout, came to."""

    observation: list[Message] = field(default_factory=list)
    """Messages to append to the conversation before the next turn (``Env`` only)."""
    reward: float = 0.0
    """Reward of this step; a rollout's reward is the sum over its steps."""
    terminated: bool = False
    """The task is over."""
    truncated: bool = False
    """The rollout was cut (turn limit, length, context), so its reward may be incomplete."""
    info: dict = field(default_factory=dict)
    """Numbers to average into the metrics, by name."""
    rewards: list[float] = field(default_factory=list)
    """A rollout's reward call by call, one for each answered call in the order in which they were begun (``Env`` fills
    it; a ``ChatAgent`` may; each of a call's ``n`` choices is one). Empty: all of it was earned by the last one."""


class ContextOverflow(ValueError):
    """The conversation no longer fits the model's context."""


class Reply(Protocol):
    """What a turn gives an agent: an assistant message and why generation stopped."""

    message: Message
    finish_reason: str


class Context(Protocol):
    """What an agent knows about the rollout it plays."""

    base_url: str
    """OpenAI-compatible address of this rollout's session, for ``AsyncOpenAI(base_url=...)``. A blocking client belongs
    into ``asyncio.to_thread``: the loop that runs the agent also answers it. So does other code that blocks; what may
    never return, such as a grader, belongs into ``in_child``."""
    session_url: str
    """The session's own address; ``base_url`` is this plus ``/v1``."""
    split: str
    """``"train"`` or ``"eval"``."""

    async def chat(self, messages: list[Message], tools: Sequence[dict]) -> Reply:
        """One turn of the model, in process. Raises ``ContextOverflow``."""

    def aside(self) -> AbstractAsyncContextManager[str]:
        """A session beside the rollout's, as the address of an OpenAI-compatible API: for a judge, say. The policy's
        own engines answer it, with the sampling parameters that its client sends; nothing of it is ever trained."""


class AgentRunner(ABC):
    """Plays one rollout. A user's file exports a subclass (usually of ``Env`` or ``ChatAgent``) by this name."""

    data: ClassVar[Mapping[str, str]] = {}
    """Where the rows of each split are: the node's ``--data`` ("train") and ``--eval_data`` ("eval")."""

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterable[Task]:
        """The tasks of ``split`` ("train" may be endless; "eval" is finite and never overlaps "train").

        Unless an agent makes its own: one for each row of ``data``, for each ``seed`` of "train" in another order.
        Raises ``ValueError`` for rows that are not there.
        """
        if not cls.data.get(split):
            flag = "--data" if split == "train" else "--eval_data (or the trainer --eval_tasks 0)"
            raise ValueError(f"{cls.__name__} makes no {split} tasks of its own: give rows by {flag}, or define tasks")
        rows = read_rows(cls.data[split])
        order = list(range(len(rows)))
        if split == "train":
            random.Random(seed).shuffle(order)
        return (Task(f"{split}-{index}", rows[index]) for index in order)

    @abstractmethod
    async def run(self, task: Task, ctx: Context) -> Result:
        """Play ``task`` to its end. An exception makes the rollout's status ``agent_error``, never a reward of 0."""


class ChatAgent(AgentRunner):
    """The user owns the loop: implement ``run`` with any client of ``ctx.base_url``."""


class Env(AgentRunner):
    """The framework owns the loop: implement ``reset`` and ``step``."""

    tools: Sequence[dict] = ()
    """Tool schemas (OpenAI's shape) that the chat template shows the model."""
    max_turns: int = 8
    """Turns after which the rollout is truncated."""

    @abstractmethod
    async def reset(self, task: Task) -> list[Message]:
        """The opening messages."""

    @abstractmethod
    async def step(self, action: Message) -> Result:
        """Judge the assistant message ``action``; give the messages that answer it, or end the rollout."""

    async def close(self) -> None:
        """Release what ``reset`` took; always runs."""

    async def run(self, task: Task, ctx: Context) -> Result:
        """Alternate model turns and ``step`` until the task ends, a turn is cut, or ``max_turns`` is reached."""
        total = Result(truncated=True)
        try:
            messages = await self.reset(task)
            for _ in range(self.max_turns):
                reply = await ctx.chat(messages, self.tools)
                total.rewards.append(0.0)
                if reply.finish_reason == "length":
                    return total
                result = await self.step(reply.message)
                total.rewards[-1] = float(result.reward)
                total.reward += total.rewards[-1]
                total.info |= result.info
                if result.terminated or result.truncated:
                    total.truncated = result.truncated
                    total.terminated = result.terminated
                    return total
                messages = [*messages, reply.message, *result.observation]
        except ContextOverflow:
            pass
        finally:
            await self.close()
        return total


# --------------------------------------------------------------------------------------- rows, and a user's file


def read_rows(path: str) -> Sequence[dict]:
    """The rows of a ``.jsonl`` file, of ``.parquet`` files (a pattern with ``*`` names several), or of a folder that
    Hugging Face datasets saved (``save_to_disk``). Raises ``ValueError`` naming what is wrong."""
    files = sorted(glob.glob(path))  # noqa: PTH207 - a Path takes no absolute pattern
    if not files:
        raise ValueError(f"there are no rows at {path!r}; give a .jsonl file, .parquet files, or a folder")
    if path.endswith(".jsonl"):
        return [row for file in files for row in jsonl(file)]
    try:
        import datasets
    except ImportError:
        raise ValueError(f"reading {path} needs the package datasets: .venv/bin/pip install datasets") from None
    if path.endswith(".parquet"):
        return datasets.load_dataset("parquet", data_files=files, split="train")
    return datasets.load_from_disk(path)


def jsonl(path: str) -> Iterable[dict]:
    """The objects of a file that has one a line."""
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        try:
            row = json.loads(line or "{}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is no JSON object but {line[:60]}")
        if row:
            yield row


def opening(row: dict) -> list[Message]:
    """A row's first messages: its ``messages``, or its ``prompt``, be it messages or what the user says."""
    said = row.get("messages") or row.get("prompt")
    if not said:
        raise ValueError(f"a row needs messages or a prompt; this one has {sorted(row)}")
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


def load(path: str) -> type[AgentRunner]:
    """The ``AgentRunner`` class that the Python file at ``path`` exports; ``path:Name`` is another class of it.

    Raises ``ValueError`` naming what is missing: the file, the name, or a method.
    """
    path, _, name = path.partition(":")
    name = name or "AgentRunner"
    if not Path(path).is_file():
        raise ValueError(f"agent file {path!r} does not exist; give the path of a Python file that exports AgentRunner")
    try:
        module = module_of(path)
    except Exception as error:  # the user's file: named with what is wrong in it
        raise ValueError(f"agent file {path} does not import: {type(error).__name__}: {error}") from error
    runner = vars(module).get(name)
    if not (isinstance(runner, type) and issubclass(runner, AgentRunner)):
        raise ValueError(f"{path} must export a class {name} (a subclass of Env or ChatAgent), got {runner!r}")
    if inspect.isabstract(runner):
        raise ValueError(f"{name} in {path} does not define {', '.join(sorted(runner.__abstractmethods__))}")
    return runner
