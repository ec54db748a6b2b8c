"""Turns raw articles into training data in the CollabLLM parquet schema.

    python -m launch.prepare_data --articles configs/quickstart/articles.jsonl --held-out 32 --out data/quickstart

Each article, {"title", "text"} a line, becomes a scenario: the user opens vaguely, and only the hidden
goal holds what they want. The last `--held-out` articles become `rl_validation.parquet`, the others
`rl_train.parquet`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.settings import user_path

SYSTEM = "You help people write short texts."
OPENING = 'Hi! I need some help with a short piece: "{title}". I already know a few things I want in it.'
TASK_DESC = "writing a short article"


def read_articles(path: Path) -> list[dict[str, str]]:
    """Articles of a JSONL file. Raises ValueError naming file and row where one will not do."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    articles: list[dict[str, str]] = []
    rows: dict[str, int] = {}
    for row, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            article = json.loads(line)
            json.dumps(article, ensure_ascii=False).encode("utf-8")  # an escaped half of a surrogate pair is not UTF-8
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, row {row}: not valid JSON ({error})") from error
        for key in ("title", "text"):
            if not isinstance(article, dict) or not isinstance(article.get(key), str) or not article[key].strip():
                raise ValueError(f"{path}, row {row}: {key!r} is missing or empty")
            same = " ".join(article[key].lower().split())
            if same in rows:  # the same text in train and held-out rows would be a leak
                raise ValueError(f"{path}, row {row}: the same {key} as row {rows[same]}; remove one")
            rows[same] = row
        articles.append(article)
    return articles


def scenario_row(article: dict[str, str], index: int, split: str) -> dict[str, Any]:
    """One row of the parquet schema."""
    title = article["title"]
    opening = OPENING.format(title=title)
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": opening}]
    interaction = {
        "name": "collab",
        "single_turn_prompt": f"Write a short article about: {title}\n\n{article['text']}",
        "task_desc": TASK_DESC,
    }
    return {
        "prompt": prompt,
        "ground_truth": article["text"],
        "raw_prompt": opening,
        "extra_info": {"prompt": opening, "split": split, "index": index, "interaction_kwargs": interaction},
        "reward_model": {"style": "rule", "ground_truth": article["text"]},
        "data_source": "short_articles",
        "agent_name": "collab_agent",
        "index": index,
    }


def prepare(articles_file: Path, held_out: int, out: Path) -> dict[str, int]:
    """Writes both parquet files into `out`; rows by split. Raises ValueError for bad articles or too few."""
    articles = read_articles(articles_file)
    if not 0 < held_out < len(articles):
        raise ValueError(f"--held-out: {held_out} of {len(articles)} articles leaves a split empty")
    splits = {"train": articles[:-held_out], "validation": articles[-held_out:]}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for split, chosen in splits.items():
            rows = [scenario_row(article, index, split) for index, article in enumerate(chosen)]
            part = out / f"rl_{split}.parquet.part"
            pq.write_table(pa.Table.from_pylist(rows), part)
            part.rename(out / f"rl_{split}.parquet")
    except OSError as error:
        raise ValueError(f"--out: {out} cannot be written ({error})") from error
    return {split: len(chosen) for split, chosen in splits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.prepare_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--articles", type=user_path, required=True, help="JSONL file, {title, text} a line")
    parser.add_argument("--held-out", type=int, required=True, help="articles kept for evaluation: the last ones")
    parser.add_argument("--out", type=user_path, required=True, help="folder of the parquet files")
    options = parser.parse_args()
    try:
        sizes = prepare(options.articles, options.held_out, options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{options.out}: {sizes['train']} rows to train on, {sizes['validation']} held out")


if __name__ == "__main__":
    main()
