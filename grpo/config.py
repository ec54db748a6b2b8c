"""A run's settings: one YAML file, validated once, before any model loads.

Unknown keys name the nearest known one. Overrides are `section.key=value` with YAML values; a whole
section may come from a file of its own: `rewards=configs/rewards/short_replies.yaml`.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from grpo.loss import Aggregate, Clip, Correction, KLEstimator, Variant
from grpo.presets import PRESETS
from rewards.settings import RewardSettings
from rollout.settings import DataSettings, EngineSettings, RolloutSettings, Section, without_password

Fraction = Annotated[float, Field(ge=0, lt=1)]


class BudgetSettings(Section):
    """Training stops after the step that used up any of these, and saves the model."""

    user_tokens: int | None = Field(
        None, ge=1, description="tokens; read and written by the simulated user's server in all; null: any number"
    )
    judge_tokens: int | None = Field(
        None, ge=1, description="tokens; read and written by the judge's server in all; null: any number"
    )
    hours: float | None = Field(
        None, gt=0, description="hours; of training, evaluations included; null: as long as it takes"
    )


class RunSettings(Section):
    name: str = Field(pattern=r"^\w[\w.-]*$", max_length=100, description="folder of the run under run.folder")
    folder: Path = Field(Path("runs"), description="where runs are kept")
    seed: int = Field(1, ge=0, lt=2**32, description="seed of everything that is drawn")
    steps: int | None = Field(None, ge=1, description="steps; null: run.epochs decides")
    epochs: int = Field(1, ge=1, description="passes over the training data (where run.steps is null)")
    save_every: int | None = Field(
        None, ge=1, description="steps between saved model folders; the last step is always saved"
    )
    budget: BudgetSettings = BudgetSettings()
    overwrite: bool = Field(False, description="replace the folder of an earlier run of this name")


class ModelSettings(Section):
    path: Path = Field(description="local Hugging Face model folder")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="of weights and activations; DeepSpeed keeps float32 masters"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in backward: less memory, a third more time"
    )
    attention: Literal["auto", "dense"] = Field(
        "auto", description="in rows that several replies share; auto: FlexAttention on a GPU, else prefix attention"
    )


class AdvantageSettings(Section):
    baseline: Literal["mean", "leave_one_out"] = Field(
        "mean", description="what a reply is compared with: its group, or the others in it"
    )
    scale: Literal["group_std", "batch_std", "none"] = Field(
        "group_std", description="what the difference is divided by"
    )


class LossSettings(Section):
    variant: Variant = Field(
        "grpo", description="policy loss: PPO clipping per token, per sequence (gspo), or clipped weights (cispo)"
    )
    aggregate: Aggregate = Field("token_mean", description="how token losses add up over the optimizer step")
    clip_low: float = Field(0.2, gt=0, lt=1, description="ratio may fall to 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="ratio may rise to 1 + clip_high")
    dual_clip: float | None = Field(None, gt=1, description="bound of the loss at negative advantages; null: none")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL penalty; 0 loads no reference model")
    kl_estimator: KLEstimator = Field("low_var_kl", description="estimator of the KL penalty in the loss")
    kl_placement: Literal["in_loss", "in_reward"] = Field(
        "in_loss", description="where the penalty goes; in_reward takes its sum over the reply (k1) from the reward"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    correction: Correction = Field(
        "none",
        description="weight of the policy loss by trainer's ÷ sampler's probability: none, per token or sequence",
    )
    correction_cap: float = Field(2.0, gt=0, description="largest such weight")

    @model_validator(mode="after")
    def _dual_clip_bounds_a_clipped_loss(self) -> LossSettings:
        if self.variant == "cispo" and self.dual_clip is not None:
            raise ValueError("dual_clip has no meaning with variant: cispo; set dual_clip: null")
        return self

    @property
    def clip(self) -> Clip:
        return Clip(self.clip_low, self.clip_high, self.dual_clip)

    @property
    def needs_whole_samples(self) -> bool:
        """Whether the loss averages over a sample, all of whose tokens then lie in one micro-batch."""
        return self.variant == "gspo" or self.correction == "sequence"

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_placement == "in_loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_placement == "in_reward"


class UpdateSettings(Section):
    mini_batch_prompts: int | None = Field(None, ge=1, description="prompts per optimizer step; null: all of a step's")
    max_tokens_per_micro_batch: int = Field(
        8192, ge=2, description="tokens; padding included, of one forward pass on one rank"
    )
    share_prompt: bool = Field(True, description="compute a group's prompt once; false: one sequence per row, padded")


class OptimizerSettings(Section):
    lr: float = Field(1e-6, gt=0, description="learning rate of AdamW")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="AdamW's averages")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's decoupled weight decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after warm-up, to 0 at the last step"
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")


class DeepSpeedSettings(Section):
    stage: Literal[0, 1, 2, 3] = Field(3, description="ZeRO stage: what is sharded over the ranks (0: nothing)")


class EvaluationSettings(Section):
    every: int | None = Field(
        None, ge=1, description="steps between evaluations; null: before and after only, where there is data"
    )
    prompts: int | None = Field(None, ge=1, description="held-out prompts used; null: all")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0: the most likely token")
    continuations: int = Field(1, ge=0, description="conversations per held-out prompt")
    max_new_turns: int | None = Field(
        None,
        ge=2,
        description="messages; of both sides after the prompt, up to the assistant's last; null: rollout's limits",
    )
    user_opens: bool = Field(
        False, description="leave only the system message of a prompt: the simulated user writes the opening itself"
    )

    @model_validator(mode="after")
    def _turns_need_a_conversation(self) -> EvaluationSettings:
        if self.max_new_turns is not None and self.continuations == 0:
            raise ValueError(
                "continuations: 0 ends every conversation with its first reply, so max_new_turns has no meaning; "
                "set evaluation.continuations: 1, or evaluation.max_new_turns: null"
            )
        return self


class Config(Section):
    preset: Literal[None, *PRESETS] = Field(
        None, description=f"published settings (grpo/presets.py) under the file's: {', '.join(PRESETS)}"
    )
    run: RunSettings
    model: ModelSettings
    data: DataSettings
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings
    rewards: RewardSettings
    advantage: AdvantageSettings = AdvantageSettings()
    loss: LossSettings = LossSettings()
    update: UpdateSettings = UpdateSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    deepspeed: DeepSpeedSettings = DeepSpeedSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        prompts, mini = self.rollout.prompts_per_step, self.mini_batch_prompts
        if prompts % mini:
            raise ValueError(
                f"update.mini_batch_prompts: {mini} does not divide rollout.prompts_per_step: {prompts}; "
                f"use one of {[n for n in range(1, prompts + 1) if prompts % n == 0]}"
            )
        if self.rollout.max_reply_tokens >= self.engine.max_context_tokens:
            raise ValueError(
                f"rollout.max_reply_tokens: {self.rollout.max_reply_tokens} leaves no room for a prompt in "
                f"engine.max_context_tokens: {self.engine.max_context_tokens}"
            )
        if self.evaluation.user_opens and not self.evaluation.max_new_turns and not self.rollout.max_user_turns:
            raise ValueError(
                "evaluation.user_opens: true has the simulated user write a message, and rollout.max_user_turns: 0 "
                "allows none; set evaluation.max_new_turns"
            )
        if self.rollout.overlap == "one_step" and self.loss.correction == "none":
            raise ValueError(
                "rollout.overlap: one_step trains on replies that older weights sampled; set loss.correction: token "
                "(or sequence), or rollout.overlap: none"
            )
        return self

    @model_validator(mode="after")
    def _only_what_is_spent_has_a_budget(self) -> Config:
        budget = self.run.budget
        if budget.user_tokens is not None and self.rollout.user.kind != "llm":
            raise ValueError("run.budget.user_tokens: a scripted user needs no tokens; set it to null")
        if budget.judge_tokens is not None and not self.rewards.needs_judge:
            raise ValueError("run.budget.judge_tokens: no reward asks a judge; set it to null")
        return self

    def without_effect(self) -> Iterator[str]:
        """Settings that were changed from their defaults and do nothing here, each with the reason."""
        loss = self.loss
        single = self.mini_batch_prompts == self.rollout.prompts_per_step
        on_policy = "old and new log-probs are the same with one optimizer step per batch (update.mini_batch_prompts)"
        no_kl = "there is no KL penalty (loss.kl_coef: 0)"
        reasons = {
            "correction_cap": loss.correction == "none" and "nothing is corrected (loss.correction: none)",
            "kl_estimator": (loss.kl_coef == 0 and no_kl)
            or (loss.kl_in_reward and "the reward takes the sum of k1 (loss.kl_placement: in_reward)"),
            "kl_placement": loss.kl_coef == 0 and no_kl,
            "clip_low": single and on_policy,
            "clip_high": single and on_policy,
            "dual_clip": single and on_policy,
        }
        for name, reason in reasons.items():
            value = getattr(loss, name)
            if reason and value != LossSettings.model_fields[name].default:
                yield f"loss.{name}: {value} has no effect: {reason}"

    @property
    def mini_batch_prompts(self) -> int:
        return self.update.mini_batch_prompts or self.rollout.prompts_per_step

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for a whole first reply."""
        return min(self.data.max_prompt_tokens, self.engine.max_context_tokens - self.rollout.max_reply_tokens)

    def check_budget(self, longest_prompt: int) -> None:
        """Raises ValueError where a micro-batch may be too small for what must lie in one.

        With all_replies the user's messages count too, and only the context bounds them. A template that rewrites
        history makes a sequence of every reply, and a loss that averages over the sample needs them side by side.
        """
        budget, rollout = self.update.max_tokens_per_micro_batch, self.rollout
        if rollout.train_on == "first_reply":
            needed = longest_prompt + rollout.max_reply_tokens
            what, remedy = "the longest prompt with its reply", "data.max_prompt_tokens or rollout.max_reply_tokens"
        else:
            num_contexts = rollout.most_replies if self.loss.needs_whole_samples else 1
            needed = num_contexts * self.engine.max_context_tokens
            what = "a conversation may take (train_on: all_replies"
            what += f"; {num_contexts} contexts, since the loss averages over it)" if num_contexts > 1 else ")"
            remedy = "engine.max_context_tokens"
        if needed > budget:
            raise ValueError(
                f"update.max_tokens_per_micro_batch: {budget} is less than {what}, {needed} tokens; raise it, "
                f"or lower {remedy}"
            )


