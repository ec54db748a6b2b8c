"""Settings of the data, the engine, the conversations and the simulated user.

Every section of a run's YAML file is a frozen pydantic model: unknown keys, wrong types and values
out of range are refused before any model loads. `description` starts with the unit where there is
one; `python -m launch.train --help` prints them all.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

TrainOn = Literal["first_reply", "all_replies"]


def user_path(text: str | Path) -> Path:
    """A path as people write it: ~ is their home. Relative ones are relative to the working directory."""
    return Path(os.path.expanduser(text))


def looked_at(path: Path) -> str:
    """For the end of a message that `path` is missing: where that is, if it does not say so itself."""
    return "" if path.is_absolute() else f" (looked at {path.absolute()})"


UserPath = Annotated[Path, AfterValidator(user_path)]
"""The type of every setting that is a path."""


class Section(BaseModel):
    """Base of all settings: frozen, no unknown keys, no infinities. Numbers may be written as text (1e-6)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # an address may hold a password
    )

    @field_validator("*", mode="before")
    @classmethod
    def _a_switch_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's true would pass for 1, in lists and mappings too."""
        annotation = cls.model_fields[info.field_name].annotation
        if _holds_switch(value) and not _takes_switch(annotation, within=not isinstance(value, bool)):
            raise ValueError(
                f"{without_password(as_written(value))} will not do: this is not a true/false setting (YAML reads on, "
                "off, yes and no as true or false); write a number, or a text in quotes"
            )
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _a_heading_alone_is_a_section(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads a section with nothing in it as null."""
        annotation = cls.model_fields[info.field_name].annotation
        is_section = isinstance(annotation, type) and issubclass(annotation, Section)
        return {} if value is None and is_section else value


def near_name(name: str, known: Iterable[str]) -> str:
    """The hint of an error: "; did you mean ...?" where one of `known` is like `name`, else nothing."""
    found = difflib.get_close_matches(name, sorted(known), 1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def _holds_switch(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bool) or any(map(_holds_switch, inner))


def _takes_switch(annotation: Any, *, within: bool) -> bool:
    """Whether a switch fits the type, or may fit `within` what it holds; a section looks at its own settings."""
    section = isinstance(annotation, type) and issubclass(annotation, Section)
    inner = get_args(annotation) if within or isinstance(annotation, UnionType) else ()
    return annotation in (bool, Any) or (within and section) or any(_takes_switch(a, within=within) for a in inner)


def as_written(value: Any) -> str:
    """`value` as one would write it in YAML, in a line.

    >>> as_written({"clamp": [None, True, "yes", 0.5]})
    "{clamp: [null, true, 'yes', 0.5]}"
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_written, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return repr(str(value) if isinstance(value, Path) else value)


class DataSettings(Section):
    train: UserPath = Field(description="file; .parquet in the CollabLLM schema, or .jsonl")
    validation: UserPath | None = Field(None, description="file; held-out rows for evaluation")
    max_prompt_tokens: int = Field(2048, ge=1, description="tokens; longest prompt accepted")
    overlong_prompts: Literal["error", "drop"] = Field(
        "error", description="what to do with longer prompts: refuse the file, or drop and count the rows"
    )


class ServedSection(Section):
    """A section with `base_url` (one address, several or None) and `api_key_env`, whose credentials are never shown."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self.base_url,) if isinstance(self.base_url, str) else self.base_url or ()

    @model_validator(mode="after")
    def _one_way_to_prove_who_asks(self) -> ServedSection:
        if self.api_key_env is not None and any("@" in urlsplit(address).netloc for address in self.addresses):
            raise ValueError(
                "a password in base_url and a key from api_key_env cannot both be sent: "
                "they use the same HTTP header; remove one"
            )
        return self

    @field_serializer("base_url", when_used="json", check_fields=False)
    def _without_passwords(self, base_url: str | tuple[str, ...] | None) -> str | list[str] | None:
        """What is written into a run's folder."""
        shown = [*map(without_password, self.addresses)]
        return shown[0] if isinstance(base_url, str) else shown or None

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.model_dump(mode="json").items()


class EngineSettings(ServedSection):
    kind: Literal["auto", "vllm", "transformers", "remote"] = Field(
        "auto", description="what generates; auto takes vLLM where it is installed, remote a vLLM server elsewhere"
    )
    max_context_tokens: int = Field(4096, ge=16, description="tokens; prompt and reply together")
    max_concurrent_replies: int = Field(64, ge=1, description="replies; generated at once per rank")
    gpu_memory_utilization: float = Field(
        0.4, gt=0, le=1, description="fraction of each GPU's memory the engine may take"
    )
    cpu_kv_cache_gib: int = Field(1, ge=1, description="GiB; KV cache per rank on a CPU")
    sleep: bool = Field(True, description="free the engine's GPU memory during the update")
    eager: bool = Field(False, description="skip CUDA graphs; always so on a CPU")
    extra: dict[str, Any] = Field({}, description="mapping; further arguments of vLLM's engine, by vLLM's names")
    base_url: str | None = Field(
        None, description="address of the policy's server, such as http://127.0.0.1:8000/v1 (kind: remote)"
    )
    api_key_env: str | None = Field(None, description="environment variable that holds its key (kind: remote)")
    weights_folder: UserPath | None = Field(
        None, description="folder that the server sees under the same path, for pushed weights (kind: remote)"
    )

    @field_validator("base_url")
    @classmethod
    def _an_address(cls, address: str | None) -> str | None:
        return None if address is None else checked_address(address)

    @model_validator(mode="after")
    def _a_server_is_for_remote(self) -> EngineSettings:
        given = [name for name in ("base_url", "api_key_env", "weights_folder") if getattr(self, name) is not None]
        if self.kind != "remote" and given:
            raise ValueError(f"{given[0]} is read with kind: remote only; set that, or remove it")
        if self.kind == "remote" and not {"base_url", "weights_folder"} <= {*given}:
            raise ValueError("kind: remote needs engine.base_url and engine.weights_folder")
        return self


Parameter = Literal["chat_template_kwargs", "temperature", "response_format", "strict"]
"""What plain OpenAI-compatible servers may refuse; `strict` is the schema's."""


class EndpointSettings(ServedSection):
    """An OpenAI-compatible server that plays a role, or several that share its calls."""

    base_url: str | tuple[str, ...] = Field(
        description="address, such as http://127.0.0.1:8001/v1, or a list of them; each call goes to the least busy one"
    )
    model: str = Field(description="name the servers know the model by")
    api_key_env: str | None = Field(None, description="environment variable that holds the key")
    temperature: float = Field(1.0, ge=0, description="sampling temperature")
    max_tokens: int = Field(512, ge=1, description="tokens; longest answer")
    timeout_s: float = Field(
        300.0, gt=0, description="seconds; limit of one call from its sending, several times what an answer takes"
    )
    max_attempts: int = Field(
        3, ge=1, description="tries per question, without those at an overloaded server while it answers others"
    )
    max_concurrency: int = Field(
        64, ge=1, description="calls in flight per rank at each address, at most; fewer where answers are late"
    )
    max_requests_per_minute: int | None = Field(
        None, ge=1, description="requests per minute and rank, over all addresses, retries too; null: no limit"
    )
    thinking: bool = Field(False, description="let the model think (chat_template_kwargs.enable_thinking)")
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="what the servers call max_tokens: max_tokens, or max_completion_tokens"
    )
    leave_out: tuple[Parameter, ...] = Field(
        (),
        description="list of parameters that the servers do not know, so not sent: " + ", ".join(get_args(Parameter)),
    )

    @property
    def patience_s(self) -> float:
        """Seconds; servers that have answered nobody for so long have failed."""
        return self.max_attempts * self.timeout_s

    @model_validator(mode="after")
    def _who_thinks_is_told_so(self) -> EndpointSettings:
        if self.thinking and "chat_template_kwargs" in self.leave_out:
            raise ValueError("thinking: true is said in chat_template_kwargs, which leave_out names; remove one")
        return self

    @model_validator(mode="before")
    @classmethod
    def _more_than_an_address(cls, values: Any) -> Any:
        if isinstance(values, str):
            raise ValueError(f"{without_password(values)!r} alone will not do; write it as base_url, beside model")
        return values

    @field_validator("base_url", mode="before")
    @classmethod
    def _addresses(cls, value: Any) -> str | tuple[str, ...]:
        if isinstance(value, str):
            return checked_address(value)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) for one in value):
            raise ValueError("give an address such as http://127.0.0.1:8001/v1, or a list of them")  # not echoed
        addresses = tuple(map(checked_address, value))
        places = [_place(one) for one in addresses]
        twice = [one for one in addresses if places.count(_place(one)) > 1]
        if twice:
            raise ValueError(f"{without_password(twice[-1])!r} is in the list twice; remove one")
        return addresses


