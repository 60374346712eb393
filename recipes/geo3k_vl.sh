# geo3k_vl: agents/geo3k.py with Qwen2.5-VL-7B on GPUs, 8 trainer ranks and 8 engines on two nodes, from a local copy of
# the data set: DATA and EVAL_DATA are its parquet files ('geometry3k/data/train-*.parquet'), which the packages datasets
# and math-verify read and check (.venv/bin/pip install datasets math-verify).
# Not measured: no GPU was available when this was written.
: "${MODEL:=models/Qwen2.5-VL-7B-Instruct}"
: "${STEPS:=200}"
: "${DATA:?the data set: DATA=geometry3k/data/train-*.parquet EVAL_DATA=geometry3k/data/test-*.parquet}" "${EVAL_DATA:?}"
BUILD_MODEL=("$PY" -m huggingface_hub.cli.hf download Qwen/Qwen2.5-VL-7B-Instruct --local-dir "$MODEL")
VISION=1
: "${AGENT:=agents/geo3k.py}"
ROLLOUT_FLAGS=(--dtype bfloat16 --max_model_len 8192 --max_tokens 2048 --max_num_seqs 128 --group_size 8
               --groups_per_step 32 --max_lag 1 --tool_parser "")
TRAIN_FLAGS=(--dtype bfloat16 --attention flex_attention --lr 1e-6 --warmup_steps 5 --advantage grpo
             --gate seq_mask_tis --surrogate reinforce --max_lag 1 --token_budget 32768 --checkpoint_activations True
             --eval_tasks 256 --probe_bound 0.3)
