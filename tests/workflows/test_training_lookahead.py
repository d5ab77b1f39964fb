"""Sampling ahead: later steps sample while one trains, give groups to it, and cost nobody but themselves."""

import asyncio
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle

from activities.errors import AgentFailed, IntegrityError
from tests.workflows.building import (
    asked,
    group_id,
    policy,
    rollout_id,
    run_input,
    start_run,
    start_step,
    step_input,
    until_closed,
    until_ended,
    until_shown,
)
from tests.workflows.fake_run import FakeRun, Hangs
from workflows.messages import (
    BudgetState,
    RunPolicy,
    RunResult,
)
from workflows.requests import (
    PauseRun,
    ResumeRun,
    StopRun,
)
from workflows.training_run import TrainingRun
from workflows.training_step import TrainingStep

DATA = IntegrityError("tokens contradict themselves")
INFRA = AgentFailed("HTTP 500")


def ahead(by: int, steps: int, prompts: int = 1, grpo: dict[str, Any] | None = None, **failure: Any) -> RunPolicy:
    """A policy that samples ahead; one rollout each."""
    return policy(prompts=prompts, rollouts=1, ahead=by, grpo={"max_num_steps": steps, **(grpo or {})}, **failure)


def replacing(steps: int = 2, by: int = 1, **failure: Any) -> RunPolicy:
    """A policy of two prompts that replaces what is dropped."""
    budgets = {"max_skipped_prompts": 5, **failure}
    return ahead(by, steps, prompts=2, on_dropped_prompt="replace", **budgets)


def sealed(run: FakeRun, step: int) -> int:
    """Groups of a step that are sealed."""
    return sum(group.state == "sealed" and group.opened.step == step for group in run.groups.values())


async def test_later_steps_sample_while_one_trains_and_no_further(client: Client, run: FakeRun) -> None:
    run.trainer = [Hangs()]
    handle = await start_run(client, run_input(run, ahead(2, steps=9)))
    await run.until(lambda: run.count("train_step") == 1 and sealed(run, 1) == sealed(run, 2) == 1)
    assert {group.opened.step for group in run.groups.values()} == {0, 1, 2}
    assert not run.applied
    run.release.set()
    assert (await handle.result()).steps == 9
    assert list(run.applied) == list(range(9))
    run.check_identity()


async def test_groups_in_flight_or_ready_never_exceed_the_buffer(client: Client, run: FakeRun) -> None:
    by, prompts, most = 2, 2, 0
    handle = await start_run(client, run_input(run, ahead(by, steps=5, prompts=prompts)))
    while (await handle.describe()).status == WorkflowExecutionStatus.RUNNING:
        most = max(most, sum(group.state != "trained" for group in run.groups.values()))
        await asyncio.sleep(0)
    assert 1 <= most <= prompts * (by + 1)
    assert (await handle.result()).steps == 5


async def test_prompts_come_in_the_order_of_steps(client: Client, run: FakeRun) -> None:
    await (await start_run(client, run_input(run, ahead(2, steps=4, prompts=2)))).result()
    prompts = [run.groups[group_id(run, slot, step)].opened.prompt_id for step in range(4) for slot in range(2)]
    assert prompts == [f"train-prompt-{position}" for position in range(8)]


async def test_groups_may_be_sampled_by_every_version_up_to_their_step(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_run(client, run_input(run, ahead(1, steps=3)))
    await run.until(lambda: sealed(run, 1) == 1)
    run.release.set()
    await handle.result()
    allowed = {
        rollout["step"]: (rollout["policy_version"], rollout["newest_policy_version"])
        for rollout in (call.request.model_dump() for call in run.calls_of("run_rollout"))
    }
    assert allowed == {0: (0, 0), 1: (0, 1), 2: (1, 2)}
    assert [run.metrics[step]["train/staleness_max"] for step in range(3)] == [0, 1, 1]
    assert run.metrics[1]["train/stale_prompt_groups"] == 0


async def test_a_slow_group_delays_its_own_step_only(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0, step=1)] = [Hangs()]
    handle = await start_run(client, run_input(run, ahead(2, steps=4)))
    await run.until(lambda: 0 in run.applied and sealed(run, 2) == 1 and sealed(run, 3) == 1)
    assert run.groups[group_id(run, step=1)].state == "open"
    assert list(run.applied) == [0]
    run.release.set()
    assert (await handle.result()).steps == 4


