"""The trainer over ranks that a test plays: cancellation, deadlines, what is told and what is known afterwards."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from activities.training import trainer as trainer_module
from activities.training.commands import Command, Outcome, Settings, Train
from activities.training.plan import EngineAt
from activities.training.rank_watch import RankWatch, Signal
from activities.training.ranks import Ranks
from activities.training.trainer import RankFailed, RankRefused, Trainer
from activities.training.watch import StepCancelled
from configs.grpo import GrpoConfig
from configs.training import TrainingConfig

PATIENCE_S = 120.0
MICRO_BATCHES = 3
SETTINGS = Settings(TrainingConfig(), GrpoConfig(), 1.0, Path("model"))


@dataclass
class PlayedRanks:
    """One rank whose steps have three micro-batches; the test lets each of them begin."""

    go_on: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    carried: list[str] = field(default_factory=list[str])
    answers: list[Outcome] = field(default_factory=list[Outcome])
    failed: Outcome | None = None
    signal: Signal = field(default_factory=Signal)

    def carry_out(self, command: Command, signal: Signal) -> list[Outcome]:
        self.carried.append(type(command).__name__)
        self.signal = signal
        if not isinstance(command, Train):
            return [Outcome(0)]
        if self.answers:
            return self.answers
        watch = RankWatch(signal, lambda flag: flag)
        try:
            for micro_batch in range(MICRO_BATCHES):
                watch.reached("gradient", micro_batch, MICRO_BATCHES)
                self.waiting.release()
                assert self.go_on.acquire(timeout=PATIENCE_S)
        except StepCancelled as error:
            return [Outcome(0, error=str(error), cancelled=True, kept=True)]
        return [Outcome(0, {"loss": 0.5})]

    def failed_rank(self) -> Outcome | None:
        return self.failed

    async def in_micro_batch(self) -> None:
        """Return when the step waits in its next micro-batch."""
        assert await asyncio.to_thread(self.waiting.acquire, timeout=PATIENCE_S)


@pytest.fixture
def ranks() -> PlayedRanks:
    return PlayedRanks()


@pytest.fixture
def causes() -> list[str]:
    """Why the trainer gave its process up."""
    return []


@pytest.fixture
async def trainer(ranks: PlayedRanks, causes: list[str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Trainer]:
    """A trainer that holds version 1 of the run."""
    monkeypatch.setattr(trainer_module, "_LOOK_INTERVAL_S", 0.01)
    made = Trainer(cast(Ranks, ranks), causes.append)
    await made.load("run", SETTINGS, 1, Path("checkpoint"), in_s(PATIENCE_S))
    yield made
    ranks.go_on.release(100)  # whatever still runs


def in_s(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def step(
    trainer: Trainer, say: Callable[[str], None] = lambda _: None, seconds: float = PATIENCE_S
) -> asyncio.Task[object]:
    return asyncio.create_task(trainer.train(1, b"batch", "digest", 0, in_s(seconds), say))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_cancelled_step_ends_at_its_next_micro_batch_and_keeps_the_version(
    trainer: Trainer, ranks: PlayedRanks
) -> None:
    training = step(trainer)
    await ranks.in_micro_batch()
    assert trainer.at("run") is None
    training.cancel()
    await until(lambda: ranks.signal.stopped)
    ranks.go_on.release()
    with pytest.raises(asyncio.CancelledError):
        await training
    await trainer.idle()
    assert trainer.at("run") == EngineAt(1)

    ranks.go_on.release(MICRO_BATCHES)
    await step(trainer)
    assert trainer.at("run") == EngineAt(2, "digest")
    assert ranks.carried == ["Load", "Train", "Train"]


async def test_a_step_cancelled_in_its_last_micro_batch_is_trained_and_known(
    trainer: Trainer, ranks: PlayedRanks
) -> None:
    training = step(trainer)
    ranks.go_on.release(MICRO_BATCHES - 1)
    for _ in range(MICRO_BATCHES):
        await ranks.in_micro_batch()
    training.cancel()
    ranks.go_on.release()
    with pytest.raises(asyncio.CancelledError):
        await training
    await trainer.idle()
    assert trainer.at("run") == EngineAt(2, "digest")
    assert trainer.trained is not None
    assert trainer.trained.metrics == {"loss": 0.5}


async def test_a_command_that_waits_its_turn_is_not_begun_when_it_is_cancelled(
    trainer: Trainer, ranks: PlayedRanks
) -> None:
    training = step(trainer)
    await ranks.in_micro_batch()
    saving = asyncio.create_task(trainer.save(Path("folder"), in_s(PATIENCE_S)))
    await asyncio.sleep(0)
    saving.cancel()
    ranks.go_on.release(MICRO_BATCHES)
    with pytest.raises(asyncio.CancelledError):
        await saving
    await training
    await trainer.idle()
    assert ranks.carried == ["Load", "Train"]


async def test_what_was_forgotten_while_a_step_ran_is_not_remembered_by_it(
    trainer: Trainer, ranks: PlayedRanks
) -> None:
    training = step(trainer)
    await ranks.in_micro_batch()
    trainer.forget("run")
    ranks.go_on.release(MICRO_BATCHES)
    await training
    assert trainer.at("run") is None


async def test_heartbeats_say_which_step_is_where(trainer: Trainer, ranks: PlayedRanks) -> None:
    said: list[str] = []
    training = step(trainer, said.append)
    for micro_batch in range(MICRO_BATCHES):
        await ranks.in_micro_batch()
        await until(lambda: f"step 1: gradient, micro-batch {micro_batch + 1} of {MICRO_BATCHES}" in said)  # noqa: B023
        ranks.go_on.release()
    await training


async def test_a_slow_step_is_stopped_before_the_process_is_given_up(
    trainer: Trainer, ranks: PlayedRanks, causes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "_STOP_GRACE_S", PATIENCE_S)
    monkeypatch.setattr(trainer_module, "_STOP_GRACE_SHARE", 1.0)
    training = step(trainer)
    await ranks.in_micro_batch()
    await until(lambda: ranks.signal.stopped)
    ranks.go_on.release()
    with pytest.raises(RankFailed, match=r"training\.step_timeout_s.*keeps version 1") as failed:
        await training
    assert failed.value.bucket == "infra"
    assert (trainer.at("run"), causes) == (EngineAt(1), [])


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that failed alone ends the command at once."""
    monkeypatch.setattr(trainer_module, "_FAILED_RANK_GRACE_S", 0.0)


