"""Rank 0's hold on the engine: what it contains, one command at a time, each with a deadline.

Torch works in one thread of its own while the event loop stays free. When the activity that wanted a step is cancelled,
or its time is up, the step ends at the next micro-batch and the engine keeps its version; other commands are finished.
`at` is true whenever no command runs, and None when a failure left it unknown. A command that hangs cannot be stopped,
so the process is given up: the supervisor starts it again.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from activities.errors import BoundaryError
from activities.training.commands import Command, Export, Load, Outcome, Save, Settings, Stop, Train
from activities.training.plan import EngineAt
from activities.training.rank_watch import Signal
from activities.training.ranks import Ranks

_LOOK_INTERVAL_S = 1.0
_FAILED_RANK_GRACE_S = 30.0
_CANCEL_WAIT_S = 5.0  # less than a stopping worker has patience with a cancelled activity
_STOP_GRACE_S = 10.0
_STOP_GRACE_SHARE = 0.2

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


class RankFailed(BoundaryError):
    """A rank of the trainer failed, or did not answer; a retry loads the newest checkpoint and replays."""

    boundary = "trainer"
    bucket = "infra"


class RankRefused(BoundaryError):
    """The trainer refused a model, a layout or a batch: the same input would be refused again."""

    boundary = "trainer"
    bucket = "data"


@dataclass(frozen=True)
class Trained:
    """The step that led to the engine's version."""

    digest: str
    metrics: dict[str, float]
    replayed_steps: int


def _silent(text: str) -> None:
    """Nobody listens."""


@dataclass
class _Order:
    """A command under way: what it is called, until when it may take, and what is told of it."""

    command: Command
    title: str
    deadline: float
    say: Say
    signal: Signal

    def tell(self) -> None:
        """How far it is."""
        self.say(f"{self.title}: {self.signal.reached}" if self.signal.reached else self.title)


