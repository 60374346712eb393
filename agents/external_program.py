"""The program that agents/external.py runs: a plain script, which knows nothing of Instar and imports nothing of it.

``OpenAI()`` reads the address and the key from the environment, as it does everywhere. The task comes on standard
input, the result goes to standard output.
"""

import json
import re
import sys

from openai import BadRequestError, OpenAI

NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds two integers.", "parameters": SCHEMA}}


def call_tool(name: str, arguments: str) -> str:
    """What the tool answers."""
    if name != "add":
        return "error"
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) + int(given["b"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "error"


def solve(client: OpenAI, a: int, b: int) -> str | None:
    """The model's answer; None when the conversation was cut."""
    messages = [{"role": "user", "content": f"What is {a} + {b}?"}]
    for _ in range(4):
        [choice] = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices
        if choice.finish_reason == "length":
            return None
        if not choice.message.tool_calls:
            return choice.message.content or ""
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            said = call_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return None


def main() -> None:
    """Solve the task on standard input."""
    task = json.load(sys.stdin)
    with OpenAI() as client:
        try:
            said = solve(client, task["a"], task["b"])
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            said = None
    numbers = re.findall(r"-?\d+", said or "")
    right = bool(numbers) and numbers[-1] == str(task["a"] + task["b"])
    print(json.dumps({"reward": float(right), "truncated": said is None}))


if __name__ == "__main__":
    main()
