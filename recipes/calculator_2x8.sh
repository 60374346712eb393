# calculator_2x8: the calculator agent with Qwen3-4B on GPUs, 8 trainer ranks and 8 engines on two nodes.
# Not measured: no GPU was available when this was written.
: "${MODEL:=models/Qwen3-4B-Instruct-2507}"
: "${STEPS:=200}"
BUILD_MODEL=("$PY" -m huggingface_hub.cli.hf download Qwen/Qwen3-4B-Instruct-2507 --local-dir "$MODEL")
: "${AGENT:=agents/calculator.py}"
ROLLOUT_FLAGS=(--dtype bfloat16 --max_model_len 4096 --max_tokens 1024 --max_num_seqs 256 --group_size 16
               --groups_per_step 32 --max_lag 1 --tool_parser hermes)
TRAIN_FLAGS=(--dtype bfloat16 --attention flex_attention --lr 1e-6 --warmup_steps 5 --advantage grpo
             --gate seq_mask_tis --surrogate reinforce --max_lag 1 --token_budget 32768 --checkpoint_activations True
             --eval_tasks 256 --probe_bound 0.3)
