# distill: on-policy distillation: Qwen3-4B teaches Qwen3-0.6B, token by token, on what the small one says to the prompts
# of DATA and EVAL_DATA (rows with a prompt); no rewards. DATA's files need the package datasets.
# Not measured yet: no GPU was available when this was written; its small twin is toy_distill.
: "${MODEL:=models/Qwen3-0.6B}"
: "${TEACHER:=models/Qwen3-4B-Instruct-2507}"
: "${STEPS:=200}"
: "${DATA:?the prompts: DATA=train.parquet EVAL_DATA=test.parquet}" "${EVAL_DATA:?}"
HF="'$PY' -m huggingface_hub.cli.hf download"
BUILD_MODEL=(bash -c "$HF Qwen/Qwen3-0.6B --local-dir '$MODEL' && $HF Qwen/Qwen3-4B-Instruct-2507 --local-dir '$TEACHER'")
: "${AGENT:=agents/distill.py}"
ROLLOUT_FLAGS=(--dtype bfloat16 --max_model_len 4096 --max_tokens 2048 --max_num_seqs 256 --group_size 4
               --groups_per_step 64 --max_lag 1 --tool_parser "")
TRAIN_FLAGS=(--dtype bfloat16 --attention flex_attention --lr 2e-6 --warmup_steps 5 --advantage on_policy_distill
             --ref_model "$TEACHER" --gate tis --surrogate reinforce --max_lag 1 --token_budget 32768
             --checkpoint_activations True --checkpoint_steps 20 --eval_tasks 64 --probe_bound 0.3)
