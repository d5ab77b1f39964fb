"""The policy that one rank trains: model, optimizer, version, and the weights of version 0 for the KL term."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from activities.training.megatron.shape import ModelShape


@dataclass
class Policy:
    """What is being trained. `reference` holds version 0 of this rank's parameters on the CPU; empty without KL."""

    source: Path
    shape: ModelShape
    model: GPTModel
    wrapped: DistributedDataParallel
    optimizer: MegatronOptimizer
    reference: list[Tensor]
    version: int

    @contextmanager
    def as_version_0(self) -> Iterator[None]:
        """The parameters are those of version 0 inside, and the current ones again after, the very same memory."""
        parameters = list(self.model.parameters())
        current = [parameter.data for parameter in parameters]
        try:
            for parameter, value in zip(parameters, self.reference, strict=True):
                parameter.data = value.to(parameter.device)
            yield
        finally:
            for parameter, value in zip(parameters, current, strict=True):
                parameter.data = value
