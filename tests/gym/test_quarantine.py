"""The policy model asks no endpoint that is in quarantine, fails the calls that it holds, and asks it again later."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from storage.ledger import Ledger
from tests.gym.launcher import Launcher
from tests.gym.model_calls import call
from tests.gym.orchestrator import Orchestrator, outcomes
from tests.gym.policies import splitting
from tests.gym.ports import reserved_port
from tests.gym.recording_servers import SERVERS, sections
from tests.gym.sampling_vllm import SamplingVllm
from workers.gym.policy_model.fleet import Fleet, another

PATIENCE_S = 120.0
SESSIONS = [f"session-{index}" for index in range(400)]


@dataclass(frozen=True)
class Known:
    """A quarantine, as the fleet reads it."""

    endpoint: str


async def begin(play: Orchestrator, endpoint: str) -> None:
    """Quarantine an endpoint in a run of its own."""
    run_id = (await play.rollout()).split("/")[0]
    lease = await play.ledger.trainer_leases.acquire(run_id, "trainer", 600)
    await play.ledger.weights.publish(lease, 0, "weights/0", "digest")
    await play.ledger.quarantines.begin(run_id, endpoint, 0, "it does not answer")


async def until_asked(play: Orchestrator, model: str, vllm: SamplingVllm) -> None:
    """Make calls, each of a session of its own, until this endpoint has generated."""
    before = len(vllm.generations)
    async with asyncio.timeout(PATIENCE_S):
        while len(vllm.generations) == before:
            rollout = await play.rollout()
            await play.begin(rollout)
            answer = await call(model, rollout)
            assert answer.status_code == 200, answer.text


@pytest.mark.integration
async def test_endpoint_in_quarantine_is_not_asked_until_it_is_released_and_calls_that_it_holds_move(
    play: Orchestrator, ledger: Ledger, storage: dict[str, Any], launch: Callable[..., Launcher]
) -> None:
    with reserved_port() as port, SamplingVllm(splitting) as one:
        away = f"http://127.0.0.1:{port}"
        await begin(play, away)
        gym, generation, _ = sections(one.url, storage, {"model": SERVERS["model"]})
        generation["endpoints"] = [one.url, away]
        launcher = await asyncio.to_thread(launch, gym, generation, storage)  # with nothing at the other's address
        model = launcher.urls["model"]
        for _ in range(8):
            rollout = await play.rollout()
            await play.begin(rollout)
            assert (await call(model, rollout)).status_code == 200
        assert len(one.generations) == 8

        with SamplingVllm(splitting, port=port) as other:
            assert await ledger.quarantines.release(away)
            await until_asked(play, model, other)

            other.hang_next(times=100)
            rollouts = [await play.rollout() for _ in range(24)]
            for rollout in rollouts:
                await play.begin(rollout)
            calls = {rollout: asyncio.create_task(call(model, rollout)) for rollout in rollouts}
            held = await unanswered(calls, other)
            await begin(play, away)
            for rollout in held:
                answer = await calls[rollout]
                assert (answer.status_code, "is in quarantine" in answer.text) == (503, True), answer.text
                assert outcomes(await play.calls(rollout, 0)) == "f"
                await play.begin(rollout)
                assert (await call(model, rollout, 1)).status_code == 200
                assert outcomes(await play.calls(rollout, 1)) == "g"
            assert other.hanging == 0
        assert await ledger.quarantines.release(away)


async def unanswered(calls: dict[str, asyncio.Task[Any]], vllm: SamplingVllm) -> list[str]:
    """The calls that hang at the endpoint, once all others are answered."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(not task.done() for task in calls.values()) != vllm.hanging or not vllm.hanging:
            await asyncio.sleep(0.02)
    return [rollout for rollout, task in calls.items() if not task.done()]


async def test_the_fleet_keeps_what_it_knows_when_the_ledger_does_not_answer() -> None:
    read: list[list[Known] | Exception] = [[Known("a")], TimeoutError(), [Known("b")]]

    async def reading() -> list[Known]:
        answer = read.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    fleet = Fleet(reading)
    await fleet.refresh()
    assert (fleet.is_away("a"), fleet.is_away("b")) == (True, False)
    with pytest.raises(TimeoutError):
        await fleet.refresh()
    assert fleet.is_away("a")
    await fleet.refresh()
    assert (fleet.is_away("a"), fleet.is_away("b")) == (False, True)


def test_sessions_of_an_endpoint_that_is_away_are_spread_over_the_others_and_stay_there() -> None:
    chosen = [another(session, ("c", "a", "b")) for session in SESSIONS]
    assert chosen == [another(session, ("a", "b", "c")) for session in SESSIONS]
    assert {url: chosen.count(url) > len(SESSIONS) // 6 for url in "abc"} == dict.fromkeys("abc", True)
    assert another("session", ()) is None
