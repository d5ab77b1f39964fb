"""The activities of the default queue that plan a step, build its batch, and write what became of steps and runs."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from temporalio import activity

from activities.errors import surfaced
from activities.heartbeat import heartbeats
from activities.metrics.step_values import step_values
from activities.metrics.tensorboard import StepMetricsWriter
from activities.metrics.wandb_sink import WandbSink
from activities.rollouts import truncation
from activities.rollouts.dataset import DatasetError
from activities.rollouts.prompt_order import row_of_position
from activities.run_context import RunContext, RunContexts
from activities.step_plan import prompt_claim, step_plan
from activities.training.assembly import assemble, mean_reward
from activities.training.batch import TrainingBatch, TrainingRow
from storage.blobs import BlobStore
from storage.ledger import Ledger
from storage.records import BatchRecord, Claim, SettledRollout
from workflows.messages import (
    AssembleBatch,
    BatchRef,
    ClaimPrompts,
    EvaluationResult,
    FindBatch,
    FoundBatch,
    PlanStep,
    PromptClaims,
    Purpose,
    RecordEvaluation,
    SetRunState,
    StepPlan,
)
from workflows.training_messages import RecordStep

# Part of what an activity has left that W&B may take: the rest is for its answer to Temporal.
_SHARE_FOR_WANDB = 0.8
_OVER = ("completed", "stopped", "failed")


class LedgerActivities:
    """Thin functions over the ledger and the blob store."""

    def __init__(self, ledger: Ledger, blobs: BlobStore, contexts: RunContexts) -> None:
        self._ledger = ledger
        self._blobs = blobs
        self._contexts = contexts
        self._metrics: dict[Path, StepMetricsWriter] = {}
        self._wandb = WandbSink(ledger.statistics.recorded)

    @activity.defn
    async def claim_prompts(self, request: ClaimPrompts) -> PromptClaims:
        """Reserve prompts: training prompts in the run's order, validation prompts in the file's."""
        with surfaced(boundary="ledger", run_id=request.run_id):
            claims = await self._claim(request.run_id, request.step, request.purpose, request.first_slot, request.count)
            return PromptClaims(claims=tuple(map(prompt_claim, claims)))

    @activity.defn
    async def plan_step(self, request: PlanStep) -> StepPlan:
        """Claim the prompts of a step's slots, and say which groups stand for them now."""
        run_id, step, count = request.run_id, request.step, request.count
        with surfaced(boundary="ledger", run_id=run_id):
            claims = await self._claim(run_id, step, "train", 0, count)
            next_slot = await self._ledger.prompts.next_slot(run_id, step)
            spares: list[Claim] = []
            if next_slot > count:
                beyond = await self._claim(run_id, step, "train", count, next_slot - count)
                opened = {group.slot for group in await self._ledger.groups.list(run_id, step, purpose="train")}
                spares = [claim for claim in beyond if claim.slot not in opened]
            places = await self._ledger.places.of(run_id, step, count)
            set_aside = await self._ledger.places.set_aside(run_id, step)
            return step_plan(step, {claim.slot: claim for claim in claims}, places, spares, next_slot, set_aside)

    async def _claim(self, run_id: str, step: int, purpose: Purpose, first_slot: int, count: int) -> Sequence[Claim]:
        context = await self._contexts.of(run_id)
        dataset, seed = context.dataset(purpose), context.recipe.grpo.seed
        if purpose == "validation":
            count = min(count, len(dataset) - first_slot)

        def pick(position: int) -> tuple[int, str]:
            row = position if purpose == "validation" else row_of_position(position, len(dataset), seed)
            return row, dataset.prompt_ids[row]

        return await self._ledger.prompts.claim(run_id, step, purpose, first_slot, count, pick)

    @activity.defn
    async def find_batch(self, request: FindBatch) -> FoundBatch:
        """The stored batch of a step, if an earlier execution of the step got so far."""
        with surfaced(boundary="ledger", run_id=request.run_id):
            stored = await self._ledger.batches.get(request.run_id, request.step)
            return FoundBatch(batch=None if stored is None else _batch_ref(stored))

    @activity.defn
    async def assemble_batch(self, request: AssembleBatch) -> BatchRef:
        """Build the batch of a step from its sealed groups and store it: bytes first, then the record."""
        with surfaced(boundary="ledger", run_id=request.run_id):
            async with heartbeats():
                context = await self._contexts.of(request.run_id)
                rollouts = await self._ledger.rollouts.settled(request.group_ids)
                rows: dict[str, tuple[TrainingRow, ...]] = {}
                for rollout in rollouts:
                    if rollout.state == "valid" and rollout.evidence_digest is not None:
                        evidence = await self._blobs.get(rollout.evidence_digest)
                        rows[rollout.rollout_id] = TrainingBatch.from_bytes(evidence).rows
                batch = assemble(request.run_id, request.step, rollouts, rows, context.recipe.grpo)
                stored = await self._ledger.batches.store(
                    run_id=request.run_id,
                    step=request.step,
                    digest=await self._blobs.put(batch.to_bytes()),
                    rows=sum(not row.is_placeholder for row in batch.rows),
                    rollouts=batch.rollouts,
                    trained_tokens=batch.trained_tokens,
                    segments_max=max(len(own) for own in rows.values()),
                    mean_reward=mean_reward(rollouts),
                    group_ids=request.group_ids,
                )
                return _batch_ref(stored)

    @activity.defn
    async def record_step(self, request: RecordStep) -> None:
        """Write a step's metrics, and those that the ledger gives, to the ledger, TensorBoard and W&B. Written again,
        it is what was written first."""
        with surfaced(boundary="ledger", run_id=request.run_id):
            context = await self._contexts.of(request.run_id)
            metrics = await self._measured(context, request)
            stored = await self._ledger.steps.record_metrics(request.run_id, request.step, metrics)
            folder = context.recipe.training.output_dir
            writer = self._metrics.setdefault(folder, StepMetricsWriter(folder))
            writer.write_step(request.run_id, request.step, stored)
            await self._wandb.send(request.run_id, context.recipe, _time_left_s())

    @activity.defn
    async def record_evaluation(self, request: RecordEvaluation) -> EvaluationResult:
        """Write the mean reward of an evaluation."""
        with surfaced(boundary="ledger", run_id=request.run_id):
            settled = await self._ledger.rollouts.settled(request.group_ids)
            rewards = [rollout.reward for rollout in settled if rollout.state == "valid" and rollout.reward is not None]
            mean = sum(rewards) / len(rewards) if rewards else None
            await self._ledger.evaluations.record(request.run_id, request.version, mean, len(rewards))
            return EvaluationResult(version=request.version, mean_reward=mean, rollouts=len(rewards))

    async def _measured(self, context: RunContext, request: RecordStep) -> dict[str, float]:
        """The metrics of a step, with those of the ledger, which count over the whole run."""
        read = await self._ledger.statistics.of(request.run_id, request.step)
        agents = {
            index: str(context.row("train", index)["agent_ref"]["name"])
            for index in {rollout.row_index for rollout in read.rollouts}
        }
        recipe = context.recipe
        ranks, prompts = recipe.training.world_size, recipe.grpo.num_prompts_per_step
        metrics = request.metrics | step_values(read, agents, request.metrics, ranks=ranks, prompts=prompts)
        if recipe.rollouts.truncate_noncontiguous_episodes:
            metrics |= await self._truncations(agents, request.run_id, request.step)
        return metrics

    async def _truncations(self, agents: Mapping[int, str], run_id: str, step: int) -> dict[str, float]:
        """How many episodes of the trained groups were cut short, by agent."""
        batch = await self._ledger.batches.get(run_id, step)
        groups = [await self._ledger.groups.get(group_id) for group_id in (batch.group_ids if batch else ())]
        agent_of = {group.group_id: agents[group.row_index] for group in groups}
        rollouts: dict[str, list[SettledRollout]] = {}
        for rollout in await self._ledger.rollouts.settled(list(agent_of)):
            rollouts.setdefault(agent_of[rollout.group_id], []).append(rollout)
        return truncation.metrics(rollouts)

    @activity.defn
    async def set_run_state(self, request: SetRunState) -> None:
        """Write the state of the run."""
        with surfaced(boundary="ledger", run_id=request.run_id):
            await self._ledger.runs.set_state(request.run_id, request.state, request.reason)
            if request.state in _OVER:
                await self._send_the_rest(request.run_id)

    async def _send_the_rest(self, run_id: str) -> None:
        """Steps that W&B missed, for no later step brings them. A run ends whether or not this works."""
        try:
            context = await self._contexts.of(run_id)
        except (DatasetError, OSError, ValueError) as error:
            activity.logger.warning("run %s: what W&B has is not looked at: %s", run_id, error)
        else:
            await self._wandb.send(run_id, context.recipe, _time_left_s(), last=True)


def _time_left_s() -> float:
    """How long an activity may still wait for W&B."""
    info = activity.info()
    if info.start_to_close_timeout is None:
        return float("inf")
    passed = datetime.now(UTC) - info.started_time
    return max(0.0, (info.start_to_close_timeout - passed).total_seconds() * _SHARE_FOR_WANDB)


def _batch_ref(batch: BatchRecord) -> BatchRef:
    return BatchRef(
        step=batch.step,
        digest=batch.digest,
        groups=len(batch.group_ids),
        rows=batch.rows,
        rollouts=batch.rollouts,
        trained_tokens=batch.trained_tokens,
        mean_reward=batch.mean_reward or 0.0,
    )
