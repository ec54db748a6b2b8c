"""Conversations without training: the run's own engine, user and rewards, shown so that a person can judge them."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import yaml

from grpo.config_file import load_config
from grpo.run.recorder import read_rows
from launch import converse as command
from launch.converse import choose, converse
from launch.train import read_inputs
from tests.fake_endpoint import MODEL, Answer, FakeEndpoint, error, is_check, says
from tests.tiny import make_model

GRADES = {name: {"reason": "fine", "score": 0.5} for name in ("asks", "engages", "advances")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config_file(model, tmp_path):
    """Makes a file of settings; four prompts, replies that may be cut, a scripted user, nothing that asks a server."""

    def make(**changes):
        rows = [
            {"prompt": f"hello what about the {word} ?", "reference": "bees hum .", "goal": f"the goal of {word}"}
            for word in ("bees", "roof", "winter", "warm")
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "held_out.jsonl").write_text(json.dumps(rows[0] | {"goal": "held out"}) + "\n")
        values = {
            "run": {"name": "shown", "folder": str(tmp_path / "runs")},
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": str(tmp_path / "rows.jsonl")},
            "engine": {"kind": "transformers", "max_context_tokens": 256},
            "rollout": {
                "prompts_per_step": 2,
                "max_reply_tokens": 100,
                "max_user_turns": 1,
                "max_assistant_turns": 2,
                "user": {"kind": "scripted"},
            },
            "rewards": {
                "weights": {"bleu_score": 1.0, "interactivity": 2.0, "token_amount": -0.1},
                "truncated": "score",
                "bleu_score": {"extract": "last"},
                "interactivity": {"by": "rubric"},
            },
        }
        for name, value in changes.items():
            section, _, key = name.partition("__")
            values[section][key] = value
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
        return tmp_path / "config.yaml"

    return make


class Ended(Exception):
    """What `end_process` becomes here."""


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Runs the command; its exit code and what it wrote."""

    def end_process(code=0):
        raise Ended(code)

    def run(*arguments):
        monkeypatch.setattr(command, "end_process", end_process)
        monkeypatch.setattr(sys, "argv", ["converse", *map(str, arguments)])
        with pytest.raises((Ended, SystemExit)) as end:
            command.main()
        return end.value.args[0], *capsys.readouterr()

    return run


@pytest.fixture
def shown(capsys):
    """Plays with the settings of a file; what was printed."""

    def run(file, *overrides, n=4, split="train", out=None):
        config = load_config(file, overrides)
        inputs = read_inputs(config)
        converse(config, inputs, *choose(config, inputs, split, n), out)
        return capsys.readouterr().out

    return run


def endpoint(server):
    return {"base_url": server.base_url, "model": MODEL, "max_attempts": 2}


def judged(user, judge):
    """Changes that have servers play the user and score interactivity."""
    return {
        "rollout__user": {"kind": "llm", "endpoint": endpoint(user)},
        "rewards__interactivity": {"by": "llm"},
        "rewards__judge": endpoint(judge),
    }


def test_no_trainer_and_no_deepspeed_are_loaded():
    def imported(module):
        """The modules that importing `module` imports: what stands in functions is imported later, or never."""
        file = Path(module.replace(".", "/") + ".py")
        for node in ast.parse(file.read_text()).body if file.exists() else ():
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module

    found, new = set(), {"launch.converse"}
    while new:
        found |= new
        new = {name for module in new for name in imported(module)} - found
    assert "grpo.groups" in found and "rollout.conversation" in found
    assert not found & {"grpo.trainer", "grpo.model.zero", "deepspeed", "vllm"}


def test_the_command_shows_conversations_and_leaves_nothing_behind(config_file, tmp_path, run_command):
    settings = ["rollout.temperature=0.9", "--n", 2, "run.seed=3", "--out", tmp_path / "rows.out"]
    code, output, _ = run_command("--config", config_file(), *settings)
    assert code == 0
    rows = read_rows(tmp_path / "rows.out")
    assert [row["scenario_id"] for row in rows] == ["rows/0", "rows/1"]
    said = [line.strip() for line in output.splitlines()]
    for row, word in zip(rows, ("bees", "roof"), strict=True):
        assert f"the goal of {word}" in said and f"ended: {row['ended']}" in said
        assert all(message["content"] in said for message in row["messages"])
        assert f"reward: {row['reward']['total']:.3f}" in said
    assert f"policy: {sum(sum(row['reply_tokens']) for row in rows)} tokens sampled" in said
    assert not (tmp_path / "runs").exists()


def test_components_are_shown_with_weight_and_clamp(config_file, shown):
    output = shown(config_file(rewards__clamp=[-1.0, 0.2]), n=1)
    lines = [line.split() for line in output.splitlines() if " x " in line]
    assert [line[0] for line in lines] == ["bleu_score", "interactivity", "token_amount"]
    for name, mean, _, weight, _, weighted, *clamped in lines:
        assert float(weighted.strip(",")) == pytest.approx(float(mean) * float(weight), abs=2e-3)
        assert bool(clamped) == (float(weighted.strip(",")) > 0.2), name


@pytest.mark.parametrize(("truncated", "earned"), [("mask", "none, it takes no part in training"), (-0.5, "-0.500")])
def test_a_cut_first_reply_says_what_it_earns_and_why(config_file, shown, truncated, earned):
    output = shown(config_file(rewards__truncated=truncated), "rollout.max_reply_tokens=2", n=1)
    assert "assistant, 2 tokens, cut:" in output and "ended: length" in output
    assert f"reward: {earned}\n  the first reply was cut by its token limit (rewards.truncated)" in output


