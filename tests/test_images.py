"""Images through the wires into a real engine: a tiny untrained Qwen2.5-VL and its own processor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from conftest import ROOT, free_port

from loopback import unpack_rows
from tools import toy

pytestmark = pytest.mark.engine
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string %}{{ m.content }}{% else %}"
    "{%- for part in m.content -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{%- endfor -%}{% endif %}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
BUILD = "import sys; from test_images import make; make(sys.argv[1])"


def make(path: str) -> None:
    """The model and its processor. Runs in a process that has torchvision."""
    import torch
    from tokenizers import AddedToken
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    tokenizer = toy.tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in VISION])
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    ends = {"bos_token_id": toy.PAD, "eos_token_id": toy.END}
    torch.manual_seed(0)
    text = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}  # fmt: skip
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64,
              "window_size": 112, "fullatt_block_indexes": [1]}  # fmt: skip
    tokens = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    parts = {"text_config": text | ends, "vision_config": vision, "dtype": "float32"}
    config = Qwen2_5_VLConfig(**parts, **tokens, **ends)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    with torch.no_grad():  # a trained model does not say placeholders, on which the engine would put images
        model.lm_head.weight.mul_(50)[[start, end, image, video]] = 0
    model.save_pretrained(path)
    sees = Qwen2VLImageProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 16)
    both = {"image_processor": sees, "video_processor": Qwen2VLVideoProcessor(), "chat_template": TEMPLATE}
    Qwen2_5_VLProcessor(tokenizer=tokenizer, **both).save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The control address of a rollout node with that model."""
    folder, port = tmp_path_factory.mktemp("sees"), free_port()
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "vision", ROOT / ".venv" / "vision")))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    subprocess.run([sys.executable, "-c", BUILD, folder / "model"], env=env, cwd=ROOT, check=True, timeout=120)
    flags = {"model": folder / "model", "agent": "tests/agent_sees.py", "max_model_len": 512, "max_tokens": 12,
             "group_size": 2, "groups_per_step": 3, "control_port": port, "tool_parser": ""}  # fmt: skip
    command = [
        sys.executable,
        "rollout.py",
        *(part for name, value in flags.items() for part in (f"--{name}", str(value))),
    ]
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
    yield f"http://127.0.0.1:{port}"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) is not None
    print(log.read_text()[-3000:])


def test_images_reach_the_engine_and_rows_hold_them_at_full_length(url):
    """Each rollout is one row: what an image was expanded to in one turn begins the next turn's prompt unchanged."""
    client = httpx.Client(
        base_url=url, headers={"x-instar-secret": os.environ["INSTAR_SECRET"]}, timeout=60, trust_env=False
    )
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if client.get("/health").json()["ready"]:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    while (reply := client.get("/manifest?version=0")).status_code == 204:
        assert time.monotonic() < end
    rollouts = [rollout for group in reply.json()["groups"] for rollout in group["rollouts"]]
    assert [rollout["status"] for rollout in rollouts] == ["ok"] * 6
    names = [row["row_id"] for rollout in rollouts for row in rollout["rows"]]
    assert len(names) == 6, "one row a rollout"
    rows = unpack_rows(client.post("/rows", json={"ids": names}).content)
    pad = 256 + len(toy.SPECIAL) + len(toy.MARKERS) + VISION.index("<|image_pad|>")
    for row in rows:
        assert len(row.images) == 3
        context = np.where(row.sampled, -1, row.token_ids)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], context == pad, [0]])))
        assert (edges[1::2] - edges[::2]).tolist() == [6, 8, 9], "patches of 28 pixels"
        assert sorted(set(row.call[row.sampled])) == [0, 1, 2]
    assert len({tuple(row.token_ids[~row.sampled].tolist()) for row in rows}) == 1, "three ways to say the same"
