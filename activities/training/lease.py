"""A trainer's hold on a run while an activity lasts: taken at its start, renewed beside it, given back at its end.

The lease is as long as a trainer may be silent, so Temporal and the ledger take it for dead at about the same time. It
ends here by this process's own clock, counted from before the ledger was asked, so never later than there. Work under
a lease that ended is cancelled, and what it still tries to write is refused by the ledger.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from activities.errors import BoundaryError
from storage.errors import LedgerUnavailable, StorageError, TrainerFenced, TrainerLeaseHeld
from storage.trainer_leases import TrainerLease, TrainerLeases

_RENEWALS_PER_LEASE = 4
_MARGIN_S = 0.2
_RELEASE_TIMEOUT_S = 3.0

logger = logging.getLogger(__name__)


class TrainerBusy(BoundaryError):
    """Another trainer holds the run and lives."""

    boundary = "trainer"
    bucket = "infra"


class TrainerReplaced(BoundaryError):
    """This trainer lost the run while it worked on it; what it did since is nobody's."""

    boundary = "trainer"
    bucket = "infra"


def new_holder() -> str:
    """A name for this process that no other has: host, process id, a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@asynccontextmanager
async def holding(
    leases: TrainerLeases, run_id: str, holder: str, seconds: float, say: Callable[[str], None]
) -> AsyncIterator[TrainerLease]:
    """Hold the run until the block ends. Raises TrainerBusy, and TrainerReplaced when the lease is lost."""
    asked, lease = await _taken(leases, run_id, holder, seconds, say)
    held = asyncio.timeout_at(asked + seconds)
    renewing = asyncio.create_task(_renew(leases, lease, seconds, held))
    try:
        async with held:
            yield lease
    except TrainerFenced as error:
        raise TrainerReplaced(str(error)) from error
    except TimeoutError as error:
        if not held.expired():
            raise
        raise TrainerReplaced(
            f"The trainer {holder} lost run {run_id!r} (token {lease.token}): it was replaced, or could not renew its "
            f"lease of {seconds:g} s. Its work is given up; the next attempt starts from what is recorded."
        ) from error
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        await _give_back(leases, lease)


async def _taken(
    leases: TrainerLeases, run_id: str, holder: str, seconds: float, say: Callable[[str], None]
) -> tuple[float, TrainerLease]:
    """The lease, and when it was asked for. A holder that may be dead is waited for once, for as long as it holds."""
    loop = asyncio.get_running_loop()
    try:
        asked = loop.time()
        return asked, await leases.acquire(run_id, holder, seconds)
    except TrainerLeaseHeld as held:
        wait_s = min(held.remaining_s, seconds) + _MARGIN_S
        logger.warning("%s This trainer waits for %.0f s.", held, wait_s)
        say(f"waits for the trainer {held.holder}, which holds the run for {wait_s:.0f} s more")
        await asyncio.sleep(wait_s)
    try:
        asked = loop.time()
        return asked, await leases.acquire(run_id, holder, seconds)
    except TrainerLeaseHeld as held:
        raise TrainerBusy(str(held)) from held


async def _renew(leases: TrainerLeases, lease: TrainerLease, seconds: float, held: asyncio.Timeout) -> None:
    """Push the end of `held` ahead; end it at once when the lease is another's."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(seconds / _RENEWALS_PER_LEASE)
        asked = loop.time()
        try:
            await leases.renew(lease, seconds)
            ends = asked + seconds
        except TrainerFenced as error:
            logger.error("%s", error)
            ends = asked
        except LedgerUnavailable as error:
            logger.warning("the lease of run %s was not renewed: %s", lease.run_id, error)
            continue
        if held.expired():
            return
        held.reschedule(ends)


async def _give_back(leases: TrainerLeases, lease: TrainerLease) -> None:
    """Else the next trainer waits until the lease ends."""
    try:
        async with asyncio.timeout(_RELEASE_TIMEOUT_S):
            await leases.release(lease)
    except (TimeoutError, StorageError) as error:
        logger.warning("the lease of run %s was not given back: %s", lease.run_id, error)
