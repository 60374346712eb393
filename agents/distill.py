"""Prompts to distil from: the policy answers once, and a teacher in the trainer scores each token of it.

For ``--advantage on_policy_distill`` with ``--ref_model TEACHER`` (gate.distill); rewards play no part in it. Rows
(``--data``) have a ``prompt`` or ``messages``, and may have ``tools``. Without rows it asks the calculator's questions,
and the share of answers that call the tool with the right numbers is measured as the reward.

Over several turns any other agent does, under the same two flags: recipes/toy_distill.sh has the calculator's.
"""

from __future__ import annotations

from collections.abc import Iterator

from agents import Env, Message, Result, Task, opening
from agents.calculator import ADD, Calculator, call_tool


class Distill(Env):
    """One turn."""

    max_turns = 1

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Task]:
        if cls.data.get(split):
            yield from super().tasks(split, seed)
            return
        for task in Calculator.tasks(split, seed):
            a, b = task.data["a"], task.data["b"]
            yield Task(task.task_id, {"prompt": f"What is {a} + {b}?", "tools": [ADD], "right": str(a + b)})

    async def reset(self, task: Task) -> list[Message]:
        self.tools, self.right = task.data.get("tools") or (), task.data.get("right")
        return opening(task.data)

    async def step(self, action: Message) -> Result:
        calls = action.get("tool_calls") or ()
        said = [call_tool(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        return Result(reward=float(said == [self.right]), terminated=True)


AgentRunner = Distill
