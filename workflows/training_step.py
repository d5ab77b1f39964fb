"""TrainingStep: plan the places, run their groups, close on the turn; then assemble, train, refit, record.

Its end holds the accounting identity: every claimed prompt is a group that was trained, dropped or set aside, with a
reason, or that an earlier step trained. A step that is drained instead has its groups settled and decides nothing
about them.
"""

import asyncio
from datetime import datetime, timedelta
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from configs.failure import FailureConfig, floor_of
    from workflows import dynamic_sampling
    from workflows.audit import Audit, preview
    from workflows.budgets import BelowFloor, BudgetExhausted, RunEnds, check_budgets, check_floor
    from workflows.calls import Calls
    from workflows.closing import Places
    from workflows.details import parked_step, step_details
    from workflows.lending import Lending, tell
    from workflows.levers import Decision, check_shape, previewed
    from workflows.lookahead import staleness
    from workflows.messages import (
        BatchRef,
        BudgetState,
        ClaimPrompts,
        FindBatch,
        GroupParked,
        GroupResult,
        LendGroup,
        Lent,
        PlanStep,
        PromoteGroup,
        PromptClaim,
        StepInput,
        StepResult,
        WeightsRef,
    )
    from workflows.requests import (
        LeverDone,
        LeverPreview,
        RetryDroppedGroup,
    )
    from workflows.search_attributes import GROUP_STATE, POLICY_VERSION, show
    from workflows.step_groups import group_id_of, run_group
    from workflows.step_levers import decide_retry
    from workflows.step_training import train
    from workflows.tasks import Tasks, raise_if_cancelled


