"""Loopback ports: free ones are found, taken ones are named together with the process that holds them."""

import secrets
import socket

import psutil

from workers.stack.errors import PortTaken

LOOPBACK = "127.0.0.1"
TRIES = 200
# Below the ports that systems give to outgoing connections: none of these takes a port between its choice and its use.
FIRST, LAST = 10_000, 32_000
_next = FIRST + secrets.randbelow(LAST - FIRST)


def free_port() -> int:
    """A port that nobody listens on just now."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports. A process is not given a port twice, though nobody uses it yet."""
    global _next
    for _ in range(TRIES):
        first = _next if _next + count <= LAST else FIRST
        _next = first + count
        if all(is_free(port) for port in range(first, first + count)):
            return first
    raise OSError(f"no {count} consecutive free ports on {LOOPBACK}")


def distinct_free_ports(count: int) -> list[int]:
    """`count` different free ports."""
    return [free_port() for _ in range(count)]


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
