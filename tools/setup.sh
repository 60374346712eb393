# Sourced by run_2x8.sh and run_tests.sh: makes .venv with the pinned requirements, once.
# Sets PY (the environment's python), DEVICE (cuda or cpu) and GPU_COUNT.
# run_tests.sh calls setup_tests as well.

fail() { echo "${0##*/}: error: $*" >&2; exit 1; }

PYTHON=${PYTHON:-python3}
GPU_COUNT=${GPU_COUNT:-0}
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then GPU_COUNT=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .); fi
if [ "$GPU_COUNT" -eq 0 ] && [ -z "${CUDA_VISIBLE_DEVICES+set}" ] && command -v nvidia-smi >/dev/null 2>&1; then GPU_COUNT=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true); fi
DEVICE=${DEVICE:-$([ "$GPU_COUNT" -gt 0 ] && echo cuda || echo cpu)}
REQUIREMENTS=requirements-$([ "$DEVICE" = cuda ] && echo gpu || echo cpu).txt
PY=$PWD/.venv/bin/python
export PYTHONPATH=$PWD HF_HUB_DISABLE_TELEMETRY=1 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false

setup() {
  local stamp=.venv/instar-$(cat requirements.txt "$REQUIREMENTS" tools/setup.sh | cksum | tr ' ' -)
  [ -e "$stamp" ] && return
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$PYTHON is older than Python 3.11 or missing; name a newer one with PYTHON="
  echo "installing $REQUIREMENTS into .venv (about 2 minutes, 4 GB; log: .venv/install.log)"
  "$PYTHON" -m venv .venv || fail "cannot make .venv; is the venv module installed and the disk not full?"
  # The plain install first; where the index has no CPU build of torch, PyTorch's own index supplies it.
  "$PY" -m pip install -q -r "$REQUIREMENTS" >.venv/install.log 2>&1 ||
    "$PY" -m pip install -q -r "$REQUIREMENTS" --extra-index-url https://download.pytorch.org/whl/cpu >>.venv/install.log 2>&1 ||
    fail "pip could not install $REQUIREMENTS: $(tail -n 1 .venv/install.log) (log: .venv/install.log)"
  # A CUDA build of torchvision beside a CPU torch fails to import and takes transformers and vLLM down with it.
  "$PY" -c 'import torchvision' >/dev/null 2>&1 || "$PY" -m pip uninstall -qy torchvision torchaudio torchcodec >>.venv/install.log 2>&1
  "$PY" -c 'import torch, transformers, vllm' >>.venv/install.log 2>&1 ||
    fail "the installed packages do not import: $(tail -n 1 .venv/install.log) (log: .venv/install.log)"
  touch "$stamp"
}

setup_tests() {
  local stamp=.venv/instar-tests-$(cat requirements-test.txt tools/setup.sh | cksum | tr ' ' -)
  [ -e "$stamp" ] && return
  "$PY" -m pip install -q --no-deps -r requirements-test.txt >>.venv/install.log 2>&1 ||
    fail "pip could not install requirements-test.txt: $(tail -n 1 .venv/install.log) (log: .venv/install.log)"
  touch "$stamp"
}

# For models that see. Beside a CPU torch, torchvision works only under tools/vision/sitecustomize.py, so it stays out of
# everyone else's way.
setup_vision() {
  "$PY" -c 'import torchvision' >/dev/null 2>&1 && return
  [ -d .venv/vision/torchvision ] ||
    "$PY" -m pip install -q --no-deps --target .venv/vision torchvision==0.28.0 >>.venv/install.log 2>&1 ||
    fail "pip could not install torchvision: $(tail -n 1 .venv/install.log) (log: .venv/install.log)"
  export PYTHONPATH=$PWD:$PWD/tools/vision:$PWD/.venv/vision
}
