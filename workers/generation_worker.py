"""The generation worker: refits and restorations of the vLLM endpoints, one at a time. One of them runs per task queue.

`python -m workers.generation_worker --recipe FILE`
"""

from collections.abc import Sequence

from temporalio.worker import Worker

from activities.generation.transports.chosen import transport_of
from activities.generation_activities import GenerationActivities
from storage.blobs import BlobStore
from storage.ledger import Ledger
from workers.worker_process import Resources, new_worker, run_worker_process

NAME = "generation-worker"


async def build(resources: Resources) -> Sequence[Worker]:
    """One worker on the generation queue."""
    transport = transport_of(resources.recipe.generation)
    ledger = Ledger(resources.database, BlobStore(resources.recipe.storage.blobs_url))
    activities = GenerationActivities(ledger, resources.recipe, transport)
    resources.closing.push_async_callback(activities.close)
    queue = f"{resources.recipe.temporal.task_queue}-generation"
    return (
        new_worker(
            resources.client,
            queue,
            boundary="generation",
            activities=[activities.refit, activities.restore_policy],
            max_concurrent_activities=1,
        ),
    )


if __name__ == "__main__":
    run_worker_process(NAME, build)
