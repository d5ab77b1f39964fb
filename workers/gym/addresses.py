"""Where the Gym servers of a recipe listen: on loopback, on `gym.port` and the ports after it, in order."""

from typing import Literal

from configs.gym import GymConfig, GymServerConfig

HOST = "127.0.0.1"
_ENVIRONMENTS_OF_ROWS = ("legacy_agent", "single_agent_turn_legacy")


def server_urls(gym: GymConfig) -> dict[str, str]:
    """Base URL of every server of `gym.servers`, by name. The port must be known (not 0)."""
    if gym.port == 0:
        raise ValueError("gym.port is 0: choose a port before asking for addresses")
    return {name: f"http://{HOST}:{gym.port + index}" for index, name in enumerate(gym.servers)}


def agent_urls(gym: GymConfig) -> dict[str, str]:
    """Base URLs of the servers that take a row at `/run`: agents, and environment servers that stand in for one."""
    return {name: url for name, url in server_urls(gym).items() if _protocol(gym.servers[name]) == "row"}


def environment_urls(gym: GymConfig) -> dict[str, str]:
    """Base URLs of the servers that take an episode at `/run`."""
    return {name: url for name, url in server_urls(gym).items() if _protocol(gym.servers[name]) == "episode"}


def _protocol(server: GymServerConfig) -> Literal["row", "episode"] | None:
    if server.type == "responses_api_agents" or server.implementation in _ENVIRONMENTS_OF_ROWS:
        return "row"
    return "episode" if server.type == "environment_servers" else None
