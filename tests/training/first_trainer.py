"""A trainer in a process of its own that comes to a moment, says so in a file, and waits there for another file.

Each line of standard input is an `Errand`; what came of it is written to a file. As the trainer goes on, its clock says
that it has slept for long.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from pydantic import BaseModel
from temporalio.exceptions import ApplicationError

from activities.training.megatron.hf_writer import FolderWriter
from activities.training.rank_watch import RankWatch
from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.training.trainer_site import Site

SLEEP_S = 1000.0  # longer than the lease of the test, shorter than a step may take


class Errand(BaseModel):
    """Asks for step 1 of a run and waits in its gradient pass, or for the export of version 1 and waits in it."""

    dsn: str
    folder: Path
    run_id: str
    moment: Literal["gradient", "export"]


class SleepyLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps."""

    slept_s = 0.0

    def time(self) -> float:
        return super().time() + self.slept_s

    def sleep(self) -> None:
        """Make much time pass at once, in any thread."""
        self.slept_s += SLEEP_S
        self.call_soon_threadsafe(lambda: None)  # it looks at its clock again


def waiting(loop: SleepyLoop, folder: Path, real: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which waits in its first call."""
    arrived, look = threading.Event(), threading.Event()

    def patched(*args: Any, **options: Any) -> Any:
        if not arrived.is_set():
            arrived.set()
            (folder / "arrived").touch()
            while not (folder / "go").exists():
                look.wait(0.02)
            loop.sleep()
        return real(*args, **options)

    return patched


async def do(errand: Errand, loop: SleepyLoop) -> str:
    """What came of it."""
    owner, name = (RankWatch, "reached") if errand.moment == "gradient" else (FolderWriter, "finish")
    storage = StorageConfig.model_validate({"dsn": errand.dsn, "blobs_url": str(errand.folder / "blobs")})
    database, blobs, run_id = Database(storage), BlobStore(storage.blobs_url), errand.run_id
    ledger = Ledger(database, blobs)
    site = Site(Recipe.model_validate((await ledger.runs.get(run_id)).recipe), ledger, blobs, run_id)
    batch = await ledger.batches.get(run_id, 1)
    assert batch is not None
    with patch.object(owner, name, waiting(loop, errand.folder, getattr(owner, name))):
        try:
            await (site.ask_step(1, batch.digest) if errand.moment == "gradient" else site.publish(1))
            outcome = "done"
        except ApplicationError as error:
            outcome = str(error)
        await site.trainer.idle()  # what the engine's thread still writes
    await database.close()
    return outcome


def main() -> None:
    for line in sys.stdin:
        errand = Errand.model_validate_json(line)
        with asyncio.Runner(loop_factory=SleepyLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, SleepyLoop)
            outcome = runner.run(do(errand, loop))
        part = errand.folder / "outcome.part"
        part.write_text(outcome)
        part.rename(errand.folder / "outcome")


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # threads of libtorch may abort the interpreter's finalisation
