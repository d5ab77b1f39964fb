"""Weights by way of a folder that the trainer and the servers share: the server reads it."""

from activities.generation.vllm import VllmServer
from activities.generation.weights import weights_label
from workflows.messages import WeightsRef


class FileTransport:
    """`generation.weight_transport: file`, with the weight backend `safetensors_file`."""

    async def load(self, server: VllmServer, weights: WeightsRef) -> None:
        """Name the folder to the server."""
        await server.abandon_update()
        await server.init_transfer({})
        await server.start_update()
        await server.update({"path": weights.path, "digest": weights.digest})
        await server.finish_update(weights_label(weights.version))
