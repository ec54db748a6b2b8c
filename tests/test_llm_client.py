"""What an LLM role's client promises, against a real HTTP server with provoked faults."""

from __future__ import annotations

import asyncio
import pickle
import socket
import time
from typing import Any

import pytest

from rollout.roles import client as llm_client
from rollout.roles.check import check_role
from rollout.roles.client import LLMClient, LLMError
from rollout.roles.question import Question
from rollout.settings import EndpointSettings
from tests.asking import GOOD, QUESTION, SCHEMA, ask, client_of, failure_of
from tests.fake_endpoint import MODEL, Answer, FakeEndpoint, error, says


def test_a_question_carries_the_schema_and_the_settings_with_thinking_off():
    with FakeEndpoint(GOOD) as endpoint:
        assert ask(client_of(endpoint, temperature=0.25, max_tokens=77)) == [{"score": 0.5}]
        (request,) = endpoint.requests
    assert request["messages"] == QUESTION
    assert request["model"] == MODEL and request["temperature"] == 0.25 and request["max_tokens"] == 77
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert request["response_format"]["type"] == "json_schema"
    assert request["response_format"]["json_schema"] == {"name": "answer", "schema": SCHEMA, "strict": True}


def test_thinking_can_be_turned_on():
    with FakeEndpoint(GOOD) as endpoint:
        ask(client_of(endpoint, thinking=True))
        assert endpoint.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}


def test_a_server_error_is_asked_again_and_counted():
    with FakeEndpoint(error(500), GOOD) as endpoint:
        client = client_of(endpoint)
        assert ask(client) == [{"score": 0.5}]
    usage = client.counts
    assert (usage.calls, usage.retries, usage.errors, usage.failures) == (1, 1, {"http_500": 1}, {})
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)  # the error used none
    assert usage.seconds > 0


def test_the_last_error_is_raised_after_max_attempts_and_counted_by_kind():
    with FakeEndpoint(error(500), error(500), error(501, "not yet"), GOOD) as endpoint:
        client = client_of(endpoint, max_attempts=3)
        failure = failure_of(client)
        assert len(endpoint.requests) == 3
    assert (failure.role, failure.kind) == ("judge", "http_501") and "not yet" in failure.detail
    assert client.counts.retries == 2 and client.counts.failures == {"http_501": 1}


def test_retry_after_is_waited_for(pauses: list[float]):
    with FakeEndpoint(error(429, retry_after="3"), GOOD) as endpoint:
        assert ask(client_of(endpoint)) == [{"score": 0.5}]
    assert sum(pauses) == pytest.approx(3, abs=2)  # and a jitter of at most backoff_s


def test_a_server_that_asked_for_quiet_gets_it_from_every_question(pauses: list[float]):
    with FakeEndpoint(error(429, retry_after="3"), GOOD) as endpoint:
        assert len(ask(client_of(endpoint, max_concurrency=1), times=3)) == 3
    assert len([pause for pause in pauses if 1 < pause <= 3]) == 3  # the one that was refused, and two that were not


@pytest.mark.parametrize(
    ("asked", "waited_s"), [("86400", 8), ("-5", 0), ("inf", 0), ("nan", 0), ("Wed, 21 Oct 2099 07:28:00 GMT", 0)]
)
def test_a_huge_or_unreadable_retry_after_is_bounded(pauses: list[float], asked: str, waited_s: float):
    with FakeEndpoint(error(429, retry_after=asked), GOOD) as endpoint:
        assert ask(client_of(endpoint)) == [{"score": 0.5}]
    assert max(pauses) == pytest.approx(waited_s, abs=3)


def test_all_pauses_of_a_question_together_are_bounded(pauses: list[float], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm_client.random, "uniform", lambda low, high: high)
    with FakeEndpoint(error(500)) as endpoint:
        settings = EndpointSettings(base_url=endpoint.base_url, model=MODEL, max_attempts=10)
        failure_of(LLMClient("judge", settings))
        assert len(endpoint.requests) == 10
    assert [pause for pause in pauses if pause] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 6.5]  # 30 s, and then at once


