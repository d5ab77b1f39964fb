"""The policy model as a NeMo-Gym model server: NeMo-Gym's vLLM server, in front of the ledger instead of vLLM itself.

All dialects and their streams pass through `_resolve_client`, so that nothing reaches an agent that is not recorded.
Ids of output items follow from the recorded response, so that a replayed rollout is the same byte by byte.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

from typing import Any, Self

from fastapi import FastAPI, HTTPException, Request, status
from nemo_gym.openai_utils import NeMoGymResponse
from pydantic import PrivateAttr, model_validator
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

from workers.gym.policy_model.client import LedgerClient
from workers.gym.policy_model.errors import TemplateUnfit
from workers.gym.policy_model.exact import ExactClient
from workers.gym.policy_model.gym_endpoint import GymEndpoint
from workers.gym.policy_model.identity import IdentityMiddleware
from workers.gym.policy_model.recorder import Recorder
from workers.gym.policy_model.template import Template

# What would send a call past the ledger, or leave nothing to record.
NEEDED = {"return_token_id_information": True, "request_prompt_and_generation_token_ids": True}
REFUSED = {
    "use_completions_api": "its prompts are no conversations, whose tokens could be continued exactly",
    "is_responses_native": "vLLM's own Responses route returns no token ids",
    "supply_prefix_token_ids": "exact prefixes come from the ledger",
    "endpoint_file": "the served model is checked once, at the start",
}


class PolicyModelConfig(VLLMModelConfig):
    """NeMo-Gym's settings, without those that a recorded policy model cannot have."""

    @model_validator(mode="after")
    def _is_recordable(self) -> Self:
        for key, value in NEEDED.items():
            if getattr(self, key) != value:
                raise ValueError(f"{key} must be {value}: without it there is nothing to record. Remove the key.")
        for key, reason in REFUSED.items():
            if getattr(self, key):
                raise ValueError(f"{key} is not supported by the recording policy model: {reason}. Remove the key.")
        return self


class PolicyModel(VLLMModel):
    """Serves once `connect` has returned."""

    ray_enabled = False
    config: PolicyModelConfig
    _recorder: Recorder | None = PrivateAttr(default=None)
    _template: Template | None = PrivateAttr(default=None)

    async def connect(self, recorder: Recorder) -> None:
        """Check what the endpoints serve: all the same, with a template that conversations can be continued with.

        Raises TemplateUnfit, or ModelCallFailed where an endpoint does not answer.
        """
        templates = [await Template.check(GymEndpoint(client)) for client in self._clients]
        if len({template.contract for template in templates}) > 1:
            raise TemplateUnfit(
                f"The endpoints {', '.join(self.config.base_url)} serve different models, tokenizers or chat "
                "templates. One policy has one of each."
            )
        self._recorder, self._template = recorder, templates[0]

    def setup_webserver(self) -> FastAPI:
        """NeMo-Gym's routes, each knowing the rollout of its path."""
        app = super().setup_webserver()
        app.add_middleware(IdentityMiddleware)
        return app

    async def responses(self, request: Request, body: Any) -> NeMoGymResponse:
        """As NeMo-Gym's, with ids that are the same in every attempt."""
        response = await super().responses(request, body)
        for index, item in enumerate(response.output):
            if item.type in ("reasoning", "message"):
                item.id = f"{item.id.partition('_')[0]}_{response.id}_{index}"
        return response

    def _resolve_client(self, request: Request) -> LedgerClient:
        if self._recorder is None or self._template is None:
            raise RuntimeError(f"{self.config.name} serves before its endpoints were checked")
        exact = ExactClient(GymEndpoint(super()._resolve_client(request)), self._template)
        return LedgerClient(exact, self._template, self._recorder)

    def _preserve_envelope_id(self) -> bool:
        return True

    def _validate_single_choice_token_request(self, body_dict: dict[str, Any]) -> None:
        if body_dict.get("n") not in (None, 1):
            raise HTTPException(
                status.HTTP_400_BAD_REQUEST, f"n = {body_dict['n']} is refused: a recorded call has one response."
            )
