"""The rollouts of one group: each is run until it is valid or masked, or lost because its budgets are used up.

The unit of a retry is the rollout; siblings that have settled are kept. An operator's mask ends an open one.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows.attempts import AttemptBudget
    from workflows.calls import Calls
    from workflows.failures import POLICY_MISMATCH, failure_of
    from workflows.messages import (
        Failure,
        GroupInput,
        LoseRollout,
        OpenedGroup,
        RolloutResult,
        RolloutState,
        RunRollout,
    )
    from workflows.tasks import raise_if_cancelled
    from workflows.together import all_or_none
    from workflows.training_messages import RestorePolicy


class GroupRollouts:
    """`results` are the settled rollouts by index, `failures` the last failure of each, `classes` those of all."""

    def __init__(self, group: GroupInput, group_id: str, calls: Calls, changed: Callable[[], None]) -> None:
        self._group = group
        self._group_id = group_id
        self._calls = calls
        self._changed = changed
        self._heals = 0
        self._running: dict[int, asyncio.Task[RolloutResult]] = {}
        self._asked: dict[int, str] = {}  # rollouts that an operator masks, with the reason
        self._newest: dict[int, int] = {}  # number of the newest attempt
        self._fresh_after: dict[int, int] = {}
        self.results: dict[int, RolloutResult] = {}
        self.failures: dict[int, Failure] = {}
        self.classes: set[str] = set()

    def adopt(self, opened: OpenedGroup, fresh: bool) -> None:
        """Take what the ledger has. `fresh`: what was recorded for open rollouts so far is not replayed."""
        self.results = {result.index: result for result in opened.settled}
        self._newest = {index: last for index, last in enumerate(opened.last_attempts) if last is not None}
        if fresh:
            self._fresh_after = {index: last for index, last in self._newest.items() if index not in self.results}

    def states(self) -> tuple[RolloutState, ...]:
        """The state of each rollout by index, with the masks that are asked for."""
        return tuple(self._state(index) for index in range(self._group.num_rollouts))

    def rewards(self) -> list[float]:
        """Of the valid rollouts, as the environment gave them."""
        return [result.reward for result in self._valid() if result.reward is not None]

    def mean_reward(self) -> float | None:
        """Of the valid rollouts."""
        rewards = self.rewards()
        return sum(rewards) / len(rewards) if rewards else None

    def oldest_version(self) -> int:
        """The oldest policy version that sampled for a valid rollout; where none is valid, the one to begin with."""
        versions = [result.policy_version for result in self._valid() if result.policy_version is not None]
        return min(versions, default=self._group.weights.version)

    async def settle_all(self) -> None:
        """Settle what has not settled, side by side."""
        missing = [index for index in range(self._group.num_rollouts) if index not in self.results]
        await all_or_none(self._settle(index) for index in missing)

    def ask_to_mask(self, indices: Iterable[int], reason: str) -> None:
        """Remember what is to be masked; `stop` and `mask_lost` do it."""
        self._asked |= dict.fromkeys(indices, reason)

    def stop(self, indices: Iterable[int]) -> None:
        """End the attempts of rollouts that are to be masked."""
        for index in indices:
            if index in self._running and index in self._asked:
                self._running[index].cancel()

    def has_lost_to_mask(self) -> bool:
        """Whether a lost rollout is to be masked."""
        return any(index in self._asked and result.state == "lost" for index, result in self.results.items())

    async def mask_lost(self) -> None:
        """Mask the lost rollouts that are to be masked."""
        for index, result in sorted(self.results.items()):
            if index in self._asked and result.state == "lost":
                self.results[index] = await self._mask(index)

    def _valid(self) -> list[RolloutResult]:
        return [result for result in self.results.values() if result.state == "valid"]

    def _state(self, index: int) -> RolloutState:
        state = self.results[index].state if index in self.results else "open"
        return "masked" if index in self._asked and state in ("open", "lost") else state

    async def _settle(self, index: int) -> None:
        if index in self._asked:
            self.results[index] = await self._mask(index)
        else:
            self.results[index] = await self._run(index)
        self._changed()

    async def _run(self, index: int) -> RolloutResult:
        """The rollout's own result, or that of a mask which came first."""
        task = self._running[index] = asyncio.create_task(self._until_settled(index))
        try:
            return await task
        except (ActivityError, asyncio.CancelledError) as error:
            this = asyncio.current_task()
            is_ending = this is not None and this.cancelling() > 0
            if is_ending or index not in self._asked or not is_cancelled_exception(error):
                raise
        finally:
            del self._running[index]
        return await self._mask(index)

    async def _until_settled(self, index: int) -> RolloutResult:
        failure_config = self._group.policy.failure
        budget = AttemptBudget()
        while True:
            raise_if_cancelled()
            try:
                return await self._calls.run_rollout(
                    self._group, self._request(index), budget, first_attempt=self._newest.get(index, -1) + 1
                )
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                failure = self._failure(index, error)
            if failure.attempt is not None:
                self._newest[index] = failure.attempt
            if budget.is_handover(failure):
                budget = budget.charged(failure, failure_config)
                continue
            self.failures[index] = failure
            self.classes.add(failure.failure_class)
            self._changed()
            if failure.failure_class == POLICY_MISMATCH and not failure.final and await self._healed():
                budget = budget.after("infra", failure.retries)
                continue
            wait_s = budget.after("infra", failure.retries).next_backoff_s(failure_config)
            budget = budget.charged(failure, failure_config)
            if failure.final or budget.is_exhausted(failure_config):
                why = f"{failure.failure_class} ({failure.boundary}): {failure.cause}"
                return await self._give_up(index, "lost", why)
            if failure.bucket == "infra":
                await asyncio.sleep(wait_s)

    async def _healed(self) -> bool:
        """Put a published policy back on endpoints that lost it (a restarted server); bounded per group."""
        if self._heals >= self._group.policy.generation.max_refit_attempts * self._group.num_rollouts:
            return False
        self._heals += 1
        try:
            await self._calls.restore_policy(RestorePolicy(run_id=self._group.run_id))
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            workflow.logger.warning("%s: the policy is not restored: %s", self._group_id, error.cause)
            return False
        return True

    def _request(self, index: int) -> RunRollout:
        group = self._group
        return RunRollout(
            run_id=group.run_id,
            group_id=self._group_id,
            rollout_id=self._rollout_id(index),
            step=group.step,
            slot=group.slot,
            index=index,
            row_index=group.row_index,
            purpose=group.purpose,
            policy_version=group.weights.version,
            newest_policy_version=group.newest_policy_version,
            fresh_after=self._fresh_after.get(index),
        )

    def _failure(self, index: int, error: ActivityError) -> Failure:
        return failure_of(
            error,
            boundary="agent",
            run_id=self._group.run_id,
            group_id=self._group_id,
            rollout_id=self._rollout_id(index),
        )

    async def _mask(self, index: int) -> RolloutResult:
        result = await self._give_up(index, "masked", self._asked[index])
        del self._asked[index]
        return result

    async def _give_up(self, index: int, state: Literal["lost", "masked"], reason: str) -> RolloutResult:
        request = LoseRollout(
            run_id=self._group.run_id,
            group_id=self._group_id,
            rollout_id=self._rollout_id(index),
            index=index,
            state=state,
            reason=reason,
        )
        return await self._calls.lose_rollout(request)

    def _rollout_id(self, index: int) -> str:
        return f"{self._group_id}/rollout-{index}"
