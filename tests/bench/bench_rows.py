"""What a long row costs under a dense mask, against `PackedAttention.pair_cost`, which counts operations.

    python -m tests.bench.bench_rows [THREADS]

Forward and backward passes of single rows of SmolLM2-135M's shape with random weights, 256 to 2,304 tokens, three of
each, the lengths by turns. Least squares over the medians gives seconds = a·L + b·L²; `measured` is b/a ÷ `pair_cost`.
A minute on two cores; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaModel

from grpo.model.attention import choose_attention
from grpo.model.packing import TrainSequence, pack, plan_micro_batches

SHAPE = LlamaConfig(
    vocab_size=128,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=9,
    num_key_value_heads=3,
)
LENGTHS = (256, 512, 1024, 1536, 2304)


def seconds(model: LlamaModel, length: int) -> float:
    """Of one row: a prompt of 64 tokens and 8 replies that fill it."""
    reply = (length - 64) // 8
    siblings = [
        TrainSequence((1,) * 64, (2,) * reply, (0.0,) * reply, number, advantage=1.0, weight=1.0) for number in range(8)
    ]
    batch = pack(plan_micro_batches(siblings, max_tokens=length)[0])
    start = time.perf_counter()
    states = model(
        input_ids=batch.input_ids_RL, attention_mask=batch.attention_mask(), position_ids=batch.position_ids_RL
    ).last_hidden_state
    states.sum().backward()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = LlamaModel._from_config(SHAPE, attn_implementation="sdpa")
    seconds(model, LENGTHS[0])
    runs = [[seconds(model, length) for length in LENGTHS] for _ in range(3)]
    medians = [statistics.median(column) for column in zip(*runs, strict=True)]
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    table = torch.stack([lengths, lengths.square()], 1)
    # Relative errors count alike at every length.
    scale = torch.tensor(medians, dtype=torch.float64)[:, None]
    a, b = torch.linalg.lstsq(table / scale, torch.ones_like(scale)).solution[:, 0].tolist()
    pair_cost = choose_attention(SHAPE, torch.device("cpu")).pair_cost
    result = {"seconds": dict(zip(LENGTHS, medians, strict=True)), "a": a, "b": b, "measured": b / a / pair_cost}
    print(f"seconds = {a * 1e3:.3f} ms x L + {b * 1e6:.4f} us x L^2; {result['measured']:.1f} x pair_cost")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
