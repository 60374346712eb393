# For `python -m tools.bench lag`: rollouts of very different lengths, under LAG and PARTIAL.
. recipes/toy.sh
AGENT=tools/long_tail.py
ROLLOUT_FLAGS=(--max_model_len 1024 --max_tokens 16 --group_size 8 --groups_per_step 8 --max_lag "$LAG"
               --partial_rollouts "$PARTIAL")
TRAIN_FLAGS+=(--max_lag "$LAG" --token_budget 1024 --eval_tasks 0)
