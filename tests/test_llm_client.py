"""What an LLM role's client promises, against a real HTTP server with provoked faults."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import time
from typing import Any

import pytest

from rollout import llm_client
from rollout.llm_client import LLMClient, LLMError
from rollout.settings import EndpointSettings
from tests.fake_endpoint import MODEL, Answer, FakeEndpoint, error, says

SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["score"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "How good is it?"}]
GOOD = says({"score": 0.5})


def client_of(endpoint: FakeEndpoint, role: str = "judge", **settings: Any) -> LLMClient:
    settings = {"base_url": endpoint.base_url, "model": MODEL, "timeout_s": 5.0, **settings}
    return LLMClient(role, EndpointSettings(**settings), backoff_s=0.001)


def ask(client: LLMClient, times: int = 1, **more: Any) -> list[dict[str, Any]]:
    async def all_at_once() -> list[dict[str, Any]]:
        try:
            return await asyncio.gather(*(client.ask(QUESTION, SCHEMA, **more) for _ in range(times)))
        finally:
            await client.close()

    return asyncio.run(all_at_once())


def failure_of(client: LLMClient, **more: Any) -> LLMError:
    with pytest.raises(LLMError) as raised:
        ask(client, **more)
    return raised.value


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
    counts = client.counts
    assert (counts.calls, counts.retries, counts.failures) == (1, 1, {})
    assert (counts.prompt_tokens, counts.completion_tokens) == (7, 3)  # the error used none
    assert 0 < counts.seconds < 5


def test_the_last_error_is_raised_after_max_attempts_and_counted_by_kind():
    with FakeEndpoint(error(500), error(500), error(503, "still loading"), GOOD) as endpoint:
        client = client_of(endpoint, max_attempts=3)
        failure = failure_of(client)
        assert len(endpoint.requests) == 3
    assert (failure.role, failure.kind) == ("judge", "http_503") and "still loading" in failure.detail
    assert client.counts.retries == 2 and client.counts.failures == {"http_503": 1}


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds the client wanted to wait, without the waiting."""
    waited: list[float] = []
    at_once = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await at_once(0)

    monkeypatch.setattr(llm_client.asyncio, "sleep", sleep)
    return waited


def test_retry_after_is_waited_for(pauses: list[float]):
    with FakeEndpoint(error(429, retry_after="3"), GOOD) as endpoint:
        assert ask(client_of(endpoint)) == [{"score": 0.5}]
    assert pauses == [pytest.approx(3, abs=0.001)]  # and a jitter of at most backoff_s


def test_a_huge_or_unreadable_retry_after_is_bounded(pauses: list[float]):
    odd = ("86400", "-5", "inf", "nan", "Wed, 21 Oct 2099 07:28:00 GMT")
    with FakeEndpoint(*(error(429, retry_after=value) for value in odd), GOOD) as endpoint:
        assert ask(client_of(endpoint, max_attempts=6)) == [{"score": 0.5}]
    assert pauses[0] == 8.0 and all(0 <= pause < 0.02 for pause in pauses[1:])


def test_all_pauses_of_a_question_together_are_bounded(pauses: list[float]):
    with FakeEndpoint(error(429, retry_after="7")) as endpoint:
        failure_of(client_of(endpoint, max_attempts=10))
        assert len(endpoint.requests) == 10
    assert sum(pauses) == pytest.approx(30.0)  # 7 + 7 + 7 + 7 + 2, and then at once


def test_pauses_double_with_full_jitter_up_to_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm_client.random, "uniform", lambda low, high: high)
    client = LLMClient("judge", EndpointSettings(base_url="http://127.0.0.1:1/v1", model=MODEL))
    assert [client._pause_s(attempt, 0.0) for attempt in range(1, 8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    monkeypatch.setattr(llm_client.random, "uniform", lambda low, high: low)
    assert client._pause_s(7, 0.0) == 0.0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_a_retry_cannot_cure_fails_at_once(status: int):
    with FakeEndpoint(error(status, "maximum context length is 4096"), GOOD) as endpoint:
        failure = failure_of(client_of(endpoint))
        assert len(endpoint.requests) == 1
    assert failure.kind == f"http_{status}" and "maximum context length is 4096" in failure.detail


def test_a_slow_server_is_a_timeout():
    with FakeEndpoint(says({"score": 1}, delay_s=0.5)) as endpoint:
        failure = failure_of(client_of(endpoint, timeout_s=0.1, max_attempts=2))
        assert len(endpoint.requests) == 2
    assert failure.kind == "timeout" and "0.1 s" in failure.detail


def test_waiting_for_a_free_slot_is_not_a_timeout():
    with FakeEndpoint(says({"score": 1}, delay_s=0.2)) as endpoint:
        client = client_of(endpoint, timeout_s=1.2, max_concurrency=1, max_attempts=1)
        assert len(ask(client, times=7)) == 7  # the last one waits for 1.2 s before it is sent


def test_a_refused_connection_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    settings = EndpointSettings(base_url=address, model=MODEL, max_attempts=2)
    client = LLMClient("user", settings, backoff_s=0.001)
    failure = failure_of(client)
    assert failure.kind == "connection" and client.counts.retries == 1
    with pytest.raises(ValueError) as raised:
        client.check()
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
        (Answer(raw=b"<html>gateway</html>", content_type="text/html"), "not_json"),
        (Answer(raw=b"{oops"), "not_json"),
        (Answer(raw=b"[1, 2]"), "not_json"),
        (Answer(raw=b"null"), "not_json"),
        (Answer(raw=b'{"choices": []}'), "not_json"),
        (Answer(raw=b'{"choices": [{"message": null}]}'), "not_json"),
        (Answer(raw=b'{"error": "busy"}'), "not_json"),
    ],
)
def test_an_unusable_answer_is_asked_again_and_never_a_score(answer: Answer, kind: str):
    with FakeEndpoint(answer, GOOD) as endpoint:
        assert ask(client_of(endpoint)) == [{"score": 0.5}]
        assert len(endpoint.requests) == 2
    with FakeEndpoint(answer) as endpoint:
        assert failure_of(client_of(endpoint, max_attempts=2)).kind == kind


