#!/usr/bin/env bash
# Sets everything up and trains the small model for a few minutes, on a CPU or a GPU: bash launch/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export QUICKSTART_STARTED=$(date +%s)  # the report counts the set-up too
bash launch/setup.sh

exec .venv/bin/python -m launch.quickstart "$@"
