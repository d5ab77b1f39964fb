"""A trainer in a process of its own that comes to a moment, says so in a file, and waits there for another file.

`python -m tests.training.first_trainer FOLDER RUN MOMENT`: asks for step 1 (`gradient`) or for version 1 (`export`),
and writes what came of it.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from temporalio.exceptions import ApplicationError

from activities.training.megatron.hf_writer import FolderWriter
from activities.training.rank_watch import RankWatch
from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.training.trainer_site import Site

PATIENCE_S = 240.0
DSN = "FIRST_TRAINER_DSN"


def wait_in(folder: Path, owner: type[Any], name: str) -> None:
    """Wait in the first call of a method."""
    real: Callable[..., Any] = getattr(owner, name)
    arrived = threading.Event()

    def patched(*args: Any, **options: Any) -> Any:
        if not arrived.is_set():
            arrived.set()
            (folder / "arrived").touch()
            look = threading.Event()
            for _ in range(int(PATIENCE_S / 0.02)):
                if (folder / "go").exists():
                    break
                look.wait(0.02)
        return real(*args, **options)

    setattr(owner, name, patched)


async def main(folder: Path, run_id: str, moment: str) -> None:
    wait_in(folder, *((RankWatch, "reached") if moment == "gradient" else (FolderWriter, "finish")))
    storage = StorageConfig.model_validate({"dsn": os.environ[DSN], "blobs_url": str(folder / "blobs")})
    database = Database(storage)
    blobs = BlobStore(storage.blobs_url)
    ledger = Ledger(database, blobs)
    site = Site(Recipe.model_validate((await ledger.runs.get(run_id)).recipe), ledger, blobs, run_id)
    batch = await ledger.batches.get(run_id, 1)
    assert batch is not None
    try:
        await (site.ask_step(1, batch.digest) if moment == "gradient" else site.publish(1))
        outcome = "done"
    except ApplicationError as error:
        outcome = str(error)
    await site.trainer.idle()  # what the engine's thread still writes
    (folder / "outcome.json").write_text(json.dumps(outcome))
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
    sys.stderr.flush()
    os._exit(0)  # threads of libtorch may abort the interpreter's finalisation
