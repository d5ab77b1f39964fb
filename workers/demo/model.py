"""The demo policy's network: Qwen3's architecture with about half a million parameters, made from a seed."""

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from workers.demo.tokenizer import MAX_TOKENS


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Untrained weights in fp32; the same seed gives the same weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=_id(tokenizer, "<|im_end|>"),
        pad_token_id=_id(tokenizer, "<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return tokenizer.get_vocab()[token]
