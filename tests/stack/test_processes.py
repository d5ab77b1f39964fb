"""Who a process is: not its pid alone, and not the clock."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from workers.stack.processes import ProcessId


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_is_known_although_the_clock_was_set(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = ProcessId.of(child.pid)
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)
    assert identity.is_alive()


@pytest.mark.parametrize("change", [{"start": 1}, {"boot": "the one before"}])
def test_another_process_with_the_same_pid_is_a_stranger(
    child: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    assert not ProcessId.of(child.pid).model_copy(update=change).is_alive()


def test_a_process_that_has_ended_is_gone(child: subprocess.Popen[bytes]) -> None:
    identity = ProcessId.of(child.pid)
    child.communicate()
    assert not identity.is_alive()
    assert not ProcessId.of(child.pid).is_alive()
