"""Whole conversations over servers that fail in every way: nothing is lost, made up, or scored for a fault.

User and judge are real clients on a real server. The policy is a stand-in whose tokens are bytes, so that
text which is no Unicode cannot pass, as with a real tokenizer.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rewards.judge import Judge
from rewards.scoring import Scorer
from rewards.settings import RewardSettings
from rollout.conversation import Rollout, RolloutPlan
from rollout.engines.interface import Sampled, SampleRequest
from rollout.engines.sharing import SharedEngine
from rollout.roles.client import LLMClient
from rollout.roles.simulator import LLMUser
from rollout.settings import EndpointSettings, RolloutSettings
from rollout.types import Conversation, Message, Reply, Scenario, Score
from tests.fake_endpoint import MODEL, Answer, FakeEndpoint, error, says

WEIGHTS = {"bleu_score": 1.0, "interactivity": 1.0}
REFERENCE = "Tea is old. It came from China."


class ByteChat:
    """Messages to bytes and back."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return list("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())

    def next_prompt_ids(self, history: Sequence[Message], reply: Reply, said: Message) -> list[int]:
        return self.prompt_ids([*history, said])

    def as_sampled(self, reply: Reply) -> Message:
        return {"role": "assistant", "content": reply.text}

    def read(self, token_ids: Sequence[int]) -> tuple[str, str]:
        return "", bytes(token_ids).decode()

    def without_control_tokens(self, text: str) -> str:
        return text

    def num_tokens(self, text: str) -> int:
        return len(text.encode())


class ByteEngine:
    """Answers with a sentence that tells its seed."""

    max_context_tokens = 1_000_000

    def __init__(self) -> None:
        self._queue: list[tuple[int, SampleRequest]] = []

    def enter_thread(self) -> None: ...

    def add(self, key: int, request: SampleRequest) -> None:
        self._queue.append((key, request))

    def step(self) -> list[tuple[int, Sampled]]:
        queue, self._queue = self._queue, []
        replies = [(key, f"Draft {request.seed}. Which tea?".encode()) for key, request in queue]
        return [(key, Sampled(tuple(reply), (-1.0,) * len(reply), "stop")) for key, reply in replies]

    def abort_all(self) -> None:
        self._queue.clear()

    def close(self) -> None: ...


