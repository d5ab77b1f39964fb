# pyright: reportPrivateImportUsage=false
# (torch documents its stores and does not export them to type checkers.)
"""Ranks for the layout tests: imports the trainer once, then forks new ranks for every order it reads.

An order is a line of JSON on standard input; the answer on standard output is `ok`, or `failed` when a rank failed.
Importing takes ten seconds of a processor and a fork takes none, and each order has processes that know nothing of the
orders before. The process ends when standard input does.
"""

import errno
import json
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from pydantic import BaseModel

from activities.training.batch import TrainingBatch
from activities.training.lean_import import lean_import
from activities.training.megatron import hf_writer
from activities.training.megatron.cpu_shims import megatron_device
from configs.grpo import GrpoConfig
from configs.training import TrainingConfig

with lean_import():
    from megatron.core import parallel_state

    from activities.training.megatron.engine import Engine

RANK_DEADLINE_S = 240


class Action(BaseModel):
    """One call of the engine, on all ranks. `path` is a folder or the file of a batch.

    `draw` takes that many random numbers on each rank, one more on each next one. `full_disk_on`: the disk is full for
    that rank, after so many of its files as `files_before` says. `shard_size_bytes` bounds the files of an export,
    whose result is a `Held`. `fails`: the call must raise, and its result is the error as text.
    """

    do: Literal["load_model", "load", "train", "save", "export", "draw", "log_probs", "logits"]
    path: Path | None = None
    shard_size_bytes: int = hf_writer.MAX_SHARD_SIZE_BYTES
    draws: int = 0
    full_disk_on: int | None = None
    files_before: int = 0
    fails: bool = False


class Held(BaseModel):
    """The most that an export held on rank 0: bytes in no file yet, and gathered tensors that were alive at once."""

    pending_size_bytes: int = 0
    gathered_tensors: int = 0


class Job(BaseModel):
    """What one engine does. The results of all actions go to `output`/rank-N.json."""

    training: TrainingConfig
    grpo: GrpoConfig
    model_dir: Path
    output: Path
    actions: list[Action]


class Order(BaseModel):
    """Jobs that some new ranks do, one after the other."""

    ranks: int
    log: Path
    jobs: list[Job]


def run(job: Job) -> None:
    """Do a job on this rank."""
    engine = Engine(job.training, job.grpo)
    results: list[Any] = []
    for action in job.actions:
        with _full_disk(action.files_before if action.full_disk_on == engine.rank else None):
            try:
                results.append(_carry_out(engine, action, job.model_dir))
            except Exception as error:
                if not action.fails:
                    raise
                results.append(f"{type(error).__name__}: {error}")
            else:
                assert not action.fails, f"{action.do} did not fail: {results[-1]}"
    (job.output / f"rank-{engine.rank}.json").write_text(json.dumps(results), encoding="utf-8")


def _carry_out(engine: Engine, action: Action, model_dir: Path) -> Any:
    path = action.path or model_dir
    match action.do:
        case "load_model":
            engine.load_model(path)
        case "load":
            engine.load(path, model_dir)
        case "save":
            engine.save(path)
        case "export":
            return export(engine, path, action.shard_size_bytes).model_dump()
        case "logits":
            return [logits(engine, row.tokens).tolist() for row in _batch(path).rows]
        case "train":
            return engine.train(_batch(path))
        case "log_probs":
            return [row.tolist() for row in engine.log_probabilities(_batch(path))]
        case "draw":
            return torch.rand(action.draws + engine.rank).tolist()
    return engine.version


def _batch(path: Path) -> TrainingBatch:
    return TrainingBatch.from_bytes(path.read_bytes())


def export(engine: Engine, folder: Path, shard_size_bytes: int) -> Held:
    """Export in shards of at most this size; returns what rank 0 held in memory meanwhile."""
    held, add = Held(), hf_writer.FolderWriter.add
    given: list[weakref.ref[torch.Tensor]] = []

    def watched(writer: hf_writer.FolderWriter, name: str, tensor: torch.Tensor) -> None:
        add(writer, name, tensor)
        held.pending_size_bytes = max(held.pending_size_bytes, writer.pending_size_bytes)
        given[:] = [*(reference for reference in given if reference() is not None), weakref.ref(tensor)]
        held.gathered_tensors = max(held.gathered_tensors, len(given))

    with (
        patch.object(hf_writer, "MAX_SHARD_SIZE_BYTES", shard_size_bytes),
        patch.object(hf_writer.FolderWriter, "add", watched),
    ):
        engine.export(folder)
    return held


@torch.no_grad()
def logits(engine: Engine, tokens: NDArray[np.int32]) -> torch.Tensor:
    """[tokens, vocabulary] of one row, whole on every rank. Not for pipeline stages."""
    with megatron_device():
        inputs = torch.from_numpy(tokens.astype(np.int64))[None]
        found = engine._loaded().model.eval()(inputs, torch.arange(len(tokens))[None], None)[0].contiguous()
        shards = [torch.empty_like(found) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
        dist.all_gather(shards, found, group=parallel_state.get_tensor_model_parallel_group())
        return torch.cat(shards, dim=-1)


@contextmanager
def _full_disk(files_before: int | None) -> Iterator[None]:
    """No file reaches the disk after that many; None: all do."""
    left, sync = files_before, os.fsync

    def fail(descriptor: int) -> None:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if left is not None:
            left -= 1
        sync(descriptor)

    with patch.object(os, "fsync", fail):
        yield


def _be_rank(rank: int, order: Order) -> None:
    """Never returns: threads of libtorch may abort the interpreter's finalisation."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(order.ranks)}
    signal.alarm(RANK_DEADLINE_S)  # ends ranks that wait for each other for ever
    code = 1
    with order.log.with_suffix(f".{rank}.log").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            met = dist.FileStore(str(order.log.with_suffix(".store")), order.ranks)
            dist.init_process_group("gloo", store=met, rank=rank, world_size=order.ranks)
            for job in order.jobs:
                run(job)
            code = 0
        except BaseException:
            traceback.print_exc(file=log)
        finally:
            log.flush()
            os._exit(code)


def _fork(order: Order) -> bool:
    """Whether all ranks of an order ended well; when one does not, the others are ended."""
    running: set[int] = set()
    for rank in range(order.ranks):
        child = os.fork()
        if child == 0:
            _be_rank(rank, order)
        running.add(child)
    good = True
    while running:
        child, status = os.wait()
        running.discard(child)
        if status != 0:
            good = False
            for other in running:
                os.kill(other, signal.SIGKILL)
    return good


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write("ok\n" if _fork(Order.model_validate_json(line)) else "failed\n")
        sys.stdout.flush()
