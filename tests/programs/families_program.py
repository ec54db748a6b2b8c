"""One training step of a tiny model of each family: do sampler, trainer and saved folder agree?

    torchrun --nproc_per_node N -m tests.programs.families_program OUT ENGINE STAGE FAMILY ...

A family that is refused, or fails, leaves the error's text in place of results.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from grpo.config import DeepSpeedSettings, ModelSettings, OptimizerSettings
from grpo.model.packing import TrainSequence, pack, plan_micro_batches
from grpo.model.policy import Policy
from grpo.model.sync import push_weights
from grpo.ranks import Ranks, end_process
from grpo.run.model_writer import ModelWriter
from rollout.chat import Chat
from rollout.engines.choice import build_engine
from rollout.engines.interface import Engine, SampleRequest
from rollout.model_folder import check_trainable, read_model
from rollout.settings import EngineSettings
from tests.families import make_family

CONTEXT, NEW_TOKENS, TEMPERATURE = 128, 24, 0.8
PROMPTS = ["hello", "what do you say about the bees on the roof ? they hum and keep warm in winter ."]


def sample(engine: Engine, chat: Chat) -> list[TrainSequence]:
    """Four replies to each prompt, in one batch: prompts of different lengths, replies that end at their own time."""
    prompts = [tuple(chat.prompt_ids([{"role": "user", "content": text}])) for text in PROMPTS for _ in range(4)]
    for number, prompt in enumerate(prompts):
        engine.add(number, SampleRequest(prompt, NEW_TOKENS - number, TEMPERATURE, seed=number))
    done: dict[int, Any] = {}
    while len(done) < len(prompts):
        done |= dict(engine.step())
    return [
        TrainSequence(prompt, done[number].token_ids, done[number].logprobs, number, advantage=1.0, weight=1 / 100)
        for number, prompt in enumerate(prompts)
    ]


def batches(policy: Policy, sequences: list[TrainSequence]):
    rows = plan_micro_batches(sequences, max_tokens=4096, share_prompt=policy.attention.shares_rows)
    return [pack(part, policy.attention.row_multiple) for part in rows]


def gap(policy: Policy, sequences: list[TrainSequence]) -> float:
    """Mean, as the limit of a run is."""
    gaps = [policy.frozen_logprobs(batch) - batch.sampler_logprobs_N for batch in batches(policy, sequences)]
    return torch.cat(gaps).abs().mean().item()


def train_on(policy: Policy, sequences: list[TrainSequence]) -> None:
    micro_batches = batches(policy, sequences)
    for batch in micro_batches:
        logprobs_N, _ = policy.logprobs(batch)
        policy.backward(-(logprobs_N * batch.weights_N).sum(), is_last=batch is micro_batches[-1])
    policy.step()


@torch.no_grad()
def plain_gap(folder: Path, sequences: list[TrainSequence]) -> float:
    """Of the sampler's log-probs from those of the whole saved model, a sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    gaps = []
    for sequence in sequences:
        ids_1L = torch.tensor([sequence.prompt_ids + sequence.response_ids])
        start = len(sequence.prompt_ids)
        logprobs_NV = (model(input_ids=ids_1L).logits[0, start - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
        chosen_N = logprobs_NV.gather(-1, ids_1L[0, start:, None])[:, 0]
        gaps.append(chosen_N - torch.tensor(sequence.sampler_logprobs))
    return torch.cat(gaps).abs().mean().item()


def stored_names(folder: Path) -> list[str]:
    names = []
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            names += weights.keys()
    return sorted(names)


def step(family: str, folder: Path, kind: str, stage: int, ranks: Ranks) -> tuple[dict[str, Any], Engine]:
    model = folder / "model"
    if ranks.is_main:
        make_family(family, model)
    ranks.gather(None)
    check_trainable(read_model(model), CONTEXT)
    chat = Chat.load(model)
    policy = Policy(
        ModelSettings(path=model, dtype="float32"),
        OptimizerSettings(lr=3e-3),
        DeepSpeedSettings(stage=stage),
        temperature=TEMPERATURE,
        total_steps=10,
        ranks=ranks,
    )
    settings = EngineSettings(kind=kind, max_context_tokens=CONTEXT)
    engine = build_engine(settings, model, torch.float32, ranks.device, chat.stop_ids)
    push = lambda: push_weights(policy.weights(stored=engine.takes_stored), engine)  # noqa: E731
    push()
    before = sample(engine, chat)
    results: dict[str, Any] = {"rows": policy.attention.kind, "gap": gap(policy, before)}
    train_on(policy, before)
    results["gap_without_push"] = gap(policy, sample(engine, chat))
    push()
    after = sample(engine, chat)
    results["gap_after"] = gap(policy, after)
    ModelWriter(policy, model).save(folder / "trained")
    results["gap_saved"] = plain_gap(folder / "trained", after)
    results["same_names"] = stored_names(model) == stored_names(folder / "trained")
    handed = {name for name, _ in policy.weights(stored=True)}
    results["handed_names"] = handed >= {*stored_names(model)} and len(handed - {*stored_names(model)}) <= 1  # tied
    read_model(folder / "trained")
    results["same_ends"] = Chat.load(folder / "trained").stop_ids == chat.stop_ids
    return results, engine


def main() -> None:
    out, kind, stage, families = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    logging.disable_progress_bar()
    ranks = Ranks.join()
    results: dict[str, Any] = {}
    engines: list[Engine] = []  # closed last: the first that vLLM closes takes the process group along
    for family in families:
        try:
            results[family], engine = step(family, out / family.replace(" ", "-"), kind, stage, ranks)
            engines.append(engine)
        except Exception as error:
            traceback.print_exc()
            results[family] = f"{type(error).__name__}: {error}"
    if ranks.is_main:
        (out / "results.json").write_text(json.dumps(results, indent=1))
    for engine in engines:
        engine.close()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