@workflow.defn(name="TrainingStep")
class TrainingStep:
    """See the module's first lines."""

    @workflow.init
    def __init__(self, step: StepInput) -> None:
        self._step = step
        self._id = f"{step.run_id}/step-{step.step}"
        self._policy = step.policy
        self._calls = Calls(step.task_queue, step.policy)
        self._audit = Audit(self._calls, step.run_id)
        self._lending = Lending(step.run_id, timedelta(seconds=step.policy.failure.ledger_deadline_s))
        self._tasks = Tasks()
        self._places = Places()
        self._spares: list[PromptClaim] = []
        self._next_slot = 0
        self._budgets = BudgetState()
        self._turn: WeightsRef | None = None
        self._turn_at: datetime | None = None
        self._draining = False
        self._phase = "rollouts"
        self._parked_until: datetime | None = None
        self._parked_groups: dict[str, GroupParked] = {}

    @workflow.run
    async def run(self, step: StepInput) -> StepResult:
        """Take the policy from version t to t + 1, or end as drained."""
        show(POLICY_VERSION.value_set(step.weights.version))
        try:
            batch = await self._calls.find_batch(FindBatch(run_id=step.run_id, step=step.step))
            if batch is None:
                await self._plan()
                await self._collect()
            else:
                await self._tasks.until(lambda: self._turn is not None or self._draining)
            self._places.close()
            if self._turn is None:
                return await self._finish(self._result("drained"))
            return await self._finish(await self._train(self._turn, batch))
        except (FailureError, asyncio.CancelledError):
            self._places.close()
            await self._tasks.end()
            await workflow.wait_condition(workflow.all_handlers_finished)
            raise

    @workflow.signal(description="The run is ready to train this step; the weights are those that it begins with.")
    def take_turn(self, weights: WeightsRef) -> None:
        """Groups that begin from now on begin with these weights."""
        self._turn, self._turn_at = weights, workflow.now()

    @workflow.signal(description="The run stops before this step: settle the groups and end without training.")
    def drain(self) -> None:
        """Nothing is looked for, given away or retried from now on."""
        self._draining = True

    @workflow.signal(description="Budgets and floor were changed.")
    def adopt(self, failure: FailureConfig) -> None:
        """For drops and groups from now on; the floor is checked again at once."""
        self._policy = self._policy.model_copy(update={"failure": failure})

    @workflow.signal(description="An earlier step lost a group and asks for one of this step.")
    def lend(self, question: LendGroup) -> None:
        """Answered with a signal `lent`."""
        self._tasks.start(self._answer(question))

    @workflow.signal(description="A later step answers whether it gives a group.")
    def lent(self, answer: Lent) -> None:
        """The answer to a question of this step."""
        self._lending.answered(answer)

    @workflow.signal(description="A group of this step waits for an operator, or goes on.")
    def group_parked(self, group: GroupParked) -> None:
        """For what the step shows."""
        if group.reason is None:
            self._parked_groups.pop(group.group_id, None)
        else:
            self._parked_groups[group.group_id] = group
        self._show()

    @workflow.update(description="Run a dropped group of this step again, while the step is open.")
    async def retry_group(self, request: RetryDroppedGroup) -> LeverDone:
        """Its lost rollouts run again with fresh budgets; what is valid stays."""
        decision = self._decide(request)
        return await self._audit.acted(
            "retry_group", request, decision, lambda: self._retry(request), target=request.group_id
        )

    @retry_group.validator
    def _check_retry(self, request: RetryDroppedGroup) -> None:
        check_shape(request)

    @workflow.query(description="What a request would do, without doing it.")
    def preview(self, request: LeverPreview) -> str:
        """One sentence, or the refusal."""
        return preview(self._decide(previewed(request, {"retry_group": RetryDroppedGroup})))

    def _decide(self, request: RetryDroppedGroup) -> Decision:
        return decide_retry(
            self._step.step, request.group_id, f"{self._id}/group-", self._places, draining=self._draining
        )

    def _retry(self, request: RetryDroppedGroup) -> None:
        place = self._places.retry(request.group_id)
        if place is not None:
            self._tasks.start(self._fill(place, fresh=request.fresh, recorded=True))

    async def _plan(self) -> None:
        """Take the places as the ledger has them and begin their groups."""
        planned = await self._calls.plan_step(
            PlanStep(run_id=self._step.run_id, step=self._step.step, count=self._step.policy.grpo.num_prompts_per_step)
        )
        self._places = Places.planned(planned.slots, planned.set_aside)
        self._spares, self._next_slot = list(planned.spares), planned.next_slot
        for index, (place, slot) in enumerate(zip(self._places.places, planned.slots, strict=True)):
            if place.state != "kept":
                self._tasks.start(self._fill(index, replaces=group_id_of(self._step, slot.claim)))
        self._show()

    async def _collect(self) -> None:
        """Wait until the step may close, or is drained. Below the floor it parks or ends the run."""
        while not self._is_collected():
            if not self._floor_holds():
                await self._below_floor()
            await self._tasks.until(lambda: self._is_collected() or not self._floor_holds())

    def _is_collected(self) -> bool:
        if self._turn is None:
            return self._draining and self._places.is_settled
        return self._places.may_close(self._policy.failure, has_turn=True)

    def _floor_holds(self) -> bool:
        return (self._draining and self._turn is None) or self._places.floor_holds(self._policy.failure)

    async def _below_floor(self) -> None:
        """End the run, or wait until an operator lowers the floor or brings a group back."""
        failure = self._policy.failure
        if failure.on_dropped_prompt != "park":
            self._check_floor()
        timeout = timedelta(seconds=failure.park_timeout_s)
        self._parked_until = workflow.now() + timeout
        show(GROUP_STATE.value_set("parked"))
        self._show()
        try:
            await self._tasks.until(self._floor_holds, timeout)
        except TimeoutError:
            self._check_floor(f"; nobody decided within {timeout}")
        self._parked_until = None
        show(GROUP_STATE.value_set("open"))
        self._show()

    def _check_floor(self, more: str = "") -> None:
        places = self._places
        try:
            check_floor(self._step.run_id, self._step.step, len(places.places), places.shortfall, self._policy.failure)
        except BelowFloor as error:
            self._end_run(error, str(error) + more)

    async def _fill(
        self, index: int, *, replaces: str | None = None, fresh: bool = False, recorded: bool = False
    ) -> None:
        """Run groups in a place until it is kept or lost. `replaces`: the group that left a place which seeks one."""
        if recorded:
            await self._audit.all_recorded()
        place = self._places.places[index]
        while True:
            raise_if_cancelled()
            if place.state == "seeking":
                if self._draining or replaces is None:
                    self._places.give_up(index)
                    return
                self._check_sampled(replaces)
                self._places.replace(index, await self._spare(), replaces)
            group = await run_group(
                self._step, self._policy, self._turn or self._step.weights, place.claim, place.replaces, fresh=fresh
            )
            self._budgets = group.budgets
            self._parked_groups.pop(group.group_id, None)
            if group.state == "sealed":
                self._places.keep(index, group)
                self._show()
                return
            if group.state == "set_aside":
                self._places.set_aside(index, group)
                self._show()
            else:
                self._lose(index, group)
                if place.state == "lost" or await self._borrow(index, group):
                    self._show()
                    return
            replaces, fresh = group.group_id, False

    def _lose(self, index: int, group: GroupResult) -> None:
        """A group was dropped: the run ends if no budget covers it. A drained step leaves that to its next turn."""
        failure = self._policy.failure
        replacements = failure.max_replacement_attempts if failure.on_dropped_prompt == "replace" else 0
        self._places.drop(index, group, 0 if self._draining else replacements)
        self._show()
        if self._draining:
            return
        try:
            check_budgets(self._step.run_id, group, failure)
        except BudgetExhausted as error:
            self._end_run(error, f"step {self._step.step}: {error}")

    def _check_sampled(self, replaced: str) -> None:
        """A place looks for another group: the run ends if the last one was set aside and the step may sample no more.
        It does not park: nothing that an operator could change in a step in flight would help."""
        set_aside = self._places.without_signal
        if replaced not in set_aside:
            return
        run_id, step, count = self._step.run_id, self._step.step, len(self._places.places)
        try:
            dynamic_sampling.check_sampled(run_id, step, count, set_aside.values(), self._policy.grpo)
        except dynamic_sampling.SamplingExhausted as error:
            self._end_run(error, str(error))

    async def _borrow(self, index: int, lost: GroupResult) -> bool:
        """Ask the later steps, the furthest first, for a group that has ended well."""
        used = self._places.places[index].replacements_used
        question = LendGroup(borrower=self._step.step, lost=lost.group_id, replacements_used=used)
        ahead = self._policy.rollouts.max_lookahead_versions
        for later in range(self._step.step + ahead, self._step.step, -1):
            group = await self._lending.ask(later, question)
            if group is not None:
                return self._places.promote(index, group, lost.group_id)
        return False

    async def _answer(self, question: LendGroup) -> None:
        """Give the group that was kept first, unless this step is about to train or to end; then fill its place."""
        index = None if self._turn or self._draining else self._places.lend()
        group = None if index is None else self._places.places[index].group
        if index is not None and group is not None:
            promoted = await self._calls.promote_group(
                PromoteGroup(
                    run_id=self._step.run_id,
                    group_id=group.group_id,
                    to_step=question.borrower,
                    replaces=question.lost,
                )
            )
            if promoted.refusal is not None:
                self._places.keep_after_all(index)
                group = None
        if index is not None and group is not None:
            self._places.give_away(index, question.replacements_used)
        answer = Lent(lender=self._step.step, lost=question.lost, group=group)
        await tell(f"{self._step.run_id}/step-{question.borrower}", "lent", answer)
        if index is not None and group is not None:
            await self._fill(index, replaces=group.group_id)

    async def _spare(self) -> PromptClaim:
        """A prompt that no group was opened for."""
        if self._spares:
            return self._spares.pop(0)
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        claimed = await self._calls.claim_prompts(
            ClaimPrompts(run_id=self._step.run_id, step=self._step.step, purpose="train", first_slot=slot, count=1)
        )
        return claimed.claims[0]

    async def _train(self, weights: WeightsRef, batch: BatchRef | None) -> StepResult:
        show(POLICY_VERSION.value_set(weights.version), GROUP_STATE.value_set("sealed"))
        kept = [group.group_id for group in self._places.kept]
        begun = self._turn_at or workflow.now()
        batch, published = await train(self._calls, self._step, batch, kept, self._counts, begun, self._show)
        show(GROUP_STATE.value_set("trained"))
        return self._result("applied").model_copy(
            update={"weights": published, "trained": batch.groups, "mean_reward": batch.mean_reward}
        )

    def _counts(self) -> dict[str, float]:
        places, ahead = self._places, self._policy.rollouts.max_lookahead_versions
        ages = staleness(self._step.step, [group.policy_version for group in places.kept], ahead)
        return {
            "train/dropped_prompt_groups": float(len(places.dropped)),
            "train/replaced_prompt_groups": float(places.replaced),
            "train/promoted_prompt_groups": float(places.promoted),
            "train/given_away_prompt_groups": float(places.given_away),
            "train/refused_late": float(places.refused_late),
            "train/staleness_mean": ages["mean"],
            "train/staleness_max": ages["max"],
            "train/stale_prompt_groups": ages["stale"],
        }

    def _result(self, state: str) -> StepResult:
        places = self._places
        return StepResult.model_validate(
            {
                "step": self._step.step,
                "state": state,
                "dropped": len(places.dropped),
                "set_aside": len(places.without_signal),
                "promoted": places.promoted,
                "replaced": places.replaced,
                "budgets": self._budgets,
            }
        )

    async def _finish(self, result: StepResult) -> StepResult:
        """Every question is answered and every request is in the audit."""
        if result.state == "drained":
            self._show("drained")
        await self._tasks.until(lambda: self._tasks.are_done and workflow.all_handlers_finished())
        return result

    def _end_run(self, error: RunEnds, message: str) -> NoReturn:
        lost = "; ".join(
            f"{group_id} ({dropped.group.prompt_id}): {dropped.group.reason}"
            for group_id, dropped in self._places.dropped.items()
        )
        raise ApplicationError(
            f"{message}. {f'Lost: {lost}. ' if lost else ''}To go on: {error.remedy}",
            type=type(error).__name__,
            non_retryable=True,
        ) from None

    def _show(self, phase: str | None = None) -> None:
        self._phase = phase or self._phase
        ended = [*self._places.kept, *(dropped.group for dropped in self._places.dropped.values())]
        running = [
            (place.claim.slot, group_id_of(self._step, place.claim), place.claim.prompt_id)
            for place in self._places.places
            if place.state == "running"
        ]
        title = "parked" if self._parked_until else self._phase
        places, grpo = self._places, self._policy.grpo
        set_aside = dynamic_sampling.told(len(places.places), places.without_signal.values(), grpo)
        parked_groups = list(self._parked_groups.values())
        workflow.set_current_details(
            step_details(title, ended, len(ended) + len(running), self._parked(), running, parked_groups, set_aside)
        )

    def _parked(self) -> str | None:
        """How an operator goes on with a step that is parked."""
        if self._parked_until is None:
            return None
        places, fraction = self._places, self._policy.failure.min_step_batch_fraction
        lost = [dropped.group for dropped in places.dropped.values()]
        count = len(places.places)
        return parked_step(self._id, lost, count - places.shortfall, floor_of(count, fraction), self._parked_until)