@pytest.mark.parametrize("text", ['```json\n{"score": 0.5}\n```', 'Here it is: {"score": 0.5} Bye.', '{"score":0.5}\n'])
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


def test_a_client_serves_one_event_loop_after_another():
    with FakeEndpoint(GOOD) as endpoint:
        client = client_of(endpoint, max_concurrency=2)
        for _ in range(3):
            assert len(ask(client, times=8)) == 8
        unclosed = asyncio.run(client.ask(QUESTION, SCHEMA)), asyncio.run(client.ask(QUESTION, SCHEMA))
        assert unclosed == ({"score": 0.5}, {"score": 0.5})


def test_check_accepts_a_server_that_has_the_model():
    with FakeEndpoint(models=["other", MODEL]) as endpoint:
        client_of(endpoint).check()


def test_check_names_the_models_there_are_when_the_configured_one_is_missing():
    with FakeEndpoint(models=["Qwen/A", "Qwen/B"]) as endpoint, pytest.raises(ValueError) as raised:
        client_of(endpoint, model="Qwen/C").check()
    for piece in ("rewards.judge.model", "'Qwen/C'", "Qwen/A, Qwen/B", endpoint.base_url):
        assert piece in str(raised.value)


@pytest.mark.parametrize(
    ("listing", "piece"),
    [
        (Answer(raw=b"<html>", content_type="text/html"), "not an OpenAI-compatible server"),
        (Answer(raw=b"{oops"), "not an OpenAI-compatible server"),
        (Answer(raw=b"[]"), "not an OpenAI-compatible server"),
        (Answer(raw=b'{"data": null}'), "not an OpenAI-compatible server"),
        (error(503), "HTTP 503"),
        (error(401), "rewards.judge.api_key_env"),
        (error(404), "ends in /v1"),
    ],
)
def test_check_says_what_is_wrong_with_the_server(listing: Answer, piece: str):
    with FakeEndpoint(models=listing) as endpoint, pytest.raises(ValueError) as raised:
        client_of(endpoint).check()
    assert piece in str(raised.value) and f"rewards.judge.base_url: {endpoint.base_url}" in str(raised.value)


def test_a_missing_key_variable_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    settings = EndpointSettings(base_url="http://127.0.0.1:1/v1", model=MODEL, api_key_env="JUDGE_KEY")
    with pytest.raises(ValueError, match=r"rewards\.judge\.api_key_env.*JUDGE_KEY is not set"):
        LLMClient("judge", settings)


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    caplog.set_level(logging.DEBUG)
    refused = error(401, "Incorrect API key provided: sk-very-secret")
    with FakeEndpoint(error(500, "sk-very-secret"), refused, models=refused) as endpoint:
        client = client_of(endpoint, api_key_env="JUDGE_KEY")
        failure = failure_of(client)
        assert endpoint.keys == ["Bearer sk-very-secret"] * 2
        with pytest.raises(ValueError) as raised:
            client.check()
    assert "Incorrect API key provided: ***" in failure.detail and "***" in str(raised.value)
    shown = [str(failure), repr(failure), str(raised.value), repr(client), repr(client.counts), caplog.text]
    assert not any("secret" in text for text in shown)


def test_the_environments_openai_key_goes_to_no_other_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody")
    with FakeEndpoint(GOOD) as endpoint:
        ask(client_of(endpoint))
        assert "sk-of-somebody" not in endpoint.keys[0]


def test_an_error_survives_the_way_to_another_process():
    failure = pickle.loads(pickle.dumps(LLMError("judge", "timeout", "no answer in 3 s")))
    assert str(failure) == "judge: timeout: no answer in 3 s"


def test_a_key_with_a_newline_is_trimmed_and_one_typed_into_the_config_is_not_echoed(monkeypatch):
    monkeypatch.setenv("ROLE_KEY", "sk-secret\n")
    settings = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    LLMClient("judge", EndpointSettings(**settings, api_key_env="ROLE_KEY"))
    for variable, value in (("sk-secret", ""), ("BAD_KEY", "sk-s\u00e9cret")):
        monkeypatch.setenv("BAD_KEY", value or "x")
        with pytest.raises(ValueError) as error:
            LLMClient("judge", EndpointSettings(**settings, api_key_env=variable))
        assert "rewards.judge.api_key_env" in str(error.value) and "cret" not in str(error.value)