@pytest.mark.usefixtures("hanging")
async def test_a_rank_that_failed_alone_gives_the_process_up_and_says_where(
    trainer: Trainer, ranks: PlayedRanks, causes: list[str]
) -> None:
    training = step(trainer)
    await ranks.in_micro_batch()
    ranks.failed = Outcome(1, error="out of memory")
    with pytest.raises(RankFailed, match=r"hangs in step 1 \(gradient, micro-batch 1 of 3\).*rank 1: out of memory"):
        await training
    assert len(causes) == 1
    with pytest.raises(RankFailed, match="out of memory"):
        await trainer.load("run", SETTINGS, 0, None, in_s(PATIENCE_S))


async def test_ranks_that_refuse_alike_are_told_once_and_keep_the_engine(trainer: Trainer, ranks: PlayedRanks) -> None:
    ranks.answers = [Outcome(rank, error="NonFiniteStep: rollout 3", refused=True, kept=True) for rank in range(2)]
    with pytest.raises(RankRefused, match=r"Train failed on 2 of 2 ranks: ranks 0, 1: NonFiniteStep: rollout 3$"):
        await step(trainer)
    assert trainer.at("run") == EngineAt(1)


async def test_ranks_that_do_not_all_keep_their_engine_have_none(trainer: Trainer, ranks: PlayedRanks) -> None:
    ranks.answers = [
        Outcome(0, error="NonFiniteStep: rollout 3", refused=True, kept=True),
        Outcome(1, error="MemoryError"),
    ]
    with pytest.raises(RankFailed, match="rank 0: NonFiniteStep: rollout 3; rank 1: MemoryError"):
        await step(trainer)
    assert trainer.at("run") is None


async def test_a_rank_that_does_not_answer_gives_the_process_up(
    trainer: Trainer, ranks: PlayedRanks, causes: list[str]
) -> None:
    ranks.answers = [Outcome(0, {"loss": 0.5}), Outcome(1, error="no answer", stuck=True)]
    with pytest.raises(RankFailed, match="rank 1: no answer"):
        await step(trainer)
    assert trainer.at("run") is None
    assert len(causes) == 1


async def test_a_busy_trainer_does_not_keep_its_process_from_ending(
    trainer: Trainer, ranks: PlayedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "_CANCEL_WAIT_S", 0.05)
    training = step(trainer)
    await ranks.in_micro_batch()
    await trainer.stop(timeout_s=0.05)
    assert ranks.carried == ["Load", "Train"]
    ranks.go_on.release(MICRO_BATCHES)
    await training
