"""Model folders that would train wrongly, or fail half-way, are refused before anything loads, in plain words."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo.config_file import load_config
from launch.train import check_inputs, model_notes
from rollout.chat import Chat
from rollout.model_folder import INDEX, check_files, check_trainable, read_model
from tests.families import make_family
from tests.small_run import prepare
from tests.tiny import SPECIAL, WORDS, make_model

SMALL = {
    "vocab_size": len(SPECIAL + WORDS),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "bos_token_id": 0,
}


def check(folder: Path) -> None:
    """All that a run checks of a model's folder."""
    chat = Chat.load(folder)
    model = read_model(folder)
    check_trainable(model, 128)
    list(model_notes(model, chat, True))


def edit_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match="^model.path: ") as error:
        check(folder)
    message = str(error.value)
    assert str(folder) in message and "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "model", tied=False)


def other(folder: Path, config_class, **changes) -> Path:
    """Puts another model into the folder."""
    config = config_class(**(SMALL | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_whole_model_is_taken(folder):
    check(folder)


def test_the_check_comes_before_anything_else_of_a_run(tmp_path):
    config = prepare(tmp_path)
    edit_weights(tmp_path / "model", lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight, which would stay random"):
        check_inputs(load_config(config, []))


def test_every_weight_that_the_files_lack_is_named(folder):
    edit_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    message = refusal(folder)
    assert "lack lm_head.weight, which would stay random" in message and "tie_word_embeddings" in message

    def drop(weights):
        for name in [name for name in weights if ".layers.1." in name]:
            del weights[name]

    edit_weights(folder, drop)
    assert "lack lm_head.weight, model.layers.1.input_layernorm.weight" in (message := refusal(folder))
    assert "and 7 more" in message  # nine of the layer and the head, of which three are told


def test_a_weight_of_another_shape_is_named_with_both(folder):
    edit_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(64)}))
    assert "model.norm.weight is 64 instead of 128" in refusal(folder)


def test_a_tied_model_with_a_head_of_its_own_is_two_models(tmp_path):
    folder = make_model(tmp_path / "model", tied=True)
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(folder, lambda weights: weights.update({"lm_head.weight": embeddings.clone()}))
    check(folder)  # the same twice: one head
    edit_weights(folder, lambda weights: weights.update({"lm_head.weight": embeddings + 0.1}))
    message = refusal(folder)
    assert "tie_word_embeddings: true" in message and "lm_head.weight" in message
    assert "model.embed_tokens.weight" in message
    edit_json(folder / "config.json", tie_word_embeddings=False)
    check(folder)


def test_weights_without_a_place_in_the_model_are_told(folder):
    edit_weights(folder, lambda weights: weights.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}))
    notes = [*model_notes(read_model(folder), Chat.load(folder), True)]
    assert any("holds 1 weights that its model has no place for, such as model.layers.2" in note for note in notes)


def test_a_shard_that_is_not_there_is_named(folder):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    check(folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].unlink()
    assert f"lacks {shards[1].name} of the {len(shards)} files that {INDEX} names" in refusal(folder)
    (folder / INDEX).write_text("{}")
    assert f"{INDEX} cannot be used" in refusal(folder)
    (folder / INDEX).unlink()
    assert f"it lacks {INDEX}" in refusal(folder)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_quantized_weights_are_refused_with_the_name_of_the_model_to_take(tmp_path, method):
    folder = make_model(tmp_path / "Qwen3-4B-AWQ")
    edit_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4, "group_size": 64})
    message = refusal(folder)
    assert f"quantized by {method} (quantization_config in config.json)" in message
    assert message.endswith("take the unquantized model, Qwen3-4B")


def test_quantized_weights_are_seen_without_a_word_in_the_config(folder):
    edit_weights(folder, lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].to(torch.int8)}))
    assert "quantized (lm_head.weight is I8)" in refusal(folder)


@pytest.mark.parametrize(
    ("config_class", "changes", "told"),
    [
        ("Gemma2Config", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0"),
        ("GraniteConfig", {"logits_scaling": 8.0}, "logits_scaling: 8.0"),
        ("CohereConfig", {"logit_scale": 0.0625}, "logit_scale: 0.0625"),
        (
            "RecurrentGemmaConfig",
            {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16, "logits_soft_cap": 30.0},
            "logits_soft_cap: 30.0",
        ),
    ],
)
def test_logits_that_are_not_the_heads_own_are_found_out_by_computing(folder, config_class, changes, told):
    other(folder, getattr(transformers, config_class), **changes)
    message = refusal(folder)
    assert "caps or scales its logits" in message and told in message


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        ("Gemma2Config", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
        ("GraniteConfig", {"logits_scaling": 1.0}),
    ],
)
def test_a_cap_or_scale_that_does_nothing_is_no_reason(folder, config_class, changes):
    check(other(folder, getattr(transformers, config_class), **changes))


def test_capped_attention_scores_are_refused(folder):
    other(folder, transformers.Gemma2Config, final_logit_softcapping=None, attn_logit_softcapping=50.0)
    assert "caps its attention scores (attn_logit_softcapping: 50.0)" in refusal(folder)


