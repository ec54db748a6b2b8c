"""Part B of `bench_conversations`: conversations on vLLM, and the same prompts in one plain batch."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollout.chat import Chat
from rollout.conversation import Rollout, RolloutPlan
from rollout.cores import leave_cores
from rollout.engines.interface import Sampled, SampleRequest
from rollout.engines.sharing import SharedEngine
from rollout.engines.vllm import VLLMEngine, _sampled
from rollout.roles.simulator import UserTurn
from rollout.settings import EngineSettings, RolloutSettings
from rollout.types import Message, Scenario
from tests.bench.common import scenarios
from tests.bench.figures import Figures, medians

if TYPE_CHECKING:
    from vllm import SamplingParams

VLLM_CONVERSATIONS, VLLM_REPLY_TOKENS, VLLM_PAIRS = 64, 32, 3


class Endless(VLLMEngine):
    """vLLM whose replies all run to their limit and count as ended, so that conversations go on."""

    def __init__(self, model: Path):
        settings = EngineSettings(kind="vllm", max_context_tokens=2048)
        super().__init__(settings, model, torch.float32, torch.device("cpu"), stop_ids=())
        self.done: dict[int, tuple[SampleRequest, Sampled | None]] = {}

    def add(self, key: int, request: SampleRequest) -> None:
        self.done[key] = request, None
        super().add(key, request)

    def _params(self, request: SampleRequest) -> SamplingParams:
        params = super()._params(request)
        params.ignore_eos = True
        return params

    def step(self) -> list[tuple[int, Sampled]]:
        finished = [(key, replace(sampled, finish_reason="stop")) for key, sampled in super().step()]
        self.done |= {key: (self.done[key][0], sampled) for key, sampled in finished}
        return finished

    def generate(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """All of them in one plain batch, on the calling thread, which leaves the cores to the engine's afterwards."""
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        outputs = self._llm.generate(prompts, [self._params(request) for request in requests], use_tqdm=False)
        leave_cores()
        return [_sampled(output) for output in outputs]

    def forget(self) -> None:
        self.done.clear()
        assert self._llm.reset_prefix_cache()


class PromptUser:
    """Answers at once."""

    async def answer(self, scenario: Scenario, messages: Sequence[Message]) -> UserTurn:
        return UserTurn("Thank you. Please make it shorter, and say it in a more cheerful way.", satisfied=False)


def converse(engine: Endless, shared: SharedEngine, chat: Chat) -> tuple[Figures, list[tuple[SampleRequest, Sampled]]]:
    engine.forget()
    settings = RolloutSettings(
        max_reply_tokens=VLLM_REPLY_TOKENS, max_user_turns=1, max_assistant_turns=2, user={"kind": "scripted"}
    )
    plan = RolloutPlan(group_size=8, continuations=1, temperature=1.0, run_seed=1, step=1)
    prompts = scenarios(VLLM_CONVERSATIONS // plan.group_size)
    started = time.perf_counter()
    asyncio.run(Rollout(settings, shared, chat, PromptUser()).play(prompts, plan, lambda _: None))
    seconds = time.perf_counter() - started
    done = [engine.done[key] for key in sorted(engine.done)]
    return rates([sampled for _, sampled in done], [request for request, _ in done], seconds), done


def rates(replies: Sequence[Sampled], requests: Sequence[SampleRequest], seconds: float) -> Figures:
    num_tokens = sum(len(reply.token_ids) for reply in replies)
    num_cached = sum(reply.num_cached_tokens for reply in replies)
    return {
        "seconds": seconds,
        "num_tokens": num_tokens,
        "tokens_per_s": num_tokens / seconds,
        "prefix_hit_rate": num_cached / sum(len(request.prompt_ids) for request in requests),
    }


def best_hit_rate(done: Sequence[tuple[SampleRequest, Sampled]]) -> float:
    """Share of prompt tokens whose whole beginning, itself included, was in the engine before."""
    known: set[int] = set()
    num_found = 0
    for request, sampled in done:
        beginning = 0
        for position, token in enumerate(request.prompt_ids + sampled.token_ids):
            beginning = hash((beginning, token))
            num_found += position < len(request.prompt_ids) and beginning in known
            known.add(beginning)
    return num_found / sum(len(request.prompt_ids) for request, _ in done)


def bench_vllm(chat: Chat, model: Path) -> Figures:
    engine = Endless(model)
    shared = SharedEngine(engine)
    _, done = converse(engine, shared, chat)  # warms up, and gives the plain batch its prompts
    requests = [request for request, _ in done]
    ours, plain, same = [], [], []
    for _ in range(VLLM_PAIRS):
        figures, done = converse(engine, shared, chat)
        ours.append(figures)
        engine.forget()
        started = time.perf_counter()
        replies = engine.generate(requests)
        plain.append(rates(replies, requests, time.perf_counter() - started))
        ours_by_request = {(request.prompt_ids, request.seed): sampled.token_ids for request, sampled in done}
        same += [
            ours_by_request.get((request.prompt_ids, request.seed)) == reply.token_ids
            for request, reply in zip(requests, replies, strict=True)
        ]
    shared.close()
    result: Figures = {"ours": medians(ours), "plain": medians(plain)}
    result["ratio"] = result["ours"]["tokens_per_s"] / result["plain"]["tokens_per_s"]
    result["prefix_hit_rate_best"] = best_hit_rate(done)
    result["same_tokens"] = statistics.mean(same)
    result["all_tokens_per_s"] = {
        name: [run["tokens_per_s"] for run in runs] for name, runs in [("ours", ours), ("plain", plain)]
    }
    return result
