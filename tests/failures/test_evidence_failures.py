"""What an attempt leaves behind cannot be trusted, or not be told apart: raised, masked, or no part of the rollout.

These are the reasons for which NeMo-Gym's token capture rejects a rollout, as far as they exist here, and the line
"data-integrity error" of NeMo-RL's failure table.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from temporalio.exceptions import ApplicationError

from tests.failures.policy_server import CALLS, refusing
from tests.failures.test_infrastructure_failures import replayed
from tests.failures.world import World, ends
from tests.gym.stub_model import Reply

pytestmark = pytest.mark.integration

WHOLE = "g" * CALLS
Body = dict[str, Any]


def short_log_probs(answer: Body) -> None:
    answer["choices"][0]["logprobs"]["content"].pop()


def log_prob_that_is_no_number(answer: Body) -> None:
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")


def infinite_log_prob(answer: Body) -> None:
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = float("-inf")


def missing_log_prob(answer: Body) -> None:
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = None


def unknown_weights(answer: Body) -> None:
    answer["choices"][0]["weight_versions"][0]["version"] = "default"


def gap_in_the_versions(answer: Body) -> None:
    answer["choices"][0]["weight_versions"][0]["start"] = 1


def another_prompt(answer: Body) -> None:
    answer["prompt_token_ids"].pop(0)


@pytest.mark.parametrize(
    ("distort", "failure_class"),
    [
        (short_log_probs, "ContinuityBroken"),
        (log_prob_that_is_no_number, "ContinuityBroken"),
        (infinite_log_prob, "ContinuityBroken"),
        (missing_log_prob, "ContinuityBroken"),
        (another_prompt, "ContinuityBroken"),
        (unknown_weights, "UnknownWeightVersion"),
        (gap_in_the_versions, "UnknownWeightVersion"),
    ],
)
async def test_a_response_that_is_not_whole_is_never_recorded(
    world: World, distort: Callable[[Body], None], failure_class: str
) -> None:
    world.episode.breaks(2, lambda: world.vllm.distorts(distort), times=1)
    retried = replayed(world, await world.run_group("simple"), "500", "AgentFailed infra", wasted=1)
    assert retried.calls[0].endswith("f")
    assert retried.events[0][-1].failure_class == failure_class


async def test_an_agent_whose_calls_nobody_records_is_an_error_and_never_masked(world: World) -> None:
    ended = await world.run_group("unrecorded")
    assert ended.counts == ("dropped", 0, 0, 2)
    assert ended.result.bucket == "data"
    for rollout in ended.rollouts:
        assert (rollout.statuses, rollout.calls) == (("200", "200"), ("", ""))
        assert rollout.ends == ["IntegrityError data"] * 2
        assert "none of its model calls is recorded" in (rollout.attempts[0].cause or "")
        assert "after a data failure" in (rollout.attempts[1].fresh_reason or "")


async def test_an_agent_that_refuses_the_row_is_a_data_failure(world: World) -> None:
    ended = await world.run_group("simple", row={"responses_create_params": {"input": 5}})
    assert ended.counts == ("dropped", 0, 0, 2)
    assert ended.result.bucket == "data"
    for rollout in ended.rollouts:
        assert (rollout.statuses, rollout.calls) == (("422", "422"), ("", ""))
        assert rollout.ends == ["AgentRefused data"] * 2


async def test_a_recorded_response_that_changed_is_not_replayed(world: World, storage: Body) -> None:
    world.episode.breaks(3, refusing(500))
    recipe = await world.new_run("simple")
    request = await world.open_rollout(recipe)
    with pytest.raises(ApplicationError, match="HTTP 500"):
        await world.attempt(request)
    await _tamper(storage, request.rollout_id)
    group = await world.start_group(recipe, 1)
    assert (await group.handle.result()).valid == 1
    (rollout,) = (await world.ledger.groups.get(group.id)).rollouts
    assert ends(rollout) == ["AgentFailed infra", "EvidenceCorrupt data", "settled"]
    assert "EvidenceCorrupt" in (rollout.attempts[2].fresh_reason or "")
    last = await world.ledger.calls.of_attempt(rollout.rollout_id, 2)
    assert [call.outcome for call in last] == ["generated"] * CALLS


async def test_a_recorded_response_that_changed_is_not_trained(world: World, storage: Body) -> None:
    async with world.verifying("simple") as group:
        await _tamper(storage, f"{group.id}/rollout-0")
    assert (await group.handle.result()).valid == 1
    (rollout,) = (await world.ledger.groups.get(group.id)).rollouts
    assert ends(rollout) == ["EvidenceCorrupt data", "settled"]
    assert "EvidenceCorrupt" in (rollout.attempts[1].fresh_reason or "")
    last = await world.ledger.calls.of_attempt(rollout.rollout_id, 1)
    assert [call.outcome for call in last] == ["generated"] * CALLS


async def test_a_call_that_never_returns_is_not_part_of_the_rollout(world: World) -> None:
    async with world.verifying("simple") as group:
        hold = world.episode.holds(0)
        aside = asyncio.create_task(group.say("an aside", expect=404))
        await hold.reached()
    ended = await group.end()
    hold.release()
    await aside  # far too late: the rollout is settled
    (rollout,) = ended.sound
    assert (rollout.calls, rollout.settled.model_calls) == ((WHOLE,), CALLS)
    assert await world.seen(group.id) == (ended.group, ended.rollouts)
    leases = await world.ledger.calls.leases(rollout.record.rollout_id, 0)
    assert len(leases) == CALLS + 1


async def test_a_call_that_failed_on_the_way_is_not_part_of_the_rollout(world: World) -> None:
    hold = world.episode.holds(3, unanswered=False)
    group = await world.start_group(await world.new_run("simple"), 1)
    await hold.reached()
    world.episode.breaks(0, refusing(500))
    await group.say("an aside", expect=503)
    hold.release()
    (rollout,) = (await group.end()).sound
    assert (rollout.calls, rollout.settled.model_calls) == (("ggggfg",), CALLS)


async def test_a_response_that_the_agent_threw_away_trains_nothing(world: World) -> None:
    async with world.verifying("simple") as group:
        await group.say("an aside")
    (rollout,) = (await group.end()).sound
    assert (rollout.calls, rollout.settled.model_calls) == ((WHOLE + "g",), CALLS)
    (row,) = await world.rows(rollout.record)
    assert int(row.loss_mask.sum()) == sum(event.generated_tokens for event in rollout.events[0][:CALLS])


async def test_an_agent_that_sends_no_tokens_is_told_by_what_is_recorded(world: World) -> None:
    ended = await world.run_group("simple", size=1, row={"forgets_tokens": True})
    (rollout,) = ended.sound
    assert (rollout.calls, rollout.settled.model_calls) == ((WHOLE,), CALLS)


async def test_two_ends_that_nothing_tells_apart_mask_the_rollout(world: World) -> None:
    world.episode.say = lambda number: Reply("done", answer="done")
    async with world.verifying("simple", row={"forgets_tokens": True}) as group:
        await group.say("Use the tool")
    ended = await group.end()
    (rollout,) = ended.broken
    assert (rollout.calls, rollout.statuses, rollout.ends) == (("gg",), ("200",), ["settled"])
    assert rollout.record.state == "masked"
    assert (rollout.record.reason or "").startswith("ambiguous_terminal")
    assert ended.counts == ("dropped", 0, 1, 0)


async def test_a_declared_end_that_is_not_recorded_masks_the_rollout(world: World) -> None:
    ended = await world.run_group("simple", size=1, row={"forgets_tokens": True, "declares": "chatcmpl-unknown"})
    (rollout,) = ended.broken
    assert (rollout.calls, rollout.statuses, rollout.record.state) == ((WHOLE,), ("200",), "masked")
    assert (rollout.record.reason or "").startswith("missing_terminal_row")


async def test_weights_may_change_in_the_middle_of_a_call_and_every_token_knows_its_own(world: World) -> None:
    world.episode.breaks(2, lambda: world.vllm.refit_in_next("policy-1"), times=1)
    ended = await world.run_group("simple", size=1)
    (rollout,) = ended.sound
    versions = [[span.version for span in event.weight_versions] for event in rollout.events[0]]
    assert versions == [["policy-0"], ["policy-0"], ["policy-0", "policy-1"], ["policy-1"], ["policy-1"]]
    assert (rollout.record.policy_version_min, rollout.record.policy_version_max) == (0, 1)
    assert ended.result.policy_version == 0


async def _tamper(storage: Body, rollout_id: str) -> None:
    """Change a recorded token, as only an administrator who switches the triggers off can."""
    connection = await asyncpg.connect(storage["dsn"])
    try:
        await connection.execute("set session_replication_role = replica")
        changed = await connection.execute(
            "update model_calls set tokens = set_byte(tokens, 0, get_byte(tokens, 0) # 1) "
            "where rollout_id = $1 and attempt = 0 and ordinal = 1",
            rollout_id,
        )
    finally:
        await connection.close()
    assert changed == "UPDATE 1"
