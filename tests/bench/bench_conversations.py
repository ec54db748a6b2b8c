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

tokens_per_s       sampled tokens / seconds; medians. `ratio` is ours / plain (goal: at least 0.9).
prefix_hit_rate    share of prompt tokens found in the prefix cache; `prefix_hit_rate_best` is what no order could
                   exceed: every prompt's longest common start with anything read or written before.
same_tokens        share of replies with the same tokens in both (float32 rounding may differ with the batch).

The last line is one JSON object with every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import random
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo.ranks import end_process
from rollout.chat import Chat
from rollout.conversation import Rollout, RolloutPlan, User
from rollout.engine import Sampled, SampleRequest, SharedEngine
from rollout.engine_vllm import VLLMEngine, _sampled
from rollout.llm_client import LLMClient
from rollout.prompting import as_data, visible
from rollout.settings import EndpointSettings, EngineSettings, RolloutSettings, UserSettings
from rollout.simulator import STOP_SIGNAL, LLMUser, UserTurn
from rollout.types import Conversation, Message, Scenario
from tests.fake_endpoint import MODEL, Answer, FakeEndpoint, says

if TYPE_CHECKING:
    from vllm import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
STEP_S, SLOTS = 0.010, 64
REPLY_TOKENS = (16, 48)
LATENCY_MEAN_S, LATENCY_SIGMA, P_SATISFIED = 1.0, 0.8, 1 / 8
PLAN = RolloutPlan(group_size=8, continuations=2, temperature=1.0, run_seed=1, step=1)
USER_TURNS = (8, 2)
VLLM_CONVERSATIONS, VLLM_REPLY_TOKENS, VLLM_PAIRS = 64, 32, 3
OVER_CRITICAL_GOAL, SPEEDUP_GOAL, RATIO_GOAL = 1.15, 2.0, 0.9

Figures = dict[str, Any]


def scenarios(number: int) -> list[Scenario]:
    subjects = "bees bread bridges clocks comets dyes ferries glass kites lace maps mills owls paper salt tides".split()
    return [
        Scenario(
            scenario_id=f"bench/{row}",
            messages=(
                {"role": "system", "content": "You help people to write. Ask what they want before you write it."},
                {"role": "user", "content": f"I need some help with a short piece about {subjects[row % 16]}."},
            ),
            goal="",
            task_desc="",
            reference=None,
            data_source="bench",
            row=row,
        )
        for row in range(number)
    ]


# ── part A: an engine and users of known speed ──


class KnownEngine:
    """Every step takes `STEP_S` and gives each of at most `SLOTS` running replies a token."""

    name = "known"
    max_context_tokens = 8192

    def __init__(self, vocabulary: range):
        self._vocabulary = vocabulary
        self._queue: deque[tuple[int, SampleRequest]] = deque()
        self._running: dict[int, list[int]] = {}
        """Tokens still to come, last first."""
        self._replies: dict[int, tuple[int, ...]] = {}
        self.gaps_s: list[float] = []
        self._ended_at = 0.0

    def enter_thread(self) -> None: ...

    def add(self, key: int, request: SampleRequest) -> None:
        self._queue.append((key, request))

    def step(self) -> list[tuple[int, Sampled]]:
        started = time.perf_counter()
        if self._running:
            self.gaps_s.append(started - self._ended_at)
        while self._queue and len(self._running) < SLOTS:
            key, request = self._queue.popleft()
            draw = random.Random(request.seed)
            self._replies[key] = tuple(draw.choices(self._vocabulary, k=draw.randint(*REPLY_TOKENS)))
            self._running[key] = list(self._replies[key])
        for left in self._running.values():
            left.pop()
        finished = [key for key, left in self._running.items() if not left]
        for key in finished:
            del self._running[key]
        time.sleep(max(0.0, started + STEP_S - time.perf_counter()))
        self._ended_at = time.perf_counter()
        return [(key, Sampled(ids, (0.0,) * len(ids), "stop")) for key in finished for ids in [self._replies.pop(key)]]

    def abort_all(self) -> None:
        self._queue.clear()
        self._running.clear()

    def close(self) -> None: ...


def draw(chat: str) -> tuple[float, str]:
    """(seconds, message) of the user who was shown `chat`."""
    random_of_chat = random.Random(chat)
    seconds = random_of_chat.lognormvariate(math.log(LATENCY_MEAN_S) - LATENCY_SIGMA**2 / 2, LATENCY_SIGMA)
    ends = random_of_chat.random() < P_SATISFIED
    return (
        seconds,
        f"Please go on, and mention the number {random_of_chat.randrange(1000)}. {STOP_SIGNAL if ends else ''}",
    )