def test_a_cap_within_a_section_is_found_and_so_are_other_senses_than_text(folder):
    text = SMALL | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sections = {"vision_config": vision | {"head_dim": 8}, "audio_config": None}
    for cap, told in ((30.0, "text_config.final_logit_softcapping: 30.0"), (None, "more than text (")):
        config = transformers.Gemma4Config(
            text_config=text
            | {"final_logit_softcapping": cap, "global_head_dim": 8, "hidden_size_per_layer_input": 8}
            | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": SMALL["vocab_size"]},
            **sections,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        assert told in refusal(folder)


def test_a_model_of_another_build_is_refused(folder):
    message = refusal(other(folder, transformers.MambaConfig, state_size=4))
    assert "holds a mamba model" in message and "families in grpo/README.md" in message


def test_a_model_without_a_causal_head_or_with_a_broken_config_is_refused(folder):
    for text, message in (
        ('{"model_type": "clip"}', "has no causal language head"),
        ('{"model_type": "nothing"}', "config.json cannot be used"),
        ("{", "config.json is broken"),
    ):
        (folder / "config.json").write_text(text)
        assert message in refusal(folder)


def test_fewer_positions_than_the_run_needs_are_told(folder):
    with pytest.raises(ValueError, match=r"engine\.max_context_tokens: 1024 is more than the 512 positions"):
        check_trainable(read_model(folder), 1024)


def with_token(folder: Path, template: str, **kinds) -> int:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|turn|>"], **kinds)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer.convert_tokens_to_ids("<|turn|>")


def test_a_token_beyond_the_embeddings_that_the_template_writes_is_named(folder):
    number = with_token(folder, "{% for m in messages %}<|turn|> {{ m.content }} <end> {% endfor %}<|turn|> ")
    size = AutoConfig.from_pretrained(folder).vocab_size
    message = refusal(folder)
    assert f"<|turn|> ({number}), which its chat template writes, beyond the {size} embeddings" in message


def test_a_token_beyond_the_embeddings_that_nobody_needs_is_told_and_never_said(folder):
    template = AutoTokenizer.from_pretrained(folder).chat_template
    number = with_token(folder, template)
    chat, model = Chat.load(folder), read_model(folder)
    assert any(f"<|turn|> ({number}) beyond the model's" in note for note in model_notes(model, chat, True))
    assert chat.without_control_tokens("bees <|turn|> hum") == "bees   hum"


def test_an_ordinary_word_beyond_the_embeddings_is_refused(folder):
    edit_json(folder / "config.json", vocab_size=20)
    edit_weights(
        folder,
        lambda weights: weights.update(
            {name: weights[name][:20].clone() for name in ("lm_head.weight", "model.embed_tokens.weight")}
        ),
    )
    assert "beyond the 20 embeddings" in refusal(folder)


def test_a_file_that_is_no_weights_file_is_named(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        check_files(folder)


def test_all_places_that_name_an_end_of_turn_count_and_are_told(folder):
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=[1, 7, 8])
    assert Chat.load(folder).stop_ids == (1, 7, 8)
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    edit_json(folder / "config.json", eos_token_id=7)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "?"  # the template goes on to end turns with <end>
    tokenizer.save_pretrained(folder)
    chat = Chat.load(folder)
    question = tokenizer.convert_tokens_to_ids("?")
    assert chat.stop_ids == tuple(sorted({1, 7, 9, question}))
    assert "<end> (1: chat template)" in chat.ends_note and f"? ({question}: tokenizer)" in chat.ends_note
    assert "(7: config.json)" in chat.ends_note and "(9: generation_config.json)" in chat.ends_note


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["<end>", True, -1, [1, None, "x"], 1.0])
def test_an_end_of_turn_that_is_no_token_id_is_refused(folder, name, value):
    edit_json(folder / name, eos_token_id=value)
    with pytest.raises(ValueError, match=f"eos_token_id of .*{name} is .*write a token id, or a list of them"):
        Chat.load(folder)


@pytest.mark.parametrize(("family", "what"), [("Mixtral", "experts"), ("Qwen3.5", "recurrent layers")])
def test_what_vllm_cannot_follow_on_a_cpu_is_refused_before_it_loads(tmp_path, monkeypatch, family, what):
    config = prepare(tmp_path)
    make_family(family, tmp_path / "model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_inputs(load_config(config, ["engine.kind=transformers"]))
    with pytest.raises(ValueError, match=f"cannot follow the training of {what}, .* engine.kind=transformers"):
        check_inputs(load_config(config, ["engine.kind=vllm"]))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("named", [None, [], ["QwenForCausalLM"], "LlamaForCausalLM", ["LlamaForCausalLM", "LlamaModel"]])
def test_a_folder_that_names_other_classes_than_its_models_is_refused_for_vllm(tmp_path, named):
    config = prepare(tmp_path)
    make_family("Llama", tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", architectures=named)
    remedy = r'write "architectures": \["LlamaForCausalLM"\] there, or set engine.kind=transformers'
    with pytest.raises(ValueError, match=f"config.json, which is {re.escape(json.dumps(named))}, .*{remedy}"):
        check_inputs(load_config(config, ["engine.kind=vllm"]))
    check_inputs(load_config(config, ["engine.kind=transformers"]))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("OLMo2", "no classes of its own for Olmo2ForCausalLM, .*engine.kind=transformers, or .*remote"),
        ("SmolLM3", "no classes of its own for SmolLM3ForCausalLM, .*engine.kind=transformers, or .*remote"),
        ("GPT-NeoX", "no classes of its own for GPTNeoXForCausalLM, .*engine.kind=transformers, or .*remote"),
        ("Bloom", "BloomForCausalLM, .* refuses new weights; set engine.kind=transformers"),
        ("Llama", None),
    ],
)
def test_a_model_that_vllm_could_not_follow_or_would_change_is_refused_before_it_loads(tmp_path, family, refusal):
    config = prepare(tmp_path)
    make_family(family, tmp_path / "model")
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            check_inputs(load_config(config, ["engine.kind=vllm"]))
    else:
        check_inputs(load_config(config, ["engine.kind=vllm"]))
