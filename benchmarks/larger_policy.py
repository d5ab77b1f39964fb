"""A policy of some ten million parameters, untrained: large enough that a token takes milliseconds on a CPU."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from workers.demo.tokenizer import build_tokenizer


def write_larger_policy(folder: Path) -> int:
    """Write a Hugging Face folder with the demo's tokenizer; returns the model's parameters."""
    words = build_tokenizer()
    config = Qwen3Config(
        vocab_size=max(len(words), 8192),
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
