"""Trains as `launch.train` does, and keeps what the tests ask about the overlap.

    python -m tests.programs.overlap_program --config FILE

sampled/STEP_RANK.json    beside FILE: the first replies that a step trains on, as they were sampled
order_RANK.txt            in which order conversations were started and updates ended
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grpo import trainer
from grpo.collect import Batch, Collector
from grpo.ranks import Ranks
from grpo.update import Updater
from launch import train

FOLDER = Path(sys.argv[-1]).parent


def note(ranks: Ranks, event: str) -> None:
    with (FOLDER / f"order_{ranks.rank}.txt").open("a") as file:
        file.write(event + "\n")


class Noting(Updater):
    def update(self, *arguments, **named):
        metrics = super().update(*arguments, **named)
        note(self.ranks, "updated")
        return metrics


class Keeping(Collector):
    def start(self, step, wanted=None):
        if wanted is None:  # else a refill
            note(self.ranks, f"started {step}")
        return super().start(step, wanted)

    def collect(self, step, playing=None) -> Batch:
        batch = super().collect(step, playing)
        replies = [
            {"prompt_ids": reply.prompt_ids, "token_ids": reply.token_ids, "logprobs": reply.logprobs}
            for group in batch.groups
            for reply in group.replies_G
        ]
        folder = FOLDER / "sampled"
        folder.mkdir(exist_ok=True)
        kept = {"weight_version": batch.weight_version, "replies": replies}
        (folder / f"{step}_{self.ranks.rank}.json").write_text(json.dumps(kept))
        return batch


if __name__ == "__main__":
    trainer.Collector, trainer.Updater = Keeping, Noting
    train.main()
