"""The records that flow from prompts to scores: one frozen record per stage, read top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Mapping

Message = Mapping[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`, as chat templates take it."""

Ending = Literal["user_satisfied", "turn_limit", "length", "context_full", "simulator_failed"]
"""Why a conversation ended.

`user_satisfied`: the simulated user said its stop signal. `turn_limit`: the last allowed turn was
taken. `length`: an assistant reply was cut by its token limit. `context_full`: there was no room
left to generate at all. `simulator_failed`: the simulated user gave no usable answer.
"""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of training data: what the policy sees, and what only the simulated user knows."""

    scenario_id: str
    """Unique within its data file."""
    messages: tuple[Message, ...]
    """The prompt: a system message first if there is one, and the user's opening last."""
    goal: str
    """What the user really wants, hidden from the policy (`single_turn_prompt` in the parquet)."""
    task_desc: str
    """The kind of task in a few words, for the user simulator and the judge."""
    reference: str | None
    """The document the conversation should lead to; what BLEU compares with."""
    data_source: str
    row: int
    """Row in the data file, from 0: error messages name it, and seeds derive from it."""
    persona: str = ""
    """Who the user is, for the user simulator alone; empty where the data leave it open."""

    @property
    def system(self) -> tuple[Message, ...]:
        """The system message, where the prompt has one: it is the first."""
        return self.messages[: self.messages[0]["role"] == "system"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One sampled assistant message, exactly as it was sampled."""

    prompt_ids: tuple[int, ...]
    """The token ids the engine was given."""
    token_ids: tuple[int, ...]
    """The sampled token ids, the end-of-turn token included where one was sampled."""
    logprobs: tuple[float, ...]
    """The sampler's log-prob of each sampled token, nats, of the tempered distribution."""
    text: str
    finish_reason: Literal["stop", "length"]

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and reply."""
        return self.prompt_ids + self.token_ids


@dataclass(frozen=True, slots=True)
class Conversation:
    """One continuation of one first reply, as far as it went."""

    scenario: Scenario
    sample: int
    """Which of the group's replies it continues, from 0."""
    continuation: int
    """Which continuation of that reply, from 0."""
    messages: tuple[Message, ...]
    """Prompt and new messages, free of stop signals."""
    num_prompt_messages: int
    """Where the user opened, the prompt is the system message, if there is one."""
    replies: tuple[Reply, ...]
    """The assistant messages after the prompt, in order; `replies[0]` is the first reply. Empty where the user was to
    open and failed."""
    ended: Ending
    farewell: str | None = None
    """The user message that carried the stop signal: traced, never judged."""
    failure: str | None = None
    """What went wrong, where the simulator failed."""

    @property
    def new_messages(self) -> tuple[Message, ...]:
        return self.messages[self.num_prompt_messages :]

    @property
    def opening(self) -> str:
        """The user's words that the first reply answers."""
        user_opened = self.new_messages[0]["role"] == "user"
        return self.messages[self.num_prompt_messages - (not user_opened)]["content"]

    @property
    def first_reply(self) -> Reply:
        return self.replies[0]

    @property
    def first_reply_cut(self) -> bool:
        """Whether the first reply was cut by its token limit, so that nobody could answer it."""
        return bool(self.replies) and self.first_reply.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Score:
    """What one conversation earned: a value for each component, or the reason there is none."""

    values: Mapping[str, float]
    """Component name → raw value, before weight and clamp."""
    failures: Mapping[str, str]
    """Component name, or `user` → why it could not be judged. A failed judgement is never a value."""
    notes: Mapping[str, Any]
    """What is logged beside the score: word BLEU, the judge's sub-scores, the extracted document."""

    @property
    def valid(self) -> bool:
        return not self.failures
