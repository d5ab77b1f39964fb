"""RMSNorm, SwiGLU and rotary embeddings of the local layer spec, each one step forward and one step backward.

The same functions as PyTorch's own compositions, with their gradients written out: several passes over the
activations, and the Python around them, become one. Norms are computed in float32 whatever the model's precision is.
"""

from typing import Any, cast

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from activities.training.megatron.shape import ModelShape


class _RmsNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        normed = wide * scale
        ctx.save_for_backward(normed, scale, weight)
        ctx.dtype = x.dtype
        return normed.to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        grad, wide = grads[0].float(), weight.float()
        by_weight = grad * normed
        # The part of the gradient along x is taken out: the norm does not change when x is scaled.
        along = torch.mv(by_weight.flatten(0, -2), wide).div_(wide.numel()).view_as(scale)
        grad_x = (grad * wide).addcmul_(normed, along, value=-1.0).mul_(scale)
        return grad_x.to(ctx.dtype), by_weight.flatten(0, -2).sum(0).to(weight.dtype), None


class RmsNorm(torch.nn.Module):
    """Drop-in for Megatron-core's norm of the local spec."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm"
        assert not config.sequence_parallel
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input, of the same shape."""
        return _RmsNorm.apply(x, self.weight, self.eps)


class _Swiglu(torch.autograd.Function):
    """silu(gate) * up, of the halves [gate | up] of the last dimension."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        active = torch.nn.functional.silu(gate)
        ctx.save_for_backward(both, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        both, active = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        result = torch.empty_like(both)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grads[0], active, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return result


class Swiglu(torch.nn.Module):
    """The activation of Megatron-core's feed-forward block, in one step."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.gated_linear_unit
        assert config.activation_func is torch.nn.functional.silu

    def forward(self, both: Tensor) -> Tensor:
        """[.., units] from the gates and values [.., 2 * units]."""
        return _Swiglu.apply(both)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: Megatron-core's feed-forward block asks every part of it for its state."""
        return {}


class _Rotate(torch.autograd.Function):
    """Turn the pairs (x[i], x[i + dim / 2]) of each head by the angle of its position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = result.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=right).addcmul_(first, sin, value=sign)
    return result


class RotaryTable:
    """Cosines and sines of all positions, shared by the layers; grows with the longest row seen."""

    def __init__(self, shape: ModelShape) -> None:
        self._angles = RotaryEmbedding(
            kv_channels=shape.head_dim,
            rotary_percent=1.0,
            rotary_base=cast(int, shape.rope_theta),  # the formula takes any number
            rope_scaling=shape.rope_scaling_factor is not None,
            rope_scaling_factor=shape.rope_scaling_factor or 1.0,
            use_cpu_initialization=True,
        )
        self._cos = self._sin = torch.empty(0)

    def turn(self, x: Tensor) -> Tensor:
        """Queries or keys, [tokens, rows, heads, head_dim], turned by their positions from 0."""
        tokens = x.shape[0]
        if self._cos.shape[0] < tokens or self._cos.dtype != x.dtype or self._cos.device != x.device:
            cos, sin = self._angles.get_cos_sin(max(tokens, self._cos.shape[0]))
            self._cos, self._sin = (value[:, None, None].to(x.device, x.dtype) for value in (cos, sin))
        return _Rotate.apply(x, self._cos[:tokens], self._sin[:tokens])
