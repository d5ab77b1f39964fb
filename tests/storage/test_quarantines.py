"""Quarantines: one open per endpoint, kept when they end."""

import asyncio
import uuid

import pytest

from storage.errors import UnknownVersion
from storage.ledger import Ledger
from tests.storage.building import Story, start_run

pytestmark = pytest.mark.integration


@pytest.fixture
def endpoint() -> str:
    return f"http://{uuid.uuid4().hex}:8000"


async def open_at(story: Story, endpoint: str) -> list[str]:
    return [found.reason for found in await story.ledger.quarantines.open() if found.endpoint == endpoint]


async def test_quarantine_begun_by_many_at_once_is_one_with_its_first_reason(story: Story, endpoint: str) -> None:
    quarantines = story.ledger.quarantines
    await story.ledger.weights.publish(await story.lease(), 3, "weights/3", "digest")

    begun = await asyncio.gather(
        *(quarantines.begin(story.run_id, endpoint, 3, f"reason {index}") for index in range(6))
    )

    assert all(one == begun[0] for one in begun)
    assert await quarantines.begin(story.run_id, endpoint, 3, "later") == begun[0]
    assert await open_at(story, endpoint) == [begun[0].reason]
    assert (begun[0].version, begun[0].released_at) == (3, None)


async def test_released_endpoint_may_be_quarantined_again_and_both_are_remembered(story: Story, endpoint: str) -> None:
    quarantines = story.ledger.quarantines
    await story.ledger.weights.publish(await story.lease(), 0, "weights/0", "digest")
    await quarantines.begin(story.run_id, endpoint, 0, "dead")

    assert await quarantines.release(endpoint)
    assert not await quarantines.release(endpoint)
    assert await open_at(story, endpoint) == []

    await quarantines.begin(story.run_id, endpoint, 0, "dead again")
    assert await open_at(story, endpoint) == ["dead again"]
    first, second = await quarantines.of_run(story.run_id)
    assert first.released_at is not None
    assert first.since <= first.released_at <= second.since
    assert second.released_at is None


async def test_quarantine_of_one_run_holds_for_the_next(story: Story, ledger: Ledger, endpoint: str) -> None:
    await ledger.weights.publish(await story.lease(), 0, "weights/0", "digest")
    begun = await ledger.quarantines.begin(story.run_id, endpoint, 0, "dead")
    following = Story(ledger, (await start_run(ledger)).run_id)
    await ledger.weights.publish(await following.lease(), 5, "weights/5", "digest")

    assert await ledger.quarantines.begin(following.run_id, endpoint, 5, "still dead") == begun
    assert await open_at(story, endpoint) == ["dead"]
    assert await ledger.quarantines.of_run(following.run_id) == []


async def test_quarantine_needs_a_published_version(story: Story, endpoint: str) -> None:
    with pytest.raises(UnknownVersion, match="version 7"):
        await story.ledger.quarantines.begin(story.run_id, endpoint, 7, "dead")
