"""NeMo-Gym's environment server in a process without Ray, which it does not use and would start."""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

from environment_servers.single_agent_turn.app import SingleAgentTurnEnvironmentServer


class Episodes(SingleAgentTurnEnvironmentServer):
    """As it is."""

    ray_enabled = False
