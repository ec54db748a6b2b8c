"""A slow server makes a slow run, not a failed one: how much it is asked, what waits, what is given up."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from grpo.config_file import load_config
from rollout.roles.client import LLMClient, LLMError
from rollout.roles.overload import LEAST, START, Limit, Places, Pulse
from rollout.settings import EndpointSettings
from tests.asking import GOOD, QUESTION, SCHEMA, ask, client_of
from tests.fake_endpoint import FakeEndpoint, error
from tests.slow_server import SlowServer, in_virtual_time

RECIPE = load_config(Path("configs/medium_qwen3_4b.yaml"))
RANKS = 8


def limit_of(most: int = 64, timeout_s: float = 100.0) -> Limit:
    return Limit(most, timeout_s)


def grow(limit: Limit, answers: int, seconds: float = 1.0) -> int:
    for _ in range(answers):
        limit.answered(seconds, limit.value)
    return limit.value


def test_the_limit_grows_by_one_for_each_answer_in_time_up_to_the_most():
    limit = limit_of()
    assert limit.value == START == 32
    assert grow(limit, 5, seconds=25.0) == 37
    assert grow(limit, 5, seconds=25.1) == 37  # more than a quarter of the time limit: as many as now, no more
    assert grow(limit, 500) == 64
    assert limit_of(most=3).value == 3


def test_answers_while_fewer_are_in_flight_than_allowed_show_nothing():
    limit = limit_of()
    for _ in range(100):
        limit.answered(1.0, 31)
    assert limit.value == 32


def test_late_answers_take_one_each_but_leave_eight():
    limit = limit_of()
    assert grow(limit, 20, seconds=50.0) == 32
    assert grow(limit, 5, seconds=50.1) == 27
    assert grow(limit, 50, seconds=50.1) == LEAST == 8
    limit = limit_of(most=3)
    assert grow(limit, 5, seconds=50.1) == 3


def test_overload_halves_the_limit_once_for_all_that_were_in_flight():
    limit = limit_of()
    limit.cut(sent_at=1.0, now=10.0)
    for _ in range(31):
        limit.cut(sent_at=2.0, now=11.0)  # sent before the limit was cut
    assert limit.value == 16
    for sent_at in range(10, 20):
        limit.cut(sent_at=sent_at, now=sent_at + 1.0)
    assert limit.value == 1  # never 0: somebody must find out when the server is back
    assert grow(limit, 1, seconds=99.0) == 1


def test_after_a_cut_the_limit_grows_by_one_more_each_round():
    limit = limit_of(most=8)
    limit.cut(sent_at=0.0, now=1.0)
    assert limit.value == 4
    # Steps of (1 + rounds) / limit: 1.25 / 4, 1.48 / 4.31, 1.70 / 4.66, 1.90 / 5.02, 2.09 / 5.40, ...
    assert [grow(limit, 1) for _ in range(6)] == [4, 4, 5, 5, 5, 6]
    limit = limit_of()
    for sent_at in (0.0, 2.0, 4.0, 6.0, 8.0, 10.0):
        limit.cut(sent_at, sent_at + 1.0)
    assert limit.value == 1 and grow(limit, 12) >= 8 and grow(limit, 300) == 64  # soon back after it was away


def test_a_question_is_to_blame_for_its_timeout_where_all_others_were_answered_soon():
    pulse = Pulse(timeout_s=100.0)
    assert pulse.slow_since(0.0)  # nobody was answered
    pulse.answered(sent_at=10.0, now=20.0)
    assert not pulse.slow_since(5.0) and pulse.slow_since(20.5)
    pulse.answered(sent_at=10.0, now=70.0)  # after 60 of 100 s
    assert pulse.slow_since(5.0) and pulse.slow_since(65.0)
    assert pulse.silent_s(now=75.0) == 5.0
    pulse.asked_anew(now=500.0)  # what lay between was no silence: nobody asked
    assert pulse.silent_s(now=501.0) == 1.0


def test_places_are_given_by_order_of_coming_and_their_number_may_change():
    async def play() -> list[int]:
        places, came = Places(2), []

        async def visit(number: int) -> None:
            await places.take()
            came.append(number)

        visits = [asyncio.create_task(visit(number)) for number in range(6)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert came == [0, 1]
        visits[2].cancel()
        places.resize(3)
        await asyncio.sleep(0.01)
        assert came == [0, 1, 3]
        places.resize(1)
        for _ in range(2):
            places.give_back()
        await asyncio.sleep(0.01)
        assert came == [0, 1, 3]  # three had places of which one is left
        places.give_back()
        await asyncio.sleep(0.01)
        assert came == [0, 1, 3, 4]
        visits[5].cancel()
        return came

    asyncio.run(play())


def play(server: SlowServer, num_questions: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    """All that the clients of eight ranks found, with the recipe's settings of the judge, in virtual time."""
    settings = RECIPE.rewards.judge.model_copy(update=changes)

    async def ask_all() -> dict[str, Any]:
        clients = [LLMClient("judge", settings) for _ in range(RANKS)]
        clock = asyncio.get_running_loop().time
        started = clock()
        outcomes = await asyncio.gather(
            *(client.ask(QUESTION, SCHEMA) for client in clients for _ in range(num_questions // RANKS)),
            return_exceptions=True,
        )
        return {
            "failures": [outcome for outcome in outcomes if isinstance(outcome, LLMError)],
            "share": server.needed_s / (clock() - started),
            "errors": sum((Counter(client.counts.errors) for client in clients), Counter()),
        }

    server.stand_in(monkeypatch)
    return in_virtual_time(ask_all())


def test_eight_ranks_get_what_a_server_can_serve(monkeypatch):
    """32 at once, 2 s each: 2,000 questions take 125 s at best."""
    server = SlowServer(slots=32, seconds=2.0)
    outcome = play(server, 2000, monkeypatch)
    assert not outcome["failures"] and outcome["share"] >= 0.9
    assert server.asked == 2000  # none was given up and asked again


def test_eight_ranks_get_what_a_server_can_serve_that_slows_to_a_fifth(monkeypatch):
    server = SlowServer(slots=32, seconds=2.0, slow_down_after=1000, factor=5.0)
    outcome = play(server, 2000, monkeypatch)
    assert not outcome["failures"] and outcome["share"] >= 0.9


def test_a_server_for_which_the_time_limit_is_too_short_costs_time_and_no_answers(monkeypatch):
    server = SlowServer(slots=32, seconds=2.0, slow_down_after=500, factor=5.0)
    outcome = play(server, 1000, monkeypatch, timeout_s=15.0, max_concurrency=64, max_attempts=3)
    assert outcome["errors"]["timeout"] > 0 and not outcome["failures"]
    assert outcome["share"] > 0.3


def test_a_server_that_refuses_what_it_has_no_room_for_costs_no_answers(monkeypatch):
    server = SlowServer(slots=32, seconds=2.0, refuses=True)
    outcome = play(server, 1000, monkeypatch, max_attempts=1)
    assert outcome["errors"]["http_503"] > 0 and not outcome["failures"]
    assert outcome["errors"]["http_503"] < 300  # it is not besieged
    assert outcome["share"] > 0.6


def test_a_server_that_is_away_for_a_while_is_waited_for_and_one_that_stays_away_is_told_of(monkeypatch, caplog):
    async def goes_away(seconds: float) -> tuple[list[Any], float]:
        server = SlowServer(slots=8, seconds=2.0)
        server.stand_in(monkeypatch)
        clock, client = asyncio.get_running_loop().time, LLMClient("judge", RECIPE.rewards.judge)
        started = clock()
        asked = [asyncio.create_task(client.ask(QUESTION, SCHEMA)) for _ in range(40)]
        await asyncio.sleep(3)
        server.gone = True
        await asyncio.sleep(seconds)
        server.gone = False
        return await asyncio.gather(*asked, return_exceptions=True), clock() - started

    outcomes, took_s = in_virtual_time(goes_away(200.0))
    assert outcomes == [{"score": 0.5}] * 40 and 203 <= round(took_s) < 230
    assert caplog.text.count("nothing was answered by rewards.judge for") == 1
    outcomes, took_s = in_virtual_time(goes_away(5000.0))
    lost = [outcome for outcome in outcomes if isinstance(outcome, LLMError)]
    patience_s = RECIPE.rewards.judge.patience_s
    assert len(lost) > 20 and {error.kind for error in lost} == {"connection"}
    silences_s = [float(re.search(r"nothing was answered by rewards.judge for ([\d.]+) s", str(one))[1]) for one in lost]
    assert patience_s == 900 <= min(silences_s) and max(silences_s) < 1300


def test_a_question_that_hangs_alone_uses_up_its_tries_while_others_are_answered(monkeypatch):
    server, client = SlowServer(slots=8, seconds=2.0), LLMClient("judge", RECIPE.rewards.judge)
    hangs = [{"role": "user", "content": SlowServer.HANGS}]

    async def play() -> tuple[LLMError, float]:
        async def others() -> None:
            while True:
                await client.ask(QUESTION, SCHEMA)

        busy, clock = asyncio.create_task(others()), asyncio.get_running_loop().time
        with pytest.raises(LLMError) as raised:
            await client.ask(hangs, SCHEMA)
        busy.cancel()
        return raised.value, clock()

    server.stand_in(monkeypatch)
    failure, took_s = in_virtual_time(play())
    assert failure.kind == "timeout" and client.counts.errors == {"timeout": 3}
    assert took_s == pytest.approx(900, abs=10)  # three tries of 300 s


def test_a_question_that_hangs_when_nobody_else_asks_is_given_up_too(monkeypatch):
    server, client = SlowServer(slots=8, seconds=2.0), LLMClient("judge", RECIPE.rewards.judge)

    async def play() -> float:
        await client.ask(QUESTION, SCHEMA)
        with pytest.raises(LLMError, match="nothing was answered by rewards.judge for 900"):
            await client.ask([{"role": "user", "content": SlowServer.HANGS}], SCHEMA)
        return asyncio.get_running_loop().time()

    server.stand_in(monkeypatch)
    assert in_virtual_time(play()) == pytest.approx(900, abs=20)  # three tries, as long as its patience


def test_refusals_use_up_no_tries_while_others_are_answered():
    with FakeEndpoint(GOOD, *[error(503)] * 6, GOOD) as endpoint:
        client = client_of(endpoint, max_attempts=1)
        assert len(ask(client, times=4)) == 4
    assert client.counts.errors == {"http_503": 6} and client.counts.failures == {}
    assert client.counts.retries == 6


HALF = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"


@pytest.mark.parametrize("sends", [b"", HALF])
@pytest.mark.parametrize("how", ["timeout", "cancelled"])
def test_a_server_sees_at_once_that_nobody_waits_for_its_answer_any_longer(sends: bytes, how: str):
    async def play() -> float:
        asked, left = asyncio.Event(), asyncio.Event()

        async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            writer.write(sends)
            asked.set()
            assert await reader.read() == b""  # until the connection is closed
            left.set()
            writer.close()

        server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        address, timeout_s = f"http://127.0.0.1:{port}/v1", 0.5 if how == "timeout" else 60.0
        settings = EndpointSettings(base_url=address, model="m", max_attempts=1, timeout_s=timeout_s)
        client = LLMClient("judge", settings, backoff_s=0.001)
        question = asyncio.create_task(client.ask(QUESTION, SCHEMA))
        await asyncio.wait_for(asked.wait(), 30)
        if how == "cancelled":
            question.cancel()
        started = time.monotonic()
        await asyncio.wait_for(left.wait(), 30)  # the client lives on, and so would its connections
        took_s = time.monotonic() - started
        question.cancel()
        await asyncio.gather(question, return_exceptions=True)
        await client.close()
        server.close()
        return took_s

    assert asyncio.run(play()) < 30


def test_the_recipes_time_limit_is_far_above_what_its_judge_takes_at_the_issues_pace():
    judge, rollout = RECIPE.rewards.judge, RECIPE.rollout
    judgements = rollout.prompts_per_step * rollout.group_size * rollout.continuations * 2
    in_flight, a_second = RANKS * judge.max_concurrency, 32 / 2.0
    assert (judgements, in_flight) == (768, 256)
    assert in_flight / a_second == 16 and 5 * in_flight / a_second < judge.timeout_s / 2
