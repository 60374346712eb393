# toy_lag1: the toy, one version off-policy: rollouts of the next step run while this one trains.
# Expected with ENGINES=2 STEPS=15 on 2 cores: see README.md, "The toy, measured". A repeated flag's last value counts.
. recipes/toy.sh
ROLLOUT_FLAGS=("${ROLLOUT_FLAGS[@]}" --max_lag 1)
TRAIN_FLAGS=("${TRAIN_FLAGS[@]}" --max_lag 1)
