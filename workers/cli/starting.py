"""Starting runs: everything is checked first, so that nothing is half written."""

from datetime import UTC, datetime

from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)

from activities.rollouts.dataset import scan
from configs.recipe import Recipe
from storage.errors import QueueBusy
from storage.runs import LIVE
from workers.cli.model_files import model_digest
from workers.cli.session import Session
from workers.cli.temporal_runs import is_open
from workflows.messages import RunInput, RunPolicy
from workflows.search_attributes import RUN_ID
from workflows.training_run import TrainingRun


def policy_of(recipe: Recipe) -> RunPolicy:
    """The sections that workflows decide by."""
    return RunPolicy(
        grpo=recipe.grpo,
        rollouts=recipe.rollouts,
        failure=recipe.failure,
        generation=recipe.generation,
        training=recipe.training,
    )


async def start_run(session: Session, name: str) -> str:
    """Write the run and start its workflow; returns the run id."""
    recipe = session.recipe
    dataset = scan(recipe.run.dataset)
    if recipe.run.validation_dataset:
        scan(recipe.run.validation_dataset)
    digest = model_digest(recipe.run.model)
    run_id = recipe.run.id or f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    queue = recipe.temporal.task_queue
    await free_queue(session, queue)
    await session.ledger.runs.create(
        run_id=run_id,
        task_queue=queue,
        recipe=without_secrets(recipe).model_dump(mode="json"),
        dataset_digest=dataset.digest,
        dataset_rows=len(dataset),
        model_digest=digest,
    )
    await start_workflow(session, RunInput(run_id=run_id, policy=policy_of(recipe), task_queue=queue))
    return run_id


async def start_workflow(session: Session, run: RunInput) -> None:
    """Start a run's workflow; when that cannot be, the run has failed."""
    try:
        await session.client.start_workflow(
            TrainingRun.run,
            run,
            id=run.run_id,
            task_queue=run.task_queue,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            static_summary=f"run {run.run_id}",
            search_attributes=TypedSearchAttributes([SearchAttributePair(RUN_ID, run.run_id)]),
        )
    except BaseException:
        await session.ledger.runs.set_state(run.run_id, "failed", "its workflow could not be started")
        raise


async def free_queue(session: Session, queue: str, but: str | None = None, *, dry_run: bool = False) -> None:
    """A run that Temporal no longer runs (terminated from outside) gives its queue free; a live one is an error."""
    for record in await session.ledger.runs.list():
        if record.task_queue != queue or record.state not in LIVE or record.run_id == but:
            continue
        if await is_open(session, record.run_id):
            raise QueueBusy(queue, record.run_id)
        if not dry_run:
            await session.ledger.runs.set_state(record.run_id, "terminated", "its workflow was closed from outside")


def without_secrets(recipe: Recipe) -> Recipe:
    """What of a recipe the ledger keeps."""
    return recipe.model_copy(
        update={
            "storage": recipe.storage.model_copy(update={"dsn": None}),
            "temporal": recipe.temporal.model_copy(update={"api_key": None}),
        }
    )
