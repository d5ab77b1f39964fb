"""What is stuck: running attempts of open groups of which nothing was heard for too long. Reads, and changes nothing.

An attempt is heard of when it begins, claims a call, and records, replays or gives one up.
"""

from typing import Final

from sqlalchemy import text

from storage.database import Database
from storage.records import Stall

SILENT: Final = text("""
SELECT groups.group_id, rollouts.rollout_id, attempts.attempt, worker, in_flight.ordinal AS call, heard.since
FROM groups JOIN rollouts USING (group_id) JOIN attempts USING (rollout_id)
    CROSS JOIN LATERAL (
        SELECT greatest(
            attempts.started_at,
            (SELECT max(ended_at) FROM model_calls AS call
             WHERE call.rollout_id = rollouts.rollout_id AND call.attempt = attempts.attempt),
            (SELECT max(greatest(claimed_at, released_at)) FROM model_call_leases AS lease
             WHERE lease.rollout_id = rollouts.rollout_id AND lease.attempt = attempts.attempt)
        ) AS since
    ) AS heard
    CROSS JOIN LATERAL (
        SELECT min(ordinal) AS ordinal FROM model_call_leases AS lease
        WHERE lease.rollout_id = rollouts.rollout_id AND lease.attempt = attempts.attempt AND released_at IS NULL
            AND NOT EXISTS (
                SELECT FROM model_calls AS call
                WHERE call.rollout_id = lease.rollout_id AND call.attempt = lease.attempt
                    AND call.ordinal = lease.ordinal
            )
    ) AS in_flight
WHERE run_id = :run_id AND groups.state = 'open' AND rollouts.state = 'open' AND attempts.state = 'running'
    AND heard.since <= clock_timestamp() - make_interval(secs => :silent_s)
ORDER BY heard.since, rollouts.rollout_id
""")


class Stalls:
    """Name what is stuck."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, run_id: str, silent_s: float) -> list[Stall]:
        """The attempts of a run that have been silent for so long, the longest first."""
        async with self._database.statement() as connection:
            rows = await connection.execute(SILENT, {"run_id": run_id, "silent_s": silent_s})
            return [Stall.model_validate(row) for row in rows]
