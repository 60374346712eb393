# For tests/test_resume.py: a checkpoint every second step, rows kept, two ranks and one engine.
. tests/kept_recipe.sh
ROLLOUT_FLAGS+=(--max_lag 1)
TRAIN_FLAGS+=(--max_lag 1 --checkpoint_steps 2 --checkpoint_keep 2
             --eval_tasks 4 --eval_steps 2 --eval_samples 2 --eval_temperature 1.0)
