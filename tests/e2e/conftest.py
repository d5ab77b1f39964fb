"""One embedded stack for all end-to-end tests: the demo brings it up, the others use and kill it.

They come last, because the stack stays up until all tests have ended. Their policy is made beside the tests that come
first, which leaves a core to them and saves two minutes.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.stack import POLICY_FOLDER, ROOT, Stack

MAKE_POLICY = (
    "from pathlib import Path; from workers.demo.policy import make_policy; "
    f"make_policy(Path({str(POLICY_FOLDER)!r}), lambda line: None)"
)
POLICY_TIMEOUT_S = 900.0
_making = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the end-to-end tests behind all others."""
    items.sort(key=_is_end_to_end)


def _is_end_to_end(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to make the policy if an end-to-end test is going to run."""
    if not session.config.option.collectonly and any(map(_is_end_to_end, session.items)):
        session.config.stash[_making] = subprocess.Popen([sys.executable, "-c", MAKE_POLICY], cwd=ROOT)


def pytest_unconfigure(config: pytest.Config) -> None:
    """A session that is broken off leaves nothing behind."""
    making = config.stash.get(_making, None)
    if making is not None and making.poll() is None:
        making.kill()
        making.wait()


@pytest.fixture(scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> AsyncIterator[Stack]:
    """A state folder of its own; whatever runs there at the end is stopped."""
    assert await asyncio.to_thread(pytestconfig.stash[_making].wait, POLICY_TIMEOUT_S) == 0
    embedded = Stack(tmp_path_factory.mktemp("stack"))
    yield embedded
    with suppress(TimeoutError):
        await embedded.onbelay("down")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One power cut for each seed that is asked for."""
    if "power_cut_seed" in metafunc.fixturenames:
        metafunc.parametrize("power_cut_seed", range(1, int(metafunc.config.getoption("power_cuts") or 1) + 1))
