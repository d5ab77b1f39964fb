"""Processes are identified by pid *and* start: a pid alone may have been given to somebody else.

The start is counted by the kernel since boot, so that setting the clock makes nobody a stranger. Nothing here signals a
process whose start does not match, or that does not carry the mark of a stack.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

MARK = "ONBELAY_STACK"  # in the environment of everything that a supervisor starts: its state folder
PR_SET_CHILD_SUBREAPER = 36


class ProcessId(BaseModel):
    """One process: `start` in clock ticks since the boot that is called `boot`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """The process that has this pid now; one that never was, where it is gone already."""
        start = _start(pid)
        return cls(pid=pid, start=-1 if start is None else start, boot=_boot())

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the machine was not started again since."""
        return self.boot == _boot()

    def process(self) -> psutil.Process | None:
        """The living process, or None when it is gone (a zombie is gone)."""
        if not self.is_of_this_boot or _start(self.pid) != self.start:
            return None
        try:
            process = psutil.Process(self.pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.Error:
            return None

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.process() is not None


def _start(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the second one is a name in parentheses


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def tree(process: psutil.Process) -> list[psutil.Process]:
    """The process and all its descendants that can be seen."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def resident_bytes(identity: ProcessId) -> int:
    """Resident memory of the process and its descendants; memory they share counts once for each of them."""
    root = identity.process()
    total = 0
    for process in tree(root) if root else []:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


def stop_tree(identity: ProcessId, stop_signal: int, timeout_s: float) -> None:
    """Ask a leftover process to stop, then kill what remains of its tree and its process group."""
    root = identity.process()
    if root is None:
        if identity.is_of_this_boot and not psutil.pid_exists(identity.pid):
            kill_group(identity.pid)
        return
    processes = tree(root)
    root.send_signal(stop_signal)
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    for process in alive:
        kill(process)
    kill_group(identity.pid)
    psutil.wait_procs(alive, timeout=timeout_s)


def marked(state_dir: Path) -> list[psutil.Process]:
    """Processes that descend from a supervisor of this state folder, wherever they went; not this one's ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(MARK) == str(state_dir.resolve()):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def kill_group(group: int) -> None:
    """SIGKILL whatever is left in a process group that we founded."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill(process: psutil.Process) -> None:
    """SIGKILL, if it is still there."""
    try:
        process.kill()
    except psutil.Error:
        return


def adopt_orphans() -> None:
    """Ask the kernel (Linux) that descendants whose parent dies become children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans(leaders: Collection[int]) -> list[int]:
    """Kill adopted processes: children in a foreign process group that are not in `leaders`. Returns their pids."""
    own_group = os.getpgrp()
    killed: list[int] = []
    for child in psutil.Process().children():
        try:
            if child.pid in leaders or os.getpgid(child.pid) == own_group:
                continue
        except ProcessLookupError:
            continue
        for process in tree(child):
            kill(process)
        killed.append(child.pid)
    for pid in killed:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            continue
    return killed
