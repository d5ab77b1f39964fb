"""Sends a folder with vLLM's own NCCL sender to a server; only the communicator is none. Prints the names that it sent.

    python -m tests.generation.nccl_handshake URL WEIGHTS      # in the vLLM environment

`ONBELAY_PACKAGES` is the folder of packages that this environment lacks (Temporal's), after its own.
"""

# pyright: reportMissingImports=false

import asyncio
import os
import sys

sys.path.append(os.environ["ONBELAY_PACKAGES"])

from vllm.distributed.weight_transfer import nccl_engine

from activities.generation.transports.nccl import NcclTransport
from activities.generation.vllm import VllmServer
from workflows.messages import WeightsRef


class NoGroup:
    """The communicator of a group of one."""

    def destroy(self) -> None:
        """Nothing to close."""


def broadcast(engine: nccl_engine.NCCLTrainerWeightTransferEngine, source: object, meta: object) -> None:
    """What the sender would send, checked against what it declared."""
    for name, _ in engine._checked_iter(source, meta):
        sys.stdout.write(f"{name}\n")


async def main(url: str, weights: WeightsRef) -> None:
    """One load."""
    nccl_engine.open_trainer_endpoint = lambda info: NoGroup()
    nccl_engine.NCCLTrainerWeightTransferEngine._broadcast = broadcast
    async with VllmServer(url, refit_timeout_s=60.0) as server:
        await NcclTransport(120.0, device="cpu").load(server, weights)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], WeightsRef.model_validate_json(sys.argv[2])))
