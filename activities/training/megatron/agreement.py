"""Numbers that all ranks agree on, to the bit: exact sums and extremes over data-parallel ranks, shared with the rest.

What the last pipeline stage computes is reduced over its data-parallel ranks, taken from the first tensor-parallel
rank, and handed to the other stages. Every function is collective.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from activities.training.megatron.ranks import pipeline_ranks, trainer_device


def added(values: Tensor) -> Tensor:
    """Sums over the data-parallel ranks, float64. Off the last stage only the shape counts."""
    return _agreed(values, dist.ReduceOp.SUM)


def greatest(values: Tensor) -> Tensor:
    """Maxima over the data-parallel ranks, float64. Off the last stage only the shape counts."""
    return _agreed(values, dist.ReduceOp.MAX)


def greatest_of_all(values: list[float]) -> list[float]:
    """Maxima over all ranks."""
    if dist.get_world_size() == 1:
        return values
    shared = torch.tensor(values, dtype=torch.float64, device=trainer_device())
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()


def from_last_stage(names: list[str]) -> list[str]:
    """The names that the last pipeline stage knows, on all stages."""
    stages = pipeline_ranks()
    if len(stages) == 1:
        return names
    shared = [names]
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(shared, src=stages[-1], group=group)
    return shared[0]


def _agreed(values: Tensor, operation: Any) -> Tensor:
    result = values.to(torch.float64, copy=True)
    groups: tuple[Any, Any, Any] = (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    replicas, shards, stages = groups
    if parallel_state.is_pipeline_last_stage():
        if replicas.size() > 1:
            dist.all_reduce(result, op=operation, group=replicas)
        if shards.size() > 1:
            dist.broadcast(result, src=dist.get_process_group_ranks(shards)[0], group=shards)
    if stages.size() > 1:
        dist.broadcast(result, src=pipeline_ranks()[-1], group=stages)
    return result
