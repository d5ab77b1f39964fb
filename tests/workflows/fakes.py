"""The activities of a deployment over runs in memory: the names, queues and messages of the real ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from activities.errors import BoundaryError, failure_error, failure_of, surfaced
from activities.heartbeat import heartbeats
from storage.errors import RecoveryRefused
from tests.workflows.fake_run import Call, Dies, FakeRun, Hangs, Masked, Outcome, Valid
from workflows.evaluation import Evaluation
from workflows.messages import (
    AssembleBatch,
    BatchRef,
    BudgetState,
    ChangeRecipe,
    ClaimPrompts,
    EvaluationResult,
    FindBatch,
    FoundBatch,
    LoseRollout,
    Message,
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
    RunRollout,
    SealedGroup,
    SealGroup,
    SetRunState,
    StepPlan,
    WeightsRef,
)
from workflows.prompt_group import PromptGroup
from workflows.training_messages import (
    PublishWeights,
    RecordStep,
    Refit,
    RefitDone,
    RestorePolicy,
    StepApplied,
    TrainStep,
)
from workflows.training_run import TrainingRun
from workflows.training_step import TrainingStep

WORKFLOWS = (TrainingRun, TrainingStep, PromptGroup, Evaluation)


class Fakes:
    """Activities of any number of runs."""

    def __init__(self) -> None:
        self._runs: dict[str, FakeRun] = {}

    def new_run(self, run_id: str) -> FakeRun:
        """A run that these activities serve."""
        return self._runs.setdefault(run_id, FakeRun(run_id))

    def _called(self, request: Message) -> FakeRun:
        run = self._runs[request.model_dump(include={"run_id"})["run_id"]]
        info = activity.info()
        run.calls.append(Call(info.activity_type, request, info.started_time))
        return run

    @activity.defn
    async def claim_prompts(self, request: ClaimPrompts) -> PromptClaims:
        """As many as asked; validation prompts run out."""
        run = self._called(request)
        count = min(request.count, run.validation_prompts) if request.purpose == "validation" else request.count
        slots = range(request.first_slot, request.first_slot + count)
        return PromptClaims(claims=tuple(run.claim(request.purpose, request.step, slot) for slot in slots))

    @activity.defn
    async def plan_step(self, request: PlanStep) -> StepPlan:
        """The places of the step."""
        return self._called(request).plan(request.step, request.count)

    @activity.defn
    async def open_group(self, request: OpenGroup) -> OpenedGroup:
        """New, or as it was left."""
        run = self._called(request)
        with surfaced(boundary="ledger", run_id=request.run_id, group_id=request.group_id):
            group = run.open(request)
        settled = tuple(group.settled[index] for index in sorted(group.settled))
        return OpenedGroup.model_validate(
            {"state": group.state, "settled": settled, "last_attempts": run.last_attempts(request)}
        )

    @activity.defn
    async def run_rollout(self, rollout: RunRollout) -> RolloutResult:
        """One attempt, as scripted; errors are made by the real error model."""
        run = self._called(rollout)
        attempt: int | RolloutResult | None = None
        try:
            attempt = run.begin_attempt(rollout)
            if isinstance(attempt, RolloutResult):
                return attempt
            if rollout.rollout_id in run.gates:
                async with heartbeats(interval_s=1):
                    await run.gates[rollout.rollout_id].wait()
            outcome = await _played(run, run.outcome(rollout, attempt))
        except (BoundaryError, RecoveryRefused) as error:
            failure = failure_of(
                error,
                boundary="agent",
                run_id=rollout.run_id,
                group_id=rollout.group_id,
                rollout_id=rollout.rollout_id,
                attempt=attempt if isinstance(attempt, int) else None,
            )
            said = {"retries": activity.info().attempt - 1, "final": run.runs_once}
            raise failure_error(failure.model_copy(update=said)) from error
        result = outcome.settled_as(rollout.rollout_id, rollout.index, attempt=attempt, version=rollout.policy_version)
        return run.settle(rollout.group_id, result)

    @activity.defn
    async def lose_rollout(self, request: LoseRollout) -> RolloutResult:
        """Lost or masked; what has settled stays, except that a lost one may be masked."""
        return self._called(request).lose(request.group_id, request.index, request.state, request.reason)

    @activity.defn
    async def seal_group(self, request: SealGroup) -> SealedGroup:
        """Along a legal transition; the counters as of this group."""
        run = self._called(request)
        await run.until(lambda: not run.ledger_is_slow.is_set())
        with surfaced(boundary="ledger", run_id=request.run_id, group_id=request.group_id):
            run.move(request.group_id, request.state, request.bucket, request.reason)
        return SealedGroup(budgets=run.budgets())

    @activity.defn
    async def promote_group(self, request: PromoteGroup) -> Promoted:
        """Into an earlier step."""
        return Promoted(refusal=self._called(request).promote(request.group_id, request.to_step, request.replaces))

    @activity.defn
    async def read_budgets(self, request: ReadBudgets) -> BudgetState:
        """As they are."""
        return self._called(request).budgets()

    @activity.defn
    async def change_recipe(self, request: ChangeRecipe) -> None:
        """The keys that changed. As the real one, it reads the recipe and writes it a little later."""
        run = self._called(request)
        read = dict(run.recipe)
        await asyncio.sleep(0.05)
        run.recipe = read | request.changes

    @activity.defn
    async def record_action(self, request: RecordAction) -> None:
        """In the audit, once."""
        run = self._called(request)
        await run.until(lambda: not run.audit_is_slow.is_set())
        run.audit.setdefault(request.action_id, request)

    @activity.defn
    async def find_batch(self, request: FindBatch) -> FoundBatch:
        """Stored by an earlier execution, or not."""
        stored = self._called(request).batches.get(request.step)
        return FoundBatch(batch=stored and stored[0])

    @activity.defn
    async def assemble_batch(self, request: AssembleBatch) -> BatchRef:
        """Of sealed groups."""
        run = self._called(request)
        with surfaced(boundary="ledger", run_id=request.run_id):
            return run.store_batch(request.step, request.group_ids)

    @activity.defn
    async def train_step(self, request: TrainStep) -> StepApplied:
        """Applied once, after what `trainer` scripts for the first tries."""
        run = self._called(request)
        with surfaced(boundary="trainer", run_id=request.run_id):
            if run.trainer:
                await _played(run, run.trainer.pop(0))
            run.apply(request.step, request.batch_digest)
        return StepApplied(
            step=request.step,
            batch_digest=request.batch_digest,
            policy_version=request.step + 1,
            replayed_steps=0,
            metrics={"loss": 0.5},
        )

    @activity.defn
    async def publish_weights(self, request: PublishWeights) -> WeightsRef:
        """Exported."""
        run = self._called(request)
        run.published.append(request.version)
        return run.weights(request.version)

    @activity.defn
    async def refit(self, request: Refit) -> RefitDone:
        """Served from now on, unless `refits_stick` is off."""
        run = self._called(request)
        if run.refits_stick:
            run.serving = request.weights.version
        return RefitDone(version=request.weights.version, endpoints=1, seconds=0.1)

    @activity.defn
    async def restore_policy(self, request: RestorePolicy) -> RefitDone:
        """The newest published version is served again, unless `refits_stick` is off."""
        run = self._called(request)
        with surfaced(boundary="generation", run_id=request.run_id):
            if run.restores:
                await _played(run, run.restores.pop(0))
        newest = max(run.published, default=0)
        if run.refits_stick:
            run.serving = newest
        return RefitDone(version=newest, endpoints=1, seconds=0.1)

    @activity.defn
    async def record_step(self, request: RecordStep) -> None:
        """Metrics."""
        self._called(request).metrics[request.step] = request.metrics

    @activity.defn
    async def record_evaluation(self, request: RecordEvaluation) -> EvaluationResult:
        """Mean over valid rollouts."""
        run = self._called(request)
        mean, rollouts = run.mean_reward(request.group_ids)
        run.evaluations.append(EvaluationResult(version=request.version, mean_reward=mean, rollouts=rollouts))
        return run.evaluations[-1]

    @activity.defn
    async def set_run_state(self, request: SetRunState) -> None:
        """States in order."""
        self._called(request).states.append((request.state, request.reason))


async def _played(run: FakeRun, outcome: Outcome) -> Valid | Masked:
    match outcome:
        case Valid() | Masked():
            return outcome
        case Hangs():
            async with heartbeats(interval_s=1):
                await run.release.wait()
            return Valid(1.0)
        case Dies():
            await asyncio.Event().wait()
        case error:
            raise type(error)(*error.args)
    raise AssertionError("an endless wait ended")


@asynccontextmanager
async def serving(client: Client, queue: str, fakes: Fakes) -> AsyncIterator[None]:
    """Workers of all four queues. Deadlock detection is off: the machine may be slow."""
    ledger = [
        *(fakes.claim_prompts, fakes.open_group, fakes.lose_rollout, fakes.seal_group, fakes.find_batch),
        *(fakes.assemble_batch, fakes.record_step, fakes.record_evaluation, fakes.set_run_state),
        *(fakes.record_action, fakes.plan_step, fakes.promote_group, fakes.read_budgets, fakes.change_recipe),
    ]
    workers = (
        Worker(client, task_queue=queue, workflows=WORKFLOWS, activities=ledger, debug_mode=True),
        Worker(client, task_queue=f"{queue}-rollouts", activities=[fakes.run_rollout]),
        Worker(client, task_queue=f"{queue}-trainer", activities=[fakes.train_step, fakes.publish_weights]),
        Worker(client, task_queue=f"{queue}-generation", activities=[fakes.refit, fakes.restore_policy]),
    )
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        yield
