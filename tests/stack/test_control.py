"""Up, status and down of a real stack: embedded PostgreSQL and Temporal, the three workers, and given addresses."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from pydantic import HttpUrl
from typer.testing import CliRunner

from configs.generation import GenerationConfig
from configs.gym import GymConfig
from configs.recipe import Recipe
from configs.run import RunConfig
from configs.storage import StorageConfig
from configs.temporal import TemporalConfig
from tests.stack.children import DEADLINE_S, until
from workers.cli.main import app
from workers.cli.session import session_of
from workers.stack import control
from workers.stack.accounts import server_account, server_folder
from workers.stack.errors import OtherStackIsUp, StackError
from workers.stack.members import stack_members
from workers.stack.processes import MARK, ProcessId, marked, tree
from workers.stack.recipes import StackRecipes, last_asked
from workers.stack.service import Service
from workers.stack.state import ServiceStatus, StackState

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def no_data_left(tmp_path: Path) -> Iterator[None]:
    """Remove the data of PostgreSQL, which may lie outside the state folder."""
    yield
    shutil.rmtree(server_folder(tmp_path, server_account()))


@asynccontextmanager
async def answering_server() -> AsyncIterator[str]:
    """An HTTP server that says 200 to everything: a vLLM or Gym server at a given address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def recipe_with(url: str) -> Recipe:
    return Recipe(
        run=RunConfig(model=Path("model"), dataset=Path("rows.jsonl")),
        generation=GenerationConfig(endpoints=(HttpUrl(url),)),
        gym=GymConfig(agents={"agent": HttpUrl(url)}),
        storage=StorageConfig(embedded_port=0),
        temporal=TemporalConfig(embedded_port=0, embedded_ui_port=0),
    )


async def test_a_stack_comes_up_also_after_a_power_cut_and_goes_down_also_without_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBELAY_STATE_DIR", str(tmp_path))
    said: list[str] = []
    async with answering_server() as url:
        recipe = recipe_with(url)
        try:
            before = await control.up(recipe, tmp_path, said.append)
            assert_all_is_up(before, tmp_path)
            await control.up(recipe, tmp_path, said.append)
            assert said[-1] == "the stack is up already"
            with pytest.raises(OtherStackIsUp, match="onbelay down"):
                await control.up(recipe_with("http://127.0.0.1:1"), tmp_path, said.append)

            await assert_up_alone_starts_the_same_stack_and_names_the_runs_that_are_lost(before, tmp_path)

            state = StackState.load(tmp_path / "state.json")
            assert state is not None
            os.kill(state.supervisor.pid, signal.SIGKILL)
            await until(lambda: control.phase(tmp_path) == "unsupervised")
            assert {service.state for service in control.status(tmp_path) if service.process} == {"leftover"}
            assert control.resolved_recipe(tmp_path) is None
        finally:
            await control.down(tmp_path, said.append)
        assert any(line.startswith("stopping postgres (process ") for line in said)
        assert control.phase(tmp_path) == "down"
        left = [process.pid for process in psutil.process_iter() if str(tmp_path) in " ".join(_command(process))]
        assert left == []


def assert_all_is_up(resolved: Recipe, state_dir: Path) -> None:
    assert resolved == control.resolved_recipe(state_dir)
    assert resolved.storage.dsn is not None
    assert resolved.temporal.address is not None
    assert (state_dir / "recipe.yaml").stat().st_mode & 0o077 == 0
    services = {service.name: service for service in control.status(state_dir)}
    running = {name for name, service in services.items() if service.state == "ready"}
    assert running == {"postgres", "temporal", "rollout-worker", "generation-worker", "trainer-worker"}
    assert all((services[name].resident_bytes or 0) > 2**20 for name in running)
    assert {ip for service in services.values() for ip in _listening_on(service)} == {"127.0.0.1"}


async def assert_up_alone_starts_the_same_stack_and_names_the_runs_that_are_lost(
    before: Recipe, state_dir: Path
) -> None:
    async with session_of(before) as opened:
        await opened.ledger.runs.create("a-run", before.temporal.task_queue, {}, "d", 1, "m")
    killed = kill_everything(state_dir)
    assert len(killed) > 8
    assert control.phase(state_dir) == "down"

    ended = await asyncio.to_thread(CliRunner().invoke, app, ["up", "temporal.retention_days=91"])

    assert ended.exit_code == 0, ended.output
    assert "starting the last stack of this folder again" in ended.output
    assert "run a-run is running in the ledger, but Temporal does not run it" in ended.output
    assert "`onbelay run resume a-run --reason TEXT`" in ended.output
    after = control.resolved_recipe(state_dir)
    assert after is not None
    assert after.temporal.retention_days == 91
    async with session_of(after) as opened:
        assert [run.run_id for run in await opened.ledger.runs.list()] == ["a-run"]


