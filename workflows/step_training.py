"""The second half of a step: assemble the batch, train it, publish, refit, record; each activity exactly once."""

from collections.abc import Callable, Sequence
from datetime import datetime

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows.calls import Calls
    from workflows.messages import (
        AssembleBatch,
        BatchRef,
        PublishWeights,
        RecordStep,
        Refit,
        StepInput,
        TrainStep,
        WeightsRef,
    )


async def train(
    calls: Calls,
    step: StepInput,
    batch: BatchRef | None,
    group_ids: Sequence[str],
    counts: Callable[[], dict[str, float]],
    begun: datetime,
    show: Callable[[str], None],
) -> tuple[BatchRef, WeightsRef]:
    """The batch that was trained and the policy that it made. `batch` is one that an earlier execution stored; `counts`
    are the step's own metrics, `begun` is when it had its turn."""
    show("training")
    if batch is None:
        batch = await calls.assemble_batch(
            AssembleBatch(run_id=step.run_id, step=step.step, group_ids=tuple(sorted(group_ids)))
        )
    assembled = workflow.now()
    applied = await calls.train_step(TrainStep(run_id=step.run_id, step=step.step, batch_digest=batch.digest))
    trained = workflow.now()

    show("refit")
    weights = await calls.publish_weights(PublishWeights(run_id=step.run_id, version=applied.policy_version))
    await calls.refit(Refit(run_id=step.run_id, weights=weights))
    refitted = workflow.now()
    metrics = {
        **{f"train/{name}": value for name, value in applied.metrics.items()},
        "train/reward": batch.mean_reward,
        "train/prompt_groups": float(batch.groups),
        **counts(),
        "timing/train/exposed_generation": (assembled - begun).total_seconds(),
        "timing/train/policy_training": (trained - assembled).total_seconds(),
        "timing/train/weight_sync": (refitted - trained).total_seconds(),
        "timing/train/total_step_time": (refitted - begun).total_seconds(),
    }
    await calls.record_step(RecordStep(run_id=step.run_id, step=step.step, metrics=metrics))
    show("applied")
    return batch, weights
