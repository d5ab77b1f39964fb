# pyright: reportPrivateImportUsage=false
# (torch documents its stores and does not export them to type checkers.)
"""The key-value store through which the ranks of a trainer reach rank 0. It listens on rank 0's address alone.

torch binds a store to all interfaces unless it is handed a socket that listens already. Where the address that the
other ranks use is none of this machine's own (behind address translation), all interfaces are what is left.
"""

import logging
import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

Store = dist.TCPStore
Address = tuple[str, int]

_TIMEOUT = timedelta(seconds=60)
_JOIN_TIMEOUT = timedelta(minutes=10)

logger = logging.getLogger(__name__)


def host(name: str) -> Store:
    """A store of this process, on a free port of the interface that `name` names."""
    listening = listening_on(name)
    if listening is None:
        return Store(name, 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    port = int(listening.getsockname()[1])
    return Store(
        name, port, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def launcher_store() -> tuple[dist.Store, int, int]:
    """torchrun's own store for this start of the ranks, this rank and the number of ranks.

    A launcher's store outlives a group that it started again, and holds the addresses of the processes before.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=_JOIN_TIMEOUT))
    return dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store), rank, world_size


def connect(address: Address) -> Store:
    """A connection to rank 0's store."""
    return Store(*address, is_master=False, timeout=_TIMEOUT)


def listening_on(name: str) -> socket.socket | None:
    """A socket that listens on the interface of `name` alone; None where that is no address of this machine."""
    for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        try:
            return socket.create_server((str(address[0]), 0), family=family)
        except OSError as error:
            logger.warning("%s (%s) is no address of this machine: %s", name, address[0], error)
    logger.warning("the ranks' store listens on all interfaces")
    return None
