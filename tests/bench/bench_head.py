"""Peak memory of the head at a vocabulary of 151,936: log-probs by recomputed blocks against whole logits. Linux, CPU.

    python -m tests.bench.bench_head

Forward and backward of the head alone (hidden size 1,024, tied to nothing, float32) over N response tokens, each case
in a process of its own. `peak` is the resident memory at its highest less that before, GiB: blocks hold
some of the logits (`grpo.model.logprobs`) and the head's gradient (0.58 GiB), whole logits all of them and that gradient. The
last line is JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import torch
from torch import nn

from grpo.model.attention import PackedAttention
from grpo.model.logprobs import LogprobModel
from grpo.model.packing import TrainSequence, pack, plan_micro_batches
from tests.bench.common import Meter

VOCABULARY, WIDTH = 151_936, 1024


class Head(nn.Module):
    """A causal language model that is all head."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def base_model(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        states_RLD = torch.randn(*input_ids.shape, WIDTH, generator=torch.Generator().manual_seed(1))
        return SimpleNamespace(last_hidden_state=states_RLD.requires_grad_())

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def measure(kind: str, num_tokens: int) -> float:
    model = LogprobModel(Head(), PackedAttention("own", 0.0, "sdpa", ""), temperature=1.0)
    reply = TrainSequence((0,), (0,) * num_tokens, (0.0,) * num_tokens, number=0, advantage=1.0, weight=1.0)
    batch = pack(plan_micro_batches([reply], max_tokens=num_tokens + 1)[0])
    meter = Meter()
    meter.start(trim=True)
    if kind == "blocks":
        logprobs_N, _ = model(batch)
    else:
        states_ND = model.causal_lm.base_model(batch.input_ids_RL).last_hidden_state.flatten(0, 1)[batch.predictor_N]
        table_NV = model.causal_lm.head(states_ND).log_softmax(-1)
        logprobs_N = table_NV.gather(-1, batch.target_N[:, None])[:, 0]
    logprobs_N.sum().backward()
    meter.stop()
    return meter.last["peak_above_state_gib"]


def main() -> None:
    if len(sys.argv) > 1:
        print(measure(sys.argv[1], int(sys.argv[2])))
        return
    result = {}
    for num_tokens in (256, 1024, 2048):
        for kind in ("blocks", "whole"):
            command = [sys.executable, "-m", "tests.bench.bench_head", kind, str(num_tokens)]
            peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
            result[f"{kind}/{num_tokens}"] = peak
            print(f"{num_tokens:>5} response tokens, {kind:<6}: peak {peak:.2f} GiB", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
