"""`rollouts.evidence: response`: the agent's own answer trains, as long as no server changed while it was made."""

import pytest

from storage.records import AttemptCall
from tests.activities.world import World, call, failing
from tests.rollouts.agent_server import Exchange, answering
from tests.rollouts.building import answer, item, real_answer

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
async def answering_world(world: World) -> None:
    """A run that believes its agents."""
    await world.use(rollouts={"evidence": "response"})
    world.agent.reply = answering(200, real_answer("simple"))


async def reported(world: World, rollout_id: str) -> list[AttemptCall]:
    return await world.ledger.calls.of_attempt(rollout_id, 0)


async def test_reported_calls_are_stored_and_counted(world: World) -> None:
    request = world.rollout(await world.open_group())
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.model_calls, result.segments) == ("valid", 9, 1)
    assert (result.attempts, result.generated_calls, result.replayed_calls) == (1, 9, 0)
    assert {made.outcome for made in await reported(world, request.rollout_id)} == {"reported"}


async def test_server_restarted_during_the_attempt_voids_its_tokens(world: World) -> None:
    async def restart_and_refit(exchange: Exchange) -> None:
        world.vllm.restart()
        world.vllm.label, world.vllm.digest = "policy-0", "d" * 64
        await exchange.answer(200, real_answer("simple"))

    request = world.rollout(await world.open_group())
    world.agent.reply = restart_and_refit
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert failure.failure_class == "PolicyMismatch"
    assert "started again during the attempt" in failure.cause
    assert (await world.stored(request)).state == "open"


async def test_refit_during_the_attempt_voids_its_tokens(world: World) -> None:
    async def refit(exchange: Exchange) -> None:
        world.vllm.label = "policy-1"
        await exchange.answer(200, real_answer("simple"))

    world.agent.reply = refit
    failure, _ = await failing(world.rollouts.run_rollout, world.rollout(await world.open_group()))
    assert failure.failure_class == "PolicyMismatch"


async def test_context_overflow_masks_the_rollout(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = answering(200, real_answer("context_overflow"))
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.reason, result.model_calls) == ("masked", "context_overflow", 0)
    stored = await world.stored(request)
    assert (stored.state, stored.evidence_digest, stored.truncated) == ("masked", None, True)


async def test_context_overflow_is_sampled_afresh_where_the_run_wants_it(world: World) -> None:
    await world.use(rollouts={"evidence": "response", "on_content_failure": "resample"})
    world.agent.reply = answering(200, real_answer("context_overflow"))
    failure, _ = await failing(world.rollouts.run_rollout, world.rollout(await world.open_group()))
    assert (failure.failure_class, failure.bucket) == ("ContentFailure", "data")


async def test_undeclared_rewrite_is_an_error_and_no_mask(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = answering(200, answer(item([1], [2]), item([3], [4])))
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.bucket) == ("IntegrityError", "data")
    assert (await world.stored(request)).state == "open"


async def test_rewritten_episode_keeps_its_beginning_and_its_reward_where_the_run_wants_it(world: World) -> None:
    await world.use(rollouts={"evidence": "response", "truncate_noncontiguous_episodes": True})
    request = world.rollout(await world.open_group())
    world.agent.reply = answering(200, answer(item([1], [2]), item([3], [4]), reward=0.75))
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.reward) == ("valid", 0.75)
    assert (result.model_calls, result.generated_calls) == (1, 2)


async def test_model_server_that_records_is_not_overruled_by_the_answer(world: World) -> None:
    world.agent.reply = world.model.serving(real_answer("simple"))
    failure, _ = await failing(world.rollouts.run_rollout, world.rollout(await world.open_group()))
    assert failure.failure_class == "SelectionInvalid"
    assert "9 responses of it are recorded" in failure.cause
