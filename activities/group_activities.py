"""The activities of the default queue that move a prompt group and its rollouts in the ledger."""

from temporalio import activity

from activities.errors import surfaced
from activities.group_story import story_of
from activities.rollout_activities import rollout_result
from storage.errors import IllegalTransition, StepClosed
from storage.ledger import Ledger
from workflows.messages import (
    BudgetState,
    LoseRollout,
    OpenedGroup,
    OpenGroup,
    Promoted,
    PromoteGroup,
    RolloutResult,
    SealedGroup,
    SealGroup,
)


class GroupActivities:
    """Thin functions over groups and rollouts."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @activity.defn
    async def open_group(self, request: OpenGroup) -> OpenedGroup:
        """Open a group; one that was parked or dropped is opened again with what is settled."""
        with surfaced(boundary="ledger", run_id=request.run_id, group_id=request.group_id):
            group = await self._ledger.groups.open(
                request.group_id,
                request.run_id,
                request.step,
                request.slot,
                request.purpose,
                request.prompt_id,
                request.row_index,
                request.num_rollouts,
                replaces=request.replaces,
            )
            if group.state in ("parked", "dropped"):
                group = await self._ledger.groups.set_state(request.group_id, "open")
            settled = await self._ledger.rollouts.settled([request.group_id])
            attempts = tuple(rollout.current_attempt for rollout in group.rollouts)
            return OpenedGroup.model_validate(
                {
                    "state": group.state,
                    "settled": tuple(rollout_result(rollout) for rollout in settled),
                    "last_attempts": attempts if any(attempt is not None for attempt in attempts) else (),
                }
            )

    @activity.defn
    async def lose_rollout(self, request: LoseRollout) -> RolloutResult:
        """Give a rollout up."""
        with surfaced(boundary="ledger", run_id=request.run_id, group_id=request.group_id):
            lost = await self._ledger.rollouts.lose(request.rollout_id, request.state, request.reason)
            return rollout_result(lost)

    @activity.defn
    async def seal_group(self, request: SealGroup) -> SealedGroup:
        """Write how a group ended, or that it is parked; the drop counters are those right after it."""
        with surfaced(boundary="ledger", run_id=request.run_id, group_id=request.group_id):
            group = await self._ledger.groups.set_state(request.group_id, request.state, request.bucket, request.reason)
            if request.state == "set_aside":
                activity.logger.info("%s", story_of(group))
            elif request.state != "sealed":
                activity.logger.warning("%s", story_of(group))
            counts = await self._ledger.budgets.after(request.group_id)
            budgets = BudgetState(consecutive_drops=counts.consecutive_drops, skipped_prompts=counts.skipped_prompts)
            return SealedGroup(budgets=budgets)

    @activity.defn
    async def promote_group(self, request: PromoteGroup) -> Promoted:
        """Train a sealed group of a later step in an earlier one; a refusal is an answer, and no error."""
        with surfaced(boundary="ledger", run_id=request.run_id, group_id=request.group_id):
            try:
                await self._ledger.groups.promote(request.group_id, request.to_step, request.replaces)
            except (IllegalTransition, StepClosed) as error:
                activity.logger.warning("%s", error)
                return Promoted(refusal=str(error))
            return Promoted()
