"""A run's folder: one run in it at a time, never emptied too early, and what is left in it is told as it is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo.config_file import load_config
from grpo.run.disk import in_words, saved_model_bytes, whole_file
from grpo.run.folder import RunFolder
from grpo.run.folder_lock import FolderLock, Taken
from grpo.run.recorder import append_row, read_rows
from launch import report, train
from launch.train import check_inputs
from tests.small_disk import fill, small_disk
from tests.small_run import SmallRun, prepare
from tests.tiny import make_model

HOLD = """
import sys, time
from pathlib import Path
from grpo.run.folder_lock import FolderLock, Taken
lock = FolderLock(Path(sys.argv[1]))
lock.take()
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/run."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.wait()


def earlier_run(folder: Path, *, steps: int, checkpoints: tuple[int, ...] = (), model: bool = False) -> RunFolder:
    """What a run of 6 steps leaves that was killed after `steps`."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.begin(total_steps=6, warnings=[])
    rows = [{"step": step, "reward/mean": 0.1 * step, "time/step": 6.0} for step in range(1, steps + 1)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "environment.json").write_text('{"engine": "vllm", "ranks": 8}')
    for path in [run.checkpoint(step) for step in checkpoints] + [run.model] * model:
        make_model(path)
    (folder / "checkpoints" / "step_00005.part").mkdir(parents=True)  # the system took the process away while it saved
    return run


def save_config(run: RunFolder, file: Path) -> None:
    (run.path / "config.yaml").write_text(yaml.safe_dump(load_config(file).model_dump(mode="json")))


def test_a_folder_is_one_runs_until_that_process_is_gone_however_it_ends(tmp_path, holder):
    second = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError) as refusal:
        second.take()
    where = f"process {holder.pid} on {socket.gethostname()}, since 20"
    assert f"a run is going on in {tmp_path}/run ({where}" in str(refusal.value)
    assert second.holder.startswith(where)
    second.release()
    assert (tmp_path / "run" / "run.lock").exists()  # the first one's
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert second.holder is None and second.take() is None
    assert f"process {os.getpid()} on" in (tmp_path / "run" / "run.lock").read_text()


def test_a_folder_that_was_given_up_leaves_nothing_behind_but_what_was_put_in(tmp_path):
    first, second = FolderLock(tmp_path / "runs" / "a"), FolderLock(tmp_path / "runs" / "b")
    assert first.take() and second.take()
    (tmp_path / "runs" / "b" / "kept").touch()
    first.release()
    second.release()
    assert [*tmp_path.rglob("*")] == [tmp_path / "runs", tmp_path / "runs" / "b", tmp_path / "runs" / "b" / "kept"]


def test_a_lock_whose_file_goes_between_a_look_and_a_grasp_is_grasped_anew(tmp_path, monkeypatch):
    first, second, real = FolderLock(tmp_path / "run"), FolderLock(tmp_path / "run"), fcntl.flock
    first.take()

    def flock(stream, how):
        first.release()  # its file, which the second one has opened, is gone
        real(stream, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    second.take()
    monkeypatch.undo()
    assert second.holder().startswith(f"process {os.getpid()} on")
    with pytest.raises(Taken):
        FolderLock(tmp_path / "run").take()


def test_a_file_system_without_locks_is_no_reason_not_to_run_and_is_told(tmp_path, monkeypatch):
    def flock(stream, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = RunFolder(tmp_path / "run")
    assert "is on a file system without locks: nothing keeps a second run out of it" in folder.take()
    folder.release()
    assert not folder.path.exists()


def test_a_start_holds_its_folder_before_any_model_loads_and_one_that_is_refused_leaves_none(tmp_path):
    settings = ["model.path=nowhere", "run.name=new"]
    config_file = prepare(tmp_path)
    with pytest.raises(ValueError, match="there is no folder nowhere"):
        check_inputs(load_config(config_file, settings))
    assert not (tmp_path / "new").exists()
    first = check_inputs(load_config(config_file))
    with pytest.raises(ValueError, match=f"a run is going on in .*process {os.getpid()} on"):
        check_inputs(load_config(config_file, ["run.overwrite=true"]))
    first.folder.release()
    assert not (tmp_path / "run").exists()


def test_a_run_is_replaced_only_when_asked_and_its_start_says_what_goes(tmp_path, capsys):
    config_file = prepare(tmp_path)
    run = earlier_run(tmp_path / "run", steps=4, checkpoints=(2, 4))
    with pytest.raises(ValueError) as refusal:
        check_inputs(load_config(config_file))
    newest = tmp_path / "run" / "checkpoints" / "step_00004"
    assert "holds an earlier run (4 of 6 steps, 2 checkpoints (newest: step 4), no model)" in str(refusal.value)
    assert f"model.path={newest} goes on from its newest weights" in str(refusal.value)
    held = check_inputs(load_config(config_file, ["run.overwrite=true"]))
    replacing = f"note: replacing {run.path}: 4 of 6 steps, 2 checkpoints (newest: step 4), no model; deleted when all"
    assert replacing in capsys.readouterr().out
    assert run.num_steps == 4 and newest.exists()  # models may still not load
    held.folder.release()


def test_what_a_killed_run_was_writing_makes_no_stranger_of_its_folder(tmp_path):
    run = earlier_run(tmp_path / "run", steps=4, checkpoints=(2, 4))
    (run.path / "status.json.part").write_text("{")
    (run.path / "model.part").mkdir()
    assert run.check_free(overwrite=True, inputs=[]).startswith(f"replacing {run.path}: 4 of 6 steps")
    run.empty()
    assert not [*run.path.iterdir()]
    (run.path / "thesis.tex.part").touch()
    with pytest.raises(ValueError, match="holds 'thesis.tex.part', so it is no run's folder"):
        run.check_free(overwrite=True, inputs=[])


def test_a_start_that_ends_while_its_models_load_leaves_an_earlier_run_as_it_was(tmp_path):
    config = prepare(tmp_path, run__overwrite=True)
    earlier_run(tmp_path / "run", steps=4, checkpoints=(4,))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with SmallRun(config) as run:
        run.wait_until(lambda: "loading the model" in run.output)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.output
    assert "note: replacing" in run.output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_report_of_a_run_that_was_killed_names_what_there_is_and_a_command_that_goes_on(tmp_path, capsys):
    config_file = prepare(tmp_path)
    run = earlier_run(tmp_path / "run", steps=3, checkpoints=(2,))
    save_config(run, config_file)
    report.main([str(run.path)])
    told = capsys.readouterr().out
    assert "3 of 6 steps with the vllm engine" in told and "ended without a word: killed" in told
    assert "training reward: 0.200 (all there is: 3 of 6 steps)" in told and "last 5" not in told
    newest = run.path / "checkpoints" / "step_00002"
    assert f"newest checkpoint: no trained model was saved (Hugging Face folder) {newest}" in told
    assert str(run.model) not in told
    command = shlex.split(told.partition("the optimizer begins anew)\n  ")[2].splitlines()[0])
    assert command[:5] == ["torchrun", "--nproc_per_node", "8", "-m", "launch.train"]
    config = train.parse(command[5:])
    assert (config.model.path, config.run.name, config.run.steps, config.run.seed) == (newest, "run-2", 4, 2)
    check_inputs(config).folder.release()


def test_a_report_says_why_a_run_ended_what_it_was_warned_of_and_that_nothing_was_saved(tmp_path, capsys):
    run = earlier_run(tmp_path / "run", steps=6)
    run.warn("optimizer.lr is too small")
    run.end("stopped by SIGTERM")
    run.end("a later reason")
    save_config(run, prepare(tmp_path))
    report.main([str(run.path)])
    told = capsys.readouterr().out
    assert "\n6 steps with" in told and "the run: stopped by SIGTERM\nwarning: optimizer.lr is too small\n" in told
    assert "0.150 (first 2 steps) -> 0.400 (last 5 steps)" in told  # (0.1 + 0.2) / 2, (0.2 + … + 0.6) / 5
    assert "no trained model and no checkpoint was saved" in told and "to go on" not in told
    run.take()
    report.main([str(run.path)])
    assert f"still going on: process {os.getpid()} on" in capsys.readouterr().out


def test_what_a_model_takes_is_known_before_it_loads(tmp_path):
    folder = make_model(tmp_path / "model")
    assert saved_model_bytes(folder, "float32") == pytest.approx(
        sum(path.stat().st_size for path in folder.iterdir()), rel=0.01
    )
    weights = (folder / "model.safetensors").stat().st_size
    assert saved_model_bytes(folder, "float32") - saved_model_bytes(folder, "bfloat16") == pytest.approx(
        weights / 2, rel=0.01
    )
    assert [in_words(n) for n in (300, 3 * 2**19, 8 * 10**9)] == ["0.3 KiB", "1.5 MiB", "7.5 GiB"]


def test_a_disk_that_cannot_hold_the_model_or_its_checkpoints_is_told_at_the_start(tmp_path, capsys):
    config_file = prepare(tmp_path)
    with small_disk(tmp_path / "disk", kib=1500) as disk:
        settings = [f"run.folder={disk}", "run.steps=9", "run.save_every=2"]
        check_inputs(load_config(config_file, settings)).folder.release()
        told = capsys.readouterr().out
        # 788.7 KiB with the tokenizer; 9 steps of 8 conversations of 2,048 + 192 bytes.
        assert "run.save_every: 2 makes 4 checkpoints; with the model and the traces they take about 4.0 MiB" in told
        fill(disk, leave_kib=900)
        with pytest.raises(ValueError) as refusal:
            check_inputs(load_config(config_file, settings))
        assert [*disk.iterdir()] == [disk / "filler"]
    told = str(refusal.value)
    assert "the model as it will be saved takes 788.7 KiB" in told and "the traces about 157.5 KiB" in told
    assert re.search(f"{disk}/run has (89|90)[0-9.]+ KiB free. Make room, or name another run.folder", told)


def test_the_place_of_the_run_that_makes_way_counts_as_free(tmp_path, capsys):
    config_file = prepare(tmp_path)
    with small_disk(tmp_path / "disk", kib=1500) as disk:
        earlier_run(disk / "run", steps=3, model=True)
        settings = [f"run.folder={disk}", "run.overwrite=true"]
        check_inputs(load_config(config_file, settings)).folder.release()
        with pytest.raises(ValueError, match="the model as it will be saved takes"):
            check_inputs(load_config(config_file, [f"run.folder={disk}", "run.name=other"]))


def test_a_file_is_whole_or_absent_and_a_line_whole_or_not_added_where_the_disk_is_full(tmp_path):
    with small_disk(tmp_path / "disk", kib=200) as disk:
        append_row(disk / "metrics.jsonl", {"step": 1})
        fill(disk, leave_kib=12)
        with pytest.raises(OSError, match="No space left"):
            append_row(disk / "metrics.jsonl", {"step": 2, "text": "x" * 50_000})
        with pytest.raises(OSError, match="No space left"), whole_file(disk / "traces.jsonl") as file:
            file.write("x" * 50_000)
        assert read_rows(disk / "metrics.jsonl") == [{"step": 1}]
        assert {path.name for path in disk.iterdir()} == {"filler", "metrics.jsonl"}