async def test_drops_of_steps_in_flight_count_in_the_order_in_which_they_end(real: Client, run: FakeRun) -> None:
    """Drop, drop, keep, drop, drop, drop over two steps: the sixth is the third in a row."""
    chosen = ahead(
        1,
        steps=2,
        prompts=4,
        max_infra_attempts_per_prompt=1,
        max_consecutive_dropped_prompts=2,
        min_step_batch_fraction=0.1,
    )
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    gates = {place: asyncio.Event() for place in order}
    for (step, slot), kept in zip(order, [False, False, True, False, False, False], strict=True):
        run.gates[rollout_id(run, 0, slot, step)] = gates[step, slot]
        run.script[rollout_id(run, 0, slot, step)] = [] if kept else [INFRA]
    for step in (0, 1):
        run.script[rollout_id(run, 0, 3, step)] = [Hangs()]
    handle = await start_run(real, run_input(run, chosen))
    counters: list[int] = []
    for number, place in enumerate(order):
        gates[place].set()
        await run.until(lambda number=number: len(run.ended) > number)
        counters.append(run.budgets().consecutive_drops)
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert counters == [1, 2, 0, 1, 2, 3]
    state, reason = run.states[-1]
    assert state == "failed"
    assert "step 1: 3 prompt groups in a row were dropped" in (reason or "")
    assert f"{group_id(run, 2, 1)}" in (reason or "")


