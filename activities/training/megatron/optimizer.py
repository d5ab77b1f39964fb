"""Data parallelism and AdamW: wraps the model, builds Megatron-core's optimizer, sets the rate of a step."""

from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from activities.training.megatron.model import model_dtype
from configs.training import TrainingConfig


def wrap_model(model: GPTModel, training: TrainingConfig) -> DistributedDataParallel:
    """Reduce gradients over the data-parallel ranks, in float32."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=training.use_distributed_optimizer,
        average_in_collective=False,
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = wrapped.no_sync
    return wrapped


def build_optimizer(model: DistributedDataParallel, training: TrainingConfig) -> MegatronOptimizer:
    """A fresh AdamW. Weight decay acts on matrices only."""
    dtype = model_dtype(training)
    config = OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        min_lr=training.lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        clip_grad=training.max_grad_norm,
        params_dtype=dtype,
        bf16=training.dtype == "bfloat16",
        use_distributed_optimizer=training.use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, [model])


def learning_rate(training: TrainingConfig, version: int) -> float:
    """Rate of the step from `version` to the next: linear warm-up, then constant."""
    if training.lr_warmup_steps == 0:
        return training.lr
    return training.lr * min(1.0, (version + 1) / training.lr_warmup_steps)


def set_learning_rate(optimizer: MegatronOptimizer, rate: float) -> None:
    """Use `rate` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def torch_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that Megatron-core's chain drives."""
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
