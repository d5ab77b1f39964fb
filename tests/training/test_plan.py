"""The plan of the trainer, played through every way to die: the weights are always those of a run that never died."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.training.plan import (
    EngineAt,
    KeepEngine,
    Ledgered,
    LoadCheckpoint,
    LoadModel,
    RecordTrained,
    ReturnApplied,
    Route,
    StepRefused,
    checkpoint_due,
    plan_step,
    plan_version,
)

CRASHES = ("before training", "after training", "after recording", "after saving", "ledger away after training")


class Died(Exception):
    """The trainer process ended here."""


@dataclass
class World:
    """A trainer whose weights are the tuple of the batches applied to them, with a ledger and checkpoints."""

    save_period: int
    applied: dict[int, str] = field(default_factory=dict[int, str])
    checkpoints: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    weights: tuple[str, ...] | None = None
    trained_here: bool = False
    trainings: int = 0

    def train(self, step: int, crash: str | None) -> None:
        """One activity: plan, travel, train, record, save; dies where `crash` says."""
        plan = plan_step(step, f"batch-{step}", self._ledgered(step), self._engine(), self.checkpoints)
        if isinstance(plan, ReturnApplied):
            return
        if isinstance(plan, Route):
            self._travel(plan)
            self._die_if(crash, "before training")
            self._apply(step)
        if crash == "ledger away after training":
            raise Died
        self._die_if(crash, "after training")
        assert step not in self.applied
        self.applied[step] = f"batch-{step}"
        self._die_if(crash, "after recording")
        assert self.weights is not None
        if checkpoint_due(len(self.weights), self.checkpoints, self.save_period):
            self.checkpoints[len(self.weights)] = self.weights
        self._die_if(crash, "after saving")

    def publish(self, version: int) -> tuple[str, ...]:
        """The weights of a version."""
        self._travel(plan_version(version, self._last_applied(), self._engine(), self.checkpoints))
        assert self.weights is not None
        return self.weights

    def _travel(self, route: Route) -> None:
        if isinstance(route.start, LoadModel):
            self.weights, self.trained_here = (), False
        elif isinstance(route.start, LoadCheckpoint):
            self.weights, self.trained_here = self.checkpoints[route.start.version], False
        for step in route.replay:
            self._apply(step)

    def _apply(self, step: int) -> None:
        assert self.weights is not None
        assert len(self.weights) == step, "a batch is applied to exactly the version before it"
        self.weights, self.trained_here = (*self.weights, f"batch-{step}"), True
        self.trainings += 1

    def _die_if(self, crash: str | None, here: str) -> None:
        if crash == here:
            self.weights, self.trained_here = None, False
            raise Died

    def _ledgered(self, step: int) -> Ledgered:
        return Ledgered(f"batch-{step}", self.applied.get(step), self._last_applied())

    def _last_applied(self) -> int | None:
        return max(self.applied, default=None)

    def _engine(self) -> EngineAt | None:
        if self.weights is None:
            return None
        return EngineAt(len(self.weights), self.weights[-1] if self.trained_here else None)


@given(
    save_period=st.integers(1, 5),
    crashes=st.lists(st.lists(st.sampled_from(CRASHES), max_size=3), min_size=1, max_size=8),
    lost=st.sets(st.integers(1, 8)),
)
def test_every_step_is_applied_once_wherever_the_trainer_dies(
    save_period: int, crashes: list[list[str]], lost: set[int]
) -> None:
    world = World(save_period)
    for step, deaths in enumerate(crashes):
        for crash in [*deaths, None]:
            try:
                world.train(step, crash)
            except Died:
                world.checkpoints = {v: saved for v, saved in world.checkpoints.items() if v not in lost}
        expected = tuple(f"batch-{done}" for done in range(step + 1))
        assert world.publish(step + 1) == expected
    assert world.applied == {step: f"batch-{step}" for step in range(len(crashes))}


@given(steps=st.integers(1, 8), wanted=st.data())
def test_an_older_version_is_rebuilt_and_training_goes_on_from_the_newest(steps: int, wanted: st.DataObject) -> None:
    world = World(save_period=3)
    for step in range(steps):
        world.train(step, None)
    version = wanted.draw(st.integers(0, steps))
    assert world.publish(version) == tuple(f"batch-{step}" for step in range(version))
    world.train(steps, None)
    assert world.weights == tuple(f"batch-{step}" for step in range(steps + 1))


def test_a_step_that_was_trained_and_not_recorded_is_not_trained_again() -> None:
    world = World(save_period=10)
    with pytest.raises(Died):
        world.train(0, "ledger away after training")
    world.train(0, None)
    assert world.trainings == 1
    assert world.applied == {0: "batch-0"}


@given(checkpoints=st.sets(st.integers(1, 20)), engine=st.none() | st.integers(0, 20), step=st.integers(0, 20))
def test_no_state_that_is_newer_and_usable_is_passed_over(checkpoints: set[int], engine: int | None, step: int) -> None:
    at = None if engine is None else EngineAt(engine)
    plan = plan_step(step, "b", Ledgered("b", None, step - 1 if step else None), at, checkpoints)
    assert isinstance(plan, Route)
    usable = [0, *(version for version in checkpoints if version <= step)]
    if engine is not None and engine <= step:
        usable.append(engine)
    assert len(plan.replay) == step - max(usable)
    assert plan.replay == tuple(range(max(usable), step))
    if isinstance(plan.start, KeepEngine):
        assert engine == max(usable)


def test_another_batch_for_an_applied_step_is_refused() -> None:
    with pytest.raises(StepRefused, match="Step 3 was applied with batch aaa"):
        plan_step(3, "bbb", Ledgered("aaa", "aaa", 3), EngineAt(4, "aaa"), ())


def test_a_batch_that_is_not_the_stored_one_is_refused() -> None:
    with pytest.raises(StepRefused, match="has the stored batch aaa"):
        plan_step(0, "bbb", Ledgered("aaa", None, None), None, ())
    with pytest.raises(StepRefused, match="has the stored batch none"):
        plan_step(0, "bbb", Ledgered(None, None, None), None, ())


@pytest.mark.parametrize("last_applied", [None, 0, 3])
def test_a_step_before_its_turn_is_refused(last_applied: int | None) -> None:
    with pytest.raises(StepRefused, match="the next step of the run is"):
        plan_step(2, "b", Ledgered("b", None, last_applied), None, ())


def test_a_version_that_was_not_reached_is_refused() -> None:
    with pytest.raises(StepRefused, match="Policy version 3 does not exist yet"):
        plan_version(3, 1, EngineAt(3), ())


def test_an_engine_ahead_with_another_batch_starts_over() -> None:
    plan = plan_step(1, "b", Ledgered("b", None, 0), EngineAt(2, "other"), ())
    assert plan == Route(LoadModel(), (0,))


def test_the_same_engine_is_kept_for_what_it_holds() -> None:
    assert plan_step(2, "b", Ledgered("b", None, 1), EngineAt(2), (2,)) == Route(KeepEngine(), ())
    assert plan_step(1, "b", Ledgered("b", None, 0), EngineAt(2, "b"), ()) == RecordTrained()


def test_a_checkpoint_that_failed_is_made_up_for_at_the_next_step() -> None:
    assert not checkpoint_due(9, (), 10)
    assert checkpoint_due(10, (), 10)
    assert checkpoint_due(11, (), 10)
    assert not checkpoint_due(11, (10,), 10)
    assert checkpoint_due(20, (10,), 10)
