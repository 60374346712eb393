# toy_moe: the toy with a Qwen3-MoE of 8 experts, top-2; the trainer replays the routes the engine chose.
# Expected on 2 cores: see README.md, "The toy, measured".
: "${MODEL:=models/toy_moe}"
. recipes/toy.sh
BUILD_MODEL=("$PY" -m tools.toy --moe --out models/toy_moe)
