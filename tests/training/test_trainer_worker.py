"""The trainer's activities with the real engine, ledger and blob store: exactly once, through deaths and refusals."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError

from activities.training.batch import TrainingBatch
from activities.training.job import written
from tests.training.samples import make_batch
from tests.training.trainer_site import Site, new_site

pytestmark = pytest.mark.integration

START_TIMEOUT_S = 120.0


@pytest.fixture
async def site(migrated_dsn: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with new_site(migrated_dsn, tmp_path) as made:
        yield made


async def test_a_trainer_killed_at_any_moment_ends_with_the_same_bits(site: Site) -> None:
    await site.start_run("undisturbed")
    for step in range(5):
        await site.train(step)
    undisturbed = await site.publish(5)

    await site.start_run("disturbed")
    await site.train(0)
    site.restart_trainer()  # no checkpoint yet
    assert (await site.train(1)).replayed_steps == 1
    await site.train(2)
    site.restart_trainer()  # the checkpoint of version 2 is one step behind
    assert (await site.train(3)).replayed_steps == 1
    digest = await site.store(make_batch(4))
    await site.trainer.train(4, make_batch(4).to_bytes(), digest, 0, asyncio.get_running_loop().time() + 60)
    site.restart_trainer()  # between training and recording
    assert (await site.ask_step(4, digest)).replayed_steps == 0  # version 4 has a checkpoint
    site.restart_trainer()  # between recording and publishing
    assert (await site.publish(5)).digest == undisturbed.digest


async def test_an_unreadable_checkpoint_is_passed_over(site: Site) -> None:
    await site.start_run("run")
    for step in range(3):
        await site.train(step)
    published = await site.publish(3)
    for file in (await site.checkpoint(2)).iterdir():
        file.unlink()
    shutil.rmtree(published.path)
    site.restart_trainer()
    assert (await site.publish(3)).digest == published.digest


async def test_asking_for_a_step_again_returns_its_record_and_trains_nothing(site: Site) -> None:
    await site.start_run("run")
    first = await site.train(0)
    again = await site.ask_step(0, first.batch_digest)
    assert again == first
    assert first.metrics["loss"] != 0
    at = site.trainer.at("run")
    assert at is not None
    assert at.version == 1


async def test_another_batch_for_a_step_is_refused_for_good(site: Site) -> None:
    await site.start_run("run")
    await site.train(0)
    with pytest.raises(ApplicationError, match="is refused, because a step is applied once") as refused:
        await site.ask_step(0, hashlib.sha256(b"another").hexdigest())
    assert refused.value.non_retryable


async def test_a_batch_the_engine_refuses_names_the_rank_and_changes_nothing(site: Site) -> None:
    await site.start_run("run")
    await site.train(0)
    before = await site.publish(1)
    empty = await site.store(TrainingBatch("run", 1, ()))
    with pytest.raises(ApplicationError, match="Train failed on 1 of 1 ranks: rank 0: EmptyBatch") as refused:
        await site.ask_step(1, empty)
    assert refused.value.non_retryable
    at = site.trainer.at("run")
    assert at is not None
    assert at.version == 1
    shutil.rmtree(before.path)
    assert (await site.publish(1)).digest == before.digest


async def test_a_step_whose_record_was_not_written_is_recorded_without_training_again(site: Site) -> None:
    await site.start_run("run")
    digest = await site.store(make_batch(0))
    group = await site.ledger.groups.get("run/step-0/group-0")
    assert group.state == "sealed"
    deadline = asyncio.get_running_loop().time() + 60
    settings_step = await site.publish(0)  # loads the run
    assert settings_step.version == 0
    trained = await site.trainer.train(0, make_batch(0).to_bytes(), digest, 0, deadline)
    applied = await site.ask_step(0, digest)
    assert applied.metrics == trained.metrics
    at = site.trainer.at("run")
    assert at is not None
    assert at.version == 1


async def test_two_runs_take_turns_on_one_trainer(site: Site) -> None:
    await site.start_run("first")
    await site.train(0)
    await site.start_run("second")
    await site.train(0)
    second = await site.publish(1)
    site.run_id = "first"
    assert (await site.train(1)).replayed_steps == 1
    site.run_id = "second"
    site.restart_trainer()
    shutil.rmtree(second.path)
    assert (await site.publish(1)).digest == second.digest


async def test_only_the_newest_checkpoints_and_weights_are_kept(site: Site) -> None:
    await site.start_run("run")
    for step in range(5):
        await site.train(step)
        await site.publish(step + 1)
    assert sorted(version for version, _ in written(site.folder / "checkpoints").values()) == [4]
    assert sorted(version for version, _ in written(site.folder / "weights").values()) == [4, 5]
    assert [record.version for record in await site.ledger.weights.checkpoints("run")] == [4]
