"""Data files: the CollabLLM schema and JSONL are read; what is wrong is named by file, row and column."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.prepare_data import prepare, read_articles, scenario_row
from rollout.chat import Chat
from rollout.data import batch_rows, common_system_prompt, fit_prompts, read_scenarios, sample_seed, with_system_prompt
from rollout.settings import DataSettings

ROW = scenario_row({"title": "Salt", "text": "Salt keeps. It also melts ice."}, 0, "train")


def parquet(tmp_path, *rows, drop=()):
    rows = [{key: value for key, value in row.items() if key not in drop} for row in rows]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def jsonl(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def changed(**changes):
    row = copy.deepcopy(ROW)
    row.update(changes)
    return row


def test_a_parquet_row_becomes_a_scenario(tmp_path):
    (scenario,) = read_scenarios(parquet(tmp_path, ROW), need_reference=True)
    assert scenario.messages[0]["role"] == "system"
    assert scenario.messages[-1] == {
        "role": "user",
        "content": 'Hi! I need some help with a short piece: "Salt". I already know a few things I want in it.',
    }
    assert scenario.reference == "Salt keeps. It also melts ice."
    assert scenario.goal == "Write a short article about: Salt\n\nSalt keeps. It also melts ice."
    assert scenario.task_desc == "writing a short article"
    assert scenario.scenario_id == "short_articles/0"


def test_a_system_prompt_is_common_where_all_rows_have_the_same(tmp_path):
    (one,) = read_scenarios(parquet(tmp_path, ROW), need_reference=True)
    (none,) = read_scenarios(jsonl(tmp_path, {"prompt": "Hi", "reference": "Ho"}), need_reference=True)
    (other,) = with_system_prompt([none], "Be kind.")
    assert common_system_prompt([one, one]) == "You help people write short texts."
    assert common_system_prompt([other]) == "Be kind."
    for rows in ([one, other], [one, none], [none, none]):
        assert common_system_prompt(rows) is None


def test_columns_that_nobody_reads_are_told(tmp_path):
    told = []
    row = changed(extra_column=[1, 2], persona="outside the interaction_kwargs")
    row["extra_info"]["turns"] = 3
    path = parquet(tmp_path, row)
    assert len(read_scenarios(path, need_reference=True, tell=told.append)) == 1
    assert told == [f"{path}: nothing reads the columns 'extra_info.turns', 'extra_column', 'persona'"]
    path = jsonl(tmp_path, {"prompt": "Hi", "goal": "tea", "id": 1}, {"prompt": "Ho", "goals": ["x"], "goal": "y"})
    assert [s.goal for s in read_scenarios(path, need_reference=False, tell=told.append)] == ["tea", "y"]
    assert told[1:] == [f"{path}: nothing reads the columns 'id', 'goals'"]


def test_nothing_is_told_of_the_recipes_own_columns(tmp_path):
    told = []
    row = changed(ability="chat")
    row["extra_info"]["interaction_kwargs"]["persona"] = "A diver."
    read_scenarios(parquet(tmp_path, row), need_reference=True, tell=told.append)
    line = {"prompt": "Hi", "reference": "a", "goal": "b", "task_desc": "c", "persona": "d", "data_source": "e"}
    read_scenarios(jsonl(tmp_path, line), need_reference=True, tell=told.append)
    assert told == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"refernce": "x"}, "row 1: nothing reads 'refernce'; did you mean 'reference'? Rename it, or remove it"),
        ({"Reference": "x"}, "row 1: nothing reads 'Reference'; did you mean 'reference'?"),
        ({"taskdesc": "x"}, "row 1: nothing reads 'taskdesc'; did you mean 'task_desc'?"),
        ({"goals": "x"}, "row 1: nothing reads 'goals'; did you mean 'goal'?"),
    ],
)
def test_a_misspelt_column_is_an_error_in_the_row_that_lacks_the_right_one(tmp_path, line, message):
    path = jsonl(tmp_path, {"prompt": "Hi", "reference": "a", "goal": "b", "task_desc": "c"}, {"prompt": "Ho"} | line)
    with pytest.raises(ValueError, match="rows.jsonl") as error:
        read_scenarios(path, need_reference=True)
    assert message in str(error.value)


def test_a_misspelt_parquet_column_is_an_error_within_structs_too(tmp_path):
    row = changed()
    interaction = row["extra_info"]["interaction_kwargs"]
    interaction["taskdesc"] = interaction.pop("task_desc")
    with pytest.raises(ValueError, match="nothing reads 'extra_info.interaction_kwargs.taskdesc'; did you mean 'task_d"):
        read_scenarios(parquet(tmp_path, row), need_reference=True)
    row = changed(groundtruth=ROW["ground_truth"])
    with pytest.raises(ValueError, match="nothing reads 'groundtruth'; did you mean 'ground_truth'"):
        read_scenarios(parquet(tmp_path, row, drop=["ground_truth"]), need_reference=True)


def test_the_reference_may_come_from_the_reward_model(tmp_path):
    (scenario,) = read_scenarios(parquet(tmp_path, ROW, drop=["ground_truth"]), need_reference=True)
    assert scenario.reference == "Salt keeps. It also melts ice."


def test_a_prompt_may_hold_earlier_assistant_turns(tmp_path):
    prompt = [{"role": r, "content": r} for r in ("system", "user", "assistant", "user")]
    (scenario,) = read_scenarios(parquet(tmp_path, changed(prompt=prompt)), need_reference=True)
    assert [message["role"] for message in scenario.messages] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("column", ["prompt", "extra_info", "data_source"])
def test_a_missing_column_is_named_with_what_there_is(tmp_path, column):
    with pytest.raises(ValueError, match=f"rows.parquet: column '{column}' is missing; it has"):
        read_scenarios(parquet(tmp_path, ROW, drop=[column]), need_reference=True)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "row 1: 'prompt' is null"),
        ([], "row 1: 'prompt' is empty"),
        ([{"role": "user", "content": " "}], "message 0 of 'prompt' has no content"),
        ([{"role": "human", "content": "x"}], "needs a role of system, user, assistant"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "ends with 'assistant'"),
    ],
)
def test_a_bad_prompt_is_named_by_row(tmp_path, prompt, message):
    with pytest.raises(ValueError) as error:
        read_scenarios(parquet(tmp_path, ROW, changed(prompt=prompt)), need_reference=True)
    assert message in str(error.value) and "rows.parquet" in str(error.value)


def test_a_row_may_say_who_its_user_is(tmp_path):
    row = changed()
    row["extra_info"]["interaction_kwargs"]["persona"] = "A beekeeper."
    assert [s.persona for s in read_scenarios(parquet(tmp_path, ROW, row), need_reference=True)] == ["", "A beekeeper."]
    line = {"prompt": "Hi", "persona": "A diver."}
    assert [s.persona for s in read_scenarios(jsonl(tmp_path, line), need_reference=False)] == ["A diver."]
    with pytest.raises(ValueError, match="row 0: 'persona' must be text, not int"):
        read_scenarios(jsonl(tmp_path, line | {"persona": 3}), need_reference=False)


def test_a_missing_reference_matters_only_to_bleu(tmp_path):
    row = changed(ground_truth=None, reward_model={"style": "rule", "ground_truth": None})
    path = parquet(tmp_path, ROW, row)
    with pytest.raises(ValueError, match="row 1: the reference"):
        read_scenarios(path, need_reference=True)
    assert read_scenarios(path, need_reference=False)[1].reference is None


def test_a_missing_goal_matters_only_to_a_simulated_llm_user(tmp_path):
    path = jsonl(tmp_path, {"prompt": "x", "goal": "g"}, {"prompt": "y"})
    with pytest.raises(ValueError, match="row 1: goal is missing .*nothing to want"):
        read_scenarios(path, need_reference=False, user="llm")
    assert len(read_scenarios(path, need_reference=False)) == 2
    with pytest.raises(ValueError, match="row 1: goal and reference is missing"):
        read_scenarios(path, need_reference=False, user="scripted")


def test_a_column_of_another_type_is_named(tmp_path):
    with pytest.raises(ValueError, match="row 0: 'extra_info' must be a struct, not str"):
        read_scenarios(parquet(tmp_path, changed(extra_info="x")), need_reference=True)


def test_jsonl_takes_text_or_messages(tmp_path):
    rows = [
        {"prompt": "Hello", "reference": "r", "goal": "g", "task_desc": "t"},
        {"prompt": [{"role": "user", "content": "Hi"}], "reference": "r"},
    ]
    first, second = read_scenarios(jsonl(tmp_path, *rows), need_reference=True)
    assert first.messages == ({"role": "user", "content": "Hello"},) and first.goal == "g"
    assert second.messages == ({"role": "user", "content": "Hi"},) and second.goal == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{nonsense", "row 1: not valid JSON"),
        ({"text": "x"}, "row 1: 'prompt' is missing"),
        ({"prompt": ""}, "row 1: 'prompt' is empty"),
        ({"prompt": "x", "reference": 5}, "row 1: 'reference' must be text, not int"),
    ],
)
def test_a_bad_jsonl_row_is_named(tmp_path, row, message):
    with pytest.raises(ValueError) as error:
        read_scenarios(jsonl(tmp_path, {"prompt": "ok"}, row), need_reference=False)
    assert message in str(error.value)


def test_rows_are_the_files_lines_whatever_they_hold(tmp_path):
    path = tmp_path / "rows.jsonl"
    separators = json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{separators}\r\n\n".encode() + b'{"prompt": "x", "reference": 5}')
    with pytest.raises(ValueError, match="row 2: 'reference'"):
        read_scenarios(path, need_reference=False)
    path.write_text(separators + "\n", encoding="utf-8")
    (scenario,) = read_scenarios(path, need_reference=False)
    assert scenario.messages[0]["content"] == "a\u2028b\u0085c"
    path.write_text('{"prompt": "half \\ud83d"}')
    with pytest.raises(ValueError, match="row 0: not valid JSON"):
        read_scenarios(path, need_reference=False)


def test_files_that_are_missing_empty_or_of_another_kind_are_named(tmp_path):
    (tmp_path / "x.csv").write_text("a")
    (tmp_path / "x.parquet").write_text("not parquet")
    (tmp_path / "empty.jsonl").write_text("")
    for name, message in (
        ("gone.parquet", "no such data file"),
        ("x.csv", ".parquet or .jsonl"),
        ("x.parquet", "not a readable parquet"),
        ("empty.jsonl", "has no rows"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            read_scenarios(tmp_path / name, need_reference=False)
        assert name in str(error.value)


def test_every_scenario_is_taken_once_an_epoch_in_a_seeded_order():
    epoch = [row for step in range(3) for row in batch_rows(step, 13, 4, seed=1)]
    assert len(epoch) == len(set(epoch)) == 12  # 13 rows in batches of 4: the incomplete last one is dropped
    assert batch_rows(1, 13, 4, seed=1) == epoch[4:8]
    assert epoch != [row for step in range(3) for row in batch_rows(step, 13, 4, seed=2)]
    assert epoch != [row for step in range(3, 6) for row in batch_rows(step, 13, 4, seed=1)]


def test_more_prompts_a_step_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="prompts_per_step: 8 is more than the 5 prompts"):
        batch_rows(0, 5, 8, seed=1)


def test_sample_seeds_depend_on_run_step_scenario_sample_and_turn():
    base = (1, 2, 3, 4, 5)
    seeds = [sample_seed(*base)] + [sample_seed(*(n + (i == j) for j, n in enumerate(base))) for i in range(5)]
    assert max(Counter(seeds).values()) == 1 and sample_seed(*base) == seeds[0]


def test_long_prompts_are_refused_or_dropped(tmp_path, small_model):
    chat = Chat.load(small_model)
    path = jsonl(tmp_path, {"prompt": "short"}, {"prompt": "long " * 200})
    scenarios = read_scenarios(path, need_reference=False)
    with pytest.raises(ValueError, match="rows.jsonl, row 1: the prompt has .* tokens, the limit is 100"):
        fit_prompts(scenarios, chat, DataSettings(train=path), path, 100)
    kept, longest = fit_prompts(scenarios, chat, DataSettings(train=path, overlong_prompts="drop"), path, 100)
    assert [scenario.row for scenario in kept] == [0] and longest == len(chat.prompt_ids(scenarios[0].messages))
    with pytest.raises(ValueError, match="every prompt is longer than 3 tokens"):
        fit_prompts(scenarios, chat, DataSettings(train=path, overlong_prompts="drop"), path, 3)


def test_the_bundled_articles_are_96_distinct_texts_of_40_to_70_words():
    articles = read_articles(Path("configs/quickstart/articles.jsonl"))
    assert len(articles) == 96 == len({article["text"] for article in articles})
    assert all(40 <= len(article["text"].split()) <= 70 for article in articles)


def test_preparation_splits_in_order_and_refuses_duplicates(tmp_path):
    articles = [{"title": f"t{i}", "text": f"text {i}"} for i in range(3)]
    sizes = prepare(jsonl(tmp_path, *articles), 1, tmp_path / "out")
    assert sizes == {"train": 2, "validation": 1}
    (held_out,) = read_scenarios(tmp_path / "out" / "rl_validation.parquet", need_reference=True)
    assert held_out.reference == "text 2"
    with pytest.raises(ValueError, match="row 3: the same text as row 0"):
        prepare(jsonl(tmp_path, *articles, {"title": "t9", "text": "text 0"}), 1, tmp_path / "out")
    with pytest.raises(ValueError, match="leaves a split empty"):
        prepare(jsonl(tmp_path, *articles), 3, tmp_path / "out")


def test_content_parts_are_read_as_text_and_others_are_refused(tmp_path):
    def prompt(*parts):
        return jsonl(tmp_path, {"prompt": [{"role": "user", "content": list(parts)}], "reference": "Ho"})

    (scenario,) = read_scenarios(
        prompt({"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}), need_reference=True
    )
    assert scenario.messages == ({"role": "user", "content": "Hi\nyou"},)
    picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/bee.png"}}
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 0: message 0 of 'prompt' has a part of type 'image_url'"):
        read_scenarios(prompt({"type": "text", "text": "Hi"}, picture), need_reference=True)
    with pytest.raises(ValueError, match="has no content"):
        read_scenarios(prompt({"type": "text", "text": " "}), need_reference=True)
    row = changed(prompt=[{"role": "user", "content": [{"type": "text", "text": "Hi", "image": None}]}])
    (scenario,) = read_scenarios(parquet(tmp_path, row), need_reference=True)
    assert scenario.messages[-1]["content"] == "Hi"
