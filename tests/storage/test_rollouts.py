"""Rollouts settle once, by their current attempt; what comes later or twice changes nothing."""

import asyncio
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from storage.errors import AttemptFenced, SealConflict, UnknownAttempt, UnknownRollout
from storage.ledger import Ledger
from storage.records import BegunAttempt, RolloutRecord, SettledRollout, Settlement
from tests.storage.building import CALLS, Story, start_run, valid

pytestmark = pytest.mark.integration


async def stored(story: Story, rollout_id: str) -> RolloutRecord:
    group = await story.ledger.groups.get(rollout_id.rsplit("/", 1)[0])
    return next(rollout for rollout in group.rollouts if rollout.rollout_id == rollout_id)


async def test_settled_rollout_is_what_the_attempt_reported(story: Story) -> None:
    rollout_id = await story.open_rollout()
    settled = await story.ledger.rollouts.settle(valid(rollout_id, await story.begin(rollout_id), reward=0.75))

    assert settled == SettledRollout(
        rollout_id=rollout_id,
        group_id=story.group_id(0, 0),
        index=0,
        state="valid",
        attempt=0,
        reward=0.75,
        truncated=False,
        reason=None,
        policy_version_min=0,
        policy_version_max=0,
        evidence_digest="e" * 64,
        segments=2,
        model_calls=len(CALLS),
        attempts=1,
        generated_calls=len(CALLS),
        replayed_calls=0,
    )
    assert await story.ledger.rollouts.settled([story.group_id(0, 0)]) == [settled]


async def test_settled_rollout_is_not_begun_again(story: Story) -> None:
    rollout_id = await story.open_rollout()
    settled = await story.ledger.rollouts.settle(valid(rollout_id, await story.begin(rollout_id)))

    assert await story.try_to_begin(rollout_id) == settled
    assert len((await stored(story, rollout_id)).attempts) == 1


async def test_settlements_at_the_same_time_agree_on_one_of_them(story: Story) -> None:
    rollout_id = await story.open_rollout()
    attempt = await story.begin(rollout_id)

    answers = await asyncio.gather(
        *(story.ledger.rollouts.settle(valid(rollout_id, attempt, reward=float(number % 2))) for number in range(6)),
        return_exceptions=True,
    )

    settled = [answer for answer in answers if isinstance(answer, SettledRollout)]
    assert len(settled) == 3
    assert all(answer == settled[0] for answer in settled)
    assert sum(isinstance(answer, SealConflict) for answer in answers) == 3


async def test_attempts_begun_at_the_same_time_leave_one_running(story: Story) -> None:
    rollout_id = await story.open_rollout()

    attempts = await asyncio.gather(*(story.begin(rollout_id) for _ in range(6)))

    assert sorted(attempts) == list(range(6))
    rollout = await stored(story, rollout_id)
    assert rollout.current_attempt == 5
    assert [attempt.state for attempt in rollout.attempts] == ["abandoned"] * 5 + ["running"]


async def test_late_answer_of_an_older_attempt_is_refused_and_changes_nothing(story: Story) -> None:
    rollout_id = await story.open_rollout()
    older, newer = await story.begin(rollout_id), await story.begin(rollout_id)
    before = await stored(story, rollout_id)

    with pytest.raises(AttemptFenced, match=r"Attempt 0 .* abandoned, the current attempt is 1"):
        await story.ledger.rollouts.settle(valid(rollout_id, older, reward=0.0))

    assert await stored(story, rollout_id) == before
    assert (await story.ledger.rollouts.settle(valid(rollout_id, newer, reward=1.0))).reward == 1.0


async def test_late_answer_after_the_settlement_is_refused(story: Story) -> None:
    rollout_id = await story.open_rollout()
    older, newer = await story.begin(rollout_id), await story.begin(rollout_id)
    await story.ledger.rollouts.settle(valid(rollout_id, newer, reward=1.0))
    before = await stored(story, rollout_id)

    with pytest.raises(AttemptFenced, match=r"Attempt 0 .* abandoned, the current attempt is 1"):
        await story.ledger.rollouts.settle(valid(rollout_id, older, reward=1.0))
    assert await stored(story, rollout_id) == before


