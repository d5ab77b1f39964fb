"""The environment: a tool that has to be used some times, as often as the rollout's episode is long."""

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

from benchmarks.goodput.episodes import model_calls
from workers.gym.sessions import Sessions


class SeedRequest(BaseSeedSessionRequest):
    """A row with the places of prompt and rollout that the rollout worker adds."""

    model_config = ConfigDict(extra="allow")
    episode_seed: int
    row: int = Field(alias="_ng_task_index")
    rollout: int = Field(alias="_ng_rollout_index")


class VerifyRequest(BaseVerifyRequest):
    """What the agent made of a row."""

    model_config = ConfigDict(extra="allow")


class VerifyResponse(BaseVerifyResponse):
    """The reward is 1 where the last thought had an even number of characters: a coin that no policy tosses better."""

    model_config = ConfigDict(extra="allow")


class Environment(SimpleResourcesServer):
    """Counts down."""

    ray_enabled = False
    config: BaseResourcesServerConfig
    _left: Sessions[list[int]] = PrivateAttr(default_factory=Sessions)

    def setup_webserver(self) -> FastAPI:
        """The tool's route, in addition to NeMo-Gym's own."""
        app = super().setup_webserver()
        app.post("/use")(self.use)
        return app

    async def seed_session(self, request: Request, body: SeedRequest) -> BaseSeedSessionResponse:
        """Every call but the last uses the tool."""
        self._left.open(request, [model_calls(body.episode_seed, body.row, body.rollout) - 1])
        return BaseSeedSessionResponse()

    async def use(self, request: Request) -> Response:
        """Use the tool once."""
        left = self._left.get(request)
        left[0] = max(0, left[0] - 1)
        return Response(f'{{"left": {left[0]}}}', media_type="application/json")

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Score the session; it is not done while the tool has to be used."""
        done = self._left.close(request) == [0]
        thoughts = [item for item in body.response.output if item.type == "reasoning"]
        even = bool(thoughts) and len(thoughts[-1].summary[0].text) % 2 == 0
        return VerifyResponse(**body.model_dump(), reward=float(done and even))
