"""The contract between Instar and what people train.

A user names a Python file that exports ``AgentRunner``; one instance of it plays one rollout.

* ``Env``: the framework owns the loop (Gymnasium's reset and step, made async).
* ``ChatAgent``: the user owns the loop and talks to ``ctx.base_url`` with a stock OpenAI client, or hands
  that address to any external program.

Neither ever sees a token. Both speak through one session of ``loopback.py``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Message = dict
"""One chat message in OpenAI's shape: ``role``, ``content``, and ``tool_calls`` or ``tool_call_id``."""


@dataclass(frozen=True)
class Task:
    """One row of data handed to an agent."""

    task_id: str
    """Stable name of the row: the same row has the same id in every run."""
    data: dict
    """Whatever the agent needs to play and grade it."""


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
    """OpenAI-compatible address of this rollout's session, for ``AsyncOpenAI(base_url=...)``. A blocking client, or
    any blocking code, belongs into ``asyncio.to_thread``: the loop that runs the agent also answers it."""
    session_url: str
    """The session's own address; ``base_url`` is this plus ``/v1``."""
    split: str
    """``"train"`` or ``"eval"``."""

    async def chat(self, messages: list[Message], tools: Sequence[dict]) -> Reply:
        """One turn of the model, in process. Raises ``ContextOverflow``."""


class AgentRunner(ABC):
    """Plays one rollout. A user's file exports a subclass (usually of ``Env`` or ``ChatAgent``) by this name."""

    @classmethod
    @abstractmethod
    def tasks(cls, split: str, seed: int) -> Iterable[Task]:
        """The tasks of ``split`` ("train" may be endless; "eval" is finite and never overlaps "train")."""

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


def end_with_parent() -> None:
    """Die when the parent dies, be it by a signal that leaves it no time to stop what it started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def load(path: str) -> type[AgentRunner]:
    """The ``AgentRunner`` class that the Python file at ``path`` exports.

    Raises ``ValueError`` naming what is missing: the file, the name, or a method.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"agent file {path!r} does not exist; give the path of a Python file that exports AgentRunner")
    spec = importlib.util.spec_from_file_location(f"instar_agent_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file: named with what is wrong in it
        raise ValueError(f"agent file {path} does not import: {type(error).__name__}: {error}") from error
    runner = vars(module).get("AgentRunner")
    if not (isinstance(runner, type) and issubclass(runner, AgentRunner)):
        raise ValueError(
            f"{path} must export a class named AgentRunner (a subclass of Env or ChatAgent), got {runner!r}"
        )
    if inspect.isabstract(runner):
        raise ValueError(f"AgentRunner in {path} does not define {', '.join(sorted(runner.__abstractmethods__))}")
    return runner
