#!/usr/bin/env bash
# Sets everything up and trains the small model for a few minutes, on a CPU or a GPU: bash launch/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export QUICKSTART_STARTED=$(date +%s)  # the report counts the set-up too
bash launch/setup.sh

# Several processes share the cores, and threads that spin while they wait make each other several times slower.
export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 KMP_BLOCKTIME=0
exec .venv/bin/python -m launch.quickstart "$@"
