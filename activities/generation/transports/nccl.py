"""Weights from GPU to GPU over NCCL, with the trainer side of vLLM's weight transfer. NOT YET RUN ON A GPU.

The generation worker reads the exported shards onto its own GPU, tensor by tensor, and broadcasts them to the workers
of one server: it is rank 0 of a group that is made for this load and closed after it. vLLM's engine leads the handshake
(init, start, update while the tensors are sent, finish); its requests go through the client of the server, with its
deadlines, and carry the digest. Servers take turns: communicators of one process are not for use side by side.

vllm.distributed.weight_transfer: WeightTransferTrainerFactory, NCCLTrainerInitInfo, WeightSource.
"""

# pyright: reportMissingImports=false
# (vLLM is installed only where it is used)

import asyncio
import importlib
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from activities.generation.errors import ServerUnreachable
from activities.generation.transports.folder import FolderSource
from activities.generation.vllm import VllmServer
from activities.generation.weights import weights_label
from workflows.messages import WeightsRef

_RETURN_S = 60.0  # beyond the deadlines of the requests themselves


class Sender(Protocol):
    """vLLM's trainer engine, ready to send."""

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet: this process is rank 0, the workers of the server are the others."""

    address: str
    port: int
    world_size: int


SenderFactory = Callable[[Rendezvous, "RoutesOfUpdate", FolderSource], Sender]


def nccl_problem() -> str | None:
    """Why this process cannot send over NCCL, if so."""
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
    except ImportError as error:
        return f"vLLM cannot be imported there ({error})"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device there"
    return None


def vllm_sender(rendezvous: Rendezvous, client: "RoutesOfUpdate", source: FolderSource) -> Sender:
    """vLLM's own sender; returns when every rank has joined."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(
        master_address=rendezvous.address, master_port=rendezvous.port, world_size=rendezvous.world_size, rank=0
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


class NcclTransport:
    """`generation.weight_transport: nccl`, with the weight backend `nccl_policy`. One load at a time."""

    def __init__(self, timeout_s: float, open_sender: SenderFactory = vllm_sender, device: str = "cuda") -> None:
        self._timeout_s = timeout_s
        self._open_sender = open_sender
        self._device = device
        self._turn = asyncio.Lock()

    async def load(self, server: VllmServer, weights: WeightsRef) -> None:
        """Send every tensor of the folder to the workers of one server.

        Raises ServerUnreachable when it is not done in time: a rank that waits in NCCL for a dead one waits for ever,
        so its thread is left behind and the next load makes another group.
        """
        async with self._turn:
            await server.abandon_update()
            rendezvous = Rendezvous(_address_towards(server.url), _free_port(), 1 + await server.world_size())
            client = RoutesOfUpdate(server, weights, asyncio.get_running_loop(), self._timeout_s + _RETURN_S)
            source = FolderSource(Path(weights.path), self._device)
            sent = _in_thread(lambda: self._send(rendezvous, client, source))
            try:
                async with asyncio.timeout(self._timeout_s):
                    await asyncio.wrap_future(sent)
            except TimeoutError as error:
                raise ServerUnreachable(
                    f"vLLM at {server.url} did not take {weights_label(weights.version)} over NCCL within "
                    f"{self._timeout_s:g} s."
                ) from error
            await server.end_transfer()

    def _send(self, rendezvous: Rendezvous, client: "RoutesOfUpdate", source: FolderSource) -> None:
        sender = self._open_sender(rendezvous, client, source)
        try:
            sender.send_weights()
        finally:
            sender.shutdown()


class RoutesOfUpdate:
    """What vLLM's sender asks of the server, from its own threads: `VLLMWeightSyncClient` over the server's client."""

    def __init__(
        self, server: VllmServer, weights: WeightsRef, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        self._server = server
        self._weights = weights
        self._loop = loop
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Returns when the workers have joined the group."""
        self._ask(self._server.init_transfer(init_info))

    def start_weight_update(self) -> None:
        """Loading mode."""
        self._ask(self._server.start_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Names, types and shapes of what is broadcast meanwhile; the digest makes it the weights of the record."""
        self._ask(self._server.update(update_info | {"digest": self._weights.digest}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The label is this client's: the sender knows none."""
        self._ask(self._server.finish_update(weight_version or weights_label(self._weights.version)))

    def _ask(self, request: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(request, self._loop).result(self._timeout_s)


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """In a thread that nobody has to join: it may never return."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            if not done.cancelled():
                done.set_exception(error)
        else:
            if not done.cancelled():
                done.set_result(None)

    done.set_running_or_notify_cancel()
    threading.Thread(target=run, name="nccl-sender", daemon=True).start()
    return done


def _address_towards(url: str) -> str:
    """This machine's address as the server sees it: that of a socket which is connected to the server, unsent."""
    host = urlsplit(url).hostname or ""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ServerUnreachable(f"vLLM at {url} has an address that this machine has no way to: {error}.") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
