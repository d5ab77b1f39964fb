"""The ranks' key-value store: values get through, and no other interface listens."""

import socket
from datetime import timedelta

import pytest

from activities.training import rank_store

PATIENCE = timedelta(seconds=30)


def test_a_connection_reads_what_rank_0_wrote() -> None:
    hosted = rank_store.host("127.0.0.1")
    connected = rank_store.connect(("127.0.0.1", hosted.port))
    hosted.set("command/1", "")
    connected.wait(["command/1"], PATIENCE)
    assert connected.get("command/1") == b""
    assert not connected.check(["command/2"])


def test_the_store_listens_on_the_address_of_rank_0_alone() -> None:
    hosted = rank_store.host("127.0.0.1")
    with socket.create_connection(("127.0.0.1", hosted.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", hosted.port), timeout=5)


def test_an_address_of_another_machine_leaves_all_interfaces(caplog: pytest.LogCaptureFixture) -> None:
    assert rank_store.listening_on("192.0.2.1") is None
    assert "192.0.2.1" in caplog.text
    assert "listens on all interfaces" in caplog.text
