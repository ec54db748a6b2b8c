"""Settings of the data, the engine, the conversations and the simulated user.

Every section of a run's YAML file is a frozen pydantic model: unknown keys, wrong types and values
out of range are refused before any model loads. `description` starts with the unit where there is
one; `python -m launch.train --help` prints them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


class Section(BaseModel):
    """Base of all settings: frozen, no unknown keys, no infinities. Numbers may be written as text (1e-6)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _a_switch_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's true would pass for 1."""
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and annotation is not bool:
            raise ValueError(
                f"{str(value).lower()} will not do: this is no switch (YAML reads on, off, yes, no as one)"
            )
        return value


class DataSettings(Section):
    train: Path = Field(description="file; .parquet in the CollabLLM schema, or .jsonl")
    validation: Path | None = Field(None, description="file; held-out rows for evaluation")
    max_prompt_tokens: int = Field(2048, ge=1, description="tokens; longest prompt accepted")
    overlong_prompts: Literal["error", "drop"] = Field(
        "error", description="what to do with longer prompts: refuse the file, or drop and count the rows"
    )


class EngineSettings(Section):
    kind: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="what generates; auto takes vLLM where it is installed"
    )
    max_context_tokens: int = Field(4096, ge=16, description="tokens; prompt and reply together")
    max_concurrent_replies: int = Field(64, ge=1, description="replies; generated at once per rank")
    gpu_memory_utilization: float = Field(
        0.4, gt=0, le=1, description="fraction of each GPU's memory the engine may take"
    )
    cpu_kv_cache_gib: int = Field(1, ge=1, description="GiB; KV cache per rank on a CPU")
    sleep: bool = Field(True, description="free the engine's GPU memory during the update")
    eager: bool = Field(False, description="skip CUDA graphs; always so on a CPU")


class EndpointSettings(Section):
    """An OpenAI-compatible server that plays a role."""

    base_url: str = Field(description="address, such as http://127.0.0.1:8001/v1")
    model: str = Field(description="name the server knows the model by")
    api_key_env: str | None = Field(None, description="environment variable that holds the key")
    temperature: float = Field(1.0, ge=0, description="sampling temperature")
    max_tokens: int = Field(512, ge=1, description="tokens; longest answer")
    timeout_s: float = Field(120.0, gt=0, description="seconds; limit of one call")
    max_attempts: int = Field(3, ge=1, description="tries per question, the first included")
    max_concurrency: int = Field(64, ge=1, description="calls in flight per rank")
    thinking: bool = Field(False, description="let the model think (chat_template_kwargs.enable_thinking)")

    @field_validator("base_url")
    @classmethod
    def _an_address(cls, address: str) -> str:
        try:
            parts = urlsplit(address.strip())
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # a port that is no number, half an IPv6 address
            usable = False
        if not usable or not address.isprintable():
            raise ValueError(f"{address!r} is no address; write one such as http://127.0.0.1:8001/v1")
        return address.strip()


class UserSettings(Section):
    kind: Literal["scripted", "llm"] = Field("llm", description="who plays the user")
    prompt: Path | None = Field(None, description="text file with the simulator's prompt; null: the shipped one")
    endpoint: EndpointSettings | None = Field(None, description="server of the simulator (kind: llm)")

    @model_validator(mode="after")
    def _an_llm_needs_a_server(self) -> UserSettings:
        if self.kind == "llm" and self.endpoint is None:
            raise ValueError("kind: llm needs rollout.user.endpoint with base_url and model")
        return self


class DynamicSamplingSettings(Section):
    max_rounds: int = Field(
        0, ge=0, description="times that groups without signal are replaced by those of other prompts, in a step"
    )


class RolloutSettings(Section):
    prompts_per_step: int = Field(16, ge=1, description="prompts; sampled per step over all ranks")
    group_size: int = Field(8, ge=2, description="replies per prompt")
    continuations: int = Field(3, ge=0, description="conversations per first reply; 0 scores the reply alone")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of the policy")
    max_reply_tokens: int = Field(2048, ge=1, description="tokens; longest first reply")
    max_later_reply_tokens: int | None = Field(
        None, ge=1, description="tokens; longest later reply; null: as the first"
    )
    max_user_turns: int = Field(2, ge=0, description="simulated user messages after the prompt")
    max_assistant_turns: int = Field(3, ge=1, description="assistant messages, the first reply included")
    judge_last_reply: bool = Field(
        True,
        description="judge through the assistant's last message; false ends on the user as the published recipe did",
    )
    dynamic_sampling: DynamicSamplingSettings = DynamicSamplingSettings()
    overlap: Literal["none", "one_step"] = Field(
        "none",
        description="one_step samples the next step's conversations during the update, from the weights before it",
    )
    user: UserSettings = Field(description="the simulated user")

    @property
    def later_reply_tokens(self) -> int:
        return self.max_later_reply_tokens or self.max_reply_tokens
