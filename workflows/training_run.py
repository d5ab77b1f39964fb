"""TrainingRun: step after step until the run is complete, stopped or failed; its whole state crosses continue-as-new.

Steps t .. t + L are in flight: all of them sample, and step t alone has the turn to train. With L = 0 step t + 1
samples with the policy that step t left behind. The first step that fails ends the run, and nothing is left running.
"""

import asyncio
from typing import Literal, NoReturn

from temporalio import workflow
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, FailureError, is_cancelled_exception
from temporalio.workflow import ChildWorkflowHandle

with workflow.unsafe.imports_passed_through():
    from configs.failure import FailureConfig
    from workflows import run_levers
    from workflows.audit import Audit, preview
    from workflows.calls import Calls
    from workflows.children import started
    from workflows.details import run_details
    from workflows.evaluation import Evaluation
    from workflows.levers import Decision, check_shape, previewed
    from workflows.lookahead import steps_to_begin
    from workflows.messages import (
        BudgetState,
        ChangeRecipe,
        ClaimPrompts,
        EvaluationInput,
        ReadBudgets,
        RunInput,
        RunResult,
        SetRunState,
        StepInput,
        StepResult,
        WeightsRef,
    )
    from workflows.requests import (
        Lever,
        LeverDone,
        LeverPreview,
        PauseRun,
        ResumeRun,
        SetBudget,
        SetFloor,
        StopRun,
    )
    from workflows.run_levers import RunFacts
    from workflows.search_attributes import POLICY_VERSION, RUN_ID, TRAIN_STEP, show
    from workflows.tasks import Tasks
    from workflows.training_messages import PublishWeights, Refit
    from workflows.training_step import TrainingStep

Step = ChildWorkflowHandle[TrainingStep, StepResult]


