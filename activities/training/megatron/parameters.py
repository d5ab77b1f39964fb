"""How one Megatron-core parameter is made of Hugging Face tensors, and how it is cut for tensor parallelism.

QKV rows are, per key/value head: [its queries | key | value]. fc1 is [gate; up], and is cut gate and up apart, so that
a rank holds [gate_i; up_i].
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from activities.training.megatron.shape import ModelShape

Kind = Literal["replicated", "rows", "columns", "qkv", "gate_up"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OUTSIDE: dict[str, tuple[Kind, str]] = {
    "embedding.word_embeddings.weight": ("rows", "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": ("replicated", "model.norm.weight"),
    "output_layer.weight": ("rows", "lm_head.weight"),
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# The names with `layer_norm_weight` are Transformer Engine's, which fuses a norm with the layer behind it.
_IN_LAYER: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "input_layernorm.weight": ("replicated", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": ("replicated", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"{name}.weight" for name in _QKV)),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"{name}.bias" for name in _QKV)),
    "self_attention.q_layernorm.weight": ("replicated", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("replicated", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("replicated", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": ("replicated", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj.weight",)),
}


@dataclass(frozen=True)
class ParameterMap:
    """One Megatron-core parameter: how it is cut, and the Hugging Face tensors that it is made of."""

    kind: Kind
    hf_names: tuple[str, ...]

    def merge(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """The whole Megatron-core parameter from its Hugging Face tensors."""
        if self.kind == "gate_up":
            return torch.cat(list(tensors))
        if self.kind != "qkv":
            return tensors[0]
        per_group = [tensor.reshape(shape.kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(per_group, dim=1).flatten(0, 1)

    def split(self, whole: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        """Inverse of `merge`."""
        if self.kind == "gate_up":
            return whole.chunk(2)
        if self.kind != "qkv":
            return (whole,)
        queries = shape.heads // shape.kv_heads * shape.head_dim
        groups = whole.reshape(shape.kv_heads, -1, *whole.shape[1:])
        return tuple(part.flatten(0, 1) for part in groups.split([queries, shape.head_dim, shape.head_dim], dim=1))

    def shard(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """The part of one tensor-parallel rank."""
        if self.kind == "replicated" or ranks == 1:
            return whole
        if self.kind == "columns":
            return whole.chunk(ranks, dim=1)[rank]
        if self.kind == "gate_up":
            return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
        return whole.chunk(ranks)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Inverse of `shard`: the whole parameter from the parts of all tensor-parallel ranks."""
        if self.kind == "replicated" or len(shards) == 1:
            return shards[0]
        if self.kind == "columns":
            return torch.cat(list(shards), dim=1)
        if self.kind == "gate_up":
            gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
            return torch.cat([*gates, *ups])
        return torch.cat(list(shards))


def parameter_map(name: str, first_layer: int, shape: ModelShape) -> ParameterMap:
    """Map of the parameter `name`; `first_layer` is the number of this pipeline stage's first layer."""
    if name == "output_layer.weight" and shape.tied_embeddings:
        return ParameterMap("rows", ("model.embed_tokens.weight",))
    if name in _OUTSIDE:
        kind, hf_name = _OUTSIDE[name]
        return ParameterMap(kind, (hf_name,))
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise KeyError(f"Megatron-core parameter {name} has no Hugging Face counterpart.")
    kind, hf_names = _IN_LAYER[match[2]]
    layer = first_layer + int(match[1])
    return ParameterMap(kind, tuple(f"model.layers.{layer}.{hf_name}" for hf_name in hf_names))
