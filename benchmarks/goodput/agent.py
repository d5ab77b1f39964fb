"""NeMo-Gym's simple agent, with its model calls led through the fault gate."""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import copy

from fastapi import FastAPI
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig


class GatedAgentConfig(SimpleAgentConfig):
    """`gate_port`: where the gate stands in for the model server, on loopback."""

    gate_port: int


class GatedAgent(SimpleAgent):
    """Knows its model server under another port; all else is NeMo-Gym's."""

    config: GatedAgentConfig

    def setup_webserver(self) -> FastAPI:
        """Look the model server up in a copy of the addresses, then serve as NeMo-Gym does."""
        addresses = copy.deepcopy(self.server_client.global_config_dict)
        for kinds in addresses[self.config.model_server.name].values():
            for settings in kinds.values():
                settings["port"] = self.config.gate_port
        self.server_client = self.server_client.model_copy(update={"global_config_dict": addresses})
        return super().setup_webserver()
