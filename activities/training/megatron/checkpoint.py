"""Checkpoints of all ranks with megatron.core.dist_checkpointing: weights, optimizer, policy version.

Training after save and load is bit-identical to training without. A folder that exists is complete: it is written
beside its place and renamed. Files are written by this process; Megatron-core's default forks writers, which is not
safe in a process with other threads, and starts a child that imports the main module again.
"""

import queue
import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from activities.training.errors import CheckpointError
from activities.training.megatron.optimizer import torch_optimizers

FORMAT_VERSION = 1
_METADATA = {
    "distrib_optim_sharding_type": "dp_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class _InProcessStrategy(TorchDistSaveShardedStrategy):
    """Writes this rank's files in this process."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        results: queue.Queue[Any] = queue.Queue()
        # Megatron-core asks for this queue when it plans the save; its own would live in a child process.
        filesystem_async._results_queue = results
        request = self.async_save(sharded_state_dict, Path(checkpoint_dir))
        write: Any = (
            request.async_fn
        )  # a partial whose first argument is the list of transforms; None: nothing to write
        if write is not None:
            request = request._replace(async_fn=partial(_write_buckets, write.args[0]))
        request.execute_sync()


def _write_buckets(transforms: list[Any], rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
    """Write the buckets of this rank one after the other; the outcome of all goes to `results`."""
    del rank
    written: dict[int, Any] = {}
    for i, bucket in enumerate(buckets):
        # Their annotations name queues between processes; queues of this process do the same.
        outcome, running = cast(Any, queue.Queue()), cast(Any, queue.Queue())
        running.put(i)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, i, bucket, results_queue=outcome, count_queue=running, use_fsync=True
        )
        _, written[i] = outcome.get_nowait()
        if isinstance(written[i], Exception):
            results.put(written[i])
            return
    results.put(written)


def save_checkpoint(folder: Path, model: GPTModel, optimizer: MegatronOptimizer, version: int) -> None:
    """Write `folder`. Collective; all ranks must see the same file system."""
    temporary = folder.with_name(f".{folder.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    state = _state(model, optimizer, loading=False)
    state["onbelay"] = {"format": FORMAT_VERSION, "version": version}
    try:
        dist_checkpointing.save(state, str(temporary), sharded_strategy=_InProcessStrategy("torch_dist", 1))
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"The checkpoint {folder} could not be written ({error}). Free space under training.output_dir or choose "
            "another folder; the step can be trained again."
        ) from error
    if dist.get_rank() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    dist.barrier()


def load_checkpoint(folder: Path, model: GPTModel, optimizer: MegatronOptimizer) -> int:
    """Fill model and optimizer from `folder`; returns the policy version. Collective."""
    if not (folder / "metadata.json").is_file():
        raise CheckpointError(
            f"There is no complete checkpoint in {folder}. Choose an older one, or start from the model itself."
        )
    state = _state(model, optimizer, loading=True)
    try:
        loaded = cast(dict[str, Any], dist_checkpointing.load(state, str(folder)))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"The checkpoint {folder} cannot be loaded ({type(error).__name__}: {error}). It must come from the same "
            "model and optimizer settings; otherwise choose an older one."
        ) from error
    stamp = loaded["onbelay"]
    if stamp["format"] != FORMAT_VERSION:
        raise CheckpointError(f"The checkpoint {folder} has format {stamp['format']}; this reads {FORMAT_VERSION}.")
    version = int(stamp["version"])
    model.load_state_dict(loaded["model"])
    if version == 0:  # the optimizer has not stepped: a fresh one is the right one, and Megatron-core stored no step
        optimizer.reload_model_params()
        return version
    with torch.no_grad():
        optimizer.load_state_dict(loaded["optimizer"])
    for inner in torch_optimizers(optimizer):
        if isinstance(inner, torch.optim.AdamW):
            for moments in inner.state.values():
                # The distributed optimizer leaves Adam's step at 0, and so its bias correction wrong.
                moments["step"] = torch.tensor(float(version))
    return version


def _state(model: GPTModel, optimizer: MegatronOptimizer, *, loading: bool) -> dict[str, Any]:
    for inner in torch_optimizers(optimizer):
        _prime(inner)
    weights = model.sharded_state_dict(metadata=_METADATA)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=_METADATA),
    }


def _prime(optimizer: Any) -> None:
    """Give torch's Adam the state that its first step would: without it there is nothing to save or to load to."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
