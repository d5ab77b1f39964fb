"""Runs: one row per training job. A task queue has at most one live (running or paused) run; the tables enforce it."""

from collections.abc import Mapping

from pydantic import JsonValue
from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from storage.constraints import broken_constraint
from storage.database import Database
from storage.errors import QueueBusy, RunExists, UnknownRun
from storage.models.runs import LIVE_RUN_INDEX, Run
from storage.records import RunRecord, RunState

LIVE = ("running", "paused")


class Runs:
    """Create, find, and move runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        run_id: str,
        task_queue: str,
        recipe: Mapping[str, JsonValue],
        dataset_digest: str,
        dataset_rows: int,
        model_digest: str,
    ) -> RunRecord:
        """Write a new run in state running. Raises RunExists or QueueBusy; then nothing was written."""
        new_run = insert(Run).values(
            run_id=run_id,
            task_queue=task_queue,
            recipe=dict(recipe),
            dataset_digest=dataset_digest,
            dataset_rows=dataset_rows,
            model_digest=model_digest,
        )
        try:
            async with self._database.transaction() as session:
                return RunRecord.model_validate(await session.scalar(new_run.returning(Run)))
        except IntegrityError as error:
            if broken_constraint(error) == "runs_pkey":
                raise RunExists(run_id) from None
            await self._raise_if_busy(error, task_queue)
            raise

    async def get(self, run_id: str) -> RunRecord:
        """The run, or UnknownRun."""
        async with self._database.transaction() as session:
            run = await session.get(Run, run_id)
        if run is None:
            raise UnknownRun(run_id)
        return RunRecord.model_validate(run)

    async def list(self) -> list[RunRecord]:
        """All runs, newest first."""
        async with self._database.transaction() as session:
            runs = await session.scalars(select(Run).order_by(Run.created_at.desc(), Run.run_id))
            return [RunRecord.model_validate(run) for run in runs]

    async def set_state(self, run_id: str, state: RunState, reason: str | None = None) -> RunRecord:
        """Move a run. Back to running or paused it needs its task queue free, or QueueBusy."""
        move = update(Run).where(Run.run_id == run_id).values(state=state, reason=reason).returning(Run)
        try:
            async with self._database.transaction() as session:
                run = await session.scalar(move)
        except IntegrityError as error:
            await self._raise_if_busy(error, (await self.get(run_id)).task_queue)
            raise
        if run is None:
            raise UnknownRun(run_id)
        return RunRecord.model_validate(run)

    async def change_recipe(self, run_id: str, recipe: Mapping[str, JsonValue]) -> RunRecord:
        """Write another recipe, which counts from now on, also when the run is resumed."""
        change = update(Run).where(Run.run_id == run_id).values(recipe=dict(recipe)).returning(Run)
        async with self._database.transaction() as session:
            run = await session.scalar(change)
        if run is None:
            raise UnknownRun(run_id)
        return RunRecord.model_validate(run)

    async def _raise_if_busy(self, error: IntegrityError, task_queue: str) -> None:
        if broken_constraint(error) != LIVE_RUN_INDEX:
            return
        async with self._database.transaction() as session:
            other = await session.scalar(select(Run.run_id).where(Run.task_queue == task_queue, Run.state.in_(LIVE)))
        raise QueueBusy(task_queue, other or "that has just ended") from None
