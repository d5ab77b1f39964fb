"""Data parallelism and AdamW: wraps the model, builds Megatron-core's optimizer, applies the gradients of a step."""

from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

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
    """A fresh AdamW. Weight decay acts on matrices only, not on norms and biases."""
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
    optimizer = get_megatron_optimizer(config, [model])
    for group in optimizer.param_groups:  # Megatron-core leaves the group's factor to its own scheduler
        group["weight_decay"] = training.weight_decay * group["wd_mult"]
    return optimizer


def clear_gradients(model: DistributedDataParallel, optimizer: MegatronOptimizer) -> None:
    """Forget all gradients, those of a step that failed too."""
    optimizer.zero_grad()
    model.zero_grad_buffer()


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Hand the accumulated gradients to the optimizer; their global norm before clipping. Collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def apply_gradients(optimizer: MegatronOptimizer, norm: float, rate: float) -> None:
    """Clip what `gradient_norm` prepared and measured, and update the weights with this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    for part in _parts(optimizer):
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
    optimizer.step_with_ready_grads()


def torch_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that Megatron-core's chain drives."""
    return [part.optimizer for part in _parts(optimizer)]


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])
