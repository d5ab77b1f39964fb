"""The trainer's processes as one: rank 0 gives commands, all ranks carry them out, and every failure is heard.

Followers wait for a number in a key-value store that rank 0 hosts, for as long as it takes, and end when rank 0 is
gone, whatever they are at; commands themselves travel by broadcast. A rank that fails says so in the store, so rank 0
learns of it even when its own engine hangs in a collective that the failed rank never joined.
"""

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from activities.training.commands import Command, Outcome, Stop
from activities.training.rank_engine import RankEngine
from activities.training.rank_store import Address, Store, connect, host, launcher_store
from activities.training.rank_watch import RankWatch, Signal

_IDLE_WAIT = timedelta(minutes=5)
_OUTCOME_GRACE = timedelta(seconds=30)
_FAILED_OUTCOME_GRACE = timedelta(seconds=10)  # rank 0 failed as well, most likely of the same
_COLLECTIVE_TIMEOUT = timedelta(days=1)
_LOOK_AT_RANK_0_S = 5.0

logger = logging.getLogger(__name__)


class Ranks:
    """The group of torchrun's processes. `carry_out` is rank 0's, `follow` that of the others."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._engine = RankEngine(self.rank)
        self._number = 0
        if self.world_size > 1:
            _join()
            carrier = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
            assert isinstance(carrier, dist.ProcessGroup)
            self._carrier = carrier
            self._store, address = _shared_store(self.rank, carrier)
            self._watching = connect(address)  # for the thread that watches the engine's

    def carry_out(self, command: Command, signal: Signal) -> list[Outcome]:
        """Run a command on all ranks; the outcomes in order of ranks. Blocks for as long as the command takes."""
        self._number += 1
        watch = RankWatch(signal, self._agree)
        if self.world_size == 1:
            return [self._engine.run(command, watch)]
        self._store.set(_command_key(self._number), "")
        dist.broadcast_object_list([command], src=0, group=self._carrier)
        own = self._engine.run(command, watch)
        grace = _OUTCOME_GRACE if own.error is None else _FAILED_OUTCOME_GRACE
        others = [self._outcome_of(rank, grace) for rank in range(1, self.world_size)]
        self._store.delete_key(_command_key(self._number))
        return [own, *others]

    def failed_rank(self) -> Outcome | None:
        """A follower's failure at the command under way, heard while rank 0 may still be busy with it."""
        if self.world_size == 1 or not self._watching.check([_failure_key(self._number)]):
            return None
        return _read(self._watching.get(_failure_key(self._number)))

    def follow(self, orphaned: Callable[[], None]) -> None:
        """Carry out commands until told to stop. Raises when rank 0 is gone; `orphaned` is called, from another thread,
        when it goes while this rank may be busy: it must end the process."""
        threading.Thread(target=self._look_at_rank_0, args=(orphaned,), name="look-at-rank-0", daemon=True).start()
        while True:
            self._number += 1
            self._await_command()
            carried: list[Command | None] = [None]
            dist.broadcast_object_list(carried, src=0, group=self._carrier)
            command = carried[0]
            assert command is not None
            outcome = self._engine.run(command, RankWatch(Signal(), self._agree))
            if outcome.error is not None and not outcome.cancelled:
                self._store.set(_failure_key(self._number), json.dumps(asdict(outcome)))
            self._store.set(_outcome_key(self._number, self.rank), json.dumps(asdict(outcome)))
            if isinstance(command, Stop):
                return

    def _agree(self, flag: bool) -> bool:
        """Whether any rank says so. Collective when there are several."""
        if self.world_size == 1:
            return flag
        said = torch.tensor([int(flag)], dtype=torch.int32, device="cpu")
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._carrier)
        return bool(said.item())

    def _await_command(self) -> None:
        while True:
            try:
                self._store.wait([_command_key(self._number)], _IDLE_WAIT)
                return
            except dist.DistNetworkError:
                raise
            except dist.DistStoreError:
                logger.debug("rank %d is idle", self.rank)

    def _look_at_rank_0(self, orphaned: Callable[[], None]) -> None:
        """A collective does not always notice that a rank has died; a connection to its store does."""
        pause = threading.Event()
        while not pause.wait(_LOOK_AT_RANK_0_S):
            try:
                self._watching.check(["alive"])
            except Exception:
                logger.exception("rank %d lost rank 0", self.rank)
                orphaned()
                return

    def _outcome_of(self, rank: int, grace: timedelta) -> Outcome:
        key = _outcome_key(self._number, rank)
        try:
            self._store.wait([key], grace)
        except dist.DistStoreError:
            return Outcome(rank, error=f"no answer within {grace.total_seconds():g} s of rank 0's own", stuck=True)
        outcome = _read(self._store.get(key))
        self._store.delete_key(key)
        return outcome


def _join() -> None:
    """Join torchrun's process group; collectives of the engine wait no longer than a day for a rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, world_size = launcher_store()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT)


def _shared_store(rank: int, carrier: dist.ProcessGroup) -> tuple[Store, Address]:
    """A store in rank 0's process, and its address: connections to it break when rank 0 dies."""
    master, hosted = os.environ["MASTER_ADDR"], None
    if rank == 0:
        hosted = host(master)
    told = [0 if hosted is None else hosted.port]
    dist.broadcast_object_list(told, src=0, group=carrier)
    address = (master, told[0])
    return hosted or connect(address), address


def _read(answer: bytes) -> Outcome:
    return Outcome(**json.loads(answer))


def _command_key(number: int) -> str:
    return f"command/{number}"


def _outcome_key(number: int, rank: int) -> str:
    return f"outcome/{number}/{rank}"


def _failure_key(number: int) -> str:
    return f"failure/{number}"
