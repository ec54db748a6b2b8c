"""Settings: every fault is named with its key and its remedy, before anything loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpo.config_file import load_config
from grpo.presets import PRESETS

QUICKSTART = Path("configs/quickstart.yaml")
REMOTE = ["engine.kind=remote", "engine.base_url=http://h/v1", "engine.weights_folder=w"]


def write(tmp_path, **changes):
    """The quickstart's settings with `section__key=value` changed; a value of None removes the key."""
    values = yaml.safe_load(QUICKSTART.read_text())
    for name, value in changes.items():
        *sections, last = name.split("__")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=str)
def test_every_shipped_config_is_valid(path):
    load_config(path)


@pytest.mark.parametrize("path", sorted(Path("configs/rewards").glob("*.yaml")), ids=str)
def test_every_shipped_reward_file_replaces_the_section(path):
    assert load_config(QUICKSTART, [f"rewards={path}"]).rewards.weights == yaml.safe_load(path.read_text())["weights"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run__steps": True}, "run.steps: true will not do: this is not a true/false setting"),
        ({"rewards__clamp": [False, True]}, "rewards.clamp: [false, true] will not do: this is not a true/false"),
        (
            {"rewards__weights": {"token_amount": True}},
            "rewards.weights: {token_amount: true} will not do: this is not a true/false setting (YAML reads on, off, "
            "yes and no as true or false); write a number, or a text in quotes",
        ),
        ({"engine__sleep": "maybe"}, "engine.sleep: 'maybe' will not do: input should be true or false"),
        ({"rewards__clamp": 1}, "rewards.clamp: 1 will not do: input should be a list, such as [0.1, 0.9]"),
        ({"rewards__weights": 1}, "rewards.weights: 1 will not do: input should be a mapping, such as {key: value}"),
        ({"optimizer__lr": float("inf")}, "optimizer.lr: .inf will not do: input should be a finite number"),
        (
            {"rollout__dynamic_sampling": 3},
            "rollout.dynamic_sampling: 3 will not do: it is a section with keys of its own",
        ),
        ({"loss": {"variant": "cispo", "dual_clip": 3.0}}, "loss: dual_clip has no meaning with variant: cispo"),
        (
            {"rewards__soft_overlong": {"penalty": 1.0}, "rewards__truncated": 0.0},
            "rewards: soft_overlong.penalty needs truncated: score",
        ),
        ({"rollout__group_sise": 8}, "rollout.group_sise: there is no such key; did you mean 'group_size'"),
        ({"optimiser": {"lr": 1}}, "optimiser: there is no such key; did you mean 'optimizer'"),
        (
            {"rewards__interactivity": {"bye": "llm"}},
            "rewards.interactivity.bye: there is no such key; did you mean 'by'",
        ),
        ({"rewards__weights": {"blue_score": 1.0}}, "there is no reward 'blue_score'; did you mean 'bleu_score'"),
        ({"rewards__weights": {"politeness": 1.0}}, "known rewards: bleu_score, interactivity, token_amount"),
        ({"rewards__weights": {"bleu_score": float("nan")}}, "rewards.weights.bleu_score"),
        ({"rewards__interactivity": {"by": "llm"}}, "need rewards.judge with base_url and model"),
        ({"rollout__user": {"kind": "llm"}}, "kind: llm needs rollout.user.endpoint"),
        (
            {"update__mini_batch_prompts": 3, "rollout__prompts_per_step": 8},
            "3 does not divide rollout.prompts_per_step: 8; use one of [1, 2, 4, 8]",
        ),
        ({"rollout__max_reply_tokens": 768}, "leaves no room for a prompt in engine.max_context_tokens: 768"),
        ({"rollout__group_size": 1}, "rollout.group_size: 1 will not do: input should be greater than or equal to 2"),
        ({"optimizer__lr": "fast"}, "optimizer.lr: 'fast' will not do"),
        ({"loss__variant": "ppo"}, "loss.variant: 'ppo' will not do: input should be 'grpo', 'gspo' or 'cispo'"),
        ({"model__path": None}, "model.path: is missing"),
        ({"rewards__clamp": [1.0, -1.0]}, "rewards.clamp: [1.0, -1.0] holds nothing; write [low, high]"),
        ({"optimizer__betas": [0.9, 1.0]}, "optimizer.betas.1: 1.0 will not do: input should be less than 1"),
        ({"rewards__truncated": "maks"}, "rewards.truncated: 'maks' will not do: a finite number, score or mask"),
        (
            {"rewards__judge": {"base_url": "http://h:abc/v1", "model": "m"}},
            "rewards.judge.base_url: 'http://h:abc/v1' is no",
        ),
        (
            {"run__name": 7},
            "run.name: 7 will not do: input should be a text (quote it; on the command line: \"run.name='...'\")",
        ),
        ({"data__train": 2024}, "data.train: 2024 will not do: input should be a path (quote it;"),
        ({"run__name": {"a": None}}, "run.name: {a: null} will not do: input should be a text (quote it;"),
        ({"rollout__user": {"prompt": []}}, "rollout.user.prompt: [] is neither a user (default, lazy,"),
        (
            {"run__name": "a/b"},
            "run.name: 'a/b' will not do; write letters, digits, _, - and . alone, and neither - nor . first",
        ),
    ],
)
def test_a_fault_names_its_key_and_the_remedy(tmp_path, change, message):
    with pytest.raises(ValueError) as error:
        load_config(write(tmp_path, **change))
    assert message in str(error.value)
    assert str(tmp_path / "config.yaml") in str(error.value)


