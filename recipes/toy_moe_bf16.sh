# toy_moe_bf16: toy_moe with engines that compute in bfloat16: the trainer's routers then choose other experts now and
# then, which is what replay is for. REPLAY=False trains without it. Expected: README.md, "Replay, measured".
. recipes/toy_moe.sh
ROLLOUT_FLAGS+=(--dtype bfloat16)
TRAIN_FLAGS+=(--replay "${REPLAY:-True}" --probe_bound 1 --probe_agreement 0.8)
