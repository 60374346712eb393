# smollm2: SmolLM2-135M-Instruct, real weights in bfloat16, learns to name the largest of three numbers, on CPU cores.
# Expected on 2 cores: see README.md, "A real model, measured".
: "${MODEL:=models/smollm2}"
: "${STEPS:=40}"
BUILD_MODEL=("$PY" -m tools.smollm2 --out models/smollm2)
: "${AGENT:=agents/largest.py}"
ROLLOUT_FLAGS=(--dtype bfloat16 --max_model_len 256 --max_tokens 12 --group_size 8 --groups_per_step 6 --max_lag 0
               --temperature 0.6 --tool_parser "")
TRAIN_FLAGS=(--dtype bfloat16 --lr 3e-5 --warmup_steps 3 --advantage grpo --gate tis --surrogate reinforce --max_lag 0
             --token_budget 512 --eval_tasks 128 --eval_steps 10 --probe_bound 1)