def without_password(address: str) -> str:
    """`address` with *** for all that stands before its last @."""
    return re.sub(r"^(\w+://)?.*@", r"\1***@", address, flags=re.DOTALL)


def checked_address(text: str) -> str:
    """`text` without blanks around it. Raises ValueError where it is no http(s) address."""
    remedy = "write one such as http://127.0.0.1:8001/v1"
    try:
        parts = urlsplit(text.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, half an IPv6 address
        usable = False
    if usable and "," in parts.netloc.rpartition("@")[2] + parts.path:
        usable, remedy = False, "write several as a list, [ADDRESS, ADDRESS]"
    if usable and (parts.query or parts.fragment):  # paths of the API are put after it
        usable, remedy = False, "leave out what follows the ? or #"
    if not usable or not text.isprintable():
        raise ValueError(f"{without_password(text)!r} is no address; {remedy}")
    return text.strip()


def _place(address: str) -> tuple[str, str, str]:
    """What tells one server from another, however it is written."""
    parts = urlsplit(address)
    return parts.scheme, parts.netloc.rpartition("@")[2].lower(), parts.path.rstrip("/")


UserVariant = Literal["default", "lazy", "detailed", "impatient"]
"""The prompts of `rollout/roles/prompts/user_*.txt`."""


class UserSettings(Section):
    kind: Literal["scripted", "llm"] = Field("llm", description="who plays the user")
    prompt: UserVariant | UserPath = Field(
        "default",
        description="how the LLM behaves: default, lazy, detailed, impatient, or a text file with a prompt",
    )
    endpoint: EndpointSettings | None = Field(None, description="server of the simulator (kind: llm)")

    @field_validator("prompt", mode="before")
    @classmethod
    def _a_name_or_a_file(cls, value: Any) -> Any:
        if not isinstance(value, str | Path) or not str(value):
            users = ", ".join(get_args(UserVariant))
            raise ValueError(f"{as_written(value)} is neither a user ({users}) nor a text file")
        if "://" in str(value):
            raise ValueError(
                f"{without_password(str(value))!r} is no text file; an address goes into endpoint.base_url"
            )
        return value

    @model_validator(mode="after")
    def _an_llm_needs_a_server(self) -> UserSettings:
        if self.kind == "llm" and self.endpoint is None:
            raise ValueError("kind: llm needs rollout.user.endpoint with base_url and model")
        return self

    @model_validator(mode="after")
    def _a_script_needs_no_prompt(self) -> UserSettings:
        if self.kind == "scripted" and self.prompt != "default":
            raise ValueError(f"prompt: {self.prompt} has no effect on a scripted user; remove it, or set kind: llm")
        return self


class DynamicSamplingSettings(Section):
    max_rounds: int = Field(
        0, ge=0, description="times that groups without signal are replaced by those of other prompts, in a step"
    )


class RolloutSettings(Section):
    prompts_per_step: int = Field(16, ge=1, description="prompts; sampled per step over all ranks")
    group_size: int = Field(8, ge=2, description="replies per prompt")
    continuations: int = Field(3, ge=0, description="conversations per first reply; 0 scores the reply alone")
    train_on: TrainOn = Field(
        "first_reply",
        description="what the reward trains: the first reply, or all of the one conversation (continuations: 1)",
    )
    train_thoughts: bool = Field(
        True, description="train what a reply thinks before it speaks (<think> … </think>) as well as what it says"
    )
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
    system_prompt: str | None = Field(
        None,
        min_length=1,
        description="text file, proactive for the shipped one, or none; in place of the prompts' own; null: those",
    )
    dynamic_sampling: DynamicSamplingSettings = DynamicSamplingSettings()
    overlap: Literal["none", "one_step"] = Field(
        "none",
        description="one_step samples the next step's conversations during the update, from the weights before it",
    )
    user: UserSettings = Field(description="the simulated user")

    @model_validator(mode="after")
    def _all_replies_of_one_conversation(self) -> RolloutSettings:
        if self.train_on == "all_replies" and self.continuations != 1:
            raise ValueError(
                f"train_on: all_replies trains the one conversation of each sample, so continuations: "
                f"{self.continuations} has no meaning; set rollout.continuations: 1"
            )
        return self

    @property
    def later_reply_tokens(self) -> int:
        return self.max_later_reply_tokens or self.max_reply_tokens

    @property
    def most_replies(self) -> int:
        """Assistant messages that a conversation can have."""
        return min(self.max_assistant_turns, self.max_user_turns + 1)

    @property
    def max_trained_tokens(self) -> int:
        """Most tokens that one sample trains on."""
        later = self.most_replies - 1 if self.train_on == "all_replies" else 0
        return self.max_reply_tokens + later * self.later_reply_tokens