class Hostile:
    """Answers one request in two; the others it fails in all the ways there are."""

    FAULTS = {
        "http_500": 0.10,
        "http_429": 0.10,
        "timeout": 0.05,
        "not_json": 0.05,
        "connection": 0.06,
        "cut": 0.03,
        "schema": 0.06,
        "endless": 0.02,
        "huge": 0.03,
    }
    MESSAGES = (
        "Add a part about green tea.",
        "添加一段关于绿茶的内容。",
        "أضف فقرة عن الشاي الأخضر.",
        "हरी चाय के बारे में जोड़ें। 🫖",
        'Null \x00, bell \x07, half \ud83e a pair, <|end|> {braces} $5 \\n "quotes"',
    )

    def __init__(self, seed: int):
        self.given: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> Answer:
        fields = body["response_format"]["json_schema"]["schema"]["properties"]
        with self._lock:
            (fault,) = self._random.choices([*self.FAULTS, "none"], [*self.FAULTS.values(), 0.5])
            pick = self._random.random()
            self.given[fault] += 1
        return self._faulty(fault, pick, fields) if fault != "none" else self.good(pick, fields)

    def good(self, pick: float, fields: dict[str, Any]) -> Answer:
        if "document" in fields:
            return says({"document": REFERENCE})
        if "asks" in fields:
            return says({name: {"reason": "because", "score": 0.75} for name in fields})
        text = json.dumps({"thought": 3, "reply": self.MESSAGES[int(pick * len(self.MESSAGES))]})
        return Answer(text if pick < 0.7 else f"```\n{text[:-1]},")  # as well as it can write JSON

    def _faulty(self, fault: str, pick: float, fields: dict[str, Any]) -> Answer:
        text = json.dumps({name: "x" for name in fields})
        choices = {
            "http_500": [error(500), error(503, "<html>" * 30_000)],
            "http_429": [error(429, retry_after="0.01")],
            "timeout": [Answer("{}", delay_s=60.0)],
            "not_json": [Answer(text[: len(text) // 2]), Answer(raw=b"{oops"), Answer("No."), Answer("{" * 200_000)],
            "connection": [Answer(text, fault="reset"), Answer(text, fault="broken_off")],
            "cut": [Answer(text, finish_reason="length")],
            "schema": [says({}), says({name: [] for name in fields}), says({name: None for name in fields})],
            "endless": [Answer(fault="endless")],
            "huge": [says({name: "z" * 200_000 for name in fields})],
        }[fault]
        return choices[int(pick * len(choices))]


@dataclass
class Play:
    """The parts of a run that talk to servers, for one step after another."""

    user: LLMClient
    judge: LLMClient
    rollout: Rollout
    scorer: Scorer

    async def step(self, scenarios: Sequence[Scenario], plan: RolloutPlan) -> list[tuple[Conversation, Score]]:
        """Every conversation that was handed over, with its score."""
        ended: list[Conversation] = []

        def on_end(conversation: Conversation) -> None:
            ended.append(conversation)
            self.scorer.submit(conversation)

        played = await self.rollout.play(scenarios, plan, on_end)
        scores = await self.scorer.finish()
        assert Counter(map(id, ended)) == Counter(id(talk) for group in played for sample in group for talk in sample)
        return [(talk, scores[talk.scenario.scenario_id, talk.sample, talk.continuation]) for talk in ended]

    async def close(self) -> None:
        await self.user.close()
        await self.judge.close()
        self.rollout.engine.close()


def play_over(
    *endpoints: FakeEndpoint, weights: Mapping[str, float] = WEIGHTS, max_user_turns: int = 2, **settings: Any
) -> Play:
    addresses = [one.base_url for one in endpoints]
    endpoint = EndpointSettings(base_url=addresses, model=MODEL, timeout_s=1.0, **settings)
    rewards = RewardSettings(weights=weights, judge=endpoint)
    conversations = RolloutSettings(user={"endpoint": endpoint}, max_user_turns=max_user_turns, max_assistant_turns=3)
    user, judge = (LLMClient(role, endpoint, backoff_s=0.001) for role in ("user", "judge"))
    engine, chat = SharedEngine(ByteEngine()), ByteChat()
    return Play(
        user,
        judge,
        Rollout(conversations, engine, chat, LLMUser(user, conversations.user)),
        Scorer(rewards, chat, Judge(judge, rewards), max_reply_tokens=100),
    )


def scenarios_of(number: int) -> list[Scenario]:
    opening = {"role": "user", "content": "Help me write about tea."}
    return [
        Scenario(f"s/{index}", (opening,), f"goal {index}", "writing", REFERENCE, "test", index)
        for index in range(number)
    ]


def check_conversation(talk: Conversation, score: Score) -> None:
    """It ended in an orderly way, its turns are whole, and its scores are those that judges without faults give."""
    assert talk.ended in ("turn_limit", "simulator_failed") and not talk.first_reply_cut
    assert (talk.ended == "simulator_failed") == (talk.failure is not None) == ("user" in score.failures)
    roles = [message["role"] for message in talk.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    for message in talk.new_messages:
        assert message["content"].strip() and message["content"].isprintable() and message["content"].encode()
    if talk.ended == "turn_limit":
        assert len(talk.replies) == 3
        assert set(score.values) | set(score.failures) == {"bleu_score", "interactivity"}
    expected = {"bleu_score": 1.0, "interactivity": 0.75}
    assert score.values == {name: pytest.approx(expected[name]) for name in score.values}
    json.dumps([talk.messages, talk.failure, dict(score.failures)], ensure_ascii=False).encode()  # a trace can hold it


def test_sixty_conversations_over_servers_that_fail_in_every_way():
    hostile = Hostile(seed=1), Hostile(seed=2)

    async def play(one: FakeEndpoint, other: FakeEndpoint) -> tuple[Play, list[tuple[Conversation, Score]]]:
        parts = play_over(one, other, max_concurrency=8)
        dies = asyncio.create_task(die_and_come_back(other))
        ended = await parts.step(scenarios_of(5), RolloutPlan(4, 3, 1.0, run_seed=1, step=1))
        await dies
        await parts.close()
        return parts, ended

    async def die_and_come_back(endpoint: FakeEndpoint) -> None:
        while len(endpoint.requests) < 50:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(endpoint.stop)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(endpoint.start)

    with FakeEndpoint(hostile[0]) as one, FakeEndpoint(hostile[1]) as other:
        parts, ended = asyncio.run(play(one, other))

    keys = {(talk.scenario.row, talk.sample, talk.continuation) for talk, _ in ended}
    assert len(ended) == 60 and keys == {(s, g, c) for s in range(5) for g in range(4) for c in range(3)}
    for talk, score in ended:
        check_conversation(talk, score)

    valid = [score for _, score in ended if score.valid]
    assert 0 < len(valid) < 60  # with half of all calls failing, three tries are not enough for everyone
    for reward in rewards_of_replies(parts.scorer, ended):
        assert not reward.valid or reward.total == pytest.approx(1.75)  # 1.0 + 0.75, and never less for a fault

    user, judge = parts.user.counts, parts.judge.counts
    assert sum(user.failures.values()) == sum(talk.ended == "simulator_failed" for talk, _ in ended)
    assert sum(judge.failures.values()) == sum(len(s.failures) for talk, s in ended if talk.ended == "turn_limit")
    assert judge.calls == 2 * sum(talk.ended == "turn_limit" for talk, _ in ended)
    assert user.calls == sum(len(talk.replies) - 1 + (talk.ended == "simulator_failed") for talk, _ in ended)
    for usage in (user, judge):
        assert usage.retries == sum(usage.errors.values()) - sum(usage.failures.values()) > 0
        assert usage.prompt_tokens > 7 * (usage.calls - sum(usage.failures.values()))  # unusable answers cost too
    # Every fault was counted: by its kind, as a timeout where the machine was slow, or cut off by a server's death.
    errors, given = Counter(user.errors) + Counter(judge.errors), hostile[0].given + hostile[1].given
    http_5xx = errors["http_500"] + errors["http_503"]
    assert 0 < errors["http_429"] <= given["http_429"] and 0 < http_5xx <= given["http_500"]
    assert 0 < errors["cut"] <= given["cut"] and 0 < errors["not_json"] <= given["not_json"]
    assert 0 < errors["schema"] <= given["schema"] + given["huge"]
    assert errors["timeout"] > 0 and errors["connection"] > 0
    assert sum(errors.values()) >= sum(given.values()) - given["none"]


def rewards_of_replies(scorer: Scorer, ended: Sequence[tuple[Conversation, Score]]) -> list[Any]:
    replies: dict[tuple[int, int], list[tuple[Conversation, Score]]] = {}
    for talk, score in ended:
        replies.setdefault((talk.scenario.row, talk.sample), []).append((talk, score))
    return [scorer.reward(*zip(*continuations, strict=True)) for continuations in replies.values()]


def blocks() -> int:
    """Memory blocks that Python objects live in, without those of its own caches that fill slowly."""
    sys._clear_type_cache()
    gc.collect()
    return sys.getallocatedblocks()


def blocks_kept(warm_up_steps: int, steps: int) -> int:
    """Memory blocks that `steps` steps left behind, three calls each, some of them failing."""
    hostile = Hostile(seed=3)
    requests = itertools.count()

    def mostly_good(body: dict[str, Any]) -> Answer:
        faults = [error(500, "no" * 10_000), Answer("{" * 10_000), Answer("x", fault="reset"), says({})]
        fields = body["response_format"]["json_schema"]["schema"]["properties"]
        number = next(requests)
        if "document" in fields:
            return says({"document": f"The {number}th draft."})
        return faults[number // 10 % 4] if number % 10 == 9 else hostile.good(number % 7 / 7, fields)

    async def play(endpoint: FakeEndpoint) -> int:
        parts = play_over(endpoint, weights={"interactivity": 1.0, "bleu_score": 1.0}, max_user_turns=1)
        for step in range(warm_up_steps + steps):
            if step == warm_up_steps:
                before = blocks()
            await parts.step(scenarios_of(1), RolloutPlan(1, 1, 1.0, run_seed=1, step=step))
            endpoint.requests.clear()
            endpoint.keys.clear()
        kept = blocks() - before
        await parts.close()
        return kept

    with FakeEndpoint(mostly_good) as endpoint:
        return asyncio.run(play(endpoint))


def test_memory_stays_flat_over_hundreds_of_steps():
    # Keeping one message, score or exception of each step would be several blocks a step: half a block is none.
    assert blocks_kept(warm_up_steps=50, steps=500) < 250
