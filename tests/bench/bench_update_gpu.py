"""Packed rows against padded ones on a GPU: one update's forward and backward passes in bfloat16.

    python -m tests.bench.bench_update_gpu

Needs torch, transformers and this repository, no model and no network: the model has Qwen3-0.6B's shape and random
weights, with the norms and MLPs of a training run (`grpo.model.recompute`), the token ids are made up. It takes under five
minutes; without a GPU it says so and exits with 0. The last line is one JSON object with every figure.

packed          `update.share_prompt: true`: replies share their prompt's row
padded          `update.share_prompt: false`: one reply in a row, with the same attention
padded_sdpa     the same rows with the model's own masks and PyTorch's scaled dot-product attention, as trainers
                without packing run them

seconds         of forward and backward over all micro-batches (at most 16,384 tokens each, padding included), median
                of three after a warm-up; no optimizer step, no reference model
tokens          in all rows, without padding: each prompt once, or as often as it has replies
peak            largest GPU memory allocated meanwhile, GiB; above weights: less the weights and their gradients
share of peak   operations of the matrix products (6 per weight of the body and token, 6 per weight of the head and
                response token) per second, over the card's rate in `torch.mm` of 8,192 x 8,192 bfloat16 matrices.
                Attention scores and recomputation do the card more work than is counted, padding is not counted.
useful          the same with the packed tokens' operations in all: what the update needs at least
mean log-prob   over response tokens; the bench fails where they differ by more than 0.02 nats: they compute the same
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo.model.attention import PackedAttention, choose_attention
from grpo.model.logprobs import LogprobModel
from grpo.model.packing import PackedBatch, TrainSequence, pack, plan_micro_batches
from grpo.model.recompute import keep_less
from tests.bench.common import Shape

MODEL = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
)
MAX_TOKENS = 16384
UPDATES = 3
MATRIX_SIZE = 8192


SHAPES = {
    "short": Shape(16, 256, 8, 128),
    "long_prompt": Shape(4, 4096, 8, 256),
    "long_replies": Shape(8, 256, 8, 1024),
}


def fixed_sequences(shape: Shape) -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(5)

    def draw(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(MODEL.vocab_size, (number,), generator=generator).tolist())

    weight = 1 / shape.response_tokens
    nothing = (0.0,) * shape.reply_tokens
    prompts = [draw(shape.prompt_tokens) for _ in range(shape.prompts)]
    return [
        TrainSequence(
            prompts[number // shape.group_size],
            draw(shape.reply_tokens),
            nothing,
            number=number,
            advantage=(-1.0) ** number,
            weight=weight,
        )
        for number in range(shape.num_replies)
    ]


def matrix_rate(device: torch.device) -> float:
    """Floating-point operations per second of the best of twenty bfloat16 products."""
    a = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, a)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * MATRIX_SIZE**3 / best


def update(model: LogprobModel, batches: list[PackedBatch]) -> float:
    """Accumulates the gradient of the policy loss at a ratio of one; the mean log-prob of the response tokens."""
    total, num_tokens = torch.zeros((), device=batches[0].target_N.device), 0
    for batch in batches:
        logprobs_N, _ = model(batch)
        (-batch.weights_N * batch.advantages_N * (logprobs_N - logprobs_N.detach()).exp()).sum().backward()
        total += logprobs_N.detach().sum()
        num_tokens += logprobs_N.numel()
    return total.item() / num_tokens


def measure(
    causal_lm: Qwen3ForCausalLM, attention: PackedAttention, sequences: list[TrainSequence], share_prompt: bool
) -> dict[str, Any]:
    causal_lm.set_attn_implementation(attention.implementation)
    model = LogprobModel(causal_lm, attention, temperature=1.0)
    planned = plan_micro_batches(
        sequences,
        max_tokens=MAX_TOKENS,
        share_prompt=share_prompt,
        pair_cost=attention.pair_cost,
        multiple=attention.row_multiple,
    )
    batches = [pack(rows, attention.row_multiple).to(causal_lm.device) for rows in planned]
    held = 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    seconds = []
    for _ in range(1 + UPDATES):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        mean_logprob = update(model, batches)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated()
    return {
        "seconds": statistics.median(seconds[1:]),
        "tokens": sum(len(row) for rows in planned for row in rows),
        "micro_batches": len(batches),
        "peak_gib": peak / 2**30,
        "peak_above_weights_gib": (peak - held) / 2**30,
        "mean_logprob": mean_logprob,
    }


def main() -> None:
    if not torch.cuda.is_available():
        print("bench_update_gpu: no GPU here, nothing to measure")
        sys.exit(0)
    device = torch.device("cuda")
    torch.manual_seed(0)
    with device:
        causal_lm = Qwen3ForCausalLM._from_config(MODEL, dtype=torch.bfloat16, attn_implementation="sdpa")
    causal_lm.train()
    keep_less(causal_lm)
    attention = choose_attention(MODEL, device)
    own_attention = PackedAttention("own", 0.0, "sdpa", "the model's own masks")
    head = causal_lm.get_output_embeddings().weight.numel()  # tied, so the embedding is counted with it
    body = sum(parameter.numel() for parameter in causal_lm.parameters()) - head
    rate = matrix_rate(device)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "matrix_tflops": rate / 1e12,
        "shapes": {},
    }
    print(f"{result['gpu']}: torch.mm {rate / 1e12:.0f} TFLOP/s in bfloat16; {attention.reason}")
    for name, shape in SHAPES.items():
        sequences = fixed_sequences(shape)
        head_operations = 6 * head * shape.response_tokens
        modes = {
            "packed": measure(causal_lm, attention, sequences, True),
            "padded": measure(causal_lm, attention, sequences, False),
            "padded_sdpa": measure(causal_lm, own_attention, sequences, False),
        }
        print(f"\n{name}: {shape.prompts} prompts of {shape.prompt_tokens}", end=" tokens, ")
        print(f"{shape.group_size} replies of {shape.reply_tokens}")
        for mode, figures in modes.items():
            for share, tokens in (("share_of_peak", figures["tokens"]), ("useful", modes["packed"]["tokens"])):
                figures[share] = (6 * body * tokens + head_operations) / figures["seconds"] / rate
            print(
                f"  {mode:<11} {figures['seconds']:7.3f} s, {figures['tokens']} tokens, peak "
                f"{figures['peak_gib']:.1f} GiB (above weights {figures['peak_above_weights_gib']:.1f}), "
                f"share of peak {figures['share_of_peak']:.0%}, useful {figures['useful']:.0%}, "
                f"mean log-prob {figures['mean_logprob']:.4f}"
            )
        found = [figures["mean_logprob"] for figures in modes.values()]
        if not max(found) - min(found) <= 0.02:
            sys.exit(f"{name}: the mean log-probs differ, so it was not the same work")
        packed, ratios = modes["packed"], {}
        for mode in ("padded", "padded_sdpa"):
            speed = modes[mode]["seconds"] / packed["seconds"]
            memory = packed["peak_above_weights_gib"] / modes[mode]["peak_above_weights_gib"]
            print(f"  packed against {mode}: {speed:.1f}x as fast, {memory:.2f} of the memory above the weights")
            ratios |= {f"speed_over_{mode}": speed, f"memory_of_{mode}": memory}
        result["shapes"][name] = modes | ratios
    print(json.dumps(result))


if __name__ == "__main__":
    main()
