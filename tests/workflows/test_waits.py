"""Time in a group: back-off, budgets of attempts, deadlines. On a service that skips time.

Waits are long and counted in a large unit, so that the seconds a busy machine adds do not matter.
"""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.testing import WorkflowEnvironment

from activities.errors import AgentFailed, HandedOver, IntegrityError, PolicyMismatch
from configs.training import TrainingConfig
from tests.workflows.building import (
    group_id,
    group_input,
    policy,
    result_later,
    rollout_id,
    start_group,
    start_step,
    step_input,
)
from tests.workflows.fake_run import Call, Dies, FakeRun, Masked, Valid
from workflows.messages import RunPolicy

INFRA = AgentFailed("HTTP 500")
DATA = IntegrityError("tokens contradict themselves")


UNIT_S = 100.0


def slowly(**failure: Any) -> RunPolicy:
    """A policy of one rollout that waits a unit before its first retry, and thirty at most."""
    return policy(rollouts=1, backoff_base_s=UNIT_S, max_backoff_s=30 * UNIT_S, **failure)


def units(earlier: Call, later: Call) -> int:
    """The workflow time between two calls."""
    return round((later.at - earlier.at).total_seconds() / UNIT_S)


def waits(run: FakeRun) -> list[int]:
    """Waits between the tries of rollouts."""
    return [units(earlier, later) for earlier, later in pairwise(run.calls_of("run_rollout"))]


