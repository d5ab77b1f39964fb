"""Optimizer steps: written once, with the digest of the applied batch.

Only the trainer that holds the run writes one (`storage.trainer_leases`). The groups of the batch become trained in the
same transaction, so "was step t applied, and with what" has one answer, also after a crash.
"""

from collections.abc import Mapping
from typing import Literal

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from storage.database import Database
from storage.errors import BatchConflict, IllegalTransition, UnknownBatch, UnknownRun
from storage.models.rollouts import Group
from storage.models.runs import Run
from storage.models.steps import Batch, BatchGroup, OptimizerStep, StepMetric
from storage.records import StepRecord
from storage.trainer_leases import TrainerLease, check_lease

Source = Literal["trainer", "run"]


class Steps:
    """Apply steps and keep their metrics."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def apply(
        self, lease: TrainerLease, step: int, batch_digest: str, metrics: Mapping[str, float], replayed_steps: int
    ) -> StepRecord:
        """Write that a step was applied with its stored batch. A second call returns what the first one wrote.

        Raises TrainerFenced when another trainer holds the run.
        """
        run_id = lease.run_id
        async with self._database.transaction() as session:
            await check_lease(session, lease)
            stored_digest = await session.scalar(
                select(Batch.digest).where(Batch.run_id == run_id, Batch.step == step).with_for_update()
            )
            if stored_digest is None:
                raise UnknownBatch(run_id, step)
            if stored_digest != batch_digest:
                raise BatchConflict(run_id, step, stored_digest, batch_digest)
            new_step = insert(OptimizerStep).values(
                run_id=run_id, step=step, batch_digest=batch_digest, replayed_steps=replayed_steps
            )
            inserted = await session.scalar(new_step.on_conflict_do_nothing().returning(OptimizerStep.step))
            if inserted is not None:
                await _mark_trained(session, run_id, step)
                await _write_metrics(session, run_id, step, "trainer", metrics)
            return await _record(session, await session.get_one(OptimizerStep, (run_id, step)))

    async def get(self, run_id: str, step: int) -> StepRecord | None:
        """The step, if it was applied."""
        async with self._database.transaction() as session:
            stored = await session.get(OptimizerStep, (run_id, step))
            return None if stored is None else await _record(session, stored)

    async def last_applied(self, run_id: str) -> int | None:
        """The newest applied step; None before the first."""
        async with self._database.transaction() as session:
            return await session.scalar(select(func.max(OptimizerStep.step)).where(OptimizerStep.run_id == run_id))

    async def record_metrics(self, run_id: str, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add metrics of the run to a step; a name that is there keeps its value. Returns what is stored."""
        async with self._database.transaction() as session:
            if await session.get(Run, run_id) is None:
                raise UnknownRun(run_id)
            await _write_metrics(session, run_id, step, "run", metrics)
            return await _read_metrics(session, run_id, step, "run")

    async def metrics(self, run_id: str) -> dict[int, dict[str, float]]:
        """The metrics of the run by step. A step that is applied but not recorded yet is not among them."""
        wanted = select(StepMetric).where(StepMetric.run_id == run_id, StepMetric.source == "run")
        by_step: dict[int, dict[str, float]] = {}
        async with self._database.transaction() as session:
            for metric in await session.scalars(wanted.order_by(StepMetric.step, StepMetric.name)):
                by_step.setdefault(metric.step, {})[metric.name] = metric.value
        return by_step


async def _mark_trained(session: AsyncSession, run_id: str, step: int) -> None:
    members = select(BatchGroup.group_id).where(BatchGroup.run_id == run_id, BatchGroup.step == step)
    train = update(Group).where(Group.group_id.in_(members), Group.state == "sealed").values(state="trained")
    await session.execute(train.execution_options(synchronize_session=False))
    untrained = select(Group.group_id, Group.state).where(Group.group_id.in_(members), Group.state != "trained")
    refused = (await session.execute(untrained.limit(1))).one_or_none()
    if refused is not None:
        raise IllegalTransition(refused.group_id, refused.state, "trained", f"step {step} trains on sealed groups only")


async def _write_metrics(
    session: AsyncSession, run_id: str, step: int, source: Source, metrics: Mapping[str, float]
) -> None:
    rows = [
        {"run_id": run_id, "step": step, "source": source, "name": name, "value": value}
        for name, value in metrics.items()
    ]
    if rows:
        await session.execute(insert(StepMetric).on_conflict_do_nothing(), rows)


async def _read_metrics(session: AsyncSession, run_id: str, step: int, source: Source) -> dict[str, float]:
    wanted = select(StepMetric.name, StepMetric.value).where(
        StepMetric.run_id == run_id, StepMetric.step == step, StepMetric.source == source
    )
    rows = await session.execute(wanted.order_by(StepMetric.name))
    return {row.name: row.value for row in rows}


async def _record(session: AsyncSession, stored: OptimizerStep) -> StepRecord:
    return StepRecord(
        run_id=stored.run_id,
        step=stored.step,
        batch_digest=stored.batch_digest,
        replayed_steps=stored.replayed_steps,
        metrics=await _read_metrics(session, stored.run_id, stored.step, "trainer"),
        applied_at=stored.applied_at,
    )
