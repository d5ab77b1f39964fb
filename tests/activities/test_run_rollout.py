"""One attempt: settled once, recorded before it fails, fenced when it comes too late."""

import asyncio
from typing import Any

import pytest

from activities.rollouts import attempts
from activities.training.batch import TrainingBatch
from storage.errors import LedgerUnavailable
from storage.records import AttemptRecord
from tests.activities.world import World, call, failing
from tests.rollouts.agent_server import Exchange, answering, silence
from tests.rollouts.building import answer, item, real_answer

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
ONE_TURN = answer(item([1], [2]), reward=9.0)


class Gate:
    """An agent of one turn, which each attempt plays at once; the answer follows when the test gives it."""

    def __init__(self, world: World, requests: int) -> None:
        loop = asyncio.get_running_loop()
        self.answers: list[asyncio.Future[Any]] = [loop.create_future() for _ in range(requests)]
        self._played = [asyncio.Event() for _ in range(requests)]
        self._model = world.model

    async def played(self, attempt: int) -> None:
        """Wait for the turn of an attempt."""
        async with asyncio.timeout(PATIENCE_S):
            await self._played[attempt].wait()

    async def __call__(self, exchange: Exchange) -> None:
        async def wait(exchange: Exchange) -> None:
            attempt = exchange.body["_ng_attempt_index"]
            self._played[attempt].set()
            await exchange.answer(200, await self.answers[attempt])

        await self._model.serving(ONE_TURN, then=wait)(exchange)


async def test_valid_rollout_is_stored_with_its_calls_and_rows(world: World) -> None:
    request = world.rollout(await world.open_group())
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.attempt, result.reward) == ("valid", 0, pytest.approx(2 / 3))
    assert (result.model_calls, result.segments, result.policy_version) == (9, 3, 0)
    assert (result.attempts, result.generated_calls, result.replayed_calls) == (1, 9, 0)
    stored = await world.stored(request)
    assert (stored.state, stored.settled_attempt, stored.attempts[0].state) == ("valid", 0, "settled")
    assert stored.evidence_digest is not None
    rows = TrainingBatch.from_bytes(await world.blobs.get(stored.evidence_digest)).rows
    assert [(row.rollout_id, row.segment) for row in rows] == [(request.rollout_id, number) for number in range(3)]
    assert sum(row.trained_tokens for row in rows) == 143


async def test_agent_gets_the_row_and_the_identity_of_the_attempt(world: World) -> None:
    group = await world.open_group(slot=2)
    await call(world.rollouts.run_rollout, world.rollout(group, index=1))
    body = world.agent.exchanges[0].body
    assert body["prompt_id"] == "safe-2"
    assert body["_ng_rollout_id"] == f"{group}/rollout-1".replace("/", ".")
    assert (body["_ng_attempt_index"], body["_ng_task_index"], body["_ng_rollout_index"]) == (0, 2, 1)
    assert body["responses_create_params"] == {
        "input": "climb",
        "temperature": 1.0,
        "top_p": 1.0,
        "max_output_tokens": 8192,
    }


async def test_settled_rollout_is_not_run_again(world: World) -> None:
    request = world.rollout(await world.open_group())
    first = await call(world.rollouts.run_rollout, request)
    world.agent.reply = answering(500, "must not be asked")
    assert await call(world.rollouts.run_rollout, request) == first
    assert len(world.agent.exchanges) == 1
    assert len(await world.attempts(request)) == 1


