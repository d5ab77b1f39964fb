"""A worker as its own process, as the stack starts it."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from configs.load import dump_recipe
from configs.recipe import Recipe
from workers.environments.paths import child_environment

PATIENCE_S = 120.0


@asynccontextmanager
async def worker_process(name: str, folder: Path, recipe: Recipe) -> AsyncIterator[asyncio.subprocess.Process]:
    """The worker `generation-worker` or `rollout-worker`, ready; killed if it still runs at the end."""
    file, log, sign = folder / "recipe.yaml", folder / f"{name}.log", folder / "ready" / name
    file.write_text(dump_recipe(recipe, reveal_secrets=True))
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"workers.{name.replace('-', '_')}", "--recipe", str(file)),
            env={**os.environ, **child_environment()},
            stdout=output,
            stderr=output,
        )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not sign.exists():
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.1)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
