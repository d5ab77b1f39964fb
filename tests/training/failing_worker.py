"""The trainer worker, whose ranks fail where a file says so: `<folder>/<rank>` holds `die` or `hang`.

Each rank writes its process id to `<folder>/pid-<rank>`. A file is taken away before its rank fails, so the rank that
is started in its place does not.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from activities.training.rank_watch import RankWatch
from workers.trainer_worker import main

FAULTS = "FAILING_WORKER_FAULTS"
FIRST_MICRO_BATCH = ("gradient", 1)
NEVER_CALLED = {"wandb", "torch._inductor"}  # see activities/training/lean_import.py


def fail_as_told(folder: Path, rank: str) -> None:
    """Patch the watch of this rank."""
    real = RankWatch.reached

    def reached(self: RankWatch, phase: str, micro_batch: int, micro_batches: int) -> None:
        told = folder / rank
        if (phase, micro_batch) == FIRST_MICRO_BATCH and told.exists():
            how = told.read_text()
            told.unlink()
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        real(self, phase, micro_batch, micro_batches)

    RankWatch.reached = reached


if __name__ == "__main__":
    assert not NEVER_CALLED & sys.modules.keys()
    faults, this_rank = Path(os.environ[FAULTS]), os.environ["RANK"]
    fail_as_told(faults, this_rank)
    written = faults / f".pid-{this_rank}"
    written.write_text(str(os.getpid()))
    written.rename(faults / f"pid-{this_rank}")
    main()
