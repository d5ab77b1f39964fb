"""NeMo-RL's golden table of failures, as far as an attempt decides it: which of them another attempt can help.

What follows from a bucket (back-off, budgets, drops) is decided by workflows, and told in tests/workflows.
"""

import asyncio
import time

import httpx
import pytest

from activities.errors import (
    AgentFailed,
    AgentRefused,
    AgentUnavailable,
    BoundaryError,
    ContentFailure,
    IntegrityError,
    RolloutTimeout,
    bucket_of,
    failure_error,
    failure_of,
    surfaced,
)
from activities.rollouts.gym_agent import GymAgents
from storage.errors import AttemptFenced
from tests.causes import caused
from tests.rollouts.agent_server import PATIENCE_S, AgentServer, answering, silence
from workflows.messages import Failure


async def answered(status: int, timeout_s: float = PATIENCE_S) -> Failure:
    """What the activity says of an agent that answers with a status."""
    async with AgentServer(answering(status, "no")) as server:
        agents = GymAgents({"agent": server.url}, max_connections=1)
        with pytest.raises(BoundaryError) as caught:
            await agents.run("agent", {}, timeout_s=timeout_s, max_bytes=1024)
        await agents.close()
    return failure_of(caught.value, boundary="ledger", run_id="r")


@pytest.mark.parametrize(
    ("status", "bucket"),
    [
        (500, "infra"),
        (503, "infra"),
        (408, "infra"),
        (429, "infra"),
        (400, "data"),
        (404, "data"),
        (409, "data"),
        (422, "data"),
    ],
)
async def test_the_status_of_the_answer_decides(status: int, bucket: str) -> None:
    failure = await answered(status)
    assert failure.bucket == bucket
    assert failure_error(failure).non_retryable == (bucket == "data")
    assert f"NeMo-Gym /run failed with HTTP {status}" in failure.cause


async def test_a_4xx_inside_an_agent_arrives_as_500_and_may_pass() -> None:
    async with AgentServer(answering(500, "Hit an exception calling an inner server: 422 no such field")) as server:
        agents = GymAgents({"agent": server.url}, max_connections=1)
        with pytest.raises(AgentFailed) as caught:
            await agents.run("agent", {}, timeout_s=PATIENCE_S, max_bytes=1024)
        await agents.close()
    assert bucket_of(caught.value) == "infra"


@pytest.mark.parametrize(
    ("error", "bucket"),
    [
        (RuntimeError("x"), "data"),
        (caused(RuntimeError("x"), ConnectionError()), "infra"),
        (caused(AgentRefused("x"), TimeoutError()), "data"),
        (caused(IntegrityError("x"), TimeoutError()), "data"),
        (caused(ContentFailure("x"), ConnectionError()), "data"),
        (httpx.ReadError("x"), "infra"),
        (RolloutTimeout("x"), "infra"),
        (AgentUnavailable("x"), "infra"),
        (IntegrityError("Generation logprobs contain NaN"), "data"),
        (IntegrityError("an answer that nobody asked for"), "data"),
        (AttemptFenced("r", 0, 1, "abandoned"), "data"),
    ],
    ids=repr,
)
def test_the_error_decides_then_its_causes(error: Exception, bucket: str) -> None:
    assert bucket_of(error) == bucket
    assert failure_error(failure_of(error, boundary="agent", run_id="r")).non_retryable == (bucket == "data")


async def test_cancellation_is_neither_class_and_becomes_no_failure() -> None:
    async def work() -> None:
        with surfaced(boundary="agent", run_id="r"):
            async with AgentServer(silence) as server:
                agents = GymAgents({"agent": server.url}, max_connections=1)
                await agents.run("agent", {}, timeout_s=PATIENCE_S, max_bytes=1024)

    running = asyncio.create_task(work())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_deadline_begins_anew_with_every_attempt() -> None:
    async with AgentServer(silence) as server:
        agents = GymAgents({"agent": server.url}, max_connections=1)
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(RolloutTimeout):
                await agents.run("agent", {}, timeout_s=0.3, max_bytes=1024)
            assert time.monotonic() - began >= 0.3
        await agents.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RolloutTimeout("late"), "agent_timeout"),
        (AgentUnavailable("refused", connected=False), "transport_unreachable"),
        (AgentUnavailable("reset"), "transport_peer_drop"),
        (AgentFailed("broke", 500), "agent_run_error"),
        (AgentFailed("broke", 408), "agent_run_error"),
        (AgentFailed("gateway", 502), "agent_request_failed"),
        (AgentFailed("gateway", 503), "agent_request_failed"),
        (AgentFailed("gateway", 504), "agent_request_failed"),
        (AgentFailed("gateway", 429), "agent_request_failed"),
    ],
    ids=str,
)
def test_a_cause_begins_with_nemo_gym_s_name_for_it(error: BoundaryError, kind: str) -> None:
    failure = failure_of(error, boundary="ledger", run_id="r")
    assert (failure.failure_class, failure.cause) == (type(error).__name__, f"{kind}: {error}")


@pytest.mark.parametrize(
    "error", [AgentRefused("no such field"), IntegrityError("rewrite"), RuntimeError("x")], ids=repr
)
def test_a_cause_that_has_no_name_there_stands_alone(error: Exception) -> None:
    assert failure_of(error, boundary="ledger", run_id="r").cause == str(error)
