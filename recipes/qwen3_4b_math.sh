# qwen3_4b_math: agents/maths.py with Qwen3-4B on two nodes of 8 H100, trainer on one and engines on the other. DATA and
# EVAL_DATA: rows with a prompt and an answer (JSON lines or parquet), which the packages datasets and math-verify read
# and check (.venv/bin/pip install datasets math-verify); or reasoning_gym:NAME.
# Not measured yet: no GPU was available when this was written.
: "${MODEL:=models/Qwen3-4B-Instruct-2507}"
: "${STEPS:=200}"
: "${DATA:?the data set: DATA=train.parquet EVAL_DATA=test.parquet, or DATA=reasoning_gym:NAME for both}" "${EVAL_DATA:?}"
BUILD_MODEL=("$PY" -m huggingface_hub.cli.hf download Qwen/Qwen3-4B-Instruct-2507 --local-dir "$MODEL")
: "${AGENT:=agents/maths.py}"
ROLLOUT_FLAGS=(--dtype bfloat16 --max_model_len 8192 --max_tokens 7168 --max_num_seqs 256 --group_size 16
               --groups_per_step 32 --max_lag 1 --filter_groups True --tool_parser "")
TRAIN_FLAGS=(--dtype bfloat16 --attention flex_attention --lr 1e-6 --warmup_steps 5 --advantage grpo --gate seq_mask_tis
             --surrogate reinforce --max_lag 1 --token_budget 32768 --checkpoint_activations True --checkpoint_steps 20
             --eval_tasks 256 --eval_steps 20 --eval_samples 4 --eval_temperature 0.7 --probe_bound 0.3)
