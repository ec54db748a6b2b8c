"""What a model computes with besides its weights: buffers, and numbers that its modules made of the configuration.

Rotary frequencies above all. Whatever shards or casts a model may narrow them with its weights, and it would be
another model, the more so the further into a sequence. So what a model holds, ready to train, is compared with what
`from_pretrained` alone would have given it.
"""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

Constants = dict[str, torch.Tensor | float]
"""By name. A tensor on the device `meta` stands for one of its dtype and shape, with values that nobody knows."""


def constants(model: nn.Module) -> Constants:
    """Every buffer of `model`, and every tensor and float that a module of it keeps as an attribute."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, module in model.named_modules()
        for name, value in (vars(module) | module._buffers).items()
        if isinstance(value, torch.Tensor | float)
    }


def plain_constants(config: PretrainedConfig, dtype: torch.dtype, folder: Path) -> Constants:
    """The constants of the model that `from_pretrained(folder, config=config, dtype=dtype)` gives, without its weights.

    Unknown are the values of buffers that the folder's files hold under another name.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)
    # As from_pretrained does: computed again, now that `dtype` is no longer what new tensors have.
    for module in model.modules():
        module._is_hf_initialized = next(module.buffers(recurse=False), None) is None
    model.initialize_weights()
    return constants(model) | _saved_buffers(model, folder)


def _saved_buffers(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """The buffers of `model` that its checkpoint holds, as from_pretrained reads them."""
    kept_wide = re.compile("|".join(model._keep_in_fp32_modules_strict or ["^$"]).replace("*", ".*"))
    saved, names = {}, {}
    for name, buffer in persistent_buffers(model).items():
        saved[name] = buffer.to("meta", torch.float32 if kept_wide.search(name) else buffer.dtype)
        # A checkpoint of the base model alone has its names without the prefix.
        names |= {name: name, name.removeprefix(f"{model.base_model_prefix}."): name}
    for path in sorted(folder.glob("model*.safetensors")) if saved else []:
        with safe_open(path, framework="pt") as file:
            for found in names.keys() & file.keys():
                saved[names[found]] = file.get_tensor(found).to(saved[names[found]].dtype)
    return saved


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those buffers of `model` that its checkpoint holds."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def check_constants(model: nn.Module, expected: Constants) -> None:
    """Raises RuntimeError naming the first constant of `model` that has another dtype or value than `expected`."""
    found = constants(model)
    for name, value in expected.items():
        if not _equal(found.get(name), value):
            raise RuntimeError(
                f"{name} is {_told(found.get(name))} in the model that is to be trained, and {_told(value)} in the one "
                "that from_pretrained loads: the two would answer differently. Try another deepspeed.stage"
            )


def _equal(found: torch.Tensor | float | None, expected: torch.Tensor | float) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return type(found) is type(expected) and found == expected
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return expected.is_meta or torch.equal(found.detach().cpu(), expected)


def _told(value: torch.Tensor | float | None) -> str:
    if not isinstance(value, torch.Tensor):
        return "missing" if value is None else repr(value)
    first = "" if value.is_meta else f", first {[float(f'{number:.7g}') for number in value.flatten()[:3].tolist()]}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{first}"
