"""Loads models as training does, at every ZeRO stage, and compares them with plain `from_pretrained` up to 4,096 tokens.

    torchrun --nproc_per_node 1 -m tests.programs.fidelity_program FOLDER FAMILY[=STAGE/DTYPE[/checkpointed|/narrow]] ...

Writes {"FAMILY/CASE/policy": result, ...} to FOLDER/results.json. A result lists the constants that differ from the
plain model's, and by stretch of the sequence (`STRETCHES`) the mean |log-prob difference| from the plain model of the
same dtype, nats; FAMILY/DTYPE/rounding is the plain model's own distance from float32. `narrow` loads the policy
as DeepSpeed would by itself, unchecked; `refusal` is then what the check says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from grpo.config import DeepSpeedSettings, ModelSettings, OptimizerSettings
from grpo.model import policy, zero
from grpo.model.constants import Constants, check_constants, constants
from grpo.model.packing import PackedBatch, TrainSequence, pack, plan_micro_batches
from grpo.model.policy import Policy
from grpo.model.reference import Reference
from grpo.ranks import Ranks, end_process

LENGTH, VOCABULARY = 4096, 64
STRETCHES = [(0, 512), (512, 1024), (1024, 2048), (2048, 4095)]
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": LENGTH,
    "initializer_range": 0.25,  # so that attention is sharp, and feels where its keys stand
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}


def config_of(family: str) -> PretrainedConfig:
    if family == "llama3":
        return LlamaConfig(**SMALL, rope_parameters=LLAMA3)
    if family == "yarn":
        return Qwen2Config(**SMALL, rope_parameters=YARN)
    if family == "qwen2":
        return Qwen2Config(**SMALL, tie_word_embeddings=True)
    return {"llama": LlamaConfig, "qwen3": Qwen3Config, "mistral": MistralConfig}[family](**SMALL)


def make(family: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    model.save_pretrained(folder / family)
    return folder / family


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))


def batch() -> PackedBatch:
    ids = tuple(tokens().tolist())
    sequence = TrainSequence(ids[:1], ids[1:], (0.0,) * (LENGTH - 1), 0, advantage=1.0, weight=1 / LENGTH)
    (rows,) = plan_micro_batches([sequence], max_tokens=LENGTH)
    return pack(rows)


@dataclass(frozen=True)
class Plain:
    """What from_pretrained loads, and what it answers."""

    constants: Constants
    logprobs_N: torch.Tensor

    @classmethod
    @torch.no_grad()
    def load(cls, folder: Path, dtype: str) -> Plain:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        logits_NV = model(tokens()[None]).logits[0, :-1].float()
        return cls(constants(model), logits_NV.log_softmax(-1).gather(-1, tokens()[1:, None])[:, 0])

    def compared(self, causal_lm: torch.nn.Module, logprobs_N: torch.Tensor) -> dict[str, object]:
        found = constants(causal_lm)
        return {
            "compared": list(self.constants),
            "differ": [name for name, value in self.constants.items() if not same(found[name], value)],
            "gaps": by_stretch(logprobs_N, self.logprobs_N),
        }


def by_stretch(one_N: torch.Tensor, other_N: torch.Tensor) -> list[float]:
    return [(one_N - other_N)[start:end].abs().mean().item() for start, end in STRETCHES]


def same(one: torch.Tensor | float, other: torch.Tensor | float) -> bool:
    return (one.dtype == other.dtype and one.equal(other)) if isinstance(one, torch.Tensor) else one == other


def run(folder: Path, stage: int, dtype: str, variant: str, plain: Plain, ranks: Ranks) -> dict[str, object]:
    settings = ModelSettings(path=folder, dtype=dtype, gradient_checkpointing=variant == "checkpointed")
    sharded = DeepSpeedSettings(stage=stage)
    trained = Policy(settings, OptimizerSettings(), sharded, temperature=1.0, total_steps=1, ranks=ranks)
    logprobs_N, _ = trained.logprobs(batch())  # as in the update: what backward needs is kept, or computed again
    results = {"policy": plain.compared(trained.causal_lm, logprobs_N.detach())}
    if variant == "narrow":
        try:
            check_constants(trained.causal_lm, plain.constants)
        except RuntimeError as error:
            results["refusal"] = str(error)
    elif stage in (0, 3):
        reference = Reference(settings, sharded, temperature=1.0, ranks=ranks)
        results["reference"] = plain.compared(reference.causal_lm, reference.logprobs(batch()))
    return results


@contextmanager
def as_by_itself() -> Iterator[None]:
    """As DeepSpeed would load it, unchecked."""
    with mock.patch.object(zero, "_keeping_wide", lambda *_: {}), mock.patch.object(policy, "check_constants"):
        yield


def main() -> None:
    folder, ranks, results = Path(sys.argv[1]), Ranks.join(), {}
    for asked in sys.argv[2:]:
        family, cases = asked.split("=")
        path = make(family, folder)
        plain = {dtype: Plain.load(path, dtype) for dtype in ("float32", "bfloat16")}
        rounding = by_stretch(plain["bfloat16"].logprobs_N, plain["float32"].logprobs_N)
        results[f"{family}/bfloat16/rounding"] = rounding
        for case in cases.split(","):
            stage, dtype, *variant = case.split("/")
            with as_by_itself() if variant == ["narrow"] else nullcontext():
                found = run(path, int(stage), dtype, "".join(variant), plain[dtype], ranks)
            results |= {f"{family}/{case}/{part}": result for part, result in found.items()}
    if ranks.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
