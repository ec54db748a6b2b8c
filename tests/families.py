"""Tiny random models of the families that grpo/README.md names, on the tokenizer of `tests.tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.tiny import SPECIAL, WORDS, make_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": len(SPECIAL + WORDS),
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "initializer_range": 0.1,
}
HEADS = {"head_dim": 32}
LINEAR = HEADS | {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Llama tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Mistral windowed": ("MistralConfig", {"sliding_window": 16}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", HEADS),
    "Gemma": ("GemmaConfig", HEADS),
    "Gemma3": ("Gemma3TextConfig", HEADS | {"sliding_window": 16}),
    "Phi-3": ("Phi3Config", {}),
    "OLMo2": ("Olmo2Config", {}),
    "GPT-NeoX": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "SmolLM3": ("SmolLM3Config", {}),
    "GLM-4": ("Glm4Config", HEADS),
    "Granite": ("GraniteConfig", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "Bloom": ("BloomConfig", {"tie_word_embeddings": True}),  # as all that were published
    "Qwen3.5": ("Qwen3_5TextConfig", LINEAR),
    "Qwen3-Next": ("Qwen3NextConfig", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3MoeConfig", HEADS | EXPERTS),
    "OLMoE": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "GPT-OSS": ("GptOssConfig", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
        | {"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 4}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    ),
    "Jamba": (
        "JambaConfig",
        {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
        | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "use_mamba_kernels": False},
    ),
}


def make_family(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Saves a model of the family with its tokenizer."""
    config_class, changes = FAMILIES[name]
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**(COMMON | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=1, pad_token_id=1).save_pretrained(folder)
    return folder