def test_pauses_double_with_full_jitter_up_to_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm_client.random, "uniform", lambda low, high: high)
    client = LLMClient("judge", EndpointSettings(base_url="http://127.0.0.1:1/v1", model=MODEL))
    assert [client._pause_s(attempt) for attempt in range(1, 8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    monkeypatch.setattr(llm_client.random, "uniform", lambda low, high: low)
    assert client._pause_s(7) == 0.0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_a_retry_cannot_cure_fails_at_once(status: int):
    with FakeEndpoint(error(status, "maximum context length is 4096"), GOOD) as endpoint:
        failure = failure_of(client_of(endpoint))
        assert len(endpoint.requests) == 1
    assert failure.kind == f"http_{status}" and "maximum context length is 4096" in failure.detail


def test_a_server_that_answers_nobody_in_time_is_a_timeout_with_its_silence():
    with FakeEndpoint(says({"score": 1}, delay_s=3.0)) as endpoint:
        failure = failure_of(client_of(endpoint, timeout_s=0.6, max_attempts=2))
        assert len(endpoint.requests) == 2  # for 1.2 s the server may be slow
    assert failure.kind == "timeout"
    assert "no answer in 0.6 s; nothing was answered by rewards.judge for " in failure.detail


def test_waiting_for_a_free_slot_is_not_a_timeout():
    with FakeEndpoint(says({"score": 1}, delay_s=0.2)) as endpoint:
        client = client_of(endpoint, timeout_s=1.2, max_concurrency=1, max_attempts=1)
        assert len(ask(client, times=7)) == 7  # the last one waits for 1.2 s before it is sent


def test_a_refused_connection_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    settings = EndpointSettings(base_url=address, model=MODEL, max_attempts=2, timeout_s=0.1)
    client = LLMClient("user", settings, backoff_s=0.001)
    failure = failure_of(client)
    assert failure.kind == "connection" and client.counts.retries >= 1
    with pytest.raises(ValueError) as raised:
        check_role("user", settings, Question(QUESTION, SCHEMA))
    for piece in ("rollout.user.endpoint.base_url", address, "cannot reach", "launch/serve_roles.sh"):
        assert piece in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer("I would say it is good."), "not_json"),
        (Answer(""), "not_json"),
        (Answer('{"score": 0.'), "not_json"),
        (Answer('{"score": 0.5'), "not_json"),
        (Answer('{"score": NaN}'), "not_json"),
        (Answer('{"score": Infinity}'), "not_json"),
        (Answer('{"score": 1e999}'), "not_json"),
        (Answer('{"score": 0.5}', finish_reason="length"), "cut"),
        (says({"score": 1.5}), "schema"),
        (says({"score": -0.1}), "schema"),
        (says({"score": True}), "schema"),
        (says({"score": "0.5"}), "schema"),
        (says({"score": None}), "schema"),
        (says({}), "schema"),
        (says({"score": 0.5, "bonus": 1}), "schema"),
        (says([0.5]), "not_json"),
        (says([{"score": 0.5}]), "not_json"),
        (Answer('```json\n[{"score": 0.5}]\n```'), "not_json"),
        (Answer('[1, {"score": 0.5}, 2]'), "not_json"),
        (Answer('[{"score": 0.5}'), "not_json"),
        (Answer('{"score": 0.5}]'), "not_json"),
        (Answer(raw=b"<html>gateway</html>", content_type="text/html"), "not_json"),
        (Answer(raw=b"{oops"), "not_json"),
        (Answer(raw=b"[1, 2]"), "not_json"),
        (Answer(raw=b"null"), "not_json"),
        (Answer(raw=b'{"choices": []}'), "not_json"),
        (Answer(raw=b'{"choices": [{"message": null}]}'), "not_json"),
        (Answer(raw=b'{"error": "busy"}'), "not_json"),
        (Answer(raw=b'{"choices": {"0": 1}}'), "not_json"),
        (Answer(raw=b"[" * 100_000), "not_json"),
        (Answer(raw=b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}"), "not_json"),
        (Answer('{"score": ' + "[" * 900 + "]" * 900 + "}"), "schema"),
        (Answer("{" * 200_000), "not_json"),
        (Answer(raw=b"\xff\xfe\x00"), "not_json"),
        (Answer('{"score": 0.5, "bonus": "\\ud800"}'), "not_json"),  # half a surrogate pair
        (Answer("{'score': 0.5}"), "not_json"),  # what a judge says is not repaired: no number is made up
        (Answer('{"score": 0.5,}'), "not_json"),
        (Answer('{"score": 0.1, "score": 1}'), "not_json"),
        (Answer(fault="broken_off"), "connection"),
        (Answer(fault="reset"), "connection"),
    ],
)
def test_an_unusable_answer_is_asked_again_and_never_a_score(answer: Answer, kind: str):
    with FakeEndpoint(answer, GOOD) as endpoint:
        assert ask(client_of(endpoint)) == [{"score": 0.5}]
        assert len(endpoint.requests) == 2
    with FakeEndpoint(answer) as endpoint:
        assert failure_of(client_of(endpoint, max_attempts=2)).kind == kind