async def test_failed_attempt_is_recorded_and_may_be_tried_again(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = answering(503, "resource server\0is away")
    failure, _ = await failing(world.rollouts.run_rollout, request, attempt=3)
    assert (failure.boundary, failure.bucket, failure.failure_class) == ("agent", "infra", "AgentFailed")
    assert (failure.rollout_id, failure.group_id, failure.attempt) == (request.rollout_id, request.group_id, 0)
    assert failure.retries == 2
    (attempt,) = await world.attempts(request)
    assert (attempt.state, attempt.boundary, attempt.bucket) == ("failed", "agent", "infra")
    assert attempt.failure_class == "AgentFailed"
    assert attempt.cause == failure.cause
    assert attempt.cause == 'agent_request_failed: NeMo-Gym /run failed with HTTP 503: "resource server\\u0000is away"'
    world.agent.reply = world.model.serving(real_answer("simple"))
    result = await call(world.rollouts.run_rollout, request)
    assert (result.state, result.attempt) == ("valid", 1)
    assert [attempt.state for attempt in await world.attempts(request)] == ["failed", "settled"]


async def test_raw_bytes_in_an_error_can_be_recorded(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = answering(500, b"\0\xff\x80 broken")
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert failure.failure_class == "AgentFailed"
    assert (await world.attempts(request))[0].cause == failure.cause


@pytest.mark.parametrize(
    ("status", "content", "boundary", "failure_class"),
    [
        (422, {"detail": "no such field"}, "agent", "AgentRefused"),
        (200, b"{", "model", "IntegrityError"),
        (200, answer(), "model", "IntegrityError"),
        (200, {"response": {"output": []}}, "model", "IntegrityError"),
    ],
    ids=["refused", "malformed", "nothing recorded", "no reward"],
)
async def test_failure_of_the_data_is_not_retried(
    world: World, status: int, content: Any, boundary: str, failure_class: str
) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = answering(status, content)
    failure, error = await failing(world.rollouts.run_rollout, request)
    assert (failure.boundary, failure.bucket, failure.failure_class) == (boundary, "data", failure_class)
    assert error.non_retryable
    assert (await world.stored(request)).state == "open"
    assert (await world.attempts(request))[0].bucket == "data"


async def test_row_for_an_agent_that_does_not_run_is_refused_by_name(world: World) -> None:
    failure, _ = await failing(world.rollouts.run_rollout, world.rollout(await world.open_group(slot=5)))
    assert failure.failure_class == "AgentRefused"
    assert "'absent_agent'" in failure.cause


async def test_reason_of_the_environment_is_stored_whatever_it_holds(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = answering(200, answer(mask_sample=True, failure_reason="a\0\ud800" + "x" * 10_000))
    result = await call(world.rollouts.run_rollout, request)
    assert result.state == "masked"
    assert (await world.stored(request)).reason == result.reason
    assert result.reason is not None
    assert result.reason.startswith("a�?xxx")


async def test_late_answer_of_an_older_attempt_is_refused_and_changes_nothing(world: World) -> None:
    request = world.rollout(await world.open_group())
    gate = world.agent.reply = Gate(world, 2)
    older = asyncio.create_task(failing(world.rollouts.run_rollout, request))
    await gate.played(0)
    newer = asyncio.create_task(call(world.rollouts.run_rollout, request))
    await gate.played(1)
    gate.answers[0].set_result(ONE_TURN)
    failure, _ = await older
    assert (failure.failure_class, failure.attempt, failure.bucket) == ("AttemptFenced", 0, "data")
    stored = await world.stored(request)
    assert (stored.state, stored.reward) == ("open", None)
    assert [attempt.state for attempt in stored.attempts] == ["abandoned", "running"]
    gate.answers[1].set_result(ONE_TURN | {"reward": 0.5})
    assert (await newer).reward == 0.5
    assert (await world.stored(request)).settled_attempt == 1


async def test_answer_after_the_settlement_is_refused_and_changes_nothing(world: World) -> None:
    request = world.rollout(await world.open_group())
    gate = world.agent.reply = Gate(world, 2)
    older = asyncio.create_task(failing(world.rollouts.run_rollout, request))
    await gate.played(0)
    newer = asyncio.create_task(call(world.rollouts.run_rollout, request))
    await gate.played(1)
    gate.answers[1].set_result(ONE_TURN | {"reward": 0.5})
    settled = await newer
    gate.answers[0].set_result(ONE_TURN)
    assert (await older)[0].failure_class == "AttemptFenced"
    assert (await world.stored(request)).reward == 0.5
    assert await call(world.rollouts.run_rollout, request) == settled


async def test_late_failure_of_an_older_attempt_keeps_it_abandoned(world: World) -> None:
    request = world.rollout(await world.open_group())
    gate = world.agent.reply = Gate(world, 2)
    older = asyncio.create_task(failing(world.rollouts.run_rollout, request))
    await gate.played(0)
    newer = asyncio.create_task(call(world.rollouts.run_rollout, request))
    await gate.played(1)
    gate.answers[0].set_result([])
    assert (await older)[0].failure_class == "IntegrityError"
    gate.answers[1].set_result(ONE_TURN)
    assert (await newer).attempt == 1
    assert [attempt.state for attempt in await world.attempts(request)] == ["abandoned", "settled"]


async def test_cancelled_attempt_leaves_the_rollout_to_the_next_one(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.agent.reply = silence
    running = asyncio.create_task(call(world.rollouts.run_rollout, request))
    exchange = await world.agent.asked(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(PATIENCE_S):
        await exchange.dropped.wait()
    assert [attempt.state for attempt in await world.attempts(request)] == ["running"]
    world.agent.reply = world.model.serving(real_answer("simple"))
    assert (await call(world.rollouts.run_rollout, request)).attempt == 1
    assert [attempt.state for attempt in await world.attempts(request)] == ["abandoned", "settled"]


async def test_other_policy_version_is_refused_before_the_agent_is_asked(world: World) -> None:
    request = world.rollout(await world.open_group(), policy_version=1)
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.boundary, failure.bucket) == ("PolicyMismatch", "generation", "infra")
    assert "serve policy-0 to policy-0, the rollout may be sampled by policy-1" in failure.cause
    assert world.agent.exchanges == []
    assert (await world.attempts(request))[0].failure_class == "PolicyMismatch"


@pytest.mark.parametrize("served", [1, 2, 3])
async def test_every_version_of_the_range_may_sample(world: World, served: int) -> None:
    world.vllm.label = world.model.version = f"policy-{served}"
    request = world.rollout(await world.open_group(), policy_version=1)
    result = await call(world.rollouts.run_rollout, request.model_copy(update={"newest_policy_version": 3}))
    assert (result.state, result.policy_version) == ("valid", served)


@pytest.mark.parametrize("served", [0, 4])
async def test_version_outside_the_range_is_refused_and_the_range_is_named(world: World, served: int) -> None:
    world.vllm.label = f"policy-{served}"
    request = world.rollout(await world.open_group(), policy_version=1)
    ahead = request.model_copy(update={"newest_policy_version": 3})
    failure, _ = await failing(world.rollouts.run_rollout, ahead)
    assert failure.failure_class == "PolicyMismatch"
    assert f"serve policy-{served} to policy-{served}" in failure.cause
    assert "may be sampled by policy-1 to policy-3" in failure.cause
    assert world.agent.exchanges == []


async def test_endpoint_that_does_not_say_what_it_serves_is_a_mismatch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_SERVING_TIMEOUT_S", 0.2)
    request = world.rollout(await world.open_group())
    monkeypatch.setattr(world.vllm, "answer", lambda *_: world.vllm.stopped.wait())
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert failure.failure_class == "PolicyMismatch"
    assert "did not say within 0.2 s" in failure.cause


async def test_agent_that_accepts_and_never_answers_ends_at_the_deadline_of_a_rollout(world: World) -> None:
    await world.use(rollouts={"rollout_timeout_s": 0.3, "heartbeat_timeout_s": 0.3})
    request = world.rollout(await world.open_group())
    world.agent.reply = silence
    async with asyncio.timeout(PATIENCE_S):
        failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.bucket) == ("RolloutTimeout", "infra")
    assert "within 0.3 s" in failure.cause
    assert (await world.attempts(request))[0].failure_class == "RolloutTimeout"


async def test_server_that_waits_for_a_refit_is_a_mismatch(world: World) -> None:
    world.vllm.restart()
    failure, _ = await failing(world.rollouts.run_rollout, world.rollout(await world.open_group()))
    assert failure.failure_class == "PolicyMismatch"
    assert world.agent.exchanges == []


async def test_dead_vllm_server_is_infra(world: World) -> None:
    world.vllm.dead = True
    failure, _ = await failing(world.rollouts.run_rollout, world.rollout(await world.open_group()))
    assert (failure.failure_class, failure.bucket) == ("ServerFailed", "infra")


async def test_changed_dataset_fails_before_an_attempt_begins(world: World) -> None:
    request = world.rollout(await world.open_group())
    world.dataset.write_text(world.dataset.read_text().replace("climb", "fall!"))
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.bucket, failure.attempt) == ("DatasetError", "data", None)
    assert await world.attempts(request) == ()


async def test_rollout_that_was_never_opened_is_refused(world: World) -> None:
    failure, _ = await failing(world.rollouts.run_rollout, world.rollout(f"{world.run_id}/step-0/group-4"))
    assert (failure.failure_class, failure.bucket, failure.attempt) == ("UnknownRollout", "data", None)


async def test_failure_that_cannot_be_recorded_is_the_ledgers_and_may_be_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> AttemptRecord:
        raise LedgerUnavailable("db", "connection refused")

    request = world.rollout(await world.open_group())
    world.agent.reply = answering(422, "refused")
    with monkeypatch.context() as patch:
        patch.setattr(world.ledger.rollouts, "fail_attempt", away)
        failure, error = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.boundary, failure.bucket) == ("LedgerUnavailable", "ledger", "infra")
    assert (failure.attempt, error.non_retryable) == (0, False)
    world.agent.reply = world.model.serving(real_answer("simple"))
    assert (await call(world.rollouts.run_rollout, request)).attempt == 1
    assert [attempt.state for attempt in await world.attempts(request)] == ["abandoned", "settled"]


async def test_unwritable_blob_store_settles_nothing(world: World) -> None:
    world.blobs = type(world.blobs)("/dev/full")
    request = world.rollout(await world.open_group())
    failure, _ = await failing(world.rollouts.run_rollout, request)
    assert (failure.failure_class, failure.bucket) == ("BlobWriteError", "infra")
    assert (await world.stored(request)).state == "open"


async def test_siblings_run_side_by_side(world: World) -> None:
    group = await world.open_group(num_rollouts=4)
    activities = world.rollouts
    results = await asyncio.gather(*(call(activities.run_rollout, world.rollout(group, index)) for index in range(4)))
    assert [result.index for result in results] == [0, 1, 2, 3]
    assert {result.state for result in results} == {"valid"}