@workflow.defn(name="TrainingRun")
class TrainingRun:
    """See the module's first lines."""

    @workflow.init
    def __init__(self, run: RunInput) -> None:
        self._run = run
        self._calls = Calls(run.task_queue, run.policy)
        self._audit = Audit(self._calls, run.run_id)
        self._tasks = Tasks()
        self._newest = run.next_step - 1  # the last step that was begun
        self._steps: dict[int, Step] = {}  # in flight
        self._results: dict[int, StepResult] = {}  # ended, and not yet taken
        self._last_steps: list[StepResult] = []
        self._used = BudgetState()
        self._turn: int | None = None
        self._ended = False
        self._changing = asyncio.Lock()  # of two changes of the recipe at once, one would be lost

    @workflow.run
    async def run(self, run: RunInput) -> RunResult:
        """Run the steps; whatever ends the run is written to the ledger first."""
        try:
            return await self._train(run.next_step)
        except (FailureError, asyncio.CancelledError) as error:
            self._ended = True
            await self._tasks.end()
            if is_cancelled_exception(error):
                await self._set_state("stopped", "cancelled")
            else:
                await workflow.wait_condition(workflow.all_handlers_finished)
                await self._set_state("failed", _root_cause(error))
            raise

    @workflow.update(description="Finish the step that trains, then wait for resume. Later steps settle their groups.")
    async def pause(self, request: PauseRun) -> LeverDone:
        """Nothing is lost: what is in flight is finished or kept."""
        return await self._act("pause", request, self._decide(request))

    @workflow.update(description="Go on after a pause.")
    async def resume(self, request: ResumeRun) -> LeverDone:
        """The next step gets its turn."""
        return await self._act("resume", request, self._decide(request))

    @workflow.update(description="End the run after a step; without a step, after the one that trains.")
    async def stop(self, request: StopRun) -> LeverDone:
        """What later steps have sampled is kept for a resumed run."""
        return await self._act("stop", request, self._decide(request))

    @workflow.update(description="Change how many groups may be dropped; no budget below what is used.")
    async def set_budget(self, request: SetBudget) -> LeverDone:
        """It holds at once, for steps in flight, too, and for a resumed run."""
        self._used = await self._calls.read_budgets(ReadBudgets(run_id=self._run.run_id))
        decision = self._decide(request)
        return await self._change("set_budget", request, decision, run_levers.budget_changes(request))

    @workflow.update(description="Change the fraction of groups that makes a step: above 0, at most 1.")
    async def set_floor(self, request: SetFloor) -> LeverDone:
        """It holds at once, for steps in flight, too, and for a resumed run. A parked step goes on if it suffices."""
        changes = {"min_step_batch_fraction": request.min_step_batch_fraction}
        return await self._change("set_floor", request, self._decide(request), changes)

    @pause.validator
    def _check_pause(self, request: PauseRun) -> None:
        check_shape(request)

    @resume.validator
    def _check_resume(self, request: ResumeRun) -> None:
        check_shape(request)

    @stop.validator
    def _check_stop(self, request: StopRun) -> None:
        check_shape(request)

    @set_budget.validator
    def _check_set_budget(self, request: SetBudget) -> None:
        check_shape(request)

    @set_floor.validator
    def _check_set_floor(self, request: SetFloor) -> None:
        check_shape(request)

    @workflow.query(description="What a request would do, without doing it. Budgets are as the run last saw them.")
    def preview(self, request: LeverPreview) -> str:
        """One sentence, or the refusal."""
        verbs: dict[str, type[Lever]] = {
            "pause": PauseRun,
            "resume": ResumeRun,
            "stop": StopRun,
            "set_budget": SetBudget,
            "set_floor": SetFloor,
        }
        return preview(self._decide(previewed(request, verbs)))

    def _decide(self, request: Lever) -> Decision:
        return run_levers.decide(self._facts(), request, self._used)

    def _facts(self) -> RunFacts:
        return RunFacts(run=self._run, trains=self._turn is not None, ended=self._ended)

    async def _act(self, verb: str, request: Lever, decision: Decision) -> LeverDone:
        changes = run_levers.run_changes(self._facts(), request)
        return await self._audit.acted(verb, request, decision, lambda: self._update(**changes))

    async def _change(
        self, verb: str, request: Lever, decision: Decision, changes: dict[str, int] | dict[str, float]
    ) -> LeverDone:
        """Change keys of `failure`: here, in the recipe that a resumed run has, and in the steps in flight."""

        def apply() -> None:
            failure = run_levers.changed(self._run.policy.failure, changes)
            self._update(policy=self._run.policy.model_copy(update={"failure": failure}))

        answer = await self._audit.acted(verb, request, decision, apply)
        if answer.changed:
            recipe = {f"failure.{key}": value for key, value in changes.items()}
            async with self._changing:
                await self._calls.change_recipe(ChangeRecipe(run_id=self._run.run_id, changes=dict(recipe)))
            for step in list(self._steps.values()):
                await _tell(step, "adopt", self._run.policy.failure)
        return answer

    async def _train(self, first_step: int) -> RunResult:
        grpo = self._run.policy.grpo
        if self._run.weights is None:
            self._show("first weights")
            self._update(weights=await self._put_in_place(first_step))
            if grpo.val_at_start and first_step == 0:
                await self._evaluate()
        while True:
            await self._audit.all_recorded()
            if self._run.next_step > self._last_step():
                break
            if self._run.paused:
                await self._wait_while_paused()
                continue
            self._show("running")
            await self._begin_steps(first_step)
            if self._newest < self._run.next_step:
                await self._continue_as_new()
            await self._take_turn(self._run.next_step)
            if grpo.val_period and self._run.next_step % grpo.val_period == 0:
                await self._evaluate()
        complete = self._run.next_step >= grpo.max_num_steps
        if complete and grpo.val_at_end and not (grpo.val_period and self._run.next_step % grpo.val_period == 0):
            await self._evaluate()
        return await self._finish("completed" if complete else "stopped")

    def _last_step(self) -> int:
        last, stop = self._run.policy.grpo.max_num_steps - 1, self._run.stop_after_step
        return last if stop is None else min(last, stop)

    async def _put_in_place(self, version: int) -> WeightsRef:
        """Publish a policy version and load it on every endpoint."""
        weights = await self._calls.publish_weights(PublishWeights(run_id=self._run.run_id, version=version))
        await self._calls.refit(Refit(run_id=self._run.run_id, weights=weights))
        return weights

    async def _begin_steps(self, first_step: int) -> None:
        """Begin the steps that may sample now, unless a new execution is due.

        Their prompts are claimed here, so that they come in the order of steps, whichever workflow is the first.
        """
        run = self._run
        ahead = run.policy.rollouts.max_lookahead_versions
        for step in steps_to_begin(self._newest, run.next_step, ahead, self._last_step()):
            if step - first_step >= run.steps_per_execution or workflow.info().is_continue_as_new_suggested():
                return
            count = run.policy.grpo.num_prompts_per_step
            await self._calls.claim_prompts(
                ClaimPrompts(run_id=run.run_id, step=step, purpose="train", first_slot=0, count=count)
            )
            self._newest = step
            self._tasks.start(self._run_step(step))

    async def _run_step(self, step: int) -> None:
        run, weights = self._run, self._weights()
        step_id = f"{run.run_id}/step-{step}"
        child = await started(
            step_id,
            lambda: workflow.start_child_workflow(
                TrainingStep.run,
                StepInput(run_id=run.run_id, step=step, weights=weights, policy=run.policy, task_queue=run.task_queue),
                id=step_id,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                static_summary=f"step {step} of {run.run_id}",
                search_attributes=TypedSearchAttributes(
                    [SearchAttributePair(RUN_ID, run.run_id), SearchAttributePair(TRAIN_STEP, step)]
                ),
            ),
        )
        self._steps[step] = child
        if self._run.policy != run.policy:
            await _tell(child, "adopt", self._run.policy.failure)
        self._results[step] = await child
        del self._steps[step]

    async def _take_turn(self, step: int) -> None:
        """Let a step train, and take its result."""
        weights = self._weights()
        show(TRAIN_STEP.value_set(step), POLICY_VERSION.value_set(weights.version))
        self._turn = step
        await self._tasks.until(lambda: step in self._steps)
        await _tell(self._steps[step], "take_turn", weights)
        await self._tasks.until(lambda: step in self._results)
        self._turn = None
        result = self._results.pop(step)
        if result.weights is None:
            raise ApplicationError(f"step {step} had its turn and did not train", non_retryable=True)
        self._last_steps = [*self._last_steps[-9:], result]
        self._used = result.budgets
        self._update(next_step=step + 1, weights=result.weights)

    async def _evaluate(self) -> None:
        """Evaluate the policy that the endpoints serve, before a step may replace it."""
        run, weights = self._run, self._weights()
        self._show("evaluating")
        evaluation_id = f"{run.run_id}/eval-{weights.version}"
        evaluated: list[int] = []

        async def evaluate() -> None:
            child = await started(
                evaluation_id,
                lambda: workflow.start_child_workflow(
                    Evaluation.run,
                    EvaluationInput(run_id=run.run_id, weights=weights, policy=run.policy, task_queue=run.task_queue),
                    id=evaluation_id,
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                    static_summary=f"evaluation of policy-{weights.version}",
                    search_attributes=TypedSearchAttributes([SearchAttributePair(RUN_ID, run.run_id)]),
                ),
            )
            evaluated.append((await child).version)

        self._tasks.start(evaluate())
        await self._tasks.until(lambda: bool(evaluated))

    async def _wait_while_paused(self) -> None:
        await self._set_state("paused", self._run.because)
        self._show("paused")
        await self._tasks.until(lambda: not self._run.paused)
        await self._set_state("running")

    async def _continue_as_new(self) -> NoReturn:
        """Nothing is in flight."""
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(self._run)

    async def _finish(self, state: Literal["completed", "stopped"]) -> RunResult:
        """Later steps settle what they have sampled; it is kept for a resumed run."""
        self._ended = True
        self._show("draining" if self._newest >= self._run.next_step else state)
        for step in range(self._run.next_step, self._newest + 1):
            await self._tasks.until(lambda step=step: step in self._steps or step in self._results)
            if step in self._steps:
                await _tell(self._steps[step], "drain")
        await self._tasks.until(lambda: self._tasks.are_done and workflow.all_handlers_finished())
        await self._set_state(state, self._run.because if state == "stopped" else None)
        self._show(state)
        return RunResult(
            run_id=self._run.run_id,
            state=state,
            steps=self._run.next_step,
            policy_version=self._weights().version,
        )

    def _weights(self) -> WeightsRef:
        if self._run.weights is None:
            raise ApplicationError("no policy is published yet", non_retryable=True)
        return self._run.weights

    def _update(self, **changes: object) -> None:
        self._run = self._run.model_copy(update=changes)

    async def _set_state(
        self, state: Literal["running", "paused", "completed", "stopped", "failed"], reason: str | None = None
    ) -> None:
        await self._calls.set_run_state(SetRunState(run_id=self._run.run_id, state=state, reason=reason))

    def _show(self, state: str) -> None:
        run = self._run
        workflow.set_current_details(
            run_details(
                state,
                self._last_steps,
                run.next_step,
                run.policy.grpo.max_num_steps,
                failure=run.policy.failure,
                prompts=run.policy.grpo.num_prompts_per_step,
                budgets=self._used,
                in_flight=range(run.next_step, self._newest + 1),
                waits_for=run.because if state == "paused" else None,
            )
        )


async def _tell(step: Step, signal: str, *arguments: FailureConfig | WeightsRef) -> None:
    """Send a signal to a step in flight. One that has ended says how by its result."""
    try:
        await step.signal(signal, args=arguments)
    except FailureError as error:
        if is_cancelled_exception(error):
            raise


def _root_cause(error: BaseException) -> str:
    """The message at the bottom of a chain of child and activity errors."""
    cause: BaseException = error
    while isinstance(cause, FailureError) and cause.cause is not None:
        cause = cause.cause
    return str(cause) or type(cause).__name__
