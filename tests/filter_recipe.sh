# Groups without signal are replaced, for tests/test_losses.py.
. recipes/toy.sh
ROLLOUT_FLAGS+=(--group_size 4 --filter_groups True)
TRAIN_FLAGS+=(--eval_tasks 0)
