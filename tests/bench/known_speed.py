"""Part A of `bench_conversations`: an engine and a user of known speed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import random
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rollout.chat import Chat
from rollout.conversation import Rollout, RolloutPlan, User
from rollout.engines.interface import Sampled, SampleRequest
from rollout.engines.sharing import SharedEngine
from rollout.roles.client import LLMClient
from rollout.roles.prompting import as_data, visible
from rollout.roles.simulator import STOP_SIGNAL, LLMUser, UserTurn
from rollout.settings import EndpointSettings, RolloutSettings, UserSettings
from rollout.types import Conversation, Message, Scenario
from tests.bench.common import scenarios
from tests.bench.figures import Figures, medians
from tests.fake_endpoint import MODEL, Answer, FakeEndpoint, says

STEP_S, SLOTS = 0.010, 64
REPLY_TOKENS = (16, 48)
LATENCY_MEAN_S, LATENCY_SIGMA, P_SATISFIED = 1.0, 0.8, 1 / 8
PLAN = RolloutPlan(group_size=8, continuations=2, temperature=1.0, run_seed=1, step=1)


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
