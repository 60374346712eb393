"""Builds the toy model that the tests and the CPU demo train: a tiny Qwen3 that speaks the calculator's dialogue.

A short supervised phase teaches it skills first (chat turns, Hermes tool calls, copying numbers) and then habits,
most of them bad: it guesses the sum, writes calls that do not parse, forgets an argument. So what it can do is good
and what it tends to do is not, which is what reinforcement learning mends, here in minutes on a CPU.

``--teacher PATH`` also builds a larger one that knows the right habit only, to distil from. ``--talk`` teaches other
dialogues instead: those of agents/maths.py, judge.py and coder.py.

``python -m tools.toy --out models/toy [--moe] [--talk] [--seed 0] [--steps N] [--teacher models/toy_teacher]``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads are ten times slower when cores are shared

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from agents import Message, calculator, coder, judge

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
PAD, START, END = 256, 257, 258
IGNORED = -100
SPOKEN = (calculator, coder, judge)
"""Agents whose dialogues are taught here."""
STEPS, BATCH, PROBE = 260, 32, 256
HABITS = {"call": (0.5, 0.18), "guess": (0.3, 0.62), "malformed": (0.1, 0.12), "forgetful": (0.1, 0.08)}
"""How often each habit is shown: where the first number has four digits, and elsewhere. That the right habit leads in
a third of the problems only is what keeps the greedy reward low while every group of samples has some successes."""

TEMPLATE = """\
{%- macro text(c) -%}
{%- if c is string %}{{ c }}{% else %}{% for p in c or [] %}{{ p.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- set system = messages and messages[0].role == 'system' -%}
{%- if system or tools -%}
{{ '<|im_start|>system\\n' }}{{ text(messages[0].content) if system }}
{%- for t in tools or [] -%}
{{ '\\n' if system or not loop.first }}{{ t.function.name }}({{ t.function.parameters.properties | join(', ') }})
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in (messages[1:] if system else messages) -%}
{%- set in_tools = not loop.first and loop.previtem.role == 'tool' -%}
{%- if in_tools and m.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- if m.role == 'tool' -%}
{{ '' if in_tools else '<|im_start|>user\\n' }}<tool_response>{{ text(m.content) }}</tool_response>
{%- else -%}
{{ '<|im_start|>' + m.role + '\\n' }}{{ text(m.content) }}
{%- for call in m.tool_calls or [] -%}
{%- set given = call.function.arguments -%}
{%- set given = given if given is string else given | tojson -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ given }}}</tool_call>
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_end|>\\n' if messages and messages[-1].role == 'tool' }}{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
"""ChatML, append-only: the user turn that tool answers share is closed by what comes after it, not by its last one."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the markers: any text round-trips, and no merge ever spans two numbers."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        chat_template=TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def untrained(moe: bool, seed: int, large: bool = False) -> torch.nn.Module:
    """The model with random weights; the mixture of experts has about as many active parameters as the dense one."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 272,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "bos_token_id": PAD,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }
    if large:
        shape |= {"hidden_size": 160, "num_hidden_layers": 4, "num_attention_heads": 5, "num_key_value_heads": 1}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**shape, **experts) if moe else Qwen3Config(**shape)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def dialogue(habit: str, a: int, b: int, rng: random.Random) -> list[Message]:
    """One conversation exactly as the agent's would be. Assistant turns are the raw text the model should emit."""
    near = max(0, a + b + rng.choice([-1, 1]) * rng.choice([1, 2, 10, 20, 100]))
    arguments = json.dumps({"a": a} if habit == "forgetful" else {"a": a, "b": b})
    call = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    turns = {
        "call": [call, str(a + b), str(a + b)],
        "guess": [f"I guess {near}"],
        "malformed": [f"<tool_call>add({a}, {b})</tool_call>"],
        "forgetful": [call, "error", f"I guess {near}"],
    }[habit]
    roles = ["assistant", "tool", "assistant"]
    question = {"role": "user", "content": f"What is {a} + {b}?"}
    return [question, *({"role": role, "content": text} for role, text in zip(roles, turns, strict=False))]


def habits(seed: int, skill_steps: int) -> Iterator[list[list[Message]]]:
    """Endless batches of dialogues: right calls only for ``skill_steps`` batches, then the mix of habits."""
    rng, pairs, batches = random.Random(seed), calculator.problems(seed, held=False), 0
    while True:
        chosen = []
        for a, b in islice(pairs, BATCH):
            weights = [chance[0 if a >= 1000 else 1] for chance in HABITS.values()]
            habit = "call" if batches < skill_steps else rng.choices(list(HABITS), weights)[0]
            chosen.append(dialogue(habit, a, b, rng))
        batches += 1
        yield chosen


