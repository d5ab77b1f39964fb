"""The random number generators of one rank: a resumed rank draws what it would have drawn."""

from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def random_states() -> dict[str, Any]:
    """States of torch on the CPU, of this rank's CUDA device and of Megatron-core's tracker (empty without CUDA)."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
        tracker: Any = get_cuda_rng_tracker()
        states["tracker"] = tracker.get_states()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set what `random_states` returned; those of CUDA only where there is a device."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
        tracker: Any = get_cuda_rng_tracker()
        tracker.set_states(states["tracker"])
