"""The benches, as far as they can be held to anything without measuring."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.torchrun import QUIET


def test_the_gpu_bench_says_where_there_is_no_gpu_and_is_content():
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_update_gpu"],
        env=os.environ | QUIET | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "bench_update_gpu: no GPU here, nothing to measure\n"), done.stderr
