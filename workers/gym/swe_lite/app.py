"""Repository repair on one machine, as a NeMo-Gym resources server: a `bash` tool, and a hidden test for the reward.

For TRUSTED tasks only. Commands run as the user of this server, with limits but without a sandbox: a policy can read
and write whatever that user can. Use a container-based environment of NeMo-Gym for anything else.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import tempfile
from pathlib import Path

from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from workers.gym.sessions import Sessions
from workers.gym.swe_lite.workspace import Workspace, Workspaces, inside


class RepositoryConfig(BaseResourcesServerConfig):
    """Limits of the tool and of the hidden test."""

    workspaces_dir: Path = Path(tempfile.gettempdir()) / "onbelay-swe-lite"
    command_timeout_s: float = Field(default=30.0, gt=0)
    test_timeout_s: float = Field(default=60.0, gt=0)
    max_output_chars: int = Field(default=8000, ge=100)


class SeedRequest(BaseSeedSessionRequest):
    """A row. The rollout id names the folder, so that a later attempt sees the same paths."""

    model_config = ConfigDict(extra="allow")
    repo_files: dict[str, str] = Field(min_length=1)
    hidden_test: str = Field(min_length=1)
    context_compaction_rollout_id: str | None = None

    @field_validator("repo_files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            inside(Path("repository"), name)
        return files


class BashRequest(BaseModel):
    """Arguments of the tool."""

    command: str


class BashResponse(BaseModel):
    """What the policy is shown."""

    returncode: int
    output: str


class VerifyRequest(BaseVerifyRequest):
    """A row and what the agent made of it."""

    model_config = ConfigDict(extra="allow")
    hidden_test: str


class VerifyResponse(BaseVerifyResponse):
    """The reward, and how the hidden test ended."""

    model_config = ConfigDict(extra="allow")
    test_returncode: int
    test_output: str


class RepositoryServer(SimpleResourcesServer):
    """Reward: 1 if the hidden test passes in the repaired repository, otherwise 0."""

    ray_enabled = False
    config: RepositoryConfig
    _workspaces: Workspaces = PrivateAttr()
    _sessions: Sessions[Workspace] = PrivateAttr(default_factory=Sessions)

    def setup_webserver(self) -> FastAPI:
        """The tool's route, in addition to NeMo-Gym's own."""
        self._workspaces = Workspaces(self.config.workspaces_dir, self.config.max_output_chars)
        app = super().setup_webserver()
        app.post("/bash")(self.bash)
        return app

    async def seed_session(self, request: Request, body: SeedRequest) -> BaseSeedSessionResponse:
        """Write the repository."""
        rollout = body.context_compaction_rollout_id or request.session[SESSION_ID_KEY]
        self._sessions.open(request, await self._workspaces.open(rollout, body.repo_files))
        return BaseSeedSessionResponse()

    async def bash(self, request: Request, body: BashRequest) -> BashResponse:
        """The tool."""
        result = await self._sessions.get(request).bash(body.command, self.config.command_timeout_s)
        return BashResponse(returncode=result.returncode, output=result.output)

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Run the hidden test, remove the repository."""
        workspace = self._sessions.get(request)
        result = await workspace.test(body.hidden_test, self.config.test_timeout_s)
        self._sessions.close(request)
        await self._workspaces.close(workspace)
        return VerifyResponse(
            **body.model_dump(),
            reward=float(result.returncode == 0),
            test_returncode=result.returncode,
            test_output=result.output,
        )
