# toy: the calculator agent on a 0.5M-parameter Qwen3 with a byte tokenizer, on CPU cores.
# A short supervised phase (tools/toy.py) teaches the format, not the task; RL teaches to use the tool.
# Expected on 2 cores: see README.md, "The toy, measured".
: "${MODEL:=models/toy}"
: "${STEPS:=60}"
BUILD_MODEL=("$PY" -m tools.toy --out models/toy)
: "${AGENT:=agents/calculator.py}"
ROLLOUT_FLAGS=(--max_model_len 512 --max_tokens 80 --group_size 8 --groups_per_step 8 --max_lag 0 --tool_parser hermes)
TRAIN_FLAGS=(--lr 4e-4 --warmup_steps 5 --lr_decay True --advantage grpo --gate tis --surrogate reinforce --denominator token
             --max_lag 0 --token_budget 512 --eval_tasks 128)
