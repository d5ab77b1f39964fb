# pyright: reportPrivateImportUsage=false
# (torch documents its stores and does not export them to type checkers.)
"""The processes of the trainer: joins torchrun's group (or forms a group of one) and lays out the parallel ranks."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from activities.training.errors import LayoutError
from configs.training import TrainingConfig

# Follower ranks wait in a collective while rollouts run, for hours. torchrun ends them when a rank dies.
COLLECTIVE_TIMEOUT = timedelta(days=7)


def trainer_device() -> torch.device:
    """The CUDA device of this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def join_ranks(training: TrainingConfig, seed: int) -> None:
    """Initialise process group, parallel layout and random states. Collective; a second call re-uses the group."""
    device = trainer_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Deterministic matrix products need this workspace, set before the first of them.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if training.threads:
        torch.set_num_threads(training.threads)
    torch.use_deterministic_algorithms(True)
    checks: Any = torch.utils.deterministic
    checks.fill_uninitialized_memory = False  # it only helps to find bugs, and takes time
    if not dist.is_initialized():
        _init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_world_size() != training.world_size:
        raise LayoutError(
            f"{dist.get_world_size()} trainer process(es) run, but training.tensor_model_parallel_size="
            f"{training.tensor_model_parallel_size} * pipeline_model_parallel_size="
            f"{training.pipeline_model_parallel_size} * data_parallel_size={training.data_parallel_size} needs "
            f"{training.world_size}. Start the trainer with torchrun --nproc-per-node={training.world_size}."
        )
    _lay_out(training)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=device.type == "cpu")


def _lay_out(training: TrainingConfig) -> None:
    """Form the groups of the layout, once: Megatron-core keeps traces of a layout for the life of the process."""
    wanted = (training.tensor_model_parallel_size, training.pipeline_model_parallel_size)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(*wanted)
        return
    present = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if present != wanted:
        raise LayoutError(
            f"This process already trains with tensor and pipeline parallel sizes {present}; {wanted} needs new "
            "processes. Restart the trainer."
        )


def pipeline_ranks() -> list[int]:
    """The ranks that hold the stages of this rank's replica, first stage first."""
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    return dist.get_process_group_ranks(group)


def _init_process_group(backend: str) -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        return
    alone = dist.HashStore()  # no other process to meet, so no port
    dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
