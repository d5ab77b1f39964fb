"""A refit: all endpoints get the same weights, or all stay paused until a repetition succeeds.

Files are checked first; then every endpoint is paused, those that do not serve the weights yet load and stamp them,
every endpoint is asked what it serves, and only then are all of them resumed. An endpoint that already serves the
weights is not loaded again, one that was started again is. Repeating a refit that is done changes nothing.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from activities.generation.errors import RefitIncomplete, WeightsUnfit
from activities.generation.vllm import PauseMode, ServerState, VllmServer
from activities.generation.weights import verify_weights, weights_label
from workflows.messages import WeightsRef

T = TypeVar("T")


@dataclass(frozen=True)
class EndpointRefit:
    """One endpoint serves the weights; `seconds` is 0 where it already did."""

    url: str
    seconds: float


async def refit(servers: Sequence[VllmServer], weights: WeightsRef, pause_mode: PauseMode) -> tuple[EndpointRefit, ...]:
    """Make every endpoint serve `weights`."""
    states = await _all("answer", servers, VllmServer.state)
    stale = [server for server, state in zip(servers, states, strict=True) if not _serves(state, weights)]
    if not stale and not any(state.paused for state in states):
        return tuple(EndpointRefit(server.url, 0.0) for server in servers)
    await asyncio.to_thread(verify_weights, weights)
    await _all("read the weights", stale, lambda server: _check(server, weights))
    await _all("pause", servers, lambda server: server.pause(pause_mode))
    seconds = dict(zip((server.url for server in stale), await _all("load", stale, _load(weights)), strict=True))
    await _all("show the new weights", servers, lambda server: _confirm(server, weights))
    await _all("resume", servers, VllmServer.resume)
    return tuple(EndpointRefit(server.url, seconds.get(server.url, 0.0)) for server in servers)


def _serves(state: ServerState, weights: WeightsRef) -> bool:
    return state.label == weights_label(weights.version) and state.digest == weights.digest


async def _check(server: VllmServer, weights: WeightsRef) -> None:
    problem = await server.problem_with(weights.path)
    if problem is not None:
        raise WeightsUnfit(f"vLLM at {server.url} cannot load {weights.path}: {problem}")


def _load(weights: WeightsRef) -> Callable[[VllmServer], Awaitable[float]]:
    async def load(server: VllmServer) -> float:
        started = time.monotonic()
        await server.load(weights.path, weights.digest, weights_label(weights.version))
        return time.monotonic() - started

    return load


async def _confirm(server: VllmServer, weights: WeightsRef) -> None:
    state = await server.state()
    if not _serves(state, weights):
        raise RefitIncomplete(f"vLLM at {server.url} says it serves {state.label!r} with digest {state.digest}.")
    if not state.paused:
        raise RefitIncomplete(f"vLLM at {server.url} was resumed by someone else during the refit.")


async def _all(doing: str, servers: Sequence[VllmServer], call: Callable[[VllmServer], Awaitable[T]]) -> list[T]:
    """Call every endpoint and wait for all of them: no request may be under way when the refit is repeated."""
    results = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        causes = " ".join(str(failure) or type(failure).__name__ for failure in failures)
        raise RefitIncomplete(
            f"{len(failures)} of {len(servers)} vLLM endpoints did not {doing}; generation is not resumed until a "
            f"refit succeeds. {causes}"
        ) from failures[0]
    return [result for result in results if not isinstance(result, BaseException)]
