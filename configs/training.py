"""`training`: the Megatron-core trainer."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from configs.base import Section


class TrainingConfig(Section):
    """Parallel layout, optimizer and checkpoints. World size = tensor * pipeline * data."""

    tensor_model_parallel_size: int = Field(default=1, ge=1, description="Ranks that share each weight matrix.")
    pipeline_model_parallel_size: int = Field(default=1, ge=1, description="Ranks that share the stack of layers.")
    data_parallel_size: int = Field(default=1, ge=1, description="Replicas that share the rows of a step.")
    layer_spec: Literal["local", "transformer_engine"] = Field(
        default="local", description="Megatron-core's own layers (CPU and GPU), or Transformer Engine's (GPU)."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Precision of the model.")
    use_distributed_optimizer: bool = Field(
        default=False, description="Shard the optimizer state over the data-parallel ranks."
    )
    train_micro_batch_size: int = Field(default=4, ge=1, description="Rows in one forward and backward pass.")
    train_micro_batch_tokens: int = Field(
        default=131_072,
        ge=2,
        description="Most tokens of one pass, padding included; fewer rows go together when they are long.",
    )
    max_row_tokens: int = Field(
        default=32_768, ge=2, description="Longest training row; a rollout with a longer one is masked."
    )
    lr: float = Field(default=1e-6, gt=0, description="Learning rate after warm-up.")
    lr_warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the rate falls after warm-up, to training.min_lr."
    )
    lr_decay_steps: int = Field(
        default=0, ge=0, description="Step at which the rate has reached training.min_lr, warm-up included."
    )
    min_lr: float = Field(default=0.0, ge=0, description="Learning rate after the decay.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the second moment.")
    adam_eps: float = Field(default=1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay of matrices.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    max_logprob_gap: float | None = Field(
        default=None,
        gt=0,
        description="A step fails before it is applied when a token's log-probability differs by more between vLLM and "
        "trainer: a wrong template, stale caches or a bad export. null: only measured.",
    )
    threads: int = Field(default=0, ge=0, description="CPU threads of one trainer rank; 0: PyTorch's choice.")
    save_period: int = Field(default=10, ge=1, description="Steps between checkpoints; batches in between are kept.")
    keep_last: int = Field(default=2, ge=1, description="Newest checkpoints that are kept.")
    keep_every: int = Field(
        default=0, ge=0, description="Checkpoints of versions that this divides are kept for good; 0: none."
    )
    keep_weights: int = Field(default=2, ge=1, description="Newest exported policy versions that are kept.")
    output_dir: Path = Field(
        default=Path(".onbelay/training"),
        description="Folder for checkpoints and exported weights; shared with the vLLM servers.",
    )
    assembly_timeout_s: float = Field(
        default=600.0, gt=0, description="Deadline of one try to build and store the batch of a step."
    )
    step_timeout_s: float = Field(default=7200.0, gt=0, description="Deadline of one optimizer step, replays included.")
    heartbeat_timeout_s: float = Field(
        default=60.0, gt=0, description="A trainer that is silent for so long is taken for dead."
    )
    max_train_attempts: int = Field(
        default=20, ge=1, description="Tries of one optimizer step (a dead trainer counts)."
    )

    @model_validator(mode="after")
    def _rate_falls_as_it_says(self) -> "TrainingConfig":
        """The learning rate: a decay has an end after the warm-up, and a constant rate has none."""
        style, end = self.lr_decay_style, self.lr_decay_steps
        if style == "constant" and (end or self.min_lr):
            raise ValueError(
                f"lr_decay_style: constant with lr_decay_steps ({end}) and min_lr ({self.min_lr}): a constant rate "
                "never falls; set lr_decay_style to linear or cosine, or leave the other two out"
            )
        if style != "constant" and end <= self.lr_warmup_steps:
            raise ValueError(
                f"lr_decay_style: {style} needs lr_decay_steps ({end}) above lr_warmup_steps ({self.lr_warmup_steps}): "
                "the rate falls between the two; set lr_decay_steps to the step at which it has reached min_lr"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) must not exceed lr ({self.lr}): a decay would raise the rate")
        return self

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size
