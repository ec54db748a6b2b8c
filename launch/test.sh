#!/usr/bin/env bash
# Sets everything up and runs the tests; options go to pytest:
#
#   bash launch/test.sh -k advantages
#
# .venv/bin/python -m pytest --help lists them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/help.sh

bash launch/setup.sh

# Two tests at a time with a thread each, whole files to a worker: that is faster than one after another with all cores.
# Threads that spin while they wait make processes on the same cores several times slower.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 KMP_BLOCKTIME=0
exec .venv/bin/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder "$@"
