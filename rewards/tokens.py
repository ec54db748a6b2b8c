"""How much the assistant wrote: every token is the reader's time."""

from __future__ import annotations

from collections.abc import Callable

from rewards.settings import TokenAmountSettings
from rollout.types import Conversation


def token_amount(conversation: Conversation, num_tokens: Callable[[str], int], settings: TokenAmountSettings) -> float:
    """`tokens`: thousands of tokens of the assistant's messages after the prompt, no special tokens. They hold what
    was said: a thought before it takes nobody's time but the machine's, and `max_reply_tokens` bounds that.

    `words`: whitespace-separated words of all messages after the prompt, unscaled, as the upstream
    recipe counts.
    """
    if settings.count == "words":
        return float(sum(len(message["content"].split()) for message in conversation.new_messages))
    said = (message["content"] for message in conversation.new_messages if message["role"] == "assistant")
    return sum(map(num_tokens, said)) / 1000
