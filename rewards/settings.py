"""Settings of the reward: which components count, how much, and who judges."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from rollout.settings import EndpointSettings, Section, UserPath, near_name

COMPONENTS = ("bleu_score", "interactivity", "token_amount")
"""Every reward component there is; each has its own module in `rewards/`."""


class BleuSettings(Section):
    level: Literal["char", "word"] = Field("char", description="unit of the n-grams; char is the published figure")
    extract: Literal["llm", "last"] = Field(
        "llm", description="where the document comes from: the judge extracts it, or the last assistant message is it"
    )
    prompt: UserPath | None = Field(None, description="text file with the extraction prompt; null: the shipped one")


class InteractivitySettings(Section):
    by: Literal["llm", "rubric"] = Field("llm", description="who scores: the judge, or a deterministic rubric")
    prompt: UserPath | None = Field(None, description="text file with the judge's prompt; null: the shipped one")
    step: float | None = Field(
        None,
        gt=0,
        le=1,
        description="sub-scores come in such steps, an enumeration that small judges can answer; null: any number",
    )


class TokenAmountSettings(Section):
    count: Literal["tokens", "words"] = Field(
        "tokens", description="thousands of assistant tokens, or raw words of all roles as in the upstream recipe"
    )


class SoftOverlongSettings(Section):
    """A penalty that grows from 0 to `penalty` over the last part of the reply limit (arXiv:2503.14476 eq. 13)."""

    buffer: float = Field(0.2, gt=0, le=1, description="fraction of rollout.max_reply_tokens over which it grows")
    penalty: float = Field(0.0, ge=0, description="taken from the reward of a reply that reaches the limit; 0: none")


class RewardSettings(Section):
    weights: dict[str, float] = Field(description="component → weight; components not named are off")
    clamp: tuple[float, float] | None = Field(
        (-1.0, 1.0), description="each weighted component is clamped to this range; null: no clamp"
    )
    truncated: float | Literal["score", "mask"] = Field(
        0.0,
        description="reward of a first reply cut by its token limit: a number, score (as it is), or mask (invalid)",
    )
    soft_overlong: SoftOverlongSettings = SoftOverlongSettings()
    max_failure_rate: float = Field(
        0.1, ge=0, le=1, description="failed ÷ started conversations, by user or judge; above it the run stops"
    )
    judge: EndpointSettings | None = Field(None, description="server of the judge")
    bleu_score: BleuSettings = BleuSettings()
    interactivity: InteractivitySettings = InteractivitySettings()
    token_amount: TokenAmountSettings = TokenAmountSettings()

    @field_validator("weights")
    @classmethod
    def _known_components(cls, weights: dict[str, float]) -> dict[str, float]:
        if not weights:
            raise ValueError(f"name at least one component of {', '.join(COMPONENTS)}")
        for name in weights:
            if name not in COMPONENTS:
                known = f"; known rewards: {', '.join(COMPONENTS)}"
                raise ValueError(f"there is no reward {name!r}{near_name(name, COMPONENTS) or known}")
        return weights

    @field_validator("clamp")
    @classmethod
    def _low_before_high(cls, clamp: tuple[float, float] | None) -> tuple[float, float] | None:
        if clamp and clamp[0] >= clamp[1]:
            raise ValueError(f"{[*clamp]} holds nothing; write [low, high]")
        return clamp

    @property
    def needs_judge(self) -> bool:
        """Whether any weighted component asks an LLM."""
        by_llm = {
            "bleu_score": self.bleu_score.extract == "llm",
            "interactivity": self.interactivity.by == "llm",
            "token_amount": False,
        }
        return any(by_llm[name] for name in self.weights)

    @model_validator(mode="after")
    def _a_cut_reply_is_not_spared_the_penalty(self) -> RewardSettings:
        if self.soft_overlong.penalty > 0 and not isinstance(self.truncated, str):
            raise ValueError(
                f"soft_overlong.penalty needs truncated: score (or mask): with {self.truncated:g}, a reply cut at the "
                "limit would pay no penalty, and one just below the limit would"
            )
        return self

    @model_validator(mode="after")
    def _a_judged_component_needs_a_judge(self) -> RewardSettings:
        if self.needs_judge and self.judge is None:
            raise ValueError(
                "bleu_score.extract: llm and interactivity.by: llm need rewards.judge with base_url and model "
                "(or set extract: last and by: rubric)"
            )
        return self