def test_a_cut_answer_is_not_asked_for_again_where_it_would_be_the_same():
    with FakeEndpoint(Answer('{"score": 0.5}', finish_reason="length")) as endpoint:
        client = client_of(endpoint, temperature=0.0, max_attempts=3)
        assert failure_of(client).kind == "cut"
    assert (client.counts.retries, client.counts.failures) == (0, {"cut": 1})


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"score": 0.5}\n```',
        'Here it is: {"score": 0.5} Bye.',
        '{"score":0.5}\n',
        '[judge] {"score": 0.5} [end]',
    ],
)
def test_words_around_the_object_are_allowed(text: str):
    with FakeEndpoint(Answer(text)) as endpoint:
        assert ask(client_of(endpoint, max_attempts=1)) == [{"score": 0.5}]


def test_the_callers_own_check_is_part_of_the_question():
    def refuse_small(answer: dict[str, Any]) -> None:
        if answer["score"] < 0.7:
            raise ValueError("too small")

    with FakeEndpoint(GOOD, says({"score": 0.75})) as endpoint:
        assert ask(client_of(endpoint), validate=refuse_small) == [{"score": 0.75}]
    with FakeEndpoint(GOOD) as endpoint:
        failure = failure_of(client_of(endpoint), validate=refuse_small)
    assert (failure.kind, failure.detail) == ("schema", "too small")


def test_no_more_calls_are_in_flight_than_allowed():
    def when_four_have_come(body: dict[str, Any]) -> Answer:
        patience = time.monotonic() + 3
        while endpoint.most_at_once < 4 and time.monotonic() < patience:
            time.sleep(0.005)
        return says({"score": 1}, delay_s=0.02)

    with FakeEndpoint(when_four_have_come) as endpoint:
        client = client_of(endpoint, max_concurrency=4)
        assert len(ask(client, times=24)) == 24
        assert endpoint.most_at_once == 4
    assert client.counts.calls == 24


@pytest.mark.parametrize("tokens", ['"7"', "null", "-Infinity", "[1]", "{}", "-3", "true"])
def test_nonsense_about_tokens_counts_as_none(tokens: str):
    choice = '{"finish_reason": "stop", "message": {"content": "{\\"score\\": 0.5}"}}'
    for usage in (f'{{"prompt_tokens": {tokens}, "completion_tokens": {tokens}}}', tokens):
        with FakeEndpoint(Answer(raw=f'{{"choices": [{choice}], "usage": {usage}}}'.encode())) as endpoint:
            client = client_of(endpoint, max_attempts=1)
            assert ask(client) == [{"score": 0.5}]
        assert (client.counts.prompt_tokens, client.counts.completion_tokens) == (0, 0)


def test_an_endless_answer_is_a_timeout():
    with FakeEndpoint(Answer(fault="endless"), GOOD) as endpoint:
        client = client_of(endpoint, timeout_s=0.3)
        assert ask(client) == [{"score": 0.5}]
    assert client.counts.errors == {"timeout": 1}


def test_a_client_serves_one_event_loop_after_another():
    with FakeEndpoint(GOOD) as endpoint:
        client = client_of(endpoint, max_concurrency=2)
        for _ in range(3):
            assert len(ask(client, times=8)) == 8
        unclosed = asyncio.run(client.ask(QUESTION, SCHEMA)), asyncio.run(client.ask(QUESTION, SCHEMA))
        assert unclosed == ({"score": 0.5}, {"score": 0.5})


def test_an_error_survives_the_way_to_another_process():
    failure = pickle.loads(pickle.dumps(LLMError("judge", "timeout", "no answer in 3 s")))
    assert str(failure) == "judge: timeout: no answer in 3 s"
