"""PromptGroup: one prompt, G rollouts, settled side by side; every rollout ends valid, masked or lost, never unnamed.

The group survives while enough rollouts are valid; otherwise it is dropped, or parked until an operator decides. One
that survives is set aside where its rewards are all equal and the run samples dynamically. An operator may retry a
parked group, and drop a group or mask its rollouts at any time before it has ended.
"""

import asyncio
from datetime import datetime, timedelta
from typing import Literal

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows.audit import Audit, preview
    from workflows.calls import Calls
    from workflows.details import group_details, parked_group, shortfall
    from workflows.dynamic_sampling import good_ending, reason_of
    from workflows.failures import STEP_CLOSED
    from workflows.group_levers import VERBS, GroupFacts, decide, to_mask
    from workflows.group_rollouts import GroupRollouts
    from workflows.lending import tell
    from workflows.levers import check_shape, previewed
    from workflows.messages import (
        Bucket,
        BudgetState,
        GroupInput,
        GroupParked,
        GroupResult,
        GroupState,
        OpenGroup,
        SealGroup,
    )
    from workflows.requests import (
        DropGroup,
        LeverDone,
        LeverPreview,
        MaskRollouts,
        RetryGroup,
    )
    from workflows.search_attributes import (
        FAILURE_CLASS,
        GROUP_STATE,
        LOST_ROLLOUTS,
        MASKED_ROLLOUTS,
        POLICY_VERSION,
        VALID_ROLLOUTS,
        show,
    )
    from workflows.settling import bucket_of, counted, outcome
    from workflows.tasks import raise_if_cancelled


_Ending = Literal["sealed", "dropped", "set_aside"]


