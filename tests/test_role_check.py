"""What a role's servers are asked before a run, and what is said where they cannot play it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo.config_file import load_config
from launch.train import check_roles
from rewards.judge import CRITERIA, Judge
from rollout.roles.check import check_role
from rollout.roles.client import LLMClient
from rollout.roles.question import Question
from rollout.roles.simulator import LLMUser
from rollout.settings import EndpointSettings
from rollout.types import Scenario
from tests.asking import GOOD, QUESTION, SCHEMA, ask, client_of
from tests.fake_endpoint import MODEL, Answer, FakeEndpoint, error, says

RECIPE = Path("configs/medium_qwen3_4b.yaml")


def check(endpoint: FakeEndpoint, **settings: Any) -> list[str]:
    settings = {"base_url": endpoint.base_url, "model": MODEL, **settings}
    return check_role("judge", EndpointSettings(**settings), Question(QUESTION, SCHEMA))


def refusal(endpoint: FakeEndpoint, **settings: Any) -> str:
    with pytest.raises(ValueError) as raised:
        check(endpoint, **settings)
    return str(raised.value)


def test_a_server_that_has_the_model_is_asked_one_question_as_all_others_are():
    with FakeEndpoint(GOOD, models=["other", MODEL]) as endpoint:
        assert check(endpoint, max_tokens=77) == []
        ask(client_of(endpoint, max_tokens=77))
        first, later = endpoint.requests
    assert first == later


def test_the_models_there_are_are_named_when_the_configured_one_is_missing():
    with FakeEndpoint(models=["Qwen/A", "Qwen/B"]) as endpoint:
        told = refusal(endpoint, model="Qwen/C")
        assert endpoint.requests == []
    for piece in ("rewards.judge.model", "'Qwen/C'", "Qwen/A, Qwen/B", endpoint.base_url):
        assert piece in told


def test_every_address_is_told_of():
    with FakeEndpoint(GOOD) as good, FakeEndpoint(models=["other"]) as other, FakeEndpoint(error(503)) as down:
        first, second = refusal(good, base_url=[other.base_url, good.base_url, down.base_url]).splitlines()
    assert first.startswith("rewards.judge.model: 'fake-model' is not served") and other.base_url in first
    assert second.startswith(f"rewards.judge.base_url: {down.base_url}: the server answered HTTP 503")


@pytest.mark.parametrize("listing", [error(404), error(501), Answer(raw=b"<html>"), Answer(raw=b'{"data": null}')])
def test_a_server_without_a_list_of_models_is_judged_by_its_answer(listing: Answer):
    with FakeEndpoint(GOOD, models=listing) as endpoint:
        assert check(endpoint) == []
        assert len(endpoint.requests) == 1
    with FakeEndpoint(error(404, "no model fake-model"), models=listing) as endpoint:
        assert "no model fake-model; correct the address, which usually ends in /v1, or the model's name" in refusal(
            endpoint
        )


@pytest.mark.parametrize(
    ("says_always", "piece"),
    [
        (Answer(raw=b"<html>", content_type="text/html"), "not an OpenAI-compatible server"),
        (Answer(raw=b"{oops"), "not an OpenAI-compatible server"),
        (Answer(raw=b"[]"), "not an OpenAI-compatible server"),
        (Answer(raw=b'{"data": null}'), "not an OpenAI-compatible server"),
        (Answer(fault="reset"), "cannot reach the server"),
        (error(503), "HTTP 503: "),
        (error(401), "rewards.judge.api_key_env"),
        (error(404), "ends in /v1"),
    ],
)
def test_what_is_wrong_with_the_server_is_said(says_always: Answer, piece: str):
    with FakeEndpoint(says_always, models=says_always) as endpoint:
        told = refusal(endpoint)
    assert piece in told and f"rewards.judge.base_url: {endpoint.base_url}" in told


@pytest.mark.parametrize(
    ("answer", "piece"),
    [
        (Answer("I would say it is good."), "of no use (not_json: "),
        (says({"score": 7}), "of no use (schema: "),
        (Answer('{"score": 0.5', finish_reason="length"), "raise rewards.judge.max_tokens"),
        (error(429, "slow down"), "it takes no more questions now (HTTP 429: "),
        (says({"score": 1}, delay_s=5), "no answer in 0.2 s"),
    ],
)
def test_what_may_be_otherwise_with_the_next_question_is_a_note(answer: Answer, piece: str):
    with FakeEndpoint(answer) as endpoint:
        (note,) = check(endpoint, timeout_s=0.2)
    assert note.startswith(f"note: rewards.judge: {endpoint.base_url}: ") and piece in note


class Strict:
    """A server that refuses every parameter it does not know, one at a time, in the words of its kind."""

    def __init__(self, *known: str, words: str = "this server knows no parameter {}", status: int = 400):
        self.known = {"model", "messages", *known}
        self.words, self.status = words, status

    def __call__(self, body: dict[str, Any]) -> Answer:
        sent = set(body)
        if "response_format" in self.known:
            sent |= {"strict"} & set(body.get("response_format", {}).get("json_schema", {}))
        unknown = sent - self.known
        return error(self.status, self.words.format(min(unknown))) if unknown else GOOD


FORM = ("temperature", "max_tokens", "response_format")


@pytest.mark.parametrize(
    ("server", "remedy", "settings"),
    [
        (
            Strict(*FORM, "strict"),
            "rewards.judge.leave_out=[chat_template_kwargs]",
            {"leave_out": ["chat_template_kwargs"]},
        ),
        (Strict(*FORM, "chat_template_kwargs"), "rewards.judge.leave_out=[strict]", {"leave_out": ["strict"]}),
        (
            Strict("temperature", "max_tokens", "chat_template_kwargs", words="extra_forbidden: body.{}", status=422),
            "rewards.judge.leave_out=[response_format]",
            {"leave_out": ["response_format"]},
        ),
        (
            Strict("max_tokens", "response_format", "strict", "chat_template_kwargs", words="Unsupported value: '{}'"),
            "rewards.judge.leave_out=[temperature]",
            {"leave_out": ["temperature"]},
        ),
        (
            Strict("temperature", "max_completion_tokens", "response_format", "strict", "chat_template_kwargs"),
            "rewards.judge.max_tokens_name=max_completion_tokens",
            {"max_tokens_name": "max_completion_tokens"},
        ),
    ],
)
def test_a_refused_parameter_is_named_with_the_setting_that_leaves_it_out_or_renames_it(server, remedy, settings):
    with FakeEndpoint(server) as endpoint:
        told = refusal(endpoint)
        assert told.endswith(remedy) or f"{remedy}, or a smaller rewards.judge.max_tokens" in told
        assert check(endpoint, **settings) == []
        ask(client_of(endpoint, **settings))


def test_what_is_left_out_already_stays_in_the_remedy():
    with FakeEndpoint(Strict(*FORM)) as endpoint:
        told = refusal(endpoint, leave_out=["chat_template_kwargs"])
        assert told.endswith("rewards.judge.leave_out=[chat_template_kwargs, strict]")


def test_a_refusal_that_names_nothing_tells_of_all_parameters():
    with FakeEndpoint(error(400, "bad request")) as endpoint:
        told = refusal(endpoint)
    for piece in ("[chat_template_kwargs]", "[temperature]", "[strict]", "[response_format]", "max_completion_tokens"):
        assert piece in told


def test_thinking_cannot_be_left_out_and_turned_on():
    with pytest.raises(ValueError, match="thinking: true is said in chat_template_kwargs"):
        EndpointSettings(base_url="http://a/v1", model=MODEL, thinking=True, leave_out=["chat_template_kwargs"])
    changes = ["rewards.judge.leave_out=[chat_template_kwargs, strict]"]
    config = load_config(RECIPE, changes)
    assert config.rewards.judge.leave_out == ("chat_template_kwargs", "strict")
    with pytest.raises(ValueError, match="leave_out"):
        load_config(RECIPE, ["rewards.judge.leave_out=[top_p]"])


def test_each_role_is_asked_a_question_of_its_own_kind():
    config = load_config(RECIPE)
    grade = {name: {"reason": "fine", "score": 0.5} for name in CRITERIA}

    def answer(body: dict[str, Any]) -> Answer:
        wanted = body["response_format"]["json_schema"]["schema"]["properties"]
        return says(grade if "asks" in wanted else {name: "Please go on." for name in wanted})

    scenario = Scenario("s/0", ({"role": "user", "content": "Help me."},), "a goal", "writing", "x", "s", 0)
    with FakeEndpoint(answer) as endpoint:
        update = {"base_url": endpoint.base_url, "model": MODEL}
        settings = config.rollout.user.endpoint.model_copy(update=update)
        clients = {role: LLMClient(role, settings) for role in ("user", "judge")}
        user, judge = LLMUser(clients["user"], config.rollout.user), Judge(clients["judge"], config.rewards)
        check_roles(clients, user, judge, scenario)
        asked = endpoint.requests
        only_bleu = config.rewards.model_copy(update={"weights": {"bleu_score": 1.0}})
        check_roles({"judge": clients["judge"]}, user, Judge(clients["judge"], only_bleu), scenario)
    schemas = [body["response_format"]["json_schema"]["schema"]["properties"] for body in asked]
    assert [[*schema] for schema in schemas] == [["current_answer", "thought", "reply"], [*CRITERIA], ["document"]]
    assert all('"Help me."' in json.dumps(body["messages"]).replace("\\", "") for body in asked)
    assert clients["user"].counts.prompt_tokens == 0  # what a check costs is not the run's
