# toy_distill: on-policy distillation. A larger toy that knows the right habit only teaches the small one, token by token,
# on what the small one says; rewards are measured and play no part.
# Expected on 2 cores: see README.md, "Distillation, measured". A repeated flag's last value counts.
. recipes/toy.sh
: "${TEACHER:=models/toy_teacher}"
BUILD_MODEL=("$PY" -m tools.toy --out models/toy --teacher models/toy_teacher)
TRAIN_FLAGS=("${TRAIN_FLAGS[@]}" --advantage on_policy_distill --ref_model "$TEACHER")
