"""One run under one policy and one failure rate: its steps one after the other, and what was counted.

Every policy ends a step in the same way: all its groups are kept or lost first; with at least ceil(N * fraction) of
them kept, the batch of the kept ones is assembled and stored as the product does it, and its tokens with loss mask 1
are trained. A step below that floor trains nothing: what it generated is spent, and it is counted. NeMo-RL and Onbelay
would end the run there; the benchmark goes on with the next step, so that every policy meets the whole trace.

Retries, back-off and budgets follow the rules of the workflows (`workflows.attempts`), here without Temporal.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from temporalio.testing import ActivityEnvironment

from activities.training.batch import TrainingBatch
from benchmarks.goodput.groups import Groups
from benchmarks.goodput.places import Place, place_of
from benchmarks.goodput.policies import Policy
from benchmarks.goodput.settings import Settings
from benchmarks.goodput.stack import GoodputStack
from benchmarks.goodput.trace import Failure, FailureTrace
from workflows.messages import AssembleBatch

RECORDED_RUN = "d" * 64  # stands for a model: nothing is trained


@dataclass(frozen=True)
class RunCounts:
    """`generated_tokens` are those of all attempts in the ledger, `sampled_tokens` what the model server counted, calls
    that nobody waited for included. `kept_tokens` would be trained if there were no floor. `injected`: failures by kind
    that struck; `failed`: failed attempts by class; `unplanned`: those of them that are not the trace's."""

    policy: str
    rate: float
    steps: int
    groups: int
    groups_lost: int
    steps_below_floor: int
    generated_tokens: int
    sampled_tokens: int
    trained_tokens: int
    kept_tokens: int
    replayed_tokens: int
    attempts: int
    wall_s: float
    injected: dict[str, int] = field(default_factory=dict[str, int])
    failed: dict[str, int] = field(default_factory=dict[str, int])
    unplanned: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()

    @property
    def generated_per_trained(self) -> float | None:
        """None where nothing was trained."""
        return self.generated_tokens / self.trained_tokens if self.trained_tokens else None

    @property
    def sampled_per_trained(self) -> float | None:
        """The same by the model server's count."""
        return self.sampled_tokens / self.trained_tokens if self.trained_tokens else None

    @property
    def generated_per_kept(self) -> float | None:
        """As if every kept group were trained, whatever the floor."""
        return self.generated_tokens / self.kept_tokens if self.kept_tokens else None


class GoodputRun:
    """Runs once."""

    def __init__(self, stack: GoodputStack, settings: Settings, policy: Policy, rate: float) -> None:
        self._stack = stack
        self._settings = settings
        self._policy = policy
        self._rate = rate
        self._id = f"{policy.name}-{round(rate * 1e5)}"
        self._groups = Groups(stack, policy, asyncio.Semaphore(settings.concurrent))
        self._lost = self._below = self._trained = self._kept = 0

    async def run(self) -> RunCounts:
        """All steps."""
        await self._create()
        trace = FailureTrace(self._settings.seed, self._rate)
        self._stack.gate.follow(lambda rollout_id, attempt: self._plan(trace, rollout_id, attempt))
        sampled, started = await self._stack.sampled_tokens(), time.perf_counter()
        for step in range(self._settings.steps):
            await self._step(step)
        wall_s = time.perf_counter() - started
        summary = await self._stack.ledger.summaries.of(self._id)
        violations = await self._stack.ledger.checks.of(self._id)
        return RunCounts(
            policy=self._policy.name,
            rate=self._rate,
            steps=self._settings.steps,
            groups=self._settings.prompts,
            groups_lost=self._lost,
            steps_below_floor=self._below,
            generated_tokens=summary.tokens.generated,
            sampled_tokens=await self._stack.sampled_tokens() - sampled,
            trained_tokens=self._trained,
            kept_tokens=self._kept,
            replayed_tokens=summary.tokens.replayed,
            attempts=summary.attempts.total,
            wall_s=round(wall_s, 2),
            injected=dict(sorted(Counter(self._stack.gate.struck.values()).items())),
            failed=dict(sorted(self._groups.failures.items())),
            unplanned=tuple(self._groups.unplanned),
            violations=tuple(f"{one.invariant}: {one.row}: {one.detail}" for one in violations),
        )

    async def _create(self) -> None:
        sections = self._stack.recipe.model_dump(mode="json")
        sections["rollouts"]["recovery"]["default"] = self._policy.recovery
        rows = self._stack.rows
        await self._stack.ledger.runs.create(self._id, self._id, sections, rows.digest, len(rows), RECORDED_RUN)

    def _plan(self, trace: FailureTrace, rollout_id: str, attempt: int) -> Failure | None:
        place, index = place_of(rollout_id, self._settings.groups)
        if place.run_id != self._id:
            return None  # what an earlier run has left behind
        return trace.of(place.row(self._settings.groups), index, place.retry + attempt)

    async def _step(self, step: int) -> None:
        slots = range(self._settings.groups)
        ended = await asyncio.gather(*(self._groups.settle(Place(self._id, step, slot, 0)) for slot in slots))
        kept = tuple(group_id for group_id in ended if group_id is not None)
        self._lost += len(ended) - len(kept)
        self._kept += await self._tokens(kept)
        if len(kept) < self._settings.floor:
            self._below += 1
            return
        request = AssembleBatch(run_id=self._id, step=step, group_ids=kept)
        batch = await ActivityEnvironment().run(self._stack.writing.assemble_batch, request)
        self._trained += batch.trained_tokens

    async def _tokens(self, group_ids: tuple[str, ...]) -> int:
        """Tokens with loss mask 1 of the valid rollouts of these groups."""
        settled = await self._stack.ledger.rollouts.settled(group_ids)
        evidence = [one.evidence_digest for one in settled if one.state == "valid" and one.evidence_digest is not None]
        return sum(
            [TrainingBatch.from_bytes(await self._stack.blobs.get(digest)).trained_tokens for digest in evidence]
        )
