"""The policy model for agents that compact their context: they name the exact tokens that a call goes on from.

A request that names them as null begins a new segment; one that does not mention them is continued by its conversation.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

from typing import Any

from fastapi import Request
from nemo_gym.openai_utils import NeMoGymResponse
from responses_api_models.vllm_model_with_compaction.app import (
    VLLMContextCompactionChatCompletionCreateParams,
    VLLMContextCompactionResponseCreateParams,
    VLLMModelWithCompaction,
)

from workers.gym.policy_model.app import PolicyModel
from workers.gym.policy_model.continuity import REQUIRED_PREFIX


class PolicyModelWithCompaction(PolicyModel, VLLMModelWithCompaction):
    """NeMo-Gym's compaction server on top of the ledger."""

    ray_enabled = False

    async def responses(self, request: Request, body: Any) -> NeMoGymResponse:
        """Also for the Messages dialect, whose requests have no field for exact tokens."""
        if not isinstance(body, VLLMContextCompactionResponseCreateParams):
            body = VLLMContextCompactionResponseCreateParams.model_validate(body.model_dump(exclude_unset=True))
        return await super().responses(request, body)

    def _context_compaction_chat_params(
        self, body: VLLMContextCompactionResponseCreateParams
    ) -> tuple[Any, VLLMContextCompactionChatCompletionCreateParams]:
        standard, chat = super()._context_compaction_chat_params(body)
        if REQUIRED_PREFIX not in body.model_fields_set:
            chat.model_fields_set.discard(REQUIRED_PREFIX)  # NeMo-Gym sets it to null
        return standard, chat
