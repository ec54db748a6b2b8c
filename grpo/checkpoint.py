"""Saves the policy as a plain Hugging Face folder: `from_pretrained` and `vllm serve` load it as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoTokenizer

from grpo.policy import Policy
from rollout.files import share_as_folder

GENERATION_CONFIG = "generation_config.json"


class ModelWriter:
    """Writes whole models, with the tokenizer, chat template and generation config of the folder they began with.

    Those are read once, at the start: what becomes of that folder during a run costs no trained weights.
    """

    def __init__(self, policy: Policy, source: Path):
        self._policy = policy
        self._tokenizer = AutoTokenizer.from_pretrained(source)
        file = source / GENERATION_CONFIG
        self._generation_config = file.read_bytes() if file.exists() else None

    def save(self, folder: Path) -> None:
        """Collective; only the main rank writes, beside `folder`, and renames at the end: it is whole or absent."""
        state = self._policy.state_on_main()
        if self._policy.ranks.is_main:
            part = folder.with_name(folder.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            self._policy.causal_lm.save_pretrained(part, state_dict=state)
            self._tokenizer.save_pretrained(part)
            if self._generation_config is not None:  # as it is: transformers loads some that it refuses to write
                (part / GENERATION_CONFIG).write_bytes(self._generation_config)
            else:  # an empty one would hide the end of sequence that config.json names
                (part / GENERATION_CONFIG).unlink(missing_ok=True)
            share_as_folder(part)
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        self._policy.ranks.gather(None)  # nobody goes on before it is there
