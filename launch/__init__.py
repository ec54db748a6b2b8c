"""The commands people type: `python -m launch.X`, and the shell scripts."""

import logging
import os

# Warnings of torch that every rank would print on every start, and that nobody can act on: NUMA nodes, sockets,
# no triton and no CUDA on a CPU. The variable is read when torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
for name in ("torch.utils.flop_counter", "torch.utils.cpp_extension", "torch._library.triton"):
    logging.getLogger(name).setLevel(logging.ERROR)
