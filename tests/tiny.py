"""Tiny random models with a real tokenizer and chat template, for tests where the weights do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from rollout.chat import Chat
from rollout.engines.sharing import SharedEngine
from rollout.engines.transformers import TransformersEngine
from rollout.settings import EngineSettings

WORDS = "hello i can help what do you want to say about the bees on roof they hum and keep warm in winter ? . !".split()
SPECIAL = ["<unk>", "<end>", "<system>", "<user>", "<assistant>"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"


def make_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<end>",
        pad_token="<end>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Saves a Llama of two layers with a vocabulary of about thirty words; one reply in thirty tokens ends."""
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=1,
        bos_token_id=None,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=1, pad_token_id=1).save_pretrained(folder)
    return folder


def make_engine(folder: Path) -> tuple[Chat, SharedEngine]:
    """The chat template and an engine of the model in `folder`, with little room."""
    chat = Chat.load(folder)
    settings = EngineSettings(max_context_tokens=160)
    return chat, SharedEngine(TransformersEngine(settings, folder, torch.float32, torch.device("cpu"), chat.stop_ids))
