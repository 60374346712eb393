r"""Questions about pictures, with a second try: several turns of a model that sees.

Rows (``--data``, such as a local copy of the data set geometry3k) have ``images``, a ``problem`` and an ``answer``;
``<image>`` in a problem is where its picture stands. The answer is given in ``\boxed{}`` and checked as agents/maths.py
checks it. A first answer that is wrong is said to be wrong; being right then is worth half.

Without rows it asks how many sides a drawn shape has, which a toy learns. ``Chat`` plays the same tasks by a
stock client, at the rollout's address: ``--agent agents/geo3k.py:Chat``.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from importlib.util import find_spec

from openai import AsyncOpenAI
from PIL import Image, ImageDraw

from agents import ChatAgent, Context, Env, Message, Result, Task
from agents.maths import boxed, right

PROMPT = " Put your answer in \\boxed{}."
AGAIN = "No. Look again."
SIDES = (3, 4, 6)
EVAL_TASKS = 96


def data_uri(picture: Image.Image) -> str:
    """A picture as chat messages carry it."""
    out = io.BytesIO()
    picture.convert("RGB").save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def draw(sides: int, rng: random.Random) -> Image.Image:
    """A regular polygon somewhere on a plain ground."""
    picture = Image.new("RGB", (56, 56), "white")
    where = (rng.uniform(25, 31), rng.uniform(25, 31), rng.uniform(18, 24))
    colour = tuple(rng.randrange(160) for _ in range(3))
    ImageDraw.Draw(picture).regular_polygon(where, sides, rotation=0, fill=colour)
    return picture


def shapes(split: str, seed: int) -> Iterator[Task]:
    """Drawn shapes, endless in training."""
    rng, index = random.Random(f"{split} {seed if split == 'train' else 0}"), 0
    while split == "train" or index < EVAL_TASKS:
        sides = rng.choice(SIDES)
        yield Task(f"{split}-{seed}-{index}", {"problem": "Sides?", "images": [draw(sides, rng)], "answer": str(sides)})
        index += 1


def question(row: dict, prompt: str = "") -> Message:
    """A row's problem with its pictures where they belong; those without a place of their own stand before it."""
    images = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in row["images"]]
    texts = row["problem"].split("<image>")
    parts: list[dict] = images[len(texts) - 1 :]
    for index, text in enumerate(texts):
        parts += [{"type": "text", "text": text}] if text else []
        parts += images[index : index + 1] if index < len(texts) - 1 else []
    return {"role": "user", "content": [*parts, *([{"type": "text", "text": prompt}] if prompt else [])]}


class Geo3k(Env):
    """Two tries."""

    max_turns = 2

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Task]:
        if cls.data.get(split) and not find_spec("math_verify"):
            raise ValueError("checking these answers needs the package math-verify: .venv/bin/pip install math-verify")
        return super().tasks(split, seed) if cls.data.get(split) else shapes(split, seed)

    async def reset(self, task: Task) -> list[Message]:
        self.answer, self.tries = str(task.data["answer"]), 0
        return [question(task.data, PROMPT if self.data.get("train") else "")]

    async def step(self, action: Message) -> Result:
        self.tries += 1
        if await right(boxed(action["content"]), self.answer):
            return Result(reward=1.0 / self.tries, terminated=True, info={"tries": self.tries})
        return Result([{"role": "user", "content": AGAIN}], terminated=self.tries == self.max_turns)


class Chat(ChatAgent):
    """The same by the OpenAI SDK."""

    tasks = Geo3k.tasks

    async def run(self, task: Task, ctx: Context) -> Result:
        env = Geo3k()
        messages = await env.reset(task)
        async with AsyncOpenAI(base_url=ctx.base_url, api_key="-") as client:
            for _ in range(env.max_turns):
                reply = await client.chat.completions.create(model="policy", messages=messages)
                [choice] = reply.choices
                if choice.finish_reason == "length":
                    return Result(truncated=True)
                judged = await env.step({"content": choice.message.content or ""})
                if judged.terminated:
                    return judged
                messages += [choice.message, *judged.observation]
        return Result(truncated=True)


AgentRunner = Geo3k
