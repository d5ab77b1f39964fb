"""Evidence that was changed is not believed: reading it names the call."""

import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from storage.blobs import BlobStore
from storage.database import Database
from storage.errors import EvidenceCorrupt
from storage.ledger import Ledger
from storage.records import RecordedResponse
from tests.storage.building import Story, start_run

pytestmark = pytest.mark.integration


async def two_calls(story: Story) -> str:
    """A rollout with a call and its continuation."""
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    first = await story.generate(rollout_id, 0, (1, 2, 3), (4, 5), fingerprint="first", conversation="one")
    await story.generate(rollout_id, 0, (1, 2, 3, 4, 5, 6), (7,), after=first, fingerprint="second", conversation="two")
    return rollout_id


CHANGE = "UPDATE model_calls SET "


@pytest.mark.parametrize(
    ("change", "ordinal", "complaint"),
    [
        (CHANGE + "body = 'forged' WHERE ordinal = 0", 0, "payload does not have the digest"),
        (CHANGE + "log_probs = overlay(log_probs PLACING '\\x09' FROM 1) WHERE ordinal = 1", 1, "payload does not"),
        (CHANGE + "tokens = overlay(tokens PLACING '\\x09' FROM 1) WHERE ordinal = 0", 0, "payload does not have"),
        (CHANGE + "chain_digest = 'forged' WHERE ordinal = 0", 0, "chain digest does not follow"),
        (CHANGE + "cumulative_digest = 'forged' WHERE ordinal = 1", 1, "tokens do not have its cumulative digest"),
        (
            CHANGE + "continuity = 'new_segment', continuity_reason = 'forged', prefix_tokens = 0, prompt_tokens = 1 "
            "WHERE ordinal = 1",
            1,
            "tokens do not have its cumulative digest",
        ),
    ],
)
async def test_changed_evidence_is_named(
    story: Story, owner: Database, change: str, ordinal: int, complaint: str
) -> None:
    rollout_id = await two_calls(story)
    await forge(owner, f"{change} AND rollout_id = :id", rollout_id)

    with pytest.raises(EvidenceCorrupt, match=complaint) as refused:
        await story.ledger.calls.of_attempt(rollout_id, 0)
    assert (refused.value.rollout_id, refused.value.attempt, refused.value.ordinal) == (rollout_id, 0, ordinal)


async def test_call_whose_ancestor_is_gone_is_not_rebuilt(story: Story, owner: Database) -> None:
    rollout_id = await two_calls(story)
    await forge(owner, "DELETE FROM model_calls WHERE ordinal = 0 AND rollout_id = :id", rollout_id)

    with pytest.raises(EvidenceCorrupt, match="call 0 of attempt 0 before it is gone"):
        await story.ledger.calls.parents_by_conversation(rollout_id, 0, "two")


async def test_replayed_call_whose_response_is_gone_is_named(story: Story, owner: Database) -> None:
    rollout_id = await two_calls(story)
    await story.begin(rollout_id)
    await story.ledger.calls.claim(rollout_id, 1, "second")
    await forge(owner, "DELETE FROM model_calls WHERE attempt = 0 AND ordinal = 1 AND rollout_id = :id", rollout_id)

    with pytest.raises(EvidenceCorrupt, match=r"call 0 of attempt 1 .* the response that it points to is gone"):
        await story.ledger.calls.of_attempt(rollout_id, 1)


async def test_blob_that_is_gone_or_changed_is_evidence_that_is_corrupt(story: Story, blobs: BlobStore) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    recorded = await story.generate(rollout_id, 0, body=b"x" * 70_000)
    path = Path(blobs.path_of(recorded.digest))

    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EvidenceCorrupt, match="is corrupt: its content has sha256"):
        await story.ledger.calls.of_attempt(rollout_id, 0)
    path.unlink()
    with pytest.raises(EvidenceCorrupt, match="There is no blob"):
        await story.ledger.calls.of_attempt(rollout_id, 0)


async def forge(owner: Database, statement: str, rollout_id: str) -> None:
    """Change evidence as its owner, with triggers and foreign keys out of the way, and CHECKs satisfied."""
    async with owner.transaction() as session:
        await session.execute(text("SET LOCAL session_replication_role = replica"))
        await session.execute(text(statement), {"id": rollout_id})


tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)


@settings(max_examples=15)
@given(turns=st.lists(st.tuples(st.integers(0, 4), tokens, tokens), min_size=1, max_size=6))
async def test_any_tree_of_calls_is_rebuilt_from_its_deltas(
    ledger: Ledger, turns: list[tuple[int, list[int], list[int]]]
) -> None:
    story = Story(ledger, (await start_run(ledger)).run_id)
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    recorded: list[RecordedResponse] = []
    for back, added, sampled in turns:
        after = recorded[-back] if 0 < back <= len(recorded) else None
        before = () if after is None else (*after.prompt_token_ids, *after.sampled_token_ids)
        fingerprint = uuid.uuid4().hex
        recorded.append(await story.generate(rollout_id, 0, (*before, *added), sampled, after, fingerprint))

    calls = await ledger.calls.of_attempt(rollout_id, 0)
    assert [(call.prompt_token_ids, call.sampled_token_ids, call.log_probs) for call in calls] == [
        (one.prompt_token_ids, one.sampled_token_ids, one.log_probs) for one in recorded
    ]
    await story.begin(rollout_id)
    for one in recorded:
        assert (await ledger.calls.claim(rollout_id, 1, one.fingerprint)).recorded == one
    assert await ledger.checks.of(story.run_id) == []
