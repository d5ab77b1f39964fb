"""One embedded stack for all end-to-end tests: the demo brings it up, the others use and kill it."""

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tests.e2e.stack import Stack


@pytest.fixture(scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A state folder of its own; whatever runs there at the end is stopped."""
    embedded = Stack(tmp_path_factory.mktemp("stack"))
    yield embedded
    with suppress(TimeoutError):
        await embedded.onbelay("down")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One power cut for each seed that is asked for."""
    if "power_cut_seed" in metafunc.fixturenames:
        metafunc.parametrize("power_cut_seed", range(1, int(metafunc.config.getoption("power_cuts") or 1) + 1))
