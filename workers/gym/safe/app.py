"""The demo environment as a NeMo-Gym resources server: one safe per session, digits from the row's `safe_seed`."""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

from fastapi import FastAPI, Request, Response
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from pydantic import ConfigDict, Field, PrivateAttr

from workers.gym.safe.game import Safe
from workers.gym.sessions import Sessions


class SeedRequest(BaseSeedSessionRequest):
    """A row; without a usable `safe_seed` the answer is 422."""

    model_config = ConfigDict(extra="allow")
    safe_seed: int = Field(ge=0)


class VerifyRequest(BaseVerifyRequest):
    """A row and what the agent made of it."""

    model_config = ConfigDict(extra="allow")
    safe_seed: int = Field(ge=0)


class VerifyResponse(BaseVerifyResponse):
    """The reward, and what it is made of."""

    model_config = ConfigDict(extra="allow")
    open_dials: int
    turns_left: int


class SafeServer(SimpleResourcesServer):
    """Reward: open dials / 3."""

    ray_enabled = False
    config: BaseResourcesServerConfig
    _safes: Sessions[Safe] = PrivateAttr(default_factory=Sessions)

    def setup_webserver(self) -> FastAPI:
        """Routes of the tools, in addition to NeMo-Gym's own."""
        app = super().setup_webserver()
        app.post("/turn")(self.turn)
        app.post("/{tool}")(self.unknown_tool)
        return app

    async def seed_session(self, request: Request, body: SeedRequest) -> BaseSeedSessionResponse:
        """A closed safe."""
        self._safes.open(request, Safe(body.safe_seed))
        return BaseSeedSessionResponse()

    async def turn(self, request: Request) -> Response:
        """The tool. Whatever the policy wrote as arguments costs a turn."""
        try:
            arguments = await request.json()
        except ValueError:
            arguments = None
        return self._played(request, arguments)

    async def unknown_tool(self, request: Request) -> Response:
        """A tool that does not exist costs a turn too, and is answered in words that the policy knows."""
        return self._played(request, None)

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Close the session and score it."""
        safe = self._safes.close(request)
        return VerifyResponse(
            **body.model_dump(), reward=safe.reward, open_dials=len(safe.open_dials), turns_left=safe.turns_left
        )

    def _played(self, request: Request, arguments: object) -> Response:
        return Response(self._safes.get(request).turn(arguments), media_type="application/json")
