"""Small models that a real vLLM server loads: the demo's network with tied embeddings, other weights for each seed."""

from functools import cache
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from activities.generation.weights import weights_digest
from workers.demo.model import build_model
from workers.demo.tokenizer import build_tokenizer
from workers.demo.warm_start import warm_start
from workflows.messages import WeightsRef

_WARM_START_STEPS = 30  # enough for calls of the tool that can be parsed
_LARGE = 0.2  # makes the greedy continuation differ from seed to seed


def random_policy(folder: Path, version: int) -> WeightsRef:
    """Large random weights, with the tokenizer."""
    return _saved(_network(version, _LARGE), folder, version)


def safe_opener(folder: Path) -> WeightsRef:
    """Version 0 of a policy that calls the demo's tool, and mostly plays badly."""
    model = _network(0)
    warm_start(model, build_tokenizer(), lambda line: None, steps=_WARM_START_STEPS)
    return _saved(model, folder, 0)


@cache
def greedy(path: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """What the weights of a folder continue a prompt with, according to Transformers."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = list(prompt)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # at this size more wait for each other
    try:
        with torch.no_grad():
            for _ in range(tokens):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    finally:
        torch.set_num_threads(threads)
    return ids[len(prompt) :]


def _network(seed: int, initializer_range: float | None = None) -> Qwen3ForCausalLM:
    demo = build_model(build_tokenizer(), seed)
    demo.config.tie_word_embeddings = True
    if initializer_range is not None:
        demo.config.initializer_range = initializer_range
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen3ForCausalLM(demo.config).float()
    network.generation_config = demo.generation_config
    return network


def _saved(network: Qwen3ForCausalLM, folder: Path, version: int) -> WeightsRef:
    network.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return WeightsRef(version=version, path=str(folder), digest=weights_digest(folder))
