"""Metrics of steps to Weights & Biases, if a recipe asks for it: one W&B run for each run, with its id.

What W&B has is asked of W&B at every step, or read from the files of offline sessions, and everything that the ledger
has beyond it is sent. So a step that was missed comes with a later one, and none comes twice, whichever worker sends,
however often. It never fails a step, and holds one up for no longer than `logger.wandb.timeout_s`; after a miss, W&B is
left alone for as long.
"""

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from configs.logger import WandbConfig
from configs.recipe import Recipe

KEY_VARIABLE = "WANDB_API_KEY"

_SESSION = "activities.metrics.wandb_session"
_ROOT = Path(__file__).resolve().parents[2]
_SHOWN_SECTIONS = {"grpo", "training", "rollouts", "failure"}
_MAX_ANSWER_BYTES = 1 << 20
_END_TIMEOUT_S = 5.0
_END_PERIOD_S = 0.02

_log = logging.getLogger(__name__)

Recorded = Callable[[str, int], Awaitable[dict[int, dict[str, float]]]]
"""The recorded metrics of a run by step, from a step on, oldest first; a bounded number at a time, {} at the end."""


class SessionFailed(Exception):
    """A session with W&B ended without its answer."""


class WandbSink:
    """The sink of one worker. `recorded` reads the ledger."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._sent: dict[str, int] = {}
        self._resting_until: dict[str, float] = {}
        self._without_key: set[str] = set()

    async def send(self, run_id: str, recipe: Recipe, deadline_s: float, *, last: bool = False) -> None:
        """Bring W&B up to date. Whatever goes wrong is logged, and made up for at a later step; the `last` time, W&B is
        asked even if it was away a moment ago."""
        wandb = recipe.logger.wandb
        if wandb is None or not self._may_send(run_id, wandb, last=last):
            return
        deadline_s = min(deadline_s, wandb.timeout_s)
        try:
            async with asyncio.timeout(deadline_s):
                await self._bring_up_to_date(run_id, wandb, recipe)
        except TimeoutError:
            self._missed(run_id, wandb, f"no answer within {deadline_s:g} s")
        except SessionFailed as error:
            self._missed(run_id, wandb, str(error))
        except Exception as error:  # nothing about W&B may cost a step that is trained and recorded
            self._missed(run_id, wandb, f"{type(error).__name__}: {error}")

    def _may_send(self, run_id: str, wandb: WandbConfig, *, last: bool) -> bool:
        if wandb.mode == "online" and not os.environ.get(KEY_VARIABLE):
            if run_id not in self._without_key:
                self._without_key.add(run_id)
                _log.error(
                    "run %s: nothing is sent to W&B: logger.wandb.mode is online, but the environment variable %s is "
                    "not set. Set it and start this worker again; what was recorded until then is sent with the next "
                    "step. Or set logger.wandb.mode to offline.",
                    run_id,
                    KEY_VARIABLE,
                )
            return False
        return last or time.monotonic() >= self._resting_until.get(run_id, 0.0)

    def _missed(self, run_id: str, wandb: WandbConfig, why: str) -> None:
        self._resting_until[run_id] = time.monotonic() + wandb.timeout_s
        _log.warning(
            "run %s: W&B did not take the metrics after step %d: %s. They are in the ledger, and are sent with a later "
            "step.",
            run_id,
            self._sent.get(run_id, -1),
            why,
        )

    async def _bring_up_to_date(self, run_id: str, wandb: WandbConfig, recipe: Recipe) -> None:
        sent = self._sent.get(run_id, -1)
        if not await self._recorded(run_id, sent + 1):
            return
        folder = (recipe.training.output_dir / run_id).absolute()
        opening = {
            "run_id": run_id,
            "folder": str(folder),
            "wandb": wandb.model_dump(mode="json"),
            "recipe": recipe.model_dump(mode="json", include=_SHOWN_SECTIONS),
        }
        session = await _Session.start(folder / "wandb")
        try:
            first = (await session.ask(opening))["next_step"]
            while recorded := await self._recorded(run_id, first):
                for step, metrics in recorded.items():
                    await session.tell({"step": step, "metrics": metrics})
                first = max(recorded) + 1
            await session.end()
        finally:
            await session.kill()
        self._sent[run_id] = max(sent, first - 1)


class _Session:
    """The process of one session."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, scratch: Path) -> None:
        self._process, self._log_file, self._scratch = process, log, scratch

    @classmethod
    async def start(cls, folder: Path) -> "_Session":
        """Start it; its files, and what its libraries print, go into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        log, scratch = folder / "session.log", Path(tempfile.mkdtemp(prefix="onbelay-wandb-"))
        with log.open("wb") as stream:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _SESSION,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stream,
                cwd=_ROOT,
                env=_environment(folder) | {"TMPDIR": str(scratch)},  # the client leaves folders and sockets there
                start_new_session=True,
                limit=_MAX_ANSWER_BYTES,
            )
        return cls(process, log, scratch)

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Tell something, and return the answer."""
        await self.tell(message)
        return await self._answer()

    async def tell(self, message: Mapping[str, Any]) -> None:
        """Tell something that has no answer."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            with suppress(ConnectionError):  # it has ended; its answer says why
                await self._process.stdin.drain()

    async def end(self) -> dict[str, Any]:
        """End its input; the answer comes once W&B has everything."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        line = b"" if self._process.stdout is None else await self._process.stdout.readline()
        if not line:
            raise SessionFailed(f"the session ended without an answer; see {self._log_file}")
        answer = json.loads(line)
        if "error" in answer:
            raise SessionFailed(answer["error"])
        return answer

    async def kill(self) -> None:
        """End the process and what it started, and return when they are gone."""
        members = _members(self._process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                while any(map(_lives, members)):
                    await asyncio.sleep(_END_PERIOD_S)
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)


def _members(pid: int) -> list[psutil.Process]:
    """The processes that a session has started."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _environment(folder: Path) -> dict[str, str]:
    """That of the worker; W&B's own caches and settings are among the run's files, not in a home folder."""
    places = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    return {**os.environ, **places, "WANDB_ERROR_REPORTING": "false"}
