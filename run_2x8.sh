#!/usr/bin/env bash
# Trains an agent: sets up, builds the model, starts rollout.py and torchrun rl.py, and stops what it started.
#
#   bash run_2x8.sh                                   no GPU: the same processes on CPU cores, recipe toy
#   RECIPE=toy_moe SEED=1 RUN=mine bash run_2x8.sh    another recipe, seed, name of the run's folder
#   RECIPE=calculator_2x8 sbatch -N 2 run_2x8.sh      Slurm: node 0 trains, node 1 rolls out
#   NODE_RANK=0 MASTER_ADDR=a ROLLOUT_ADDR=b INSTAR_SECRET=... bash run_2x8.sh      by hand, on node a;
#   the same with NODE_RANK=1 on node b. On one node with GPUs they are split between trainer and engines.
#
# Variables: RECIPE RUN SEED STEPS MODEL AGENT DATA EVAL_DATA ENGINES TRAINER_GPUS PORT PYTHON TENSOR_PARALLEL,
# on a CPU TRAINER_RANKS; RESUME=auto (go on from RUN's newest checkpoint; or a checkpoint's folder), DRY_RUN=1 (print
# this node's commands, start nothing).
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
[ -n "${SLURM_SUBMIT_DIR:-}" ] && cd "$SLURM_SUBMIT_DIR"
. tools/setup.sh

# ---- where: which machine plays which part
[ -z "${NODE_RANK:-}" ] || [ -n "${INSTAR_SECRET:-}" ] ||
  fail "two nodes by hand need the same random INSTAR_SECRET exported on both"
export INSTAR_SECRET=${INSTAR_SECRET:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}
NODES=${SLURM_JOB_NUM_NODES:-$([ -n "${NODE_RANK:-}" ] && echo 2 || echo 1)}
if [ "$NODES" -gt 1 ] && [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${INSTAR_STARTED:-}" ]; then
  INSTAR_STARTED=1 exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash run_2x8.sh
fi
if [ -n "${SLURM_JOB_NODELIST:-}" ] && [ "$NODES" -gt 1 ]; then
  mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  MASTER_ADDR=${MASTER_ADDR:-${HOSTS[0]}} ROLLOUT_ADDR=${ROLLOUT_ADDR:-${HOSTS[1]}} NODE_RANK=${SLURM_NODEID:-0}
fi
NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} ROLLOUT_ADDR=${ROLLOUT_ADDR:-127.0.0.1}
[ "$NODES" -eq 1 ] || [ "$ROLLOUT_ADDR" != 127.0.0.1 ] || fail "two nodes need MASTER_ADDR and ROLLOUT_ADDR"

if [ "$DEVICE" = cpu ]; then
  TRAINER_RANKS=${TRAINER_RANKS:-2}
  echo "no GPU found: rehearsing on CPU cores ($TRAINER_RANKS trainer ranks, ${ENGINES:-1} engine(s)); the processes are those of 2x8 GPUs"
  RECIPE=${RECIPE:-toy} ENGINE_SLOTS=1 ENGINE_GPUS=
  # Threads that spin while they wait take the cores that the other processes need.
  export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1
elif [ "$NODES" -eq 1 ]; then
  [ "$GPU_COUNT" -ge 2 ] || fail "one GPU cannot be split between trainer and engine; use DEVICE=cpu or a machine with two"
  RECIPE=${RECIPE:-calculator_2x8} TRAINER_RANKS=${TRAINER_GPUS:-$((GPU_COUNT / 2))}
  ENGINE_SLOTS=$((GPU_COUNT - TRAINER_RANKS)) ENGINE_GPUS=$(seq -s, "$TRAINER_RANKS" $((GPU_COUNT - 1)))
else
  RECIPE=${RECIPE:-calculator_2x8} TRAINER_RANKS=${TRAINER_GPUS:-$GPU_COUNT} ENGINE_SLOTS=$GPU_COUNT ENGINE_GPUS=
fi

# ---- what: the recipe, the run's folder
[ -f "recipes/$RECIPE.sh" ] || fail "no recipe '$RECIPE'; there are: $(cd recipes && echo *.sh | sed 's/\.sh//g')"
SEED=${SEED:-0} OWN_MODEL=${MODEL:-}
. "recipes/$RECIPE.sh"
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}   # GPUs of an engine
ENGINES=${ENGINES:-$((ENGINE_SLOTS / TENSOR_PARALLEL))}
RUN=${RUN:-$RECIPE-seed$SEED-$(date +%Y%m%d-%H%M%S)} OUT=runs/$RUN
ROLES=$([ "$NODES" -eq 1 ] && echo "rollout trainer" || { [ "$NODE_RANK" -eq 0 ] && echo trainer || echo rollout; })

if [ -n "${DRY_RUN:-}" ]; then
  start() { shift; printf '%q ' "$@" && echo; }
