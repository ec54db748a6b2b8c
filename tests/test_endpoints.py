"""Where a role's calls go: the addresses that share them, how fast they are asked, and whom a secret reaches."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
import traceback
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from grpo.config_file import load_config
from rollout.roles import client as llm_client
from rollout.roles.check import check_role
from rollout.roles.client import LLMClient
from rollout.roles.endpoints import MOST_BYTES, REST_S, Address, Balancer, Clock, Pace
from rollout.roles.question import Question
from rollout.settings import EndpointSettings
from tests.asking import GOOD, QUESTION, SCHEMA, ask, client_of, failure_of
from tests.fake_endpoint import MODEL, Answer, FakeEndpoint, error, says

QUICKSTART = Path("configs/quickstart.yaml")


def balancer_of(number: int, max_in_flight: int = 8, clock: Clock = time.monotonic) -> Balancer:
    addresses = [Address(f"http://host-{index}/v1", None) for index in range(number)]
    return Balancer(addresses, max_in_flight, 100.0, clock)


def test_an_answer_that_would_fill_the_memory_is_not_read_to_its_end():
    with FakeEndpoint(Answer("x" * (MOST_BYTES + 1)), GOOD) as endpoint:
        client = client_of(endpoint)
        assert ask(client) == [{"score": 0.5}]
        assert client.counts.errors == {"connection": 1}
    with FakeEndpoint(Answer("x" * (MOST_BYTES + 1))) as endpoint:
        assert failure_of(client_of(endpoint, max_attempts=1)).detail == "the response is longer than 16777216 bytes"


def test_a_call_goes_to_the_least_busy_address_and_by_turns_where_they_are_equal():
    balancer = balancer_of(3)
    one, two, three = balancer.lanes
    assert [balancer.pick() for _ in range(4)] == [one, two, three, one]
    one.in_flight, two.in_flight, three.in_flight = 2, 1, 1
    assert [balancer.pick() for _ in range(3)] == [two, three, two]
    two.in_flight = three.in_flight = 3
    assert balancer.pick() is one


def test_a_retry_goes_elsewhere_even_to_a_busier_address():
    balancer = balancer_of(2)
    one, two = balancer.lanes
    two.in_flight = 5
    assert balancer.pick(failed_at=[one]) is two
    assert balancer.pick(failed_at=[one, two]) is one  # failed once each: the less busy one
    two.in_flight = 8
    assert balancer.pick(failed_at=[one]) is one  # the other has no room


def test_an_address_that_failed_comes_after_the_others_for_a_while():
    now = 100.0
    balancer = balancer_of(2, clock=lambda: now)
    one, two = balancer.lanes
    balancer.rest(one, 0.0)
    two.in_flight = 5
    assert balancer.pick() is two  # though the other is idle: it fails its calls at once
    now += REST_S
    assert balancer.pick() is one
    balancer.rest(one, quiet_s=8.0)
    now += REST_S
    assert balancer.pick() is two and balancer.pick(failed_at=[two]) is two and balancer.closed_s() == 0
    balancer.rest(two, quiet_s=1.0)
    assert balancer.closed_s() == 1.0  # of the first that opens; the other asked for 8 s, 5 of them are over


def test_the_calls_of_a_role_are_shared_and_limited_at_each_address():
    def slow(body: dict[str, Any]) -> Answer:
        return says({"score": 1}, delay_s=0.05)

    with FakeEndpoint(slow) as one, FakeEndpoint(slow) as two:
        client = client_of(one, base_url=[one.base_url, two.base_url], max_concurrency=3)
        assert len(ask(client, times=24)) == 24
        assert len(one.requests) + len(two.requests) == 24 and min(len(one.requests), len(two.requests)) > 4
        assert max(one.most_at_once, two.most_at_once) <= 3


def test_a_failing_address_costs_retries_and_no_answers(pauses: list[float]):
    with FakeEndpoint(error(429, retry_after="7")) as sick, FakeEndpoint(GOOD) as well:
        client = client_of(well, base_url=[sick.base_url, well.base_url], max_attempts=2)
        assert ask(client, times=16) == [{"score": 0.5}] * 16
        assert len(well.requests) == 16 and client.counts.errors == {"http_429": len(sick.requests)}
    assert max(pauses) < 1  # nobody waits for the one while the other is ready


@pytest.mark.parametrize("status", [401, 404])
def test_an_address_with_another_key_or_model_costs_no_answers(status: int):
    with FakeEndpoint(error(status)) as wrong, FakeEndpoint(GOOD) as well:
        client = client_of(well, base_url=[wrong.base_url, well.base_url], max_attempts=2)
        assert ask(client, times=16) == [{"score": 0.5}] * 16
        assert len(wrong.requests) == 8 and client.counts.retries == 8  # half of them, and then it comes last
    with FakeEndpoint(error(status)) as wrong, FakeEndpoint(error(status)) as too:
        client = client_of(wrong, base_url=[wrong.base_url, too.base_url], max_attempts=5)
        assert failure_of(client).kind == f"http_{status}" and client.counts.retries == 1  # no third would do better


def test_an_address_that_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout.roles.endpoints.REST_S", 0.0)
    with FakeEndpoint(GOOD) as one, FakeEndpoint(GOOD) as two:
        client = client_of(one, base_url=[one.base_url, two.base_url], max_attempts=2)
        one.stop()
        assert len(ask(client, times=8)) == 8
        assert (len(one.requests), len(two.requests)) == (0, 8)
        one.start()
        assert len(ask(client, times=8)) == 8
        assert len(one.requests) > 0 and set(client.counts.errors) == {"connection"}


def test_requests_are_spaced_evenly_where_there_is_a_limit_per_minute():
    now = 10.0
    pace = Pace(30, clock=lambda: now)  # one in 2 s
    assert [pace.take() for _ in range(3)] == [0.0, 2.0, 4.0]
    now += 5.0
    assert pace.take() == 1.0  # the fourth's turn is at 16
    now += 60.0
    assert [pace.take(), pace.take()] == [0.0, 2.0]  # turns that nobody took are lost: no burst afterwards
    assert [Pace(None).take() for _ in range(2)] == [0.0, 0.0]


def test_every_try_of_every_question_takes_its_turn(pauses: list[float], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm_client, "Pace", lambda per_minute: Pace(per_minute, clock=lambda: 0.0))
    with FakeEndpoint(error(500), GOOD) as endpoint:
        client = client_of(endpoint, max_requests_per_minute=60)
        ask(client, times=2)
    turns = [pause for pause in pauses if pause > 0.5]  # the rest is the pause before the retry
    assert turns == [1.0, 2.0]  # the first goes at once, the second a second later, then the retry


def test_quiet_that_is_asked_for_while_a_question_waits_for_its_turn_holds_for_it_too():
    asked_at = []

    def busy_at_first(body: dict[str, Any]) -> Answer:
        asked_at.append(time.monotonic())
        return says({"score": 1}) if len(asked_at) > 1 else error(429, retry_after="2")

    with FakeEndpoint(busy_at_first) as endpoint:
        client = client_of(endpoint, max_requests_per_minute=120, max_attempts=2)
        assert len(ask(client, times=3)) == 3  # the others' turns come after 0.5 and 1 s
    assert all(at - asked_at[0] > 1.9 for at in asked_at[1:])


def test_places_of_an_address_count_again_when_its_quiet_is_over():
    async def play() -> None:
        balancer = balancer_of(2)
        one, two = balancer.lanes
        async with AsyncExitStack() as places:
            balancer.rest(one, quiet_s=60.0)
            for _ in range(two.limit.value):
                await places.enter_async_context(balancer.place())
            balancer.make_room()  # as any call does that ends: of two's places none is left
            waiting = asyncio.ensure_future(balancer.place().__aenter__())
            await asyncio.sleep(0)
            assert not waiting.done()
            one.closed_until = 0.0
            balancer.make_room()
            await waiting

    asyncio.run(play())


def test_a_missing_key_variable_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    settings = EndpointSettings(base_url="http://127.0.0.1:1/v1", model=MODEL, api_key_env="JUDGE_KEY")
    with pytest.raises(ValueError, match=r"rewards\.judge\.api_key_env.*JUDGE_KEY is not set"):
        LLMClient("judge", settings)


ECHOES = {
    "an error": lambda secret: error(401, f"wrong: {secret}"),
    "an error worth a retry": lambda secret: error(500, f"wrong: {secret}"),
    "a page": lambda secret: Answer(raw=f"<html>{secret}".encode(), content_type="text/html"),
    "broken JSON": lambda secret: Answer(raw=f"{{{secret}".encode()),
    "an object without choices": lambda secret: Answer(raw=json.dumps({"error": secret}).encode()),
    "no object": lambda secret: Answer(secret),
    "an object that does not fit": lambda secret: says({"score": secret}),
    "an object that breaks off": lambda secret: Answer('{"score": "' + secret),
    "a cut answer": lambda secret: Answer(secret, finish_reason="length"),
    "a dropped connection": lambda secret: Answer(secret, fault="reset"),
}


@pytest.mark.parametrize("what", ECHOES)
@pytest.mark.parametrize("way", ["key", "password"])
def test_neither_key_nor_password_is_ever_shown(what: str, way: str, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "sk-it's+\"Planted\\key"  # quoted differently by URLs, JSON and Python
    in_url = quote(secret, safe="")
    in_header = base64.b64encode(f"me:{secret}".encode()).decode()
    monkeypatch.setenv("JUDGE_KEY", secret)
    told = ECHOES[what](f"{secret} {in_url} {in_header}")
    with FakeEndpoint(told, models=told) as endpoint:
        login = endpoint.base_url.replace("http://", f"http://me:{in_url}@")
        how = {"api_key_env": "JUDGE_KEY"} if way == "key" else {"base_url": login}
        client = client_of(endpoint, max_attempts=2, **how)
        failure = failure_of(client)
        checked = outcome_of_check(client.settings)
        assert set(endpoint.keys) == {f"Bearer {secret}" if way == "key" else f"Basic {in_header}"}
    shown = [str(failure), repr(failure), checked, repr(client), repr(client.counts), caplog.text]
    shown += [repr(client.settings), str(client.settings), client.settings.model_dump_json()]
    shown += traceback.format_exception(failure)
    secrets = {"Planted"} if way == "key" else {"Planted", in_header}
    assert not [text for text in shown for piece in secrets if piece in text]


def outcome_of_check(settings: EndpointSettings) -> str:
    """All that a check says: notes, or the error with its trace."""
    try:
        return str(check_role("judge", settings, Question(QUESTION, SCHEMA)))
    except ValueError as error:
        return "".join(traceback.format_exception(error))


def test_a_password_is_shown_by_no_mistake_in_the_settings(tmp_path: Path):
    mistakes = (
        "http://me:Planted@host:port/v1",
        "http://me:Plan/Planted@host/v1",
        "me:Planted@host/v1",
        "ftp://me:Planted@host/v1",
        ["http://me:Planted@host/v1", 7],
        ["http://me:Planted@host/v1"] * 2,
        {"http://me:Planted@host/v1": 1},
    )
    for mistake in mistakes:
        with pytest.raises(ValueError, match="base_url") as raised:
            EndpointSettings(base_url=mistake, model=MODEL)
        assert "Planted" not in str(raised.value)
        with pytest.raises(ValueError, match=r"rewards\.judge") as raised:
            load_config(QUICKSTART, [f"rewards.judge={json.dumps({'base_url': mistake, 'model': MODEL})}"])
        assert "Planted" not in "".join(traceback.format_exception(raised.value))
    broken = tmp_path / "broken.yaml"
    broken.write_text(f"rewards:\n  judge:\n    base_url: {mistakes[0]}: x\n", encoding="utf-8")
    for path, overrides in ((broken, []), (QUICKSTART, [f"rewards.judge.base_url=[{mistakes[0]}"])):
        with pytest.raises(ValueError, match="not valid YAML") as raised:
            load_config(path, overrides)
        assert "Planted" not in "".join(traceback.format_exception(raised.value))
    with pytest.raises(ValueError, match=r"rewards\.judge: 'http://\*\*\*@host/v1' alone will not do") as raised:
        load_config(QUICKSTART, [f"rewards.judge={mistakes[4][0]}"])
    assert "Planted" not in "".join(traceback.format_exception(raised.value))


def test_a_password_and_a_key_together_are_refused():
    with pytest.raises(ValueError, match="cannot both be sent"):
        EndpointSettings(base_url="http://me:secret@host/v1", model=MODEL, api_key_env="JUDGE_KEY")


def test_addresses_are_one_or_a_list_of_different_ones():
    config = load_config(QUICKSTART, ["rewards.judge={base_url: [http://a:1/v1, https://b/v1], model: m}"])
    assert config.rewards.judge.addresses == ("http://a:1/v1", "https://b/v1")
    assert EndpointSettings(base_url=" http://a/v1 ", model=MODEL).addresses == ("http://a/v1",)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ([], "give an address"),
        (["http://a/v1", "http://a/v1"], "in the list twice"),
        (["http://a/v1", "http://A/v1/"], "in the list twice"),
        (["http://a/v1", "http://me:secret@a/v1"], "in the list twice"),
        ("http://a:1/v1,http://b:1/v1", r"write several as a list, \[ADDRESS, ADDRESS\]"),
        ("http://a,b/v1", "write several as a list"),
        ("http://a/v1?key=1", r"leave out what follows the \? or #"),
        ("http://a/v1#x", r"leave out what follows the \? or #"),
    ],
)
def test_an_address_that_is_none_or_not_one_is_refused(wrong: str | list[str], complaint: str):
    with pytest.raises(ValueError, match=complaint) as error:
        EndpointSettings(base_url=wrong, model=MODEL)
    assert "secret" not in str(error.value)


def test_the_environments_openai_key_goes_to_no_other_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody")
    with FakeEndpoint(GOOD) as endpoint:
        ask(client_of(endpoint))
        assert "sk-of-somebody" not in endpoint.keys[0]


def test_a_key_with_a_newline_is_trimmed_and_one_typed_into_the_config_is_not_echoed(monkeypatch):
    monkeypatch.setenv("ROLE_KEY", "sk-secret\n")
    settings = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    LLMClient("judge", EndpointSettings(**settings, api_key_env="ROLE_KEY"))
    for variable, value in (("sk-secret", ""), ("BAD_KEY", "sk-s\u00e9cret")):
        monkeypatch.setenv("BAD_KEY", value or "x")
        with pytest.raises(ValueError) as error:
            LLMClient("judge", EndpointSettings(**settings, api_key_env=variable))
        assert "rewards.judge.api_key_env" in str(error.value) and "cret" not in str(error.value)
