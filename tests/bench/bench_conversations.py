"""Seconds that conversations take, against their longest one and against plain batches. Linux, CPU.

    python -m tests.bench.bench_conversations [--rounds N] [--no-vllm]

It takes about seven minutes on two cores; nothing else should run beside it.

Part A, `driver`: our driver (`Rollout.play` over `SharedEngine`) with an engine and a user of known speed. The engine's
step sleeps 10 ms and gives every running reply one token, up to 64 replies at once, first come, first served. Replies
have 16 to 48 tokens. The user is the simulated user of a run (`LLMUser`, with its prompt and its client) at an HTTP
server, a process of its own, whose answers take a log-normal time (mean 1 s, sigma 0.8) and end the conversation one
time in eight; both are drawn from what was said so far, so that every way of driving does the same work, and the bench
fails where it did not. Chat template and tokenizer are the real ones. Nothing is judged. 16 prompts x 8 replies x 2
continuations = 256 conversations.

wall_s             from the first request to the last conversation's end; median over the rounds.
critical_path_s    the longest single conversation had it an engine to itself: its tokens x 10 ms + its user's seconds,
                   without those of HTTP.
over_critical_path wall_s / critical_path_s (goal: at most 1.15).
by_turns_s         the same conversations by turns: every user waits until all have a reply, every reply until all users
                   have answered.
speedup            by_turns_s / wall_s (goal: at least 2, at up to 8 user turns; at the 2 of the published recipe, shown
                   beside it, the slowest answer of a turn is a smaller part of the whole).
slots_full_s       seconds the engine would need for all tokens with every slot taken: tokens x 10 ms / 64.
gap_ms             from the end of a step to the start of the next, where replies were running: what the driver costs.

Part B, `vllm`: vLLM with SmolLM2-135M-Instruct in float32, 64 conversations of two replies of 32 tokens (their ends are
ignored, so that all have the same length) and a user who answers at once, against `LLM.generate` with the same prompts,
seeds and limits handed over all at once, and its prefix cache equally empty. By turns, three pairs.

tokens_per_s       sampled tokens / seconds; medians. `ratio` is ours / plain (goal: at least 0.95).
prefix_hit_rate    share of prompt tokens found in the prefix cache; `prefix_hit_rate_best` is what no order could
                   exceed: every prompt's longest common start with anything read or written before.
same_tokens        share of replies with the same tokens in both (float32 rounding may differ with the batch).

The last line is one JSON object with every figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from grpo.ranks import end_process
from rollout.chat import Chat
from tests.bench.figures import Figures
from tests.bench.known_speed import bench_driver, user_server
from tests.bench.plain_batch import VLLM_CONVERSATIONS, bench_vllm

ROOT = Path(__file__).resolve().parents[2]
USER_TURNS = (8, 2)
OVER_CRITICAL_GOAL, SPEEDUP_GOAL, RATIO_GOAL = 1.15, 2.0, 0.95


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.bench_conversations", description="How fast conversations are played."
    )
    parser.add_argument("--rounds", type=int, default=3, help="of part A's conversations [3]")
    parser.add_argument("--no-vllm", action="store_true", help="leave part B out")
    parser.add_argument("--model", type=Path, default=ROOT / "models/SmolLM2-135M-Instruct", help="model folder")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def reached(ok: bool) -> str:
    return "reached" if ok else "MISSED"


def main() -> None:
    options = parse()
    if not options.model.is_dir():
        print(f"there is no model folder {options.model}: bash launch/quickstart.sh makes it", file=sys.stderr)
        sys.exit(2)
    chat = Chat.load(options.model)
    result: Figures = {"threads": torch.get_num_threads(), "driver": {}}
    with user_server() as address:
        for turns in USER_TURNS:
            result["driver"][f"user_turns_{turns}"] = bench_driver(chat, address, turns, options.rounds)
    for turns in USER_TURNS:
        known = result["driver"][f"user_turns_{turns}"]
        goals = f" (goal {OVER_CRITICAL_GOAL}: {reached(known['over_critical_path'] <= OVER_CRITICAL_GOAL)})"
        print(f"{known['conversations']} conversations of up to {turns} user turns: {known['wall_s']:.2f} s")
        print(f"  {known['over_critical_path']:.3f} x the longest one's {known['critical_path_s']:.2f} s{goals}")
        goals = f" (goal {SPEEDUP_GOAL}: {reached(known['speedup'] >= SPEEDUP_GOAL)})" if turns == USER_TURNS[0] else ""
        print(f"  {known['speedup']:.2f} x as fast as by turns, {known['by_turns_s']:.2f} s{goals}")
        print(f"  {known['gap_ms']:.3f} ms between steps", flush=True)
    if not options.no_vllm:
        vllm = result["vllm"] = bench_vllm(chat, options.model)
        ours, plain = vllm["ours"], vllm["plain"]
        print(f"vLLM, {VLLM_CONVERSATIONS} conversations: {ours['tokens_per_s']:.1f} tokens/s", end=", ")
        print(f"plain batch {plain['tokens_per_s']:.1f}: {vllm['ratio']:.3f}", end=" ")
        print(f"(goal {RATIO_GOAL}: {reached(vllm['ratio'] >= RATIO_GOAL)})")
        print(
            f"  prefix hits {ours['prefix_hit_rate']:.0%} of prompt tokens, plain {plain['prefix_hit_rate']:.0%}",
            end="",
        )
        print(f", at best {vllm['prefix_hit_rate_best']:.0%}; same tokens {vllm['same_tokens']:.0%}")
    print(json.dumps(result), flush=True)
    end_process()


if __name__ == "__main__":
    main()
