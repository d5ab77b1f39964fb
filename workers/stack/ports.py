"""Loopback ports: free ones are found, taken ones are named together with the process that holds them."""

import socket
from contextlib import ExitStack

import psutil

from workers.stack.errors import PortTaken

LOOPBACK = "127.0.0.1"
TRIES = 200


def free_port() -> int:
    """A port that nobody listens on just now."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for _ in range(TRIES):
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            first = int(probe.getsockname()[1])
        if first + count <= 65536 and all(is_free(port) for port in range(first, first + count)):
            return first
    raise OSError(f"no {count} consecutive free ports on {LOOPBACK}")


def distinct_free_ports(count: int) -> list[int]:
    """`count` different free ports."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def is_free(port: int) -> bool:
    """Whether a server could listen on the port (connections in TIME_WAIT do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def choose_port(port: int, key: str, count: int = 1) -> int:
    """The port the recipe asks for, checked; 0 is replaced by the first of `count` free ones."""
    if port == 0:
        return free_ports(count)
    for candidate in range(port, port + count):
        if not is_free(candidate):
            raise PortTaken(candidate, key, holder_of(candidate))
    return port


def holder_of(port: int) -> str:
    """The process that listens on the port, in words."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "another process (its name is not visible to this user)"
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                break
            try:
                process = psutil.Process(connection.pid)
                return f"process {process.pid} ({' '.join(process.cmdline())[:120] or process.name()})"
            except psutil.Error:
                return f"process {connection.pid}"
    return "another process (its name is not visible to this user)"
