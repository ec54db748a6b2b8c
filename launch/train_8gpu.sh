#!/usr/bin/env bash
# Trains on the GPUs of this machine: bash launch/train_8gpu.sh [CONFIG] [section.key=value ...]
#
# CONFIG is configs/medium_qwen3_4b.yaml unless named. NUM_GPUS [8] ranks are started, one per GPU; CUDA_VISIBLE_DEVICES
# says which GPUs, as nvidia-smi counts. The role servers (launch/serve_roles.sh) must answer before, from GPUs of their own.
# python -m launch.train --help lists the settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/help.sh

config=configs/medium_qwen3_4b.yaml
if [[ ${1:-} == *.yaml ]]; then config=$1; shift; fi
python=$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)
export CUDA_DEVICE_ORDER=PCI_BUS_ID
# After Ctrl-C a run finishes what it is doing and saves: torchrun would kill it after 30 s.
exec "$python" -m torch.distributed.run --standalone --nproc_per_node "${NUM_GPUS:-8}" --shutdown-timeout 7200 \
  -m launch.train --config "$config" "$@"
