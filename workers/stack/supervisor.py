"""Keeps services up: starts each when what it needs is ready, restarts the dead with back-off, stops in reverse order.

Independent services start side by side. Every change of state is reported to `on_change` after it happened.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from graphlib import TopologicalSorter
from pathlib import Path

from workers.stack.child import TAIL_LINES, Child, ChildExited, NotReady, describe_exit
from workers.stack.errors import ServiceFailed
from workers.stack.logs import tail
from workers.stack.restarts import RestartPolicy
from workers.stack.service import Action, Service
from workers.stack.state import ServiceState, ServiceStatus

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs a set of services and actions whose names are unique and whose `after` names are known."""

    def __init__(
        self,
        members: Sequence[Service | Action],
        logs: Path,
        *,
        policy: RestartPolicy | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_death` is called after a process has ended, to clean up what it left behind."""
        by_name = {member.name: member for member in members}
        order = TopologicalSorter({name: member.after for name, member in by_name.items()}).static_order()
        self._members = [by_name[name] for name in order]
        self._logs = logs
        self._policy = policy or RestartPolicy()
        self._on_change = on_change
        self._on_death = on_death
        self._ready = {name: asyncio.Event() for name in by_name}
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._status = {member.name: self._first_status(member) for member in self._members}

    @property
    def statuses(self) -> list[ServiceStatus]:
        """The services and actions, in order of start."""
        return list(self._status.values())

    @property
    def pids(self) -> set[int]:
        """The processes that are supervised just now."""
        return {child.identity.pid for child in self._children.values()}

    async def start(self) -> None:
        """Bring everything up; ServiceFailed when something does not start. Call `stop` in any case."""
        self._keepers = {member.name: asyncio.create_task(self._keep(member)) for member in self._members}
        all_ready = asyncio.create_task(self._wait_all_ready())
        try:
            pending: set[asyncio.Task[None]] = {all_ready, *self._keepers.values()}
            while not all_ready.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            all_ready.cancel()

    async def _wait_all_ready(self) -> None:
        for event in self._ready.values():
            await event.wait()

    async def stop(self) -> None:
        """Stop everything, dependants first; nothing is left running."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        stopped = {name: asyncio.Event() for name in self._status}
        await asyncio.gather(*(self._stop_one(member, stopped) for member in self._members))

    async def _stop_one(self, member: Service | Action, stopped: dict[str, asyncio.Event]) -> None:
        for dependant in self._members:
            if member.name in dependant.after:
                await stopped[dependant.name].wait()
        child = self._children.pop(member.name, None)
        if child is not None:
            self._set(member.name, "stopping")
            await child.stop()
            self._on_death()
        if isinstance(member, Service) and self._status[member.name].state != "failed":
            self._set(member.name, "stopped", process=None)
        stopped[member.name].set()

    async def _keep(self, member: Service | Action) -> None:
        for name in member.after:
            await self._ready[name].wait()
        if isinstance(member, Action):
            await self._do(member)
        else:
            await self._keep_up(member)

    async def _do(self, action: Action) -> None:
        self._set(action.name, "starting")
        try:
            async with asyncio.timeout(action.timeout_s):
                await action.run()
        except Exception as error:  # whatever it is, the stack cannot come up
            reason = str(error) or f"{type(error).__name__} after at most {action.timeout_s:g} s"
            self._set(action.name, "failed", reason=reason)
            raise ServiceFailed(action.name, reason, self._logs / "supervisor.log", "") from error
        self._set(action.name, "done")
        self._ready[action.name].set()

    async def _keep_up(self, service: Service) -> None:
        failures = 0
        while True:
            reason, ready_s = await self._run_once(service)
            was_ready = self._ready[service.name].is_set()
            failures = self._policy.failures_after(failures, ready_s)
            if self._policy.gives_up(failures, was_ready):
                reason = f"{reason}; given up after {failures} failures in a row"
                self._set(service.name, "failed", process=None, reason=reason, failures=failures)
                log = self._log(service.name)
                raise ServiceFailed(service.name, reason, log, tail(log, TAIL_LINES))
            wait_s = self._policy.wait_s(failures)
            self._set(service.name, "restarting", process=None, reason=reason, failures=failures)
            logger.warning("%s: %s; starting it again in %g s", service.name, reason, wait_s)
            await asyncio.sleep(wait_s)
            self._status[service.name].restarts += 1

    async def _run_once(self, service: Service) -> tuple[str, float]:
        """One life of a service: why it ended, and for how long it had been ready."""
        self._set(service.name, "starting")
        try:
            child = await Child.start(service, self._log(service.name))
        except Exception as error:  # the command cannot be prepared or executed
            return f"it cannot be started: {error}", 0.0
        self._children[service.name] = child
        self._set(service.name, "starting", process=child.identity)
        try:
            await child.wait_ready()
        except (ChildExited, NotReady) as error:
            await child.stop()
            del self._children[service.name]
            self._on_death()
            return str(error), 0.0
        ready_at = time.monotonic()
        self._set(service.name, "ready", process=child.identity)
        self._ready[service.name].set()
        code = await child.wait()
        del self._children[service.name]
        self._on_death()
        return describe_exit(code), time.monotonic() - ready_at

    def _first_status(self, member: Service | Action) -> ServiceStatus:
        service = member if isinstance(member, Service) else None
        return ServiceStatus(
            name=member.name,
            since=datetime.now(UTC),
            address=service.address if service else None,
            log=self._log(member.name) if service else None,
            stop_signal=int(service.stop_signal) if service else 0,
        )

    def _set(
        self,
        name: str,
        state: ServiceState,
        *,
        process: object = ...,
        reason: str | None = None,
        failures: int | None = None,
    ) -> None:
        status = self._status[name]
        changes: dict[str, object] = {"state": state, "since": datetime.now(UTC)}
        if process is not ...:
            changes["process"] = process
        if reason is not None:
            changes["reason"] = reason
        if failures is not None:
            changes["failures_in_a_row"] = failures
        self._status[name] = status.model_copy(update=changes)
        self._on_change()

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"
