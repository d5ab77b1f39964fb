"""Two trainers of one run: the second waits for the first, replaces a silent one, and is not harmed when it wakes."""

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from temporalio.exceptions import ApplicationError

from activities.training.lease import TrainerBusy, TrainerReplaced, holding, new_holder
from storage.errors import LedgerUnavailable
from storage.trainer_leases import TrainerLease, TrainerLeases
from tests.training.first_trainer import DSN
from tests.training.samples import make_batch
from tests.training.trainer_site import Site, new_site

pytestmark = pytest.mark.integration

PATIENCE_S = 120.0
SHORT_S = 0.4
LONG_S = 60.0


@pytest.fixture
async def site(database_dsn: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with new_site(database_dsn, tmp_path) as made:
        await made.start_run("run")
        yield made


def silent(_: str) -> None:
    """Nobody listens."""


def test_no_two_processes_have_one_name() -> None:
    assert new_holder() != new_holder()
    assert f":{os.getpid()}:" in new_holder()


async def test_a_trainer_that_finds_the_run_held_waits_once_and_names_the_holder(site: Site) -> None:
    leases, said = site.ledger.trainer_leases, list[str]()
    async with holding(leases, "run", "first", SHORT_S, silent):
        with pytest.raises(TrainerBusy, match="is held by the trainer first") as busy:
            async with holding(leases, "run", "second", SHORT_S, said.append):
                raise AssertionError("two trainers hold the run")
    assert busy.value.bucket == "infra"
    assert len(said) == 1
    assert said[0].startswith("waits for the trainer first")
    async with holding(leases, "run", "second", SHORT_S, silent) as lease:
        assert lease.holder == "second"


async def test_a_trainer_takes_over_from_one_that_died_without_a_word(site: Site) -> None:
    leases = site.ledger.trainer_leases
    dead = await leases.acquire("run", "dead", SHORT_S)
    async with holding(leases, "run", "second", SHORT_S, silent) as lease:
        assert lease.token == dead.token + 1


async def test_a_replaced_trainer_ends_its_work_as_it_renews(site: Site, database_dsn: str) -> None:
    leases = site.ledger.trainer_leases

    async def work() -> None:
        async with holding(leases, "run", "first", SHORT_S, silent):
            onlooker = await asyncpg.connect(database_dsn)
            await onlooker.execute("UPDATE trainer_leases SET token = token + 1, holder = 'second'")
            await onlooker.close()
            await asyncio.wait_for(asyncio.Event().wait(), PATIENCE_S)

    with pytest.raises(TrainerReplaced, match="lost run 'run'"):
        await work()
    last = await leases.last("run")
    assert last is not None
    assert (last.holder, last.released_at) == ("second", None)


async def test_a_trainer_that_cannot_renew_for_a_lease_ends_its_work(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    async def renew(_: TrainerLeases, lease: TrainerLease, seconds: float) -> TrainerLease:
        tries.append(lease.token)
        raise LedgerUnavailable("server", "no answer")

    monkeypatch.setattr(TrainerLeases, "renew", renew)
    with pytest.raises(TrainerReplaced, match="could not renew its lease"):
        async with holding(site.ledger.trainer_leases, "run", "first", SHORT_S, silent):
            await asyncio.wait_for(asyncio.Event().wait(), PATIENCE_S)
    assert len(tries) > 1


async def test_a_lease_is_renewed_for_as_long_as_the_work_takes(site: Site) -> None:
    leases = site.ledger.trainer_leases
    async with holding(leases, "run", "first", SHORT_S, silent) as lease, asyncio.timeout(PATIENCE_S):
        while (held := await leases.last("run")) is None or held.expires_at <= lease.expires_at:
            await asyncio.sleep(0.02)
        assert held.token == lease.token


async def test_what_an_engine_holds_counts_for_nothing_after_another_trainer_had_the_run(site: Site) -> None:
    await site.train(0)
    assert site.trainer.at("run") is not None
    leases = site.ledger.trainer_leases
    await leases.release(await leases.acquire("run", "another", LONG_S))
    assert (await site.train(1)).replayed_steps == 1


@asynccontextmanager
async def first_trainer(site: Site, dsn: str, folder: Path, moment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The first trainer, arrived at the moment."""
    with (folder / "first.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.training.first_trainer", str(folder), site.run_id, moment),
            env={**os.environ, DSN: dsn, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        await until((folder / "arrived").exists, folder, process)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until(true: Callable[[], bool], folder: Path, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            assert process.returncode is None, (folder / "first.log").read_text()[-3000:]
            await asyncio.sleep(0.05)


def files(site: Site, token: int) -> dict[str, str]:
    """Every file that was written under later leases, with its digest."""
    found = (path for path in site.folder.rglob("*") if path.is_file())
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
        if f"-lease-{token}/" not in str(path) and not path.relative_to(site.folder).parts[1].startswith(".")
    }


async def ledgered(site: Site) -> list[object]:
    """All that trainers write."""
    weights, steps = site.ledger.weights, site.ledger.steps
    return [
        *[await steps.get(site.run_id, step) for step in range(3)],
        *[await weights.get(site.run_id, version) for version in range(3)],
        await weights.checkpoints(site.run_id),
        await site.ledger.trainer_leases.last(site.run_id),
    ]


@pytest.mark.parametrize("moment", ["gradient", "export"])
async def test_a_trainer_that_wakes_late_changes_neither_ledger_nor_files_of_its_successor(
    site: Site, database_dsn: str, tmp_path: Path, moment: str
) -> None:
    await site.start_run("long", heartbeat_timeout_s=3.0)
    await site.train(0)
    digest = await site.store(make_batch(1))
    async with first_trainer(site, database_dsn, tmp_path, moment) as first:
        held = await site.ledger.trainer_leases.last(site.run_id)
        assert held is not None
        with pytest.raises(ApplicationError, match=f"TrainerBusy.* is held by the trainer {held.holder}") as busy:
            await site.ask_step(1, digest)
        assert not busy.value.non_retryable

        first.send_signal(signal.SIGSTOP)
        applied = await site.ask_step(1, digest)  # waits until the first one's lease ends
        assert applied.policy_version == 2
        published = [await site.publish(version) for version in (1, 2)]
        before = await ledgered(site), files(site, held.token)

        (tmp_path / "go").touch()
        first.send_signal(signal.SIGCONT)
        await until((tmp_path / "outcome.json").exists, tmp_path, first)
    assert "TrainerReplaced" in json.loads((tmp_path / "outcome.json").read_text())
    assert (await ledgered(site), files(site, held.token)) == before
    late = [path.name for path in site.folder.rglob(f"*-lease-{held.token}")]
    assert late == ([f"policy-1-lease-{held.token}"] if moment == "export" else [])
    assert [await site.publish(version) for version in (1, 2)] == published
