"""Messages to token ids and back, with the model's own chat template and thinking off."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from rollout.settings import looked_at
from rollout.types import Message, Reply


class Chat:
    """A model folder's tokenizer and chat template.

    `stop_ids` are the tokens that end an assistant message: the tokenizer's end-of-sequence token and
    those of the folder's generation config.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.stop_ids = tuple(sorted(set(stop_ids)))
        control = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        control |= set(tokenizer.all_special_tokens)
        self._control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")

    @classmethod
    def load(cls, folder: Path) -> Chat:
        """Reads `folder`. Raises ValueError where it is not a model folder or has no chat template."""
        check_model_folder(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            generation = (
                GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").exists() else None
            )
        except Exception as error:  # whatever a broken JSON file provokes in transformers
            raise ValueError(
                f"model.path: the tokenizer or generation config of {folder} is broken ({error})"
            ) from error
        if not tokenizer.chat_template:
            raise ValueError(
                f"model.path: {folder} has no chat template; train an instruct model or add chat_template.jinja"
            )
        stop_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if generation is not None:
            eos = generation.eos_token_id
            stop_ids += [eos] if isinstance(eos, int) else list(eos or [])
        if not stop_ids:
            raise ValueError(f"model.path: {folder} names no end-of-sequence token, so no reply could ever end")
        return cls(tokenizer, stop_ids)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids that ask for the next assistant message."""
        return self._ids(self._rendered(messages))

    def next_prompt_ids(self, history: Sequence[Message], reply: Reply, said: Message) -> list[int]:
        """Token ids that ask for the message after `said`, the user's answer to `reply`, which ends `history`.

        They begin with exactly the ids of `reply` and its prompt: what was sampled is not tokenized again. Only where
        the template itself renders the past differently (thinking blocks dropped, another end of turn than the one
        that was sampled), the whole history is rendered anew.
        """
        rendered = self._rendered([*history, said])
        so_far = self._rendered(history[:-1]) + reply.text
        # From the reply's end of turn on: a token of its own, so that what follows is tokenized as in the whole.
        appended = self._ids(rendered[len(so_far) :]) if rendered.startswith(so_far) else []
        if appended[:1] == list(reply.token_ids[-1:]):
            return [*reply.ids, *appended[1:]]
        return self._ids(rendered)

    @property
    def keeps_history(self) -> bool:
        """Whether the template leaves plain replies as they were sampled when the conversation goes on."""
        asked: list[Message] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
        prompt_ids, token_ids = tuple(self.prompt_ids(asked[:1])), self._ids("Yes")
        replies = [Reply(prompt_ids, (*token_ids, stop), (), "Yes", "stop") for stop in self.stop_ids]
        following = [tuple(self.next_prompt_ids(asked, reply, asked[0])) for reply in replies]
        return any(ids[: len(reply.ids)] == reply.ids for ids, reply in zip(following, replies, strict=True))

    @property
    def history_note(self) -> str:
        """What `keeps_history` means for training on all replies."""
        if self.keeps_history:
            return "one sequence per conversation (the chat template keeps history as it was sampled)"
        return "one sequence per reply (the chat template renders earlier replies differently)"

    def _rendered(self, messages: Sequence[Message]) -> str:
        """`enable_thinking=False` is what Qwen3's template reads; other templates ignore it."""
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False, enable_thinking=False
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, token_ids: Sequence[int]) -> str:
        """The words of a sampled message, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def without_control_tokens(self, text: str) -> str:
        """`text`, stripped, with a blank for each control token that it spells out: in a prompt it would be one."""
        return self._control.sub(" ", text).strip()

    def num_tokens(self, text: str) -> int:
        """Length of `text` in this tokenizer's tokens, no special tokens added."""
        return len(self._ids(text))


def check_model_folder(folder: Path) -> None:
    """Raises ValueError unless `folder` holds a Hugging Face model with its tokenizer."""
    if not folder.is_dir():
        raise ValueError(
            f"model.path: there is no folder {folder}{looked_at(folder)}; give a local Hugging Face model folder"
        )
    missing = []
    if not (folder / "config.json").exists():
        missing.append("config.json")
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        missing.append(
            "model*.safetensors" + (" (an adapter alone is no model; merge it)" if any(folder.glob("adapter*")) else "")
        )
    if not (folder / "tokenizer_config.json").exists():
        missing.append("tokenizer_config.json")
    if missing:
        raise ValueError(
            f"model.path: {folder} is not a Hugging Face model folder: it lacks {', '.join(missing)}; "
            "save one with model.save_pretrained and tokenizer.save_pretrained"
        )

    for file in weights:
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as error:  # a pointer of git-lfs, a download cut off
            raise ValueError(f"model.path: {file} is not a safetensors file ({error}); download it again") from error


def check_context(folder: Path, max_context_tokens: int) -> None:
    """Raises ValueError where `folder`'s model is not a causal one whose log-probs we compute as it does itself, or
    has fewer positions than a run needs."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise ValueError(f"model.path: {folder}/config.json cannot be used ({error})") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model.path: {folder} holds a {config.model_type} model, which has no causal language head")
    scalings = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    unsupported = [name for name in scalings if getattr(config, name, None) not in (None, False, 1)]
    if unsupported:
        raise ValueError(
            f"model.path: {folder} has {', '.join(unsupported)}, which the trainer does not compute; take another"
        )
    positions = getattr(config, "max_position_embeddings", max_context_tokens)
    if positions < max_context_tokens:
        raise ValueError(
            f"engine.max_context_tokens: {max_context_tokens} is more than the {positions} positions of {folder}; "
            "lower it"
        )
