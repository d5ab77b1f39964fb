"""Policy versions, refits, checkpoints, evaluations: written once, the first write stands."""

import asyncio

import pytest

from storage.errors import UnknownVersion, VersionConflict
from tests.storage.building import Story

pytestmark = pytest.mark.integration


async def test_version_published_by_many_at_once_is_published_once(story: Story) -> None:
    weights, lease = story.ledger.weights, await story.lease()

    published = await asyncio.gather(*(weights.publish(lease, 0, "weights/0", "digest") for _ in range(6)))

    assert all(version == published[0] for version in published)
    assert await weights.get(story.run_id, 0) == published[0]
    assert await weights.get(story.run_id, 1) is None


async def test_other_weights_under_a_published_version_are_refused(story: Story) -> None:
    lease = await story.lease()
    first = await story.ledger.weights.publish(lease, 1, "weights/1", "digest")

    with pytest.raises(VersionConflict, match=r"policy version 1 .* digest; other"):
        await story.ledger.weights.publish(lease, 1, "weights/1", "other")
    assert await story.ledger.weights.get(story.run_id, 1) == first


async def test_refit_needs_a_published_version_and_keeps_its_first_record(story: Story) -> None:
    weights = story.ledger.weights
    with pytest.raises(UnknownVersion, match="version 0"):
        await weights.record_refit(story.run_id, 0, "http://a", 1.0)

    await weights.publish(await story.lease(), 0, "weights/0", "digest")
    first = await weights.record_refit(story.run_id, 0, "http://a", 1.0)

    assert await weights.record_refit(story.run_id, 0, "http://a", 2.0) == first
    assert (await weights.record_refit(story.run_id, 0, "http://b", 2.0)).seconds == 2.0


async def test_checkpoints_are_listed_oldest_first_and_forgotten_once(story: Story) -> None:
    weights, lease = story.ledger.weights, await story.lease()
    for version in (4, 2):
        await weights.record_checkpoint(lease, version, f"checkpoints/{version}")
    await weights.record_checkpoint(lease, 4, "checkpoints/4")
    assert [checkpoint.version for checkpoint in await weights.checkpoints(story.run_id)] == [2, 4]

    for _ in range(2):
        await weights.forget_checkpoint(lease, 2)

    assert [checkpoint.path for checkpoint in await weights.checkpoints(story.run_id)] == ["checkpoints/4"]


async def test_checkpoint_at_another_path_is_refused(story: Story) -> None:
    lease = await story.lease()
    await story.ledger.weights.record_checkpoint(lease, 4, "here")

    with pytest.raises(VersionConflict, match="stored as here; there"):
        await story.ledger.weights.record_checkpoint(lease, 4, "there")


async def test_evaluations_are_listed_by_version_as_first_recorded(story: Story) -> None:
    evaluations = story.ledger.evaluations
    await evaluations.record(story.run_id, 5, None, 0)
    first = await evaluations.record(story.run_id, 0, 0.5, 8)

    assert await evaluations.record(story.run_id, 0, 0.9, 8) == first
    assert [(one.version, one.mean_reward) for one in await evaluations.list(story.run_id)] == [(0, 0.5), (5, None)]


async def test_weights_that_were_exported_again_are_found_where_they_are(story: Story) -> None:
    weights, lease = story.ledger.weights, await story.lease()
    await weights.publish(lease, 0, "one-machine/0", "digest")
    assert (await weights.publish(lease, 0, "another/0", "digest")).path == "another/0"
    await weights.replace(lease, 0, "third/0", "other bits")
    stored = await weights.get(story.run_id, 0)
    assert stored is not None
    assert (stored.path, stored.digest) == ("third/0", "other bits")
