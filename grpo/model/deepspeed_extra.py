"""Keys of DeepSpeed's configuration that have no setting here: merged into ours, never over it, none without effect.

DeepSpeed says nothing about a key it does not know. So its own reading of the configuration is watched: what it never
asked for does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from rollout.settings import near_name

SETTING = {
    "zero_optimization.stage": "deepspeed.stage",
    "communication_data_type": "deepspeed.communication_dtype",
    "gradient_clipping": "optimizer.max_grad_norm",
    "bf16": "model.dtype",
    "bf16.enabled": "model.dtype",
    "fp16": "model.dtype",
    "torch_autocast": "model.dtype",
    "optimizer": "the section optimizer",
    "scheduler": "optimizer.schedule",
    "train_batch_size": "rollout.prompts_per_step",
    "train_micro_batch_size_per_gpu": "update.max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "update.mini_batch_prompts",
    "activation_checkpointing": "model.gradient_checkpointing",
}
"""What stands for a key of DeepSpeed's here; those of `grpo.model.zero` without one are fixed."""

FIXED = ("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor", "managed_gradient_accumulation")
"""Would change what a gradient is: the losses already hold the denominators of the whole step."""


def with_extra(ours: Mapping[str, Any], extra: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`ours` and `extra`, section by section. Raises ValueError where `extra` sets what is set already."""
    both = dict(ours)
    for key, value in extra.items():
        path = f"{above}{key}"
        if isinstance(ours.get(key), Mapping) and isinstance(value, Mapping):
            both[key] = with_extra(ours[key], value, f"{path}.")
        elif key in ours or path in SETTING or path in FIXED:
            remedy = f"set {SETTING[path]} instead" if path in SETTING else "it is fixed, remove it"
            raise ValueError(f"deepspeed.extra.{path}: is not for extra; {remedy}")
        else:
            both[key] = deepcopy(value)  # DeepSpeed writes into what it is given
    return both


class Watched(dict):
    """A configuration that remembers which keys it was asked for, and its sections theirs."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(
            {key: Watched(value) if isinstance(value, Mapping) else value for key, value in values.items()}
        )
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def keys(self) -> Watched:
        return self

    def __iter__(self) -> Iterator[str]:  # ours, so that **section asks for each
        return super().__iter__()

    def __copy__(self) -> Watched:
        return self

    def unasked(self, above: str = "") -> Iterator[str]:
        """The first key that nobody asked for, in words, of each section that was read key by key."""
        for key in [*super().keys()]:
            if self.asked and key not in self.asked:
                yield f"deepspeed.extra.{above}{key}: DeepSpeed has no such key{near_name(key, self.asked)}"
            elif isinstance(value := super().__getitem__(key), Watched):
                yield from value.unasked(f"{above}{key}.")

