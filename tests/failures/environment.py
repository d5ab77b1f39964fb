"""An environment whose tools say the same in every attempt. Its verifier fails or waits when a test asks for it.

What a test asks for is state of this process: POST /verifier/{mode} changes it, GET /verifier says how many wait.
Agents and environment servers may seed its sessions. Runs in the process of the other servers, or in one of its own.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import asyncio
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request, Response
from nemo_gym import openai_utils
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ResourcesSeedSessionResponse,
    SimpleResourcesServer,
)
from pydantic import ConfigDict, Field, PrivateAttr

from workers.gym.sessions import Sessions

RETRY_PAUSE_S = 0.02
openai_utils.sleep = lambda _: asyncio.sleep(RETRY_PAUSE_S)  # of the client that asks vLLM again

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")


JUDGE_FAILED = {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "judge is away"}


class SeedRequest(BaseSeedSessionRequest):
    """A row, or the session of an environment server with the row as its `task_data`."""

    model_config = ConfigDict(extra="allow")
    resources_session_id: str | None = None
    task_data: dict[str, Any] = Field(default_factory=dict)


class VerifyRequest(BaseVerifyRequest):
    """A row and what the agent made of it. The row's `declares`, `forgets_tokens` and `says` change the answer."""

    model_config = ConfigDict(extra="allow")
    declares: str | None = None
    forgets_tokens: bool = False
    says: dict[str, Any] = Field(default_factory=dict)


class VerifyResponse(BaseVerifyResponse):
    """The reward is the number of tools used, over ten."""

    model_config = ConfigDict(extra="allow")


class Environment(SimpleResourcesServer):
    """Counts the tools that a session used."""

    ray_enabled = False
    config: BaseResourcesServerConfig
    _used: Sessions[list[str]] = PrivateAttr(default_factory=Sessions)
    _refusals: int = PrivateAttr(default=0)
    _judge_failures: int = PrivateAttr(default=0)
    _open: asyncio.Event = PrivateAttr(default_factory=asyncio.Event)
    _waiting: int = PrivateAttr(default=0)

    def setup_webserver(self) -> FastAPI:
        """The tool's route and the test's, in addition to NeMo-Gym's own."""
        self._open.set()
        app = super().setup_webserver()
        app.get("/verifier")(self.verifier)
        app.post("/verifier/{mode}")(self.set_verifier)
        app.post("/{tool}")(self.use)
        return app

    async def seed_session(
        self, request: Request, body: SeedRequest
    ) -> ResourcesSeedSessionResponse | BaseSeedSessionResponse:
        """No tool is used yet. A task that is `unfit` is refused for good."""
        if body.task_data.get("unfit"):
            raise HTTPException(422, "unfit: there is no such task")
        self._used.open(request, [])
        if body.resources_session_id is None:
            return BaseSeedSessionResponse()
        return ResourcesSeedSessionResponse(resources_session_id=body.resources_session_id)

    async def use(self, tool: str, request: Request) -> Response:
        """Any tool."""
        used = self._used.get(request)
        used.append(tool)
        return Response(f'{{"used": {len(used)}}}', media_type="application/json")

    async def verifier(self) -> dict[str, int]:
        """How many verifications wait."""
        return {"waiting": self._waiting}

    async def set_verifier(self, mode: Literal["refuse_once", "lose_judge_once", "hold", "open"]) -> None:
        """How the next verifications go."""
        if mode == "refuse_once":
            self._refusals = 1
        elif mode == "lose_judge_once":
            self._judge_failures = 1
        elif mode == "hold":
            self._open.clear()
        else:
            self._open.set()

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Score the session."""
        used = self._used.get(request)
        self._waiting += 1
        try:
            await self._open.wait()
        finally:
            self._waiting -= 1
        if self._refusals:
            self._refusals -= 1
            raise HTTPException(503, "verifier_down: the verifier was told to refuse")
        answer: dict[str, Any] = body.model_dump()
        if body.forgets_tokens:
            for item in answer["response"]["output"]:
                for field in TOKEN_FIELDS:
                    item.pop(field, None)
            answer["response"]["id"] = "resp_of_the_agent_s_own"
        if body.declares is not None:
            answer["terminal_logical_request_id"] = body.declares
        if self._judge_failures:
            self._judge_failures -= 1
            answer |= JUDGE_FAILED
        return VerifyResponse(**({"reward": len(used) / 10} | answer | body.says))


if __name__ == "__main__":
    Environment.run_webserver()
