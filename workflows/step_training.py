"""The second half of a step: assemble the batch, train it, publish, refit, record; each activity exactly once.

The metrics that it names are times, and what the activities hand back; what the ledger holds is added as they are
recorded. All of them are in `activities.metrics.catalogue`.
"""

from collections.abc import Callable, Sequence
from datetime import datetime

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows.calls import Calls
    from workflows.messages import AssembleBatch, BatchRef, StepInput, WeightsRef
    from workflows.training_messages import PublishWeights, RecordStep, Refit, TrainStep


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
    collected = workflow.now()
    if batch is None:
        batch = await calls.assemble_batch(
            AssembleBatch(run_id=step.run_id, step=step.step, group_ids=tuple(sorted(group_ids)))
        )
    assembled = workflow.now()
    applied = await calls.train_step(TrainStep(run_id=step.run_id, step=step.step, batch_digest=batch.digest))
    trained = workflow.now()

    show("refit")
    weights = await calls.publish_weights(PublishWeights(run_id=step.run_id, version=applied.policy_version))
    refit = await calls.refit(Refit(run_id=step.run_id, weights=weights))
    refitted = workflow.now()
    metrics = {
        **{metric_name(name): value for name, value in applied.metrics.items()},
        "train/reward": batch.mean_reward,
        "train/prompt_groups": float(batch.groups),
        "train/quarantined_endpoints": float(len(refit.quarantined)),
        **counts(),
        "timing/train/exposed_generation": (assembled - begun).total_seconds(),
        "timing/train/advantage_calculation": (assembled - collected).total_seconds(),
        "timing/train/policy_training": (trained - assembled).total_seconds(),
        "timing/train/checkpointing": applied.checkpoint_seconds,
        "timing/train/weight_sync": (refitted - trained).total_seconds(),
        "timing/train/total_step_time": (refitted - begun).total_seconds(),
    }
    await calls.record_step(RecordStep(run_id=step.run_id, step=step.step, metrics=metrics))
    show("applied")
    return batch, weights


def metric_name(of_trainer: str) -> str:
    """The name of a trainer's metric among those of the step: `loss` is `train/loss`, `timing/gradient`
    `timing/train/gradient`."""
    timed = of_trainer.removeprefix("timing/")
    return f"train/{of_trainer}" if timed == of_trainer else f"timing/train/{timed}"