SECTIONS = frozenset(Config.model_fields) - {"preset"}


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks `path`. Raises ValueError, one line per fault, each naming the key and the remedy."""
    values = _read_yaml(path)
    for override in overrides:
        _apply(values, override)
    values = {name: {} if value is None and name in SECTIONS else value for name, value in values.items()}
    preset = values.get("preset")
    values = _merged(PRESETS[preset] if isinstance(preset, str) and preset in PRESETS else {}, values)
    where = f"{path} with {' '.join(map(_told, overrides))}" if overrides else str(path)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        faults = dict.fromkeys(_fault(fault) for fault in error.errors())
        raise ValueError("\n".join(f"{where}: {fault}" for fault in faults)) from error


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` with what `under` adds to it, section by section."""
    both = {**under, **over}
    for name in under.keys() & over.keys():
        if isinstance(under[name], Mapping) and isinstance(over[name], Mapping):
            both[name] = _merged(under[name], over[name])
    return both


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    try:
        values = yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that is none
        raise ValueError(f"{path}: not valid YAML ({_told_of_yaml(error)})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must be a mapping of sections, such as configs/quickstart.yaml")
    return values


def _told(override: str) -> str:
    key, equals, value = override.partition("=")
    return key + equals + without_password(value)


def _told_of_yaml(error: Exception) -> str:
    """It quotes lines of the file, which may hold an address with a password."""
    return "\n".join(map(without_password, str(error).splitlines()))


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else repr(key))
        return super().construct_mapping(node, deep)


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"{_told(override)!r} is not an override; write section.key=value")
    *sections, last = key.split(".")
    if not sections and last == "preset":
        values["preset"] = preset = _value(override, text)
        if isinstance(preset, str):
            for section, settings in deepcopy(PRESETS.get(preset, {})).items():
                if isinstance(values.get(section) or {}, dict):  # else refused with all other faults
                    values[section] = _merged(values.get(section) or {}, settings)
        return
    if not sections:
        if last not in Config.model_fields:
            raise ValueError(f"{key}: {_unknown(last, Config)}")
        try:
            values[last] = _read_yaml(Path(text))
        except ValueError as error:
            raise ValueError(f"{_told(override)!r}: a whole section comes from a YAML file: {error}") from error
        return
    for section in sections:
        if values.get(section) is None:  # absent, or a section with nothing in it
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ValueError(f"{_told(override)!r}: {section} is not a section")
    values[last] = _value(override, text)


