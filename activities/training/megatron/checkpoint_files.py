"""Writes the state of all ranks with megatron.core.dist_checkpointing.

Files are written by this process: Megatron-core's default forks writers, which is not safe in a process with other
threads, and starts a child that imports the main module again. An error of one rank is an error of all.
"""

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from activities.training.megatron.shared_errors import agreed

_BACKEND = ("torch_dist", 1)


def write_state(state: dict[str, Any], folder: Path, failure: Callable[[str], Exception]) -> None:
    """Write a sharded state to an empty folder, as `dist_checkpointing.load` reads it. Collective."""
    sharded, common = save_preprocess(cast(Any, state), True)
    with agreed(failure):
        if dist.get_rank() == 0:
            torch.save(common, folder / COMMON_STATE_FNAME)
            save_config(CheckpointingConfig(*_BACKEND), str(folder))
    with agreed(failure):
        _InProcessStrategy(*_BACKEND).save(sharded, folder)


class _InProcessStrategy(TorchDistSaveShardedStrategy):
    """Writes this rank's files in this process, and raises only after the last collective call."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        results: queue.Queue[Any] = queue.Queue()
        # Megatron-core asks for this queue when it plans the save; its own would live in a child process.
        filesystem_async._results_queue = results
        request = self.async_save(sharded_state_dict, Path(checkpoint_dir))
        write: Any = (
            request.async_fn
        )  # a partial whose first argument is the list of transforms; None: nothing to write
        if write is not None:
            writer = partial(_write_buckets, write.args[0], request.preload_fn)
            request = request._replace(async_fn=writer, preload_fn=cast(Any, None))
        request.execute_sync()
        if self._unfinished is not None:
            raise self._unfinished

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        """Rank 0 writes the index when all are done: the others wait for it whether it can or not."""
        self._unfinished: Exception | None = None
        write_index = writer.finish

        def finish(metadata: Any, results: Any) -> None:
            try:
                write_index(metadata, results)
            except Exception as error:
                self._unfinished = error

        writer.finish = finish
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)


def _write_buckets(
    transforms: list[Any], preload: Callable[[], list[Any]] | None, rank: int, buckets: list[Any], results: Any
) -> None:
    """Write the buckets of this rank one after the other; the outcome of all goes to `results`."""
    del rank
    written: dict[int, Any] = {}
    try:
        if preload is not None:  # copies what is on a device
            buckets = preload()
    except Exception as error:
        results.put(error)
        return
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
