"""What a model folder must hold before anything computes with it: whole, plain weights that fit its configuration.

The model is put together on torch's meta device, which has names and shapes and no numbers: what transformers reports
about the checkpoint is then known in a moment, before any weight is read.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import BaseModelOutputWithPast

from rollout.settings import looked_at

INDEX = "model.safetensors.index.json"
QUANTIZED_DTYPES = re.compile(r"F8|F4|F6|I8|U8")
"""Of weights in safetensors files: numbers that are more than they say, beside scales."""
_QUANTIZED_NAME = re.compile(r"[-_.](awq|gptq|bnb|fp8|\w+fp4|w\d+a\d+|int\d|[48]-?bit|quantized)\b.*", re.IGNORECASE)
_LOGIT_SETTING = re.compile(r"(logit|head).*(cap|scal|mult)|(cap|scal|mult).*(logit|head)")
_ATTENTION_CAP = re.compile(r"att.*(logit|score|soft).*cap")
_EXPERTS = re.compile(r"\b\w*(expert|moe)\w*\.")
_TOLD = 3
"""Names in a message, of those there are."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder whose weights are all there, and fit."""

    path: Path
    config: PreTrainedConfig
    model: PreTrainedModel
    """Without numbers, on the meta device."""
    unused: tuple[str, ...]
    """Weights in the files that the model has no place for."""

    @property
    def num_embeddings(self) -> int:
        return len(self.model.get_input_embeddings().weight)

    @property
    def special_layers(self) -> str:
        """What it has that vLLM on a CPU cannot follow: experts take no new weights there, states no prefix cache."""
        if any(_EXPERTS.search(name) for name, _ in self.model.named_parameters()):
            return "experts"
        layers = DynamicCache(config=self.config).layers
        return "recurrent layers" * any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def check_files(folder: Path) -> None:
    """Raises ValueError unless `folder` holds the files of a Hugging Face model and its tokenizer, every shard of the
    weights included."""
    if not folder.is_dir():
        raise ValueError(
            f"model.path: there is no folder {folder}{looked_at(folder)}; give a local Hugging Face model folder"
        )
    missing = []
    if not (folder / "config.json").exists():
        missing.append("config.json")
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights and not (folder / INDEX).exists():
        missing.append(
            "model*.safetensors" + (" (an adapter alone is no model; merge it)" if any(folder.glob("adapter*")) else "")
        )
    elif not (folder / "model.safetensors").exists() and not (folder / INDEX).exists():
        missing.append(f"{INDEX}, which tells what is in {weights[0].name}")
    if not (folder / "tokenizer_config.json").exists():
        missing.append("tokenizer_config.json")
    if missing:
        raise ValueError(
            f"model.path: {folder} is not a Hugging Face model folder: it lacks {', '.join(missing)}; "
            "save one with model.save_pretrained and tokenizer.save_pretrained"
        )
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as error:  # a pointer of git-lfs, a download cut off
            raise ValueError(f"model.path: {file} is not a safetensors file ({error}); download it again") from error


def read_model(folder: Path) -> ModelFolder:
    """Raises ValueError where `folder` holds no causal model of the usual build, quantized weights, fewer weights than
    its model has, some of other shapes, or a head that its configuration denies."""
    config = _read_config(folder)
    _refuse_quantized(folder, config)
    try:
        with _silent_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, config=config, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
            )
    except Exception as error:  # a config that contradicts itself raises whatever its model stumbles over
        raise ValueError(f"model.path: {folder} cannot be loaded ({one_line(error)})") from error
    forward = inspect.signature(type(model).forward).parameters
    has_head = model.base_model is not model and isinstance(model.get_output_embeddings(), nn.Linear)
    if "past_key_values" not in forward or not has_head:
        raise ValueError(
            f"model.path: {folder} holds a {config.model_type} model, which keeps its past or computes its logits in a "
            "way of its own; take one of the families in grpo/README.md"
        )
    if report["mismatched_keys"]:
        told = [f"{name} is {_size(held)} instead of {_size(due)}" for name, held, due in report["mismatched_keys"]]
        raise ValueError(f"model.path: the weights of {folder} do not fit its config.json: {_first(told)}")
    if report["missing_keys"]:
        raise ValueError(
            f"model.path: the weights of {folder} lack {_first(report['missing_keys'])}, which would stay random; take "
            "a whole model folder"
            + (", or set tie_word_embeddings to true in config.json, if its head is that of its embeddings")
            * (_head_name(model) in report["missing_keys"])
        )
    _refuse_second_head(folder, config, model)
    return ModelFolder(folder, config, model, tuple(sorted(report["unexpected_keys"])))


def check_trainable(folder: ModelFolder, max_context_tokens: int) -> None:
    """Raises ValueError where the trainer would compute other log-probs than the model does, or the model has fewer
    positions than a run needs."""
    path, config = folder.path, folder.config
    if not _head_gives_the_logits(folder.model):
        settings = _settings(config, _LOGIT_SETTING)
        raise ValueError(
            f"model.path: {path} caps or scales its logits ({settings or 'in its forward'}), which the trainer does "
            "not compute; take a model with plain logits"
        )
    # The kernels that are fast take no cap, and transformers lets them leave it out without a word.
    if caps := _settings(config, _ATTENTION_CAP):
        raise ValueError(
            f"model.path: {path} caps its attention scores ({caps}), which the trainer does not compute; take a model "
            "without such caps"
        )
    if config.get_text_config() is not config:
        parts = ", ".join(name for name in config.sub_configs if getattr(config, name, None) is not None)
        raise ValueError(
            f"model.path: {path} holds a {config.model_type} model for more than text ({parts} in config.json); take a "
            "text-only model"
        )
    positions = getattr(config, "max_position_embeddings", None) or max_context_tokens
    if positions < max_context_tokens:
        raise ValueError(
            f"engine.max_context_tokens: {max_context_tokens} is more than the {positions} positions of {path}; "
            "lower it"
        )


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        with _silent_transformers():
            config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever a broken JSON file provokes in transformers
        raise ValueError(f"model.path: {folder}/config.json cannot be used ({one_line(error)})") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model.path: {folder} holds a {config.model_type} model, which has no causal language head")
    return config


