"""Two trainers of one run: the second waits for the first, replaces a silent one, and is not harmed when it wakes."""

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import asyncpg
import pytest
from temporalio.exceptions import ApplicationError

from activities.training import lease as lease_module
from activities.training.lease import TrainerBusy, TrainerReplaced, holding, new_holder
from storage.errors import LedgerUnavailable
from storage.trainer_leases import TrainerLease, TrainerLeases
from tests.training.first_trainer import SLEEP_S, Errand
from tests.training.samples import make_batch
from tests.training.trainer_site import Site, new_site

pytestmark = pytest.mark.integration

PATIENCE_S = 120.0
SHORT_S = 0.4
LONG_S = 600.0  # much longer than a test takes


@pytest.fixture
async def site(migrated_dsn: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with new_site(migrated_dsn, tmp_path) as made:
        await made.start_run("run")
        yield made


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long lease is renewed all the time, so the event loop may be late."""
    monkeypatch.setattr(lease_module, "_RENEWALS_PER_LEASE", LONG_S / 0.02)


def silent(_: str) -> None:
    """Nobody listens."""


def test_no_two_processes_have_one_name() -> None:
    assert new_holder() != new_holder()
    assert f":{os.getpid()}:" in new_holder()


async def test_a_trainer_that_finds_the_run_held_waits_once_and_names_the_holder(site: Site) -> None:
    leases, said = site.ledger.trainer_leases, list[str]()
    async with holding(leases, "run", "first", LONG_S, silent):
        with pytest.raises(TrainerBusy, match="is held by the trainer first") as busy:
            async with holding(leases, "run", "second", SHORT_S, said.append):
                raise AssertionError("two trainers hold the run")
    assert busy.value.bucket == "infra"
    assert len(said) == 1
    assert said[0].startswith("waits for the trainer first")
    async with holding(leases, "run", "second", LONG_S, silent) as lease:
        assert lease.holder == "second"


async def test_a_trainer_takes_over_from_one_that_died_without_a_word(site: Site) -> None:
    leases = site.ledger.trainer_leases
    dead = await leases.acquire("run", "dead", SHORT_S)
    async with holding(leases, "run", "second", LONG_S, silent) as lease:
        assert lease.token == dead.token + 1


@pytest.mark.usefixtures("often")
async def test_a_replaced_trainer_ends_its_work_as_it_renews(site: Site, migrated_dsn: str) -> None:
    leases = site.ledger.trainer_leases

    async def work() -> None:
        async with holding(leases, "run", "first", LONG_S, silent):
            onlooker = await asyncpg.connect(migrated_dsn)
            await onlooker.execute("UPDATE trainer_leases SET token = token + 1, holder = 'second'")
            await onlooker.close()
            await asyncio.wait_for(asyncio.Event().wait(), PATIENCE_S)

    with pytest.raises(TrainerReplaced, match="lost run 'run'"):
        await work()
    last = await leases.last("run")
    assert last is not None
    assert (last.holder, last.released_at) == ("second", None)


@pytest.fixture
def unrenewed(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    """No lease can be renewed; the tokens of those that should have been."""
    tries = asyncio.Queue[int]()

    async def renew(_: TrainerLeases, lease: TrainerLease, seconds: float) -> TrainerLease:
        tries.put_nowait(lease.token)
        raise LedgerUnavailable("server", "no answer")

    monkeypatch.setattr(TrainerLeases, "renew", renew)
    return tries


@pytest.mark.usefixtures("often")
async def test_a_trainer_that_cannot_renew_for_a_while_tries_on_and_works(
    site: Site, unrenewed: asyncio.Queue[int]
) -> None:
    async with (
        holding(site.ledger.trainer_leases, "run", "first", LONG_S, silent) as lease,
        asyncio.timeout(PATIENCE_S),
    ):
        assert [await unrenewed.get() for _ in range(3)] == [lease.token] * 3


@pytest.mark.usefixtures("unrenewed")
async def test_a_trainer_that_cannot_renew_for_a_lease_ends_its_work(site: Site) -> None:
    with pytest.raises(TrainerReplaced, match="could not renew its lease"):
        async with holding(site.ledger.trainer_leases, "run", "first", SHORT_S, silent):
            await asyncio.wait_for(asyncio.Event().wait(), PATIENCE_S)


@pytest.mark.usefixtures("often")
async def test_a_lease_is_renewed_for_as_long_as_the_work_takes(site: Site) -> None:
    leases = site.ledger.trainer_leases
    async with holding(leases, "run", "first", LONG_S, silent) as lease, asyncio.timeout(PATIENCE_S):
        while (held := await leases.last("run")) is None or held.expires_at <= lease.expires_at:
            await asyncio.sleep(0.02)
        assert held.token == lease.token


async def test_what_an_engine_holds_counts_for_nothing_after_another_trainer_had_the_run(site: Site) -> None:
    await site.train(0)
    assert site.trainer.at("run") is not None
    leases = site.ledger.trainer_leases
    await leases.release(await leases.acquire("run", "another", LONG_S))
    assert (await site.train(1)).replayed_steps == 1


@dataclass
class FirstTrainer:
    """A trainer in a process of its own."""

    process: asyncio.subprocess.Process
    log: Path

    @asynccontextmanager
    async def at(self, errand: Errand) -> AsyncIterator[None]:
        """It has come to the moment, and does not go on while the block lasts unless it is told to."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(errand.model_dump_json().encode() + b"\n")
        try:
            await self.until((errand.folder / "arrived").exists)
            yield
        finally:
            self.wake(errand)

    def wake(self, errand: Errand) -> None:
        """Let it go on."""
        (errand.folder / "go").touch()
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for something that it does."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                assert self.process.returncode is None, self.log.read_text()[-3000:]
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module", autouse=True)
async def first(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FirstTrainer]:
    """It begins to import what it needs while other tests run."""
    file = tmp_path_factory.mktemp("first") / "first.log"
    with file.open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.training.first_trainer"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    yield FirstTrainer(process, file)
    if process.returncode is None:
        process.kill()
    await process.wait()


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


async def end_leases(dsn: str) -> None:
    """As if their time had passed."""
    ledger = await asyncpg.connect(dsn)
    await ledger.execute("UPDATE trainer_leases SET expires_at = clock_timestamp()")
    await ledger.close()


@pytest.mark.parametrize("moment", ["gradient", "export"])
async def test_a_trainer_that_wakes_late_changes_neither_ledger_nor_files_of_its_successor(
    site: Site,
    first: FirstTrainer,
    migrated_dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: Literal["gradient", "export"],
) -> None:
    assert LONG_S < SLEEP_S
    await site.start_run("long", heartbeat_timeout_s=LONG_S)
    await site.train(0)
    digest = await site.store(make_batch(1))
    errand = Errand(dsn=migrated_dsn, folder=tmp_path, run_id=site.run_id, moment=moment)
    async with first.at(errand):
        held = await site.ledger.trainer_leases.last(site.run_id)
        assert held is not None
        with monkeypatch.context() as patched:
            patched.setattr(lease_module, "_MARGIN_S", -LONG_S)  # the holder lives: it is of no use to wait for it
            with pytest.raises(ApplicationError, match=f"TrainerBusy.* is held by the trainer {held.holder}") as busy:
                await site.ask_step(1, digest)
        assert not busy.value.non_retryable

        first.process.send_signal(signal.SIGSTOP)
        await end_leases(migrated_dsn)
        applied = await site.ask_step(1, digest)
        assert applied.policy_version == 2
        published = [await site.publish(version) for version in (1, 2)]
        before = await ledgered(site), files(site, held.token)

        first.wake(errand)
        await first.until((tmp_path / "outcome").exists)
    assert "TrainerReplaced" in (tmp_path / "outcome").read_text()
    assert (await ledgered(site), files(site, held.token)) == before
    late = [path.name for path in site.folder.rglob(f"*-lease-{held.token}")]
    assert late == ([f"policy-1-lease-{held.token}"] if moment == "export" else [])
    assert [await site.publish(version) for version in (1, 2)] == published
