"""What an LLM role's client promises, against a real HTTP server with provoked faults."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
import socket
import time
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from grpo.config_file import load_config
from rollout import llm_client
from rollout.endpoints import REST_S, Address, Balancer, Pace
from rollout.llm_client import LLMClient, LLMError, Usage
from rollout.settings import EndpointSettings
from tests.fake_endpoint import MODEL, Answer, FakeEndpoint, error, says

SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["score"],
    "additionalProperties": False,
}
QUICKSTART = Path("configs/quickstart.yaml")
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
    usage = client.counts
    assert (usage.calls, usage.retries, usage.errors, usage.failures) == (1, 1, {"http_500": 1}, {})
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)  # the error used none
    assert usage.seconds > 0


def test_the_difference_of_two_usages_is_what_came_between():
    with FakeEndpoint(error(500), GOOD, error(500), error(500), Answer("no"), GOOD) as endpoint:
        client = client_of(endpoint, max_attempts=2)
        ask(client)
        before = client.counts
        failure_of(client)
        ask(client)
        step = client.counts - before
    assert (before.calls, before.retries, before.errors) == (1, 1, {"http_500": 1})  # a snapshot, not a view
    assert (step.calls, step.retries) == (2, 2)
    assert (step.errors, step.failures) == ({"http_500": 2, "not_json": 1}, {"http_500": 1})
    assert (step.prompt_tokens, step.completion_tokens) == (14, 6)  # two answers of 7 and 3, one of them no JSON
    assert step - step == Usage()


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
        (Answer(raw=b'{"choices": {"0": 1}}'), "not_json"),
        (Answer(raw=b"[" * 100_000), "not_json"),
        (Answer(raw=b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}"), "not_json"),
        (Answer('{"score": ' + "[" * 900 + "]" * 900 + "}"), "schema"),
        (Answer("{" * 200_000), "not_json"),
        (Answer(raw=b"\xff\xfe\x00"), "not_json"),
        (Answer('{"score": 0.5, "bonus": "\\ud800"}'), "not_json"),  # half a surrogate pair
        (Answer("{'score': 0.5}"), "not_json"),  # what a judge says is not repaired: no number is made up
        (Answer('{"score": 0.5,}'), "not_json"),
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


@pytest.mark.parametrize("tokens", ['"7"', "null", "-Infinity", "[1]", "{}"])
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


def addresses(number: int) -> list[Address]:
    return [Address(f"http://host-{index}/v1", None) for index in range(number)]


def test_a_call_goes_to_the_least_busy_address_and_by_turns_where_they_are_equal():
    one, two, three = servers = addresses(3)
    balancer = Balancer(servers, max_in_flight=8)
    assert [balancer.pick() for _ in range(4)] == [one, two, three, one]
    one.in_flight, two.in_flight, three.in_flight = 2, 1, 1
    assert [balancer.pick() for _ in range(3)] == [two, three, two]
    two.in_flight = three.in_flight = 3
    assert balancer.pick() is one


def test_a_retry_goes_elsewhere_even_to_a_busier_address():
    one, two = servers = addresses(2)
    balancer = Balancer(servers, max_in_flight=8)
    two.in_flight = 5
    assert balancer.pick(failed_at=[one]) is two
    assert balancer.pick(failed_at=[one, two]) is one  # failed once each: the less busy one
    two.in_flight = 8
    assert balancer.pick(failed_at=[one]) is one  # the other has no room


def test_an_address_that_failed_comes_after_the_others_for_a_while():
    now = 100.0
    one, two = servers = addresses(2)
    balancer = Balancer(servers, max_in_flight=8, clock=lambda: now)
    balancer.rest(one, 0.0)
    two.in_flight = 5
    assert balancer.pick() is two  # though the other is idle: it fails its calls at once
    now += REST_S
    assert balancer.pick() is one
    balancer.rest(one, at_least_s=8.0)
    now += REST_S
    assert balancer.pick() is two


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


def test_an_address_that_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout.endpoints.REST_S", 0.0)
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


def test_check_tells_of_every_address():
    with FakeEndpoint() as good, FakeEndpoint(models=["other"]) as other, FakeEndpoint(models=error(503)) as down:
        client = client_of(good, base_url=[other.base_url, good.base_url, down.base_url])
        with pytest.raises(ValueError) as raised:
            client.check()
    first, second = str(raised.value).splitlines()
    assert first.startswith("rewards.judge.model: 'fake-model' is not served") and other.base_url in first
    assert second.startswith(f"rewards.judge.base_url: {down.base_url}: the server answered HTTP 503")


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
"""Ways for a server to fail, each with something that it was told."""


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
        with pytest.raises(ValueError) as raised:
            client.check()
        assert set(endpoint.keys) == {f"Bearer {secret}" if way == "key" else f"Basic {in_header}"}
    shown = [str(failure), repr(failure), str(raised.value), repr(client), repr(client.counts), caplog.text]
    shown += [repr(client.settings), str(client.settings), client.settings.model_dump_json()]
    shown += traceback.format_exception(failure) + traceback.format_exception(raised.value)
    secrets = {"Planted"} if way == "key" else {"Planted", in_header}
    assert not [text for text in shown for piece in secrets if piece in text]


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
    for wrong, complaint in (([], "give an address"), (["http://a/v1", "http://a/v1"], "in the list twice")):
        with pytest.raises(ValueError, match=complaint):
            EndpointSettings(base_url=wrong, model=MODEL)


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
