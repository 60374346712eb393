# Every part of the loss at once, and a weight sync after each mini-batch, for tests/test_losses.py.
. recipes/toy.sh
ROLLOUT_FLAGS+=(--group_size 4 --max_lag 3 --versions_per_step 2)
TRAIN_FLAGS+=(--eval_tasks 0 --advantage gae --surrogate ppo --minibatches 2 --sync_minibatches True --max_lag 3 --clip_low 0.01 --clip_high 0.01 --dual_clip 3 --whiten True --entropy_coef 0.01
              --ref_model "$MODEL" --kl_coef 0.1 --kl_as reward --kl_estimator k1 --kl_target 0.05
              --overlong_limit 100 --overlong_buffer 20 --denominator constant --denominator_constant 1000)
