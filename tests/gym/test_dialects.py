"""Every dialect and its stream is recorded live, and replayed with the same bytes."""

import pytest

from tests.gym.model_calls import CHAT, DIALECTS, call
from tests.gym.orchestrator import Orchestrator, outcomes, sampled
from tests.gym.sampling_vllm import SamplingVllm

pytestmark = pytest.mark.integration

MODELS = ("model", "compaction_model")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_dialect_is_recorded_and_replayed_byte_by_byte(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, dialect: str, model: str
) -> None:
    rollout = await play.rollout()
    path, body = DIALECTS[dialect]
    answers = []
    for attempt in (0, 1):
        await play.begin(rollout)
        answers.append(await call(servers[model], rollout, attempt, path, body))
        assert answers[-1].status_code == 200, answers[-1].text
    assert "dial 1 is 1 to 9" in answers[0].text
    assert answers[1].content == answers[0].content
    assert len(vllm.generations) == 1
    live, replayed = await play.calls(rollout, 0), await play.calls(rollout, 1)
    assert (outcomes(live), outcomes(replayed)) == ("g", "r")
    assert sampled(live) == sampled(replayed)
    assert list(live[0].sampled_token_ids) == vllm.generations[0].sampled_token_ids


@pytest.mark.parametrize("model", MODELS)
async def test_a_conversation_goes_on_exactly_in_the_chat_dialect(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, model: str
) -> None:
    rollout = await play.rollout()
    await play.begin(rollout)
    first = (await call(servers[model], rollout)).json()["choices"][0]["message"]
    said = {key: first[key] for key in ("role", "content", "tool_calls")}
    hint = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": '{"hint": "higher"}'}
    body = {**CHAT, "messages": [*CHAT["messages"], said, hint]}
    assert (await call(servers[model], rollout, body=body)).status_code == 200
    before, after = await play.calls(rollout, 0)
    assert (after.continuity, after.parent) == ("append", before.position)
    whole = before.prompt_token_ids + before.sampled_token_ids
    assert after.prompt_token_ids[: len(whole)] == whole


async def test_the_responses_dialect_without_exact_tokens_goes_on_by_its_conversation(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm
) -> None:
    """As an agent does that knows nothing of compaction, in front of the server for agents that do."""
    rollout = await play.rollout()
    await play.begin(rollout)
    path, body = DIALECTS["responses"]
    output = (await call(servers["compaction_model"], rollout, 0, path, body)).json()["output"]
    hint = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": '{"hint": "higher"}'}
    longer = {**body, "input": [*body["input"], *output, hint]}
    assert (await call(servers["compaction_model"], rollout, 0, path, longer)).status_code == 200
    assert [one.continuity for one in await play.calls(rollout, 0)] == ["root", "append"]
