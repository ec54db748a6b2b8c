"""The quickstart after its set-up (`bash launch/quickstart.sh`): data, training, report.

python -m launch.quickstart [section.key=value ...]
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from grpo.config import Config
from grpo.config_file import load_config
from grpo.ranks import end_process
from launch import prepare_data, report, train

CONFIG = Path("configs/quickstart.yaml")
ARTICLES = Path("configs/quickstart/articles.jsonl")
HELD_OUT = 32
DATA = Path("data/quickstart")


def read_config() -> Config:
    parser = train.settings_parser("python -m launch.quickstart", (__doc__ or "").split("\n\n")[0], with_config=False)
    config = load_config(CONFIG, parser.parse_args().overrides)
    sizes = prepare_data.prepare(ARTICLES, HELD_OUT, DATA)
    train.say(f"{DATA}: {sizes['train']} short articles to train on, {sizes['validation']} held out")
    return config


def main() -> None:
    # The shell script says when it began, so that the minutes hold the installation too.
    started = float(os.environ.get("QUICKSTART_STARTED", time.time()))
    config = train.run(read_config)
    minutes = (time.time() - started) / 60
    report.report(config.run.path, {"minutes": minutes})
    print(f"\nquickstart: {minutes:.1f} minutes in all")
    end_process()


if __name__ == "__main__":
    main()