async def test_an_infrastructure_failure_is_retried_with_doubling_waits(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [INFRA] * 4
    result = await (await start_group(skipping, run, group_input(run, slowly()))).result()
    assert result.valid == 1
    assert waits(run) == [1, 2, 4, 8]


async def test_waits_have_a_cap(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [INFRA] * 6
    chosen = slowly(max_infra_attempts_per_prompt=7)
    await (await start_group(skipping, run, group_input(run, chosen))).result()
    assert waits(run) == [1, 2, 4, 8, 16, 30]


async def test_five_infrastructure_failures_cost_fifteen_first_waits_and_then_the_rollout(
    skipping: Client, run: FakeRun
) -> None:
    run.script[rollout_id(run, 0)] = [INFRA] * 5
    result = await (await start_group(skipping, run, group_input(run, slowly()))).result()
    assert (result.lost, run.attempts[rollout_id(run, 0)]) == (1, 5)
    assert waits(run) == [1, 2, 4, 8]
    assert units(run.calls_of("run_rollout")[0], run.calls_of("lose_rollout")[0]) == 15


async def test_a_rollout_that_is_handed_over_goes_on_at_once(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [INFRA, HandedOver("the worker stops"), INFRA, INFRA, INFRA, INFRA]
    result = await (await start_group(skipping, run, group_input(run, slowly()))).result()
    assert (result.lost, run.attempts[rollout_id(run, 0)]) == (1, 6)
    assert waits(run) == [1, 0, 2, 4, 8]


async def test_endpoints_that_never_keep_the_policy_end_in_a_lost_rollout(skipping: Client, run: FakeRun) -> None:
    run.serving, run.refits_stick = -1, False
    result = await (await start_group(skipping, run, group_input(run, policy()))).result()
    assert (result.state, result.lost, result.bucket) == ("dropped", 2, "infra")
    assert run.count("restore_policy") == policy().generation.max_refit_attempts * 2
    assert result.failure_classes == ("PolicyMismatch",)


async def test_a_policy_that_cannot_be_restored_costs_infrastructure_failures(skipping: Client, run: FakeRun) -> None:
    """The endpoint is down for all tries of the first restore; the rollout waits and asks again."""
    run.serving = -1
    run.restores.extend([INFRA] * policy().generation.max_refit_attempts)
    result = await (await start_group(skipping, run, group_input(run, slowly()))).result()
    assert (result.valid, result.failure_classes) == (1, ("PolicyMismatch",))
    assert run.count("restore_policy") == policy().generation.max_refit_attempts + 1
    assert waits(run) == [1, 0]


async def test_a_rollout_whose_infrastructure_budget_is_used_up_is_lost(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [INFRA] * 9
    result = await (await start_group(skipping, run, group_input(run, policy()))).result()
    assert (result.state, result.valid, result.lost) == ("sealed", 1, 1)
    lost = run.groups[group_id(run)].settled[0]
    assert (lost.state, lost.attempt, lost.reason) == ("lost", 4, "AgentFailed (agent): agent_run_error: HTTP 500")
    assert run.attempts[rollout_id(run, 0)] == 5


async def test_a_data_failure_gets_a_fresh_sample_at_once(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA]
    result = await (await start_group(skipping, run, group_input(run, slowly()))).result()
    assert result.valid == 1
    assert waits(run) == [0]


@pytest.mark.parametrize(
    ("failures", "attempts", "last"),
    [
        ([DATA, INFRA, INFRA, INFRA, INFRA, DATA], 6, "IntegrityError"),
        ([INFRA, INFRA, INFRA, INFRA, DATA, INFRA], 6, "AgentFailed"),
        ([DATA, DATA], 2, "IntegrityError"),
    ],
    ids=["DIIIID", "IIIIDI", "DD"],
)
async def test_budgets_neither_reset_nor_consume_each_other(
    skipping: Client, run: FakeRun, failures: list[AgentFailed | IntegrityError], attempts: int, last: str
) -> None:
    run.script[rollout_id(run, 0)] = [*failures, Valid(1.0)]
    result = await (await start_group(skipping, run, group_input(run, policy(rollouts=1)))).result()
    assert (result.state, result.lost) == ("dropped", 1)
    assert run.attempts[rollout_id(run, 0)] == attempts
    assert last in (run.groups[group_id(run)].settled[0].reason or "")


async def test_a_data_failure_does_not_start_the_waits_over(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [INFRA, INFRA, DATA, INFRA, INFRA]
    await (await start_group(skipping, run, group_input(run, slowly()))).result()
    assert waits(run) == [1, 2, 0, 4, 8]


async def test_a_dead_rollout_worker_costs_one_attempt(own_env: WorkflowEnvironment, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Dies()]
    handle = await start_group(own_env.client, run, group_input(run, policy(rollouts=1)))
    await run.until(lambda: run.count("run_rollout") == 1)
    result = await result_later(own_env, handle, policy().rollouts.heartbeat_timeout_s + 1)
    assert (result.valid, run.attempts[rollout_id(run, 0)]) == (1, 2)


async def test_a_dead_worker_costs_the_rollout_that_may_run_once(own_env: WorkflowEnvironment, run: FakeRun) -> None:
    run.runs_once = True
    run.script[rollout_id(run, 0)] = [Dies()]
    handle = await start_group(own_env.client, run, group_input(run, policy(rollouts=1)))
    await run.until(lambda: run.count("run_rollout") == 1)
    result = await result_later(own_env, handle, policy().rollouts.heartbeat_timeout_s + 1)
    assert (result.lost, result.bucket, run.attempts[rollout_id(run, 0)]) == (1, "infra", 1)


async def test_a_group_without_enough_valid_rollouts_is_dropped_and_says_why(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [INFRA] * 5
    run.script[rollout_id(run, 1)] = [Masked("truncated")]
    chosen = policy(rollouts=3, min_valid=2)
    result = await (await start_group(skipping, run, group_input(run, chosen))).result()
    assert (result.state, result.bucket) == ("dropped", "infra")
    assert result.reason == (
        "prompt prompt-a: 1 of 3 rollouts are valid, 2 are needed (rollout-0 lost after 5 attempts: "
        "AgentFailed (agent): agent_run_error: HTTP 500; rollout-1 masked after 1 attempt: truncated)"
    )
    stored = run.groups[group_id(run)]
    assert (stored.state, stored.bucket, stored.reason) == ("dropped", "infra", result.reason)


async def test_infrastructure_failures_before_a_lost_policy_still_count(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [INFRA, INFRA, PolicyMismatch("the server was started again"), INFRA]
    chosen = policy(rollouts=1, max_infra_attempts_per_prompt=3)
    result = await (await start_group(skipping, run, group_input(run, chosen))).result()
    assert (result.state, result.lost, run.count("restore_policy")) == ("dropped", 1, 1)


async def test_a_parked_group_that_nobody_decides_is_dropped(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    chosen = policy(rollouts=1, on_dropped_prompt="park")
    result = await (await start_group(skipping, run, group_input(run, chosen))).result()
    assert (result.state, result.bucket) == ("dropped", "data")
    parked, dropped = run.calls_of("seal_group")
    assert 1 <= (dropped.at - parked.at) / timedelta(days=1) < 1.01
    assert "prompt prompt-a: 0 of 1 rollouts are valid" in (result.reason or "")
    assert "nobody decided within 1 day, 0:00:00" in (result.reason or "")


async def test_a_dead_trainer_costs_another_try(own_env: WorkflowEnvironment, run: FakeRun) -> None:
    run.trainer = [Dies()]
    handle = await start_step(own_env.client, step_input(run, policy()))
    await run.until(lambda: run.count("train_step") == 1)
    result = await result_later(own_env, handle, 61)
    assert (result.weights, run.count("train_step"), run.applied) == (run.weights(1), 2, {0: "batch-0"})


async def test_a_trainer_that_stays_dead_ends_the_step(skipping: Client, run: FakeRun) -> None:
    run.trainer = [AgentFailed("out of memory")] * 9
    chosen = policy(training=TrainingConfig(max_train_attempts=3))
    with pytest.raises(WorkflowFailureError):
        await (await start_step(skipping, step_input(run, chosen))).result()
    assert (run.count("train_step"), run.applied) == (3, {})
