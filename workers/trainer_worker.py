"""The trainer worker: torchrun starts one process per rank; rank 0 polls Temporal, the others follow it.

`torchrun --nproc-per-node N -m workers.trainer_worker --recipe FILE`
"""

import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import NoReturn

from temporalio.worker import Worker

from activities.training.ranks import Ranks
from activities.training.trainer import Trainer
from activities.training_activities import TrainingActivities
from storage.blobs import BlobStore
from storage.ledger import Ledger
from workers.worker_process import Resources, leave, new_worker, run_and_exit, serve, start_process

NAME = "trainer-worker"
STOP_TIMEOUT_S = 10.0
REPORT_TIME_S = 2.0

logger = logging.getLogger(__name__)


def main() -> NoReturn:
    """Entry point of every rank."""
    recipe, state_dir = start_process(NAME)
    ranks = Ranks()
    if ranks.rank > 0:
        _follow(ranks)

    async def build(resources: Resources) -> Sequence[Worker]:
        trainer = Trainer(ranks, _give_up)
        resources.closing.push_async_callback(trainer.stop, STOP_TIMEOUT_S)
        blobs = BlobStore(resources.recipe.storage.blobs_url)
        activities = TrainingActivities(Ledger(resources.database, blobs), blobs, trainer)
        return (
            new_worker(
                resources.client,
                f"{resources.recipe.temporal.task_queue}-trainer",
                boundary="trainer",
                activities=[activities.train_step, activities.publish_weights],
                max_concurrent_activities=1,
            ),
        )

    run_and_exit(serve(NAME, recipe, state_dir, build))


def _follow(ranks: Ranks) -> NoReturn:
    """Carry out rank 0's commands. Signals are rank 0's business: it lets the running command finish first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ranks.follow(orphaned=lambda: leave(1))
    except Exception:
        logger.exception("rank %d lost rank 0", ranks.rank)
        leave(1)
    leave(0)


def _give_up(cause: str) -> None:
    """End the process, after the activity had time to report why."""
    logger.error("%s", cause)
    asyncio.get_running_loop().call_later(REPORT_TIME_S, leave, 1)


if __name__ == "__main__":
    main()
