"""Who plays the user: an LLM behind a server, or a script. Both are asked with the whole conversation.

Neither keeps anything about a conversation: one object serves all of them at once, and what was
said already is read from the messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rollout.roles.answers import read_texts
from rollout.roles.client import LLMClient
from rollout.roles.prompting import Prompt, visible
from rollout.roles.question import Question
from rollout.settings import UserSettings, UserVariant
from rollout.types import Message, Scenario

STOP_SIGNAL = "[[TERMINATE CHAT]]"
_ANY, _CAPITALS = r"(?i:terminate[\s_-]*chat)(?![^\W_])", r"TERMINATE[\s_-]*CHAT(?![^\W_])"
_AROUND = r"""[*_`"'“”()<>{}]{0,8}"""
_STOP = re.compile(
    rf"""{_AROUND}(?<![^\W_])
    (?: \[+\s* {_CAPITALS} \s*\]+ | \[\[+\s* {_ANY} \s*\]* | {_ANY} \s*\]\]+  # in brackets as nobody else writes
      | (?: \[\s* {_ANY} | {_CAPITALS} ) \s*\]*                               # or else where a sentence ends
        (?= {_AROUND} [.!]* (?: \s*\Z | [^\S\n]*\n | (?<=[.!])\s ) )
    ) {_AROUND} [.!]*""",
    re.VERBOSE,
)
"""What models make of it. Words that a sentence merely begins with ("TERMINATE CHAT buttons are ...") are none."""
PROMPTS = Path(__file__).parent / "prompts"
MOST_CHARACTERS_A_TOKEN = 8
"""On average over a message, in any language; an answer with more was not held to its token limit."""


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What the user says next."""

    text: str
    """Without the stop signal."""
    satisfied: bool
    """The user ends the chat here."""


class LLMUser:
    """A simulated user that knows the scenario's goal and answers in its own words."""

    def __init__(self, client: LLMClient, settings: UserSettings):
        """Raises ValueError where the prompt's file is missing or its placeholders are not as they must be."""
        self._client = client
        self._prompt = Prompt(_prompt_file(settings.prompt), ("task_desc", "goal", "conversation"), ("persona",))
        self._schema = _answer_schema(client.settings.max_tokens)

    async def answer(self, scenario: Scenario, messages: Sequence[Message]) -> UserTurn:
        """The user's next message, never an empty one. Raises LLMError where the model gave no usable one."""
        asked = self.question(scenario, messages)
        said = (await self._client.ask(asked.messages, asked.schema, asked.validate, read=asked.read))["reply"]
        return UserTurn(_STOP.sub("", said).strip(), satisfied=_STOP.search(said) is not None)

    def question(self, scenario: Scenario, messages: Sequence[Message]) -> Question:
        """What the model is asked."""
        prompt = self._prompt.fill(
            persona=scenario.persona,
            task_desc=scenario.task_desc,
            goal=scenario.goal,
            conversation=visible(messages),
        )
        return Question([{"role": "user", "content": prompt}], self._schema, self._refuse_no_message, read_texts)

    def _refuse_no_message(self, answer: dict[str, Any]) -> None:
        said, limit = answer["reply"], MOST_CHARACTERS_A_TOKEN * self._client.settings.max_tokens
        if not any(character.isprintable() and not character.isspace() for character in said):
            raise ValueError("the user's reply is empty")
        if len(said) > limit:
            raise ValueError(f"the user's reply has {len(said)} characters, more than max_tokens allows ({limit})")


def _prompt_file(prompt: UserVariant | Path) -> Path:
    """Raises ValueError where it is neither a shipped variant nor looks like a file."""
    variants = get_args(UserVariant)
    if prompt in variants:
        return PROMPTS / f"user_{prompt}.txt"
    if not prompt.exists() and prompt.name == str(prompt) and not prompt.suffix:
        raise ValueError(
            f"rollout.user.prompt: there is no user {str(prompt)!r}; there are {', '.join(variants)}; "
            "or give the path of a text file"
        )
    return prompt


def _answer_schema(max_tokens: int) -> dict[str, Any]:
    """Three texts that fit into `max_tokens` together: taking stock and thinking first, then the message.

    At about three characters a token even an answer that fills every field ends in time; without
    limits, small models ramble until they are cut.
    """
    sixth = max(16, max_tokens // 2)
    lengths = {"current_answer": sixth, "thought": sixth, "reply": 4 * sixth}
    return {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": length} for name, length in lengths.items()},
        "required": list(lengths),
        "additionalProperties": False,
    }


class ScriptedUser:
    """A user without a model: deterministic, and it tells what it wants only when asked.

    It wants the reference's sentences (the goal's where there is no reference), in order. A question
    from the assistant brings out the next three; any other message gets a nudge; when all is said, it
    ends the chat.
    """

    SENTENCES_AN_ANSWER = 3
    """Of four or so: of a text of which half is left to guess, BLEU pays more for what was told twice over."""

    ANSWERS = (
        'Good question. Here is what it should say: "{part}" Please write out the finished piece in these words.',
        'Glad you ask. This belongs in it, too: "{part}" Please write it out with that.',
        'Right, one more thing I have in mind: "{part}" Please work it into the text.',
    )
    NUDGES = (
        "Hmm, I am not sure this is what I had in mind.",
        "That is not quite it yet.",
        "I was hoping for something closer to what I am thinking of.",
    )
    FAREWELL = "That is all I had in mind, thank you!"

    async def answer(self, scenario: Scenario, messages: Sequence[Message]) -> UserTurn:
        """The user's next message, the prompt's where it opens the chat. Never fails."""
        said = [message["content"] for message in messages if message["role"] == "user"]
        if not said:
            return UserTurn(scenario.messages[-1]["content"], satisfied=False)
        heard = [message["content"] for message in messages if message["role"] == "assistant"]
        wanted = _sentences(scenario.reference or "") or _sentences(scenario.goal)
        unsaid = [part for part in wanted if not any(part in text for text in said)]
        if not unsaid:
            return UserTurn(self.FAREWELL, satisfied=True)
        turn = len(said) - 1
        if heard and asks_something(heard[-1]):
            part = " ".join(unsaid[: self.SENTENCES_AN_ANSWER])
            return UserTurn(self.ANSWERS[turn % len(self.ANSWERS)].format(part=part), satisfied=False)
        return UserTurn(self.NUDGES[turn % len(self.NUDGES)], satisfied=False)


_QUESTION = re.compile(r"""\S\?["'”’»)\]*_]*(?=\s|$)|[？؟]""")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])|\n+")


def asks_something(text: str) -> bool:
    """Whether any sentence of the text is a question."""
    return _QUESTION.search(text) is not None


def _sentences(text: str) -> list[str]:
    pieces = (piece.strip() for piece in _BETWEEN_SENTENCES.split(text))
    return [piece for piece in pieces if any(character.isalnum() for character in piece)]
