"""Names what is stuck: attempts that have been silent for failure.stall_timeout_s, once each, at WARNING.

It looks at the live runs of one task queue every quarter of that time. It decides nothing: deadlines and heartbeats end
what is stuck. A ledger that does not answer is waited for.
"""

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from datetime import datetime

from configs.recipe import Recipe
from storage.errors import LedgerUnavailable
from storage.ledger import Ledger
from storage.records import Stall
from storage.runs import LIVE

SHORTEST_PAUSE_S = 5.0
IDLE_PAUSE_S = 30.0
_LOOKS_PER_TIMEOUT = 4

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks at the runs of a task queue until it is cancelled."""

    def __init__(self, ledger: Ledger, task_queue: str) -> None:
        self._ledger = ledger
        self._task_queue = task_queue
        self._told: set[tuple[str, int, datetime]] = set()

    def start(self, closing: AsyncExitStack) -> None:
        """Watch until `closing` is closed."""
        task = asyncio.create_task(self.watch(), name="watchdog")

        async def end() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        closing.push_async_callback(end)

    async def watch(self) -> None:
        """Look again and again."""
        pause_s = SHORTEST_PAUSE_S
        while True:
            try:
                pause_s = await self.look()
            except LedgerUnavailable as error:
                logger.info("the watchdog waits for the ledger: %s", error.cause)
            except Exception:  # a watchdog that ends would be worse than one that missed something
                logger.exception("the watchdog could not look")
            await asyncio.sleep(pause_s)

    async def look(self) -> float:
        """Look once and tell what is new; the seconds until the next look."""
        pauses = [IDLE_PAUSE_S]
        stalls: list[Stall] = []
        for run in await self._ledger.runs.list():
            if run.state not in LIVE or run.task_queue != self._task_queue:
                continue
            timeout_s = Recipe.model_validate(run.recipe).failure.stall_timeout_s
            pauses.append(max(SHORTEST_PAUSE_S, timeout_s / _LOOKS_PER_TIMEOUT))
            stalls += await self._ledger.stalls.of(run.run_id, timeout_s)
        now_stuck = {(stall.rollout_id, stall.attempt, stall.since) for stall in stalls}
        for stall in stalls:
            if (stall.rollout_id, stall.attempt, stall.since) not in self._told:
                _tell(stall)
        self._told = now_stuck
        return min(pauses)


def _tell(stall: Stall) -> None:
    logger.warning(
        "stuck: group %s, rollout %s, attempt %d on %s, %s, silent since %s",
        stall.group_id,
        stall.rollout_id,
        stall.attempt,
        stall.worker,
        "no call in flight" if stall.call is None else f"call {stall.call} in flight",
        f"{stall.since:%Y-%m-%d %H:%M:%S %Z}",
    )
