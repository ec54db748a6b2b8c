"""The LLM judge: scores how well an assistant worked with its user, and finds the document they made.

A judgement is either complete and in range or it is an LLMError; nothing in between becomes a score.
The judge reads the conversation as role-tagged JSON data (`rollout/roles/prompting.py`), without the
system message, as the user saw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rewards.settings import RewardSettings
from rollout.roles.client import LLMClient
from rollout.roles.prompting import Prompt, visible
from rollout.roles.question import Question
from rollout.types import Conversation, Message, Scenario

PROMPTS = Path(__file__).parent / "prompts"
CRITERIA = ("asks", "engages", "advances")
"""Finds out what it needs; takes in what the user says; brings the two closer to a result."""
SHORT_REASON = 60
"""Characters; how long a small judge may reason, so that it comes to its number."""


class Judge:
    def __init__(self, client: LLMClient, settings: RewardSettings):
        """Raises ValueError where a prompt's file or placeholders, or `interactivity.step`, will not do."""
        self._client = client
        placeholders = ("task_desc", "conversation")
        self._grade_prompt = Prompt(settings.interactivity.prompt or PROMPTS / "interactivity.txt", placeholders)
        self._extract_prompt = Prompt(settings.bleu_score.prompt or PROMPTS / "extract_document.txt", placeholders)
        self._grade_schema = _grade_schema(settings.interactivity.step)
        self._grades = "interactivity" in settings.weights and settings.interactivity.by == "llm"

    async def interactivity(self, conversation: Conversation) -> tuple[float, dict[str, Any]]:
        """The mean of the three sub-scores, in [0, 1], and the judge's answer: {criterion: {reason, score}}.

        Raises LLMError where the judge gave no usable answer.
        """
        grades = await self._ask(self._grading(conversation.scenario, conversation.messages))
        return fmean(grades[criterion]["score"] for criterion in CRITERIA), grades

    async def extract_document(self, conversation: Conversation) -> str:
        """The text the conversation ended with.

        An empty string is an answer, not a failure: there is no document, because the assistant only
        asked, say. Raises LLMError where the judge gave no usable answer.
        """
        answer = await self._ask(self._extraction(conversation.scenario, conversation.messages))
        return answer["document"].strip()

    def question(self, scenario: Scenario, messages: Sequence[Message]) -> Question:
        """One that a run asks about such a chat."""
        return self._grading(scenario, messages) if self._grades else self._extraction(scenario, messages)

    def _grading(self, scenario: Scenario, messages: Sequence[Message]) -> Question:
        return _question(self._grade_prompt, scenario, messages, self._grade_schema)

    def _extraction(self, scenario: Scenario, messages: Sequence[Message]) -> Question:
        return _question(self._extract_prompt, scenario, messages, _document_schema(messages))

    async def _ask(self, question: Question) -> dict[str, Any]:
        return await self._client.ask(question.messages, question.schema)


def _question(prompt: Prompt, scenario: Scenario, messages: Sequence[Message], schema: dict[str, Any]) -> Question:
    text = prompt.fill(task_desc=scenario.task_desc, conversation=visible(messages))
    return Question([{"role": "user", "content": text}], schema)


def _grade_schema(step: float | None) -> dict[str, Any]:
    """Each criterion as {reason, score}, the reason first: a number given before its reason is a guess."""
    if step is None:
        reason, score = {"type": "string"}, {"type": "number", "minimum": 0, "maximum": 1}
    else:
        steps = round(1 / step)
        if abs(steps * step - 1) > 1e-6:
            raise ValueError(f"rewards.interactivity.step: {step:g} does not divide 1; take 0.5, 0.25, 0.2 or 0.1")
        reason = {"type": "string", "maxLength": SHORT_REASON}
        score = {"type": "number", "enum": [0, *(round(k / steps, 9) for k in range(1, steps)), 1]}
    return _object({name: _object({"reason": reason, "score": score}) for name in CRITERIA})


def _document_schema(messages: Sequence[Message]) -> dict[str, Any]:
    """A document is no longer than the chat it is copied from, which keeps small judges from rambling on."""
    length = sum(len(message["content"]) for message in visible(messages))
    # To the next power of two: servers compile and cache a grammar for every different schema.
    return _object({"document": {"type": "string", "maxLength": 1 << max(6, length.bit_length())}})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
