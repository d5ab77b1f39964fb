"""Rank 0's hold on the engine: what it contains, one command at a time, each with a deadline.

Torch works in one thread of its own while the event loop stays free. A command that was begun is always finished or
given up for good, also when the activity that wanted it was cancelled: `at` is true whenever no command runs, and None
when a failure left it unknown. A command that hangs cannot be stopped, so the process is given up: the supervisor
starts it again.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from activities.errors import BoundaryError
from activities.training.commands import Command, Export, Load, Outcome, Save, Settings, Stop, Train
from activities.training.plan import EngineAt
from activities.training.ranks import Ranks

_LOOK_INTERVAL_S = 1.0
_FAILED_RANK_GRACE_S = 30.0


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

    def at(self, run_id: str) -> EngineAt | None:
        """Where the engine is, if it holds this run."""
        if self._run_id != run_id or self._version is None:
            return None
        return EngineAt(self._version, None if self._trained is None else self._trained.digest)

    @property
    def trained(self) -> Trained | None:
        """The step that led to the engine's version, if it was trained by this process."""
        return self._trained

    async def load(
        self, run_id: str, settings: Settings, version: int, checkpoint: Path | None, deadline: float
    ) -> None:
        """Become `version` of a run: its model as given (0), or a checkpoint."""

        def loaded(_: dict[str, float]) -> None:
            self._run_id, self._version, self._trained = run_id, version, None

        await self._command(Load(settings, checkpoint), deadline, loaded)

    async def train(self, step: int, batch: bytes, digest: str, replayed_steps: int, deadline: float) -> Trained:
        """Apply `step` to an engine at that version."""

        def stepped(metrics: dict[str, float]) -> None:
            self._version, self._trained = step + 1, Trained(digest, metrics, replayed_steps)

        metrics = await self._command(Train(batch), deadline, stepped)
        return Trained(digest, metrics, replayed_steps)

    async def export(self, folder: Path, deadline: float) -> None:
        """Write the weights of the engine's version."""
        await self._command(Export(folder), deadline)

    async def save(self, folder: Path, deadline: float) -> None:
        """Write a checkpoint of the engine's version."""
        await self._command(Save(folder), deadline)

    async def stop(self, timeout_s: float) -> None:
        """End the follower ranks."""
        if self._given_up is None:
            await self._command(Stop(), asyncio.get_running_loop().time() + timeout_s)

    async def _command(
        self, command: Command, deadline: float, then: Callable[[dict[str, float]], None] | None = None
    ) -> dict[str, float]:
        running = asyncio.create_task(self._run(command, deadline, then))
        running.add_done_callback(lambda task: task.cancelled() or task.exception())  # read, also when nobody waits
        return await asyncio.shield(running)

    async def _run(
        self, command: Command, deadline: float, then: Callable[[dict[str, float]], None] | None
    ) -> dict[str, float]:
        async with self._free:
            if self._given_up is not None:
                raise RankFailed(self._given_up)
            if isinstance(command, Load | Train):
                self._version = self._trained = None  # unknown until the command has succeeded
            outcomes = await self._watched(command, deadline)
            self._raise_failures(command, outcomes)
            metrics = outcomes[0].metrics
            if then is not None:
                then(metrics)
            return metrics

    async def _watched(self, command: Command, deadline: float) -> list[Outcome]:
        """Wait for the engine's thread; give up when the deadline passes or a rank failed without it."""
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._thread, self._ranks.carry_out, command)
        while True:
            done, _ = await asyncio.wait([working], timeout=_LOOK_INTERVAL_S)
            if done:
                try:
                    return working.result()
                except Exception as error:  # the connection between the ranks broke: a rank is gone
                    raise self._lost(f"The ranks of the trainer lost each other: {error}") from error
            failed = await asyncio.to_thread(self._ranks.failed_rank)
            if failed is not None:
                deadline = min(deadline, loop.time() + _FAILED_RANK_GRACE_S)
            if loop.time() > deadline:
                cause = "rank 0 did not finish in time" if failed is None else f"rank {failed.rank}: {failed.error}"
                raise self._lost(f"The trainer hangs in {type(command).__name__} and is started again: {cause}")

    def _raise_failures(self, command: Command, outcomes: list[Outcome]) -> None:
        failures = [outcome for outcome in outcomes if outcome.error is not None]
        if not failures:
            return
        causes = "; ".join(f"rank {outcome.rank}: {outcome.error}" for outcome in failures)
        text = f"{type(command).__name__} failed on {len(failures)} of {len(outcomes)} ranks: {causes}"
        if any(outcome.stuck for outcome in failures):
            raise self._lost(text)
        raise RankRefused(text) if all(outcome.refused for outcome in failures) else RankFailed(text)

    def _lost(self, cause: str) -> RankFailed:
        """Note that the engine's thread or another rank cannot be used any more."""
        self._given_up = cause
        self._give_up(cause)
        return RankFailed(cause)
