"""What a later attempt takes over: everything, nothing, or there is no later attempt; and nothing that is too old."""

import pytest
from temporalio.exceptions import ApplicationError

from tests.failures.policy_server import CALLS, refusing
from tests.failures.world import World

pytestmark = pytest.mark.integration

WHOLE = "g" * CALLS


@pytest.mark.parametrize(
    "recovery",
    [
        {"default": "fresh"},
        {"default": "none", "agents": {"simple": "fresh"}},
        {"default": "replay", "agents": {"simple": "none"}, "tasks": {"coin": "fresh"}},
    ],
)
async def test_fresh_samples_everything_again(world: World, recovery: dict[str, object]) -> None:
    world.episode.breaks(3, refusing(500))
    ended = await world.run_group("simple", row={"task_name": "coin"}, rollouts={"recovery": recovery})
    (retried,), (sibling,) = ended.broken, ended.sound
    assert (retried.ends, retried.calls) == (["AgentFailed infra", "settled"], ("gggf", WHOLE))
    assert [(one.sample, one.fresh_reason) for one in retried.attempts] == [(0, None), (1, "recovery: fresh")]
    assert not set(retried.sampled(0)) & set(retried.sampled(1))
    assert sibling.calls == (WHOLE,)
    assert ended.counts == ("sealed", 2, 0, 0)


async def test_none_loses_the_rollout_at_its_first_failure(world: World) -> None:
    world.episode.breaks(3, refusing(500))
    ended = await world.run_group("simple", rollouts={"recovery": {"default": "none"}})
    (lost,), (sibling,) = ended.broken, ended.sound
    assert (lost.ends, lost.calls, lost.record.state) == (["AgentFailed infra"], ("gggf",), "lost")
    assert sibling.calls == (WHOLE,)
    assert ended.counts == ("sealed", 1, 0, 1)


@pytest.mark.parametrize(("versions", "calls"), [(1, "rrrgg"), (2, WHOLE)])
async def test_responses_of_weights_that_are_too_old_are_not_replayed(world: World, versions: int, calls: str) -> None:
    world.episode.breaks(3, refusing(500))
    recipe = await world.new_run("simple", rollouts={"max_replay_age_versions": 1})
    request = await world.open_rollout(recipe)
    with pytest.raises(ApplicationError, match="HTTP 500"):
        await world.attempt(request)
    world.vllm.version = f"policy-{versions}"
    result = await world.attempt(request.model_copy(update={"policy_version": versions}))
    _, (rollout,) = await world.seen(request.group_id)
    assert (result.state, rollout.calls) == ("valid", ("gggf", calls))
    reason = rollout.attempts[1].fresh_reason
    if versions == 1:
        assert (reason, rollout.record.policy_version_min) == (None, 0)
    else:
        assert "of policy version 0, the attempt of 2" in (reason or "")
        assert rollout.record.policy_version_min == 2
