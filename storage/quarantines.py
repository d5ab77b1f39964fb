"""Quarantines: which endpoints a refit went on without, why, and since when. While one is open, nothing samples there.

A quarantine belongs to the endpoint, not to a run: runs that follow one another share the servers. Beginning one
that is open, and releasing an endpoint that has none, change nothing.
"""

from datetime import datetime

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from storage.constraints import broken_constraint
from storage.database import Database
from storage.errors import UnknownVersion
from storage.models.quarantines import Quarantine
from storage.records import Record


class QuarantineRecord(Record):
    """An endpoint that did not take `version` of a run. `endpoint` is its base URL, without a slash at the end."""

    endpoint: str
    since: datetime
    run_id: str
    version: int
    reason: str
    released_at: datetime | None


class Quarantines:
    """Begin and end them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> list[QuarantineRecord]:
        """Those that were not ended, by address."""
        wanted = select(Quarantine).where(Quarantine.released_at.is_(None)).order_by(Quarantine.endpoint)
        async with self._database.transaction() as session:
            return [QuarantineRecord.model_validate(stored) for stored in await session.scalars(wanted)]

    async def of_run(self, run_id: str) -> list[QuarantineRecord]:
        """All quarantines that refits of a run began, oldest first."""
        wanted = select(Quarantine).where(Quarantine.run_id == run_id)
        async with self._database.transaction() as session:
            found = await session.scalars(wanted.order_by(Quarantine.since, Quarantine.endpoint))
            return [QuarantineRecord.model_validate(stored) for stored in found]

    async def begin(self, run_id: str, endpoint: str, version: int, reason: str) -> QuarantineRecord:
        """Begin a quarantine; one that is open already is kept as it is. Raises UnknownVersion."""
        new = insert(Quarantine).values(run_id=run_id, endpoint=endpoint, version=version, reason=reason)
        unless_open = new.on_conflict_do_nothing(index_elements=["endpoint"], index_where=text("released_at IS NULL"))
        now_open = select(Quarantine).where(Quarantine.endpoint == endpoint, Quarantine.released_at.is_(None))
        try:
            async with self._database.transaction() as session:
                await session.execute(unless_open)
                return QuarantineRecord.model_validate((await session.scalars(now_open)).one())
        except IntegrityError as error:
            if broken_constraint(error) == "quarantines_run_id_version_fkey":
                raise UnknownVersion(run_id, version) from None
            raise

    async def release(self, endpoint: str) -> bool:
        """End the quarantine of an endpoint; False when it has none."""
        ended = (
            update(Quarantine)
            .where(Quarantine.endpoint == endpoint, Quarantine.released_at.is_(None))
            .values(released_at=func.clock_timestamp())
            .returning(Quarantine.endpoint)
            .execution_options(synchronize_session=False)
        )
        async with self._database.transaction() as session:
            return (await session.scalars(ended)).one_or_none() is not None
