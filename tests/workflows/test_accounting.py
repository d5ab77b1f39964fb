"""Nothing is lost from the books: over commits, drops, skips and restarts in any order, every prompt is accounted for.

dispatched = trained + dropped + set aside + open; of each group, valid + masked + lost + open = G; budgets are what a
model counts.
"""

import asyncio
import random
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle

from activities.errors import AgentFailed, IntegrityError
from configs.failure import FailureConfig
from tests.workflows.building import group_id, policy, rollout_id, run_input, start_run, until_closed
from tests.workflows.counting import counted
from tests.workflows.fake_run import FakeRun, Masked, Valid
from workflows.budgets import BudgetExhausted, check_budgets
from workflows.messages import BudgetState, GroupResult, RunPolicy

DATA = IntegrityError("tokens contradict themselves")
INFRA = AgentFailed("HTTP 500")
STEPS = 4


def any_policy(dice: random.Random) -> RunPolicy:
    """Small budgets, a low floor, some lookahead."""
    return policy(
        prompts=dice.choice([2, 3]),
        rollouts=2,
        min_valid=2,
        ahead=dice.choice([0, 1, 2]),
        grpo={"max_num_steps": STEPS, "use_dynamic_sampling": dice.choice([False, True])},
        max_infra_attempts_per_prompt=1,
        max_data_attempts_per_prompt=1,
        on_dropped_prompt=dice.choice(["shrink", "replace"]),
        max_replacement_attempts=dice.choice([1, 2]),
        max_consecutive_dropped_prompts=dice.choice([2, 4]),
        max_skipped_prompts=dice.choice([2, 8]),
        min_step_batch_fraction=0.3,
    )


def any_failures(dice: random.Random, run: FakeRun) -> None:
    """Some rollouts of some groups fail, for either reason, once or for good; some groups have equal rewards."""
    for step in range(STEPS):
        for slot in range(8):
            fault = dice.choice([None, None, None, INFRA, DATA, Masked("truncated")])
            if fault is not None:
                index = dice.randrange(2)
                run.script[rollout_id(run, index, slot, step)] = [fault] * dice.choice([1, 9])
            elif dice.random() < 0.25:
                run.script |= {rollout_id(run, index, slot, step): [Valid(1.0)] * 9 for index in range(2)}


async def killed_after(client: Client, run: FakeRun, handle: WorkflowHandle[Any, Any], calls: int) -> bool:
    """Terminate everything once so many activities were called; False when the run was over before."""
    over = asyncio.create_task(until_closed(client, run.id))
    await run.until(lambda: over.done() or len(run.calls) >= calls)
    killed = not over.done()
    if killed:
        await handle.terminate("power cut")
    await over
    started = [f"{run.id}/step-{step}" for step in sorted({group.opened.step for group in run.groups.values()})]
    for name in [*started, *run.groups]:
        await until_closed(client, name)
    return killed


def model_of(run: FakeRun, failure: FailureConfig) -> tuple[BudgetState, bool]:
    """Counters over the groups in the order in which they ended, and whether one of them was one too many."""
    budgets, exhausted = BudgetState(), False
    for name in run.ended:
        stored = run.groups[name]
        ended = GroupResult(
            group_id=name,
            slot=stored.opened.slot,
            prompt_id=stored.opened.prompt_id,
            state="dropped" if stored.state == "dropped" else "sealed",
            valid=0,
            masked=0,
            lost=0,
            bucket=stored.bucket,
        )
        budgets = counted(budgets, ended)
        try:
            check_budgets(run.id, ended.model_copy(update={"budgets": budgets}), failure)
        except BudgetExhausted:
            exhausted = True
    return budgets, exhausted


@pytest.mark.parametrize("seed", range(10))
async def test_every_prompt_and_every_rollout_is_accounted_for(real: Client, run: FakeRun, seed: int) -> None:
    dice = random.Random(seed)
    chosen = any_policy(dice)
    any_failures(dice, run)
    ahead, prompts = chosen.rollouts.max_lookahead_versions, chosen.grpo.num_prompts_per_step
    kills = sorted(dice.sample(range(5, 60), dice.choice([0, 1, 2])))
    was_killed = bool(kills)
    reason = ""
    while True:
        handle = await start_run(real, run_input(run, chosen, next_step=len(run.metrics)))
        if kills and await killed_after(real, run, handle, kills.pop(0)):
            run.check_identity()
            assert model_of(run, chosen.failure)[0] == run.budgets()
            continue
        try:
            await handle.result()
        except WorkflowFailureError:
            reason = run.states[-1][1] or ""
        break
    run.check_identity()
    budgets, exhausted = model_of(run, chosen.failure)
    assert budgets == run.budgets()
    assert exhausted == ("exceeding failure.max_" in reason), reason
    if not reason:
        assert list(run.applied) == list(range(STEPS))
        assert {group.state for group in run.groups.values()} <= {"trained", "dropped", "set_aside"}
        if chosen.grpo.use_dynamic_sampling:
            rewards = [{r.reward for r in run.groups[name].settled.values()} for name in run.groups]
            trained = [group.state == "trained" for group in run.groups.values()]
            assert all(len(own) > 1 for own, trains in zip(rewards, trained, strict=True) if trains)
    claimed = sorted(claim.row_index for (purpose, _, _), claim in run.claims.items() if purpose == "train")
    assert claimed == list(range(len(claimed)))
    opened = {group.opened.row_index for group in run.groups.values()}
    steps_begun = {step for _, step, _ in run.claims}
    # A spare that was claimed just before the power went stays unused if the dropped group itself succeeds after it.
    assert set(claimed) - opened <= {
        claim.row_index
        for (_, step, slot), claim in run.claims.items()
        if step >= len(run.applied) or (was_killed and slot >= prompts)
    }
    assert len(steps_begun) <= len(run.applied) + ahead + 1
    for step, (_, group_ids) in run.batches.items():
        assert 1 <= len(group_ids) <= prompts
        assert {run.groups[name].train_step for name in group_ids} == {step}


async def test_a_run_of_days_pays_for_its_parked_groups_in_time_only(skipping: Client, run: FakeRun) -> None:
    """Each step parks a group for two days that nobody decides; the floor lets the step train without it."""
    chosen = policy(
        prompts=2,
        rollouts=1,
        grpo={"max_num_steps": 3},
        on_dropped_prompt="park",
        park_timeout_s=2 * 86_400,
        max_skipped_prompts=3,
        min_step_batch_fraction=0.5,
    )
    for step in range(3):
        run.script[rollout_id(run, 0, 0, step)] = [DATA, DATA]
    result = await (await start_run(skipping, run_input(run, chosen))).result()
    assert result.steps == 3
    days = (run.calls[-1].at - run.calls[0].at).total_seconds() / 86_400
    assert 6 <= days < 6.1
    assert [run.groups[group_id(run, 0, step)].state for step in range(3)] == ["dropped"] * 3
    assert run.budgets() == BudgetState(skipped_prompts=3)
    run.check_identity()
