"""The commands people type: `python -m launch.X`, and the shell scripts."""

import os

# Read when torch is imported: without it every rank prints warnings about NUMA nodes and sockets.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
