"""What a run is given beside its settings: folders, models and data, all checked before anything loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.config_file import load_config
from grpo.run.folder import RunFolder
from grpo.run.recorder import Recorder
from launch.train import check_inputs
from rollout.roles.prompting import system_prompt

QUICKSTART = Path("configs/quickstart.yaml")


def test_a_folder_that_is_no_model_is_refused_with_what_it_lacks(tmp_path):
    config = load_config(QUICKSTART, [f"model.path={tmp_path}", f"run.folder={tmp_path}/runs"])
    with pytest.raises(
        ValueError, match=r"is not a Hugging Face model folder: it lacks config.json, model\*.safetensors"
    ):
        check_inputs(config)
    config = load_config(QUICKSTART, [f"model.path={tmp_path}/gone", f"run.folder={tmp_path}/runs"])
    with pytest.raises(ValueError, match="there is no folder"):
        check_inputs(config)


def test_a_context_beyond_the_models_positions_is_refused(tmp_path, small_model):
    settings = [f"model.path={small_model}", f"run.folder={tmp_path}", "engine.max_context_tokens=9000"]
    with pytest.raises(ValueError, match="engine.max_context_tokens: 9000 is more than the 8192 positions"):
        check_inputs(load_config(QUICKSTART, settings))


def test_a_folder_that_is_no_run_or_holds_what_the_run_reads_is_never_emptied(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    (tmp_path / "old" / "model").mkdir(parents=True)
    for settings, message in (
        (["run.name=notes"], "holds 'diary.txt', so it is no run's folder"),
        (["run.name=old", f"model.path={tmp_path}/old/model"], "would be emptied, and holds"),
        (["run.folder=/proc/none"], "run.folder: .* cannot be written"),
    ):
        with pytest.raises(ValueError, match=message):
            check_inputs(load_config(QUICKSTART, [f"run.folder={tmp_path}", "run.overwrite=true", *settings]))
    assert (tmp_path / "notes" / "diary.txt").exists() and (tmp_path / "old" / "model").exists()


def test_a_budget_below_the_longest_prompt_and_reply_is_refused(tmp_path, small_model):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "reference": "y"}\n' * 2)
    settings = [f"run.folder={tmp_path}", f"data.train={rows}", "data.validation=null", "rollout.train_on=first_reply"]
    with pytest.raises(ValueError, match="update.max_tokens_per_micro_batch: 64 is less than the longest prompt"):
        check_inputs(load_config(QUICKSTART, [*settings, "update.max_tokens_per_micro_batch=64"]))
    with pytest.raises(ValueError, match="is the training file"):
        check_inputs(load_config(QUICKSTART, [*settings, f"data.validation={rows}"]))


def test_all_that_a_run_leaves_may_be_replaced_by_the_next(tmp_path):
    config = load_config(QUICKSTART, [f"run.folder={tmp_path}", "run.overwrite=true"])
    folder = RunFolder(config.run.path)
    recorder = Recorder(folder, config, {}, "Be kind.", total_steps=1)
    recorder.step(1, {"reward/mean": 1.0}, [])
    recorder.close({"user/calls": 3.0})
    folder.check_free(True, [])
    folder.empty()
    assert not [*folder.path.iterdir()]


def test_the_start_of_a_run_tells_columns_that_nobody_reads(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "reference": "y", "author": "z"}\n' * 2)
    check_inputs(load_config(QUICKSTART, [f"run.folder={tmp_path}", f"data.train={rows}", "data.validation=null"]))
    assert f"note: {rows}: nothing reads the columns 'author'\n" in capsys.readouterr().out


def test_an_earlier_run_is_not_replaced_unasked(tmp_path):
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "metrics.jsonl").write_text("{}\n")
    config = load_config(QUICKSTART, [f"run.folder={tmp_path}", "run.overwrite=false"])
    with pytest.raises(ValueError, match="run.overwrite=true"):
        check_inputs(config)


def test_a_tilde_is_the_home_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rewards.yaml").write_text("weights: {bleu_score: 1.0}\nbleu_score: {extract: last, prompt: ~/b.txt}\n")
    paths = {
        "data.train": "train.jsonl", "data.validation": "v.jsonl", "model.path": "models/m", "run.folder": "runs",
        "rollout.user.prompt": "u.txt", "engine.weights_folder": "w",
    }  # fmt: skip
    config = load_config(
        QUICKSTART,
        [
            *(f"{key}=~/{name}" for key, name in paths.items()),
            "rewards=~/rewards.yaml",
            "rewards.interactivity.prompt=~/i",
            "engine.kind=remote",
            "engine.base_url=http://h:1/v1",
            "rollout.user.kind=llm",
            "rollout.user.endpoint={base_url: 'http://h:1/v1', model: m}",
        ],  # fmt: skip
    )
    paths |= {"rewards.bleu_score.prompt": "b.txt", "rewards.interactivity.prompt": "i"}
    for key, name in paths.items():
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        assert value == tmp_path / name, key
    with pytest.raises(ValueError, match=f"cannot read {tmp_path}/s.txt"):
        system_prompt("~/s.txt")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["data.train=g.jsonl", "model.path={model}"], "g.jsonl: no such data file (looked at {here}/g.jsonl)"),
        (["model.path=gone"], "there is no folder gone (looked at {here}/gone)"),
        (["model.path={model}", "rollout.system_prompt=g.txt"], " (looked at {here}/g.txt); give a UTF-8 text file"),
        (["rewards=gone.yaml"], " (looked at {here}/gone.yaml)"),
    ],
)
def test_a_missing_file_is_told_with_the_place_that_was_looked_at(tmp_path, monkeypatch, small_model, settings, what):
    model, quickstart = small_model.absolute(), QUICKSTART.absolute()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as told:
        check_inputs(load_config(quickstart, [one.format(model=model) for one in settings]))
    assert what.format(here=tmp_path) in str(told.value)
