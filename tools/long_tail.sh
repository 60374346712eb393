# For `python -m tools.bench lag`: rollouts of very different lengths, under LAG and PARTIAL. Of a repeated flag the last
# value counts: the node has no last step, so what is measured has no end at which the engine runs dry.
. recipes/toy.sh
AGENT=tools/long_tail.py
ROLLOUT_FLAGS=(--max_model_len 1024 --max_tokens 8 --group_size 8 --groups_per_step 8 --max_lag "$LAG"
               --partial_rollouts "$PARTIAL" --steps 0)
TRAIN_FLAGS+=(--max_lag "$LAG" --token_budget 1024 --eval_tasks 0 --lr_decay False)