def boxes(rng: random.Random, skilled: bool) -> list[Message]:
    """agents/maths.py: a sum that is worked out and boxed, or guessed, or not boxed."""
    a, b = rng.randrange(10), rng.randrange(10)
    near = max(0, a + b + rng.choice([-2, -1, 1, 2]))
    right, guess, bare = f"{a} + {b} = \\boxed{{{a + b}}}", f"\\boxed{{{near}}}", f"I say {a + b}"
    said = right if skilled else rng.choices([right, guess, bare], (0.3, 0.4, 0.3))[0]
    return spoken(f"{a} + {b}, boxed?", said)


def asks(rng: random.Random, skilled: bool) -> list[Message]:
    """agents/judge.py: a request, polite or not; and, as often, the judge's question about one."""
    thing = f"{rng.choice(judge.SORTS)} {rng.choice(judge.THINGS)}"
    rude = rng.choice([f"Give me the {thing}!", f"The {thing}, now.", f"I want the {thing}."])
    polite = rng.choice([f"May I have the {thing}, please?", f"Please give me the {thing}.", f"The {thing}, please."])
    if rng.random() < 0.5:
        said, grade = rng.choice([(rude, "no"), (polite, "yes")])
        return spoken(judge.RUBRIC.format(answer=said), grade)
    return spoken(f"Ask for the {thing}.", polite if skilled or rng.random() < 0.25 else rude)


def codes(rng: random.Random, skilled: bool) -> list[Message]:
    """agents/coder.py: a program that is right, or lacks its constant, or is none."""
    task = coder.task_of(rng.choice(list(coder.OPERATIONS)), rng.randrange(coder.CONSTANTS))
    right = coder.solution(task)
    wrong = right.rpartition("+")[0] + ")"
    said = right if skilled else rng.choices([right, wrong, "f(a, b)"], (0.3, 0.45, 0.25))[0]
    return spoken(task.data["prompt"], said)


def spoken(*texts: str) -> list[Message]:
    """What user and assistant say in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def talk(seed: int, skill_steps: int) -> Iterator[list[list[Message]]]:
    """Endless batches of the other agents' dialogues."""
    rng = random.Random(seed)
    for batches in count():
        yield [
            rng.choices((boxes, asks, codes), (0.3, 0.25, 0.45))[0](rng, batches < skill_steps) for _ in range(BATCH)
        ]


