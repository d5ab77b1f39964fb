"""The shape of a model, read from the config.json of its Hugging Face folder.

Only shapes that Megatron-core trains exactly are accepted: Qwen3, Qwen2 and Llama without sliding windows, biases
elsewhere than in QKV, or unusual rotary scaling. Everything else is an error that says what is missing.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.training.errors import LayoutError, ModelFolderError
from configs.training import TrainingConfig

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
# The only scaling that Megatron-core has is Llama 3's, with these constants.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class ModelShape:
    """What decides the parameters and the forward pass."""

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling_factor: float | None
    tied_embeddings: bool

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normalised per head."""
        return self.model_type == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        """The QKV projection has a bias."""
        return self.model_type == "qwen2"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelFolderError(
            f"The model folder {folder} has no config.json. Point the recipe's model at a Hugging Face folder with "
            "config.json, *.safetensors and tokenizer files."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{path} is not valid JSON ({error}). Download or export the model again.") from error
    if not isinstance(config, dict):
        raise ModelFolderError(f"{path} is not a JSON object. Download or export the model again.")
    return config


def read_shape(folder: Path) -> ModelShape:
    """Shape of the model in `folder`; `ModelFolderError` when the trainer does not support it."""
    config = read_config(folder)
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ModelFolderError(
            f"The model folder {folder} holds a model of type {model_type!r}; the trainer supports "
            f"{', '.join(sorted(ARCHITECTURES))}. Choose such a model."
        )
    _refuse_unsupported(folder, config)
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        theta, factor = _rope(folder, config)
        return ModelShape(
            model_type=model_type,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            ffn_size=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling_factor=factor,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ModelFolderError(f"{folder / 'config.json'} has no key {error}. Download the model again.") from error


def _refuse_unsupported(folder: Path, config: dict[str, Any]) -> None:
    """Raise for features that would silently change the log-probabilities."""
    wrong = {
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "quantization_config": config.get("quantization_config") is not None,
    }
    for key, unsupported in wrong.items():
        if unsupported:
            raise ModelFolderError(
                f"{folder / 'config.json'} sets {key}={config[key]!r}, which the trainer does not support. "
                "Choose a dense model without it."
            )


def _rope(folder: Path, config: dict[str, Any]) -> tuple[float, float | None]:
    """Rotary base, and the factor of Llama 3's scaling or None. Reads the spellings of Transformers 4 and 5."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" and float(rope.get("partial_rotary_factor") or 1.0) == 1.0:
        return theta, None
    if kind == "llama3" and all(float(rope.get(key, value)) == value for key, value in LLAMA3_ROPE.items()):
        return theta, float(rope["factor"])
    raise ModelFolderError(
        f"{folder / 'config.json'} has rotary embeddings {rope}, which the trainer does not support (only the plain "
        "ones, and Llama 3's with its usual constants). Choose a model without that scaling."
    )


def check_layout(shape: ModelShape, training: TrainingConfig) -> None:
    """Raise unless the parallel layout divides the model."""
    tensor, pipeline = training.tensor_model_parallel_size, training.pipeline_model_parallel_size
    for what, size, parts, key in (
        ("key/value heads", shape.kv_heads, tensor, "tensor_model_parallel_size"),
        ("attention heads", shape.heads, tensor, "tensor_model_parallel_size"),
        ("feed-forward units", shape.ffn_size, tensor, "tensor_model_parallel_size"),
        ("tokens in its vocabulary", shape.vocab_size, tensor, "tensor_model_parallel_size"),
        ("layers", shape.layers, pipeline, "pipeline_model_parallel_size"),
    ):
        if size % parts:
            raise LayoutError(
                f"The model has {size} {what}, which training.{key}={parts} does not divide. Choose a divisor."
            )
