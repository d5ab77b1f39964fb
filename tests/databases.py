"""Databases of tests: made under a name of their own, dropped when they are no longer needed."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg


@asynccontextmanager
async def new_database(server_dsn: str, template_dsn: str | None = None) -> AsyncIterator[str]:
    """The address of a new database, an empty one or a copy of a database that nobody is connected to."""
    template = (template_dsn or "/template1").rpartition("/")[2]
    name = f"test_{uuid.uuid4().hex}"
    administration = await asyncpg.connect(server_dsn)
    try:
        await administration.execute(f'create database "{name}" template "{template}"')
        yield f"{server_dsn.rpartition('/')[0]}/{name}"
        await administration.execute(f'drop database "{name}" with (force)')
    finally:
        await administration.close()
