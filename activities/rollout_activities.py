"""run_rollout: one attempt at one rollout, from a new attempt number to its settlement in the ledger.

The answer returned is always the one that is stored. A rollout that is settled already is not run again. A worker that
stops hands its rollouts over: their attempts end as such, and another worker goes on from what is recorded.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from temporalio import activity

from activities.errors import HandedOver, failure_error, failure_of
from activities.generation.vllm import VllmServer
from activities.heartbeat import Heartbeats, heartbeats
from activities.rollouts.attempts import Attempts, newest_version
from activities.rollouts.evidence import Evidence
from activities.rollouts.gym_agent import GymAgents
from activities.rollouts.outcome import judge
from activities.rollouts.recovery import recovery_of
from activities.run_context import RunContexts
from configs.recipe import Recipe
from configs.rollouts import RecoveryMode
from storage.blobs import BlobStore
from storage.errors import RecoveryRefused
from storage.ledger import Ledger
from storage.records import BegunAttempt, SettledRollout
from workflows.messages import Failure, Purpose, RolloutResult, RunRollout


@dataclass
class _Progress:
    """How far an activity has come: its attempt, once that has begun, and the rule for a later one."""

    attempt: int | None = None
    recovery: RecoveryMode | None = None


class RolloutActivities:
    """The activities of a rollout worker."""

    def __init__(
        self,
        ledger: Ledger,
        blobs: BlobStore,
        contexts: RunContexts,
        agents: GymAgents,
        servers: Sequence[VllmServer],
    ) -> None:
        self._ledger = ledger
        self._blobs = blobs
        self._contexts = contexts
        self._attempts = Attempts(ledger, agents, servers)
        self._worker = f"{socket.gethostname()}:{os.getpid()}"

    @activity.defn
    async def run_rollout(self, rollout: RunRollout) -> RolloutResult:
        """Run one attempt. Every error names the attempt, and is in the ledger (if that lives) before it is raised."""
        progress = _Progress()
        try:
            return await self._tried(rollout, progress)
        except asyncio.CancelledError as error:
            if not _worker_stops():  # whoever cancelled it decides what becomes of the rollout
                raise
            handed_over = HandedOver(f"worker {self._worker} stops; another one goes on with the rollout")
            raise failure_error(await self._failed(rollout, progress, handed_over)) from error

    async def _tried(self, rollout: RunRollout, progress: _Progress) -> RolloutResult:
        try:
            async with heartbeats() as beats:
                return await self._run(rollout, progress, beats)
        except Exception as error:
            raise failure_error(await self._failed(rollout, progress, error)) from error

    async def _run(self, rollout: RunRollout, progress: _Progress, beats: Heartbeats) -> RolloutResult:
        context = await self._contexts.of(rollout.run_id)
        row = context.row(await self._rows(rollout), rollout.row_index)
        rules = context.recipe.rollouts
        progress.recovery = recovery_of(row, rules.recovery)
        serving = None
        if progress.recovery == "none":  # its only attempt must not be spent on servers that miss the policy
            serving = await self._attempts.serving(rules, rollout)
        begun = await self._ledger.rollouts.begin_attempt(
            rollout.rollout_id,
            self._worker,
            recovery=progress.recovery,
            policy_version=newest_version(rollout),
            max_replay_age_versions=rules.max_replay_age_versions,
            fresh_after=rollout.fresh_after,
        )
        if isinstance(begun, SettledRollout):
            return rollout_result(begun)
        progress.attempt = begun.attempt
        begins = _begins(begun)
        activity.logger.info("%s: %s", rollout.rollout_id, begins)
        beats.say(begins)
        evidence = await self._attempts.run(rules, row, rollout, begun.attempt, serving)
        return rollout_result(await self._settle(context.recipe, rollout, begun.attempt, evidence))

    async def _rows(self, rollout: RunRollout) -> Purpose:
        """Whose dataset has the row: for a diagnostic copy, its original's."""
        if rollout.purpose != "diagnostic":
            return rollout.purpose
        group = await self._ledger.groups.get(rollout.group_id)
        while group.copy_of is not None:
            group = await self._ledger.groups.get(group.copy_of)
        return group.purpose

    async def _failed(self, rollout: RunRollout, progress: _Progress, error: Exception) -> Failure:
        """The failure, written if it is an attempt's."""
        failure = _failure(rollout, progress.attempt, error)
        if progress.attempt is not None:
            recorded = await self._record(rollout, progress.attempt, failure)
            failure = failure if isinstance(error, HandedOver) else recorded
        if isinstance(error, RecoveryRefused) or (progress.recovery == "none" and progress.attempt is not None):
            failure = failure.model_copy(update={"final": True})
        return failure

    async def _record(self, rollout: RunRollout, attempt: int, failure: Failure) -> Failure:
        """Write the failure; if that fails, the failure is the ledger's, and the next attempt abandons this one."""
        try:
            await self._ledger.rollouts.fail_attempt(
                rollout.rollout_id, attempt, failure.boundary, failure.bucket, failure.failure_class, failure.cause
            )
        except Exception as error:
            return _failure(rollout, attempt, error)
        return failure

    async def _settle(self, recipe: Recipe, rollout: RunRollout, attempt: int, evidence: Evidence) -> SettledRollout:
        settlement, rows = judge(
            rollout,
            attempt,
            evidence,
            max_row_tokens=recipe.training.max_row_tokens,
            overlong_filtering=recipe.grpo.overlong_filtering,
        )
        if rows is not None:
            digest = await self._blobs.put(rows.to_bytes())
            settlement = settlement.model_copy(update={"evidence_digest": digest})
        return await self._ledger.rollouts.settle(settlement)


def _worker_stops() -> bool:
    """Whether the activity was cancelled because the grace period of its worker is over."""
    details = activity.cancellation_details()
    return details is not None and details.worker_shutdown


def _begins(begun: BegunAttempt) -> str:
    """How an attempt starts, for the log and the Temporal UI."""
    if begun.fresh_reason is not None:
        return f"attempt {begun.attempt} samples afresh ({begun.fresh_reason})"
    return f"attempt {begun.attempt} replays {begun.recorded} recorded responses"


def _failure(rollout: RunRollout, attempt: int | None, error: Exception) -> Failure:
    failure = failure_of(
        error,
        boundary="ledger",
        run_id=rollout.run_id,
        group_id=rollout.group_id,
        rollout_id=rollout.rollout_id,
        attempt=attempt,
    )
    return failure.model_copy(update={"retries": activity.info().attempt - 1})


def rollout_result(settled: SettledRollout) -> RolloutResult:
    """The message for a stored settlement."""
    return RolloutResult(
        rollout_id=settled.rollout_id,
        index=settled.index,
        state=settled.state,
        attempt=settled.attempt,
        reward=settled.reward,
        model_calls=settled.model_calls,
        segments=settled.segments,
        policy_version=settled.policy_version_min,
        reason=settled.reason,
        attempts=settled.attempts,
        generated_calls=settled.generated_calls,
        replayed_calls=settled.replayed_calls,
    )
