"""An engine without a model: what it samples is a function of the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from rollout.chat import Chat
from rollout.engines.interface import Sampled, SampleRequest
from rollout.engines.sharing import SharedEngine
from tests.tiny import WORDS, make_tokenizer


class FakeEngine:
    """Finishes all that waits at once or, with `shuffled`, any part of it in any order."""

    name = "fake"

    def __init__(
        self,
        answer: Callable[[SampleRequest], Sequence[int]],
        stop_ids: Sequence[int],
        *,
        max_context_tokens: int = 4096,
        shuffled: Random | None = None,
    ):
        self.answer, self.stop_ids, self.shuffled = answer, stop_ids, shuffled
        self.max_context_tokens = max_context_tokens
        self.most_at_once = 0
        self._queue: list[tuple[int, SampleRequest]] = []

    def enter_thread(self) -> None: ...

    def add(self, key: int, request: SampleRequest) -> None:
        self._queue.append((key, request))

    def step(self) -> list[tuple[int, Sampled]]:
        self.most_at_once = max(self.most_at_once, len(self._queue))
        num = len(self._queue)
        if self.shuffled:
            self.shuffled.shuffle(self._queue)
            num = self.shuffled.randint(1, num)
        done, self._queue = self._queue[:num], self._queue[num:]
        return [(key, self._sampled(request)) for key, request in done]

    def _sampled(self, request: SampleRequest) -> Sampled:
        ids = tuple(self.answer(request))[: request.max_tokens]
        return Sampled(ids, (-1.0,) * len(ids), "stop" if ids[-1] in self.stop_ids else "length")

    def abort_all(self) -> None:
        self._queue.clear()

    def close(self) -> None: ...


def words_engine(
    answer: Callable[[list[str], int], Sequence[str]], words: Sequence[str] = WORDS, **more
) -> tuple[Chat, SharedEngine]:
    """A chat of whole words and an engine that answers in words: `answer(words of the prompt, seed)`."""
    chat = Chat(make_tokenizer(words), [1])

    def sample(request: SampleRequest) -> Sequence[int]:
        prompt = chat.tokenizer.convert_ids_to_tokens(request.prompt_ids)
        return chat.tokenizer.convert_tokens_to_ids([*answer(prompt, request.seed), "<end>"])

    return chat, SharedEngine(FakeEngine(sample, chat.stop_ids, **more))
