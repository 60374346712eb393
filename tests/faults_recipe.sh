# For tests/test_faults.py: agents that go wrong, engines that are given up soon, rows that are kept.
. recipes/toy.sh
AGENT=tests/agent_faults.py
ROLLOUT_FLAGS+=(--group_size 2 --groups_per_step 4 --max_tokens 24 --max_lag 2 --rollout_timeout_s 16 --engine_timeout_s 10
                --engine_restarts "${RESTARTS:-3}")
TRAIN_FLAGS+=(--keep_rows True --eval_tasks 0 --max_lag 2)
