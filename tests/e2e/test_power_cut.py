"""Everything is killed at once, at a random moment of a run with lookahead: `onbelay up` alone brings it to its end.

And the ledger alone is enough: a run goes on when Temporal's database is gone.
"""

import asyncio
import random
from collections.abc import Sequence

import pytest

from activities.rollouts.dataset import scan
from activities.rollouts.prompt_order import row_of_position
from storage.records import GroupRecord
from tests.e2e.stack import POLICY, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

STEPS, STEPS_WITHOUT_TEMPORAL, PROMPTS = 4, 3, 2
LOOKAHEAD = [
    "rollouts.max_lookahead_versions=1",
    "training.max_logprob_gap=null",  # with lookahead there is a gap
    "grpo.loss_fn.use_importance_sampling_correction=true",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "failure.ledger_timeout_s=20",  # a write that was cut off is waited for so long
]


async def started(stack: Stack, run_id: str, steps: int) -> None:
    """Start a run with lookahead 1 on the stack."""
    await stack.up()
    overrides = [*POLICY, *stack.folders, *LOOKAHEAD, f"run.id={run_id}", f"grpo.max_num_steps={steps}"]
    await stack.ok("run", "start", "demo", *overrides)


async def trained(stack: Stack, run_id: str) -> list[GroupRecord]:
    """The groups that a run trained, in the order of its steps; its accounts add up."""
    assert await stack.ok("ledger", "check", run_id) == f"{run_id}: every invariant holds.\n"
    async with stack.session() as opened:
        assert (await opened.ledger.summaries.of(run_id)).identity_holds
        groups = await opened.ledger.groups.list(run_id, purpose="train")
    assert {group.state for group in groups} == {"trained"}
    return groups


def uninterrupted(stack: Stack, steps: int) -> Sequence[tuple[int, str]]:
    """Step and prompt of every group of a run that nothing disturbs."""
    recipe = stack.recipe()
    rows = scan(recipe.run.dataset)
    order = [row_of_position(position, len(rows), recipe.grpo.seed) for position in range(steps * PROMPTS)]
    return [(position // PROMPTS, rows.prompt_ids[row]) for position, row in enumerate(order)]


async def test_a_run_survives_a_power_cut(stack: Stack, power_cut_seed: int) -> None:
    moment = random.Random(power_cut_seed)
    run_id = f"power-cut-{power_cut_seed}"
    await started(stack, run_id, STEPS)
    before = await stack.until(run_id, moment.randrange(STEPS - 1))
    await asyncio.sleep(moment.uniform(0, 3))

    assert stack.cut_power() > 8
    await stack.ok("up")

    after = await stack.until(run_id, STEPS, state="completed")
    groups = await trained(stack, run_id)
    assert [(group.step, group.prompt_id) for group in groups] == uninterrupted(stack, STEPS)
    assert (after.steps_applied, after.policy_version) == (STEPS, STEPS)
    assert (after.rollouts.valid, after.groups.dropped) == (STEPS * PROMPTS * 4, 0)
    assert before.steps_applied < STEPS


async def test_a_run_goes_on_from_the_ledger_alone(stack: Stack) -> None:
    run_id = "ledger-only"
    await started(stack, run_id, STEPS_WITHOUT_TEMPORAL)
    await stack.until(run_id, 1)
    stack.cut_power()
    databases = list(stack.state_dir.glob("temporal.db*"))
    assert databases
    for file in databases:
        file.unlink()

    assert f"onbelay run resume {run_id}" in await stack.ok("up")
    await stack.ok("run", "resume", run_id, "--reason", "the power is back")

    after = await stack.until(run_id, STEPS_WITHOUT_TEMPORAL, state="completed")
    groups = await trained(stack, run_id)
    assert [(group.step, group.prompt_id) for group in groups] == uninterrupted(stack, STEPS_WITHOUT_TEMPORAL)
    settled_again = [
        rollout.rollout_id
        for group in groups
        for rollout in group.rollouts
        if sum(attempt.state == "settled" for attempt in rollout.attempts) != 1
    ]
    assert settled_again == []
    assert after.rollouts.valid == STEPS_WITHOUT_TEMPORAL * PROMPTS * 4