class Trainer:
    """The engine as activities see it. `give_up` ends the process soon after it is called."""

    def __init__(self, ranks: Ranks, give_up: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._give_up = give_up
        self._given_up: str | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._free = asyncio.Lock()
        self._run_id: str | None = None
        self._version: int | None = None
        self._trained: Trained | None = None
        self._forgotten = 0

    def at(self, run_id: str) -> EngineAt | None:
        """Where the engine is, if it holds this run."""
        if self._run_id != run_id or self._version is None:
            return None
        return EngineAt(self._version, None if self._trained is None else self._trained.digest)

    @property
    def trained(self) -> Trained | None:
        """The step that led to the engine's version, if it was trained by this process."""
        return self._trained

    def forget(self, run_id: str) -> None:
        """What the engine holds of a run, and what a command under way will leave in it, is no version of the run."""
        self._forgotten += 1
        if self._run_id == run_id:
            self._run_id = self._version = self._trained = None

    async def idle(self) -> None:
        """Return when no command runs: a cancelled one may take a micro-batch to end. Its own deadline bounds it."""
        async with self._free:
            pass

    async def load(
        self,
        run_id: str,
        settings: Settings,
        version: int,
        checkpoint: Path | None,
        deadline: float,
        say: Say = _silent,
    ) -> None:
        """Become `version` of a run: its model as given (0), or a checkpoint."""

        def loaded(_: dict[str, float]) -> None:
            self._run_id, self._version, self._trained = run_id, version, None

        await self._command(Load(settings, checkpoint), f"loading version {version}", deadline, say, loaded)

    async def train(
        self, step: int, batch: bytes, digest: str, replayed_steps: int, deadline: float, say: Say = _silent
    ) -> Trained:
        """Apply `step` to an engine at that version."""

        def stepped(metrics: dict[str, float]) -> None:
            self._version, self._trained = step + 1, Trained(digest, metrics, replayed_steps)

        metrics = await self._command(Train(batch), f"step {step}", deadline, say, stepped)
        return Trained(digest, metrics, replayed_steps)

    async def export(self, folder: Path, deadline: float, say: Say = _silent) -> None:
        """Write the weights of the engine's version."""
        await self._command(Export(folder), f"exporting version {self._version}", deadline, say)

    async def save(self, folder: Path, deadline: float, say: Say = _silent) -> None:
        """Write a checkpoint of the engine's version."""
        await self._command(Save(folder), f"saving version {self._version}", deadline, say)

    async def stop(self, timeout_s: float) -> None:
        """End the follower ranks. One that is busy for longer ends when it misses rank 0."""
        if self._given_up is not None:
            return
        stopping = self._command(Stop(), "stopping", asyncio.get_running_loop().time() + timeout_s, _silent)
        try:
            async with asyncio.timeout(timeout_s):
                await stopping
        except TimeoutError:
            logger.warning("the trainer is busy and does not end its ranks within %g s", timeout_s)

    async def _command(
        self,
        command: Command,
        title: str,
        deadline: float,
        say: Say,
        then: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        order = _Order(command, title, deadline, say, Signal())
        running = asyncio.create_task(self._run(order, then))
        running.add_done_callback(lambda task: task.cancelled() or task.exception())  # read, also when nobody waits
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            order.say = _silent
            order.signal.stop()
            await asyncio.wait([running], timeout=_CANCEL_WAIT_S)
            raise

    async def _run(self, order: _Order, then: Callable[[dict[str, float]], None] | None) -> dict[str, float]:
        async with self._free:
            if self._given_up is not None:
                raise RankFailed(self._given_up)
            if order.signal.stopped:
                raise RankFailed(f"Nobody waits for {order.title} any more; it was not begun.")
            held, forgotten = (self._version, self._trained), self._forgotten
            if isinstance(order.command, Load | Train):
                self._version = self._trained = None  # unknown until the command has succeeded
            outcomes = await self._watched(order)
            known = forgotten == self._forgotten
            if known and isinstance(order.command, Train) and all(outcome.kept for outcome in outcomes):
                self._version, self._trained = held
            self._raise_failures(order, outcomes)
            metrics = outcomes[0].metrics
            if then is not None and known:
                then(metrics)
            return metrics

    async def _watched(self, order: _Order) -> list[Outcome]:
        """Wait for the engine's thread; give up when the deadline passes or a rank failed without it."""
        loop = asyncio.get_running_loop()
        deadline = order.deadline
        stop_at = deadline - min(_STOP_GRACE_S, _STOP_GRACE_SHARE * max(0.0, deadline - loop.time()))
        working = loop.run_in_executor(self._thread, self._ranks.carry_out, order.command, order.signal)
        while True:
            order.tell()
            done, _ = await asyncio.wait([working], timeout=_LOOK_INTERVAL_S)
            if done:
                try:
                    return working.result()
                except Exception as error:  # the connection between the ranks broke: a rank is gone
                    raise self._lost(f"The ranks of the trainer lost each other: {error}") from error
            if loop.time() > stop_at:
                order.signal.stop()
            failed = await asyncio.to_thread(self._ranks.failed_rank)
            if failed is not None:
                deadline = min(deadline, loop.time() + _FAILED_RANK_GRACE_S)
            if loop.time() > deadline:
                cause = "rank 0 did not finish in time" if failed is None else f"rank {failed.rank}: {failed.error}"
                where = f" ({order.signal.reached})" if order.signal.reached else ""
                raise self._lost(f"The trainer hangs in {order.title}{where} and is started again: {cause}")

    def _raise_failures(self, order: _Order, outcomes: list[Outcome]) -> None:
        failures = [outcome for outcome in outcomes if outcome.error is not None]
        if not failures:
            return
        if all(outcome.cancelled for outcome in outcomes):
            raise RankFailed(
                f"The trainer was cancelled at {order.title}, {order.signal.reached}, or ran out of time "
                f"(training.step_timeout_s). It keeps version {self._version}; the next attempt goes on from there."
            )
        command = type(order.command).__name__
        text = f"{command} failed on {len(failures)} of {len(outcomes)} ranks: {_causes(failures)}"
        if any(outcome.stuck for outcome in failures):
            raise self._lost(text)
        raise RankRefused(text) if all(outcome.refused for outcome in failures) else RankFailed(text)

    def _lost(self, cause: str) -> RankFailed:
        """Note that the engine's thread or another rank cannot be used any more."""
        self._given_up = cause
        self._give_up(cause)
        return RankFailed(cause)


def _causes(failures: list[Outcome]) -> str:
    """What each rank says, once where several say the same."""
    ranks: dict[str | None, list[str]] = {}
    for failure in failures:
        ranks.setdefault(failure.error, []).append(str(failure.rank))
    return "; ".join(f"rank{'s' * (len(of) > 1)} {', '.join(of)}: {error}" for error, of in ranks.items())
