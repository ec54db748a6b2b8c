#!/usr/bin/env bash
# Sets everything up and runs the tests; options go to pytest: bash launch/test.sh -k advantages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh

# Several processes share the cores, and threads that spin while they wait make each other several times slower.
# (torchrun gives each of several ranks one thread by itself.)
export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 KMP_BLOCKTIME=0
exec .venv/bin/python -m pytest tests "$@"
