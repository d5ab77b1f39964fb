"""A retry costs the call that failed, where the infrastructure failed it; content is masked or sampled afresh."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.training.batch import TrainingBatch
from tests.activities.model_server import Conversation
from tests.activities.world import World, call, failing, start_run
from tests.rollouts.agent_server import Exchange, Reply, answering
from tests.rollouts.building import answer, item, real_answer
from workflows.messages import RolloutResult, RunRollout

pytestmark = pytest.mark.integration

HTTP_500 = answering(500, "tool crashed")
ONE_TURN = answer(item([1], [2]))
TWO_TURNS = answer(item([1], [2]), item([1, 2, 3], [4]))


async def reset(exchange: Exchange) -> None:
    """The agent is killed."""
    exchange.reset()


def playing(world: World, story: Callable[[Conversation], Awaitable[None]], then: Reply = HTTP_500) -> Reply:
    """An agent that makes the calls of a story."""

    async def reply(exchange: Exchange) -> None:
        await story(world.model.attempt(exchange))
        await then(exchange)

    return reply


async def rows_of(world: World, request: RunRollout) -> list[tuple[list[int], list[int], list[float]]]:
    digest = (await world.stored(request)).evidence_digest
    assert digest is not None
    rows = TrainingBatch.from_bytes(await world.blobs.get(digest)).rows
    return [(row.tokens.tolist(), row.loss_mask.tolist(), row.log_probs.tolist()) for row in rows]


@pytest.mark.parametrize("failure", [HTTP_500, reset], ids=["agent error", "killed agent"])
async def test_retry_generates_only_what_is_not_recorded(world: World, failure: Reply) -> None:
    whole = world.rollout(await world.open_group(slot=1))
    await call(world.rollouts.run_rollout, whole)
    request = world.rollout(await world.open_group())
    world.model.generated = world.model.replayed = 0
    world.agent.reply = world.model.serving(real_answer("compaction"), then=failure, calls=6)
    await failing(world.rollouts.run_rollout, request)
    world.agent.reply = world.model.serving(real_answer("compaction"))
    result = await call(world.rollouts.run_rollout, request)
    assert (world.model.generated, world.model.replayed) == (9, 6)
    assert (result.state, result.attempt, result.attempts) == ("valid", 1, 2)
    assert (result.model_calls, result.generated_calls, result.replayed_calls) == (9, 9, 6)
    assert await rows_of(world, request) == await rows_of(world, whole)


async def test_worker_says_what_an_attempt_replays(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = world.model.serving(TWO_TURNS, then=HTTP_500)
    await failing(world.rollouts.run_rollout, request)
    world.agent.reply = world.model.serving(TWO_TURNS)
    environment, said = ActivityEnvironment(), list[Any]()
    environment.on_heartbeat = lambda *details: said.append(details)
    await environment.run(world.rollouts.run_rollout, request)
    assert ("attempt 1 replays 2 recorded responses",) in said


async def overflow(conversation: Conversation) -> None:
    await conversation.call([1], [2])
    await conversation.fail([1, 2, 3], "ContextOverflow", "HTTP 400")


async def no_tokens(conversation: Conversation) -> None:
    await conversation.fail([1], "NoGeneration", "no tokens")


async def guard(conversation: Conversation) -> None:
    await conversation.call([1], [2])
    await conversation.measure(801)


CONTENT = {"context_overflow": overflow, "no_generation": no_tokens, "guard_refused": guard}


@pytest.mark.parametrize(("reason", "story"), CONTENT.items(), ids=list(CONTENT))
async def test_content_failure_masks_the_rollout_at_once(
    world: World, reason: str, story: Callable[[Conversation], Awaitable[None]]
) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = playing(world, story)
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.reason, result.reward, result.model_calls) == ("masked", reason, None, 0)
    assert [attempt.state for attempt in await world.attempts(request)] == ["settled"]


async def test_empty_message_after_a_long_prompt_masks_and_keeps_reward_and_calls(world: World) -> None:
    request = world.rollout(await world.open_group())
    ended = answer(item([1], [2]), {"type": "message", "content": []}, status="incomplete", reward=0.25)
    world.agent.reply = playing(world, overflow, answering(200, ended))
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.reason, result.reward) == ("masked", "context_overflow", 0.25)
    assert (result.model_calls, result.segments) == (1, 1)


@pytest.mark.parametrize(("reason", "story"), CONTENT.items(), ids=list(CONTENT))
async def test_with_resample_a_content_failure_is_followed_by_a_fresh_sample(
    world: World, reason: str, story: Callable[[Conversation], Awaitable[None]]
) -> None:
    await world.use(rollouts={"on_content_failure": "resample"})
    request = world.rollout(await world.open_group())
    world.agent.reply = playing(world, story)
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.bucket, failure.final) == ("ContentFailure", "data", False)
    assert failure.cause.startswith(reason)
    world.agent.reply = world.model.serving(answer(item([1], [7])))
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.attempt, result.replayed_calls) == ("valid", 1, 0)
    assert (await world.attempts(request))[1].fresh_reason == "after a data failure: ContentFailure"


async def test_agent_killed_after_it_measured_a_prompt_is_the_infrastructures(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = playing(world, guard, reset)
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.bucket) == ("AgentUnavailable", "infra")


async def test_call_that_its_model_server_never_ended_is_the_infrastructures(world: World) -> None:
    async def story(conversation: Conversation) -> None:
        await conversation.abandon([1])
        await conversation.measure(801)

    request = world.rollout(await world.open_group())
    world.agent.reply = playing(world, story)
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.bucket) == ("AgentFailed", "infra")


async def test_episode_that_was_cut_short_by_vllm_is_not_trained_as_if_it_were_whole(world: World) -> None:
    async def story(conversation: Conversation) -> None:
        await conversation.call([1], [2])
        await conversation.fail([1, 2, 3], "GenerationUnavailable", "HTTP 503")

    request = world.rollout(await world.open_group())
    world.agent.reply = playing(world, story, answering(200, answer(item([1], [2]), reward=0.0)))
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.boundary, failure.bucket) == ("ModelCallFailed", "model", "infra")
    world.agent.reply = world.model.serving(TWO_TURNS)
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.reward, result.replayed_calls) == ("valid", 1.0, 1)


async def test_model_server_that_does_not_record_is_named(world: World) -> None:
    world.agent.reply = answering(200, real_answer("simple"))
    failure, error = await failing(world.rollouts.run_rollout, world.rollout(await world.open_group()))
    assert (failure.failure_class, failure.bucket, error.non_retryable) == ("IntegrityError", "data", True)
    assert "workers.gym.policy_model.app" in failure.cause


async def test_tokens_that_were_not_recorded_are_an_error_and_never_replayed(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = world.model.serving(ONE_TURN, then=answering(200, answer(item([1], [9]))))
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.boundary, failure.bucket) == ("IntegrityError", "model", "data")
    world.agent.reply = world.model.serving(ONE_TURN)
    assert (await call(world.rollouts.run_rollout, request)).replayed_calls == 0


async def test_dead_branch_is_recorded_and_never_trained(world: World) -> None:
    async def best_of_two(conversation: Conversation) -> None:
        await conversation.call([1], [2])
        await conversation.call([1], [3])

    request = world.rollout(await world.open_group())
    world.agent.reply = playing(world, best_of_two, answering(200, answer(item([1], [3]))))
    result = await call(world.rollouts.run_rollout, request)
    assert (result.model_calls, result.generated_calls) == (1, 2)
    assert await rows_of(world, request) == [([1, 3], [0, 1], [0.0, -0.5])]


async def test_agent_without_tokens_trains_what_its_calls_led_to(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = world.model.serving(TWO_TURNS, then=answering(200, answer()))
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.model_calls) == ("valid", 2)
    assert [tokens for tokens, *_ in await rows_of(world, request)] == [[1, 2, 3, 4]]


async def test_agent_without_tokens_whose_end_is_ambiguous_is_masked(world: World) -> None:
    async def best_of_two(conversation: Conversation) -> None:
        await conversation.call([1], [2])
        await conversation.call([1], [3])

    request = world.rollout(await world.open_group())
    world.agent.reply = playing(world, best_of_two, answering(200, answer()))
    result = await call(world.rollouts.run_rollout, request)
    assert result.state == "masked"
    assert result.reason is not None
    assert result.reason.startswith("ambiguous_terminal")


async def test_recorded_boundary_is_kept_with_its_reason(world: World) -> None:
    rewritten = answer(item([1], [2]), item([9], [8]))
    request = world.rollout(await world.open_group())
    world.agent.reply = world.model.serving(rewritten)
    assert (await call(world.rollouts.run_rollout, request)).segments == 2


async def test_refit_between_calls_is_kept_with_both_versions(world: World) -> None:
    async def story(conversation: Conversation) -> None:
        await conversation.call([1], [2])
        world.model.version = world.vllm.label = "policy-1"
        await conversation.call([1, 2, 3], [4])

    request = world.rollout(await world.open_group())
    world.agent.reply = playing(world, story, answering(200, TWO_TURNS))
    result = await call(world.rollouts.run_rollout, request)
    stored = await world.stored(request)
    assert (result.state, result.policy_version) == ("valid", 0)
    assert (stored.policy_version_min, stored.policy_version_max) == (0, 1)


@pytest.mark.parametrize(("version", "replayed"), [(1, 1), (2, 0)])
async def test_responses_of_old_weights_are_not_replayed(world: World, version: int, replayed: int) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = world.model.serving(ONE_TURN, then=HTTP_500)
    await failing(world.rollouts.run_rollout, request)
    world.model.version = world.vllm.label = f"policy-{version}"
    world.agent.reply = world.model.serving(ONE_TURN)
    later = request.model_copy(update={"policy_version": version})
    assert (await call(world.rollouts.run_rollout, later)).replayed_calls == replayed
    reason = (await world.attempts(request))[1].fresh_reason
    assert (reason is None) == (replayed == 1)


@pytest.mark.parametrize(("newest", "replayed"), [(None, 1), (1, 1), (2, 0)])
async def test_age_of_a_response_counts_from_the_newest_version_that_may_sample(
    world: World, newest: int | None, replayed: int
) -> None:
    request = world.rollout(await world.open_group()).model_copy(update={"newest_policy_version": newest})
    world.agent.reply = world.model.serving(ONE_TURN, then=HTTP_500)
    await failing(world.rollouts.run_rollout, request)
    world.agent.reply = world.model.serving(ONE_TURN)
    assert (await call(world.rollouts.run_rollout, request)).replayed_calls == replayed


async def test_responses_that_an_operator_does_not_want_are_sampled_afresh(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = world.model.serving(TWO_TURNS, then=HTTP_500)
    await failing(world.rollouts.run_rollout, request)
    fresh = request.model_copy(update={"fresh_after": 0})
    await failing(world.rollouts.run_rollout, fresh)
    world.agent.reply = world.model.serving(TWO_TURNS)
    result = await call(world.rollouts.run_rollout, fresh)
    assert (result.state, result.attempt, result.generated_calls, result.replayed_calls) == ("valid", 2, 4, 2)
    reasons = [attempt.fresh_reason for attempt in await world.attempts(request)]
    assert reasons == [None, "an operator asked for a fresh sample", None]


async def test_diagnostic_copy_replays_the_original_however_old_and_takes_its_row(world: World) -> None:
    validation = world.folder / "validation.jsonl"
    validation.write_text(world.dataset.read_text().replace("safe-0", "held-out"))
    run = {"model": world.folder / "model", "dataset": world.dataset, "validation_dataset": validation}
    world.run_id = await start_run(world.ledger, world.dataset, world.folder, run=run)
    request = world.rollout(await world.open_group(num_rollouts=1, purpose="validation"))
    world.agent.reply = world.model.serving(TWO_TURNS)
    original = await call(world.rollouts.run_rollout, request)
    await world.seal(request.group_id)
    copy = await world.ledger.copies.open(request.group_id)
    world.model.version = world.vllm.label = "policy-9"
    diagnosis = request.model_copy(
        update={
            "group_id": copy.group_id,
            "rollout_id": copy.rollouts[0].rollout_id,
            "purpose": "diagnostic",
            "policy_version": 9,
        }
    )
    world.model.generated = world.model.replayed = 0
    result = await call(world.rollouts.run_rollout, diagnosis)
    assert (world.model.generated, world.model.replayed) == (0, 2)
    assert (result.state, result.reward, result.attempt) == ("valid", original.reward, 1)
    assert [exchange.body["prompt_id"] for exchange in world.agent.exchanges] == ["held-out", "held-out"]
    assert await rows_of(world, diagnosis) == await rows_of(world, request)


async def test_agent_whose_recovery_is_fresh_never_replays(world: World) -> None:
    await world.use(rollouts={"recovery": {"agents": {"safe_agent": "fresh"}}})
    request = world.rollout(await world.open_group())
    world.agent.reply = world.model.serving(TWO_TURNS, then=HTTP_500)
    await failing(world.rollouts.run_rollout, request)
    world.agent.reply = world.model.serving(TWO_TURNS)
    assert (await call(world.rollouts.run_rollout, request)).replayed_calls == 0


async def test_rollout_that_may_run_once_is_final_with_its_first_failure(world: World) -> None:
    await world.use(rollouts={"recovery": {"default": "none"}})
    request = world.rollout(await world.open_group())
    world.agent.reply = HTTP_500
    failure, error = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.bucket, failure.final) == ("AgentFailed", "infra", True)
    assert error.non_retryable


async def test_rollout_that_may_run_once_is_never_begun_again(world: World) -> None:
    await world.use(rollouts={"recovery": {"default": "none"}})
    request = world.rollout(await world.open_group())
    world.agent.reply = HTTP_500
    await failing(world.rollouts.run_rollout, request)
    failure, error = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.bucket, failure.final) == ("RecoveryRefused", "infra", True)
    assert error.non_retryable
    assert len(world.agent.exchanges) == 1


async def test_servers_without_the_policy_do_not_cost_the_only_attempt(world: World) -> None:
    await world.use(rollouts={"recovery": {"default": "none"}})
    request = world.rollout(await world.open_group())
    world.vllm.label = "policy-7"
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.final, failure.attempt) == ("PolicyMismatch", False, None)
    world.vllm.label = "policy-0"
    result: RolloutResult = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.attempt) == ("valid", 0)
