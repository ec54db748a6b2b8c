#!/usr/bin/env bash
# Sets everything up and trains the small model for a few minutes, on a CPU or a GPU:
#
#   bash launch/quickstart.sh [section.key=value ...]
#
# The settings are those of configs/quickstart.yaml; python -m launch.train --help lists all there are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/help.sh

export QUICKSTART_STARTED=$(date +%s)  # the report counts the set-up too
bash launch/setup.sh

exec .venv/bin/python -m launch.quickstart "$@"
