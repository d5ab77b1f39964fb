"""NeMo-Gym waits for its environment for ever, and asks one that is gone for ever: the deadline of `/run` ends that."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.failures.apart import AGENT, ENVIRONMENT, Apart, addresses
from tests.failures.gym_process import GymProcess
from tests.failures.policy_server import CALLS
from tests.failures.world import World

pytestmark = pytest.mark.integration

TIMEOUT_S = 6.0
PATIENCE_S = 3.0  # beyond it, on a busy machine


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
async def agent(stack: World, gym: GymProcess, urls: dict[str, str], folder: Path) -> AsyncIterator[Apart]:
    """An agent in a process of its own."""
    stack.agents.meet("apart", urls["apart"])
    process = Apart(gym, urls, "apart", AGENT, folder)
    try:
        yield await process.ready()
    finally:
        process.kill()


@pytest.fixture
async def environment(gym: GymProcess, urls: dict[str, str], folder: Path) -> AsyncIterator[Apart]:
    """Its environment, in another."""
    process = Apart(gym, urls, "apart_environment", ENVIRONMENT, folder)
    try:
        yield await process.ready()
    finally:
        process.kill()


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("fails", [Apart.suspend, Apart.kill], ids=["never answers", "dies without restart"])
async def test_an_environment_that_is_lost_for_good_costs_its_rollout_on_time(
    world: World, environment: Apart, fails: Callable[[Apart], None]
) -> None:
    hold = world.episode.holds(3, unanswered=False)
    limits = {"rollout_timeout_s": TIMEOUT_S, "heartbeat_timeout_s": TIMEOUT_S}
    group = await world.start_group(
        await world.new_run("apart", rollouts=limits, failure={"max_infra_attempts_per_prompt": 2})
    )
    await hold.reached()
    await group.until(lambda rollouts: any(one.state == "valid" for one in rollouts))  # the sibling is done
    fails(environment)
    hold.release()
    ended = await group.end()
    (lost,), (sibling,) = ended.broken, ended.sound
    assert (lost.record.state, lost.ends) == ("lost", ["RolloutTimeout infra"] * 2)
    assert lost.calls == ("gggg", "")  # the fourth tool does not answer, then no session is opened
    assert [one.boundary for one in lost.attempts] == ["agent", "agent"]
    assert all((one.cause or "").startswith("agent_timeout: ") for one in lost.attempts)
    for one in lost.attempts:
        assert one.ended_at is not None
        assert TIMEOUT_S <= (one.ended_at - one.started_at).total_seconds() <= TIMEOUT_S + PATIENCE_S
    assert sibling.calls == ("g" * CALLS,)
    assert ended.counts == ("sealed", 1, 0, 1)


@pytest.mark.usefixtures("agent")
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
