"""Wherever a trainer dies or is cancelled, every step is applied once and the weights are those of a quiet run."""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.training.checkpoint_manifest import MANIFEST
from activities.training.megatron import engine as engine_module
from activities.training.megatron.hf_writer import FolderWriter
from activities.training.plan import EngineAt
from activities.training.rank_watch import RankWatch, Signal
from storage.blobs import BlobStore
from storage.steps import Steps
from tests.databases import new_database
from tests.training.samples import make_batch
from tests.training.trainer_site import Site, new_site

pytestmark = pytest.mark.integration

STEPS = 3
PATIENCE_S = 60.0


class Died(BaseException):
    """The process ended here: nothing catches it, nothing is tidied up."""


@dataclass
class Quiet:
    """A site, and the digests of the weights of a run that nothing disturbed, by version."""

    site: Site
    digests: dict[int, str] = field(default_factory=dict[int, str])


@pytest.fixture(scope="module")
async def quiet(postgres_dsn: str, template_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Quiet]:
    async with (
        new_database(postgres_dsn, template_dsn) as dsn,
        new_site(dsn, tmp_path_factory.mktemp("once")) as site,
    ):
        made = Quiet(site)
        await site.start_run("quiet")
        for step in range(STEPS):
            await site.train(step)
            made.digests[step + 1] = (await site.publish(step + 1)).digest
        yield made


@pytest.fixture
async def site(quiet: Quiet) -> Site:
    """A fresh run, whose step 0 is applied; a checkpoint is due after step 1."""
    quiet.site.restart_trainer()
    quiet.site.said.clear()
    await quiet.site.start_run(f"run-{uuid.uuid4().hex}")
    await quiet.site.train(0)
    return quiet.site


async def finish(site: Site, quiet: Quiet, first: int) -> None:
    """Go on to the end: each step is recorded once, each version has the bits of the quiet run."""
    for step in range(first, STEPS):
        stored = await site.ledger.batches.get(site.run_id, step)
        digest = stored.digest if stored else await site.store(make_batch(step))
        await site.ask_step(step, digest)
        assert (await site.publish(step + 1)).digest == quiet.digests[step + 1]
    assert await site.ledger.steps.last_applied(site.run_id) == STEPS - 1


