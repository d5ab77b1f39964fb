"""Builds this rank's part of the model as a Megatron-core GPTModel, without weights.

Its loss is the negative log-probability of each label at the temperature that the rollouts are sampled with, which is
what vLLM records.
"""

import importlib
from typing import Any, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from activities.training.errors import LayoutError
from activities.training.megatron.attention import FusedCausalAttention
from activities.training.megatron.layers import RmsNorm, RotaryTable, Swiglu
from activities.training.megatron.ranks import trainer_device
from activities.training.megatron.shape import ModelShape
from configs.training import TrainingConfig


def model_dtype(training: TrainingConfig) -> torch.dtype:
    """The precision of parameters and activations."""
    return torch.bfloat16 if training.dtype == "bfloat16" else torch.float32


class PolicyModel(GPTModel):
    """GPTModel whose output, given labels, is -log softmax(logits / temperature) of each label, [rows, tokens]."""

    temperature = 1.0

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Negative log-probabilities, [rows, tokens] float32, from logits [tokens, rows, vocabulary of this rank]."""
        wide, by_token = logits.float(), labels.t().contiguous()
        if self.temperature != 1.0:
            wide = wide.div_(self.temperature)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            losses = tensor_parallel.vocab_parallel_cross_entropy(wide, by_token)
        else:
            losses = torch.nn.functional.cross_entropy(wide.flatten(0, 1), by_token.flatten(), reduction="none")
        return losses.view_as(by_token).t().contiguous()


def build_model(shape: ModelShape, training: TrainingConfig, temperature: float = 1.0) -> PolicyModel:
    """This rank's layers and tensor-parallel shards; parameters hold no meaningful values yet."""
    config = transformer_config(shape, training)
    local = training.layer_spec == "local"
    model = PolicyModel(
        config=config,
        transformer_layer_spec=cast(Any, _local_layers(shape, config) if local else _transformer_engine_layer(shape)),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="none" if local else "rope",  # the local attention turns queries and keys itself
        rotary_base=cast(int, shape.rope_theta),  # the formula takes any number
        rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 1.0,
    )
    model.temperature = temperature
    return model.to(device=trainer_device(), dtype=model_dtype(training))


def transformer_config(shape: ModelShape, training: TrainingConfig) -> TransformerConfig:
    """Megatron-core's config: no dropout, no fusions that need apex, loss as a mean over all tokens of the step."""
    dtype, pipeline = model_dtype(training), training.pipeline_model_parallel_size
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=training.tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        variable_seq_lengths=pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # unused, but the default refuses variable lengths
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Initialising also marks the sharded parameters, which the gradient norm needs.
        perform_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=training.layer_spec == "local",  # an activation of the layer spec's own: ours
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        sequence_parallel=False,
    )


def _local_layers(shape: ModelShape, config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron-core's own layers of this pipeline stage, with our attention, norms and activation in them."""
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    parts.mlp.submodules.activation_func = Swiglu
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(FusedCausalAttention, params={"rotary": RotaryTable(shape)})
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), cast(Any, RmsNorm))


def _transformer_engine_layer(shape: ModelShape) -> ModuleSpec:
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        raise LayoutError(
            "training.layer_spec is transformer_engine, but Transformer Engine cannot be imported "
            f"({error}). Install transformer-engine[pytorch] in the trainer's environment, or set layer_spec=local."
        ) from error
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
