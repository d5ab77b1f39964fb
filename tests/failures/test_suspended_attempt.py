"""An attempt that is only suspended is no threat: when it wakes up, the database refuses whatever it does."""

import asyncio

import pytest
from temporalio.exceptions import ApplicationError

from storage.transcripts import Transcript
from tests.failures.gym_process import GymProcess
from tests.failures.policy_server import CALLS
from tests.failures.world import World
from workflows.messages import Failure

pytestmark = pytest.mark.integration


async def test_a_suspended_attempt_wakes_up_after_the_next_one_finished(world: World, other_gym: GymProcess) -> None:
    recipe = await world.new_run("simple")
    request = await world.open_rollout(recipe)
    hold = world.episode.holds(3, unanswered=False)
    suspended = asyncio.create_task(world.attempt(request, other_gym))
    await hold.reached()
    other_gym.suspend()
    ended = await (await world.start_group(recipe, 1)).end()
    hold.release()
    other_gym.wake()

    refused = await _failure(suspended)
    assert (refused.failure_class, refused.attempt) == ("AgentFailed", 0)
    assert "attempt_fenced" in refused.cause
    late = await other_gym.call_model(request.rollout_id, "still there")
    assert (late.status_code, "attempt_fenced" in late.text) == (404, True)
    assert await world.seen(request.group_id) == (ended.group, ended.rollouts)
    assert len(await world.ledger.calls.leases(request.rollout_id, 0)) == 4
    (rollout,) = ended.rollouts
    assert (rollout.record.settled_attempt, rollout.calls) == (1, ("ggg", "rrrgg"))
    assert ended.counts == ("sealed", 1, 0, 0)

    first, second = [await world.ledger.transcripts.of(request.rollout_id, attempt) for attempt in (0, 1)]
    assert (first.attempt.state, _told(first)) == ("abandoned", ["generated"] * 3 + ["abandoned"])
    assert (second.attempt.state, _told(second)) == ("settled", ["replayed"] * 3 + ["generated"] * 2)
    assert [turn.selected for turn in first.turns] == [False] * 4
    assert [turn.selected for turn in second.turns] == [True] * CALLS
    (row,) = await world.rows(rollout.record)
    assert [token for turn in second.turns for token in turn.sampled_token_ids] == row.tokens[
        row.loss_mask == 1
    ].tolist()


async def test_an_answer_that_comes_after_the_next_attempt_finished_is_refused(
    world: World, other_gym: GymProcess
) -> None:
    recipe = await world.new_run("compacting")
    request = await world.open_rollout(recipe)
    await other_gym.verifier("hold")
    suspended = asyncio.create_task(world.attempt(request, other_gym))
    await other_gym.until_verifying()
    other_gym.suspend()
    ended = await (await world.start_group(recipe, 1)).end()
    other_gym.wake()
    await other_gym.verifier("open")

    refused = await _failure(suspended)
    assert (refused.failure_class, refused.attempt) == ("AttemptFenced", 0)
    assert await world.seen(request.group_id) == (ended.group, ended.rollouts)
    (rollout,) = ended.rollouts
    assert (rollout.record.settled_attempt, rollout.settled.replayed_calls) == (1, CALLS)
    first, second = [await world.ledger.transcripts.of(request.rollout_id, attempt) for attempt in (0, 1)]
    assert (first.attempt.state, second.attempt.state) == ("abandoned", "settled")
    assert not any(turn.selected for turn in first.turns)


async def _failure(attempt: asyncio.Task[object]) -> Failure:
    with pytest.raises(ApplicationError) as refused:
        await attempt
    (failure,) = refused.value.details
    assert isinstance(failure, Failure)
    return failure


def _told(transcript: Transcript) -> list[str]:
    return [turn.outcome for turn in transcript.turns]