def _value(override: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{_told(override)!r}: the value is not valid YAML ({_told_of_yaml(error)})") from None


def _fault(fault: dict[str, Any]) -> str:
    location = [str(part) for part in fault["loc"]]
    if location[:2] == ["rewards", "truncated"]:  # pydantic tells of each branch of the union
        return f"rewards.truncated: {fault['input']!r} will not do: a finite number, score or mask"
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        return f"{key}: {_unknown(location[-1], _section(location[:-1]))}"
    if fault["type"] == "missing":
        return f"{key}: is missing; add it"
    if fault["type"] == "model_type":
        known = ", ".join(_section(location).model_fields)
        return f"{key}: {fault['input']!r} will not do: it is a section with keys of its own ({known})"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{key}: {message}" if key else message
    quote = " (quote it)" if fault["type"] == "string_type" and isinstance(fault["input"], (int, float)) else ""
    return f"{key}: {fault['input']!r} will not do: {message[0].lower()}{message[1:]}{quote}"


def _unknown(name: str, section: type[BaseModel]) -> str:
    known = list(section.model_fields)
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    return "there is no such key; " + (f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}")


def _section(location: Sequence[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for name in location:
        section = _section_of(section.model_fields[name].annotation) or section
    return section


def _section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def describe_settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """One line per setting: key, default, description."""
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if inner:
            yield from describe_settings(inner, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _shown(field.get_default())
        yield f"  {prefix + name:<46} {default:<16} {field.description}"


def _shown(default: Any) -> str:
    return yaml.safe_dump(
        str(default) if isinstance(default, Path) else list(default) if isinstance(default, tuple) else default,
        default_flow_style=True,
    ).split("\n")[0]
