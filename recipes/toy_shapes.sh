# toy_shapes: agents/geo3k.py on a 0.35M-parameter Qwen2.5-VL that sees drawn shapes, on CPU cores.
# Expected on 2 cores: see README.md, "The agents, measured". A repeated flag's last value counts.
VISION=1
: "${MODEL:=models/toy_shapes}"
: "${STEPS:=20}"
: "${AGENT:=agents/geo3k.py}"
. recipes/toy.sh
BUILD_MODEL=("$PY" -m tools.toy_shapes --out models/toy_shapes)
ROLLOUT_FLAGS+=(--max_model_len 256 --max_tokens 24)
TRAIN_FLAGS+=(--lr 1e-3 --eval_tasks 64)