def kill_everything(state_dir: Path) -> list[psutil.Process]:
    """SIGKILL for the supervisor and all that it started."""
    state = StackState.load(state_dir / "state.json")
    assert state is not None
    processes = [
        process
        for identity in (state.supervisor, *(service.process for service in state.services))
        if identity is not None and (root := identity.process()) is not None
        for process in tree(root)
    ]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=DEADLINE_S)
    return list(set(processes))


async def test_what_a_killed_service_left_in_a_session_of_its_own_is_found_and_killed(tmp_path: Path) -> None:
    said: list[str] = []
    stray = await _stray_process(tmp_path)
    assert stray in marked(tmp_path)
    assert stray not in marked(tmp_path / "other")
    stranger = ProcessId.of(stray.pid).model_copy(update={"start": 0})
    StackState(phase="up", supervisor=stranger, services=[]).save(tmp_path / "state.json")

    await control.down(tmp_path, said.append)

    assert not stray.is_running()
    assert said == [f"killing process {stray.pid}, left behind by a service that was killed"]


async def _stray_process(state_dir: Path) -> psutil.Process:
    """A process of a stack whose parent is dead, outside its process group."""
    program = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, start_new_session=True).pid)"
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        env={**os.environ, MARK: str(state_dir.resolve())},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    stray = psutil.Process(int(await parent.stdout.readline()))
    await parent.wait()
    return stray


def test_the_last_recipe_is_that_of_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_with("http://127.0.0.1:1")
    assert last_asked(tmp_path) is None
    StackRecipes.resolve(recipe, tmp_path).save(tmp_path)
    assert last_asked(tmp_path) == recipe
    (tmp_path / "elsewhere").mkdir()
    home = Path.cwd()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(StackError, match=str(home)):
        last_asked(tmp_path)
    (tmp_path / "asked.yaml").write_text("run: {no: such}\n")
    with pytest.raises(StackError, match="onbelay up RECIPE"):
        last_asked(tmp_path)


async def test_a_server_that_does_not_answer_fails_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    async with answering_server() as url:
        gone = recipe_with(url).model_copy(
            update={"generation": GenerationConfig(endpoints=(HttpUrl("http://127.0.0.1:1"),))}
        )
        with pytest.raises(StackError, match=r"No answer from vLLM at http://127\.0\.0\.1:1"):
            await control.up(gone, tmp_path, lambda _: None)
    assert control.phase(tmp_path) == "failed"
    assert all(service.process is None for service in control.status(tmp_path))


async def test_a_model_without_tokenizer_is_named_before_anything_starts(tmp_path: Path) -> None:
    recipe = recipe_with("http://127.0.0.1:1").model_copy(update={"generation": GenerationConfig()})
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"model": tmp_path / "model"})})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(StackError, match=r"run\.model: .* has no tokenizer_config\.json"):
        await control.up(recipe, tmp_path, lambda _: None)
    assert not (tmp_path / "state.json").exists()


def test_recipes_of_a_stack_are_read_back_as_they_were_saved(tmp_path: Path) -> None:
    recipes = StackRecipes.resolve(recipe_with("http://127.0.0.1:1"), tmp_path)
    recipes.save(tmp_path)
    assert StackRecipes.load(tmp_path) == recipes


def test_the_trainer_starts_beside_the_servers_that_it_does_not_need(tmp_path: Path) -> None:
    members = stack_members(StackRecipes.resolve(recipe_with("http://127.0.0.1:1"), tmp_path), tmp_path)
    after = {member.name: set(member.after) for member in members}
    assert after["rollout-worker"] == after["generation-worker"] == {"ledger", "postgres", "temporal", "vllm", "gym"}
    assert after["trainer-worker"] == {"ledger", "temporal"}
    assert after["ledger"] == {"postgres"}


def test_a_rollout_worker_may_use_its_whole_grace_period(tmp_path: Path) -> None:
    recipe = recipe_with("http://127.0.0.1:1")
    recipe = recipe.model_copy(update={"rollouts": recipe.rollouts.model_copy(update={"shutdown_grace_s": 300.0})})
    members = stack_members(StackRecipes.resolve(recipe, tmp_path), tmp_path)
    timeouts = {member.name: member.stop_timeout_s for member in members if isinstance(member, Service)}
    assert timeouts["rollout-worker"] > 300
    assert timeouts["trainer-worker"] < 60


def _listening_on(service: ServiceStatus) -> set[str]:
    """The addresses on which the processes of a service listen."""
    root = service.process.process() if service.process else None
    sockets = [socket for process in (tree(root) if root else []) for socket in process.net_connections(kind="inet")]
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
