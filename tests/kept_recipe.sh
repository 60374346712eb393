# For tests/test_run.py: rows are kept, no gradient is clipped, and an untrained model has gradients.
. recipes/toy.sh
AGENT=tests/agent_turns.py
ROLLOUT_FLAGS+=(--group_size 2 --groups_per_step 6 --max_tokens 24)
TRAIN_FLAGS+=(--keep_rows True --grad_clip 1e9 --eval_tasks 0 --advantage reinforce)
