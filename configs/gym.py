"""`gym`: the NeMo-Gym agent and environment servers."""

from typing import Any, Literal

from pydantic import Field, HttpUrl, model_validator

from configs.base import Section


class GymServerConfig(Section):
    """One NeMo-Gym server that the embedded stack starts."""

    type: Literal["responses_api_agents", "environment_servers", "resources_servers", "responses_api_models"] = Field(
        description="NeMo-Gym's kind of server."
    )
    implementation: str = Field(description="NeMo-Gym's name of the implementation, or module of this project.")
    config: dict[str, Any] = Field(default_factory=dict, description="Passed to the server as it is.")


class GymConfig(Section):
    """Addresses of agents and environments (`agent_ref.name` of a row), or servers to start."""

    agents: dict[str, HttpUrl] = Field(
        default_factory=dict, description="Base URL of each running agent server, by the name that rows use."
    )
    environments: dict[str, HttpUrl] = Field(
        default_factory=dict,
        description="Base URL of each running environment server (NeMo-Gym's episode protocol), by the name that rows "
        "use.",
    )
    servers: dict[str, GymServerConfig] = Field(
        default_factory=dict,
        description="Servers of the embedded stack, by name; used when `agents` and `environments` are empty.",
    )
    port: int = Field(
        default=8100, ge=0, le=65535, description="First loopback port of the embedded servers; 0: free ones."
    )

    @model_validator(mode="after")
    def _agents_or_servers(self) -> "GymConfig":
        running = " and ".join(f"`{name}`" for name in ("agents", "environments") if getattr(self, name))
        if running and self.servers:
            raise ValueError(f"give either {running} (running servers) or `servers` (to be started), not both")
        return self

    @model_validator(mode="after")
    def _one_server_a_name(self) -> "GymConfig":
        twice = sorted(self.agents.keys() & self.environments.keys())
        if twice:
            raise ValueError(
                f"{', '.join(twice)}: in `agents` and in `environments`, so that a row could mean either; give each "
                "server a name of its own"
            )
        return self