async def test_attempt_that_reported_a_failure_cannot_settle(story: Story) -> None:
    rollout_id = await story.open_rollout()
    attempt = await story.fail(rollout_id)

    with pytest.raises(AttemptFenced, match="it is failed"):
        await story.ledger.rollouts.settle(valid(rollout_id, attempt))


async def test_failure_is_kept_as_it_was_first_reported(story: Story) -> None:
    rollout_id = await story.open_rollout()
    attempt = await story.fail(rollout_id)

    again = await story.ledger.rollouts.fail_attempt(rollout_id, attempt, "model", "data", "other", "another cause")

    assert (again.state, again.boundary, again.bucket, again.failure_class) == ("failed", "agent", "infra", "http_500")
    assert again.cause == "the agent said 500"


async def test_failure_of_a_settled_attempt_is_not_one(story: Story) -> None:
    rollout_id = await story.open_rollout()
    attempt = await story.begin(rollout_id)
    await story.ledger.rollouts.settle(valid(rollout_id, attempt))

    ended = await story.ledger.rollouts.fail_attempt(rollout_id, attempt, "agent", "infra", "timeout", "too late")

    assert (ended.state, ended.failure_class) == ("settled", None)


async def test_masked_rollout_keeps_its_reason_and_needs_no_evidence(story: Story) -> None:
    rollout_id = await story.open_rollout()
    attempt = await story.begin(rollout_id)

    masked = await story.ledger.rollouts.settle(
        Settlement(rollout_id=rollout_id, attempt=attempt, state="masked", truncated=True, reason="row_too_long")
    )

    assert (masked.state, masked.truncated, masked.reason, masked.attempt) == ("masked", True, "row_too_long", 0)


async def test_incomplete_settlement_is_refused(story: Story) -> None:
    rollout_id = await story.open_rollout()
    attempt = await story.begin(rollout_id)
    settle = story.ledger.rollouts.settle

    with pytest.raises(ValueError, match="cannot be valid without a reward"):
        await settle(valid(rollout_id, attempt).model_copy(update={"evidence_digest": None}))
    with pytest.raises(ValueError, match="cannot be masked without a reason"):
        await settle(Settlement(rollout_id=rollout_id, attempt=attempt, state="masked"))
    with pytest.raises(ValidationError, match="finite"):
        valid(rollout_id, attempt, reward=float("nan"))
    assert (await stored(story, rollout_id)).state == "open"


async def test_rollout_given_up_is_lost_and_its_running_attempt_abandoned(story: Story) -> None:
    rollout_id = await story.open_rollout()
    attempt = await story.begin(rollout_id)

    lost = await story.ledger.rollouts.lose(rollout_id, "lost", "5 failures of the infrastructure")

    assert (lost.state, lost.attempt, lost.model_calls) == ("lost", 0, 0)
    assert (await stored(story, rollout_id)).attempts[0].state == "abandoned"
    with pytest.raises(AttemptFenced, match="it is abandoned"):
        await story.ledger.rollouts.settle(valid(rollout_id, attempt))
    assert await story.try_to_begin(rollout_id) == lost


async def test_rollout_that_no_worker_began_is_lost_without_an_attempt(story: Story) -> None:
    rollout_id = await story.open_rollout()
    assert (await story.ledger.rollouts.lose(rollout_id, "lost", "no worker")).attempt is None


async def test_valid_rollout_cannot_be_lost(story: Story) -> None:
    rollout_id = await story.open_rollout()
    settled = await story.ledger.rollouts.settle(valid(rollout_id, await story.begin(rollout_id)))

    assert await story.ledger.rollouts.lose(rollout_id, "lost", "too late") == settled


