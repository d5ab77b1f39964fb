"""Batches and optimizer steps: one batch per step, applied once, and its groups trained in the same moment."""

import asyncio
import math

import pytest

from storage.errors import BatchConflict, BatchGroupRefused, IllegalTransition, UnknownBatch
from tests.storage.building import Story

pytestmark = pytest.mark.integration


async def test_batch_is_read_back_with_its_groups_in_order(story: Story) -> None:
    groups = [(await story.sealed_group([1.0], slot=slot)).group_id for slot in (1, 0)]

    stored = await story.batch(groups)

    assert stored.group_ids == tuple(groups)
    assert await story.ledger.batches.get(story.run_id, 0) == stored
    assert await story.ledger.batches.get(story.run_id, 1) is None


async def test_batch_stored_by_many_at_once_is_stored_once(story: Story) -> None:
    group = await story.sealed_group([1.0])

    batches = await asyncio.gather(*(story.batch([group.group_id]) for _ in range(6)))

    assert all(batch == batches[0] for batch in batches)


async def test_other_batch_for_the_same_step_is_refused(story: Story) -> None:
    first = await story.batch([])

    with pytest.raises(BatchConflict, match="one batch only"):
        await story.batch([], digest="c" * 64)
    assert await story.ledger.batches.get(story.run_id, 0) == first


async def test_group_trains_in_one_batch_only(story: Story) -> None:
    group = await story.sealed_group([1.0])
    await story.batch([group.group_id], step=0)

    with pytest.raises(BatchGroupRefused, match=group.group_id):
        await story.batch([group.group_id], step=1, digest="c" * 64)
    with pytest.raises(BatchGroupRefused, match="nowhere"):
        await story.batch(["nowhere"], step=1, digest="c" * 64)
    assert await story.ledger.batches.get(story.run_id, 1) is None


async def test_batch_takes_only_groups_that_train_in_its_step(story: Story) -> None:
    later = await story.sealed_group([1.0], step=2)
    evaluation = await story.group(purpose="validation")
    copy = await story.ledger.copies.open(later.group_id)

    with pytest.raises(BatchGroupRefused, match="train in this step"):
        await story.batch([later.group_id], step=0)
    for other in (evaluation, copy):
        with pytest.raises(BatchGroupRefused, match=f"'{other.group_id}' is a {other.purpose} group"):
            await story.batch([other.group_id], step=other.step)
    assert await story.ledger.batches.get(story.run_id, 0) is None


async def test_range_has_every_step_or_names_the_missing_one(story: Story) -> None:
    for step in (0, 1, 3):
        await story.batch([], step=step)

    assert [batch.step for batch in await story.ledger.batches.range(story.run_id, 0, 1)] == [0, 1]
    assert await story.ledger.batches.range(story.run_id, 2, 1) == ()
    with pytest.raises(UnknownBatch, match="step 2"):
        await story.ledger.batches.range(story.run_id, 1, 3)


async def test_applied_step_is_read_back_and_its_groups_are_trained(story: Story) -> None:
    group = await story.sealed_group([1.0])
    batch = await story.batch([group.group_id])

    applied = await story.ledger.steps.apply(
        await story.lease(), 0, batch.digest, {"loss": 0.25, "grad_norm": math.inf}, 2
    )

    assert (applied.metrics, applied.replayed_steps) == ({"loss": 0.25, "grad_norm": math.inf}, 2)
    assert await story.ledger.steps.get(story.run_id, 0) == applied
    assert (await story.ledger.groups.get(group.group_id)).state == "trained"


async def test_step_applied_by_many_at_once_is_applied_once(story: Story) -> None:
    group = await story.sealed_group([1.0])
    batch = await story.batch([group.group_id])

    lease = await story.lease()
    applied = await asyncio.gather(
        *(story.ledger.steps.apply(lease, 0, batch.digest, {"loss": float(n)}, n) for n in range(6))
    )

    assert all(step == applied[0] for step in applied)
    assert await story.ledger.steps.last_applied(story.run_id) == 0


async def test_step_is_not_applied_with_another_batch_or_without_one(story: Story) -> None:
    await story.batch([])
    lease = await story.lease()

    with pytest.raises(BatchConflict):
        await story.ledger.steps.apply(lease, 0, "c" * 64, {}, 0)
    with pytest.raises(UnknownBatch, match="step 7"):
        await story.ledger.steps.apply(lease, 7, "c" * 64, {}, 0)
    assert await story.ledger.steps.get(story.run_id, 0) is None
    assert await story.ledger.steps.last_applied(story.run_id) is None


async def test_step_with_a_group_that_is_not_sealed_is_not_applied_at_all(story: Story) -> None:
    sealed = await story.sealed_group([1.0], slot=0)
    reopened = await story.group(slot=1)
    batch = await story.batch([sealed.group_id, reopened.group_id])
    lease = await story.lease()

    with pytest.raises(IllegalTransition, match=reopened.group_id):
        await story.ledger.steps.apply(lease, 0, batch.digest, {"loss": 1.0}, 0)

    assert await story.ledger.steps.get(story.run_id, 0) is None
    assert await story.ledger.steps.metrics(story.run_id) == {}
    assert (await story.ledger.groups.get(sealed.group_id)).state == "sealed"


async def test_last_applied_is_the_newest_step(story: Story) -> None:
    for step in range(3):
        await story.train([], step)
    assert await story.ledger.steps.last_applied(story.run_id) == 2


async def test_metrics_of_a_step_are_kept_as_first_written_and_apart_from_the_trainers(story: Story) -> None:
    await story.train([], 0)
    record = story.ledger.steps.record_metrics
    assert await story.ledger.steps.metrics(story.run_id) == {}

    await record(story.run_id, 0, {"loss": 9.0, "reward": 0.5})
    again = await record(story.run_id, 0, {"reward": 0.0, "kl": math.nan})

    assert again["reward"] == 0.5
    assert math.isnan(again["kl"])
    assert (await story.ledger.steps.metrics(story.run_id))[0]["loss"] == 9.0
    step = await story.ledger.steps.get(story.run_id, 0)
    assert step is not None
    assert step.metrics == {"loss": 0.25}
