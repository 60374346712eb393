# toy_coder: agents/coder.py on a toy that has learned the other agents' dialogues, not how to do well in them.
# Expected on 2 cores: see README.md, "The agents, measured". A repeated flag's last value counts.
: "${MODEL:=models/toy_talk}"
: "${STEPS:=20}"
: "${AGENT:=agents/coder.py}"
. recipes/toy.sh
BUILD_MODEL=("$PY" -m tools.toy --out models/toy_talk --talk)
ROLLOUT_FLAGS+=(--max_model_len 768 --max_tokens 64 --group_size 4 --groups_per_step 4)
TRAIN_FLAGS+=(--lr 1e-3 --eval_tasks 16)
