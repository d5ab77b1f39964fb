"""NeMo-Gym's environment servers: an answer of HTTP 200 may be a failure, and the calls inside are recorded as ever."""

import pytest

from tests.failures.gym_process import EPISODE_TIMEOUT_S
from tests.failures.policy_server import CALLS, TOO_LONG, refusing
from tests.failures.world import World
from workflows.search_attributes import FAILURE_CLASS

pytestmark = pytest.mark.integration

WHOLE = "g" * CALLS


async def test_an_episode_is_valid_and_its_calls_are_recorded(world: World) -> None:
    ended = await world.run_group("episodes")
    assert [(one.calls, one.statuses, one.record.reward) for one in ended.sound] == [((WHOLE,), ("200",), 0.4)] * 2
    assert ended.counts == ("sealed", 2, 0, 0)
    (row,) = await world.rows(ended.sound[0].record)
    assert row.loss_mask.sum() == sum(len(tokens) for tokens, _ in ended.sound[0].sampled(0))


async def test_a_model_that_fails_inside_an_episode_costs_the_call(world: World) -> None:
    world.episode.breaks(3, refusing(500))
    ended = await world.run_group("episodes")
    (retried,), (sibling,) = ended.broken, ended.sound
    assert retried.statuses == ("200", "200")
    assert (retried.ends, retried.calls) == (["EnvironmentFailed infra", "settled"], ("gggf", "rrrgg"))
    assert retried.sampled(1)[:3] == retried.sampled(0)
    (failed, _) = retried.attempts
    assert failed.boundary == "environment"
    assert (failed.cause or "").startswith("stage agent: 500")
    assert sibling.calls == (WHOLE,)
    assert ended.counts == ("sealed", 2, 0, 0)


async def test_an_episode_that_the_environment_server_gives_up_costs_the_call(world: World) -> None:
    """On a busy machine more episodes than the one that is held may be given up, and earlier."""
    hold = world.episode.holds(3)
    patient = {"max_infra_attempts_per_prompt": 1000}
    group = await world.start_group(await world.new_run("hurried", failure=patient))
    ended = await group.end()
    await group.until_given_back()
    hold.release()
    assert ended.broken
    for one in ended.rollouts:
        assert one.record.state == "valid"
        assert one.ends == ["EnvironmentFailed infra"] * (len(one.attempts) - 1) + ["settled"]
        assert set(one.statuses) == {"200"}
        assert "".join(one.calls).count("g") == CALLS  # nothing that is recorded was sampled again
        for failed in one.attempts[:-1]:
            recorded = one.sampled(failed.attempt)
            assert one.sampled(-1)[: len(recorded)] == recorded
            assert failed.cause == "Episode timed out"
            assert failed.ended_at is not None
            assert (failed.ended_at - failed.started_at).total_seconds() >= EPISODE_TIMEOUT_S
    assert ended.counts == ("sealed", 2, 0, 0)


async def test_a_terminal_failure_is_the_tasks_fault(world: World) -> None:
    recipe = await world.new_run("episodes", {"unfit": True}, failure={"max_data_attempts_per_prompt": 2})
    ended = await (await world.start_group(recipe)).end()
    assert [one.ends for one in ended.rollouts] == [["EnvironmentRefused data"] * 2] * 2
    assert [one.statuses for one in ended.rollouts] == [("200", "200")] * 2
    assert "stage seed: 422" in (ended.rollouts[0].attempts[0].cause or "")
    assert ended.counts == ("dropped", 0, 0, 2)
    assert ended.result.bucket == "data"


async def test_a_row_that_the_protocol_does_not_take_is_refused(world: World) -> None:
    row = {"goal": "up", "task_data": {"goal": "down"}}
    recipe = await world.new_run("episodes", row, failure={"max_data_attempts_per_prompt": 1})
    ended = await (await world.start_group(recipe, 1)).end()
    (refused,) = ended.rollouts
    assert (refused.statuses, refused.ends) == (("422",), ["AgentRefused data"])
    assert "Conflicting task field 'goal'" in (refused.attempts[0].cause or "")


async def test_a_prompt_that_is_too_long_masks_the_episode(world: World) -> None:
    world.episode.breaks(3, refusing(400, TOO_LONG), times=None)
    ended = await world.run_group("episodes")
    (masked,), (sibling,) = ended.broken, ended.sound
    assert (masked.statuses, masked.ends, masked.calls) == (("200",), ["settled"], ("gggf",))
    assert (masked.record.state, masked.record.reason) == ("masked", "context_overflow")
    assert sibling.calls == (WHOLE,)
    assert ended.counts == ("sealed", 1, 1, 0)


@pytest.mark.parametrize("agent", ["simple", "compacting", "episodes"])
async def test_a_judge_that_is_away_is_asked_again_and_nothing_is_sampled_again(world: World, agent: str) -> None:
    await world.gym.verifier("lose_judge_once")
    ended = await world.run_group(agent)
    (retried,), (sibling,) = ended.broken, ended.sound
    assert retried.statuses == ("200", "200")
    assert retried.ends == ["judge_failed infra", "settled"]
    assert (retried.attempts[0].boundary, retried.attempts[0].cause) == ("environment", "judge is away")
    assert [calls.replace("m", "") for calls in retried.calls] == [WHOLE, "r" * CALLS]
    assert retried.record.reward == sibling.record.reward == 0.4
    assert ended.counts == ("sealed", 2, 0, 0)


async def test_a_judge_that_stays_away_loses_the_rollout_and_an_operator_can_search_for_it(world: World) -> None:
    says = {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed"}
    recipe = await world.new_run("episodes", {"says": says}, failure={"max_infra_attempts_per_prompt": 2})
    group = await world.start_group(recipe, 1)
    ended = await group.end()
    assert [one.ends for one in ended.rollouts] == [["judge_failed infra"] * 2]
    assert (ended.counts, ended.result.bucket) == (("dropped", 0, 0, 1), "infra")
    assert (await group.handle.describe()).typed_search_attributes.get(FAILURE_CLASS) == ["judge_failed"]


async def test_an_agent_that_asks_for_no_verification_trains_nothing(world: World) -> None:
    ended = await world.run_group("unverified", size=1)
    (masked,) = ended.rollouts
    assert (masked.ends, masked.record.state) == (["settled"], "masked")
    assert (masked.record.reason or "").startswith("verification_skipped")
    assert masked.record.evidence_digest is None


async def test_a_judge_that_cannot_be_understood_masks_and_a_failure_beside_a_reward_does_not(world: World) -> None:
    says = {"mask_sample": True, "failure_kind": "judge_unparseable", "failure_reason": "no number"}
    recipe = await world.new_run("episodes", {"says": says})
    ended = await (await world.start_group(recipe, 1)).end()
    assert ended.rollouts[0].record.reason == "judge_unparseable: no number"
    recipe = await world.new_run("episodes", {"says": {"failure_kind": "session_release_failed"}})
    ended = await (await world.start_group(recipe, 1)).end()
    assert (ended.rollouts[0].record.state, ended.rollouts[0].record.reward) == ("valid", 0.4)
