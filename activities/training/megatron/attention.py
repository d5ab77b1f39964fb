"""Causal attention for the local layer spec with PyTorch's fused kernel, on CPU and GPU.

Megatron-core's own core attention writes the whole [tokens, tokens] matrix of every head; this one never does, which
makes it several times faster on the CPU and lets rows grow long. Both compute the same function. Queries and keys are
turned by their positions here, so the model itself has no position embedding.
"""

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from activities.training.megatron.layers import RotaryTable


class FusedCausalAttention(MegatronModule):
    """Drop-in for Megatron-core's DotProductAttention; takes right-padded rows, so it needs no mask."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        rotary: RotaryTable,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        del layer_number, attention_type, attention_dropout, cp_comm_type, pg_collection
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"This attention is causal; {attn_mask_type} is not supported.")
        head_dim = config.kv_channels or config.hidden_size // config.num_attention_heads
        self._scale = softmax_scale or 1.0 / math.sqrt(head_dim)
        self._rotary = rotary

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Context of each token, [tokens, rows, heads * head_dim], from [tokens, rows, heads, head_dim]."""
        assert attention_mask is None, "Rows are padded on the right; a mask is not supported."
        context = torch.nn.functional.scaled_dot_product_attention(
            self._rotary.turn(query).permute(1, 2, 0, 3),
            self._rotary.turn(key).permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self._scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).flatten(2)