else
  [ -n "${RESUME:-}" ] || [ ! -e "$OUT/summary.json" ] || fail "$OUT already holds a finished run; choose another name with RUN="
  mkdir -p "$OUT" || fail "cannot make $OUT; is the disk full?"
  for log in "$OUT"/*.log; do [ ! -e "$log" ] || mv "$log" "$log.$(date +%s)"; done   # of the run that is resumed
  start() { local log=$OUT/$1.log; shift; setsid "$@" >"$log" 2>&1 </dev/null & }
fi

# ---- stop: whatever happens, every process group that was started ends
PIDS=()
stop() {
  local pid
  trap '' INT TERM
  for pid in "${PIDS[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for _ in $(seq 150); do
    local alive=0
    for pid in "${PIDS[@]}"; do if kill -0 -- "-$pid" 2>/dev/null; then alive=1; fi; done
    [ "$alive" -eq 0 ] && break
    sleep 0.1
  done
  for pid in "${PIDS[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}
trap stop EXIT
trap 'echo "run_2x8.sh: interrupted" >&2; exit 130' INT TERM

# ---- set-up and model, timed
SECONDS=0
[ -n "${DRY_RUN:-}" ] || { setup && { [ -z "${VISION:-}" ] || setup_vision; }; }
SETUP_SECONDS=$SECONDS SECONDS=0
if [ -n "${DRY_RUN:-}" ]; then
  [ -n "$OWN_MODEL" ] || start model "${BUILD_MODEL[@]}"
elif [ -z "$OWN_MODEL" ]; then
  "${BUILD_MODEL[@]}" || fail "the model could not be built: ${BUILD_MODEL[*]}"
fi
MODEL_SECONDS=$SECONDS

# ---- start
PORT=${PORT:-$([ "$NODES" -eq 1 ] && [ -z "${DRY_RUN:-}" ] && "$PY" -c 'import random, socket; free = lambda p: socket.socket().connect_ex(("127.0.0.1", p)); print(next(p for p in iter(lambda: random.randrange(20000, 32000), None) if free(p)))' || echo 8700)}
LISTEN=$([ "$NODES" -eq 1 ] && echo 127.0.0.1 || echo 0.0.0.0)
for role in $ROLES; do
  if [ "$role" = rollout ]; then
    start rollout "$PY" rollout.py --model "$MODEL" --agent "$AGENT" \
      ${DATA:+--data "$DATA"} ${EVAL_DATA:+--eval_data "$EVAL_DATA"} --device "$DEVICE" --engines "$ENGINES" \
      --tensor_parallel "$TENSOR_PARALLEL" --gpus "$ENGINE_GPUS" --steps "$STEPS" --seed "$SEED" \
      --control_host "$LISTEN" --control_port "$PORT" "${ROLLOUT_FLAGS[@]}"
  else
    start rl "$PY" -m torch.distributed.run --standalone --nproc_per_node "$TRAINER_RANKS" rl.py --model "$MODEL" \
      --out "$OUT" --recipe "$RECIPE" --device "$DEVICE" --steps "$STEPS" --seed "$SEED" \
      --rollout_urls "http://$ROLLOUT_ADDR:$PORT" --sync_address "$MASTER_ADDR" ${RESUME:+--resume "$RESUME"} "${TRAIN_FLAGS[@]}"
  fi
  [ -n "${DRY_RUN:-}" ] || PIDS+=($!)
done
[ -z "${DRY_RUN:-}" ] || exit 0
echo "run $OUT: recipe $RECIPE, seed $SEED, $STEPS steps; logs: $OUT/*.log"
LAST=${ROLES##* }
tail -n +1 -F --pid="${PIDS[-1]}" "$OUT/$([ "$LAST" = trainer ] && echo rl || echo rollout).log" 2>/dev/null | grep --line-buffered -E '^(step|evaluation|saved) ' &

# ---- wait: the first failure decides
CODE=0 LEFT=("${PIDS[@]}")
while [ "${#LEFT[@]}" -gt 0 ] && [ "$CODE" -eq 0 ]; do
  wait -n -p ENDED "${LEFT[@]}" || CODE=$?
  for i in "${!LEFT[@]}"; do if [ "${LEFT[i]}" = "$ENDED" ]; then unset "LEFT[i]"; fi; done
done
if [ "$CODE" -ne 0 ]; then
  sleep 1 && stop   # the other side's last line may name the cause, and is there once it has ended
  echo "run_2x8.sh: error: the run failed (exit $CODE); causes, and the logs they are from:" >&2
  grep -H -E '^(rollout|rl)\.py: error: |No space left|Killed|out of memory' "$OUT"/*.log | grep -v 'stopped by SIGTERM$' |
    awk '!seen[$0]++' | head -n 5 | grep . >&2 || tail -n 3 "$OUT"/*.log >&2
  exit "$CODE"
fi
if [ "$NODE_RANK" -eq 0 ]; then
  "$PY" -m tools.summary "$OUT" --setup "$SETUP_SECONDS" --toy "$MODEL_SECONDS"
fi
