"""The ledger is the memory, not a process: killed servers and servers side by side replay and continue as one would."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.gym.launcher import Launcher
from tests.gym.model_calls import CHAT, call
from tests.gym.orchestrator import Orchestrator, outcomes, sampled
from tests.gym.policies import hanging_after, splitting
from tests.gym.recording_servers import AGENTS, sections
from tests.gym.sampling_vllm import SamplingVllm
from tests.gym.stub_model import Message, Reply

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def other(launch: Callable[..., Launcher], shared_vllm: SamplingVllm, storage: dict[str, Any]) -> Launcher:
    """A second process with the same servers."""
    return launch(*sections(shared_vllm.url, storage))


def twice(messages: list[Message]) -> Reply:
    """Says the same words each time."""
    return Reply("again", answer="so")


async def test_equal_calls_at_two_processes_are_distinct_and_replay_as_the_same_set(
    play: Orchestrator, servers: dict[str, str], other: Launcher, vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    sets = []
    for attempt in (0, 1):
        await play.begin(rollout)
        models = [servers["model"], other.urls["model"]] * 3
        answers = await asyncio.gather(*(call(model, rollout, attempt) for model in models))
        sets.append({answer.content for answer in answers})
    assert sets[0] == sets[1]
    assert len(sets[0]) == len(vllm.generations) == 6


async def test_a_conversation_goes_on_exactly_at_another_process(
    play: Orchestrator, servers: dict[str, str], other: Launcher, vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    said = (await call(servers["model"], rollout)).json()["choices"][0]["message"]
    assistant = {key: said[key] for key in ("role", "content", "tool_calls")}
    hint = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": '{"hint": "higher"}'}
    body = {**CHAT, "messages": [*CHAT["messages"], assistant, hint]}
    await call(other.urls["model"], rollout, body=body)
    before, after = await play.calls(rollout, 0)
    assert (after.continuity, after.parent) == ("append", before.position)


async def test_the_same_words_in_other_tokens_at_another_process_are_not_joined(
    play: Orchestrator, servers: dict[str, str], other: Launcher, vllm: SamplingVllm
) -> None:
    vllm.policy = twice
    rollout = await play.rollout()
    await play.begin(rollout)
    for model in (servers["model"], other.urls["model"]):
        await call(model, rollout)
    going_on = [*CHAT["messages"], {"role": "assistant", "content": "so"}, {"role": "user", "content": "and"}]
    await call(servers["model"], rollout, body={**CHAT, "messages": going_on})
    last = (await play.calls(rollout, 0))[-1]
    assert (last.continuity, last.continuity_reason) == ("new_segment", "parent_ambiguous")


async def test_a_killed_process_costs_the_calls_that_were_under_way(
    play: Orchestrator,
    servers: dict[str, str],
    launch: Callable[..., Launcher],
    vllm: SamplingVllm,
    storage: dict[str, Any],
) -> None:
    doomed = launch(*sections(vllm.url, storage))
    rollouts = {agent: await play.rollout() for agent in AGENTS}
    vllm.policy = hanging_after(5, vllm)
    dying = []
    for agent, rollout in rollouts.items():
        await play.begin(rollout)
        dying.append(asyncio.create_task(play.run(doomed.urls[agent], rollout, 0)))
        await asyncio.to_thread(vllm.wait_until_hanging, len(dying))
    doomed.kill()
    assert all(isinstance(end, httpx.TransportError) for end in await asyncio.gather(*dying, return_exceptions=True))
    vllm.release()
    vllm.policy = splitting
    for agent, rollout in rollouts.items():
        before = await play.calls(rollout, 0)
        assert outcomes(before) == "ggggg"
        vllm.generations.clear()
        await play.begin(rollout)
        assert (await play.run(servers[agent], rollout, 1)).body["reward"] == 1.0
        after = await play.calls(rollout, 1)
        assert outcomes(after) == "rrrrr" + "g" * len(vllm.generations)
        assert sampled(after[:5]) == sampled(before)
        assert (after[5].continuity, after[5].parent) == ("append", before[4].position)
