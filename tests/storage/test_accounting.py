"""Accounting under any order of events: endings, re-openings, replacements, promotions, batches, steps and restarts.

A small model says what each event does or why it is refused; the ledger must agree, and so must its counters.
"""

from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.errors import GroupConflict, IllegalTransition, StepClosed
from storage.ledger import Ledger
from storage.records import Bucket, BudgetCounts, GroupState
from tests.storage.building import Story, start_run

pytestmark = pytest.mark.integration

STEPS, SLOTS = 3, 2
Refusal = type[StepClosed] | type[IllegalTransition] | type[GroupConflict] | None
What = Literal["keep", "aside", "drop", "park", "open", "replace", "promote", "store", "apply", "copy", "restart"]
WHAT: tuple[What, ...] = (
    *("keep", "keep", "keep", "aside", "aside", "drop", "drop", "park", "open", "replace", "replace", "promote"),
    *("promote",),
    *("store", "apply", "copy", "restart"),
)
event = st.tuples(st.sampled_from(WHAT), st.integers(0, 30), st.integers(0, 30))


@dataclass
class Modelled:
    """A group as the model has it; its one rollout has settled once it was kept."""

    name: str
    step: int
    train_step: int
    replaces: str | None = None
    state: GroupState = "open"
    bucket: Bucket | None = None
    rollout: Literal["open", "valid", "lost"] = "open"


@dataclass
class Model:
    """What a run should be."""

    groups: dict[str, Modelled] = field(default_factory=dict)
    endings: list[str] = field(default_factory=list)
    batches: dict[int, list[str]] = field(default_factory=dict)
    applied: set[int] = field(default_factory=set)
    late: set[tuple[int, str, str]] = field(default_factory=set)

    def is_closed(self, group: Modelled) -> bool:
        return group.train_step in self.batches and group.name not in self.batches[group.train_step]

    def successor(self, name: str) -> str | None:
        return next((group.name for group in self.groups.values() if group.replaces == name), None)

    def move(self, group: Modelled, state: GroupState, bucket: Bucket | None) -> Refusal:
        """Move a group, or say why it stays."""
        if group.state == state:
            return None
        if self.is_closed(group):
            self.late.add((group.train_step, group.name, state))
            return StepClosed
        legal = {"open": {"parked", "dropped"}, "parked": {"open"}}.get(state, {"open", "parked"})
        if group.state not in legal or (state == "open" and self.successor(group.name)):
            return IllegalTransition
        if state == "sealed" and group.rollout == "open":
            return IllegalTransition
        if state == "set_aside" and group.rollout != "valid":
            return IllegalTransition
        group.state, group.bucket = state, bucket
        if state == "open":
            group.rollout = "open" if group.rollout == "lost" else group.rollout
            self.endings = [name for name in self.endings if name != group.name]
        elif state != "parked":
            self.endings.append(group.name)
        return None

    def open(self, name: str, step: int, replaces: str) -> Refusal:
        """A spare in the place of another group, or why not."""
        lost = self.groups[replaces]
        if self.successor(replaces):
            return GroupConflict
        if not self.gave_up(lost, step):
            return IllegalTransition
        if step in self.batches:
            self.late.add((step, name, "open"))
            return StepClosed
        self.groups[name] = Modelled(name, step, step, replaces)
        return None

    def gave_up(self, lost: Modelled, step: int) -> bool:
        return lost.state in ("dropped", "set_aside") if lost.train_step == step else lost.step == step

    def promote(self, group: Modelled, to_step: int, lost: Modelled) -> Refusal:
        """Let a group train earlier, or say why not."""
        if (group.train_step, group.replaces) == (to_step, lost.name):
            return None
        refused: Refusal = None
        if to_step in self.batches:
            refused = StepClosed
        elif (
            not (group.state == "sealed" and group.train_step > to_step and group.replaces is None)
            or group.name in self.batches.get(group.train_step, [])
            or self.successor(lost.name)
            or not self.gave_up(lost, to_step)
        ):
            refused = IllegalTransition
        if refused is None:
            group.train_step, group.replaces = to_step, lost.name
        else:
            self.late.add((to_step, group.name, "promoted"))
        return refused

    def counters(self, until: str | None = None) -> BudgetCounts:
        """Count drops along the endings, up to one of them."""
        consecutive = skipped = 0
        for name in self.endings:
            group = self.groups[name]
            if group.state != "dropped":
                consecutive = 0
            elif group.bucket == "infra":
                consecutive += 1
            elif group.bucket == "data":
                skipped += 1
            if name == until:
                break
        return BudgetCounts(consecutive_drops=consecutive, skipped_prompts=skipped)

    def standing(self, step: int) -> list[str]:
        """The groups that stand for the slots of a step."""
        names: list[str] = []
        for slot in range(SLOTS):
            current = self.groups[own(step, slot)]
            while current.state in ("dropped", "set_aside") or current.train_step != step:
                follower = self.successor(current.name)
                if follower is None or self.groups[follower].train_step != step:
                    break
                current = self.groups[follower]
            names.append(current.name)
        return names


