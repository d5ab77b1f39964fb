"""The life of a worker process, the same for all kinds: start, ready, serve, stop.

It starts only when Temporal and PostgreSQL answer (two minutes of patience), says so in `<state dir>/ready/<name>`,
serves until SIGTERM or SIGINT, gives running activities a grace period, cancels them, and leaves without interpreter
finalisation (the Temporal SDK's threads can crash it). The state directory is the folder of the recipe file.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from temporalio.client import Client
from temporalio.worker import Worker

from configs.errors import ConfigError
from configs.load import load_recipe
from configs.recipe import Recipe
from storage.database import Database
from storage.errors import LedgerUnavailable, SchemaOutdated
from storage.migrate import check_schema
from workers.activity_deadlines import ActivityDeadlines
from workers.temporal_client import TemporalUnavailable, connect
from workflows.messages import Boundary

PATIENCE_S = 120.0
GRACE_S = 30.0
CANCEL_TIMEOUT_S = 8.0  # for what a cancelled activity still writes
RETRY_PAUSE_S = 1.0
HEARTBEAT_THROTTLE_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resources:
    """What a worker is built from. Clients that must be closed go into `closing`."""

    client: Client
    recipe: Recipe
    database: Database
    closing: AsyncExitStack


def new_worker(
    client: Client, task_queue: str, *, boundary: Boundary = "ledger", grace_s: float = GRACE_S, **options: Any
) -> Worker:
    """A Temporal worker with the project's heartbeat throttle, whose activities end before Temporal gives them up.

    The SDK's own throttle (60 s) would make one lost heartbeat a timeout.
    """
    return Worker(
        client,
        task_queue=task_queue,
        graceful_shutdown_timeout=timedelta(seconds=grace_s),
        max_heartbeat_throttle_interval=timedelta(seconds=HEARTBEAT_THROTTLE_S),
        interceptors=[ActivityDeadlines(boundary)],
        **options,
    )


def run_worker_process(name: str, build: Callable[[Resources], Awaitable[Sequence[Worker]]]) -> NoReturn:
    """Entry point of a worker process: reads `--recipe FILE`, serves what `build` returns, exits 0, 1 or 2."""
    recipe, state_dir = start_process(name)
    run_and_exit(serve(name, recipe, state_dir, build))


def start_process(name: str) -> tuple[Recipe, Path]:
    """Command line, logging and recipe; exits with 2 when the recipe is wrong."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--recipe", type=Path, required=True, help="fully resolved recipe (YAML)")
    path: Path = parser.parse_args().recipe.resolve()
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return load_recipe(path), path.parent
    except ConfigError as error:
        logger.error("%s", error)
        leave(2)


def run_and_exit(serving: Coroutine[Any, Any, None]) -> NoReturn:
    """Run to the end, log what went wrong, and leave."""
    code = 1
    try:
        asyncio.run(serving)
        code = 0
    except (TemporalUnavailable, LedgerUnavailable, SchemaOutdated) as error:
        logger.error("%s", error)
    except BaseException:
        logger.exception("the worker stops because of an error")
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit without interpreter finalisation, output flushed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def serve(
    name: str, recipe: Recipe, state_dir: Path, build: Callable[[Resources], Awaitable[Sequence[Worker]]]
) -> None:
    """Serve until a signal, or until a worker fails (then its error is raised)."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ready = state_dir / "ready" / name
    ready.unlink(missing_ok=True)
    async with AsyncExitStack() as closing:
        starting = asyncio.create_task(_start(recipe, build, closing))
        if not await _finished_before(starting, stop):
            return
        workers = starting.result()
        running = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            ready.parent.mkdir(parents=True, exist_ok=True)
            ready.write_text(f"{os.getpid()}\n")
            closing.callback(ready.unlink, missing_ok=True)
            logger.info("%s serves task queues %s", name, ", ".join(worker.task_queue for worker in workers))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        finally:
            await stop_all(name, workers)
        await asyncio.gather(*running)


async def stop_all(name: str, workers: Sequence[Worker]) -> None:
    """Return when no activity runs any more; TimeoutError when one does not even end when it is cancelled."""
    graces = (worker.config().get("graceful_shutdown_timeout", timedelta()) for worker in workers)
    grace_s = max(graces).total_seconds()
    logger.info("%s stops; running activities have %g s to finish", name, grace_s)
    async with asyncio.timeout(grace_s + CANCEL_TIMEOUT_S):
        await asyncio.gather(*(worker.shutdown() for worker in workers), return_exceptions=True)


async def _start(
    recipe: Recipe, build: Callable[[Resources], Awaitable[Sequence[Worker]]], closing: AsyncExitStack
) -> Sequence[Worker]:
    client = await connect(recipe.temporal, PATIENCE_S)
    database = Database(recipe.storage)
    closing.push_async_callback(database.close)
    await wait_for_ledger(database)
    return await build(Resources(client, recipe, database, closing))


async def wait_for_ledger(database: Database) -> None:
    """Return when the ledger answers and its schema is ours; LedgerUnavailable when patience ends."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while True:
        try:
            async with asyncio.timeout_at(deadline + RETRY_PAUSE_S):  # also for a server that accepts and never answers
                await database.ping()
            break
        except TimeoutError as error:
            raise LedgerUnavailable(database.address, f"no answer within {PATIENCE_S:g} s") from error
        except LedgerUnavailable as error:
            if loop.time() + RETRY_PAUSE_S > deadline:
                raise
            logger.warning("waiting for PostgreSQL: %s", error)
            await asyncio.sleep(RETRY_PAUSE_S)
    await check_schema(database)


async def _finished_before(task: asyncio.Task[Any], stop: asyncio.Event) -> bool:
    """Whether the task ended before the stop signal; a task that did not is cancelled."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False
