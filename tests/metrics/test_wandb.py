"""Steps at Weights & Biases, with its real client: each of them once, whoever sends, and none that costs a step."""

import asyncio
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from activities.metrics.wandb_files import next_step, run_files, steps_in
from activities.metrics.wandb_sink import KEY_VARIABLE, WandbSink
from configs.recipe import Recipe
from storage.errors import LedgerUnavailable
from tests.metrics.wandb_server import WandbServer, serving

ROOT = Path(__file__).parent.parent.parent
RUN = "ridge-1"
DEADLINE_S = 240.0
OWN = {"_step", "_timestamp", "_runtime"}


class Recorded:
    """What the ledger of a test has, two steps at a time."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def record(self, *steps: int) -> None:
        """Record steps whose values tell them apart."""
        self.steps |= {step: {"train/loss": 1 / (step + 1), "train/reward": float(step)} for step in steps}

    async def read(self, run_id: str, first: int) -> dict[int, dict[str, float]]:
        """As `storage.step_statistics` reads them."""
        wanted = [step for step in sorted(self.steps) if run_id == RUN and step >= first]
        return {step: self.steps[step] for step in wanted[:2]}


@pytest.fixture
def ledger() -> Recorded:
    return Recorded()


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    def with_wandb(**wandb: Any) -> Recipe:
        return Recipe.model_validate(
            {
                "run": {"model": "model", "dataset": "rows.jsonl"},
                "training": {"output_dir": tmp_path},
                "logger": {"wandb": {"project": "climbing", "timeout_s": DEADLINE_S, **wandb}},
            }
        )

    return with_wandb


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with serving(WandbServer()) as running:
        monkeypatch.setenv("WANDB_BASE_URL", running.url)
        monkeypatch.setenv(KEY_VARIABLE, "k" * 40)
        yield running


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv(KEY_VARIABLE, "k" * 40)
        yield listening


def stored(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Every step in the files of a run, as W&B's reader has them."""
    return [
        (step, {name: float(value) for name, value in values.items() if name not in OWN})
        for file in run_files(folder, RUN)
        for step, values in steps_in(file).items()
    ]


