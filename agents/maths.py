r"""A question with one right answer, given in ``\boxed{}`` and checked: the shape of mathematics data sets.

Rows (``--data``) have a ``prompt`` or ``messages``, and an ``answer``. Numbers are compared as numbers; any other
answer is compared by the package math-verify, in a process of its own. ``--data reasoning_gym:NAME`` plays that
package's procedural tasks, by its own graders. Without rows it plays sums of two digits, which a toy can learn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from fractions import Fraction
from importlib.util import find_spec
from itertools import product

from agents import Env, Message, Result, Task, in_child, opening

GYM = "reasoning_gym:"
HELD_OUT = 128
"""Tasks of a procedural data set that are kept for the evaluation; training skips any that is drawn again."""
GRADER_LIMIT_S = 20.0


def boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{}``; None where there is none, or it is not closed.

    >>> boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for index, char in enumerate(rest if found else ""):
        depth += (char == "{") - (char == "}")
        if not depth:
            return rest[:index].strip()
    return None


def number(text: str) -> Fraction | None:
    """The number that a text is, such as ``1,000``, ``-0.5`` or ``3/4``."""
    try:
        return Fraction(text.replace(",", "").strip("$ ")) if len(text) < 100 else None
    except (ValueError, ZeroDivisionError):
        return None


def verify(said: str, answer: str) -> bool:
    """Whether two formulas are equal, by math-verify; runs in a child, as some formulas never end."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${answer}$", parsing_timeout=None), parse(f"${said}$", parsing_timeout=None),
                       timeout_seconds=None))  # fmt: skip


async def right(said: str | None, answer: str) -> bool:
    """Whether what was boxed is the answer. One that the grader never gets done with is wrong; a crash is an error."""
    if said is None or said == answer:
        return said is not None
    if number(answer) is not None and number(said) is not None:
        return number(said) == number(answer)
    try:
        return await in_child(verify, said, answer, time_limit_s=GRADER_LIMIT_S)
    except TimeoutError:
        return False


def sums(split: str, seed: int) -> Iterator[Task]:
    """All sums of two digits, one in ten of them held out, in an order of each seed's own."""
    pairs = [(a, b) for a, b in product(range(10), repeat=2) if (split == "eval") == ((a + 3 * b) % 10 == 0)]
    random.Random(seed).shuffle(pairs)
    for a, b in pairs:
        yield Task(f"{a}+{b}", {"prompt": f"{a} + {b}, boxed?", "answer": str(a + b)})


def gym(name: str, split: str, seed: int) -> Iterator[Task]:
    """Tasks of reasoning-gym's data set ``name``, endless in training."""
    if not find_spec("reasoning_gym"):
        raise ValueError("these tasks need the package reasoning-gym: .venv/bin/pip install reasoning-gym")
    import reasoning_gym

    held = list(reasoning_gym.create_dataset(name, size=HELD_OUT, seed=0))
    known = {entry["question"] for entry in held}
    others = (entry for entry in reasoning_gym.create_dataset(name, size=1_000_000, seed=seed + 1)
              if entry["question"] not in known)  # fmt: skip
    for index, entry in enumerate(held if split == "eval" else others):
        prompt = f"{entry['question']}\nPut your answer in \\boxed{{}}."
        yield Task(
            f"{name}-{split}{seed if split == 'train' else ''}-{index}", {"prompt": prompt, "entry": entry, "gym": name}
        )


class Math(Env):
    """One turn."""

    max_turns = 1

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Task]:
        source = cls.data.get(split, "")
        if source.startswith(GYM):
            return gym(source.removeprefix(GYM), split, seed)
        if source and not find_spec("math_verify"):
            raise ValueError("checking these answers needs the package math-verify: .venv/bin/pip install math-verify")
        return super().tasks(split, seed) if source else sums(split, seed)

    async def reset(self, task: Task) -> list[Message]:
        self.task = task.data
        return opening(task.data)

    async def step(self, action: Message) -> Result:
        said = boxed(action["content"])
        info = {"boxed": float(said is not None)}
        if "gym" in self.task:
            from reasoning_gym import get_score_answer_fn

            score = await asyncio.to_thread(get_score_answer_fn(self.task["gym"]), said, self.task["entry"])
            return Result(reward=float(score), terminated=True, info=info)
        return Result(reward=float(await right(said, str(self.task["answer"]))), terminated=True, info=info)


AgentRunner = Math
