"""One trainer at a time writes for a run: a lease with a token, and a check of the token in every write of a trainer.

Time decides who may take a run, the token who may write. Each taking raises the token, and a write holds the lease's
row until it commits, so it comes either before the next trainer took the run or not at all. A lease that expired and
that nobody took still writes. Time is the database's clock.
"""

from datetime import datetime

from sqlalchemy import func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from storage.constraints import broken_constraint
from storage.database import Database
from storage.errors import TrainerFenced, TrainerLeaseHeld, UnknownRun
from storage.models.trainer_leases import RunTrainer
from storage.records import Record

_NOW = func.clock_timestamp()


class TrainerLease(Record):
    """What a trainer shows with each of its writes. `released_at` is set in what is read of a lease that was ended."""

    run_id: str
    token: int
    holder: str
    acquired_at: datetime
    expires_at: datetime
    released_at: datetime | None = None


class TrainerLeases:
    """Take, renew and give back the right to write for the trainer of a run."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def acquire(self, run_id: str, holder: str, seconds: float) -> TrainerLease:
        """Take a run that is free, expired or this holder's, for so long. Raises TrainerLeaseHeld, UnknownRun."""
        until = _NOW + func.make_interval(0, 0, 0, 0, 0, 0, seconds)
        first = insert(RunTrainer).values(run_id=run_id, token=1, holder=holder, acquired_at=_NOW, expires_at=until)
        take = first.on_conflict_do_update(
            index_elements=[RunTrainer.run_id],
            set_={
                "token": RunTrainer.token + 1,
                "holder": holder,
                "acquired_at": _NOW,
                "expires_at": until,
                "released_at": None,
            },
            where=or_(RunTrainer.released_at.is_not(None), RunTrainer.expires_at <= _NOW, RunTrainer.holder == holder),
        )
        held = select(RunTrainer, func.extract("epoch", RunTrainer.expires_at - _NOW).label("remaining_s"))
        try:
            async with self._database.transaction() as session:
                taken = await session.scalar(take.returning(RunTrainer))
                if taken is not None:
                    return TrainerLease.model_validate(taken)
                other = (await session.execute(held.where(RunTrainer.run_id == run_id))).one()
        except IntegrityError as error:
            if broken_constraint(error) == "trainer_leases_run_id_fkey":
                raise UnknownRun(run_id) from None
            raise
        row, remaining_s = other.RunTrainer, 0.0 if other.RunTrainer.released_at else float(other.remaining_s)
        raise TrainerLeaseHeld(run_id, row.holder, row.token, row.expires_at, max(0.0, remaining_s))

    async def renew(self, lease: TrainerLease, seconds: float) -> TrainerLease:
        """Hold the run for so long from now. Raises TrainerFenced when another trainer has taken it."""
        longer = update(RunTrainer).where(
            RunTrainer.run_id == lease.run_id, RunTrainer.token == lease.token, RunTrainer.released_at.is_(None)
        )
        until = _NOW + func.make_interval(0, 0, 0, 0, 0, 0, seconds)
        async with self._database.transaction() as session:
            renewed = await session.scalar(longer.values(expires_at=until).returning(RunTrainer))
            if renewed is None:
                raise _fenced(lease, await session.get(RunTrainer, lease.run_id))
            return TrainerLease.model_validate(renewed)

    async def release(self, lease: TrainerLease) -> None:
        """Give the run back: the next trainer need not wait, and this lease writes nothing more. Twice is once."""
        end = update(RunTrainer).where(
            RunTrainer.run_id == lease.run_id, RunTrainer.token == lease.token, RunTrainer.released_at.is_(None)
        )
        async with self._database.transaction() as session:
            await session.execute(end.values(released_at=_NOW))

    async def check(self, lease: TrainerLease) -> None:
        """Raise TrainerFenced when the lease writes nothing any more."""
        async with self._database.transaction() as session:
            await check_lease(session, lease)

    async def last(self, run_id: str) -> TrainerLease | None:
        """The lease of the run as it was last taken; None before the first."""
        async with self._database.transaction() as session:
            stored = await session.get(RunTrainer, run_id)
        return None if stored is None else TrainerLease.model_validate(stored)


async def check_lease(session: AsyncSession, lease: TrainerLease) -> None:
    """Raise TrainerFenced unless the lease is the current one; it stays so until the transaction ends."""
    stored = await session.scalar(
        select(RunTrainer).where(RunTrainer.run_id == lease.run_id).with_for_update(read=True)
    )
    if stored is None or stored.token != lease.token or stored.released_at is not None:
        raise _fenced(lease, stored)


def _fenced(lease: TrainerLease, stored: RunTrainer | None) -> TrainerFenced:
    if stored is None or stored.released_at is not None:
        return TrainerFenced(lease.run_id, lease.token, None, None)
    return TrainerFenced(lease.run_id, lease.token, stored.token, stored.holder)
