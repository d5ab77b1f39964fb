# pyright: reportPrivateImportUsage=false
# (torch documents `torch.distributed.TCPStore` and does not export it to type checkers.)
"""torchrun on this machine only: the same launcher, with its key-value store bound to loopback.

    python -m workers.stack.torchrun --nproc-per-node 2 -m MODULE ARGUMENTS

PyTorch's own rendezvous for one machine listens on every interface.
"""

import os
import socket
import sys
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from workers.stack.ports import LOOPBACK

BACKEND = "loopback"
TIMEOUT = timedelta(minutes=10)


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of the one launcher with itself."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._listening = socket.create_server((LOOPBACK, 0))
        self._port = int(self._listening.getsockname()[1])
        self._store = TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            timeout=TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=self._listening.detach(),
        )

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the launcher's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """All nodes are here: one."""
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(
            store, rank=0, world_size=1, bootstrap_store_info=RendezvousStoreInfo(LOOPBACK, self._port)
        )

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell anybody."""

    def num_nodes_waiting(self) -> int:
        """Nobody else ever joins."""
        return 0

    def get_run_id(self) -> str:
        """The id that torchrun chose."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with the process."""
        return True


def main() -> None:
    """Entry point."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    torchrun(["--rdzv-backend", BACKEND, "--rdzv-endpoint", LOOPBACK, "--local-addr", LOOPBACK, *sys.argv[1:]])


if __name__ == "__main__":
    main()
