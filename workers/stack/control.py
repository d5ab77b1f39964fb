"""Up, down and status of the embedded stack: what commands and tests call. The work is the supervisor's.

`up` returns when everything is ready, or raises and leaves nothing running. Processes that a killed supervisor left
behind are found by pid and start time and stopped by name; what these started is found by the mark it carries.
"""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from configs.recipe import Recipe
from workers.environments.paths import child_environment
from workers.stack.errors import OtherStackIsUp, StackError
from workers.stack.logs import open_log, tail
from workers.stack.processes import kill, marked, resident_bytes, stop_tree
from workers.stack.recipes import StackRecipes
from workers.stack.state import ServiceStatus, StackState

Progress = Callable[[str], None]

UP_TIMEOUT_S = 2400.0  # above what the attempts at the slowest service and at a worker can take
DOWN_TIMEOUT_S = 180.0  # beyond the grace period of rollouts
LEFTOVER_TIMEOUT_S = 30.0
POLL_S = 0.2


async def up(recipe: Recipe, state_dir: Path, on_progress: Progress) -> Recipe:
    """Start the stack unless it is up; the recipe with every address filled in.

    OtherStackIsUp when a stack with another recipe runs; ServiceFailed and others when something does not start.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(state_dir):
        state = _living(state_dir)
        if state is not None:
            return await _join(recipe, state_dir, state, on_progress)
        _stop_leftovers(state_dir, on_progress)
        recipes = StackRecipes.resolve(recipe, state_dir)
        recipes.save(state_dir)
        _path(state_dir).unlink(missing_ok=True)
        supervisor = _spawn(state_dir)
        try:
            await _wait_until_up(state_dir, on_progress, supervisor)
        except BaseException:  # interrupted, too late, or failed: nothing stays behind
            await down(state_dir, on_progress)
            raise
        return recipes.workers


async def _join(recipe: Recipe, state_dir: Path, state: StackState, on_progress: Progress) -> Recipe:
    """A supervisor runs already: fine, if it serves the same recipe."""
    recipes = StackRecipes.load(state_dir)
    if recipes is None or recipes.asked != recipe or state.phase not in ("starting", "up"):
        raise OtherStackIsUp(state_dir)
    if state.phase == "starting":
        await _wait_until_up(state_dir, on_progress, None)
    on_progress("the stack is up already")
    return recipes.workers


async def down(state_dir: Path, on_progress: Progress = lambda _: None) -> None:
    """Stop everything, also what a killed supervisor left behind. Nothing to stop is not an error."""
    state = _living(state_dir)
    if state is not None:
        process = state.supervisor.process()
        if process is not None:
            process.terminate()
        recipes = StackRecipes.load(state_dir)
        timeout_s = DOWN_TIMEOUT_S + (recipes.stack.rollouts.shutdown_grace_s if recipes else 0.0)
        try:
            async with asyncio.timeout(timeout_s):
                await _show_until_gone(state_dir, state, on_progress)
        except TimeoutError:
            on_progress(f"the supervisor did not stop within {timeout_s:g} s and is killed")
            stop_tree(state.supervisor, signal.SIGKILL, LEFTOVER_TIMEOUT_S)
    _stop_leftovers(state_dir, on_progress)


def status(state_dir: Path) -> list[ServiceStatus]:
    """Every service, with its memory; empty when no stack was ever started here."""
    state = StackState.load(_path(state_dir))
    if state is None:
        return []
    supervised = state.supervisor.is_alive()
    return [_seen_now(service, supervised) for service in state.services]


def phase(state_dir: Path) -> str:
    """starting, up or stopping; otherwise down, failed, or unsupervised (the supervisor was killed)."""
    state = StackState.load(_path(state_dir))
    if state is None:
        return "down"
    if state.supervisor.is_alive() or state.phase in ("down", "failed"):
        return state.phase
    return "unsupervised" if _leftovers(state) else "down"


def resolved_recipe(state_dir: Path) -> Recipe | None:
    """The recipe with the addresses of the stack that is up here."""
    if phase(state_dir) not in ("up", "starting"):
        return None
    recipes = StackRecipes.load(state_dir)
    return recipes.workers if recipes else None


def _seen_now(service: ServiceStatus, supervised: bool) -> ServiceStatus:
    alive = service.process is not None and service.process.is_alive()
    changes: dict[str, object] = {}
    if service.process is not None and alive:
        changes["resident_bytes"] = resident_bytes(service.process)
    if not supervised and service.state not in ("failed", "done"):
        changes["state"] = "leftover" if alive else "stopped"
    return service.model_copy(update=changes)


def _living(state_dir: Path) -> StackState | None:
    """The state of a supervisor that runs."""
    state = StackState.load(_path(state_dir))
    return state if state is not None and state.supervisor.is_alive() else None


def _leftovers(state: StackState) -> list[ServiceStatus]:
    """Services that run although their supervisor does not, last started first."""
    return [
        service for service in reversed(state.services) if service.process is not None and service.process.is_alive()
    ]


def _stop_leftovers(state_dir: Path, on_progress: Progress) -> None:
    state = StackState.load(_path(state_dir))
    if state is None:
        return
    for service in reversed(state.services):
        if service.process is None:
            continue
        if service.process.is_alive():
            pid = service.process.pid
            on_progress(f"stopping {service.name} (process {pid}), left behind by a supervisor that was killed")
        stop_tree(service.process, service.stop_signal, LEFTOVER_TIMEOUT_S)  # of a dead one its process group
    strays = marked(state_dir)
    for process in strays:
        on_progress(f"killing process {process.pid}, left behind by a service that was killed")
        kill(process)
    psutil.wait_procs(strays, timeout=LEFTOVER_TIMEOUT_S)
    if state.phase not in ("down", "failed"):
        state.model_copy(update={"phase": "down"}).save(_path(state_dir))


def _spawn(state_dir: Path) -> subprocess.Popen[bytes]:
    """Start the supervisor in a session of its own: it outlives the command and its terminal."""
    with open_log(_supervisor_log(state_dir), "start supervisor") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.stack.daemon", "--state-dir", str(state_dir.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **child_environment()},
        )


async def _wait_until_up(state_dir: Path, on_progress: Progress, supervisor: subprocess.Popen[bytes] | None) -> None:
    """Report changes until the stack is up; raise when its supervisor ends instead."""
    seen: dict[str, str] = {}
    deadline = time.monotonic() + UP_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = supervisor is not None and supervisor.poll() is not None  # asked before the state is read
        state = StackState.load(_path(state_dir))
        if state is not None:
            _report(state, seen, on_progress)
            if state.phase == "up":
                return
            ended = ended or not state.supervisor.is_alive()
        if ended:
            reason = state.reason if state is not None else None
            log = _supervisor_log(state_dir)
            raise StackError(reason or f"The supervisor ended. Its log is {log}; it ends with\n{tail(log, 15)}")
        await asyncio.sleep(POLL_S)
    raise StackError(f"The stack was not up after {UP_TIMEOUT_S:g} s. The logs are in {state_dir / 'logs'}.")


async def _show_until_gone(state_dir: Path, state: StackState, on_progress: Progress) -> None:
    """Report changes until the supervisor has ended."""
    seen = {service.name: service.state for service in state.services}
    while state.supervisor.is_alive():
        _report(StackState.load(_path(state_dir)) or state, seen, on_progress)
        await asyncio.sleep(POLL_S)


def _report(state: StackState, seen: dict[str, str], on_progress: Progress) -> None:
    """One line for each service whose state changed."""
    for service in state.services:
        if seen.get(service.name, "waiting") != service.state:
            seen[service.name] = service.state
            if service.state != "starting" or service.process is None:
                on_progress(describe(service))


def describe(service: ServiceStatus) -> str:
    """A service's state in one line."""
    detail = service.reason if service.state in ("restarting", "failed") else service.address
    return f"{service.name}: {service.state}" + (f" ({detail})" if detail and service.state != "stopped" else "")


@contextmanager
def _one_at_a_time(state_dir: Path) -> Iterator[None]:
    """Only one `up` works on a state folder."""
    with (state_dir / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StackError(f"Another `onbelay up` is at work in {state_dir}: wait until it has ended.") from error
        yield


def _path(state_dir: Path) -> Path:
    return state_dir / "state.json"


def _supervisor_log(state_dir: Path) -> Path:
    return state_dir / "logs" / "supervisor.log"
