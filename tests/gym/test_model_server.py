"""What a policy model refuses, what it writes about calls that failed, and equal calls side by side."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import httpx
import pytest

from tests.gym.launcher import Launcher
from tests.gym.model_calls import CHAT, DIALECTS, call
from tests.gym.orchestrator import Orchestrator, outcomes
from tests.gym.recording_servers import SERVERS, sections
from tests.gym.sampling_vllm import SamplingVllm
from tests.locks import until_nobody_waits

pytestmark = pytest.mark.integration

PATIENCE_S = 120.0
RECORD_TIMEOUT_S = 1.0


@asynccontextmanager
async def administering(storage: dict[str, Any]) -> AsyncIterator[asyncpg.Connection]:
    """A connection as the owner of the database's server."""
    connection = await asyncpg.connect(storage["dsn"])
    try:
        yield connection
    finally:
        await connection.close()


@pytest.mark.parametrize("path", [path for path, _ in DIALECTS.values()][::2])
async def test_a_call_of_nobody_is_refused_and_not_run(servers: dict[str, str], vllm: SamplingVllm, path: str) -> None:
    body = next(body for known, body in DIALECTS.values() if known == path)
    answer = await call(servers["model"], None, path=path, body=body)
    assert answer.status_code == 400
    assert "names no rollout" in answer.text
    assert vllm.requests == []


