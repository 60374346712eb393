# toy_maths: agents/maths.py on a toy that has learned the other agents' dialogues, not how to do well in them.
# Expected on 2 cores: see README.md, "The agents, measured". A repeated flag's last value counts.
: "${MODEL:=models/toy_talk}"
: "${STEPS:=30}"
: "${AGENT:=agents/maths.py}"
. recipes/toy.sh
BUILD_MODEL=("$PY" -m tools.toy --out models/toy_talk --talk)
ROLLOUT_FLAGS+=(--max_model_len 256 --max_tokens 48)
TRAIN_FLAGS+=(--lr 1e-3)
