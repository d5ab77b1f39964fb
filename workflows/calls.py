"""Every activity a workflow calls, with its queue, deadlines and retries.

Workflows call activities by name: they import no client, driver or trainer. Retries here are for infrastructure; an
activity marks what a retry cannot help as non-retryable.
"""

from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from workflows.attempts import AttemptBudget
    from workflows.failures import HANDED_OVER, POLICY_MISMATCH
    from workflows.messages import (
        AssembleBatch,
        BatchRef,
        BudgetState,
        ChangeRecipe,
        ClaimPrompts,
        EvaluationResult,
        FindBatch,
        FoundBatch,
        GroupInput,
        LoseRollout,
        OpenedGroup,
        OpenGroup,
        PlanStep,
        Promoted,
        PromoteGroup,
        PromptClaims,
        ReadBudgets,
        RecordAction,
        RecordEvaluation,
        RolloutResult,
        RunPolicy,
        RunRollout,
        SealedGroup,
        SealGroup,
        SetRunState,
        StepPlan,
        WeightsRef,
    )
    from workflows.training_messages import (
        PublishWeights,
        RecordStep,
        Refit,
        RefitDone,
        RestorePolicy,
        StepApplied,
        TrainStep,
    )

_Result = TypeVar("_Result")

_BACKOFF = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=2.0, maximum_interval=timedelta(seconds=30)
)
# The activity's own deadline passes first, so that a slow rollout fails with a class and not as a dead worker.
_ROLLOUT_GRACE_S = 60.0