def own(step: int, slot: int) -> str:
    return f"step-{step}/group-{slot}"


class Performance:
    """The ledger's side: every event, with the refusal that the model foretells."""

    def __init__(self, config: StorageConfig, blobs: BlobStore, run_id: str) -> None:
        self._config, self._blobs = config, blobs
        self.run_id = run_id
        self.model = Model()
        self._connect()

    def _connect(self) -> None:
        self._database = Database(self._config)
        self.ledger = Ledger(self._database, self._blobs)
        self.story = Story(self.ledger, self.run_id)

    async def close(self) -> None:
        await self._database.close()

    def id_of(self, name: str) -> str:
        return f"{self.run_id}/{name}"

    async def begin(self) -> None:
        """Every slot has its group."""
        for step in range(STEPS):
            for slot in range(SLOTS):
                await self.story.group(step, slot, 1)
                self.model.groups[own(step, slot)] = Modelled(own(step, slot), step, step)

    async def perform(self, what: What, one: int, other: int) -> None:
        """One event; the numbers choose what it happens to."""
        groups = list(self.model.groups.values())
        group, second = groups[one % len(groups)], groups[other % len(groups)]
        step = one % STEPS
        if what in ("keep", "aside", "drop", "park", "open"):
            await self.move(group, what, other)
        elif what == "replace":
            lost = self.likely("dropped" if other % 2 else "set_aside", one, group)
            at = lost.train_step if other % 3 else second.step
            slot = sum(1 for each in groups if each.step == at)
            refused = self.model.open(own(at, slot), at, lost.name)
            await self.expect(refused, self.story.group(at, slot, 1, replaces=self.id_of(lost.name)))
        elif what == "promote":
            ready, lost = self.likely("sealed", one, group), self.likely("dropped", other, second)
            to_step = lost.train_step
            refused = self.model.promote(ready, to_step, lost)
            promoting = self.ledger.groups.promote(self.id_of(ready.name), to_step, self.id_of(lost.name))
            await self.expect(refused, promoting)
        elif what == "store" and step not in self.model.batches:
            ready = [
                each.name for each in self.model.groups.values() if (each.train_step, each.state) == (step, "sealed")
            ]
            self.model.batches[step] = ready
            await self.story.batch([self.id_of(name) for name in ready], step)
        elif what == "apply" and step in self.model.batches and step not in self.model.applied:
            self.model.applied.add(step)
            for name in self.model.batches[step]:
                self.model.groups[name].state = "trained"
            await self.ledger.steps.apply(await self.story.lease(), step, "b" * 64, {"loss": 0.25}, 0)
        elif what == "copy" and group.state in ("sealed", "dropped", "set_aside", "trained"):
            copy = await self.ledger.copies.open(self.id_of(group.name))
            await self.story.give_up(copy.group_id)
        elif what == "restart":
            await self.close()
            self._connect()

    def likely(self, state: GroupState, number: int, otherwise: Modelled) -> Modelled:
        """Mostly a group in this state: of what left its place the oldest step's, else the newest; sometimes any
        other."""
        order = -1 if state == "sealed" else 1
        fitting = sorted(
            (g for g in self.model.groups.values() if g.state == state), key=lambda g: order * g.train_step
        )
        return fitting[number // 4 % len(fitting)] if fitting and number % 4 else otherwise

    async def move(self, group: Modelled, what: What, other: int) -> None:
        group_id = self.id_of(group.name)
        rollout_id = f"{group_id}/rollout-0"
        bucket: Bucket | None = None
        if what in ("keep", "aside") and group.rollout == "open" and group.state == "open":
            await self.story.settle(rollout_id, 1.0)
            group.rollout = "valid"
        if what == "drop":
            bucket = ("infra", "data", None)[other % 3]
            if group.rollout == "open":
                await self.ledger.rollouts.lose(rollout_id, "lost", "budget used up")
                group.rollout = "lost"
        ends: dict[What, GroupState] = {"keep": "sealed", "aside": "set_aside", "drop": "dropped", "park": "parked"}
        state = ends.get(what, "open")
        refused = self.model.move(group, state, bucket)
        await self.expect(refused, self.ledger.groups.set_state(group_id, state, bucket, "the story"))
        if refused is None and group.name in self.model.endings:
            assert await self.ledger.budgets.after(group_id) == self.model.counters(group.name)

    async def expect(self, refused: Refusal, work: Coroutine[object, object, object]) -> None:
        if refused is None:
            await work
        else:
            with pytest.raises(refused):
                await work

    async def check(self) -> None:
        """The ledger is what the model is."""
        model, ledger = self.model, self.ledger
        stored = await ledger.groups.list(self.run_id, purpose="train")
        summary = await ledger.summaries.of(self.run_id)
        counted = summary.groups
        states = [group.state for group in model.groups.values()]
        rollouts = [group.rollout for group in model.groups.values()]

        assert {group.group_id: (group.state, group.bucket, group.train_step, group.replaces) for group in stored} == {
            self.id_of(name): (
                group.state,
                group.bucket,
                group.train_step,
                group.replaces and self.id_of(group.replaces),
            )
            for name, group in model.groups.items()
        }
        ended = sorted((group.ended_order, group.group_id) for group in stored if group.ended_order is not None)
        assert [group_id for _, group_id in ended] == [self.id_of(name) for name in model.endings]
        assert await ledger.budgets.of(self.run_id) == model.counters()
        for name in model.endings:
            assert await ledger.budgets.after(self.id_of(name)) == model.counters(name)
        for step in range(STEPS):
            places = await ledger.places.of(self.run_id, step, SLOTS)
            assert [place.group and place.group.group_id for place in places] == [
                self.id_of(name) for name in model.standing(step)
            ]
        ended_well, given_up = counted.trained + counted.set_aside, counted.dropped + counted.parked
        assert counted.dispatched == ended_well + given_up + counted.open == len(states)
        assert (counted.trained, counted.dropped) == (states.count("trained"), states.count("dropped"))
        assert counted.set_aside == states.count("set_aside")
        assert (counted.parked, counted.refused_late) == (states.count("parked"), len(model.late))
        promoted = [group for group in model.groups.values() if group.train_step != group.step]
        spares = [
            group
            for group in model.groups.values()
            if group.replaces and group.train_step == group.step and model.groups[group.replaces].state != "set_aside"
        ]
        for step in range(STEPS):
            found = await ledger.places.set_aside(self.run_id, step)
            assert {group.group_id: group.reward for group in found} == {
                self.id_of(name): 1.0
                for name, group in model.groups.items()
                if (group.step, group.state) == (step, "set_aside")
            }
        assert (counted.promoted, counted.replaced) == (len(promoted), len(spares))
        assert [getattr(summary.rollouts, state) for state in ("valid", "lost", "open")] == [
            rollouts.count(state) for state in ("valid", "lost", "open")
        ]
        assert summary.identity_holds
        assert await ledger.checks.of(self.run_id) == []


@asynccontextmanager
async def performing(config: StorageConfig, blobs: BlobStore, ledger: Ledger) -> AsyncGenerator[Performance]:
    performance = Performance(config, blobs, (await start_run(ledger)).run_id)
    try:
        yield performance
    finally:
        await performance.close()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=st.lists(event, min_size=12, max_size=24))
async def test_identity_holds_and_counters_equal_the_model_whatever_happens(
    storage_config: StorageConfig, blobs: BlobStore, ledger: Ledger, events: list[tuple[What, int, int]]
) -> None:
    async with performing(storage_config, blobs, ledger) as performance:
        await performance.begin()
        for what, one, other in events:
            await performance.perform(what, one, other)
        await performance.check()
