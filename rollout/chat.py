"""Messages to token ids and back, with the model's own chat template and thinking off."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollout.model_folder import check_files, one_line
from rollout.thoughts import MARK, closing, never_ends, open_end, split_thought
from rollout.types import Message, Reply

ENDS_IN = ("config.json", "generation_config.json")
"""Files whose `eos_token_id` ends replies, beside the tokenizer's and the chat template's own end of turn."""


class Chat:
    """A model folder's tokenizer and chat template.

    `stop_ids` are the tokens that end an assistant message: all that any part of the folder ends one with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self.ends_note = ""
        """Which tokens these are, and who says so."""
        self._takes_parts = False
        control = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        control |= set(tokenizer.all_special_tokens)
        self._control = _any_of(control)
        # Where the marks of a thought are special tokens, words without special tokens would run into it.
        self._marks = {
            number: str(token)
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and MARK.fullmatch(str(token))
        }

    @classmethod
    def load(cls, folder: Path) -> Chat:
        """Reads `folder`. Raises ValueError where it is not a model folder, has no chat template that renders what is
        said, or names no token that ends a reply."""
        check_files(folder)
        ends = [(name, number) for name in ENDS_IN for number in _eos_ids(folder / name)]
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # whatever a broken JSON file provokes in transformers
            raise ValueError(f"model.path: the tokenizer of {folder} is broken ({one_line(error)})") from error
        if not tokenizer.chat_template:
            raise ValueError(
                f"model.path: {folder} has no chat template; train an instruct model or add chat_template.jinja"
            )
        chat = cls(tokenizer, ())
        chat._check_template(folder)
        places: dict[int, dict[str, None]] = {}
        for place, number in [*ends, *chat._ends()]:
            places.setdefault(number, {})[place] = None
        if not places:
            raise ValueError(f"model.path: {folder} names no end-of-sequence token, so no reply could ever end")
        chat.stop_ids = tuple(sorted(places))
        named = zip(tokenizer.convert_ids_to_tokens(chat.stop_ids), chat.stop_ids, strict=True)
        chat.ends_note = ", ".join(f"{token} ({number}: {', '.join(places[number])})" for token, number in named)
        return chat

    def _ends(self) -> Iterator[tuple[str, int]]:
        """(where it is named, token id) of what ends a reply by the tokenizer and the template."""
        if self.tokenizer.eos_token_id is not None:
            yield "tokenizer", self.tokenizer.eos_token_id
        asked: list[Message] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
        try:
            behind = self._rendered(asked, ask=False).rpartition("Yes")[2].lstrip()
        except Exception:  # a template that takes no such conversation tells at the prompts
            return
        if mark := self._control.match(behind):
            yield "chat template", self.tokenizer.convert_tokens_to_ids(mark.group())

    def _check_template(self, folder: Path) -> None:
        """Tries content parts where plain text is not rendered. Raises ValueError where neither is, or nothing asks for
        the assistant's reply."""
        said: list[Message] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
        try:
            if "hello" not in self._rendered(said[:1]).lower():
                self._takes_parts = True
            prompt, silent = self._rendered(said[:1]), self._rendered(said[:1], ask=False)
            whole = self._rendered(said, ask=False)
        except Exception:  # no user without a system message, say: told at the prompts, which may be as it wants them
            return
        where = f"model.path: the chat template of {folder}"
        if "hello" not in prompt.lower():
            raise ValueError(
                f"{where} renders nothing of the user's message; it must write message.content of every message, as "
                "text, or the text of its parts"
            )
        if prompt == silent and whole.startswith(prompt) and whole[len(prompt) :].partition("Yes")[0].strip():
            heading = whole[len(prompt) :].partition("Yes")[0]
            raise ValueError(
                f"{where} renders nothing to ask for the assistant's reply, which begins with {heading!r}; add "
                f"{{% if add_generation_prompt %}}{heading}{{% endif %}} to its end"
            )

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids that ask for the next assistant message."""
        return self._ids(self._rendered(messages))

    def next_prompt_ids(self, history: Sequence[Message], reply: Reply, said: Message) -> list[int]:
        """Token ids that ask for the message after `said`, the user's answer to `reply`, which ends `history` as
        `as_sampled` has it.

        They begin with exactly the ids of `reply` and its prompt: what was sampled is not tokenized again. Only where
        the template itself renders the past differently (thoughts dropped, another end of turn than the one that was
        sampled), the whole history is rendered anew.
        """
        rendered = self._rendered([*history, said])
        so_far = self._rendered(history[:-1]) + reply.thought + reply.text
        # From the reply's end of turn on: a token of its own, so that what follows is tokenized as in the whole.
        appended = self._ids(rendered[len(so_far) :]) if rendered.startswith(so_far) else []
        if appended[:1] == list(reply.token_ids[-1:]):
            return [*reply.ids, *appended[1:]]
        return self._ids(rendered)

    def as_sampled(self, reply: Reply) -> Message:
        """The assistant's message for the template: with the thought, which it keeps or drops as it likes."""
        opening = self.thought_opening if reply.thought else ""
        return {"role": "assistant", "content": opening + reply.thought + reply.text}

    @property
    def keeps_history(self) -> bool:
        """Whether the template leaves plain replies as they were sampled when the conversation goes on."""
        asked: Message = {"role": "user", "content": "Hello"}
        thought = f"Well.\n{closing(self.thought_opening)}\n\n" if self.thought_opening else ""
        prompt_ids, token_ids = tuple(self.prompt_ids([asked])), self._ids(thought + "Yes")
        replies = [Reply(prompt_ids, (*token_ids, stop), (), "Yes", "stop", thought) for stop in self.stop_ids]
        following = [tuple(self.next_prompt_ids([asked, self.as_sampled(reply)], reply, asked)) for reply in replies]
        return any(ids[: len(reply.ids)] == reply.ids for ids, reply in zip(following, replies, strict=True))

    @property
    def history_note(self) -> str:
        """What `keeps_history` means for training on all replies."""
        if self.keeps_history:
            return "one sequence per conversation (the chat template keeps history as it was sampled)"
        return "one sequence per reply (the chat template renders earlier replies differently)"

    @cached_property
    def thought_opening(self) -> str:
        """What a prompt ends with where the template opens every reply with a thought, whatever it is told; else ""."""
        try:
            return open_end(self._rendered([{"role": "user", "content": "Hello"}]))
        except Exception:  # as in `_check_template`
            return ""

    def _rendered(self, messages: Sequence[Message], *, ask: bool = True) -> str:
        """`enable_thinking=False` is what Qwen3's template reads; other templates ignore it."""
        shown: list[dict[str, Any]] = [dict(message) for message in messages]
        if self._takes_parts:
            shown = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in shown]
        return self.tokenizer.apply_chat_template(
            shown, add_generation_prompt=ask, tokenize=False, enable_thinking=False
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def read(self, token_ids: Sequence[int], *, ended: bool = True) -> tuple[str, str]:
        """(what a sampled message thought, what it said), without special tokens: `rollout.thoughts`.

        One that has not `ended` keeps the blanks that it ends with so far.
        """
        words = self._words(token_ids)
        return split_thought(words.rstrip() if ended else words, opened=bool(self.thought_opening))

    def num_thought_tokens(self, token_ids: Sequence[int], thought: str) -> int:
        """How many of the sampled tokens `thought`, which was read from them, takes: all, where it never ends."""
        if never_ends(thought):
            return len(token_ids)
        length = len(thought.rstrip())
        low, high = 0, len(token_ids)
        while low < high:  # the fewest tokens whose words are as long
            middle = (low + high) // 2
            low, high = (low, middle) if len(self._words(token_ids[:middle])) >= length else (middle + 1, high)
        return low

    def _words(self, token_ids: Sequence[int]) -> str:
        """Marks of thoughts are words, even where they are special tokens."""
        pieces, start = [], 0
        for index in [index for index, number in enumerate(token_ids) if number in self._marks]:
            pieces += [self._decoded(token_ids[start:index]), self._marks[token_ids[index]]]
            start = index + 1
        return "".join([*pieces, self._decoded(token_ids[start:])]).lstrip()

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def without_control_tokens(self, text: str) -> str:
        """`text`, stripped, with a blank for each control token that it spells out: in a prompt it would be one."""
        return self._control.sub(" ", text).strip()

    def num_tokens(self, text: str) -> int:
        """Length of `text` in this tokenizer's tokens, no special tokens added."""
        return len(self._ids(text))

    def fit_embeddings(self, num_embeddings: int, folder: Path) -> str:
        """Takes tokens that the model of `folder` has no embedding for out of what users say; tells which they are,
        "" where there are none.

        Raises ValueError where a prompt would hold them all the same.
        """
        beyond = {token: number for token, number in self.tokenizer.get_vocab().items() if number >= num_embeddings}
        if not beyond:
            return ""
        first = min(beyond, key=beyond.__getitem__)
        what = f"{first} ({beyond[first]})" + (f" and {len(beyond) - 1} more" if len(beyond) > 1 else "")
        conversation: list[Message] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
        used = self._used(conversation, num_embeddings)
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        if used or not beyond.keys() <= added:
            if used:
                [what] = {f"{token} ({number}), which its chat template writes," for token, number in used[:1]}
            raise ValueError(
                f"model.path: the tokenizer of {folder} has {what} beyond the {num_embeddings} embeddings of its "
                "model; take a tokenizer and a model that belong together, or resize the embeddings "
                f"(model.resize_token_embeddings({max(beyond.values()) + 1})) and train them first"
            )
        self._control = _any_of({*beyond, *(str(t) for t in self.tokenizer.added_tokens_decoder.values() if t.special)})
        return what

    def _used(self, messages: Sequence[Message], num_embeddings: int) -> list[tuple[str, int]]:
        try:
            numbers = [*self._ids(self._rendered(messages[:1])), *self._ids(self._rendered(messages, ask=False))]
        except Exception:  # as in `_check_template`
            return []
        beyond = [number for number in numbers if number >= num_embeddings]
        return [*zip(self.tokenizer.convert_ids_to_tokens(beyond), beyond, strict=True)]


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or r"(?!)")


def _eos_ids(file: Path) -> Iterator[int]:
    """All that `file` calls `eos_token_id`, its text section included. Raises ValueError where it is something else."""
    if not file.exists():
        return
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {file} is broken ({error})") from error
    if not isinstance(settings, Mapping):
        raise ValueError(f"model.path: {file} is broken (it holds {type(settings).__name__}, not settings)")
    text = settings.get("text_config")
    for section in (settings, text if isinstance(text, Mapping) else {}):
        found = section.get("eos_token_id")
        for number in found if isinstance(found, list) else [found]:
            if isinstance(number, bool) or not (number is None or (isinstance(number, int) and number >= 0)):
                raise ValueError(
                    f"model.path: eos_token_id of {file} is {found!r}; write a token id, or a list of them"
                )
            if number is not None:
                yield number
