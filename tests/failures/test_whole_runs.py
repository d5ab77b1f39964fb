"""One bad rollout among eight, in a whole run: what it costs the group, the step and the run.

4 groups x 2 rollouts, real agents, ledger, workflows and trainer; the policy samples, and one conversation fails.
"""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from temporalio.client import WorkflowFailureError

from tests.failures.policy_server import TOO_LONG, refusing
from tests.failures.whole_runs import WholeRun, WholeRuns, whole_runs
from tests.failures.world import World
from tests.gym.stub_model import Reply
from workers.stack.temporal import EmbeddedTemporal

pytestmark = pytest.mark.integration

NO_SECOND_TRY = {"max_infra_attempts_per_prompt": 1, "on_lost_rollout": "drop_group"}


@pytest.fixture(scope="module")
async def workers(
    stack: World, storage: dict[str, Any], temporal: EmbeddedTemporal, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[WholeRuns]:
    folder = tmp_path_factory.mktemp("whole_runs")
    async with whole_runs(stack, storage, temporal.address, temporal.ui_url, folder) as runs:
        yield runs


@pytest.fixture
def runs(world: World, workers: WholeRuns) -> WholeRuns:
    """Workers, with an undisturbed policy."""
    return workers


async def root_cause(run: WholeRun) -> str:
    """Why a run failed, as its ledger says it."""
    with pytest.raises(WorkflowFailureError):
        await run.handle.result()
    record = await run.world.ledger.runs.get(run.id)
    assert record.state == "failed"
    return record.reason or ""


async def test_a_prompt_that_is_too_long_masks_one_rollout_and_the_step_trains_every_group(runs: WholeRuns) -> None:
    runs.world.episode.breaks(3, refusing(400, TOO_LONG), times=None)
    summary = await (await runs.start("compacting")).end()
    assert (summary.groups.trained, summary.groups.dropped) == (4, 0)
    assert (summary.rollouts.valid, summary.rollouts.masked, summary.rollouts.lost) == (7, 1, 0)


async def test_a_context_guard_s_refusal_masks_one_rollout_and_the_step_trains_every_group(runs: WholeRuns) -> None:
    runs.world.episode.breaks(3, lambda: Reply("deep thought " * 20, "use", {"number": 0}), times=1)
    summary = await (await runs.start("guarded")).end()
    assert (summary.groups.trained, summary.groups.dropped) == (4, 0)
    assert (summary.rollouts.valid, summary.rollouts.masked, summary.rollouts.lost) == (7, 1, 0)


async def test_an_agent_that_fails_for_good_ends_a_run_without_a_drop_budget(runs: WholeRuns) -> None:
    runs.world.episode.breaks(3, refusing(500), times=None)
    run = await runs.start("compacting", failure={**NO_SECOND_TRY, "max_consecutive_dropped_prompts": 0})
    reason = await root_cause(run)
    dropped = await run.group("dropped", "infra")
    assert "failure.max_consecutive_dropped_prompts=0" in reason
    assert dropped.group_id in reason
    assert dropped.prompt_id in reason
    assert (await run.accounts()).steps_applied == 0


async def test_with_a_drop_budget_and_a_floor_the_step_trains_three_of_four_groups_and_the_run_goes_on(
    runs: WholeRuns,
) -> None:
    runs.world.episode.breaks(3, refusing(500), times=None)
    budget = {"max_consecutive_dropped_prompts": 5, "min_step_batch_fraction": 0.75}
    summary = await (await runs.start("compacting", steps=2, failure={**NO_SECOND_TRY, **budget})).end()
    assert summary.steps_applied == 2
    assert (summary.groups.trained, summary.groups.dropped) == (7, 1)


async def test_below_the_floor_the_run_ends_with_the_step_its_lost_groups_and_what_to_change(runs: WholeRuns) -> None:
    runs.world.episode.breaks(3, refusing(500), times=None)
    run = await runs.start("compacting", failure={**NO_SECOND_TRY, "max_consecutive_dropped_prompts": 5})
    reason = await root_cause(run)
    assert "training step 0 lost 1 of 4 prompt group(s), leaving 3, below the floor of 4" in reason
    assert (await run.group("dropped", "infra")).group_id in reason
    assert "min_step_batch_fraction" in reason


async def test_a_failure_that_passes_costs_no_group_and_masks_nothing(runs: WholeRuns) -> None:
    runs.world.episode.breaks(3, refusing(500))
    summary = await (await runs.start("compacting")).end()
    assert (summary.groups.trained, summary.groups.dropped) == (4, 0)
    assert (summary.rollouts.valid, summary.rollouts.masked, summary.rollouts.lost) == (8, 0, 0)
    assert (summary.attempts.failed, summary.model_calls.replayed) == (1, 3)


async def parked(runs: WholeRuns) -> WholeRun:
    """A run of which one group has used up its budgets, and whose fault has passed since."""
    runs.world.episode.breaks(3, refusing(500), times=None)
    run = await runs.start("compacting", failure={**NO_SECOND_TRY, "on_dropped_prompt": "park"})
    await run.group("parked")
    runs.world.episode.breaks(3, lambda: None)
    return run


async def test_an_operator_retries_a_parked_group_on_the_command_line(runs: WholeRuns) -> None:
    run = await parked(runs)
    group = await run.group("parked")
    code, printed = await run.onbelay("group", "list", run.id, "--parked")
    assert (code, group.group_id in printed) == (0, True), printed
    retry = ("group", "retry", group.group_id, "--actor", "alex", "--reason", "the agent is fixed")
    code, printed = await run.onbelay(*retry, "--dry-run")
    assert code == 0, printed
    assert (await run.group("parked")).group_id == group.group_id
    code, printed = await run.onbelay(*retry)
    assert code == 0, printed
    summary = await run.end()
    assert (summary.groups.trained, summary.rollouts.valid) == (4, 8)
    code, printed = await run.onbelay(*retry)
    assert code == 1
    assert "trained" in printed
    audited = [(action.actor, action.verb, action.reason, action.outcome) for action in await actions(run)]
    assert audited == [
        ("alex", "retry", "the agent is fixed", "done"),
        ("alex", "retry", "the agent is fixed", "refused"),
    ]


async def test_an_operator_retries_a_parked_group_in_the_temporal_ui(runs: WholeRuns) -> None:
    run = await parked(runs)
    group = await run.group("parked")
    workflow = f"{runs.temporal_ui}/api/v1/namespaces/default/workflows/{group.group_id.replace('/', '%2F')}"
    argument = json.dumps({"actor": "kim", "reason": "the agent is fixed"})
    payload = {"metadata": {"encoding": base64_of("json/plain")}, "data": base64_of(argument)}
    form = {
        "waitPolicy": {"lifecycleStage": "UPDATE_WORKFLOW_EXECUTION_LIFECYCLE_STAGE_COMPLETED"},
        "request": {
            "meta": {"updateId": "from-the-ui", "identity": "temporal-ui"},
            "input": {"name": "retry", "args": {"payloads": [payload]}},
        },
    }
    async with httpx.AsyncClient(timeout=60) as browser:
        await browser.get(f"{runs.temporal_ui}/api/v1/settings")
        token = {"X-CSRF-TOKEN": browser.cookies["_csrf"]}
        answer = await browser.post(f"{workflow}/update/retry", json=form, headers=token)
    assert answer.status_code == 200, answer.text
    assert "failure" not in answer.json().get("outcome", {}), json.dumps(answer.json())
    summary = await run.end()
    assert (summary.groups.trained, summary.rollouts.valid) == (4, 8)
    (action,) = await actions(run)
    assert (action.actor, action.reason, action.outcome) == ("kim", "the agent is fixed", "done")


def base64_of(text: str) -> str:
    """As JSON carries bytes."""
    return base64.b64encode(text.encode()).decode()


async def actions(run: WholeRun) -> Any:
    """The audit of a run."""
    return await run.world.ledger.actions.list(run.id)
