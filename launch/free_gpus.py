"""Refuses GPUs that something else uses, in words: `launch/serve_roles.sh` asks before it starts a server.

    python -m launch.free_gpus USER_GPUS 0,1 0.9
"""

from __future__ import annotations

import argparse
import sys

from rollout.gpus import check_free


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.free_gpus", description="Refuses GPUs that something else uses, in words."
    )
    parser.add_argument("variable", help="name of the variable that chooses the GPUs, for messages")
    parser.add_argument("gpus", help="its value, as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("share", type=float, help="of their memory that must be free")
    options = parser.parse_args()
    try:
        check_free(options.variable, options.gpus, options.share)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
