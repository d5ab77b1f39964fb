"""Checks of a run: every invariant of the ledger, and each row that breaks one, by name. Reads, and changes nothing."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from storage.database import Database
from storage.errors import UnknownRun
from storage.invariants import ACCOUNTING, EVIDENCE, SETTLEMENTS
from storage.models.runs import Run
from storage.records import Record

CHECK_TIMEOUT_S: Final = 600
INVARIANTS: Final = {
    invariant: text(statement) for invariant, statement in (EVIDENCE | SETTLEMENTS | ACCOUNTING).items()
}


class Violation(Record):
    """A row that breaks an invariant of the ledger."""

    invariant: str
    row: str
    detail: str


class Checks:
    """Look for rows that should not be."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, run_id: str) -> list[Violation]:
        """The violations of a run at one moment; none when its evidence is whole. UnknownRun for another run."""
        async with self._database.snapshot() as session:
            if await session.get(Run, run_id) is None:
                raise UnknownRun(run_id)
            return await violations(session, run_id)


async def violations(session: AsyncSession, run_id: str) -> list[Violation]:
    """The violations that a transaction sees."""
    await session.execute(text(f"SET LOCAL statement_timeout = '{CHECK_TIMEOUT_S}s'"))
    found: list[Violation] = []
    for invariant, statement in INVARIANTS.items():
        rows = (await session.execute(statement, {"run_id": run_id})).mappings()
        found += [Violation(invariant=invariant, **row) for row in rows]
    return found