async def test_a_failing_later_step_ends_the_run_and_leaves_nothing_running(real: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    run.script[rollout_id(run, 0, step=1)] = [DATA, DATA]
    handle = await start_run(real, run_input(run, ahead(2, steps=3)))
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    state, reason = run.states[-1]
    assert (state, "step 1: skipped 0 prompts" in (reason or "")) == ("failed", True)
    for step in range(3):
        await until_closed(real, f"{run.id}/step-{step}")
    await run.until(lambda: all(group.state in ("dropped", "sealed") for group in run.groups.values()))
    assert run.groups[group_id(run)].reason == "cancelled"


async def test_a_lost_place_is_taken_by_the_first_kept_group_of_the_furthest_step(client: Client, run: FakeRun) -> None:
    run.gates[rollout_id(run, 0)] = asyncio.Event()
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    run.gates[rollout_id(run, 0, 0, step=2)] = asyncio.Event()
    handle = await start_run(client, run_input(run, replacing(steps=3, by=2)))
    await run.until(lambda: sealed(run, 1) == 2 and sealed(run, 2) == 1)
    await until_ended(client, run, 2, 1)
    run.gates[rollout_id(run, 0, 0, step=2)].set()
    await until_ended(client, run, 2, 2)
    first = group_id(run, 1, step=2)
    run.gates[rollout_id(run, 0)].set()
    result = await handle.result()
    assert result.steps == 3
    promoted = run.groups[first]
    assert (promoted.train_step, promoted.replaces, promoted.state) == (0, group_id(run), "trained")
    assert run.batches[0][1] == tuple(sorted([first, group_id(run, 1)]))
    assert run.groups[group_id(run, 2, step=2)].replaces == first
    assert (run.metrics[0]["train/promoted_prompt_groups"], run.metrics[0]["train/replaced_prompt_groups"]) == (1, 0)
    assert (run.metrics[2]["train/replaced_prompt_groups"], run.metrics[2]["train/given_away_prompt_groups"]) == (1, 1)
    assert [run.metrics[step]["train/prompt_groups"] for step in range(3)] == [2, 2, 2]
    run.check_identity()


async def test_when_the_lender_s_spare_fails_the_lender_is_short(client: Client, run: FakeRun) -> None:
    run.gates[rollout_id(run, 0)] = asyncio.Event()
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    run.script[rollout_id(run, 0, 2, step=1)] = [DATA, DATA]
    chosen = replacing(steps=2, min_step_batch_fraction=0.5, max_replacement_attempts=1)
    handle = await start_run(client, run_input(run, chosen))
    await run.until(lambda: sealed(run, 1) == 2)
    await until_ended(client, run, 1, 2)
    run.gates[rollout_id(run, 0)].set()
    await handle.result()
    assert [run.metrics[step]["train/prompt_groups"] for step in (0, 1)] == [2, 1]
    assert run.metrics[1]["train/dropped_prompt_groups"] == 1


async def test_without_a_ready_group_the_step_takes_a_spare_itself(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    for slot in (0, 1):
        run.script[rollout_id(run, 0, slot, step=1)] = [Hangs()]
    handle = await start_run(client, run_input(run, replacing()))
    await run.until(lambda: 0 in run.applied)
    assert run.batches[0][1] == (group_id(run, 1), group_id(run, 2))
    run.release.set()
    await handle.result()
    assert run.metrics[0]["train/replaced_prompt_groups"] == 1


async def test_a_refusal_of_the_ledger_means_no(client: Client, run: FakeRun) -> None:
    run.gates[rollout_id(run, 0)] = asyncio.Event()
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    run.promotions_are_refused = True
    handle = await start_run(client, run_input(run, replacing()))
    await run.until(lambda: sealed(run, 1) == 2)
    await until_ended(client, run, 1, 2)
    run.gates[rollout_id(run, 0)].set()
    await handle.result()
    assert run.count("promote_group") == 1
    assert [batch[1] for batch in run.batches.values()] == [
        (group_id(run, 1), group_id(run, 2)),
        (group_id(run, 0, 1), group_id(run, 1, 1)),
    ]


async def test_a_later_step_that_does_not_run_means_no(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    result = await (await start_step(client, step_input(run, replacing()))).result()
    assert (result.trained, result.replaced, result.promoted) == (2, 1, 0)


async def test_a_step_that_has_its_turn_lends_nothing(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0, step=1)] = [Hangs()]
    later = await start_step(client, step_input(run, replacing(), step=1))
    await run.until(lambda: sealed(run, 1) == 1)
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    await (await start_step(client, step_input(run, replacing()))).result()
    assert run.count("promote_group") == 0
    run.release.set()
    run.serving = 0
    assert (await later.result()).trained == 2


async def test_a_promotion_survives_a_restart_of_both_steps(real: Client, run: FakeRun) -> None:
    """Executed again, the borrower has the group that it was given, and the lender its spare."""
    run.gates[rollout_id(run, 0)] = asyncio.Event()
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    run.script[rollout_id(run, 0, 1)] = [Hangs()]
    run.script[rollout_id(run, 0, 2, step=1)] = [Hangs()]
    chosen = replacing()
    handle = await start_run(real, run_input(run, chosen))
    await run.until(lambda: sealed(run, 1) == 2)
    await until_ended(real, run, 1, 2)
    run.gates[rollout_id(run, 0)].set()
    await run.until(lambda: run.attempts.get(rollout_id(run, 0, 2, step=1), 0) == 1)
    await handle.terminate("power cut")
    for name in [f"{run.id}/step-{step}" for step in (0, 1)] + list(run.groups):
        await until_closed(real, name)
    claims = dict(run.claims)
    assert (await (await start_run(real, run_input(run, chosen))).result()).steps == 2
    assert run.claims == claims
    assert [len(run.batches[step][1]) for step in (0, 1)] == [2, 2]
    assert run.count("promote_group") == 1
    run.check_identity()


async def test_a_lender_that_died_before_it_drew_its_spare_draws_it_when_it_runs_again(
    real: Client, run: FakeRun
) -> None:
    later = await start_step(real, step_input(run, replacing(), step=1), turn=False)
    await run.until(lambda: sealed(run, 1) == 2)
    await later.terminate("power cut")
    assert run.promote(group_id(run, 0, 1), 0, "lost") is None
    run.claim("train", 1, 2)  # the spare was claimed, and its group never opened
    result = await (await start_step(real, step_input(run, replacing(), step=1))).result()
    assert (result.trained, result.replaced) == (2, 1)
    assert run.batches[1][1] == (group_id(run, 1, 1), group_id(run, 2, 1))
    assert len(run.claims) == 3


async def test_a_paused_run_keeps_what_later_steps_sample(client: Client, run: FakeRun) -> None:
    run.trainer = [Hangs()]
    handle = await start_run(client, run_input(run, ahead(2, steps=5)))
    await run.until(lambda: run.count("train_step") == 1 and sealed(run, 1) == sealed(run, 2) == 1)
    await handle.execute_update(TrainingRun.pause, asked(PauseRun))
    run.release.set()
    await run.until(lambda: run.states[-1:] == [("paused", "paused by ada: a test")])
    assert (list(run.applied), sealed(run, 1), sealed(run, 2)) == ([0], 1, 1)
    assert not [group for group in run.groups.values() if group.opened.step == 3]
    await handle.execute_update(TrainingRun.resume, asked(ResumeRun))
    assert (await handle.result()).steps == 5


async def test_a_stopped_run_drains_later_steps_and_a_resumed_one_uses_what_they_sampled(
    client: Client, run: FakeRun
) -> None:
    run.trainer = [Hangs()]
    run.script[rollout_id(run, 0, step=2)] = [Hangs()]
    handle = await start_run(client, run_input(run, ahead(2, steps=4)))
    await run.until(lambda: run.count("train_step") == 1 and sealed(run, 1) == 1)
    await handle.execute_update(TrainingRun.stop, asked(StopRun))
    run.release.set()
    result = await handle.result()
    assert (result.state, result.steps, list(run.applied)) == ("stopped", 1, [0])
    assert (sealed(run, 1), sealed(run, 2)) == (1, 1)
    assert run.states[-1] == ("stopped", "stopped by ada: a test")
    rollouts = run.count("run_rollout")
    run.release.clear()
    again = await (await start_run(client, run_input(run, ahead(2, steps=4), next_step=1))).result()
    assert (again.state, again.steps, run.count("run_rollout")) == ("completed", 4, rollouts + 1)
    run.check_identity()


async def test_a_drained_step_decides_nothing_about_what_it_lost(client: Client, run: FakeRun) -> None:
    run.gates[rollout_id(run, 0)] = asyncio.Event()
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    handle = await start_step(client, step_input(run, policy(rollouts=1)), turn=False)
    await handle.signal(TrainingStep.drain)
    await run.until(lambda: run.attempts.get(rollout_id(run, 0), 0) == 1)
    run.gates[rollout_id(run, 0)].set()
    result = await handle.result()
    assert (result.state, result.weights, result.dropped) == ("drained", None, 1)
    assert run.groups[group_id(run)].state == "dropped"
    again = await (await start_step(client, step_input(run, policy(rollouts=1)))).result()
    assert (again.state, again.trained, run.budgets()) == ("applied", 2, BudgetState())


async def test_an_evaluation_comes_before_the_next_step_trains_while_later_ones_sample(
    client: Client, run: FakeRun
) -> None:
    run.script[f"{run.id}/eval-1/group-0/rollout-0"] = [Hangs()]
    run.validation_prompts = 1
    handle = await start_run(client, run_input(run, ahead(1, steps=2, grpo={"val_period": 1})))
    await run.until(lambda: run.attempts.get(f"{run.id}/eval-1/group-0/rollout-0") == 1 and sealed(run, 1) == 1)
    assert (list(run.applied), run.serving) == ([0], 1)
    run.release.set()
    await handle.result()
    assert [evaluation.version for evaluation in run.evaluations] == [1, 2]
    assert list(run.applied) == [0, 1]


async def continued_as(handle: WorkflowHandle[TrainingRun, RunResult]) -> str | None:
    """The next execution of a workflow that was continued as new."""
    last = (await handle.fetch_history()).events[-1]
    return last.workflow_execution_continued_as_new_event_attributes.new_execution_run_id or None


async def test_a_run_that_goes_on_in_new_executions_drains_its_window_first(client: Client, run: FakeRun) -> None:
    handle = await start_run(client, run_input(run, ahead(2, steps=7), steps_per_execution=3))
    assert (await handle.result()).steps == 7
    assert list(run.applied) == list(range(7))
    assert run.published == list(range(8))
    executions, newest = 1, handle.first_execution_run_id
    while newest := await continued_as(client.get_workflow_handle(run.id, run_id=newest)):
        executions += 1
    assert executions == 3


async def test_a_step_waits_for_its_turn(client: Client, run: FakeRun) -> None:
    handle = await start_step(client, step_input(run, policy()), turn=False)
    await until_shown(handle, "2 of 2 groups ended")
    assert not run.batches
    await handle.signal(TrainingStep.take_turn, run.weights(0))
    assert (await handle.result()).state == "applied"
