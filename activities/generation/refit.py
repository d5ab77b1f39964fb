"""A refit: the endpoints get the same weights and are resumed together, or all stay paused until a repetition succeeds.

Files are checked first; then every endpoint is paused, those that do not serve the weights yet load and stamp them,
every endpoint is asked what it serves, and only then are all of them resumed. An endpoint that already serves the
weights is not loaded again, one that was started again is. Repeating a refit that is done changes nothing.

An endpoint that fails ends the refit, unless it may be quarantined and others are left: then it is paused and the
refit goes on without it. Endpoints in quarantine are tried beside the others, which never wait for them while paused.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from activities.generation.errors import RefitIncomplete, WeightsUnfit
from activities.generation.quarantine import NO_QUARANTINE, Quarantine
from activities.generation.transports.file import FileTransport
from activities.generation.transports.transport import WeightTransport
from activities.generation.vllm import PauseMode, ServerState, VllmServer
from activities.generation.weights import verify_weights, weights_label
from workflows.messages import WeightsRef

T = TypeVar("T")

RETURN_GRACE_S = 30.0  # for endpoints in quarantine, once the others sample again
_FILES = FileTransport()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndpointRefit:
    """One endpoint serves the weights; `seconds` is 0 where it already did."""

    url: str
    seconds: float


@dataclass(frozen=True)
class Phases:
    """Seconds of each part of a refit, for all endpoints together; 0 for what was not needed. Calls wait from the
    beginning of `pause` to the end of `resume`."""

    check: float = 0.0
    pause: float = 0.0
    load: float = 0.0
    confirm: float = 0.0
    resume: float = 0.0


@dataclass(frozen=True)
class Refitted:
    """Who serves the weights now, and who is in quarantine."""

    endpoints: tuple[EndpointRefit, ...]
    quarantined: tuple[str, ...]
    phases: Phases


async def refit(
    servers: Sequence[VllmServer],
    weights: WeightsRef,
    pause_mode: PauseMode,
    *,
    transport: WeightTransport = _FILES,
    quarantine: Quarantine = NO_QUARANTINE,
) -> Refitted:
    """Make the endpoints serve `weights`.

    Raises:
        RefitIncomplete: an endpoint failed that may not be quarantined, or none is left. All stay paused.
        WeightsMissing: the files are not those of the record. Nothing was paused.
    """
    return await _Refit(weights, pause_mode, transport, quarantine).run(servers)


class _NoneLeft(RefitIncomplete):
    """Every endpoint that was not in quarantine failed; `failures` are not in quarantine either."""

    def __init__(self, message: str, failures: dict[VllmServer, str]) -> None:
        super().__init__(message)
        self.failures = failures


class _Refit:
    """The state of one refit: who still takes part, and what it took."""

    def __init__(
        self, weights: WeightsRef, pause_mode: PauseMode, transport: WeightTransport, quarantine: Quarantine
    ) -> None:
        self._weights = weights
        self._pause_mode: PauseMode = pause_mode
        self._transport = transport
        self._quarantine = quarantine
        self._left: list[VllmServer] = []
        self._seconds: dict[str, float] = {}
        self._phases: dict[str, float] = {}
        self._files: asyncio.Task[None] | None = None
        self._silencing: set[asyncio.Task[None]] = set()

    async def run(self, servers: Sequence[VllmServer]) -> Refitted:
        """See `refit`."""
        held = [server for server in servers if server.url in self._quarantine.held]
        if len(held) == len(servers):  # nobody to go on with: every one of them is needed
            held = []
        self._left = [server for server in servers if server not in held]
        returning = {asyncio.create_task(self._return(server)): server for server in held}
        try:
            try:
                await self._advance()
            except _NoneLeft as ended:
                if not await self._returned(returning):
                    raise
                await self._begin_quarantine(ended.failures)
            for server in await self._returned(returning):
                await self._take_back(server)
        finally:
            await _cancelled([*returning, *self._silencing])
        for server in self._left:
            await self._quarantine.release(server.url)
        served = {server.url for server in self._left}
        return Refitted(
            tuple(EndpointRefit(s.url, self._seconds.get(s.url, 0.0)) for s in servers if s.url in served),
            tuple(server.url for server in servers if server.url not in served),
            Phases(**self._phases),
        )

    async def _advance(self) -> None:
        """Bring the endpoints that are not in quarantine to the weights, together."""
        with self._timed("check"):
            states = await self._each("answer", VllmServer.state)
            stale = {url for url, state in states.items() if not self._serves(state)}
            if not stale and not any(state.paused for state in states.values()):
                return
            await self._verified()
            await self._each("read the weights", self._check, stale)
        with self._timed("pause"):
            await self._each("pause", lambda server: server.pause(self._pause_mode))
        with self._timed("load"):
            await self._each("load", self._load, stale)
        with self._timed("confirm"):
            await self._each("show the new weights", self._confirm)
        with self._timed("resume"):
            await self._each("resume", VllmServer.resume)

    async def _return(self, server: VllmServer) -> None:
        """Bring an endpoint of the quarantine to the weights; it stays paused until the others sample again. Calls that
        it still holds were given up with it."""
        state = await server.state()
        if self._serves(state):
            return
        await server.pause("abort")
        await self._verified()
        await self._check(server)
        await self._load(server)
        await self._confirm(server)

    async def _returned(self, returning: dict[asyncio.Task[None], VllmServer]) -> list[VllmServer]:
        """Those that have come back within the grace period; the others are left for the next refit."""
        ending = [*returning, *self._silencing]
        if ending:
            await asyncio.wait(ending, timeout=RETURN_GRACE_S)
        back: list[VllmServer] = []
        for task, server in returning.items():
            error = task.exception() if task.done() else "it is not done yet"
            if error is None:
                back.append(server)
            else:
                _log.warning("vLLM at %s stays in quarantine: %s", server.url, error)
        return back

    async def _take_back(self, server: VllmServer) -> None:
        try:
            await server.resume()
        except Exception as error:
            _log.warning("vLLM at %s stays in quarantine: %s", server.url, error)
            return
        self._left.append(server)

    async def _each(
        self, doing: str, call: Callable[[VllmServer], Awaitable[T]], only: Collection[str] | None = None
    ) -> dict[str, T]:
        """Call the endpoints that are left and wait for all of them: no request may be under way when the refit is
        repeated. Endpoints that fail are quarantined, or end the refit."""
        asked = [server for server in self._left if only is None or server.url in only]
        results = await asyncio.gather(*(call(server) for server in asked), return_exceptions=True)
        answers = dict(zip(asked, results, strict=True))
        failures = {server: error for server, error in answers.items() if isinstance(error, BaseException)}
        if failures:
            causes = {server: str(error) or type(error).__name__ for server, error in failures.items()}
            message = (
                f"{len(failures)} of {len(asked)} vLLM endpoints did not {doing}; generation is not resumed until a "
                f"refit succeeds. {' '.join(causes.values())}"
            )
            first = next(iter(failures.values()))
            if not self._quarantine.tolerant:
                raise RefitIncomplete(message) from first
            if len(failures) == len(self._left):
                raise _NoneLeft(message, causes) from first
            await self._begin_quarantine(causes)
        return {server.url: answer for server, answer in answers.items() if not isinstance(answer, BaseException)}

    async def _begin_quarantine(self, failures: dict[VllmServer, str]) -> None:
        """Written before anybody samples again. Calls that the endpoints still hold end, if they can be told so."""
        for server, reason in failures.items():
            await self._quarantine.begin(server.url, reason)
            self._silencing.add(asyncio.create_task(_silence(server)))
        self._left = [server for server in self._left if server not in failures]

    async def _check(self, server: VllmServer) -> None:
        problem = await server.problem_with(self._weights.path)
        if problem is not None:
            raise WeightsUnfit(f"vLLM at {server.url} cannot load {self._weights.path}: {problem}")

    async def _load(self, server: VllmServer) -> None:
        started = time.monotonic()
        await self._transport.load(server, self._weights)
        self._seconds[server.url] = time.monotonic() - started

    async def _confirm(self, server: VllmServer) -> None:
        state = await server.state()
        if not self._serves(state):
            raise RefitIncomplete(f"vLLM at {server.url} says it serves {state.label!r} with digest {state.digest}.")
        if not state.paused:
            raise RefitIncomplete(f"vLLM at {server.url} was resumed by someone else during the refit.")

    def _serves(self, state: ServerState) -> bool:
        return state.label == weights_label(self._weights.version) and state.digest == self._weights.digest

    async def _verified(self) -> None:
        """The files are those of the record. They are read once, for whoever asks first."""
        if self._files is None:
            self._files = asyncio.create_task(asyncio.to_thread(verify_weights, self._weights))
        await asyncio.shield(self._files)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._phases[phase] = time.monotonic() - started


async def _silence(server: VllmServer) -> None:
    with suppress(Exception):  # it is in quarantine because it does not do what it is asked
        await server.pause("abort")


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
