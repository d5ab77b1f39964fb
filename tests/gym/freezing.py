"""A consumer of NeMo-Gym's token capture, in its environment: freezes a capture of a ledger and prints what it holds.

python -m tests.gym.freezing STORAGE CAPTURE      # the `storage` section of a recipe as JSON
"""

import asyncio
import json
import sys

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.captures import Captures
from storage.database import Database
from storage.model_calls import ModelCalls
from workers.gym.capture.backend import CaptureBackend, install
from workers.gym.capture.source import LedgerTokenSource

DEADLINE_S = 60.0


async def main(storage: StorageConfig, capture: str) -> None:
    """Freeze, print, and give the capture back."""
    database = Database(storage)
    install(CaptureBackend(Captures(database), ModelCalls(database, BlobStore(storage.blobs_url)), DEADLINE_S))
    frozen = await LedgerTokenSource().freeze(capture)
    entries = [
        [e.prompt_token_ids, e.generation_token_ids, e.generation_log_probs, e.parent_resolution, e.response_id]
        for e in frozen.entries
    ]
    retired = await LedgerTokenSource().drop(capture, snapshot_id=frozen.snapshot_id, version=frozen.version)
    await database.close()
    sys.stdout.write(json.dumps({"incomplete": frozen.incomplete, "entries": entries, "retired": retired}))


if __name__ == "__main__":
    asyncio.run(main(StorageConfig.model_validate_json(sys.argv[1]), sys.argv[2]))
