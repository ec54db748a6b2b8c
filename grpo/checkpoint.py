"""Saves the policy as a plain Hugging Face folder: `from_pretrained` and `vllm serve` load it as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from grpo.policy import Policy


def save_model_folder(policy: Policy, source: Path, folder: Path) -> None:
    """Writes the whole model, with the tokenizer, chat template and generation config of `source`.

    Collective; only the main rank writes, beside `folder`, and renames at the end: a folder is whole or
    absent.
    """
    state = policy.state_on_main()
    if policy.ranks.is_main:
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        policy.causal_lm.save_pretrained(part, state_dict=state)
        AutoTokenizer.from_pretrained(source).save_pretrained(part)
        if (source / "generation_config.json").exists():
            GenerationConfig.from_pretrained(source).save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    policy.ranks.gather(None)  # nobody goes on before it is there
