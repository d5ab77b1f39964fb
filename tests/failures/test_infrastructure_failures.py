"""The infrastructure fails an attempt: the next one replays what is recorded, and siblings that are done stay done.

These are the lines "agent error, timeout, transport error" of NeMo-RL's failure table, in which they cost a group, and
"operator cancellation". What a dropped group costs its step and its run is told in tests/workflows.
"""

import asyncio
from typing import Any

import asyncpg
import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError

from tests.failures.policy_server import CALLS, refusing
from tests.failures.world import DEADLINE_S, Ended, Seen, World
from workflows.requests import RetryGroup

pytestmark = pytest.mark.integration

WHOLE = "g" * CALLS
GIVE_UP = """
SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
AGENTS = pytest.mark.parametrize("agent", ["simple", "compacting"])


def replayed(world: World, ended: Ended, status: str, end: str, wasted: int = 0) -> Seen:
    """The only rollout with a second attempt. Nothing recorded was sampled again, its sibling was left alone.

    `wasted`: samples of the policy that nobody could use.
    """
    (retried,), (sibling,) = ended.broken, ended.sound
    assert retried.record.state == "valid"
    assert retried.ends == [end, "settled"]
    assert retried.statuses == (status, "200")
    assert [one.fresh_reason for one in retried.attempts] == [None, None]
    recorded = retried.sampled(0)
    assert retried.sampled(1)[: len(recorded)] == recorded
    assert retried.calls[1].replace("m", "") == "r" * len(recorded) + "g" * (CALLS - len(recorded))
    assert (retried.settled.generated_calls, retried.settled.replayed_calls) == (CALLS, len(recorded))
    assert (sibling.statuses, sibling.calls[0].replace("m", "")) == (("200",), WHOLE)
    assert ended.counts == ("sealed", 2, 0, 0)
    assert world.vllm.samples == 2 * CALLS + wasted
    return retried


@pytest.mark.parametrize(("agent", "status"), [("simple", 500), ("compacting", 500), ("simple", 429), ("simple", 408)])
async def test_a_model_that_answers_with_an_error_costs_the_call(world: World, agent: str, status: int) -> None:
    world.episode.breaks(3, refusing(status))
    retried = replayed(world, await world.run_group(agent), "500", "AgentFailed infra")
    assert retried.calls[0].replace("m", "") == "gggf"
    assert retried.events[0][-1].failure_class == "GenerationUnavailable"


async def test_an_answer_that_vllm_gives_up_half_way_is_not_recorded(world: World) -> None:
    world.vllm.abort_next()
    retried = replayed(world, await world.run_group("simple"), "500", "AgentFailed infra")
    assert retried.events[0][-1].failure_class == "GenerationAborted"


async def test_a_connection_to_vllm_that_breaks_is_made_again_within_the_call(world: World) -> None:
    world.vllm.drop_next()
    ended = await world.run_group("simple")
    assert [one.calls for one in ended.sound] == [(WHOLE,)] * 2
    assert world.vllm.samples == 2 * CALLS


@AGENTS
async def test_an_agent_that_misses_its_deadline_costs_the_call(world: World, agent: str) -> None:
    hold = world.episode.holds(3)
    group = await world.start_group(await world.new_run(agent))
    await hold.reached()
    await group.until(lambda rollouts: any(one.state == "valid" for one in rollouts))  # the sibling is done
    await world.agents.hurry(0.2)
    retried = replayed(world, await group.end(), "RolloutTimeout", "RolloutTimeout infra")
    await group.until_given_back()
    hold.release()
    assert retried.calls[0].replace("m", "") == "ggg"


async def test_a_gym_process_that_is_killed_costs_the_call(world: World) -> None:
    hold = world.episode.holds(3)
    patient = {"max_infra_attempts_per_prompt": 1000, "max_backoff_s": 0.5}
    group = await world.start_group(await world.new_run("compacting", failure=patient))
    await hold.reached()
    await group.until(lambda rollouts: any(one.state == "valid" for one in rollouts))  # the sibling is done
    world.gym.kill()
    await world.gym.start()
    hold.release()
    ended = await group.end()
    (retried,), (sibling,) = ended.broken, ended.sound
    assert retried.calls[0].replace("m", "") == "ggg"
    assert set(retried.ends[:-1]) == {"AgentUnavailable infra"}
    assert set(retried.calls[1:-1]) <= {""}  # while nobody listened
    assert retried.calls[-1].replace("m", "") == "rrrgg"
    assert retried.sampled(len(retried.attempts) - 1)[:3] == retried.sampled(0)
    assert sibling.calls[0].replace("m", "") == WHOLE
    assert ended.counts == ("sealed", 2, 0, 0)


@AGENTS
async def test_a_verifier_that_fails_costs_no_model_call(world: World, agent: str) -> None:
    await world.gym.verifier("refuse_once")
    retried = replayed(world, await world.run_group(agent), "500", "AgentFailed infra")
    assert [calls.replace("m", "") for calls in retried.calls] == [WHOLE, "r" * CALLS]


async def test_a_ledger_that_gives_a_write_up_keeps_the_response_from_the_agent(
    world: World, storage: dict[str, Any]
) -> None:
    """PostgreSQL does so when `storage.statement_timeout_s` is over; here it is told to."""
    hold = world.episode.holds(3, unanswered=False)
    group = await world.start_group(await world.new_run("simple"))
    await hold.reached()
    await group.until(lambda rollouts: any(one.state == "valid" for one in rollouts))  # the sibling is done
    administration = await asyncpg.connect(storage["dsn"])
    async with administration.transaction():
        await administration.execute("lock table model_calls in exclusive mode")
        hold.release()
        async with asyncio.timeout(DEADLINE_S):
            while await administration.fetch(GIVE_UP) or all(
                one.attempts[0].state != "failed" for one in await group.rollouts()
            ):
                await asyncio.sleep(0.02)
    await administration.close()
    retried = replayed(world, await group.end(), "500", "AgentFailed infra", wasted=1)
    assert retried.calls[0] == "ggg"
    assert "ledger_unavailable" in (retried.attempts[0].cause or "")


async def test_an_episode_that_goes_on_after_a_failed_call_is_not_believed(world: World) -> None:
    async with world.verifying("simple") as group:
        world.episode.breaks(0, refusing(500))
        await group.say("an aside", expect=503)
    ended = await group.end()
    (retried,) = ended.broken
    assert (retried.statuses, retried.ends) == (("200", "200"), ["ModelCallFailed infra", "settled"])
    assert retried.calls == (WHOLE + "f", "r" * CALLS)


async def test_a_rollout_whose_budget_is_used_up_is_lost_and_its_sibling_is_kept(world: World) -> None:
    world.episode.breaks(3, refusing(500), times=None)
    ended = await world.run_group("simple", failure={"max_infra_attempts_per_prompt": 2})
    (lost,), (sibling,) = ended.broken, ended.sound
    assert lost.record.state == "lost"
    assert (lost.ends, lost.calls) == (["AgentFailed infra"] * 2, ("gggf", "rrrf"))
    assert (lost.settled.generated_calls, lost.settled.replayed_calls) == (3, 3)
    assert sibling.calls == (WHOLE,)
    assert ended.counts == ("sealed", 1, 0, 1)


async def test_a_group_that_lost_every_rollout_is_dropped_for_the_infrastructure(world: World) -> None:
    world.vllm.policy = lambda messages: refusing(500)() or world.episode(messages)
    ended = await world.run_group("simple", failure={"max_infra_attempts_per_prompt": 1})
    assert ended.counts == ("dropped", 0, 0, 2)
    assert (ended.result.bucket, ended.group.state) == ("infra", "dropped")


async def test_a_group_that_lost_every_rollout_can_be_parked_and_its_retry_replays(world: World) -> None:
    world.vllm.policy = lambda messages: _until_call(messages, 2) or world.episode(messages)
    parked = {"max_infra_attempts_per_prompt": 1, "on_dropped_prompt": "park"}
    group = await world.start_group(await world.new_run("simple", failure=parked))
    await group.until_parked()
    world.vllm.policy = world.episode
    await group.handle.execute_update("retry", RetryGroup(actor="a test", reason="vLLM is well again"))
    ended = await group.end()
    assert ended.counts == ("sealed", 2, 0, 0)
    assert [one.calls for one in ended.rollouts] == [("ggf", "rrggg")] * 2


async def test_an_operator_s_cancellation_touches_no_budget(world: World) -> None:
    hold = world.episode.holds(3)
    group = await world.start_group(await world.new_run("simple"))
    await hold.reached()
    await group.until(lambda rollouts: any(one.state == "valid" for one in rollouts))
    await group.handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await group.handle.result()
    await group.until_given_back()
    hold.release()
    assert (await group.handle.describe()).status == WorkflowExecutionStatus.CANCELED
    stored = await world.ledger.groups.get(group.id)
    assert (stored.state, stored.bucket, stored.reason) == ("dropped", None, "cancelled")
    assert sorted(len(rollout.attempts) for rollout in stored.rollouts) == [1, 1]
    assert {attempt.bucket for rollout in stored.rollouts for attempt in rollout.attempts} == {None}


def _until_call(messages: list[dict[str, Any]], call: int) -> None:
    if sum(message["role"] == "tool" for message in messages) >= call:
        refusing(500)()
