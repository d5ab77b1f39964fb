"""The transport of a configuration, or the reason why this process cannot have it."""

from activities.generation.transports.file import FileTransport
from activities.generation.transports.nccl import NcclTransport, nccl_problem
from activities.generation.transports.transport import TransportUnavailable, WeightTransport
from configs.generation import GenerationConfig


def transport_of(config: GenerationConfig) -> WeightTransport:
    """`generation.weight_transport`; TransportUnavailable where a GPU or vLLM is missing."""
    if config.weight_transport == "file":
        return FileTransport()
    problem = nccl_problem()
    if problem is not None:
        raise TransportUnavailable(
            f"generation.weight_transport is nccl, which sends weights from a GPU of the generation worker, but "
            f"{problem}. Run the generation worker where vLLM is installed and a GPU is visible, or set "
            "generation.weight_transport: file."
        )
    return NcclTransport(config.refit_timeout_s)
