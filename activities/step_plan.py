"""From the places of a step in the ledger to the plan that its workflow starts or goes on with."""

from collections.abc import Mapping, Sequence

from storage.records import Claim, GroupRecord, Place, SetAsideGroup
from workflows.failures import HANDED_OVER
from workflows.messages import BudgetState, GroupResult, PromptClaim, SetAside, SlotPlan, StepPlan


def step_plan(
    step: int,
    claims: Mapping[int, Claim],
    places: Sequence[Place],
    spares: Sequence[Claim],
    next_slot: int,
    set_aside: Sequence[SetAsideGroup] = (),
) -> StepPlan:
    """Plan the slots of `places`, in order. `claims`: those of the step's own slots; `spares`: claimed beyond them, for
    groups that were not opened yet; `set_aside`: the groups of the step that carried no signal."""
    return StepPlan(
        slots=tuple(_slot(step, claims[place.slot], place) for place in places),
        next_slot=next_slot,
        spares=tuple(prompt_claim(claim) for claim in spares),
        set_aside=tuple(SetAside(group_id=group.group_id, reward=group.reward) for group in set_aside),
    )


def prompt_claim(claim: Claim) -> PromptClaim:
    """The message for a claim."""
    return PromptClaim(slot=claim.slot, prompt_id=claim.prompt_id, row_index=claim.row_index)


def _slot(step: int, claim: Claim, place: Place) -> SlotPlan:
    group = place.group
    if group is None:
        return SlotPlan(claim=prompt_claim(claim))
    return SlotPlan(
        claim=PromptClaim(slot=group.slot, prompt_id=group.prompt_id, row_index=group.row_index),
        replaces=group.replaces,
        replacements_used=place.used,
        lent=_result(group) if group.step != step else None,
        given_away=group.train_step != step,
        set_aside=group.state == "set_aside",
    )


def _result(group: GroupRecord) -> GroupResult:
    """How a promoted group ended."""
    valid = [rollout for rollout in group.rollouts if rollout.state == "valid"]
    rewards = [rollout.reward for rollout in valid if rollout.reward is not None]
    versions = [rollout.policy_version_min for rollout in valid if rollout.policy_version_min is not None]
    failures = {attempt.failure_class for rollout in group.rollouts for attempt in rollout.attempts}
    states = [rollout.state for rollout in group.rollouts]
    return GroupResult(
        group_id=group.group_id,
        slot=group.slot,
        prompt_id=group.prompt_id,
        state="sealed",
        valid=len(valid),
        masked=states.count("masked"),
        lost=states.count("lost"),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        policy_version=min(versions, default=None),
        failure_classes=tuple(sorted(failure for failure in failures if failure not in (None, HANDED_OVER))),
        budgets=BudgetState(),
    )