def test_held_out_prompts_are_played_as_an_evaluation_plays_them(config_file, tmp_path, shown):
    file = config_file(data__validation=str(tmp_path / "held_out.jsonl"))
    once = shown(file, split="validation")
    assert "held out" in once and "conversations: 1," in once
    assert once == shown(file, "rollout.temperature=0.2", split="validation")  # evaluation.temperature counts: 0


def test_roles_are_counted_and_their_failures_told(config_file, shown):
    def user_answer(body):
        lost = "the goal of bees" in body["messages"][0]["content"]
        return error(500) if lost and not is_check(body) else says({"current_answer": "", "thought": "", "reply": "bees"})

    def judge_answer(body):
        return says({"asks": 2} if "about the roof" in body["messages"][0]["content"] else GRADES)

    with FakeEndpoint(user_answer) as user, FakeEndpoint(judge_answer) as judge:
        output = shown(config_file(**judged(user, judge)), "rollout.max_reply_tokens=200")
    assert "ended: simulator_failed" in output and "1 simulator_failed" in output
    assert "user failed: user: http_500" in output and "interactivity failed: judge: schema" in output
    assert output.count("reward: none, it takes no part in training") == 2
    assert "user: 4 questions, 1 asked again, 1 failed (http_500 1); 21 tokens read, 9 written" in output
    assert "judge: 3 questions, 1 asked again, 1 failed (schema 1); 28 tokens read, 12 written" in output


def test_a_server_that_never_gives_a_usable_answer_makes_the_command_fail(config_file, run_command):
    answers = says({"reply": "Go on."}), error(500, "too hot")  # the first at the check
    with FakeEndpoint(*answers) as user, FakeEndpoint(says(GRADES)) as judge:
        code, output, told = run_command("--config", config_file(**judged(user, judge)), "rollout.max_reply_tokens=200")
    assert code == 1 and "4 simulator_failed" in output.split("summary")[1]
    assert "error: no conversation could be judged (user: user: http_500" in told and "check the servers" in told


def test_control_characters_of_a_user_never_reach_the_terminal(config_file, shown):
    rude = says({"current_answer": "", "thought": "", "reply": "\x1b[2Jbees\x07 [[TERMINATE CHAT]]"})
    with FakeEndpoint(rude) as user, FakeEndpoint(says(GRADES)) as judge:
        output = shown(config_file(**judged(user, judge)), "rollout.max_reply_tokens=200", n=2)
    assert "bees" in output.split("user's goodbye, not judged:")[1]
    assert not set("\x1b\x07") & set(output)


def test_ctrl_c_still_gives_the_summary_and_the_rows(config_file, tmp_path, run_command, monkeypatch):
    describe, shown = command.describe, threading.Event()

    def describe_and_tell(*arguments):
        yield from describe(*arguments)
        shown.set()

    def answer(body):
        if "the goal of bees" in body["messages"][0]["content"]:
            return says({"current_answer": "", "thought": "", "reply": "[[TERMINATE CHAT]]"})
        if "the goal of roof" in body["messages"][0]["content"]:
            shown.wait(20)
            os.kill(os.getpid(), signal.SIGINT)
        return Answer(delay_s=2)

    monkeypatch.setattr(command, "describe", describe_and_tell)
    with FakeEndpoint(answer) as user, FakeEndpoint(says(GRADES)) as judge:
        settings = ["--out", tmp_path / "rows.out", "rollout.max_reply_tokens=200"]
        code, output, _ = run_command("--config", config_file(**judged(user, judge)), *settings)
    assert code == 130 and "conversations: 1," in output.split("summary")[1]
    assert len(read_rows(tmp_path / "rows.out")) == 1


def test_an_engine_that_fails_still_gives_the_summary_and_its_error(config_file, run_command, monkeypatch):
    def fail(error):
        raise Ended(repr(error))

    monkeypatch.setattr(command, "fail", fail)
    monkeypatch.setattr("rollout.engines.transformers.TransformersEngine.step", lambda self: 1 / 0)
    code, output, _ = run_command("--config", config_file())
    assert "ZeroDivisionError" in code and "conversations: 0\n" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout.group_sise=2"], "rollout.group_sise: there is no such key; did you mean 'group_size'?"),
        (["model.path=gone"], "model.path: there is no folder gone"),
        (["data.train=gone.jsonl"], "gone.jsonl: no such data file"),
        (["--split", "validation"], "data.validation: is null, so no prompts are held out"),
        (["--n", "0"], "--n: 0 will not do"),
        (["--out", "configs/quickstart.yaml"], "--out: configs/quickstart.yaml cannot be written (File exists)"),
        (["--out", "gone/rows.jsonl"], "--out: gone/rows.jsonl cannot be written (No such file"),
    ],
)
def test_bad_input_is_told_with_exit_code_2(config_file, arguments, message, run_command):
    code, output, told = run_command("--config", config_file(), *arguments)
    assert code == 2 and message in told and "starting the engine" not in output


def test_a_server_that_does_not_answer_is_told_before_anything_loads(config_file, run_command):
    role = {"base_url": "http://127.0.0.1:9/v1", "model": MODEL}
    code, output, told = run_command("--config", config_file(rollout__user={"kind": "llm", "endpoint": role}))
    assert code == 2 and "starting the engine" not in output
    assert "rollout.user.endpoint.base_url: http://127.0.0.1:9/v1: cannot reach the server" in told
