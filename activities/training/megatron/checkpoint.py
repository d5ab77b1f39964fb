"""Checkpoints of all ranks: weights, optimizer, policy version, random states. Every function is collective.

Training after save and load is bit-identical to training without, in the same layout; another layout is refused. A
checkpoint is complete or absent: it is written beside its place, its manifest comes last, then it is renamed. Reading
checks the digest of every file first.

A checkpoint holds state and no settings: learning rate, weight decay and betas are those of the optimizer that loads
it. The rate of a step is a function of the settings and the policy version, so no schedule is stored either.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from activities.training.checkpoint_manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Layout,
    Manifest,
    file_record,
    read_manifest,
    verify,
    verify_files,
)
from activities.training.errors import CheckpointError
from activities.training.megatron.checkpoint_files import write_state
from activities.training.megatron.optimizer import torch_optimizers
from activities.training.megatron.random_states import random_states, restore_random_states
from activities.training.megatron.shared_errors import agreed, gathered
from activities.training.staged_folder import StagedFolder, sync

Item = TypeVar("Item")

_METADATA = {
    "distrib_optim_sharding_type": "dp_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save_checkpoint(folder: Path, model: GPTModel, optimizer: MegatronOptimizer, version: int) -> None:
    """Write `folder`; all ranks must see the same file system. `CheckpointError` on all ranks when one cannot.

    A folder that holds this version unharmed is kept, because a version has one state; any other is replaced.
    """
    layout = _layout(model, optimizer)
    if _holds(folder, version, layout):
        return
    failure = partial(_unwritable, folder)
    staged: StagedFolder | None = None
    try:
        with agreed(failure):
            staged = StagedFolder(folder) if dist.get_rank() == 0 else None
        path = cast(Path, gathered(None if staged is None else staged.path)[0])
        write_state(_state(model, optimizer, loading=False), path, failure)
        names = gathered(sorted(file.name for file in path.iterdir() if file.is_file()))[0]
        with agreed(failure):
            mine = [file_record(path, name) for name in _share(names)]
            for record in mine:
                sync(path / record.name)
        records = sorted((record for share in gathered(mine) for record in share), key=lambda record: record.name)
        manifest = Manifest(format=FORMAT_VERSION, version=version, layout=layout, files=tuple(records))
        with agreed(failure):
            if staged is not None:
                (path / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
                sync(path / MANIFEST)
                # Another trainer of the run may have put the same there meanwhile.
                staged.publish(keep=lambda there: _is_unharmed(there, version, layout))
    finally:
        if staged is not None:
            staged.discard()


def load_checkpoint(folder: Path, model: GPTModel, optimizer: MegatronOptimizer) -> int:
    """Fill model, optimizer and random states from `folder`; returns the policy version.

    `CheckpointError` on all ranks when it is missing, damaged, or of another model or layout. Model and optimizer are
    of no use after it.
    """
    layout = _layout(model, optimizer)
    with agreed(CheckpointError):
        manifest = read_manifest(folder)
        if manifest.layout != layout:
            raise CheckpointError(
                f"The checkpoint {folder} was written by another layout ({manifest.layout}) than this trainer has "
                f"({layout}). Start the trainer with the layout of the checkpoint, or export its weights there."
            )
        verify_files(folder, _share(manifest.files), digests=True)
    with agreed(partial(_unreadable, folder)):
        state = _state(model, optimizer, loading=True)
        loaded = cast(dict[str, Any], dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_ALL))
        model.load_state_dict(loaded["model"])
        _fill(optimizer, loaded["optimizer"], manifest.version)
        restore_random_states(loaded["random_states"])
    return manifest.version


def _holds(folder: Path, version: int, layout: Layout) -> bool:
    """Whether `folder` is an unharmed checkpoint of this version; the ranks share the reading."""
    found: Manifest | None = None
    if dist.get_rank() == 0:
        try:
            found = verify(folder, digests=False)
        except CheckpointError:
            found = None
    manifest = gathered(found)[0]
    if manifest is None or (manifest.version, manifest.layout) != (version, layout):
        return False
    try:
        verify_files(folder, _share(manifest.files), digests=True)
    except CheckpointError:
        return all(gathered(False))
    return all(gathered(True))


def _is_unharmed(folder: Path, version: int, layout: Layout) -> bool:
    """The same, by one rank alone."""
    try:
        manifest = verify(folder, digests=True)
    except CheckpointError:
        return False
    return (manifest.version, manifest.layout) == (version, layout)


def _layout(model: GPTModel, optimizer: MegatronOptimizer) -> Layout:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        distributed_optimizer=any(isinstance(part, DistributedOptimizer) for part in parts),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
    )


def _share(items: Sequence[Item]) -> Sequence[Item]:
    """This rank's share of some work."""
    return items[dist.get_rank() :: dist.get_world_size()]


def _fill(optimizer: MegatronOptimizer, state: dict[str, Any], version: int) -> None:
    if version == 0:  # the optimizer has not stepped: a fresh one is the right one, and Megatron-core stored no step
        optimizer.reload_model_params()
        return
    inners = torch_optimizers(optimizer)
    settings = [[_settings(group) for group in inner.param_groups] for inner in inners]
    with torch.no_grad():
        optimizer.load_state_dict(state)
    for inner, kept in zip(inners, settings, strict=True):
        for group, values in zip(inner.param_groups, kept, strict=True):
            group.update(values)
        if isinstance(inner, torch.optim.AdamW):
            for moments in inner.state.values():
                # The distributed optimizer leaves Adam's step at 0, and so its bias correction wrong. A tensor of its
                # own for each parameter: Adam counts in place.
                moments["step"] = torch.tensor(float(version))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group is told to do, without the parameters and how often it did it."""
    return {key: value for key, value in group.items() if key not in ("params", "step")}


def _state(model: GPTModel, optimizer: MegatronOptimizer, *, loading: bool) -> dict[str, Any]:
    for inner in torch_optimizers(optimizer):
        _prime(inner)
    weights = model.sharded_state_dict(metadata=_METADATA)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=_METADATA),
        "random_states": ShardedObject(
            "random_states", random_states(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0
        ),
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


def _unwritable(folder: Path, cause: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {folder} could not be written ({cause}). Free space under training.output_dir or choose "
        "another folder; the step can be trained again."
    )


def _unreadable(folder: Path, cause: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {folder} cannot be loaded ({cause}). It must come from the same model and optimizer "
        "settings; otherwise choose an older one."
    )
