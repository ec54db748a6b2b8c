"""A run's settings, section by section, and how they must agree (`grpo.config_file` reads them)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, field_validator, model_validator

from grpo.loss import Aggregate, Clip, Correction, KLEstimator, Variant
from grpo.presets import PRESETS
from rewards.settings import RewardSettings
from rollout.settings import DataSettings, EngineSettings, RolloutSettings, Section, UserPath

Fraction = Annotated[float, Field(ge=0, lt=1)]


class BudgetSettings(Section):
    """Training stops, and the model is saved, after the step in which any limit is reached; with overlap: one_step, the
    batch that was sampled ahead is trained on first.
    """

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
    name: str = Field(max_length=100, description="folder of the run under run.folder")
    folder: UserPath = Field(Path("runs"), description="where runs are kept")
    seed: int = Field(1, ge=0, lt=2**32, description="seed of everything that is drawn")
    steps: int | None = Field(None, ge=1, description="steps; null: run.epochs decides")
    epochs: int = Field(1, ge=1, description="passes over the training data (where run.steps is null)")
    save_every: int | None = Field(
        None, ge=1, description="steps between saved model folders; the last step is always saved"
    )
    budget: BudgetSettings = BudgetSettings()
    overwrite: bool = Field(False, description="replace the folder of an earlier run of this name")

    @field_validator("name")
    @classmethod
    def _a_plain_name(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"{name!r} will not do; write letters, digits, _, - and . alone, and neither - nor . first"
            )
        return name

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder / self.name


def _no_longer_auto(dtype: str) -> str:
    """The faster dtype for `auto`: bfloat16 on a GPU and on a CPU with matrix units for it (AMX), else float32.

    With AMX a quickstart step in bfloat16 takes two thirds of its time in float32. On a CPU with vector instructions
    alone, or none, products in bfloat16 take as long as in float32, or ten times that.
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if torch.cuda.is_available() or torch.cpu.get_capabilities().get("amx_bf16") else "float32"


class ModelSettings(Section):
    path: UserPath = Field(description="local Hugging Face model folder")
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], AfterValidator(_no_longer_auto)] = Field(
        "bfloat16",
        description="of weights and activations; DeepSpeed keeps float32 masters; auto: bfloat16 where this machine "
        "computes it faster",
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
    max_logp_gap: float | None = Field(
        None,
        gt=0,
        description="nats; mean gap between sampler's and trainer's log-probs that stops the run; null: 0.05 in "
        "bfloat16, in float32 0.001 on a CPU and 0.01 on a GPU",
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
    communication_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of gradients on their way between ranks; bfloat16: half as much to send, rounded before it adds up",
    )
    extra: dict[str, Any] = Field(
        {}, description="mapping; further keys of DeepSpeed's configuration of the policy, by DeepSpeed's names"
    )

    @property
    def offloads(self) -> frozenset[str]:
        """What of `offload_param` and `offload_optimizer` leaves the GPU."""
        sections = self.extra.get("zero_optimization") or {}
        names = ("offload_param", "offload_optimizer")
        return frozenset(name for name in names if (sections.get(name) or {}).get("device", "none") != "none")


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
        remote = "the policy's server is started with settings of its own (engine.kind: remote)"
        none_held_out = "no prompts are held out (data.validation: null)"
        reasons = {
            "loss.correction_cap": loss.correction == "none" and "nothing is corrected (loss.correction: none)",
            "loss.kl_estimator": (loss.kl_coef == 0 and no_kl)
            or (loss.kl_in_reward and "the reward takes the sum of k1 (loss.kl_placement: in_reward)"),
            "loss.kl_placement": loss.kl_coef == 0 and no_kl,
            **{f"loss.{name}": single and on_policy for name in ("clip_low", "clip_high", "dual_clip")},
            **{
                f"engine.{name}": self.engine.kind == "remote" and remote
                for name in ("gpu_memory_utilization", "cpu_kv_cache_gib", "sleep", "eager", "extra")
            },
            **{
                f"evaluation.{name}": not self.data.validation and none_held_out
                for name in EvaluationSettings.model_fields
            },
        }
        for key, reason in reasons.items():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            if reason and value != type(getattr(self, section)).model_fields[name].default:
                yield f"{key}: {value} has no effect: {reason}"

    @property
    def mini_batch_prompts(self) -> int:
        return self.update.mini_batch_prompts or self.rollout.prompts_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in a training step."""
        return self.rollout.prompts_per_step // self.mini_batch_prompts

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for a whole first reply."""
        return min(self.data.max_prompt_tokens, self.engine.max_context_tokens - self.rollout.max_reply_tokens)

    def check_micro_batch(self, longest_prompt: int) -> None:
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