def test_all_faults_are_told_at_once(tmp_path):
    with pytest.raises(ValueError) as error:
        load_config(write(tmp_path, rollout__group_sise=8, optimizer__lr=-1.0))
    assert "group_sise" in str(error.value) and "optimizer.lr" in str(error.value)


def test_overrides_change_one_key_and_are_checked_like_the_file():
    config = load_config(
        QUICKSTART, ["rewards.weights.token_amount=-0.2", "optimizer.lr=1e-6", "rollout.user.kind=scripted"]
    )
    assert config.rewards.weights == {"bleu_score": 1.0, "interactivity": 1.0, "token_amount": -0.2}
    assert config.optimizer.lr == 1e-6
    with pytest.raises(ValueError, match="did you mean 'seed'"):
        load_config(QUICKSTART, ["run.sed=2"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed", "is not an override; write section.key=value"),
        ("reward=configs/rewards/short_replies.yaml", "did you mean 'rewards'"),
        ("rewards=configs/rewards/none.yaml", "none.yaml: cannot be read"),
        ("run.seed=[1", "'run.seed=[1': not valid YAML"),
        ("run.seed=null", "run.seed: null will not do"),
        ("run.steps=", "'run.steps=': no value follows; write one, or null"),
        ("run.steps=010", "'run.steps=010': 010 begins with a zero, which makes a number octal in YAML; write 10, or"),
        ("rewards.clamp=[no, yes]", "rewards.clamp: [false, true] will not do: this is not a true/false setting"),
        ("rewards.weights.token_amount=on", "rewards.weights: {"),
        ("rewards.weights={on: 1}", "YAML does not read the key on as a text; quote it"),
        ("run.seed.x=1", "seed is not a section"),
        ("preset=[dapo]", "preset: ['dapo'] will not do"),
    ],
)
def test_a_bad_override_is_explained(override, message):
    with pytest.raises(ValueError) as error:
        load_config(QUICKSTART, [override])
    assert message in str(error.value)


def test_a_preset_lies_under_the_file_and_over_it_on_the_command_line(tmp_path):
    path = write(tmp_path, preset="dapo", loss={"clip_high": 0.3})
    config = load_config(path)
    assert config.loss.clip_high == 0.3 and config.rollout.dynamic_sampling.max_rounds == 3
    assert config.rollout.prompts_per_step == load_config(QUICKSTART).rollout.prompts_per_step
    over = load_config(path, ["preset=dr_grpo", "loss.clip_low=0.1"])
    assert over.loss.aggregate == "seq_mean_token_sum_norm" and over.advantage.scale == "none"
    assert over.loss.clip_high == 0.2 and over.loss.clip_low == 0.1
    assert PRESETS["dr_grpo"]["loss"]["clip_low"] == 0.2
    assert load_config(path, ["preset=null"]).preset is None


def test_a_heading_with_nothing_under_it_is_a_section_of_defaults(tmp_path):
    path = tmp_path / "config.yaml"
    values = yaml.safe_load(QUICKSTART.read_text()) | {"loss": None, "preset": "dapo"}
    values["run"]["budget"] = None
    path.write_text(yaml.safe_dump(values))
    config = load_config(path)
    assert config.run.budget.hours is None and config.loss.clip_high == 0.28
    path.write_text(yaml.safe_dump(values | {"model": None}))
    with pytest.raises(ValueError, match="model.path: is missing"):
        load_config(path)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], None),
        (["loss.correction_cap=3"], "loss.correction_cap: 3.0 has no effect: nothing is corrected"),
        (["loss.correction_cap=3", "loss.correction=token"], None),
        (["loss.kl_estimator=k3"], "loss.kl_estimator: k3 has no effect: there is no KL penalty"),
        (["loss.kl_estimator=k3", "loss.kl_coef=0.1"], None),
        (["loss.kl_estimator=k3", "loss.kl_coef=0.1", "loss.kl_placement=in_reward"], "takes the sum of k1"),
        (["preset=dapo"], "loss.clip_high: 0.28 has no effect: old and new log-probs are the same"),
        (["preset=dapo", "update.mini_batch_prompts=1"], None),
        (["data.validation=null", "evaluation.every=5"], "evaluation.every: 5 has no effect: no prompts are held out"),
        ([*REMOTE, "engine.sleep=false"], "engine.sleep: False has no effect: the policy's server is started with"),
        (REMOTE, None),
    ],
)
def test_a_setting_without_effect_is_told(overrides, told):
    base = ["update.mini_batch_prompts=null", "loss.kl_coef=0", "loss.kl_estimator=low_var_kl"]
    notes = list(load_config(QUICKSTART, base + overrides).without_effect())
    assert not notes if told is None else [note for note in notes if told in note]


