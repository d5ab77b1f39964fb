"""Small models and batches for the trainer's tests."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.megatron.engine import Engine
from activities.training.megatron.optimizer import torch_optimizers
from activities.training.megatron.parameters import parameter_map
from configs.grpo import GrpoConfig, LossConfig
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


def exact_model(folder: Path) -> PreTrainedModel:
    """The model of a folder in float64, its norms too: Transformers computes those in float32 whatever it is told."""
    model = read_model(folder).double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm: Any = child
                replacement = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
                replacement.weight = norm.weight
                setattr(module, name, replacement)
    return model


def log_probs_of(model: PreTrainedModel, tokens: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """[tokens - 1] log-probability of each token but the first, of logits / temperature."""
    inputs = torch.from_numpy(tokens.astype(np.int64))[None]
    logits = model(input_ids=inputs).logits[0, :-1] / temperature
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


def new_engine(
    loss: LossConfig | None = None,
    *,
    temperature: float = 1.0,
    seq_logprob_error_threshold: float | None = None,
    **training: Any,
) -> Engine:
    """An engine of one rank with one thread."""
    settings = {"lr": 1e-3, "train_micro_batch_size": 4, "threads": 1} | training
    loss = loss or LossConfig(reference_policy_kl_penalty=0.1)
    grpo = GrpoConfig(loss_fn=loss, seed=7, seq_logprob_error_threshold=seq_logprob_error_threshold)
    return Engine(TrainingConfig(**settings), grpo, temperature)


def steady(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that depend on nothing but weights and batch."""
    return {name: value for name, value in metrics.items() if not name.startswith("timing/")}


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of all that a step may change: parameters, Adam's moments and step counts, masters of bf16."""
    policy: Any = engine._policy
    state = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    for optimizer in torch_optimizers(policy.optimizer):
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            state[f"optimized-{i}"] = parameter.detach().clone()
            state |= {f"{name}-{i}": value.clone() for name, value in optimizer.state[parameter].items()}
    return state


def gradients_of(engine: Engine) -> dict[str, torch.Tensor]:
    """The gradient of the last step by Hugging Face name, as it was applied: clipped."""
    policy: Any = engine._policy
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in policy.model.named_parameters():
        mapping = parameter_map(name, 0, policy.shape)
        parts = mapping.split(parameter.main_grad.detach().clone(), policy.shape)
        gradients |= dict(zip(mapping.hf_names, parts, strict=True))
    return gradients


def agreeing(batch: TrainingBatch, engine: Engine) -> TrainingBatch:
    """The batch as if vLLM had computed the very log-probabilities of the engine."""
    found = engine.log_probabilities(batch)
    rows = tuple(
        dataclasses.replace(row, log_probs=values * row.loss_mask)
        for row, values in zip(batch.rows, found, strict=True)
    )
    return dataclasses.replace(batch, rows=rows)


def off_by(batch: TrainingBatch, row: int, gap: float) -> TrainingBatch:
    """The batch in which the first trained token of a row has another recorded log-probability."""
    rows = list(batch.rows)
    log_probs = rows[row].log_probs.copy()
    log_probs[np.flatnonzero(rows[row].loss_mask)[0]] += gap
    rows[row] = dataclasses.replace(rows[row], log_probs=log_probs)
    return dataclasses.replace(batch, rows=tuple(rows))


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
