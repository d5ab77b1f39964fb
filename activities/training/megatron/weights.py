"""Weights between Hugging Face folders and the model of all ranks. Every function is collective."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from activities.training.errors import ModelFolderError
from activities.training.megatron.hf_reader import TensorReader
from activities.training.megatron.hf_writer import FolderWriter
from activities.training.megatron.parameters import parameter_map
from activities.training.megatron.ranks import pipeline_ranks
from activities.training.megatron.shape import ModelShape
from activities.training.megatron.shared_errors import agreed


def _first_layer(model: GPTModel) -> int:
    """Number of this pipeline stage's first layer, from 0."""
    layer: Any = model.decoder.layers[0]
    return layer.layer_number - 1


@torch.no_grad()
def import_weights(model: GPTModel, shape: ModelShape, folder: Path) -> None:
    """Fill this rank's parameters from the safetensors of `folder`."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    first_layer = _first_layer(model)
    with TensorReader(folder) as reader:
        for name, parameter in model.named_parameters():
            mapping = parameter_map(name, first_layer, shape)
            tensors = [reader.read(hf_name) for hf_name in mapping.hf_names]
            part = mapping.shard(mapping.merge(tensors, shape), rank, ranks)
            if part.shape != parameter.shape:
                raise ModelFolderError(
                    f"The tensor {mapping.hf_names[0]} in {folder} does not fit its config.json: rank {rank} "
                    f"of {ranks} gets {tuple(part.shape)}, the model needs {tuple(parameter.shape)}. "
                    "Download the model again."
                )
            parameter.copy_(part)


@torch.no_grad()
def export_weights(model: GPTModel, shape: ModelShape, writer: FolderWriter | None) -> None:
    """Hand every tensor to the writer of rank 0, stage after stage, and finish it; other ranks pass None.

    One parameter at a time is gathered and sent, so that no rank ever holds a whole stage twice. An error of the
    writer is raised by all ranks, as OSError: a full disk is no fault of the weights.
    """
    sink = _Sink(writer)
    if parallel_state.get_data_parallel_rank() == 0:  # the other replicas hold the same
        rank, stages = dist.get_rank(), pipeline_ranks()
        mine = parallel_state.get_pipeline_model_parallel_rank()
        for stage, owner in enumerate(stages):
            if stage == mine:
                for name, tensor in _tensors(model, shape):
                    if stage == 0 and rank == 0:
                        sink.add(name, tensor)
                    elif stage > 0 and stages[0] == 0:
                        _send(name, tensor)
                if stage > 0 and stages[0] == 0:
                    _send(None, None)
            elif rank == 0:
                for name, tensor in _received(owner, next(model.parameters()).device):
                    sink.add(name, tensor)
    with agreed(OSError):
        sink.finish()


class _Sink:
    """The writer, where there is one. An error of it waits until all ranks have sent what they have."""

    def __init__(self, writer: FolderWriter | None) -> None:
        self._writer = writer
        self._error: Exception | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        if self._writer is None or self._error is not None:
            return
        try:
            self._writer.add(name, tensor)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        if self._writer is None:
            return
        try:
            if self._error is not None:
                raise self._error
            self._writer.finish()
        finally:
            self._writer.discard()


def _tensors(model: GPTModel, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of this pipeline stage, gathered over its tensor-parallel ranks one by one.

    A tied output layer belongs to the first stage.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    ranks, first_layer = parallel_state.get_tensor_model_parallel_world_size(), _first_layer(model)
    for name, parameter in model.named_parameters():
        if name == "output_layer.weight" and shape.tied_embeddings:
            continue
        mapping = parameter_map(name, first_layer, shape)
        shards = [parameter.detach()]
        if ranks > 1 and mapping.kind != "replicated":
            shards = [torch.empty_like(parameter) for _ in range(ranks)]
            dist.all_gather(shards, parameter.detach().contiguous(), group=group)
        yield from zip(mapping.hf_names, mapping.split(mapping.unshard(shards), shape), strict=True)
        if torch.cuda.is_available():  # collectives only queue there, and what is queued is in memory
            torch.cuda.synchronize()


def _send(name: str | None, tensor: Tensor | None) -> None:
    """Send a tensor to rank 0; None ends the stage."""
    if tensor is None:
        dist.send_object_list([None], dst=0)
        return
    dist.send_object_list([(name, tuple(tensor.shape), tensor.dtype)], dst=0)
    dist.send(tensor.contiguous(), dst=0)


def _received(owner: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `owner` sends."""
    while True:
        header: list[tuple[str, tuple[int, ...], torch.dtype] | None] = [None]
        dist.recv_object_list(header, src=owner)
        if header[0] is None:
            return
        name, size, dtype = header[0]
        tensor = torch.empty(size, dtype=dtype, device=device)
        dist.recv(tensor, src=owner)
        yield name, tensor
