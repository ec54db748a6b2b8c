"""Refuses GPUs that something else uses, in words: `launch/serve_roles.sh` asks before it starts a server.

    python -m launch.free_gpus USER_GPUS 0,1 0.9
"""

from __future__ import annotations

import sys

from rollout.gpus import check_free


def main() -> None:
    """The variable that names the GPUs, its value, and the share of their memory that must be free."""
    variable, chosen, share = sys.argv[1:]
    try:
        check_free(variable, chosen, float(share))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
