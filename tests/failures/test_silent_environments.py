"""NeMo-Gym waits for its environment for ever, and asks one that is gone for ever: the deadline of `/run` ends that."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.failures.apart import AGENT, ENVIRONMENT, Apart, addresses
from tests.failures.gym_process import GymProcess
from tests.failures.policy_server import CALLS
from tests.failures.world import World

pytestmark = pytest.mark.integration

SILENCE_S = 1.0
"""How long nobody answers before the deadline passes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of the processes."""
    return tmp_path_factory.mktemp("apart")


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """Their addresses."""
    with addresses() as found:
        yield found


@pytest.fixture(scope="module")
async def environments(stack: World, gym: GymProcess, urls: dict[str, str], folder: Path) -> AsyncIterator[list[Apart]]:
    """An agent, and its environment: the last one of the list, the others were killed by tests."""
    stack.agents.meet("apart", urls["apart"])
    agent = Apart(gym, urls, "apart", AGENT, folder)
    started = [Apart(gym, urls, "apart_environment", ENVIRONMENT, folder)]
    try:
        await asyncio.gather(agent.ready(), started[-1].ready())
        yield started
    finally:
        agent.kill()
        started[-1].kill()


@pytest.fixture
async def environment(
    environments: list[Apart], gym: GymProcess, urls: dict[str, str], folder: Path
) -> AsyncIterator[Apart]:
    """The environment, alive and awake."""
    if not environments[-1].lives:
        environments.append(Apart(gym, urls, "apart_environment", ENVIRONMENT, folder))
        await environments[-1].ready()
    yield environments[-1]
    if environments[-1].lives:
        environments[-1].wake()


async def test_an_environment_that_answers_before_the_deadline_costs_nothing(world: World, environment: Apart) -> None:
    hold = world.episode.holds(3, unanswered=False)
    group = await world.start_group(await world.new_run("apart"), 1)
    await hold.reached()
    environment.suspend()
    hold.release()
    await group.until_calls(4)
    environment.wake()
    ended = await group.end()
    assert [one.calls for one in ended.sound] == [("g" * CALLS,)]
    assert ended.counts == ("sealed", 1, 0, 0)


@pytest.mark.parametrize("fails", [Apart.suspend, Apart.kill], ids=["never answers", "dies without restart"])
async def test_an_environment_that_is_lost_for_good_costs_its_rollout_on_time(
    world: World, environment: Apart, fails: Callable[[Apart], None]
) -> None:
    hold = world.episode.holds(3, unanswered=False)
    group = await world.start_group(await world.new_run("apart", failure={"max_infra_attempts_per_prompt": 2}))
    await hold.reached()
    await group.until(lambda rollouts: any(one.state == "valid" for one in rollouts))  # the sibling is done
    fails(environment)
    hold.release()
    await group.until_calls(4)
    await world.agents.hurry(SILENCE_S)
    await group.until(lambda rollouts: any(len(one.attempts) == 2 for one in rollouts))
    await world.agents.hurry(SILENCE_S)
    ended = await group.end()
    (lost,), (sibling,) = ended.broken, ended.sound
    assert (lost.record.state, lost.ends) == ("lost", ["RolloutTimeout infra"] * 2)
    assert lost.calls == ("gggg", "")  # the fourth tool does not answer, then no session is opened
    assert [one.boundary for one in lost.attempts] == ["agent", "agent"]
    for one in lost.attempts:
        assert (one.cause or "").startswith("agent_timeout: ")
        assert one.ended_at is not None
        assert (one.ended_at - one.started_at).total_seconds() >= SILENCE_S
    assert sibling.calls == ("g" * CALLS,)
    assert ended.counts == ("sealed", 1, 0, 1)
