"""The product's trainer worker, with a recorder of what its engine does and a trap where the benchmark aims.

    torchrun --nproc-per-node N -m benchmarks.exactly_once.trainer --recipe FILE

Functions of the product are wrapped from outside, so that a trap is hit exactly. A trap is SIGKILL: nothing of the
process runs any more, no handler, no clean-up. Rank 0 dies, or in a micro-batch the last rank.
"""

import functools
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from activities.training.batch import TrainingBatch
from activities.training.megatron import hf_writer
from activities.training.megatron.engine import Engine
from activities.training.watch import Unwatched, Watch
from benchmarks.exactly_once.lineage import Event, LineageLog
from benchmarks.exactly_once.points import STEPS, Aim, PointName, aimed, final_state, hit
from storage.blobs import BlobStore
from storage.steps import Steps
from workers import trainer_worker

SHARD_SIZE_BYTES = 16 * 2**10  # so that the small model has several shards


class Trap:
    """Kills this process where the benchmark aims."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def spring(self, point: PointName, is_here: Callable[[Aim], bool]) -> None:
        """Die, if this is the point and the place."""
        aim = aimed(self._folder)
        if aim is not None and aim.point == point and is_here(aim) and hit(self._folder, os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)


class TrappedWatch:
    """A watch that dies before the second micro-batch of the gradient pass."""

    def __init__(self, watch: Watch, trap: Trap, batch: TrainingBatch) -> None:
        self._watch, self._trap, self._batch = watch, trap, batch

    def reached(self, phase: str, micro_batch: int, micro_batches: int) -> None:
        """As the watch that it stands before."""
        if phase == "gradient" and micro_batch == min(1, micro_batches - 1):
            self._trap.spring(
                "in a micro-batch", lambda aim: (aim.run_id, aim.step) == (self._batch.run_id, self._batch.step)
            )
        self._watch.reached(phase, micro_batch, micro_batches)


def trap_ledger(trap: Trap) -> None:
    """Around the batch's bytes and the step's record; rank 0 has both."""
    read: Any = BlobStore.get
    apply: Any = Steps.apply

    @functools.wraps(read)
    async def trapped_read(self: BlobStore, digest: str) -> bytes:
        trap.spring("before the batch is loaded", lambda aim: aim.batch_digest == digest)
        return await read(self, digest)

    @functools.wraps(apply)
    async def trapped_apply(self: Steps, lease: Any, step: int, *arguments: Any, **named: Any) -> Any:
        def is_here(aim: Aim) -> bool:
            return (aim.run_id, aim.step) == (lease.run_id, step)

        trap.spring("before the step is recorded", is_here)
        record = await apply(self, lease, step, *arguments, **named)
        trap.spring("after the step is recorded", is_here)
        return record

    BlobStore.get = trapped_read
    Steps.apply = trapped_apply


def trap_files(trap: Trap) -> None:
    """Before a checkpoint whose files are written appears in its place, and after the first shard of an export."""
    rename: Any = os.rename
    write_shard: Any = hf_writer.save_file
    writer: Any = hf_writer.FolderWriter.__init__

    def trapped_rename(source: Any, target: Any, **named: Any) -> None:
        trap.spring("while a checkpoint is saved", lambda aim: aim.is_folder(Path(target), "checkpoints", "version"))
        rename(source, target, **named)

    def trapped_shard(tensors: Any, path: Path, *arguments: Any, **named: Any) -> None:
        write_shard(tensors, path, *arguments, **named)
        staged = path.parent.name.lstrip(".")
        trap.spring(
            "while weights are exported", lambda aim: aim.is_folder(path.parent.with_name(staged), "weights", "policy")
        )

    def in_shards(
        self: Any, folder: Path, source: Path, dtype: Any, max_shard_size_bytes: int | None = SHARD_SIZE_BYTES
    ) -> None:
        writer(self, folder, source, dtype, max_shard_size_bytes)

    os.rename = trapped_rename
    hf_writer.save_file = trapped_shard
    hf_writer.FolderWriter.__init__ = in_shards


def watch_engine(base: Path, trap: Trap, log: LineageLog | None, *, may_die: bool) -> None:
    """Write down what the engine does, and save its last state. `log` is rank 0's; the process that `may_die` is
    the last rank's."""
    originals: dict[str, Any] = {
        name: getattr(Engine, name) for name in ("load_model", "load", "train", "save", "export")
    }

    def note(engine: Engine, kind: Any, **more: Any) -> None:
        assert engine.version is not None
        if log is not None:
            log.write(Event(os.getpid(), kind, engine.version, **more))

    def load_model(self: Engine, model_dir: Path) -> None:
        originals["load_model"](self, model_dir)
        note(self, "loaded")

    def load(self: Engine, folder: Path, model_dir: Path) -> None:
        originals["load"](self, folder, model_dir)
        note(self, "loaded", folder=str(folder))

    def train(self: Engine, batch: TrainingBatch, watch: Watch | None = None) -> dict[str, float]:
        given = watch or Unwatched()
        metrics = originals["train"](self, batch, TrappedWatch(given, trap, batch) if may_die else given)
        digest = hashlib.sha256(batch.to_bytes()).hexdigest()
        note(self, "applied", run_id=batch.run_id, step=batch.step, batch_digest=digest)
        return metrics

    def save(self: Engine, folder: Path) -> None:
        originals["save"](self, folder)
        note(self, "saved", folder=str(folder))

    def export(self: Engine, folder: Path) -> None:
        originals["export"](self, folder)
        note(self, "exported", folder=str(folder))
        if self.version == STEPS:
            originals["save"](self, final_state(base, folder.relative_to(base / "training").parts[0]))

    wrappers: tuple[Any, ...] = (load_model, load, train, save, export)
    for wrapped in wrappers:
        setattr(Engine, wrapped.__name__, functools.wraps(originals[wrapped.__name__])(wrapped))


def main() -> NoReturn:
    """The worker of this rank; the recipe's folder is the benchmark's."""
    folder = Path(sys.argv[sys.argv.index("--recipe") + 1]).resolve().parent
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    trap = Trap(folder)
    if rank == 0:
        trap_ledger(trap)
        trap_files(trap)
    watch_engine(folder, trap, LineageLog(folder) if rank == 0 else None, may_die=rank == ranks - 1)
    trainer_worker.main()


if __name__ == "__main__":
    main()
