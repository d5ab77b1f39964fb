"""Seals: one outcome per attempt, for every token that it selected."""

import pytest
from sqlalchemy import select

from storage.database import Database
from storage.errors import AttemptFenced, SealConflict, SelectionInvalid
from storage.models.model_calls import ModelCall, Seal, SelectedResponse
from storage.records import SelectedResponse as Selected
from tests.storage.building import Story, selecting, valid

pytestmark = pytest.mark.integration


async def test_sealing_twice_with_the_same_receipt_is_a_no_op(story: Story, database: Database) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.generate(rollout_id, 0)
    settle = story.ledger.rollouts.settle

    first = await settle(selecting(rollout_id, 0, [0]))

    assert await settle(selecting(rollout_id, 0, [0])) == first
    async with database.transaction() as session:
        assert len(list(await session.scalars(select(Seal).where(Seal.rollout_id == rollout_id)))) == 1


async def test_sealing_again_with_another_receipt_is_an_error(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    for fingerprint in ("first", "second"):
        await story.generate(rollout_id, 0, fingerprint=fingerprint)
    settle = story.ledger.rollouts.settle
    first = await settle(selecting(rollout_id, 0, [0]))

    for other in (
        selecting(rollout_id, 0, [0], reward=0.0),
        selecting(rollout_id, 0, [1]),
        selecting(rollout_id, 0, [0, 1]),
        selecting(rollout_id, 0, [0]).model_copy(update={"evidence_digest": "f" * 64}),
    ):
        with pytest.raises(SealConflict, match="is sealed with receipt"):
            await settle(other)
    assert await settle(selecting(rollout_id, 0, [0])) == first


async def test_result_of_an_older_attempt_is_refused_before_and_after_the_seal(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.begin(rollout_id)
    settle = story.ledger.rollouts.settle

    with pytest.raises(AttemptFenced):
        await settle(valid(rollout_id, 0))
    await settle(valid(rollout_id, 1))
    with pytest.raises(AttemptFenced):
        await settle(valid(rollout_id, 0))


async def test_retry_of_a_group_begins_attempts_for_unsealed_siblings_only_and_rollout_ids_never_change(
    story: Story,
) -> None:
    group = await story.group(num_rollouts=3)
    sealed, failed, lost = (rollout.rollout_id for rollout in group.rollouts)
    await story.settle(sealed, 1.0)
    await story.fail(failed)
    await story.fail(lost)
    await story.ledger.rollouts.lose(lost, "lost", "budget used up")
    await story.ledger.groups.set_state(group.group_id, "parked", "infra", "one lost")
    await story.ledger.groups.set_state(group.group_id, "open")

    for rollout in group.rollouts:
        await story.try_to_begin(rollout.rollout_id)

    retried = await story.ledger.groups.get(group.group_id)
    assert [rollout.rollout_id for rollout in retried.rollouts] == [sealed, failed, lost]
    assert [[attempt.attempt for attempt in rollout.attempts] for rollout in retried.rollouts] == [[0], [0, 1], [0, 1]]
    assert retried.rollouts[0].state == "valid"


async def test_receipt_depends_on_every_token_that_was_selected(story: Story, database: Database) -> None:
    group = await story.group(num_rollouts=2)
    receipts: list[str] = []
    for rollout, sampled in zip(group.rollouts, ((4, 5), (4, 6)), strict=True):
        await story.begin(rollout.rollout_id)
        await story.generate(rollout.rollout_id, 0, sampled=sampled)
        await story.ledger.rollouts.settle(selecting(rollout.rollout_id, 0, [0]))
        async with database.transaction() as session:
            seals = await session.scalars(select(Seal.receipt).where(Seal.rollout_id == rollout.rollout_id))
            receipts.append(seals.one())
    assert receipts[0] != receipts[1]


async def test_settled_rollout_counts_the_calls_of_all_its_attempts(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    first = await story.generate(rollout_id, 0, (1,), (2,), fingerprint="first")
    await story.generate(rollout_id, 0, (1,), (3,), fingerprint="dead branch")
    await story.begin(rollout_id)
    await story.ledger.calls.claim(rollout_id, 1, "first")
    await story.generate(rollout_id, 1, (1, 2, 3), (4,), after=first, fingerprint="second")

    settled = await story.ledger.rollouts.settle(selecting(rollout_id, 1, [0, 1]))

    assert (settled.model_calls, settled.attempts, settled.generated_calls, settled.replayed_calls) == (2, 2, 3, 1)


async def test_reported_calls_are_kept_as_what_they_are(story: Story, database: Database) -> None:
    rollout_id = await story.open_rollout()
    await story.settle(rollout_id, 1.0)

    calls = await story.ledger.calls.of_attempt(rollout_id, 0)
    assert [(call.outcome, call.prompt_tokens, call.generated_tokens, call.response_id) for call in calls] == [
        ("reported", 100, 10, "a"),
        ("reported", 60, 20, "b"),
    ]
    async with database.transaction() as session:
        selected = await session.scalars(
            select(SelectedResponse)
            .where(SelectedResponse.rollout_id == rollout_id)
            .order_by(SelectedResponse.position)
        )
        assert [(one.position, one.ordinal, one.segment, one.boundary) for one in selected] == [
            (0, 0, 0, None),
            (1, 1, 1, "compaction"),
        ]


async def test_selection_of_what_is_no_response_is_refused_and_nothing_is_written(
    story: Story, database: Database
) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.generate(rollout_id, 0)
    lease = await story.ledger.calls.claim(rollout_id, 0, "failing")
    await story.ledger.calls.fail(lease, "GenerationUnavailable", "connection refused")
    settle = story.ledger.rollouts.settle

    for ordinals in ([1], [0, 7], [0, 0]):
        with pytest.raises(SelectionInvalid, match="is no response of it, or is selected twice"):
            await settle(selecting(rollout_id, 0, ordinals))
    with pytest.raises(SelectionInvalid, match="it reports calls, but 1 responses of it are recorded"):
        await settle(valid(rollout_id, 0))
    jumping = (Selected(ordinal=0, segment=1, boundary="compaction"),)
    with pytest.raises(SelectionInvalid, match="segment 1 follows segment -1"):
        await settle(selecting(rollout_id, 0, [0]).model_copy(update={"selected": jumping}))

    async with database.transaction() as session:
        wanted = select(ModelCall.outcome).where(ModelCall.rollout_id == rollout_id).order_by(ModelCall.ordinal)
        assert list(await session.scalars(wanted)) == ["generated", "failed"]
    assert (await settle(selecting(rollout_id, 0, [0]))).state == "valid"
