"""NeMo-Gym's own checks of a token capture, run against the ledger: one line for each that passed.

    ONBELAY_TEST_DSN=postgresql://... python -m workers.gym.conformance

Runs in the NeMo-Gym environment, on a migrated database. Ends with a traceback at the first check that fails.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import asyncio
import os
import sys
import tempfile

from nemo_gym.token_id_capture.conformance import run_conformance
from pydantic import SecretStr

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.captures import Captures
from storage.database import Database
from storage.model_calls import ModelCalls
from workers.gym.capture.backend import CaptureBackend, install
from workers.gym.capture.lineage import LedgerLineage
from workers.gym.capture.sink import LedgerTokenSink
from workers.gym.capture.source import LedgerTokenSource

DEADLINE_S = 60.0


async def check(storage: StorageConfig) -> list[str]:
    """The names of the checks, all passed."""
    database = Database(storage)
    install(CaptureBackend(Captures(database), ModelCalls(database, BlobStore(storage.blobs_url)), DEADLINE_S))
    try:
        return await run_conformance(LedgerTokenSink, LedgerTokenSource, LedgerLineage)
    finally:
        await database.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as blobs:
        given = StorageConfig(dsn=SecretStr(os.environ["ONBELAY_TEST_DSN"]), blobs_url=blobs)
        for name in asyncio.run(check(given)):
            sys.stdout.write(f"passed {name}\n")