@workflow.defn(name="PromptGroup")
class PromptGroup:
    """See the module's first lines."""

    @workflow.init
    def __init__(self, group: GroupInput) -> None:
        self._group = group
        self._id = workflow.info().workflow_id
        self._calls = Calls(group.task_queue, group.policy)
        self._audit = Audit(self._calls, group.run_id)
        self._rollouts = GroupRollouts(group, self._id, self._calls, self._show)
        self._state: _Ending | Literal["open", "parked"] = "open"
        self._next: _Ending | Literal["open"] | None = None  # decided, and about to be so
        self._fresh = group.fresh
        self._by_operator = False
        self._reason: str | None = None
        self._parked_until: datetime | None = None
        self._shown: tuple[str, list[str]] | None = None

    @workflow.run
    async def run(self, group: GroupInput) -> GroupResult:
        """Open the group, settle its rollouts, seal it (or drop it)."""
        show(POLICY_VERSION.value_set(group.weights.version))
        try:
            result = await self._run()
        except (ActivityError, asyncio.CancelledError) as error:
            if is_cancelled_exception(error):
                await self._give_up()
            await workflow.wait_condition(workflow.all_handlers_finished)
            if _is_step_closed(error):
                self._reason = f"{self._id} came too late: step {group.step} is closed and trains without it"
                self._show()
                raise ApplicationError(self._reason, type=STEP_CLOSED, non_retryable=True) from error
            raise
        await workflow.wait_condition(workflow.all_handlers_finished)
        return result

    @workflow.update(
        description="Run the lost rollouts of a parked group again, with fresh budgets. Valid and masked ones are "
        'evidence and stay. Input: {"actor": "who asks", "reason": "why", "fresh": false}; with fresh: true nothing '
        "that is recorded is replayed."
    )
    async def retry(self, request: RetryGroup) -> LeverDone:
        """Run the lost rollouts again."""

        def apply() -> None:
            self._next, self._fresh = "open", request.fresh

        return await self._audit.acted("retry", request, decide(self._facts(), request), apply)

    @workflow.update(
        description="Give the group up, open or parked; no drop budget counts it. "
        'Input: {"actor": "who asks", "reason": "why"}.'
    )
    async def drop(self, request: DropGroup) -> LeverDone:
        """Give the group up."""

        def apply() -> None:
            self._next, self._by_operator = "dropped", True
            self._because(f"dropped by {request.actor.strip()}: {request.reason.strip()}")

        return await self._audit.acted("drop", request, decide(self._facts(), request), apply)

    @workflow.update(
        description="Let rollouts keep their place without a gradient or a vote. "
        'Input: {"actor": "who asks", "reason": "why", "rollouts": [0, 2]}; without rollouts, every one that is not '
        "valid is masked and the group is sealed with what is valid."
    )
    async def mask(self, request: MaskRollouts) -> LeverDone:
        """Mask rollouts that are open or lost."""
        facts = self._facts()
        decision = decide(facts, request)
        chosen = to_mask(facts, request) if decision.outcome == "done" else ()

        def apply() -> None:
            self._rollouts.ask_to_mask(chosen, f"masked by {request.actor.strip()}: {request.reason.strip()}")
            if decision.state in ("sealed", "set_aside"):
                self._next = "sealed"

        answer = await self._audit.acted("mask", request, decision, apply)
        self._rollouts.stop(chosen)
        return answer

    @retry.validator
    def _check_retry(self, request: RetryGroup) -> None:
        check_shape(request)

    @drop.validator
    def _check_drop(self, request: DropGroup) -> None:
        check_shape(request)

    @mask.validator
    def _check_mask(self, request: MaskRollouts) -> None:
        check_shape(request)

    @workflow.query(
        description="What retry, drop or mask would do now, without doing it. "
        'Input: {"verb": "retry", "arguments": {"fresh": true}}.'
    )
    def preview(self, request: LeverPreview) -> str:
        """What a request would do; it fails with the refusal."""
        return preview(decide(self._facts(), previewed(request, VERBS)))

    def _facts(self) -> GroupFacts:
        return GroupFacts(
            group_id=self._id,
            state=self._next or self._state,
            rollouts=self._rollouts.states(),
            min_valid=self._group.min_valid_rollouts,
            failure=self._group.policy.failure,
            good_ending=self._good_ending(),
        )

    def _good_ending(self) -> Literal["sealed", "set_aside"]:
        return good_ending(self._rollouts.rewards(), self._group.purpose, self._group.policy.grpo)

    async def _run(self) -> GroupResult:
        group, rollouts = self._group, self._rollouts
        stored = await self._open()
        if stored != "open":
            return self._finish(self._decided("set_aside" if stored == "set_aside" else "sealed"))
        while True:
            await self._settle()
            counts = counted(rollouts.states())
            ending = self._next or outcome(counts, group.min_valid_rollouts, group.purpose, group.policy.failure)
            if ending in ("parked", "dropped") and not self._by_operator:
                self._reason = shortfall(
                    group.prompt_id, group.min_valid_rollouts, group.num_rollouts, rollouts.results
                )
            if ending == "parked":
                ending = await self._park()
            if ending in ("sealed", "set_aside"):
                return await self._seal(self._good_ending())
            if ending == "dropped":
                return await self._seal("dropped")
            self._next, self._reason = None, None
            await self._tell_step()
            await self._open()

    async def _open(self) -> GroupState:
        """Open the group, or open it again: what is settled stays, what was lost may be tried again."""
        group = self._group
        self._state = "open"
        opened = await self._calls.open_group(
            OpenGroup(
                run_id=group.run_id,
                group_id=self._id,
                step=group.step,
                slot=group.slot,
                purpose=group.purpose,
                prompt_id=group.prompt_id,
                row_index=group.row_index,
                num_rollouts=group.num_rollouts,
                replaces=group.replaces,
            )
        )
        self._rollouts.adopt(opened, self._fresh)
        self._show()
        return opened.state

    async def _settle(self) -> None:
        """Settle every rollout, unless the group is dropped meanwhile."""
        work = asyncio.create_task(self._rollouts.settle_all())
        try:
            await workflow.wait_condition(lambda: work.done() or self._next == "dropped")
            await self._audit.all_recorded()
            if self._next != "dropped":
                await work
                await self._rollouts.mask_lost()
                return
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def _park(self) -> _Ending | Literal["open"]:
        """Wait for an operator's decision; a group that nobody decides in time is dropped."""
        await self._seal_in_ledger("parked", self._bucket())
        timeout = timedelta(seconds=self._group.policy.failure.park_timeout_s)
        until = self._parked_until = workflow.now() + timeout
        await self._tell_step()
        while True:
            self._state = "parked"
            self._show()
            left = max(until - workflow.now(), timedelta())
            try:
                await workflow.wait_condition(
                    lambda: self._next is not None or self._rollouts.has_lost_to_mask(), timeout=left
                )
            except TimeoutError:
                if self._next is None:
                    self._next = "dropped"
                    self._because(f"nobody decided within {timeout}")
            raise_if_cancelled()
            await self._audit.all_recorded()
            if self._next != "dropped":
                await self._rollouts.mask_lost()
            if self._next is not None:
                self._parked_until = None
                return self._next

    async def _tell_step(self) -> None:
        """Let the step show that the group is parked, or that it goes on."""
        step = workflow.info().parent
        if step is not None:
            classes = tuple(sorted(self._rollouts.classes))
            parked = GroupParked(group_id=self._id, reason=self._reason, failure_classes=classes)
            await tell(step.workflow_id, "group_parked", parked)

    async def _give_up(self) -> None:
        """Drop a cancelled group; that is nobody's failure. One that is sealed already, or never opened, stays so."""
        self._reason, self._by_operator = "cancelled", True
        try:
            await self._seal("dropped")
        except ActivityError as error:
            workflow.logger.warning("%s is cancelled and stays as the ledger has it: %s", self._id, error.cause)

    async def _seal(self, state: _Ending) -> GroupResult:
        self._next = self._decided(state)
        bucket = None if state != "dropped" or self._by_operator else self._bucket()
        return self._finish(state, bucket, await self._seal_in_ledger(state, bucket))

    def _decided(self, state: _Ending) -> _Ending:
        """Why the group ends so: a sealed one needs no reason, and a dropped one has its own."""
        if state == "sealed":
            self._reason = None
        if state == "set_aside":
            self._reason = reason_of(self._group.prompt_id, self._rollouts.rewards())
        return state

    async def _seal_in_ledger(self, state: _Ending | Literal["parked"], bucket: Bucket | None) -> BudgetState:
        sealed = await self._calls.seal_group(
            SealGroup(
                run_id=self._group.run_id,
                group_id=self._id,
                state=state,
                bucket=bucket,
                reason=self._reason,
            )
        )
        return sealed.budgets

    def _finish(self, state: _Ending, bucket: Bucket | None = None, budgets: BudgetState | None = None) -> GroupResult:
        self._state, self._next = state, None
        self._show()
        counts = counted(self._rollouts.states())
        return GroupResult(
            group_id=self._id,
            slot=self._group.slot,
            prompt_id=self._group.prompt_id,
            state=state,
            valid=counts.valid,
            masked=counts.masked,
            lost=counts.lost,
            mean_reward=self._rollouts.mean_reward(),
            bucket=bucket,
            reason=self._reason,
            policy_version=self._rollouts.oldest_version(),
            failure_classes=tuple(sorted(self._rollouts.classes)),
            budgets=budgets or BudgetState(),
        )

    def _bucket(self) -> Bucket:
        return bucket_of(self._rollouts.results, self._rollouts.failures)

    def _because(self, why: str) -> None:
        self._reason = f"{self._reason}; {why}" if self._reason else why

    def _show(self) -> None:
        rollouts = self._rollouts
        parked = self._parked_until and parked_group(self._id, rollouts.results, self._parked_until)
        workflow.set_current_details(
            group_details(
                self._state, self._group.num_rollouts, rollouts.results, rollouts.failures, self._reason, parked
            )
        )
        shown = (self._state, sorted(rollouts.classes))
        if shown == self._shown:
            return
        self._shown = shown
        counts = counted(rollouts.states())
        show(
            GROUP_STATE.value_set(self._state),
            FAILURE_CLASS.value_set(sorted(rollouts.classes)),
            VALID_ROLLOUTS.value_set(float(counts.valid)),
            MASKED_ROLLOUTS.value_set(float(counts.masked)),
            LOST_ROLLOUTS.value_set(float(counts.lost)),
        )


def _is_step_closed(error: BaseException) -> bool:
    cause = error.cause if isinstance(error, ActivityError) else None
    return isinstance(cause, ApplicationError) and cause.type == STEP_CLOSED