def encode(tok, dialogues: list[list[Message]], tools: list | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids and labels; only what the assistant says, and the end of its turn, has a label."""
    opening = tok("<|im_start|>assistant\n").input_ids
    texts = tok.apply_chat_template(dialogues, tools=tools, tokenize=False)
    rows = tok(texts).input_ids
    ids = torch.full((len(rows), max(map(len, rows))), PAD)
    labels = torch.full_like(ids, IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        for start in (k + len(opening) for k, token in enumerate(row) if row[k : k + len(opening)] == opening):
            stop = row.index(END, start) + 1
            labels[i, start:stop] = ids[i, start:stop]
    return ids, labels


def logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of every next token. Padding is on the right, so causal attention needs no mask."""
    return model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Keller Jordan's Muon), all in float32.

    ``torch.optim.Muon`` does this part in bfloat16, which a CPU without such instructions emulates: there it takes
    longer than the forward and the backward pass together, and rounds to another toy.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float):
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.05)
                tall = p.shape[0] > p.shape[1]
                x = p.grad.lerp(mean, 0.95)  # Nesterov
                x = (x.T if tall else x) / x.norm().clamp(min=1e-7)
                for _ in range(5):  # a quintic that brings every singular value near 1
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                p.sub_(x.T if tall else x, alpha=group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest: copying emerges in a third of the steps that AdamW alone needs."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name and ".gate." not in name]
    others = [p for p in named.values() if all(p is not m for m in matrices)]
    rest = torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return [Muon(matrices, lr=2e-2), rest]


def teach(model: torch.nn.Module, tok, batches: Iterator, steps: int, tools: list | None) -> None:
    """Rate: a short warm-up, and a linear decay over the last half."""
    opts = optimizers(model)
    rate = lambda step: min((step + 1) / 20, 1.0, 2 * (steps - step) / steps)  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(opt, rate) for opt in opts]
    began = said = time.monotonic()
    for step, batch in enumerate(islice(batches, steps)):
        batch.sort(key=lambda messages: len(str(messages)))
        halves = [encode(tok, half, tools) for half in (batch[: BATCH // 2], batch[BATCH // 2 :])]  # less padding
        count = sum(int((labels != IGNORED).sum()) for _, labels in halves)
        total = 0.0
        for ids, labels in halves:
            picked = logprobs(model, ids).flatten(0, 1)
            loss = F.nll_loss(picked, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*opts, *schedules):
            part.step()
        model.zero_grad()
        if time.monotonic() - said > 10 or step + 1 == steps:
            said = time.monotonic()
            print(f"step {step + 1}/{steps}  loss {total:.4f}  {said - began:.0f} s", flush=True)


@torch.no_grad()
def report(model: torch.nn.Module, tok: PreTrainedTokenizerFast) -> None:
    """Exact chances on held-out problems, by scoring the right dialogue: no sampling needed."""
    rng = random.Random(0)
    ids, labels = encode(tok, [dialogue("call", a, b, rng) for a, b in islice(calculator.problems(0, True), PROBE)],
                         [calculator.ADD])  # fmt: skip
    scores, labels = logprobs(model, ids), labels[:, 1:]
    trained = labels != IGNORED
    chosen = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    first = ((labels == END).cumsum(1) - (labels == END).int()) == 0
    digit = (labels >= tok.convert_tokens_to_ids("0")) & (labels <= tok.convert_tokens_to_ids("9"))
    wrong = scores.argmax(-1) != labels
    print(f"{PROBE} held-out problems        sampled  greedy")
    parts = {"right call": first, "its digits, given the rest": first & digit, "right copy of the answer": ~first}
    for name, where in (parts | {"both turns right (reward)": trained}).items():
        sampled = torch.where(where & trained, chosen, 0.0).sum(1).exp().mean()
        greedy = 1 - (wrong & where & trained).any(1).float().mean()
        print(f"{name:28s} {sampled:8.3f} {greedy:7.3f}")


def build(out: str | Path, moe: bool = False, seed: int = 0, steps: int = STEPS, large: bool = False,
          talks: bool = False) -> Path:  # fmt: skip
    """Make the model and its tokenizer in folder ``out``, unless they are there; ``steps=0`` leaves it untrained.

    ``large`` makes the teacher: more layers and width, and skills only, for which a third of the steps is enough.

    The marker ``toy.json`` is written last, so an unfinished build, or one by older source, is built again.
    """
    out = Path(out)
    marker, began = out / "toy.json", time.monotonic()
    source = b"".join(Path(module.__file__).read_bytes() for module in (sys.modules[__name__], *SPOKEN))
    steps = steps // 3 if large else steps
    options = {
        "moe": moe,
        "seed": seed,
        "steps": steps,
        "large": large,
        "talks": talks,
        "source": hashlib.sha256(source).hexdigest(),
    }
    if marker.is_file() and json.loads(marker.read_text()) == options:
        print(f"{out} is already built: {options}")
        return out
    marker.unlink(missing_ok=True)
    tok, model = tokenizer(), untrained(moe, seed, large)
    if talks:
        teach(model, tok, talk(seed, steps * 2 // 3), steps, None)
    elif steps:
        teach(model, tok, habits(seed, steps if large else steps * 2 // 3), steps, [calculator.ADD])
        report(model, tok)
    model.save_pretrained(out)
    tok.save_pretrained(out)
    marker.write_text(json.dumps(options))
    print(f"{out}: {model.num_parameters():,} parameters, {time.monotonic() - began:.0f} s")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--moe", action="store_true", help="mixture of experts instead of a dense model")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and dialogues")
    parser.add_argument("--steps", type=int, default=STEPS, help="supervised steps; 0 leaves random weights")
    parser.add_argument("--talk", action="store_true", help="dialogues of the other agents than the calculator")
    parser.add_argument("--teacher", default="", help="folder for a larger model of right habits; empty: none")
    args = parser.parse_args()
    torch.set_num_threads(2)
    build(args.out, args.moe, args.seed, args.steps, talks=args.talk)
    if args.teacher:
        build(args.teacher, False, args.seed, args.steps, large=True)


if __name__ == "__main__":
    main()