def _weight_files(folder: Path) -> list[Path]:
    """Raises ValueError naming shards that the index promises and the folder lacks."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"model.path: {folder / INDEX} cannot be used ({error!r}); download it again") from error
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(
            f"model.path: {folder} lacks {_first(missing)} of the {len(shards)} files that {INDEX} names; download "
            "what is missing"
        )
    return [folder / shard for shard in shards]


def _refuse_quantized(folder: Path, config: PreTrainedConfig) -> None:
    found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if found is not None:
        settings = found if isinstance(found, Mapping) else vars(found)
        method = getattr(settings.get("quant_method"), "value", settings.get("quant_method")) or "an unnamed method"
        how = f"by {method} (quantization_config in config.json)"
    else:
        odd = [(name, dtype) for name, dtype in _dtypes(folder) if QUANTIZED_DTYPES.match(dtype)]
        if not odd:
            return
        how = f"({odd[0][0]} is {odd[0][1]})"
    plain = _QUANTIZED_NAME.sub("", folder.resolve().name)
    name = f", {plain}" if plain != folder.resolve().name else ""
    raise ValueError(
        f"model.path: the weights of {folder} are quantized {how}, and such weights cannot be trained; take the "
        f"unquantized model{name}"
    )


def _dtypes(folder: Path) -> Iterator[tuple[str, str]]:
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (not a mapping)
                yield name, weights.get_slice(name).get_dtype()


def _refuse_second_head(folder: Path, config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """A model that is tied by its config, with a head of its own in the files, is two: transformers computes with that
    head, vLLM and whoever loads the trained folder with the embeddings."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if not config.get_text_config().tie_word_embeddings or head is None or head.weight is embeddings.weight:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    both = [names[id(module.weight)] for module in (head, embeddings)]
    if not _hold_the_same(folder, *(checkpoint_name(model, name) for name in both)):
        raise ValueError(
            f"model.path: config.json of {folder} says tie_word_embeddings: true, and its weights hold {both[0]} of "
            f"other values than {both[1]}; set it to false, or remove {both[0]} if the embeddings are meant"
        )


def _hold_the_same(folder: Path, one: str, other: str) -> bool:
    held = {}
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as weights:
            held |= {name: weights.get_tensor(name) for name in {one, other} & {*weights.keys()}}
    return {one, other} <= held.keys() and torch.equal(held[one], held[other])


def checkpoint_name(model: PreTrainedModel, name: str) -> str:
    """What the weight called `name` in memory is called in files, where it is one there too."""
    [stored] = revert_weight_conversion(model, {name: model.get_parameter(name)})
    return stored


def _head_name(model: PreTrainedModel) -> str | None:
    head = model.get_output_embeddings()
    return next((f"{name}.weight" for name, module in model.named_modules() if module is head), None)


class _States(BaseModelOutputWithPast):
    """What a base model answers, with nothing in all that only some of them answer."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def _head_gives_the_logits(model: PreTrainedModel) -> bool:
    """Whether the whole model's logits are its head's answer to the base model's states, and nothing else.

    Found out by computing, whatever a config calls its caps and scales: the base model answers made-up states, and the
    head has a few rows of large numbers in place of the vocabulary.
    """
    head, base = model.get_output_embeddings(), model.base_model
    generator = torch.Generator().manual_seed(0)
    states_1LD = torch.randn(1, 3, head.in_features, generator=generator)
    weight_VD = torch.randn(8, head.in_features, generator=generator) * 100 / head.in_features**0.5
    own = head.weight, head.bias
    head.weight, head.bias = nn.Parameter(weight_VD), None if own[1] is None else nn.Parameter(torch.ones(8))
    base.forward = lambda *_, **__: _States(last_hidden_state=states_1LD)
    try:
        logits_1LV = model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits
        return logits_1LV.shape == (1, 3, 8) and torch.allclose(logits_1LV, head(states_1LD))
    finally:
        del base.forward
        head.weight, head.bias = own


def _settings(config: PreTrainedConfig, pattern: re.Pattern[str]) -> str:
    """Those of a configuration whose name is like that and that do something, sections within it included."""
    found = (item for item in _walk(config.to_dict()) if pattern.search(item[0].split(".")[-1]))
    return ", ".join(f"{name}: {value}" for name, value in found)


def _walk(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")
        elif value not in (None, False, 1):
            yield f"{prefix}{name}", value


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Without transformers' own report and progress bar: what is wrong with a folder, we tell."""
    log = transformers.utils.logging
    verbosity, shows_progress = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if shows_progress:
            log.enable_progress_bar()


def one_line(error: Exception) -> str:
    """What a library says, which may be a page of advice."""
    return " ".join(str(error).split())


def _first(names: Any) -> str:
    names = sorted(names)
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(names[:_TOLD]) + more


def _size(shape: Any) -> str:
    return " x ".join(map(str, shape))
