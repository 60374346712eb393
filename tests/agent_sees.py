"""An agent for the tests: shows the model an image per turn, by either SDK or in process."""

from __future__ import annotations

import base64
import io
from itertools import count

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from PIL import Image

from agents import ChatAgent, Result, Task

SIZES = (60, 90), (120, 60), (84, 84)
"""One image a turn, each expanded to a number of tokens of its own."""


def png(width: int, height: int) -> str:
    """A plain image, as base64."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), (width, height, 30)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


class Sees(ChatAgent):
    """Three turns, an image in each."""

    @classmethod
    def tasks(cls, split, seed):
        for number in count() if split == "train" else range(3):
            yield Task(f"{split}-{number}", {"number": number})

    async def run(self, task, ctx):
        say = (self.in_process, self.by_openai, self.by_anthropic)[task.data["number"] % 3]
        await say(ctx)
        return Result(reward=float(task.data["number"] % 2))

    async def in_process(self, ctx):
        messages = []
        for size in SIZES:
            url = f"data:image/png;base64,{png(*size)}"
            shown = {"type": "image_url", "image_url": {"url": url}}
            messages.append({"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]})
            messages.append((await ctx.chat(messages, [])).message)

    async def by_openai(self, ctx):
        messages = []
        async with AsyncOpenAI(base_url=ctx.base_url, api_key="-") as client:
            for size in SIZES:
                url = f"data:image/png;base64,{png(*size)}"
                shown = {"type": "image_url", "image_url": {"url": url}}
                messages.append({"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]})
                reply = await client.chat.completions.create(model="policy", messages=messages)
                messages.append(reply.choices[0].message)

    async def by_anthropic(self, ctx):
        messages = []
        async with AsyncAnthropic(base_url=ctx.session_url, api_key="-") as client:
            for size in SIZES:
                source = {"type": "base64", "media_type": "image/png", "data": png(*size)}
                blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
                messages.append({"role": "user", "content": blocks})
                reply = await client.messages.create(model="policy", messages=messages, max_tokens=12)
                messages.append({"role": "assistant", "content": reply.content})


AgentRunner = Sees