def answer(body: dict[str, Any]) -> Answer:
    (chat,) = re.findall(r"<chat>\n(.*)\n</chat>", body["messages"][0]["content"])
    seconds, message = draw(chat)
    return says({"current_answer": "", "thought": "", "reply": message}, delay_s=seconds)


def serve(ready: Connection) -> None:
    """A process that is the user's server, until `ready` is closed."""
    with FakeEndpoint(answer) as endpoint:
        ready.send(endpoint.base_url)
        with contextlib.suppress(EOFError):
            ready.recv()


@contextlib.contextmanager
def user_server() -> Iterator[str]:
    """Its address."""
    own, others = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(others,), daemon=True)
    process.start()
    others.close()
    yield own.recv()
    own.close()
    process.join()


class ByTurns:
    """A user who lets nobody go on before all have come as far."""

    def __init__(self, user: User, num_conversations: int):
        self._user, self._live = user, num_conversations
        self._waiting: list[asyncio.Future[None]] = []

    async def answer(self, scenario: Scenario, messages: Sequence[Message]) -> UserTurn:
        await self._all_here()
        turn = await self._user.answer(scenario, messages)
        await self._all_here()
        return turn

    def on_end(self, _: Conversation) -> None:
        self._live -= 1
        self._open()

    async def _all_here(self) -> None:
        self._waiting.append(asyncio.get_running_loop().create_future())
        here = self._waiting[-1]
        self._open()
        await here

    def _open(self) -> None:
        if len(self._waiting) == self._live:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                future.set_result(None)


def alone_s(conversation: Conversation) -> float:
    """Seconds of a conversation that has the engine to itself."""
    tokens = sum(len(reply.token_ids) for reply in conversation.replies)
    asked = [end for end, message in enumerate(conversation.messages, start=1) if message["role"] == "assistant"]
    if conversation.ended != "user_satisfied":
        asked.pop()  # nobody answered the last reply
    return tokens * STEP_S + sum(draw(as_data(visible(conversation.messages[:end])))[0] for end in asked)


def play_known(chat: Chat, address: str, max_user_turns: int, by_turns: bool) -> tuple[Figures, list[Conversation]]:
    endpoint = EndpointSettings(base_url=address, model=MODEL, max_concurrency=512)
    prompts, client = scenarios(16), LLMClient("user", endpoint)
    user = LLMUser(client, UserSettings(kind="llm", endpoint=endpoint))
    engine = SharedEngine(KnownEngine(range(1000, 20000)))
    settings = RolloutSettings(
        max_user_turns=max_user_turns, max_assistant_turns=max_user_turns + 1, user={"kind": "scripted"}
    )
    played_by, on_end = user, lambda conversation: None
    if by_turns:
        played_by = ByTurns(user, len(prompts) * PLAN.group_size * PLAN.continuations)
        on_end = played_by.on_end
    started = time.perf_counter()
    played = asyncio.run(play(Rollout(settings, engine, chat, played_by), prompts, client, on_end))
    wall_s = time.perf_counter() - started
    if client.counts.errors:
        sys.exit(f"the user's server failed: {dict(client.counts.errors)}")
    conversations = [talk for group in played for sample in group for talk in sample]
    num_tokens = engine.num_tokens
    engine.close()
    return {
        "wall_s": wall_s,
        "critical_path_s": max(map(alone_s, conversations)),
        "slots_full_s": num_tokens * STEP_S / SLOTS,
        "num_tokens": num_tokens,
        "gap_ms": statistics.mean(engine.engine.gaps_s) * 1000,
    }, conversations


async def play(
    rollout: Rollout, prompts: Sequence[Scenario], client: LLMClient, on_end: Callable[[Conversation], None]
) -> list[list[list[Conversation]]]:
    played = await rollout.play(prompts, PLAN, on_end)
    await client.close()
    return played


def bench_driver(chat: Chat, address: str, max_user_turns: int, rounds: int) -> Figures:
    runs = [play_known(chat, address, max_user_turns, by_turns=False) for _ in range(rounds)]
    batched, batched_conversations = play_known(chat, address, max_user_turns, by_turns=True)
    if any(conversations != batched_conversations for _, conversations in runs):
        sys.exit(f"{max_user_turns} user turns: the conversations differ, so it was not the same work")
    result = medians([run for run, _ in runs])
    result |= {"conversations": len(batched_conversations), "by_turns_s": batched["wall_s"]}
    result["over_critical_path"] = result["wall_s"] / result["critical_path_s"]
    result["speedup"] = result["by_turns_s"] / result["wall_s"]
    result["all_wall_s"] = [run["wall_s"] for run, _ in runs]
    return result


# ── part B: vLLM ──


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
        """All of them in one plain batch."""
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        outputs = self._llm.generate(prompts, [self._params(request) for request in requests], use_tqdm=False)
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


def medians(runs: Sequence[Figures]) -> Figures:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


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
