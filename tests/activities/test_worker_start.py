"""A worker does not wait for ever for a ledger that accepts connections and never answers."""

import asyncio

import pytest
from pydantic import SecretStr

from configs.storage import StorageConfig
from storage.database import Database
from storage.errors import LedgerUnavailable
from workers import worker_process
from workers.worker_process import wait_for_ledger


async def test_ledger_that_never_answers_is_named_when_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "PATIENCE_S", 0.3)
    monkeypatch.setattr(worker_process, "RETRY_PAUSE_S", 0.1)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}/onbelay"
        database = Database(StorageConfig(dsn=SecretStr(f"postgresql://{address}")))
        with pytest.raises(LedgerUnavailable, match=f"{address}.*no answer within 0.3 s"):  # the driver waits longer
            await wait_for_ledger(database)
        await database.close()
