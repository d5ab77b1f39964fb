"""A worker of the rollouts' queue in a process of its own, so that it can be killed while the workflows go on.

python -m tests.failures.rollouts_apart --recipe FILE
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from temporalio.worker import Worker

from tests.failures.world import DEADLINE_S
from workers import rollout_worker
from workers.environments.paths import child_environment
from workers.worker_process import Resources, run_worker_process

NAME = "rollouts-apart"


async def build(resources: Resources) -> Sequence[Worker]:
    """The second of the product's rollout worker."""
    _, rollouts = await rollout_worker.build(resources)
    return (rollouts,)


class RolloutsApart:
    """The process. `folder` has its recipe."""

    def __init__(self, folder: Path) -> None:
        self._sign = folder / "ready" / NAME
        self._sign.unlink(missing_ok=True)
        self._log = (folder / f"{NAME}.log").open("a")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.failures.rollouts_apart", "--recipe", str(folder / "recipe.yaml")],
            env={**os.environ, **child_environment()},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    async def ready(self) -> "RolloutsApart":
        """Return when it polls."""
        async with asyncio.timeout(DEADLINE_S):
            while not self._sign.exists():
                assert self._process.poll() is None, Path(self._log.name).read_text()
                await asyncio.sleep(0.05)
        return self

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._log.close()


if __name__ == "__main__":
    run_worker_process(NAME, build)
