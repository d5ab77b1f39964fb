"""How the weights of a version get into one paused vLLM server. The exported folder is there in any case.

A transport sends; it neither pauses nor resumes, and what the server serves afterwards is asked by the refit.
"""

from typing import Protocol

from activities.generation.vllm import VllmServer
from workflows.messages import WeightsRef


class TransportUnavailable(Exception):
    """`generation.weight_transport` asks for what this process cannot do. Found when the generation worker starts."""


class WeightTransport(Protocol):
    """One way to load weights."""

    async def load(self, server: VllmServer, weights: WeightsRef) -> None:
        """Load the weights and stamp them `policy-<version>`; a `BoundaryError` when the server did not take them."""
        ...
