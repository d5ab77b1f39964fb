"""An operator's requests to a run: what they do, when they change nothing, when they are refused; all are audited."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
)
from temporalio.exceptions import ApplicationError

from activities.errors import IntegrityError
from tests.workflows.building import (
    asked,
    group_id,
    policy,
    request,
    rollout_id,
    run_input,
    start_run,
    until_parked,
    until_shown,
)
from tests.workflows.fake_run import FakeRun, Hangs
from workflows.levers import LEVER_REFUSED, Decision
from workflows.messages import (
    BudgetState,
    RunInput,
    RunPolicy,
)
from workflows.prompt_group import PromptGroup
from workflows.requests import (
    DropGroup,
    Lever,
    LeverDone,
    LeverPreview,
    PauseRun,
    ResumeRun,
    SetBudget,
    SetFloor,
    StopRun,
)
from workflows.run_levers import RunFacts, decide, run_changes
from workflows.training_run import TrainingRun

DATA = IntegrityError("tokens contradict themselves")
Handle = WorkflowHandle[Any, Any]


def steps(count: int, **failure: Any) -> RunPolicy:
    """A policy of `count` steps of one prompt and one rollout."""
    return policy(prompts=1, rollouts=1, grpo={"max_num_steps": count}, **failure)


async def pulled(handle: Handle, verb: str, **arguments: Any) -> LeverDone:
    """A request that is not refused."""
    return await handle.execute_update(verb, request(**arguments), result_type=LeverDone)


async def refusal(handle: Handle, verb: str, **arguments: Any) -> str:
    """Why a request is refused."""
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await handle.execute_update(verb, request(**arguments))
    cause = caught.value.cause
    assert isinstance(cause, ApplicationError)
    assert cause.type == LEVER_REFUSED
    return cause.message


async def paused_run(client: Client, run: FakeRun, chosen: RunPolicy, **state: Any) -> Handle:
    """A run that waits."""
    handle = await start_run(client, run_input(run, chosen, paused=True, **state))
    await run.until(lambda: run.states[-1:] == [("paused", state.get("because"))])
    return handle


async def test_a_paused_run_finishes_its_step_waits_and_says_who_asked(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_run(client, run_input(run, steps(2)))
    await run.until(lambda: run.count("run_rollout") == 1)
    done = await pulled(handle, "pause")
    assert (done.target, done.verb, done.changed, done.state) == (run.id, "pause", True, "paused")
    assert not (await pulled(handle, "pause")).changed
    run.release.set()
    await run.until(lambda: run.states == [("paused", "paused by ada: a test")])
    assert "waits for: paused by ada: a test" in await until_shown(handle, "**paused**")
    assert list(run.applied) == [0]
    assert (await pulled(handle, "resume")).changed
    assert not (await pulled(handle, "resume")).changed
    assert (await handle.result()).steps == 2
    assert [state for state, _ in run.states] == ["paused", "running", "completed"]
    assert [(record.verb, record.outcome) for record in run.audit.values()] == [
        ("pause", "done"),
        ("pause", "unchanged"),
        ("resume", "done"),
        ("resume", "unchanged"),
    ]


async def test_a_run_that_was_paused_stays_paused_in_its_next_execution(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_run(client, run_input(run, steps(2), steps_per_execution=1))
    await run.until(lambda: run.count("run_rollout") == 1)
    await pulled(handle, "pause")
    run.release.set()
    await run.until(lambda: run.states == [("paused", "paused by ada: a test")])
    await pulled(client.get_workflow_handle(run.id), "resume")
    assert (await handle.result()).steps == 2


async def test_a_stopped_run_finishes_the_step_that_trains(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_run(client, run_input(run, steps(5)))
    await run.until(lambda: run.count("run_rollout") == 1)
    assert (await pulled(handle, "stop")).state == "stopping after step 0"
    assert not (await pulled(handle, "stop")).changed
    run.release.set()
    result = await handle.result()
    assert (result.state, result.steps, list(run.applied)) == ("stopped", 1, [0])
    assert run.states == [("stopped", "stopped by ada: a test")]


async def test_a_paused_run_stops_without_another_step(client: Client, run: FakeRun) -> None:
    handle = await paused_run(client, run, steps(5), weights=run.weights(0))
    await pulled(handle, "stop")
    result = await handle.result()
    assert (result.state, result.steps, run.applied) == ("stopped", 0, {})


async def test_a_run_stops_after_the_step_that_was_named(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_run(client, run_input(run, steps(5), steps_per_execution=1))
    await run.until(lambda: run.count("run_rollout") == 1)
    assert (await pulled(handle, "stop", after_step=2)).state == "stopping after step 2"
    run.release.set()
    result = await handle.result()
    assert (result.state, result.steps) == ("stopped", 3)


async def test_a_step_that_is_over_cannot_be_the_last_one(real: Client, run: FakeRun) -> None:
    handle = await paused_run(real, run, steps(9), next_step=4)
    assert "step 3 is over; the next one is 4" in await refusal(handle, "stop", after_step=3)
    assert [(record.verb, record.outcome) for record in run.audit.values()] == [("stop", "refused")]
    await handle.cancel()


async def test_a_new_budget_holds_at_once_and_for_a_resumed_run(client: Client, run: FakeRun) -> None:
    """Also for a step that began before, and in the recipe."""
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    run.script[rollout_id(run, 0, 1)] = [Hangs()]
    chosen = policy(
        prompts=2, rollouts=1, grpo={"max_num_steps": 1}, min_step_batch_fraction=0.5, on_dropped_prompt="park"
    )
    handle = await start_run(client, run_input(run, chosen))
    group = client.get_workflow_handle(group_id(run))
    await run.until(lambda: group_id(run) in run.groups)
    await until_parked(group)
    done = await pulled(handle, "set_budget", max_skipped_prompts=1, max_consecutive_dropped_prompts=3)
    assert done.changed
    assert run.recipe == {"failure.max_skipped_prompts": 1, "failure.max_consecutive_dropped_prompts": 3}
    await group.execute_update(PromptGroup.drop, asked(DropGroup))
    run.release.set()
    assert (await handle.result()).steps == 1
    assert [(r.verb, r.arguments["max_skipped_prompts"]) for r in run.audit.values() if r.target == run.id] == [
        ("set_budget", 1)
    ]


async def test_of_two_changes_at_once_none_is_lost(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_run(client, run_input(run, steps(1)))
    await run.until(lambda: run.count("run_rollout") == 1)
    await asyncio.gather(
        handle.execute_update(TrainingRun.set_budget, asked(SetBudget, max_skipped_prompts=7)),
        handle.execute_update(TrainingRun.set_floor, asked(SetFloor, min_step_batch_fraction=0.5)),
    )
    assert run.recipe == {"failure.max_skipped_prompts": 7, "failure.min_step_batch_fraction": 0.5}
    run.release.set()
    await handle.result()


async def test_a_budget_saves_a_run_that_would_have_ended(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0, step=1)] = [DATA, DATA]
    chosen = policy(prompts=2, rollouts=1, grpo={"max_num_steps": 2}, min_step_batch_fraction=0.5)
    handle = await paused_run(client, run, chosen)
    await pulled(handle, "set_budget", max_skipped_prompts=1)
    assert not (await pulled(handle, "set_budget", max_skipped_prompts=1)).changed
    await pulled(handle, "resume")
    assert (await handle.result()).steps == 2
    assert run.budgets() == BudgetState(skipped_prompts=1)


async def test_a_budget_below_what_is_used_is_refused_with_the_number(client: Client, run: FakeRun) -> None:
    for step in (0, 1):
        run.script[rollout_id(run, 0, step=step)] = [DATA, DATA]
    run.script[rollout_id(run, 0, step=2)] = [Hangs()]
    chosen = policy(
        prompts=2, rollouts=1, grpo={"max_num_steps": 3}, min_step_batch_fraction=0.5, max_skipped_prompts=5
    )
    handle = await start_run(client, run_input(run, chosen))
    await run.until(lambda: run.attempts.get(rollout_id(run, 0, step=2), 0) == 1)
    assert "max_skipped_prompts=1 is below what is used: 2" in await refusal(
        handle, "set_budget", max_skipped_prompts=1
    )
    assert "no budget is named" in await refusal(handle, "set_budget")
    with pytest.raises(WorkflowQueryFailedError, match="is below what is used: 2"):
        await handle.query(TrainingRun.preview, LeverPreview(verb="set_budget", arguments={"max_skipped_prompts": 1}))
    assert run.recipe == {}
    run.release.set()
    assert (await handle.result()).steps == 3


async def test_a_floor_that_is_no_fraction_is_refused(client: Client, run: FakeRun) -> None:
    handle = await paused_run(client, run, steps(1))
    for wrong in (1.5, 0, -1):
        assert "is not above 0 and at most 1" in await refusal(handle, "set_floor", min_step_batch_fraction=wrong)
    assert not (await pulled(handle, "set_floor", min_step_batch_fraction=0.9)).changed
    assert run.recipe == {}
    await pulled(handle, "resume")
    assert (await handle.result()).state == "completed"


async def test_a_lower_floor_releases_a_parked_step_of_a_run(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    chosen = policy(prompts=2, rollouts=1, grpo={"max_num_steps": 1}, on_dropped_prompt="park", max_skipped_prompts=1)
    handle = await start_run(client, run_input(run, chosen))
    group = client.get_workflow_handle(group_id(run))
    await run.until(lambda: group_id(run) in run.groups)
    await until_parked(group)
    await group.execute_update(PromptGroup.drop, asked(DropGroup))
    await until_parked(client.get_workflow_handle(f"{run.id}/step-0"))
    said = await handle.query(
        TrainingRun.preview, LeverPreview(verb="set_floor", arguments={"min_step_batch_fraction": 0.5})
    )
    assert "holds from now on, for steps in flight, too" in said
    await pulled(handle, "set_floor", min_step_batch_fraction=0.5)
    assert (await handle.result()).steps == 1
    assert run.recipe == {"failure.min_step_batch_fraction": 0.5}
    assert run.metrics[0]["train/prompt_groups"] == 1


async def test_a_request_that_cannot_be_read_is_no_request(real: Client, run: FakeRun) -> None:
    handle = await paused_run(real, run, steps(1))
    for wrong in ({"actor": "ada"}, {"actor": "", "reason": "why"}, {"actor": "ada", "reason": "why", "force": True}):
        with pytest.raises(WorkflowUpdateFailedError):
            await handle.execute_update("pause", wrong)
    assert not run.audit
    await handle.cancel()


async def test_a_run_that_ends_takes_no_request(client: Client, run: FakeRun) -> None:
    """It drains: a later step has a group that runs."""
    run.trainer = [Hangs()]
    run.script[rollout_id(run, 0, step=1)] = [Hangs()]
    run.gates[rollout_id(run, 0, step=1)] = gate = asyncio.Event()
    handle = await start_run(client, run_input(run, policy(prompts=1, rollouts=1, ahead=1, grpo={"max_num_steps": 3})))
    await run.until(lambda: run.count("train_step") == 1)
    await pulled(handle, "stop")
    run.release.set()
    await until_shown(handle, "**draining**")
    assert "the run is at its end" in await refusal(handle, "pause")
    gate.set()
    assert (await handle.result()).state == "stopped"


async def test_the_reason_why_a_run_failed_says_what_to_change(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    handle = await start_run(client, run_input(run, steps(1, max_skipped_prompts=1)))
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    ((state, reason),) = run.states
    assert state == "failed"
    for part in (
        "training step 0 lost 1 of 1 prompt group(s), leaving 0, below the floor of 1",
        f"Lost: {group_id(run)} (train-prompt-0): prompt train-prompt-0: 0 of 1 rollouts are valid",
        f"onbelay run resume {run.id}",
        "failure.on_dropped_prompt=replace or park",
    ):
        assert part in (reason or "")


def facts_of(**state: Any) -> RunFacts:
    """A run of ten steps."""
    given = {"next_step": 4, "trains": True, "ended": False, **state}
    trains, ended = given.pop("trains"), given.pop("ended")
    run = RunInput(run_id="r", policy=steps(10, max_skipped_prompts=5), task_queue="q", **given)
    return RunFacts(run=run, trains=trains, ended=ended)


@pytest.mark.parametrize(
    ("verb", "state", "outcome", "text"),
    [
        (asked(PauseRun), {}, "done", "finishes step 4, then waits"),
        (asked(PauseRun), {"trains": False}, "done", "waits before step 4"),
        (asked(PauseRun), {"paused": True}, "unchanged", "is paused before step 4"),
        (asked(ResumeRun), {"paused": True}, "done", "goes on with step 4"),
        (asked(ResumeRun), {}, "unchanged", "is not paused"),
        (asked(StopRun), {}, "done", "stops after step 4"),
        (asked(StopRun), {"trains": False}, "done", "stops now, before step 4"),
        (asked(StopRun), {"stop_after_step": 4}, "unchanged", "stops after step 4 already"),
        (asked(StopRun), {"stop_after_step": 3, "paused": True, "trains": False}, "done", "stops now"),
        (asked(StopRun, after_step=3), {}, "refused", "step 3 is over; the next one is 4"),
        (asked(StopRun, after_step=7), {"stop_after_step": 4}, "done", "stops after step 7"),
        (asked(SetBudget, max_skipped_prompts=-1), {}, "refused", "below what is used: 0"),
        (asked(SetFloor, min_step_batch_fraction=float("nan")), {}, "refused", "not above 0"),
        (asked(PauseRun), {"ended": True}, "refused", "at its end"),
    ],
)
def test_what_a_request_comes_to(verb: Lever, state: dict[str, Any], outcome: str, text: str) -> None:
    decision = decide(facts_of(**state), verb, BudgetState())
    assert (decision.outcome, text in decision.detail) == (outcome, True), decision


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_budget_is_refused_exactly_when_it_is_below_what_is_used(
    drops: int, skipped: int, used_drops: int, used_skips: int
) -> None:
    asks = asked(SetBudget, max_consecutive_dropped_prompts=drops, max_skipped_prompts=skipped)
    used = BudgetState(consecutive_drops=used_drops, skipped_prompts=used_skips)
    decision = decide(facts_of(), asks, used)
    assert (decision.outcome == "refused") == (drops < used_drops or skipped < used_skips)


@given(st.one_of(st.none(), st.integers(-2, 12)), st.integers(0, 9), st.booleans(), st.booleans())
def test_asking_twice_changes_nothing_the_second_time(
    after: int | None, next_step: int, paused: bool, trains: bool
) -> None:
    facts = facts_of(next_step=next_step, paused=paused, trains=trains and not paused)
    for lever in (asked(PauseRun), asked(ResumeRun), asked(StopRun, after_step=after)):
        first: Decision = decide(facts, lever, BudgetState())
        if first.outcome == "done":
            changed = facts.model_copy(update={"run": facts.run.model_copy(update=run_changes(facts, lever))})
            assert decide(changed, lever, BudgetState()).outcome == "unchanged"