def test_a_preset_leaves_nothing_of_another_method_behind():
    recipe = Path("configs/medium_qwen3_4b.yaml")
    once = load_config(recipe, ["preset=dr_grpo"])
    assert once.loss.dual_clip is None and once.loss.kl_coef == 0
    twice = load_config(
        recipe, ["loss.kl_placement=in_reward", "preset=dapo", "rewards.truncated=0.0", "preset=dr_grpo"]
    )
    assert twice.model_dump() == once.model_dump()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid_and_sets_what_it_says(preset):
    values = load_config(QUICKSTART, [f"preset={preset}"]).model_dump()
    for section, settings in PRESETS[preset].items():
        for key, value in settings.items():
            assert values[section][key] == value


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="preset: 'dappo' will not do: .*'dapo'"):
        load_config(QUICKSTART, ["preset=dappo"])


def test_the_recipe_is_its_preset():
    recipe = load_config(Path("configs/medium_qwen3_4b.yaml"))
    over = load_config(Path("configs/medium_qwen3_4b.yaml"), ["preset=collabllm"])
    assert over.model_dump(exclude={"preset"}) == recipe.model_dump(exclude={"preset"})


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "broken.yaml").write_text("run: [1")
    (tmp_path / "list.yaml").write_text("- 1")
    for name, message in (
        ("broken.yaml", "not valid YAML"),
        ("list.yaml", "must be a mapping"),
        ("gone.yaml", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            load_config(tmp_path / name)
        assert name in str(error.value)


@pytest.mark.parametrize("name", ["..", ".", "-x", "x" * 101])
def test_a_run_has_a_plain_name(name):
    with pytest.raises(ValueError, match="run.name"):
        load_config(QUICKSTART, [f"run.name='{name}'"])


@pytest.mark.parametrize(
    "override",
    [
        "engine.base_url=[http://me:hunter2@h:1/v1]",
        "rewards.judge=[http://me:hunter2@h:1/v1]",
        "rollout.user=http://me:hunter2@h:1/v1",
        "rollout.user.endpoint=[{base_url: 'http://me:hunter2@h:1/v1'}]",
        "rollout.user.endpoint.model={u: 'http://me:hunter2@h:1/v1'}",
        "engine=http://me:hunter2@h:1/v1",
        "http://me:hunter2@h",
    ],
)
def test_an_address_in_the_wrong_place_is_not_quoted_with_its_password(override):
    with pytest.raises(ValueError) as told:
        load_config(QUICKSTART, [override])
    assert "hunter2" not in str(told.value) and "***@" in str(told.value)


def test_a_date_where_text_belongs_is_that_text():
    assert load_config(QUICKSTART, ["run.name=2024-01-01"]).run.name == "2024-01-01"


def test_a_section_may_be_written_once_and_merged_into_another(tmp_path):
    path = write(tmp_path, rollout__user=None, rewards=None)
    user = "{kind: llm, endpoint: &server {base_url: 'http://h/v1', model: a}}"
    path.write_text(
        path.read_text().replace("rollout:\n", f"rollout:\n  user: {user}\n")
        + "rewards: {weights: {interactivity: 1}, judge: {<<: *server, model: b}}\n"
    )
    config = load_config(path)
    assert config.rewards.judge.base_url == "http://h/v1"
    assert (config.rollout.user.endpoint.model, config.rewards.judge.model) == ("a", "b")


@pytest.mark.parametrize(("lr", "clamp"), [("1e-6", "[-1e0, 1]"), ("0.000_001", "[-1, 1.]")])
def test_numbers_may_be_written_in_any_usual_way(lr, clamp):
    config = load_config(QUICKSTART, [f"optimizer.lr={lr}", f"rewards.clamp={clamp}"])
    assert config.optimizer.lr == 1e-6 and config.rewards.clamp == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("has_gpu", "units", "dtype"),
    [
        (True, {}, "bfloat16"),
        (False, {"amx_bf16": True, "avx512_bf16": True}, "bfloat16"),
        (False, {"amx_bf16": False, "avx512_bf16": True}, "float32"),
        (False, {}, "float32"),
    ],
)
def test_an_automatic_dtype_is_the_one_that_this_machine_computes_faster(monkeypatch, has_gpu, units, dtype):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: units)
    assert load_config(QUICKSTART, ["model.dtype=auto"]).model.dtype == dtype
    assert load_config(QUICKSTART, ["model.dtype=float32"]).model.dtype == "float32"
