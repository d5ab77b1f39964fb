"""The plan of a step: its prompts are claimed once, and every slot is stood for by what the ledger says."""

import pytest

from activities.rollouts.prompt_order import row_of_position
from tests.activities.world import World, call
from workflows.messages import (
    AssembleBatch,
    ClaimPrompts,
    FindBatch,
    OpenGroup,
    PlanStep,
    PromoteGroup,
    PromptClaim,
    StepPlan,
)
from workflows.training_messages import RecordStep

pytestmark = pytest.mark.integration


async def plan(world: World, step: int = 0, count: int = 2) -> StepPlan:
    return await call(world.writing.plan_step, PlanStep(run_id=world.run_id, step=step, count=count))


async def spare(world: World, slot: int, step: int = 0) -> PromptClaim:
    """Claim a prompt beyond the step's slots."""
    request = ClaimPrompts(run_id=world.run_id, step=step, purpose="train", first_slot=slot, count=1)
    return (await call(world.writing.claim_prompts, request)).claims[0]


async def replace(world: World, lost: str, claim: PromptClaim) -> str:
    """Open a group for a claim in the place of another."""
    group_id = f"{world.run_id}/step-0/group-{claim.slot}"
    request = OpenGroup(
        run_id=world.run_id,
        group_id=group_id,
        step=0,
        slot=claim.slot,
        purpose="train",
        prompt_id=claim.prompt_id,
        row_index=claim.row_index,
        num_rollouts=1,
        replaces=lost,
    )
    await call(world.groups.open_group, request)
    return group_id


async def test_plan_of_a_new_step_claims_its_prompts_once(world: World) -> None:
    first = await plan(world)
    assert await plan(world) == first
    assert [slot.claim.row_index for slot in first.slots] == [row_of_position(at, 6, 42) for at in range(2)]
    assert [slot.claim.slot for slot in first.slots] == [0, 1]
    assert not any(slot.replaces or slot.lent or slot.replacements_used or slot.given_away for slot in first.slots)
    assert (first.next_slot, first.spares) == (2, ())
    later = await plan(world, step=1)
    assert [slot.claim.row_index for slot in later.slots] == [row_of_position(at, 6, 42) for at in range(2, 4)]


async def test_dropped_group_without_a_replacement_is_planned_again(world: World) -> None:
    before = await plan(world)
    await world.drop_group("infra")
    slot = (await plan(world)).slots[0]
    assert (slot.claim.prompt_id, slot.replaces, slot.replacements_used) == ("safe-0", None, 0)
    assert not slot.given_away
    assert (await plan(world)).next_slot == before.next_slot


async def test_group_that_was_set_aside_is_followed_by_the_next_prompt_and_counted_in_every_plan(world: World) -> None:
    before = await plan(world)
    group_id = await world.open_group(0, 2)
    for index in range(2):
        await call(world.rollouts.run_rollout, world.rollout(group_id, index))
    await world.seal(group_id, "set_aside")
    planned = await plan(world)
    assert [slot.set_aside for slot in planned.slots] == [True, False]
    assert (planned.slots[0].claim.slot, planned.slots[0].given_away, planned.next_slot) == (0, False, 2)
    (aside,) = planned.set_aside
    assert (aside.group_id, aside.reward) == (group_id, (await world.ledger.groups.get(group_id)).rollouts[0].reward)
    opened = await call(world.groups.open_group, world.open_request())
    assert (opened.state, len(opened.settled)) == ("set_aside", 2)

    claim = await spare(world, 2)
    assert (await plan(world)).spares == (claim,)
    refill = await replace(world, group_id, claim)
    again = await plan(world)
    assert (again.slots[0].claim, again.slots[0].replaces) == (claim, group_id)
    assert (again.slots[0].replacements_used, again.slots[0].set_aside, again.set_aside) == (0, False, (aside,))
    assert (before.set_aside, (await world.ledger.groups.get(refill)).state) == ((), "open")


async def test_replacement_stands_for_the_slot_of_the_group_that_was_dropped(world: World) -> None:
    await plan(world)
    dropped, _ = await world.drop_group("infra")
    claim = await spare(world, 2)
    await replace(world, dropped, claim)
    planned = await plan(world)
    assert (planned.slots[0].claim, planned.slots[0].replaces, planned.slots[0].replacements_used) == (
        claim,
        dropped,
        1,
    )
    assert planned.slots[1].replaces is None
    assert (planned.next_slot, planned.spares) == (3, ())


async def test_prompt_that_is_claimed_and_not_opened_is_a_spare_of_the_step(world: World) -> None:
    await plan(world)
    dropped, _ = await world.drop_group("infra")
    opened, waiting = await spare(world, 2), await spare(world, 3)
    await replace(world, dropped, opened)
    planned = await plan(world)
    assert (planned.next_slot, planned.spares) == (4, (waiting,))


async def test_promoted_group_stands_in_the_earlier_step_and_its_own_slot_is_given_away(world: World) -> None:
    await plan(world)
    await plan(world, step=1)
    lost, _ = await world.drop_group("infra")
    ready = await world.run_group(1.0, 0.5, None, step=1)
    request = PromoteGroup(run_id=world.run_id, group_id=ready, to_step=0, replaces=lost)
    assert (await call(world.groups.promote_group, request)).refusal is None
    slot = (await plan(world)).slots[0]
    assert (slot.replaces, slot.replacements_used, slot.given_away) == (lost, 0, False)
    assert slot.lent is not None
    assert (slot.lent.group_id, slot.lent.slot, slot.lent.state) == (ready, 0, "sealed")
    assert (slot.lent.valid, slot.lent.masked, slot.lent.lost, slot.lent.mean_reward) == (2, 0, 1, 0.75)
    assert slot.lent.policy_version == 0
    lender = (await plan(world, step=1)).slots
    assert [place.given_away for place in lender] == [True, False]
    assert lender[0].claim == PromptClaim(slot=0, prompt_id="safe-0", row_index=0)
    assert lender[0].lent is None


async def test_batch_holds_a_promoted_group_beside_the_steps_own(world: World) -> None:
    lost, _ = await world.drop_group("infra")
    own = await world.run_group(1.0, 0.0, slot=1)
    ready = await world.run_group(0.0, 1.0, step=1)
    request = PromoteGroup(run_id=world.run_id, group_id=ready, to_step=0, replaces=lost)
    await call(world.groups.promote_group, request)
    batch = await call(world.writing.assemble_batch, AssembleBatch(run_id=world.run_id, step=0, group_ids=(ready, own)))
    assert (batch.groups, batch.rollouts, batch.rows) == (2, 4, 4)
    stored = await world.ledger.groups.get(ready)
    assert (stored.step, stored.train_step) == (1, 0)
    found = await call(world.writing.find_batch, FindBatch(run_id=world.run_id, step=0))
    assert found.batch == batch
    await world.ledger.steps.apply(await world.lease(), 0, batch.digest, {"loss": 0.5}, 0)
    await call(world.writing.record_step, RecordStep(run_id=world.run_id, step=0, metrics={"reward": 0.5}))
    assert (await world.ledger.groups.get(ready)).state == "trained"
