"""A later attempt is given what an earlier one recorded: same tokens, no generation, then live and exact."""

import asyncio
import itertools

import pytest

from tests.gym.orchestrator import Orchestrator, outcomes, sampled
from tests.gym.policies import dying_at, splitting
from tests.gym.recording_servers import AGENTS
from tests.gym.sampling_vllm import SamplingVllm

pytestmark = pytest.mark.integration

PATIENCE_S = 120.0


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_episode_is_recorded_call_by_call(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, agent: str
) -> None:
    rollout = await play.rollout()
    answer = await play.run(servers[agent], rollout, (await play.begin(rollout)).attempt)
    assert answer.body["reward"] == 1.0
    calls = await play.calls(rollout, 0)
    assert outcomes(calls) == "g" * len(vllm.generations)
    for call, generation in zip(calls, vllm.generations, strict=True):
        assert list(call.prompt_token_ids) == generation.prompt_token_ids
        assert list(call.sampled_token_ids) == generation.sampled_token_ids
        assert list(call.log_probs) == generation.log_probs
        assert [span.model_dump() for span in call.weight_versions] == generation.weight_versions


async def test_an_append_only_agent_has_one_segment(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    await play.run(servers["plain_agent"], rollout, (await play.begin(rollout)).attempt)
    calls = await play.calls(rollout, 0)
    assert [call.continuity for call in calls] == ["root"] + ["append"] * (len(calls) - 1)
    for before, call in itertools.pairwise(calls):
        assert call.parent == before.position
        whole = before.prompt_token_ids + before.sampled_token_ids
        assert call.prompt_token_ids[: len(whole)] == whole


async def test_compaction_starts_a_segment_and_says_why(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    await play.run(servers["compacting_agent"], rollout, (await play.begin(rollout)).attempt)
    calls = await play.calls(rollout, 0)
    rewritten = [call.ordinal for call in calls if call.continuity_reason == "history_rewritten"]
    assert rewritten == [ordinal for ordinal in (4, 8) if ordinal < len(calls)]
    assert [call.ordinal for call in calls if call.continuity != "append"] == [0, *rewritten]


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_attempt_that_died_is_continued_at_the_call_that_failed(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, agent: str
) -> None:
    rollout = await play.rollout()
    vllm.policy = dying_at(6)
    died = await play.run(servers[agent], rollout, (await play.begin(rollout)).attempt)
    assert died.status == 500
    assert "GenerationUnavailable" in died.text
    before = await play.calls(rollout, 0)
    assert outcomes(before) == "gggggf"
    assert before[5].failure_class == "GenerationUnavailable"

    vllm.policy = splitting
    vllm.generations.clear()
    begun = await play.begin(rollout)
    assert (begun.attempt, begun.sample, begun.recorded, begun.fresh_reason) == (1, 0, 5, None)
    answer = await play.run(servers[agent], rollout, 1)
    assert answer.body["reward"] == 1.0
    after = await play.calls(rollout, 1)
    assert outcomes(after) == "rrrrr" + "g" * len(vllm.generations)
    assert sampled(after[:5]) == sampled(before)
    border = after[5]
    assert (border.continuity, border.parent) == ("append", before[4].position)
    assert border.prompt_token_ids[: len(before[4].prompt_token_ids)] == before[4].prompt_token_ids


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_full_replay_gives_the_same_answer_byte_by_byte(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, agent: str
) -> None:
    rollout = await play.rollout()
    first = await play.run(servers[agent], rollout, (await play.begin(rollout)).attempt)
    vllm.generations.clear()
    second = await play.run(servers[agent], rollout, (await play.begin(rollout)).attempt)
    assert first.body["reward"] == 1.0
    assert second.but_the_attempt == first.but_the_attempt
    assert vllm.generations == []
    calls = await play.calls(rollout, 1)
    assert outcomes(calls) == "r" * len(calls)
    assert {call.replayed_from for call in calls} == {0}


async def test_another_rollout_is_another_sample(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    answers = []
    for _ in range(2):
        rollout = await play.rollout()
        answers.append(await play.run(servers["plain_agent"], rollout, (await play.begin(rollout)).attempt))
    assert answers[0].body["response"]["output"] != answers[1].body["response"]["output"]


async def test_a_fresh_attempt_replays_nothing(play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm) -> None:
    rollout = await play.rollout()
    await play.run(servers["plain_agent"], rollout, (await play.begin(rollout)).attempt)
    begun = await play.begin(rollout, recovery="fresh")
    assert (begun.sample, begun.recorded) == (1, 0)
    await play.run(servers["plain_agent"], rollout, begun.attempt)
    before, after = await play.calls(rollout, 0), await play.calls(rollout, 1)
    assert set(outcomes(after)) == {"g"}
    assert not set(sampled(before)) & set(sampled(after))


async def test_a_third_attempt_replays_what_two_attempts_recorded(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    for call, expected in ((3, "ggf"), (5, "rrggf")):
        vllm.policy = dying_at(call)
        begun = await play.begin(rollout)
        assert (await play.run(servers["compacting_agent"], rollout, begun.attempt)).status == 500
        assert outcomes(await play.calls(rollout, begun.attempt)) == expected
    vllm.policy = splitting
    assert (await play.run(servers["compacting_agent"], rollout, (await play.begin(rollout)).attempt)).status == 200
    calls = await play.calls(rollout, 2)
    assert outcomes(calls).startswith("rrrrg")
    assert [call.replayed_from for call in calls[:4]] == [0, 0, 1, 1]


async def test_an_attempt_that_was_overtaken_is_refused_and_changes_nothing(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    vllm.hang_next()
    late = asyncio.create_task(play.run(servers["plain_agent"], rollout, 0))
    await asyncio.to_thread(vllm.wait_until_hanging)
    await play.begin(rollout)
    answer = await play.run(servers["plain_agent"], rollout, 1)
    assert answer.body["reward"] == 1.0
    calls = await play.calls(rollout, 1)
    vllm.release()
    refused = await late
    assert refused.status == 500
    assert "attempt_fenced" in refused.text
    assert await play.calls(rollout, 0) == []
    assert await play.calls(rollout, 1) == calls


async def test_a_call_whose_client_went_away_is_released(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    vllm.hang_next()
    gone = asyncio.create_task(play.run(servers["plain_agent"], rollout, 0))
    await asyncio.to_thread(vllm.wait_until_hanging)
    gone.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while not all(lease.released_at for lease in await play.ledger.calls.leases(rollout, 0)):
            await asyncio.sleep(0.02)
    assert await play.calls(rollout, 0) == []
    assert (await play.run(servers["plain_agent"], rollout, 0)).body["reward"] == 1.0
    assert [lease.occurrence for lease in await play.ledger.calls.leases(rollout, 0)][:2] == [0, 0]
