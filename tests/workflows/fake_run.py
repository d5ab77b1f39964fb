"""One run in memory: the rules of the ledger that workflows rely on, and a script of what its rollouts do.

Attempts are numbered, what is settled stays settled, groups move along the ledger's legal transitions only.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from pydantic import JsonValue

from activities.errors import BoundaryError, PolicyMismatch
from storage.errors import GroupConflict, IllegalTransition, RecoveryRefused, StepClosed, UnknownGroup
from storage.groups import LEGAL_FROM
from workflows.messages import (
    BatchRef,
    Bucket,
    BudgetState,
    EvaluationResult,
    GroupResult,
    GroupState,
    Message,
    OpenGroup,
    PromptClaim,
    RecordAction,
    RolloutResult,
    RunRollout,
    SetAside,
    SlotPlan,
    StepPlan,
    WeightsRef,
)

DEADLINE_S = 120.0


def settlement(rollout_id: str, index: int, attempt: int, **own: Any) -> RolloutResult:
    """What all attempts that settle have in common: four calls, of which a later attempt replays three."""
    counts = {"model_calls": 4, "segments": 2, "generated_calls": 4, "replayed_calls": 3 * attempt}
    given = {"rollout_id": rollout_id, "index": index, "attempt": attempt, "attempts": attempt + 1}
    return RolloutResult.model_validate(given | counts | own)


@dataclass(frozen=True)
class Valid:
    """The attempt settles with this reward; some of its calls were sampled by a policy so many versions `older`."""

    reward: float
    older: int = 0

    def settled_as(self, rollout_id: str, index: int, *, attempt: int, version: int) -> RolloutResult:
        """The settlement."""
        oldest = version - self.older
        return settlement(rollout_id, index, attempt, state="valid", reward=self.reward, policy_version=oldest)


@dataclass(frozen=True)
class Masked:
    """The attempt settles without a vote."""

    reason: str

    def settled_as(self, rollout_id: str, index: int, *, attempt: int, version: int) -> RolloutResult:
        """The settlement."""
        return settlement(rollout_id, index, attempt, state="masked", reason=self.reason, policy_version=version)


@dataclass(frozen=True)
class Hangs:
    """The worker lives, the work goes on until the run is released."""


@dataclass(frozen=True)
class Dies:
    """The worker is gone: no heartbeat, no answer."""


Outcome = Valid | Masked | Hangs | Dies | BoundaryError


@dataclass(frozen=True)
class Call:
    """One try of one activity; `at` is when it started (skipped time counts)."""

    name: str
    request: Message
    at: datetime


@dataclass
class FakeGroup:
    """A group and its settled rollouts."""

    opened: OpenGroup
    state: GroupState = "open"
    bucket: Bucket | None = None
    reason: str | None = None
    settled: dict[int, RolloutResult] = field(default_factory=dict[int, RolloutResult])
    train_step: int = -1
    replaces: str | None = None

    def __post_init__(self) -> None:
        self.train_step, self.replaces = self.opened.step, self.opened.replaces


class FakeRun:
    """State of one run. Tests write what comes first, up to `validation_prompts`; they read the rest."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.script: dict[str, Sequence[Outcome]] = {}  # rollout id -> outcomes of attempts 0, 1, ...; then the default
        self.gates: dict[str, asyncio.Event] = {}  # rollout id -> every attempt of it waits for this first
        self.trainer: list[Outcome] = []  # of the tries of train_step; then it works
        self.serving = 0
        self.refits_stick = True
        self.runs_once = False  # recovery: none
        self.release = asyncio.Event()  # what hangs is valid then
        self.ledger_is_slow = asyncio.Event()  # while set, seal_group does not answer
        self.audit_is_slow = asyncio.Event()  # while set, record_action does not answer
        self.restores: list[Outcome] = []  # of the tries of restore_policy; then it works
        self.audit: dict[str, RecordAction] = {}  # by action id
        self.recipe: dict[str, JsonValue] = {}  # keys that levers changed
        self.promotions_are_refused = False
        self.late_refusals: list[str] = []
        self.validation_prompts = 2
        self.calls: list[Call] = []
        self.attempts: dict[str, int] = {}  # rollout id -> attempts begun
        self.claims: dict[tuple[str, int, int], PromptClaim] = {}  # (purpose, step, slot)
        self.groups: dict[str, FakeGroup] = {}
        self.ended: list[str] = []  # ids of groups that were sealed or dropped, in this order
        self.batches: dict[int, tuple[BatchRef, tuple[str, ...]]] = {}
        self.applied: dict[int, str] = {}  # step -> digest of its batch
        self.published: list[int] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.evaluations: list[EvaluationResult] = []
        self.states: list[tuple[str, str | None]] = []

    def count(self, name: str) -> int:
        """Tries of an activity."""
        return len(self.calls_of(name))

    def calls_of(self, name: str) -> list[Call]:
        """Tries of an activity, in order."""
        return [call for call in self.calls if call.name == name]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to be seen; TimeoutError after the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    def let_go(self) -> None:
        """End every activity that waits for the test."""
        for event in (self.release, *self.gates.values()):
            event.set()
        for event in (self.ledger_is_slow, self.audit_is_slow):
            event.clear()

    def is_settled(self, group_id: str, index: int) -> bool:
        """Whether the ledger has a rollout's settlement."""
        return group_id in self.groups and index in self.groups[group_id].settled

    def claim(self, purpose: str, step: int, slot: int) -> PromptClaim:
        """The next prompt of the run's order, or the one that the slot has."""
        key = (purpose, step, slot)
        if key not in self.claims:
            position = slot if purpose == "validation" else sum(claimed[0] == purpose for claimed in self.claims)
            self.claims[key] = PromptClaim(slot=slot, prompt_id=f"{purpose}-prompt-{position}", row_index=position)
        return self.claims[key]

    def open(self, request: OpenGroup) -> FakeGroup:
        """A new group, or the stored one; parked or dropped, it and its lost rollouts are open again."""
        group = self.groups.setdefault(request.group_id, FakeGroup(request))
        if group.opened != request:
            raise GroupConflict(request.group_id, repr(group.opened), repr(request))
        self._check_step_open(group, "open")
        if group.state in LEGAL_FROM["open"]:
            if request.group_id in self.ended:
                self.ended.remove(request.group_id)
            group.state, group.bucket, group.reason = "open", None, None
            group.settled = {index: result for index, result in group.settled.items() if result.state != "lost"}
        return group

    def move(self, group_id: str, state: GroupState, bucket: Bucket | None, reason: str | None) -> None:
        """Seal, park, drop or set aside; only from a state that allows it, and with every rollout settled if it ends
        well; only equal rewards are set aside."""
        group = self.groups.get(group_id)
        if group is None:
            raise UnknownGroup(group_id)
        self._check_step_open(group, state)
        well = state in ("sealed", "set_aside")
        incomplete = well and len(group.settled) < group.opened.num_rollouts
        if state == "set_aside" and len({r.reward for r in group.settled.values() if r.state == "valid"}) != 1:
            raise IllegalTransition(group_id, group.state, state, "its rewards differ")
        legal = group.state in LEGAL_FROM[state] and not incomplete
        if not legal and group.state != state:
            raise IllegalTransition(
                group_id, group.state, state, "some of its rollouts are open" if incomplete else None
            )
        if state in ("parked", "dropped", "set_aside") and not reason:
            raise ValueError(f"group {group_id!r} cannot become {state} without a reason")
        group.state, group.bucket, group.reason = state, bucket, reason
        if state != "parked" and group_id not in self.ended:
            self.ended.append(group_id)

    def budgets(self) -> BudgetState:
        """Drop counters over the training groups, in the order in which they ended."""
        drops = skipped = 0
        for group in (self.groups[group_id] for group_id in self.ended):
            if group.opened.purpose != "train":
                continue
            if group.state in ("sealed", "set_aside", "trained"):
                drops = 0
            elif group.bucket == "infra":
                drops += 1
            elif group.bucket == "data":
                skipped += 1
        return BudgetState(consecutive_drops=drops, skipped_prompts=skipped)

    def _check_step_open(self, group: FakeGroup, asked: str) -> None:
        opened = group.opened
        batch = self.batches.get(group.train_step)
        if opened.purpose == "train" and batch is not None and opened.group_id not in batch[1]:
            self.late_refusals.append(opened.group_id)
            raise StepClosed(self.id, group.train_step, opened.group_id, group.state, asked)

    def plan(self, step: int, count: int) -> StepPlan:
        """The places of a step, its next slot, and claims that no group was opened for."""
        slots = tuple(self._slot(step, self.claim("train", step, slot)) for slot in range(count))
        claimed = sorted(slot for purpose, of, slot in self.claims if (purpose, of) == ("train", step))
        spares = [
            slot for slot in claimed if slot >= count and f"{self.id}/step-{step}/group-{slot}" not in self.groups
        ]
        return StepPlan(
            slots=slots,
            next_slot=claimed[-1] + 1,
            spares=tuple(self.claims["train", step, slot] for slot in spares),
            set_aside=tuple(
                SetAside(group_id=name, reward=next(r.reward for r in group.settled.values() if r.reward is not None))
                for name, group in self.groups.items()
                if (group.opened.step, group.state) == (step, "set_aside")
            ),
        )

    def _slot(self, step: int, claim: PromptClaim) -> SlotPlan:
        current, used = self.groups.get(f"{self.id}/step-{step}/group-{claim.slot}"), 0
        if current is None:
            return SlotPlan(claim=claim)
        while (gone := current.state) in ("dropped", "set_aside") or current.train_step != step:
            following = self._replacing(current.opened.group_id, step)
            if following is None:
                break
            current, used = following, used + (gone != "set_aside")
        opened = current.opened
        return SlotPlan(
            claim=PromptClaim(slot=opened.slot, prompt_id=opened.prompt_id, row_index=opened.row_index),
            replaces=current.replaces,
            replacements_used=used,
            lent=self.result(opened.group_id) if opened.step != step else None,
            given_away=current.train_step != step,
            set_aside=current.state == "set_aside",
        )

    def _replacing(self, group_id: str, step: int) -> FakeGroup | None:
        found = [g for g in self.groups.values() if g.replaces == group_id and g.train_step == step]
        return found[0] if found else None

    def promote(self, group_id: str, to_step: int, replaces: str) -> str | None:
        """Train a group in an earlier step; why not, where that cannot be."""
        group = self.groups[group_id]
        if to_step in self.batches or group.state != "sealed" or to_step >= group.train_step:
            self.late_refusals.append(group_id)
            return f"{group_id} is {group.state}, in step {group.train_step}"
        taken = any(other.replaces == replaces for other in self.groups.values())
        if self.promotions_are_refused or taken or group.replaces is not None:
            return f"{replaces} is replaced already, or {group_id} has another's place"
        group.train_step, group.replaces = to_step, replaces
        return None

    def result(self, group_id: str) -> GroupResult:
        """How a sealed group ended."""
        group = self.groups[group_id]
        states = [result.state for result in group.settled.values()]
        return GroupResult(
            group_id=group_id,
            slot=group.opened.slot,
            prompt_id=group.opened.prompt_id,
            state="sealed",
            valid=states.count("valid"),
            masked=states.count("masked"),
            lost=states.count("lost"),
            policy_version=min((r.policy_version for r in group.settled.values() if r.policy_version), default=0),
        )

    def check_identity(self) -> None:
        """Every claimed prompt is a group; every group is trained, given up or open; every rollout of it is known."""
        groups = [group for group in self.groups.values() if group.opened.purpose == "train"]
        trained = [group for group in groups if group.state == "trained"]
        dropped = [group for group in groups if group.state in ("dropped", "set_aside")]
        live = [group for group in groups if group.state in ("open", "parked", "sealed")]
        assert len(trained) + len(dropped) + len(live) == len(groups)
        in_batches = [group_id for _, ids in self.batches.values() for group_id in ids]
        assert len(in_batches) == len(set(in_batches))
        for group in groups:
            count = group.opened.num_rollouts
            states = [group.settled[i].state if i in group.settled else "open" for i in range(count)]
            assert sum(states.count(state) for state in ("valid", "masked", "lost", "open")) == count
            assert group.state not in ("sealed", "set_aside", "trained") or "open" not in states
            if group.state == "trained":
                assert group.opened.group_id in self.batches[group.train_step][1]

    def begin_attempt(self, rollout: RunRollout) -> int | RolloutResult:
        """The number of a new attempt, or the settlement."""
        settled = self.groups[rollout.group_id].settled.get(rollout.index)
        if settled is not None:
            return settled
        attempt = self.attempts.get(rollout.rollout_id, 0)
        if attempt and self.runs_once:
            raise RecoveryRefused(rollout.rollout_id, attempt - 1)
        self.attempts[rollout.rollout_id] = attempt + 1
        return attempt

    def outcome(self, rollout: RunRollout, attempt: int) -> Outcome:
        """What the script says; the default reward tells siblings apart."""
        newest = rollout.newest_policy_version or rollout.policy_version
        if not rollout.policy_version <= self.serving <= newest:
            raise PolicyMismatch(f"the endpoints serve policy-{self.serving}, not policy-{rollout.policy_version}")
        script = self.script.get(rollout.rollout_id, ())
        return script[attempt] if attempt < len(script) else Valid(float(rollout.index % 2))

    def settle(self, group_id: str, result: RolloutResult) -> RolloutResult:
        """Write a settlement; the first one stays."""
        return self.groups[group_id].settled.setdefault(result.index, result)

    def lose(self, group_id: str, index: int, state: Literal["lost", "masked"], reason: str) -> RolloutResult:
        """Give a rollout up; a lost one may still be masked."""
        rollout_id = f"{group_id}/rollout-{index}"
        begun = self.attempts.get(rollout_id, 0)
        attempt = begun - 1 if begun else None
        given_up = RolloutResult(
            rollout_id=rollout_id, index=index, state=state, attempt=attempt, reason=reason, attempts=begun
        )
        settled = self.groups[group_id].settled
        if index in settled and settled[index].state == "lost" and state == "masked":
            del settled[index]
        return self.settle(group_id, given_up)

    def last_attempts(self, group: OpenGroup) -> tuple[int | None, ...]:
        """The newest attempt of each rollout; nothing where none began."""
        ids = [f"{group.group_id}/rollout-{index}" for index in range(group.num_rollouts)]
        last = tuple(self.attempts[rollout] - 1 if rollout in self.attempts else None for rollout in ids)
        return last if any(attempt is not None for attempt in last) else ()

    def mean_reward(self, group_ids: Sequence[str]) -> tuple[float, int]:
        """Mean reward and number of the valid rollouts."""
        settled = [result for group_id in group_ids for result in self.groups[group_id].settled.values()]
        rewards = [result.reward for result in settled if result.state == "valid" and result.reward is not None]
        return (sum(rewards) / len(rewards) if rewards else 0.0), len(rewards)

    def store_batch(self, step: int, group_ids: tuple[str, ...]) -> BatchRef:
        """The batch of a step; all its groups must be sealed."""
        foreign = [
            group_id
            for group_id in group_ids
            if self.groups[group_id].state != "sealed" or self.groups[group_id].train_step != step
        ]
        if foreign:
            raise ValueError(f"{foreign} are not sealed groups of step {step}")
        mean, rollouts = self.mean_reward(group_ids)
        batch = BatchRef(
            step=step,
            digest=f"batch-{step}",
            groups=len(group_ids),
            rows=rollouts,
            rollouts=rollouts,
            trained_tokens=10 * rollouts,
            mean_reward=mean,
        )
        return self.batches.setdefault(step, (batch, group_ids))[0]

    def apply(self, step: int, digest: str) -> None:
        """Apply an optimizer step once; its groups are trained."""
        if self.applied.setdefault(step, digest) != digest:
            raise ValueError(f"step {step} was applied with another batch")
        for group_id in self.batches[step][1]:
            self.groups[group_id].state = "trained"

    def weights(self, version: int) -> WeightsRef:
        """The export of a policy version."""
        return WeightsRef(version=version, path=f"weights/policy-{version}", digest=f"digest-{version}")
