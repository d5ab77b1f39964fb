"""Loopback ports."""

import os
import socket

import pytest

from workers.stack.errors import PortTaken
from workers.stack.ports import LOOPBACK, choose_port, distinct_free_ports, free_port, free_ports, is_free


def test_a_taken_port_names_its_holder_and_the_key_to_change() -> None:
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken) as raised:
            choose_port(port, "temporal.embedded_port")
    for part in (str(port), f"process {os.getpid()}", "temporal.embedded_port", "0 picks a free port"):
        assert part in str(raised.value)


def test_zero_is_replaced_by_a_free_port() -> None:
    assert is_free(choose_port(0, "gym.port"))


def test_a_range_is_checked_to_its_end() -> None:
    first = free_ports(3)
    with socket.socket() as holder:
        holder.bind((LOOPBACK, first + 2))
        holder.listen()
        assert choose_port(first, "gym.port", count=2) == first
        with pytest.raises(PortTaken, match=str(first + 2)):
            choose_port(first, "gym.port", count=3)


def test_a_process_is_never_given_a_port_twice() -> None:
    given = [free_port(), *distinct_free_ports(20), *(choose_port(0, "gym.port") for _ in range(20))]
    assert len(set(given)) == 41


def test_no_outgoing_connection_takes_a_port_before_it_is_used() -> None:
    first_for_connections = 32_768  # of Linux, unless it is told otherwise
    assert all(1024 <= port < first_for_connections for port in distinct_free_ports(20))