def sessions_of(folder: Path) -> list[psutil.Process]:
    """Processes of sessions whose files are in a folder, W&B's own included."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["environ", "status"]):
        environment = process.info["environ"] or {}
        is_of_folder = str(folder) in environment.get("WANDB_CACHE_DIR", "")
        if is_of_folder and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


async def test_offline_files_hold_every_value_of_every_step_once(
    ledger: Recorded, recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    scratch = Path(tempfile.mkdtemp(prefix="scratch-"))  # short: the client has a socket there
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    first_worker, second_worker = WandbSink(ledger.read), WandbSink(ledger.read)
    ledger.record(0, 1, 2)
    ledger.steps[2]["train/loss"] = math.inf
    await first_worker.send(RUN, recipe(mode="offline"), DEADLINE_S)
    ledger.record(3)
    for worker in (second_worker, first_worker):
        await worker.send(RUN, recipe(mode="offline"), DEADLINE_S)
    monkeypatch.undo()
    scratch.rmdir()  # nothing is left in it
    assert stored(tmp_path / RUN) == sorted(ledger.steps.items())
    assert next_step(tmp_path / RUN, RUN) == 4
    assert [path.name for path in tmp_path.iterdir()] == [RUN]
    assert [path.name for path in (tmp_path / RUN).iterdir()] == ["wandb"]
    assert sessions_of(tmp_path) == []


async def test_step_that_a_killed_session_left_half_written_is_written_again(
    ledger: Recorded, recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    ledger.record(0, 1)
    await WandbSink(ledger.read).send(RUN, recipe(mode="offline"), DEADLINE_S)
    (file,) = run_files(tmp_path / RUN, RUN)
    whole = file.read_bytes()
    length = len(whole)
    while set(steps_in(file)) == {0, 1}:
        length -= 16
        file.write_bytes(whole[:length])
    assert set(steps_in(file)) == {0}
    await WandbSink(ledger.read).send(RUN, recipe(mode="offline"), DEADLINE_S)
    assert stored(tmp_path / RUN) == sorted(ledger.steps.items())


async def test_server_has_every_step_once_whichever_worker_sends(
    ledger: Recorded, recipe: Callable[..., Recipe], server: WandbServer, tmp_path: Path
) -> None:
    workers = (WandbSink(ledger.read), WandbSink(ledger.read))
    for step in range(2):
        ledger.record(step)
        await workers[step].send(RUN, recipe(entity="team"), DEADLINE_S)
        assert server.steps(RUN) == list(range(step + 1))
    await workers[0].send(RUN, recipe(entity="team"), DEADLINE_S)
    assert server.steps(RUN) == [0, 1]
    for step, metrics in ledger.steps.items():
        assert {name: value for name, value in server.values(RUN, step).items() if name not in OWN} == metrics
    assert server.unknown == set()
    assert (server.told["project"], server.told["entity"], server.told["name"]) == ("climbing", "team", RUN)
    assert not server.told.keys() & {"host", "repo", "commit"}
    assert json.loads(server.told["config"])["grpo"]["value"]["seed"] == recipe().grpo.seed
    assert list((tmp_path / RUN / "wandb").glob("run-*")) == [], "what the server has is kept twice"
    assert sessions_of(tmp_path) == []


async def test_steps_that_an_unreachable_server_missed_come_with_a_later_one(
    ledger: Recorded,
    recipe: Callable[..., Recipe],
    server: WandbServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, rests_long = WandbSink(ledger.read), recipe(timeout_s=DEADLINE_S * 10)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        ledger.record(0)
        await worker.send(RUN, rests_long, 4.0)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert RUN in caplog.text
        assert "sent with a later step" in caplog.text
        ledger.record(1)
        await worker.send(RUN, rests_long, 4.0)
        assert len(caplog.records) == 1, "a server that was just away was asked again at once"
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    ledger.record(2)
    await worker.send(RUN, recipe(), DEADLINE_S, last=True)
    assert server.steps(RUN) == [0, 1, 2]


async def test_server_that_never_answers_holds_a_step_up_no_longer_than_its_deadline(
    ledger: Recorded,
    recipe: Callable[..., Recipe],
    silent_server: socket.socket,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger.record(0)
    async with asyncio.timeout(DEADLINE_S):
        await WandbSink(ledger.read).send(RUN, recipe(timeout_s=DEADLINE_S * 10), 4.0)
    assert "no answer within 4 s" in caplog.text
    assert sessions_of(tmp_path) == [], "a session outlived its deadline"


async def test_ledger_that_cannot_be_read_for_it_costs_no_step_either(
    recipe: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    async def away(run_id: str, first: int) -> dict[int, dict[str, float]]:
        raise LedgerUnavailable("ledger:5432", "no route to the ledger")

    await WandbSink(away).send(RUN, recipe(mode="offline"), DEADLINE_S)
    assert "no route to the ledger" in caplog.text


async def test_missing_key_is_named_once_and_starts_nothing(
    ledger: Recorded,
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    worker = WandbSink(ledger.read)
    for step in range(2):
        ledger.record(step)
        await worker.send(RUN, recipe(), DEADLINE_S)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert all(word in record.getMessage() for word in (RUN, "logger.wandb.mode", KEY_VARIABLE))
    assert list(tmp_path.iterdir()) == []


async def test_without_a_section_for_it_nothing_is_started(ledger: Recorded, tmp_path: Path) -> None:
    ledger.record(0)
    recipe = Recipe.model_validate({"run": {"model": "m", "dataset": "d"}, "training": {"output_dir": tmp_path}})
    await WandbSink(ledger.read).send(RUN, recipe, DEADLINE_S)
    assert list(tmp_path.iterdir()) == []


def test_session_ends_with_its_worker_and_cannot_meet_the_next_one(
    silent_server: socket.socket, tmp_path: Path
) -> None:
    program = f"""
import asyncio
from activities.metrics.wandb_sink import WandbSink
from configs.recipe import Recipe
from storage.errors import LedgerUnavailable
async def recorded(run_id, first):
    return {{0: {{"train/loss": 1.0}}}} if first == 0 else {{}}
recipe = Recipe.model_validate({{
    "run": {{"model": "m", "dataset": "d"}}, "training": {{"output_dir": {str(tmp_path)!r}}},
    "logger": {{"wandb": {{"project": "climbing", "timeout_s": 600.0}}}},
}})
asyncio.run(WandbSink(recorded).send({RUN!r}, recipe, 600.0))
"""
    worker = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    silent_server.settimeout(DEADLINE_S)
    connection, _ = silent_server.accept()
    sessions = sessions_of(tmp_path)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    _, alive = psutil.wait_procs(sessions, timeout=DEADLINE_S)
    connection.close()
    assert sessions
    assert alive == []
