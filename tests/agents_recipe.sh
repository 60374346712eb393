# The toy's recipe in small and faster, for tests/test_agents.py: RECIPE=../tests/agents_recipe AGENT=... bash run_2x8.sh
. recipes/toy.sh
ROLLOUT_FLAGS+=(--group_size 4 --groups_per_step "${TEST_GROUPS:-8}")
TRAIN_FLAGS+=(--eval_tasks 0 --lr "${TEST_LR:-1e-3}")
