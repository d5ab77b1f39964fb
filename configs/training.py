"""`training`: the Megatron-core trainer."""

from pathlib import Path
from typing import Literal

from pydantic import Field

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
    max_row_tokens: int = Field(
        default=32_768, ge=2, description="Longest training row; a rollout with a longer one is masked."
    )
    lr: float = Field(default=1e-6, gt=0, description="Learning rate after warm-up.")
    lr_warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the second moment.")
    adam_eps: float = Field(default=1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay of matrices.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    threads: int = Field(default=0, ge=0, description="CPU threads of one trainer rank; 0: PyTorch's choice.")
    save_period: int = Field(default=10, ge=1, description="Steps between checkpoints; batches in between are kept.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints that are kept.")
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

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size
