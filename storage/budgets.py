"""Drop counters of a run, counted from its groups in the order in which they ended: nothing is kept by hand.

A train group dropped for the infrastructure counts as consecutive until a later one ends well: sealed, trained, or set
aside, since the last has come through the infrastructure like the others. One dropped for its data counts as skipped
for ever, and neither counts as consecutive nor ends the count. One dropped without a bucket, by an operator or by
cancellation, counts nowhere. A group that is opened again takes back its own.
"""

from typing import Final

from sqlalchemy import text

from storage.database import Database
from storage.errors import UnknownGroup, UnknownRun
from storage.records import BudgetCounts

COUNTS: Final = """
WITH ended AS (
    SELECT state, bucket, ended_order FROM groups
    WHERE run_id = asked.run_id AND ended_order <= coalesce(asked.until, ended_order)
)
SELECT count(*) FILTER (
           WHERE state = 'dropped' AND bucket = 'infra'
               AND ended_order > coalesce((SELECT max(ended_order) FROM ended WHERE state <> 'dropped'), 0)
       ) AS consecutive_drops,
       count(*) FILTER (WHERE state = 'dropped' AND bucket = 'data') AS skipped_prompts
FROM ended
"""
OF_RUN: Final = text(f"""
SELECT counts.* FROM (SELECT run_id, NULL::bigint AS until FROM runs WHERE run_id = :run_id) AS asked
CROSS JOIN LATERAL ({COUNTS}) AS counts
""")  # noqa: S608 (text of this module only)
AFTER_GROUP: Final = text(f"""
SELECT counts.* FROM (SELECT run_id, ended_order AS until FROM groups WHERE group_id = :group_id) AS asked
CROSS JOIN LATERAL ({COUNTS}) AS counts
""")  # noqa: S608 (text of this module only)


class Budgets:
    """Count what was dropped."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, run_id: str) -> BudgetCounts:
        """The counters as they are, or UnknownRun."""
        async with self._database.statement() as connection:
            row = (await connection.execute(OF_RUN, {"run_id": run_id})).one_or_none()
        if row is None:
            raise UnknownRun(run_id)
        return BudgetCounts.model_validate(row)

    async def after(self, group_id: str) -> BudgetCounts:
        """The counters right after a group ended, as they are when it has not. Raises UnknownGroup."""
        async with self._database.statement() as connection:
            row = (await connection.execute(AFTER_GROUP, {"group_id": group_id})).one_or_none()
        if row is None:
            raise UnknownGroup(group_id)
        return BudgetCounts.model_validate(row)
