"""Tiny random models that a real vLLM server loads: same shape, other weights for each seed."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from activities.generation.weights import weights_digest
from workflows.messages import WeightsRef

VOCABULARY = 128


def write_policy(folder: Path, version: int) -> WeightsRef:
    """A model with its tokenizer; large weights make the greedy continuation differ from seed to seed."""
    words = {"<end>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    backend = Tokenizer(WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    torch.manual_seed(version)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return WeightsRef(version=version, path=str(folder), digest=weights_digest(folder))


def greedy(weights: WeightsRef, prompt: list[int], tokens: int) -> list[int]:
    """What the weights continue a prompt with, according to Transformers."""
    model = Qwen3ForCausalLM.from_pretrained(weights.path, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
