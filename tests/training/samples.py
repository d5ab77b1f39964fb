"""Small models and batches for the trainer's tests."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.megatron.engine import Engine
from configs.grpo import LossConfig
from configs.training import TrainingConfig

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3-tied": (Qwen3Config, {"tie_word_embeddings": True, "rope_parameters": PLAIN_ROPE}),
    "qwen3-untied": (Qwen3Config, {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-untied": (Qwen2Config, {"tie_word_embeddings": False}),
    "llama-untied": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama3-rope": (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
}


def write_model(folder: Path, kind: str) -> Path:
    """A Hugging Face folder with random weights (norms and biases too) and a stand-in for a tokenizer."""
    config_class, options = MODELS[kind]
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config_class(**SIZES, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": "stand-in"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return folder


def read_model(folder: Path) -> PreTrainedModel:
    """The model of a folder in Transformers, in float32; every tensor must be used, none may be missing."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    return model.eval()


def log_probs_of(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    """[tokens - 1] log-probability of each token but the first."""
    inputs = torch.from_numpy(tokens.astype(np.int64))[None]
    logits = model(input_ids=inputs).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1).gather(-1, inputs[0, 1:, None])[:, 0]


def make_row(rng: np.random.Generator, rollout: str, segment: int = 0, *, length: int, advantage: float) -> TrainingRow:
    """A row whose first three tokens are a prompt and about half of whose others were sampled."""
    mask = (rng.random(length) < 0.6).astype(np.uint8)
    mask[:3] = 0
    mask[-1] = 1
    log_probs = np.where(mask == 1, -4.5 + 0.4 * rng.standard_normal(length), 0.0).astype(np.float32)
    tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
    return TrainingRow(rollout, segment, tokens, mask, log_probs, advantage)


def make_batch(step: int = 0, rows: int = 7) -> TrainingBatch:
    """Rows of different lengths; each rollout owns one or two of them."""
    rng = np.random.default_rng(100 + step)
    made = tuple(
        make_row(
            rng,
            f"run/step-{step}/group-0/rollout-{i // 2}",
            i % 2,
            length=int(rng.integers(8, 40)),
            advantage=float(rng.standard_normal()),
        )
        for i in range(rows)
    )
    return TrainingBatch("run", step, made)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an exported folder."""
    return {name: value.detach() for name, value in read_model(folder).state_dict().items()}


def new_engine(loss: LossConfig | None = None, **training: Any) -> Engine:
    """An engine of one rank with one thread."""
    settings = {"lr": 1e-3, "train_micro_batch_size": 4, "threads": 1} | training
    return Engine(TrainingConfig(**settings), loss or LossConfig(reference_policy_kl_penalty=0.1), seed=7)


def exported(engine: Engine, folder: Path) -> dict[str, torch.Tensor]:
    """The engine's weights, by way of an export."""
    engine.export(folder)
    return weights_of(folder)


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not bit-identical."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def greatest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