def before(owner: type[Any], name: str, act: Callable[[], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Act as the method is called."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)

        def patched(*args: Any, **options: Any) -> Any:
            act()
            return real(*args, **options)

        monkeypatch.setattr(owner, name, patched)

    return patch


def die() -> None:
    raise Died


def after_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Steps.apply

    async def apply(*args: Any, **options: Any) -> Any:
        await real(*args, **options)
        raise Died

    monkeypatch.setattr(Steps, "apply", apply)


def in_micro_batch(act: Callable[[], None], phase: str, number: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Act before a micro-batch of a pass."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = RankWatch.reached

        def reached(self: RankWatch, at_phase: str, micro_batch: int, micro_batches: int) -> None:
            if (at_phase, micro_batch) == (phase, number):
                act()
            real(self, at_phase, micro_batch, micro_batches)

        monkeypatch.setattr(RankWatch, "reached", reached)

    return patch


def after_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine_module.Engine.train

    def train(*args: Any) -> Any:
        real(*args)
        raise Died

    monkeypatch.setattr(engine_module.Engine, "train", train)


def half_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is there, its manifest is not."""
    real = engine_module.save_checkpoint

    def save(folder: Any, *args: Any) -> None:
        real(folder, *args)
        (folder / MANIFEST).unlink()
        raise Died

    monkeypatch.setattr(engine_module, "save_checkpoint", save)


DEATHS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the batch is loaded": before(BlobStore, "get", die),
    "in a micro-batch": in_micro_batch(die, "gradient", 2),
    "after the optimizer step": after_optimizer,
    "before the step is recorded": before(Steps, "apply", die),
    "after the step is recorded": after_recording,
    "while a checkpoint is saved": half_a_checkpoint,
}


@pytest.mark.parametrize("moment", DEATHS)
async def test_a_trainer_that_dies_goes_on_with_the_same_bits(
    site: Site, quiet: Quiet, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    digest = await site.store(make_batch(1))
    with monkeypatch.context() as patched:
        DEATHS[moment](patched)
        with pytest.raises(Died):
            await site.ask_step(1, digest)
    site.restart_trainer()
    await finish(site, quiet, first=1)


async def test_a_step_that_fails_half_way_leaves_no_engine_and_the_next_attempt_starts_from_what_is_stored(
    site: Site, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = await site.store(make_batch(1))

    def fail() -> None:
        raise MemoryError("no memory for the micro-batch")

    with monkeypatch.context() as patched:
        in_micro_batch(fail, "gradient", 1)(patched)
        with pytest.raises(ApplicationError, match="rank 0: MemoryError: no memory") as failed:
            await site.ask_step(1, digest)
    assert not failed.value.non_retryable
    assert site.trainer.at(site.run_id) is None
    assert (await site.ask_step(1, digest)).replayed_steps == 1
    await finish(site, quiet, first=2)


async def test_a_trainer_that_dies_while_it_exports_exports_again(
    site: Site, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        before(FolderWriter, "finish", die)(patched)
        with pytest.raises(Died):
            await site.publish(1)
    assert await site.ledger.weights.get(site.run_id, 1) is None
    site.restart_trainer()
    assert (await site.publish(1)).digest == quiet.digests[1]


async def test_a_trainer_that_dies_in_its_catch_up_catches_up_again(
    site: Site, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = await site.store(make_batch(1))
    site.restart_trainer()
    with monkeypatch.context() as patched:
        in_micro_batch(die, "gradient", 1)(patched)
        with pytest.raises(Died):
            await site.ask_step(1, digest)
    assert any(text.startswith("applied again, 0 to 0: step 0") for text in site.said)
    site.restart_trainer()
    assert (await site.ask_step(1, digest)).replayed_steps == 1
    await finish(site, quiet, first=2)


async def cancel_at(site: Site, monkeypatch: pytest.MonkeyPatch, number: int, step: int, digest: str) -> None:
    """Ask for a step and cancel it as it comes to a micro-batch, where it waits until the trainer knows."""
    loop, reached, stopped = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def arrive() -> None:
        loop.call_soon_threadsafe(reached.set)
        assert stopped.wait(PATIENCE_S)

    def stop(signal: Signal, real: Callable[[Signal], None] = Signal.stop) -> None:
        real(signal)
        stopped.set()

    with monkeypatch.context() as patched:
        in_micro_batch(arrive, "gradient", number)(patched)
        patched.setattr(Signal, "stop", stop)
        working = asyncio.create_task(site.ask_step(step, digest))
        async with asyncio.timeout(PATIENCE_S):
            await reached.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        await site.trainer.idle()


@pytest.mark.parametrize("number", [0, 2])
async def test_a_cancelled_step_ends_at_the_micro_batch_and_the_same_engine_goes_on(
    site: Site, quiet: Quiet, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    digest = await site.store(make_batch(1))
    await cancel_at(site, monkeypatch, number, 1, digest)
    at = site.trainer.at(site.run_id)
    assert at is not None
    assert at.version == 1
    assert await site.ledger.steps.get(site.run_id, 1) is None
    held = await site.ledger.trainer_leases.last(site.run_id)
    assert held is not None
    assert held.released_at is not None
    assert (await site.ask_step(1, digest)).replayed_steps == 0
    await finish(site, quiet, first=2)


async def test_a_cancelled_catch_up_ends_at_the_micro_batch(
    site: Site, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = await site.store(make_batch(1))
    site.restart_trainer()
    await cancel_at(site, monkeypatch, 1, 1, digest)
    assert site.trainer.at(site.run_id) == EngineAt(0)
    assert (await site.ask_step(1, digest)).replayed_steps == 1
    await finish(site, quiet, first=2)


async def test_a_refused_step_names_its_rows_and_leaves_engine_and_weights_as_they_were(
    site: Site, quiet: Quiet
) -> None:
    batch = make_batch(1)
    bad = replace(batch.rows[2], advantage=1e39)  # finite, but not in the precision of the loss
    digest = await site.store(replace(batch, rows=(*batch.rows[:2], bad, *batch.rows[3:])))

    with pytest.raises(ApplicationError, match=f"NonFiniteStep: .*{bad.rollout_id}") as refused:
        await site.ask_step(1, digest)

    assert refused.value.non_retryable
    at = site.trainer.at(site.run_id)
    assert at is not None
    assert at.version == 1
    assert (await site.publish(1)).digest == quiet.digests[1]