class Calls:
    """The activities of one deployment: queue names follow from its task queue prefix."""

    def __init__(self, task_queue: str, policy: RunPolicy) -> None:
        self._queue = task_queue
        self._policy = policy

    async def claim_prompts(self, request: ClaimPrompts) -> PromptClaims:
        """Reserve prompts for slots of a step."""
        return await self._ledger("claim_prompts", request, PromptClaims, f"prompts of step {request.step}")

    async def plan_step(self, request: PlanStep) -> StepPlan:
        """Which groups stand for the slots of a step."""
        return await self._ledger("plan_step", request, StepPlan, f"plan step {request.step}")

    async def open_group(self, request: OpenGroup) -> OpenedGroup:
        """Write a group and its rollouts."""
        return await self._ledger("open_group", request, OpenedGroup, f"{request.prompt_id}, step {request.step}")

    async def lose_rollout(self, request: LoseRollout) -> RolloutResult:
        """Write that a rollout is given up."""
        return await self._ledger("lose_rollout", request, RolloutResult, f"{request.index}: {request.state}")

    async def seal_group(self, request: SealGroup) -> SealedGroup:
        """Write a group's state."""
        return await self._ledger("seal_group", request, SealedGroup, request.state)

    async def promote_group(self, request: PromoteGroup) -> Promoted:
        """Move a sealed group to an earlier step."""
        summary = f"{request.group_id} for step {request.to_step}"
        return await self._ledger("promote_group", request, Promoted, summary)

    async def record_action(self, request: RecordAction) -> None:
        """Write an operator's request to the audit."""
        await self._ledger("record_action", request, None, f"{request.verb}: {request.outcome}")

    async def read_budgets(self, request: ReadBudgets) -> BudgetState:
        """The drop counters of the run."""
        return await self._ledger("read_budgets", request, BudgetState)

    async def change_recipe(self, request: ChangeRecipe) -> None:
        """Write new values of recipe keys."""
        await self._ledger("change_recipe", request, None, ", ".join(request.changes))

    async def assemble_batch(self, request: AssembleBatch) -> BatchRef:
        """Build and store the batch of a step."""
        return await workflow.execute_activity(
            "assemble_batch",
            request,
            result_type=BatchRef,
            task_queue=self._queue,
            start_to_close_timeout=timedelta(seconds=self._policy.training.assembly_timeout_s),
            heartbeat_timeout=timedelta(seconds=self._policy.training.heartbeat_timeout_s),
            schedule_to_close_timeout=timedelta(seconds=self._policy.failure.ledger_deadline_s),
            retry_policy=_BACKOFF,
            summary=f"step {request.step}, {len(request.group_ids)} groups",
        )

    async def find_batch(self, request: FindBatch) -> BatchRef | None:
        """The batch of a step that was executed before."""
        return (await self._ledger("find_batch", request, FoundBatch, f"batch of step {request.step}")).batch

    async def record_step(self, request: RecordStep) -> None:
        """Write a step's metrics."""
        await self._ledger("record_step", request, None, f"metrics of step {request.step}")

    async def record_evaluation(self, request: RecordEvaluation) -> EvaluationResult:
        """Write an evaluation's result."""
        return await self._ledger("record_evaluation", request, EvaluationResult, f"policy-{request.version}")

    async def set_run_state(self, request: SetRunState) -> None:
        """Write the run's state."""
        await self._ledger("set_run_state", request, None, request.state)

    async def run_rollout(
        self, group: GroupInput, request: RunRollout, budget: AttemptBudget, *, first_attempt: int = 0
    ) -> RolloutResult:
        """Run one rollout until it settles; Temporal retries infrastructure failures while the budget lasts."""
        failure, rollouts = self._policy.failure, self._policy.rollouts
        return await workflow.execute_activity(
            "run_rollout",
            request,
            result_type=RolloutResult,
            task_queue=f"{self._queue}-rollouts",
            start_to_close_timeout=timedelta(seconds=rollouts.rollout_timeout_s + _ROLLOUT_GRACE_S),
            heartbeat_timeout=timedelta(seconds=rollouts.heartbeat_timeout_s),
            retry_policy=RetryPolicy(
                initial_interval=timedelta(seconds=budget.next_backoff_s(failure)),
                backoff_coefficient=2.0,
                maximum_interval=timedelta(seconds=failure.max_backoff_s),
                maximum_attempts=budget.infra_attempts_left(failure),
                non_retryable_error_types=[POLICY_MISMATCH, HANDED_OVER],
            ),
            summary=f"{group.prompt_id}, rollout {request.index}, step {group.step}, from attempt {first_attempt}",
        )

    async def train_step(self, request: TrainStep) -> StepApplied:
        """Apply one optimizer step, exactly once."""
        return await self._trainer("train_step", request, StepApplied, f"optimizer step {request.step}")

    async def publish_weights(self, request: PublishWeights) -> WeightsRef:
        """Export a policy version for generation."""
        return await self._trainer("publish_weights", request, WeightsRef, f"publish policy-{request.version}")

    async def refit(self, request: Refit) -> RefitDone:
        """Put a policy version on every vLLM endpoint; cheap where it is there already."""
        return await self._generation("refit", request, f"refit to policy-{request.weights.version}")

    async def restore_policy(self, request: RestorePolicy) -> RefitDone:
        """Put the newest published version back on endpoints that lost it."""
        return await self._generation("restore_policy", request, "restore the policy on the endpoints")

    async def _generation(self, name: str, request: object, summary: str) -> RefitDone:
        generation = self._policy.generation
        requests_per_refit = 6
        return await workflow.execute_activity(
            name,
            request,
            result_type=RefitDone,
            task_queue=f"{self._queue}-generation",
            start_to_close_timeout=timedelta(seconds=generation.refit_timeout_s * requests_per_refit),
            heartbeat_timeout=timedelta(seconds=generation.heartbeat_timeout_s),
            retry_policy=self._bounded(generation.max_refit_attempts),
            summary=summary,
        )

    async def _trainer(self, name: str, request: object, result_type: type[_Result], summary: str) -> _Result:
        training = self._policy.training
        return await workflow.execute_activity(
            name,
            request,
            result_type=result_type,
            task_queue=f"{self._queue}-trainer",
            start_to_close_timeout=timedelta(seconds=training.step_timeout_s),
            heartbeat_timeout=timedelta(seconds=training.heartbeat_timeout_s),
            retry_policy=self._bounded(training.max_train_attempts),
            summary=summary,
        )

    async def _ledger(
        self, name: str, request: object, result_type: type[_Result] | None, summary: str | None = None
    ) -> _Result:
        return await workflow.execute_activity(
            name,
            request,
            result_type=result_type,
            task_queue=self._queue,
            start_to_close_timeout=timedelta(seconds=self._policy.failure.ledger_timeout_s),
            schedule_to_close_timeout=timedelta(seconds=self._policy.failure.ledger_deadline_s),
            retry_policy=_BACKOFF,
            summary=summary,
        )

    @staticmethod
    def _bounded(attempts: int) -> RetryPolicy:
        return RetryPolicy(
            initial_interval=timedelta(seconds=1),
            backoff_coefficient=2.0,
            maximum_interval=timedelta(seconds=30),
            maximum_attempts=attempts,
        )
