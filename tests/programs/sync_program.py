"""Policy and engine side by side: do they hold, and keep, the same weights?

torchrun --nproc_per_node N -m tests.programs.sync_program MODEL STAGE ENGINE OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from grpo.config import DeepSpeedSettings, ModelSettings, OptimizerSettings
from grpo.model.packing import TrainSequence, pack, plan_micro_batches
from grpo.model.policy import Policy
from grpo.model.sync import push_weights
from grpo.ranks import Ranks, end_process
from rollout.chat import Chat
from rollout.engines.choice import build_engine
from rollout.engines.interface import SampleRequest
from rollout.settings import EngineSettings

TEMPERATURE = 0.8


class Forgetful:
    """An engine that never receives some weights."""

    def __init__(self, engine, forgets):
        self._engine, self._forgets = engine, forgets
        self.name = engine.name

    def push_weights(self, weights):
        self._engine.push_weights((name, weight) for name, weight in weights if name not in self._forgets)

    def fingerprint(self):
        return self._engine.fingerprint()


def sample(engine, chat, seeds):
    prompt = tuple(chat.prompt_ids([{"role": "user", "content": "hello what about the bees ?"}]))
    for seed in seeds:
        engine.add(seed, SampleRequest(prompt, 24, TEMPERATURE, seed))
    done = {}
    while len(done) < len(seeds):
        done |= dict(engine.step())
    return [
        TrainSequence(prompt, done[seed].token_ids, done[seed].logprobs, number, advantage=1.0, weight=1 / 100)
        for number, seed in enumerate(seeds)
    ]


def gap(policy, sequences):
    (rows,) = plan_micro_batches(sequences, max_tokens=4096)
    batch = pack(rows)
    return (policy.frozen_logprobs(batch) - batch.sampler_logprobs_N).abs().max().item()


def train_on(policy, sequences):
    (rows,) = plan_micro_batches(sequences, max_tokens=4096)
    batch = pack(rows)
    logprobs, _ = policy.logprobs(batch)
    policy.backward(-(logprobs * batch.weights_N).sum(), is_last=True)
    policy.step()


def main() -> None:
    model, stage, kind, out = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    ranks = Ranks.join()
    chat = Chat.load(model)
    policy = Policy(
        ModelSettings(path=model, dtype="float32"),
        OptimizerSettings(lr=3e-3, max_grad_norm=1.0),
        DeepSpeedSettings(stage=stage),
        temperature=TEMPERATURE,
        total_steps=100,
        ranks=ranks,
    )
    settings = EngineSettings(kind=kind, max_context_tokens=128, extra={"max_logprobs": 7})
    engine = build_engine(settings, model, torch.float32, ranks.device, chat.stop_ids)
    results = {"engine": engine.name}
    if kind == "vllm":
        assert engine._llm.llm_engine.model_config.max_logprobs == 7
    push_weights(policy.weights(), engine)
    sequences = sample(engine, chat, range(8))
    results["same_seed_same_text"] = [s.response_ids for s in sample(engine, chat, [3, 9])][0] == sequences[
        3
    ].response_ids
    results["gap_before"] = gap(policy, sequences)
    results["past_the_end"] = [s.response_ids for s in sequences if set(s.response_ids[:-1]) & set(chat.stop_ids)]
    results["ends"] = sorted({s.response_ids[-1] for s in sequences} & set(chat.stop_ids))

    train_on(policy, sequences)
    results["gap_without_push"] = gap(policy, sample(engine, chat, range(8)))
    for forgets in ({"model.layers.1.mlp.down_proj.weight"}, {"lm_head.weight"}):
        train_on(policy, sequences)
        engine.sleep()  # deep on a GPU, where waking loads nothing back
        try:
            push_weights(policy.weights(), Forgetful(engine, forgets))
            results[f"forgot {next(iter(forgets))}"] = "not noticed"
        except RuntimeError as error:
            results[f"forgot {next(iter(forgets))}"] = str(error)
    engine.sleep()
    push_weights(policy.weights(), engine)
    for key in range(8):  # an engine that still ran some of these would refuse the push, or give them back below
        engine.add(1000 + key, SampleRequest(sequences[0].prompt_ids, 64, TEMPERATURE, seed=key))
    engine.step()
    engine.abort_all()
    push_weights(policy.weights(), engine)
    results["gap_after"] = gap(policy, sample(engine, chat, range(8)))
    shares = ranks.gather(results)
    if ranks.is_main:
        out.write_text(json.dumps(shares))
    engine.close()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
