"""Saves the policy as a plain Hugging Face folder: `from_pretrained` and `vllm serve` load it as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer

from grpo.model.policy import Policy
from grpo.run.disk import NotWritten, flush_folder, free_bytes, in_words
from rollout.files import is_disk_fault, share_as_folder

GENERATION_CONFIG = "generation_config.json"


class ModelWriter:
    """Writes whole models, with the tokenizer, chat template and generation config of the folder they began with.

    Those are read at the start, so saving still works if that folder changes or disappears during the run.
    """

    def __init__(self, policy: Policy, source: Path):
        self._policy = policy
        self._tokenizer = AutoTokenizer.from_pretrained(source)
        file = source / GENERATION_CONFIG
        self._generation_config = file.read_bytes() if file.exists() else None

    def save(self, folder: Path) -> None:
        """Collective; only the main rank writes, beside `folder`, and renames at the end: it is whole or absent.

        Raises NotWritten, on all ranks, where the disk does not take it; what was begun is gone then.
        """
        state = self._policy.state_on_main()
        fault = None
        if self._policy.ranks.is_main:
            try:
                self._write(folder, state)
            except Exception as error:
                if not is_disk_fault(error):
                    raise
                need, free = sum(tensor.nbytes for tensor in state.values()), free_bytes(folder.parent)
                fault = f"{folder} could not be saved: {error}; it takes {in_words(need)}, {in_words(free)} are free"
        fault, *_ = self._policy.ranks.gather(fault)  # nobody goes on before it is there
        if fault:
            raise NotWritten(fault)

    def _write(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            self._policy.causal_lm.save_pretrained(part, state_dict=state)
            self._tokenizer.save_pretrained(part)
            if self._generation_config is not None:  # as it is: transformers loads some that it refuses to write
                (part / GENERATION_CONFIG).write_bytes(self._generation_config)
            else:  # an empty one would hide the end of sequence that config.json names
                (part / GENERATION_CONFIG).unlink(missing_ok=True)
            share_as_folder(part)
            flush_folder(part)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
