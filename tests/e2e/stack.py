"""An embedded stack as its user has it: commands against a state folder, and the processes behind it."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from configs.load import load_recipe
from configs.recipe import Recipe
from storage.errors import LedgerUnavailable
from storage.summaries import RunSummary
from workers.cli.session import Session, session_of
from workers.stack.control import resolved_recipe

ROOT = Path(__file__).parents[2]
COMMAND_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 600.0
POLICY_FOLDER = ROOT / ".onbelay" / "demo" / "policy"
POLICY = [
    f"run.{key}={POLICY_FOLDER.parent / name}"
    for key, name in (("model", "policy"), ("dataset", "train.jsonl"), ("validation_dataset", "validation.jsonl"))
]
FREE_PORTS = [
    "storage.embedded_port=0",
    "temporal.embedded_port=0",
    "temporal.embedded_ui_port=0",
    "generation.embedded.port=0",
    "gym.port=0",
]


@dataclass
class Stack:
    """The stack of one state folder."""

    state_dir: Path

    @property
    def folders(self) -> list[str]:
        """Overrides that keep the files of runs beside the state."""
        return [f"training.output_dir={self.state_dir / 'training'}", f"storage.blobs_url={self.state_dir / 'blobs'}"]

    async def onbelay(self, *arguments: str) -> tuple[int, str]:
        """Run a command; its exit code and standard output."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "workers.cli.main",
            *arguments,
            cwd=ROOT,
            env={**os.environ, "ONBELAY_STATE_DIR": str(self.state_dir)},
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def ok(self, *arguments: str) -> str:
        """Run a command that must succeed; its standard output."""
        code, output = await self.onbelay(*arguments)
        assert code == 0, output
        return output

    async def up(self) -> None:
        """`onbelay up`, unless the stack is up."""
        if resolved_recipe(self.state_dir) is None:
            await self.ok("up", "demo", *POLICY, *FREE_PORTS, *self.folders)

    def recipe(self, *overrides: str) -> Recipe:
        """The demo's recipe with the files of this stack."""
        return load_recipe("demo", [*POLICY, *self.folders, *overrides])

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Ledger and Temporal of the stack that is up."""
        running = resolved_recipe(self.state_dir)
        assert running is not None, "the stack is not up"
        async with session_of(running) as opened:
            yield opened

    async def until(self, run_id: str, steps: int, state: str | None = None) -> RunSummary:
        """Wait until a run has applied steps (and is in a state)."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        summary: RunSummary | None = None
        async with self.session() as opened:
            while time.monotonic() < deadline:
                with suppress(LedgerUnavailable):
                    summary = await opened.ledger.summaries.of(run_id)
                    if summary.steps_applied >= steps and state in (None, summary.state):
                        return summary
                    assert summary.state != "failed", summary
                await asyncio.sleep(0.2)
        raise AssertionError(f"{run_id} did not come to {steps} steps: {summary}")

    def cut_power(self) -> int:
        """SIGKILL for every process of the stack at once, the supervisor first; how many there were."""
        state = json.loads((self.state_dir / "state.json").read_text())
        roots = [state["supervisor"], *(service["process"] for service in state["services"] if service["process"])]
        victims: list[psutil.Process] = []
        for root in roots:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(root["pid"])
                victims += [process, *process.children(recursive=True)]
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        psutil.wait_procs(victims, timeout=30)
        return len(set(victims))
