r"""Builds the toy that sees: a tiny Qwen2.5-VL that has learned to tell drawn shapes apart, and to guess all the same.

As under tools/toy.py a short supervised phase teaches a skill and bad habits around it. Needs torchvision, which
tools/setup.sh's setup_vision makes importable beside a CPU build of torch.

``python -m tools.toy_shapes --out models/toy_shapes [--seed 0] [--steps N]``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from agents import geo3k
from tools import toy

STEPS, BATCH = 150, 32
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string %}{{ m.content }}{% else %}"
    "{%- for part in m.content -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{%- endfor -%}{% endif %}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
SHAPE = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}  # fmt: skip
EYES = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64,
        "window_size": 112, "fullatt_block_indexes": [1]}  # fmt: skip


def untrained(seed: int) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """The model with random weights, and its processor."""
    tokenizer = toy.tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in VISION])
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    ends = {"bos_token_id": toy.PAD, "eos_token_id": toy.END}
    tokens = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start,
              "vision_end_token_id": end}  # fmt: skip
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(text_config=SHAPE | ends, vision_config=EYES, dtype="float32", **tokens, **ends)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    with torch.no_grad():  # a trained model does not say placeholders, on which the engine would put images
        model.lm_head.weight.mul_(50)[[start, end, image, video]] = 0
    sees = Qwen2VLImageProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 16)
    both = {"image_processor": sees, "video_processor": Qwen2VLVideoProcessor(), "chat_template": TEMPLATE}
    return model, Qwen2_5_VLProcessor(tokenizer=tokenizer, **both)


def dialogue(rng: random.Random, skilled: bool) -> tuple[list[dict], object]:
    """A picture and what is said of it: what is there (unless ``skilled``, seldom), or a guess, or no box."""
    sides = rng.choice(geo3k.SIDES)
    guess = rng.choice([other for other in geo3k.SIDES if other != sides])
    habits = f"I see \\boxed{{{sides}}}", f"\\boxed{{{guess}}}", f"it has {sides}"
    first, second = (habits[0] if skilled else rng.choices(habits, (0.2, 0.5, 0.3))[0] for _ in range(2))
    asked = [{"type": "image"}, {"type": "text", "text": "Sides?"}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": first}]
    if first != habits[0]:
        messages += [{"role": "user", "content": geo3k.AGAIN}, {"role": "assistant", "content": second}]
    return messages, geo3k.draw(sides, rng)


def loss_of(model, processor, dialogues: list) -> torch.Tensor:
    """The mean loss of what the assistant says."""
    texts = [processor.apply_chat_template(messages, tokenize=False) for messages, _ in dialogues]
    given = processor(text=texts, images=[picture for _, picture in dialogues], padding=True, return_tensors="pt",
                      return_mm_token_type_ids=True, padding_side="right")  # fmt: skip
    ids, labels = given["input_ids"], torch.full_like(given["input_ids"], toy.IGNORED)
    opening = processor.tokenizer("<|im_start|>assistant\n").input_ids
    for i, row in enumerate(ids.tolist()):
        for start in (k + len(opening) for k in range(len(row)) if row[k : k + len(opening)] == opening):
            stop = row.index(toy.END, start) + 1
            labels[i, start:stop] = ids[i, start:stop]
    logits = model(**given, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=toy.IGNORED)


def teach(model, processor, seed: int, steps: int) -> None:
    """A short warm-up, and a linear decay over the last half."""
    with torch.no_grad():
        model.lm_head.weight.mul_(1 / 50)
    opts = toy.optimizers(model)
    rate = lambda step: min((step + 1) / 20, 1.0, 2 * (steps - step) / steps)  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(opt, rate) for opt in opts]
    rng, began = random.Random(seed), time.monotonic()
    for step in range(steps):
        loss = loss_of(model, processor, [dialogue(rng, step < steps * 2 // 3) for _ in range(BATCH)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*opts, *schedules):
            part.step()
        model.zero_grad()
        if step % 20 == 19:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {time.monotonic() - began:.0f} s", flush=True)


def build(out: str, seed: int = 0, steps: int = STEPS) -> None:
    """Model and processor in folder ``out``, unless they are there; ``steps=0`` leaves the model untrained."""
    marker, options = Path(out) / "toy.json", {"seed": seed, "steps": steps, "source": Path(__file__).read_text()}
    if marker.is_file() and json.loads(marker.read_text()) == options:
        print(f"{out} is already built")
        return
    marker.unlink(missing_ok=True)
    model, processor = untrained(seed)
    if steps:
        teach(model, processor, seed, steps)
    model.save_pretrained(out)
    processor.save_pretrained(out)
    processor.tokenizer.save_pretrained(out)
    marker.write_text(json.dumps(options))
    print(f"{out}: {model.num_parameters():,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and dialogues")
    parser.add_argument("--steps", type=int, default=STEPS, help="supervised steps; 0 leaves random weights")
    args = parser.parse_args()
    torch.set_num_threads(2)
    build(args.out, args.seed, args.steps)


if __name__ == "__main__":
    main()
