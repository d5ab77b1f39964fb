"""One prompt group under a policy, from its first attempt until it is kept or lost.

Unit rollout: every rollout is tried until it settles or its budget is used up; then it is lost, its siblings stay, and
the group is kept while enough of them are valid. Unit group: the first failure of a rollout cancels its siblings and
ends the try; the next one, after the back-off, is a new group with new rollouts.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from benchmarks.goodput.places import Place
from benchmarks.goodput.policies import Policy
from benchmarks.goodput.stack import GoodputStack
from workflows.attempts import AttemptBudget
from workflows.messages import Failure, RolloutResult, RunRollout
from workflows.together import all_or_none


@dataclass
class Groups:
    """Runs groups. `failures` counts failed attempts by class, `unplanned` those that the gate did not cause."""

    stack: GoodputStack
    policy: Policy
    places: asyncio.Semaphore
    failures: Counter[str] = field(default_factory=Counter[str])
    unplanned: list[str] = field(default_factory=list[str])

    async def settle(self, place: Place) -> str | None:
        """The id of the group that is kept, or None when it is lost."""
        if self.policy.unit == "rollout":
            return await self._by_rollout(place)
        return await self._by_group(place)

    async def _by_rollout(self, place: Place) -> str | None:
        requests = await self._open(place)
        settled = await all_or_none(self._until_settled(request) for request in requests)
        valid = sum(result is not None and result.state == "valid" for result in settled)
        least = self.stack.recipe.rollouts.min_valid_rollouts_per_group
        kept = valid >= least
        reason = None if kept else f"{valid} valid rollouts, {least} are needed"
        await self._end(requests[0].group_id, reason)
        return requests[0].group_id if kept else None

    async def _by_group(self, place: Place) -> str | None:
        budget = AttemptBudget()
        while True:
            requests = await self._open(place)
            group_id = requests[0].group_id
            try:
                await all_or_none(self._attempt(request) for request in requests)
            except ApplicationError as error:
                failure = _failure(error)
            else:
                await self._end(group_id, None)
                return group_id
            for request in requests:
                await self.stack.ledger.rollouts.lose(request.rollout_id, "lost", "its group was given up")
            await self._end(group_id, f"{failure.failure_class}: {failure.cause}")
            backoff_s = budget.next_backoff_s(self.policy.budget)
            budget = budget.after(failure.bucket)
            if budget.is_exhausted(self.policy.budget):
                return None
            if failure.bucket == "infra":
                await asyncio.sleep(backoff_s)
            place = Place(place.run_id, place.step, place.slot, place.retry + 1)

    async def _until_settled(self, request: RunRollout) -> RolloutResult | None:
        """The settlement, or None for a rollout that is lost."""
        budget = AttemptBudget()
        while True:
            try:
                return await self._attempt(request)
            except ApplicationError as error:
                failure = _failure(error)
            backoff_s = budget.next_backoff_s(self.policy.budget)
            budget = budget.after(failure.bucket)
            if budget.is_exhausted(self.policy.budget):
                await self.stack.ledger.rollouts.lose(request.rollout_id, "lost", failure.cause)
                return None
            if failure.bucket == "infra":
                await asyncio.sleep(backoff_s)

    async def _attempt(self, request: RunRollout) -> RolloutResult:
        async with self.places:
            try:
                return await ActivityEnvironment().run(self.stack.rollouts.run_rollout, request)
            except ApplicationError as error:
                failure = _failure(error)
                self.failures[failure.failure_class] += 1
                if (failure.rollout_id, failure.attempt) not in self.stack.gate.struck:
                    self.unplanned.append(f"{failure.rollout_id}: {failure.failure_class}: {failure.cause}")
                raise

    async def _open(self, place: Place) -> list[RunRollout]:
        grpo = self.stack.recipe.grpo
        groups, rollouts = grpo.num_prompts_per_step, grpo.num_generations_per_prompt
        group_id, slot, row = place.group_id(groups), place.ledger_slot(groups), place.row(groups)
        prompt_id = self.stack.rows.prompt_ids[row]
        await self.stack.ledger.groups.open(group_id, place.run_id, place.step, slot, "train", prompt_id, row, rollouts)
        return [
            RunRollout(
                run_id=place.run_id,
                group_id=group_id,
                rollout_id=f"{group_id}/rollout-{index}",
                step=place.step,
                slot=slot,
                index=index,
                row_index=row,
                purpose="train",
                policy_version=0,
            )
            for index in range(rollouts)
        ]

    async def _end(self, group_id: str, reason: str | None) -> None:
        if reason is None:
            await self.stack.ledger.groups.set_state(group_id, "sealed")
        else:
            await self.stack.ledger.groups.set_state(group_id, "dropped", "infra", reason)


def _failure(error: ApplicationError) -> Failure:
    return Failure.model_validate(error.details[0])