async def test_a_call_of_an_unknown_rollout_is_refused_and_not_run(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    for unknown in (rollout.replace("run-", "ruin-"), rollout):  # not in the ledger; in it, but no attempt has begun
        answer = await call(servers["model"], unknown)
        assert (answer.status_code, "rollout_unknown" in answer.text) == (400, True)
    assert vllm.requests == []


async def test_more_than_one_choice_is_refused(play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    answer = await call(servers["model"], rollout, body={**CHAT, "n": 2})
    assert (answer.status_code, "n = 2" in answer.text) == (400, True)
    assert await play.calls(rollout, 0) == []


async def test_a_call_of_a_fenced_attempt_is_answered_with_the_status_that_ends_an_agent(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    for _ in range(2):
        await play.begin(rollout)
    for name, (path, body) in DIALECTS.items():
        answer = await call(servers["model"], rollout, 0, path, body)
        assert "attempt_fenced" in answer.text
        # NeMo-Gym tells of every failure of a Responses stream inside the stream.
        expected = (200, True) if name == "responses stream" else (404, False)
        assert (answer.status_code, "response.failed" in answer.text) == expected, name
    assert vllm.requests == []


async def test_equal_calls_side_by_side_are_distinct_and_replay_as_the_same_set(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    sets = []
    for attempt in (0, 1):
        await play.begin(rollout)
        answers = await asyncio.gather(*(call(servers["model"], rollout, attempt) for _ in range(4)))
        answers.append(await call(servers["model"], rollout, attempt))
        assert [answer.status_code for answer in answers] == [200] * 5
        sets.append({answer.content for answer in answers})
    assert sets[0] == sets[1]
    assert len(sets[0]) == len(vllm.generations) == 5
    assert outcomes(await play.calls(rollout, 1)) == "rrrrr"
    assert (await call(servers["model"], rollout, 1)).content not in sets[0]


@pytest.mark.parametrize(
    ("failure_class", "status", "cause"),
    [
        ("GenerationAborted", 503, "abort"),
        ("UnknownWeightVersion", 500, "nonsense"),
        ("GenerationRefused", 422, "not like this"),
        ("GenerationUnavailable", 503, "out of order"),
    ],
)
async def test_a_failed_call_is_recorded_with_its_class(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, failure_class: str, status: int, cause: str
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    match failure_class:
        case "GenerationAborted":
            vllm.abort_next()
        case "UnknownWeightVersion":
            vllm.version = "nonsense"
        case "GenerationRefused":
            vllm.fail_next(422, cause)
        case _:
            vllm.fail_next(500, times=3)
    answer = await call(servers["model"], rollout)
    assert (answer.status_code, failure_class in answer.text) == (status, True), answer.text
    (failed,) = await play.calls(rollout, 0)
    assert (failed.outcome, failed.failure_class) == ("failed", failure_class)
    assert cause in str(failed.cause)
    vllm.version = "policy-0"
    assert (await call(servers["model"], rollout)).status_code == 200
    assert outcomes(await play.calls(rollout, 0)) == "fg"


async def test_a_prompt_that_is_too_long_ends_the_episode_and_is_recorded_as_the_content_s_fault(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    body = {**CHAT, "messages": [{"role": "user", "content": "x" * (vllm.max_model_len + 1)}]}
    answer = await call(servers["model"], rollout, body=body)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    (failed,) = await play.calls(rollout, 0)
    assert (failed.outcome, failed.failure_class) == ("failed", "ContextOverflow")


async def test_the_guard_of_a_compacting_agent_measures_what_is_sent(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    assert (await play.run(servers["guarded_agent"], rollout, 0)).body["reward"] == 1.0
    calls = await play.calls(rollout, 0)
    assert outcomes(calls) == "mg" * len(vllm.generations)
    assert [call.prompt_tokens for call in calls[::2]] == [call.prompt_tokens for call in calls[1::2]]


async def test_a_prompt_that_could_not_be_measured_is_a_failed_call(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    vllm.fail_next(500, times=3, path="/tokenize")
    assert (await play.run(servers["guarded_agent"], rollout, 0)).status == 500
    (failed,) = await play.calls(rollout, 0)
    assert (failed.outcome, failed.failure_class) == ("failed", "GenerationUnavailable")


@pytest.fixture
def hurried(launch: Callable[..., Launcher], vllm: SamplingVllm, storage: dict[str, Any]) -> str:
    """A policy model that gives its ledger little time."""
    little = {**storage, "record_timeout_s": RECORD_TIMEOUT_S}
    return launch(*sections(vllm.url, little, {"model": SERVERS["model"]})).urls["model"]


async def generating(model: str, rollout: str, vllm: SamplingVllm) -> asyncio.Task[httpx.Response]:
    """A call that hangs at vLLM. It is repeated where its claim took the busy ledger too long already."""
    vllm.hang_next()
    calling = asyncio.create_task(call(model, rollout))
    async with asyncio.timeout(PATIENCE_S):
        while not vllm.hanging:
            if calling.done():
                assert "ledger_unavailable" in calling.result().text
                calling = asyncio.create_task(call(model, rollout))
            await asyncio.sleep(0.02)
    return calling


async def test_a_ledger_that_is_too_slow_keeps_the_response_here(
    play: Orchestrator, servers: dict[str, str], hurried: str, vllm: SamplingVllm, storage: dict[str, Any]
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    waiting = await generating(hurried, rollout, vllm)
    async with administering(storage) as owner, owner.transaction():
        await owner.execute("LOCK TABLE model_calls IN EXCLUSIVE MODE")
        vllm.release()
        answer = await waiting
        assert (answer.status_code, "ledger_unavailable" in answer.text) == (500, True)
        await until_nobody_waits(owner)
    (generation,) = vllm.generations
    assert "dial 1" not in answer.text
    assert (await call(servers["model"], rollout)).status_code == 200
    recorded = [list(call.sampled_token_ids) for call in await play.calls(rollout, 0)]
    assert generation.sampled_token_ids not in recorded


async def test_a_ledger_that_is_away_stops_calls_before_they_generate(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, storage: dict[str, Any], postgres_dsn: str
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    name = storage["dsn"].rpartition("/")[2]
    async with administering({"dsn": postgres_dsn}) as owner:
        await owner.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            await owner.execute(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = $1", name
            )
            answer = await call(servers["model"], rollout)
        finally:
            await owner.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    assert answer.status_code == 500
    assert vllm.generations == []
    assert (await call(servers["model"], rollout)).status_code == 200
    assert outcomes(await play.calls(rollout, 0)) == "g"
