# qwen3_30b_a3b_math: qwen3_4b_math with a mixture of 128 experts, top-8, whose routes the trainer replays. Each engine has
# two GPUs. Memory: 30.5e9 parameters with AdamW in fp32 are 61 GB a GPU over 8 trainer ranks, before activations.
# Not measured yet: no GPU was available when this was written.
: "${MODEL:=models/Qwen3-30B-A3B-Instruct-2507}"
: "${TENSOR_PARALLEL:=2}"
. recipes/qwen3_4b_math.sh
BUILD_MODEL=("$PY" -m huggingface_hub.cli.hf download Qwen/Qwen3-30B-A3B-Instruct-2507 --local-dir "$MODEL")
TRAIN_FLAGS+=(--token_budget 16384 --probe_agreement 0.8)
