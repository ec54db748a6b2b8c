"""Trains as `launch.train` does, and keeps the first replies that each step trains on, as they were sampled.

    python -m tests.programs.overlap_program --config FILE

They go to sampled/STEP_RANK.json beside FILE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grpo import trainer
from grpo.collect import Batch, Collector
from launch import train


class Keeping(Collector):
    def collect(self, step, playing=None) -> Batch:
        batch = super().collect(step, playing)
        replies = [
            {"prompt_ids": reply.prompt_ids, "token_ids": reply.token_ids, "logprobs": reply.logprobs}
            for group in batch.groups
            for reply in group.replies_G
        ]
        folder = Path(sys.argv[-1]).parent / "sampled"
        folder.mkdir(exist_ok=True)
        kept = {"weight_version": batch.weight_version, "replies": replies}
        (folder / f"{step}_{self.ranks.rank}.json").write_text(json.dumps(kept))
        return batch


if __name__ == "__main__":
    trainer.Collector = Keeping
    train.main()
