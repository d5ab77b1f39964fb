"""Weights between Hugging Face folders and the model of all ranks. Every function is collective."""

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
    """Hand all tensors to the writer of rank 0, stage after stage; other ranks pass None."""
    stages = pipeline_ranks()
    rank, mine = dist.get_rank(), parallel_state.get_pipeline_model_parallel_rank()
    for stage, owner in enumerate(stages):
        gathered = _gather(model, shape) if stage == mine else {}
        if stages[0] != 0:
            continue
        if stage > 0 and rank == owner:
            _send(gathered)
        elif stage > 0 and rank == 0:
            gathered = _receive(owner)
        if writer is not None:
            for name, tensor in gathered.items():
                writer.add(name, tensor)


def _gather(model: GPTModel, shape: ModelShape) -> dict[str, Tensor]:
    """The Hugging Face tensors of this pipeline stage. A tied output layer belongs to the first stage."""
    group = parallel_state.get_tensor_model_parallel_group()
    ranks, first_layer = parallel_state.get_tensor_model_parallel_world_size(), _first_layer(model)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name == "output_layer.weight" and shape.tied_embeddings:
            continue
        mapping = parameter_map(name, first_layer, shape)
        shards = [parameter.detach()]
        if ranks > 1 and mapping.kind != "replicated":
            shards = [torch.empty_like(parameter) for _ in range(ranks)]
            dist.all_gather(shards, parameter.detach().contiguous(), group=group)
        tensors |= dict(zip(mapping.hf_names, mapping.split(mapping.unshard(shards), shape), strict=True))
    return tensors


def _send(tensors: dict[str, Tensor]) -> None:
    dist.send_object_list([[(name, tuple(t.shape), t.dtype, t.device.type) for name, t in tensors.items()]], dst=0)
    for tensor in tensors.values():
        dist.send(tensor.contiguous(), dst=0)


def _receive(owner: int) -> dict[str, Tensor]:
    header: list[list[tuple[str, tuple[int, ...], torch.dtype, str]]] = [[]]
    dist.recv_object_list(header, src=owner)
    tensors: dict[str, Tensor] = {}
    for name, size, dtype, device in header[0]:
        tensors[name] = torch.empty(size, dtype=dtype, device=device)
        dist.recv(tensors[name], src=owner)
    return tensors
