"""The policy model as a NeMo-Gym model server: NeMo-Gym's vLLM server, in front of the ledger instead of vLLM itself.

All dialects and their streams pass through `_resolve_client`, so that nothing reaches an agent that is not recorded.
Ids of output items follow from the recorded response, so that a replayed rollout is the same byte by byte.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import asyncio
import logging
from typing import Any, Self

from fastapi import FastAPI, HTTPException, Request, status
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI, NeMoGymResponse
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import PrivateAttr, model_validator
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

from workers.gym.policy_model.client import LedgerClient
from workers.gym.policy_model.errors import ModelCallFailed, TemplateUnfit
from workers.gym.policy_model.exact import ExactClient
from workers.gym.policy_model.fleet import Fleet, another
from workers.gym.policy_model.gym_endpoint import GymEndpoint
from workers.gym.policy_model.identity import IdentityMiddleware
from workers.gym.policy_model.recorder import Recorder
from workers.gym.policy_model.template import Template

CHECK_TIMEOUT_S = 10.0
LOG = logging.getLogger(__name__)

# What would send a call past the ledger, or leave nothing to record.
NEEDED = {"return_token_id_information": True, "request_prompt_and_generation_token_ids": True}
REFUSED = {
    "use_completions_api": "its prompts are no conversations, whose tokens could be continued exactly",
    "is_responses_native": "vLLM's own Responses route returns no token ids",
    "supply_prefix_token_ids": "exact prefixes come from the ledger",
    "endpoint_file": "the served model is checked once, at the start",
}


class PolicyModelConfig(VLLMModelConfig):
    """NeMo-Gym's settings, without those that a recorded policy model cannot have, and the run's sampling seed."""

    sampling_seed: int | None = None

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
    _fleet: Fleet | None = PrivateAttr(default=None)
    _checked: set[str] = PrivateAttr(default_factory=set)

    async def connect(self, recorder: Recorder, fleet: Fleet) -> None:
        """Check what the endpoints serve: all the same, with a template that conversations can be continued with.
        Those in quarantine may be down; they are checked when they come back.

        Raises TemplateUnfit, or ModelCallFailed where an endpoint does not answer.
        """
        clients = [client for client in self._clients if not fleet.is_away(_root(client))] or self._clients
        templates = [await Template.check(GymEndpoint(client)) for client in clients]
        if len({template.contract for template in templates}) > 1:
            raise TemplateUnfit(
                f"The endpoints {', '.join(self.config.base_url)} serve different models, tokenizers or chat "
                "templates. One policy has one of each."
            )
        self._checked = {_root(client) for client in clients}
        self._recorder, self._template, self._fleet = recorder, templates[0], fleet

    async def check_released(self) -> None:
        """Check endpoints that were in quarantine when this server started, and are not any more."""
        if self._template is None or self._fleet is None:
            return
        for client in self._clients:
            url = _root(client)
            if url in self._checked or self._fleet.is_away(url):
                continue
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    template = await Template.check(GymEndpoint(client))
            except (ModelCallFailed, TemplateUnfit, TimeoutError) as error:
                LOG.warning("%s does not ask vLLM at %s yet: %s", self.config.name, url, error or "no answer")
                continue
            if template.contract != self._template.contract:
                LOG.warning("%s does not ask vLLM at %s: it serves another model or template", self.config.name, url)
                continue
            self._checked.add(url)

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
        if self._recorder is None or self._template is None or self._fleet is None:
            raise RuntimeError(f"{self.config.name} serves before its endpoints were checked")
        client = self._usable(super()._resolve_client(request), request.session[SESSION_ID_KEY], self._fleet)
        away = self._fleet.away(_root(client)) if len(self._clients) > 1 else None
        exact = ExactClient(GymEndpoint(client, away), self._template)
        return LedgerClient(exact, self._template, self._recorder, self.config.sampling_seed)

    def _usable(self, own: NeMoGymAsyncOpenAI, session: str, fleet: Fleet) -> NeMoGymAsyncOpenAI:
        """The session's endpoint, or while that is in quarantine always the same other one; its own if there is none,
        where the call fails."""
        if len(self._clients) == 1:
            return own
        usable = {
            _root(client): client
            for client in self._clients
            if _root(client) in self._checked and not fleet.is_away(_root(client))
        }
        if _root(own) in usable:
            return own
        instead = another(session, usable)
        return own if instead is None else usable[instead]

    def _preserve_envelope_id(self) -> bool:
        return True

    def _validate_single_choice_token_request(self, body_dict: dict[str, Any]) -> None:
        if body_dict.get("n") not in (None, 1):
            raise HTTPException(
                status.HTTP_400_BAD_REQUEST, f"n = {body_dict['n']} is refused: a recorded call has one response."
            )


def _root(client: NeMoGymAsyncOpenAI) -> str:
    """The address of the server, as the ledger writes it."""
    return client.base_url.removesuffix("/v1").rstrip("/")