async def test_lost_rollout_may_be_masked_but_not_the_other_way(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.ledger.rollouts.lose(rollout_id, "lost", "budget used up")

    masked = await story.ledger.rollouts.lose(rollout_id, "masked", "by the operator")

    assert (masked.state, masked.reason) == ("masked", "by the operator")
    assert await story.ledger.rollouts.lose(rollout_id, "lost", "again") == masked


async def test_operator_masks_a_rollout_that_runs_and_its_attempt_is_fenced(story: Story) -> None:
    rollout_id = await story.open_rollout()
    attempt = await story.begin(rollout_id)

    masked = await story.ledger.rollouts.lose(rollout_id, "masked", "masked by alice: its page is gone")

    assert (masked.state, masked.reason) == ("masked", "masked by alice: its page is gone")
    with pytest.raises(AttemptFenced, match="it is abandoned"):
        await story.ledger.rollouts.settle(valid(rollout_id, attempt))
    assert (await story.ledger.groups.set_state(story.group_id(0, 0), "sealed")).state == "sealed"


async def test_settled_keeps_the_order_of_the_groups_and_leaves_open_rollouts_out(story: Story) -> None:
    first, second = await story.sealed_group([0.0, 1.0], slot=0), await story.group(slot=1)
    await story.settle(second.rollouts[1].rollout_id, 0.5)

    settled = await story.ledger.rollouts.settled([second.group_id, first.group_id])

    assert [rollout.reward for rollout in settled] == [0.5, 0.0, 1.0]


async def test_unknown_rollout_and_attempt_are_named(story: Story) -> None:
    with pytest.raises(UnknownRollout, match="nowhere"):
        await story.begin("nowhere")
    rollout_id = await story.open_rollout()
    with pytest.raises(UnknownAttempt, match="no attempt 3"):
        await story.ledger.rollouts.settle(valid(rollout_id, 3))


Event = tuple[Literal["begin", "settle", "fail", "lose"], int]
event = st.tuples(st.sampled_from(["begin", "begin", "settle", "fail", "lose"]), st.integers(0, 3))


@settings(max_examples=20, deadline=None)
@given(events=st.lists(event, max_size=12))
async def test_whatever_happens_a_rollout_settles_once_by_its_newest_attempt(
    ledger: Ledger, events: list[Event]
) -> None:
    story = Story(ledger, (await start_run(ledger)).run_id)
    rollout_id = await story.open_rollout()
    states: list[str] = []
    outcome: tuple[str, int | None] | None = None

    for what, number in events:
        if what == "begin":
            begun = await story.try_to_begin(rollout_id)
            if outcome is None:
                assert isinstance(begun, BegunAttempt)
                assert begun.attempt == len(states)
                states = ["abandoned" if state == "running" else state for state in states] + ["running"]
            else:
                assert isinstance(begun, SettledRollout)
        elif what == "lose":
            await ledger.rollouts.lose(rollout_id, "lost", "given up")
            if outcome is None:
                states = ["abandoned" if state == "running" else state for state in states]
                outcome = ("lost", len(states) - 1 if states else None)
        elif number < len(states) and what == "fail":
            await ledger.rollouts.fail_attempt(rollout_id, number, "model", "infra", "http_500", "cause")
            if states[number] == "running":
                states[number] = "failed"
        elif number < len(states) and (
            states[number] == "settled" or (outcome is None and states[number] == "running")
        ):
            await ledger.rollouts.settle(valid(rollout_id, number))
            states[number], outcome = "settled", ("valid", number)
        elif number < len(states):
            with pytest.raises(AttemptFenced):
                await ledger.rollouts.settle(valid(rollout_id, number))

    rollout = await stored(story, rollout_id)
    assert [attempt.state for attempt in rollout.attempts] == states
    settled = await ledger.rollouts.settled([story.group_id(0, 0)])
    assert [(one.state, one.attempt) for one in settled] == ([] if outcome is None else [outcome])
