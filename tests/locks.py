"""Locks that a test holds against the ledger: what gave up waiting for one must be gone before the lock is."""

import asyncio

import asyncpg

PATIENCE_S = 60.0
WAITING = """
SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')
"""


async def until_nobody_waits(holder: asyncpg.Connection) -> None:
    """Otherwise a write that its client has given up could still be done."""
    async with asyncio.timeout(PATIENCE_S):
        while await holder.fetchval(WAITING):
            await asyncio.sleep(0.02)
