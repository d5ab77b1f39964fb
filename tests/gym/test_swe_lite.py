"""Repository repair: tasks can be solved and only by solving them; nothing of a command is left running."""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.environments.paths import repository_root
from workers.gym.swe_lite import shell
from workers.gym.swe_lite.workspace import Workspace, WorkspaceClosed, Workspaces, inside

PATIENCE_S = 120.0
TASKS_FILE = repository_root() / "workers/gym/swe_lite/tasks.jsonl"
TASKS: list[dict[str, Any]] = [json.loads(line) for line in TASKS_FILE.read_text().splitlines()]
REPAIRS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("repairs.json").read_text())


@pytest.fixture
def workspaces(tmp_path: Path) -> Workspaces:
    return Workspaces(tmp_path, max_output_chars=1000)


@pytest.fixture
async def workspace(workspaces: Workspaces) -> Workspace:
    return await workspaces.open("run/step-0/group-0/rollout-0", {"src/code.py": "print('hello')\n"})


async def until_gone(*argv: str) -> None:
    """A process that was killed is there until the kernel has come to it."""
    async with asyncio.timeout(PATIENCE_S):
        while list(argv) in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]:
            await asyncio.sleep(0.02)


async def test_the_tool_runs_in_the_repository(workspace: Workspace) -> None:
    result = await workspace.bash("python src/code.py; exit 3", timeout_s=PATIENCE_S)
    assert result == shell.Result(3, "hello\n")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["task_id"])
async def test_a_task_is_solved_by_its_repair_and_not_before(workspaces: Workspaces, task: dict[str, Any]) -> None:
    broken = await workspaces.open("a", task["repo_files"])
    repaired = await workspaces.open("b", task["repo_files"] | REPAIRS[task["task_id"]])
    assert (await broken.test(task["hidden_test"], timeout_s=PATIENCE_S)).returncode == 1
    assert (await repaired.test(task["hidden_test"], timeout_s=PATIENCE_S)).returncode == 0


def test_there_are_tasks_and_none_shows_its_test() -> None:
    assert len({task["task_id"] for task in TASKS}) >= 8
    assert all("Hidden" not in json.dumps(task["repo_files"]) for task in TASKS)


async def test_the_repository_cannot_replace_the_test_library(workspaces: Workspaces) -> None:
    cheating = await workspaces.open(
        "a", {"unittest.py": "def main(): pass\nclass TestCase: pass\n", "paginate.py": ""}
    )
    assert (await cheating.test(TASKS[0]["hidden_test"], timeout_s=PATIENCE_S)).returncode == 1


async def test_a_command_ends_at_its_deadline_with_all_its_children(workspace: Workspace) -> None:
    for timeout_s in (0.5, 5.0, PATIENCE_S):  # where the machine is busy it needs longer to say that it started
        result = await workspace.bash("sleep 987 & echo started; sleep 987", timeout_s=timeout_s)
        assert result.returncode == shell.TIMEOUT_RETURNCODE
        if result.output.startswith("started"):
            break
    assert result.output.startswith("started")
    await until_gone("sleep", "987")


async def test_a_background_process_does_not_outlive_its_command(workspace: Workspace) -> None:
    result = await workspace.bash("sleep 986 & echo done", timeout_s=PATIENCE_S)
    assert result == shell.Result(0, "done\n")
    await until_gone("sleep", "986")


async def test_long_output_keeps_its_beginning_and_its_end(workspace: Workspace) -> None:
    result = await workspace.bash("echo first; seq 100000; echo last", timeout_s=PATIENCE_S)
    assert len(result.output) < 1100
    assert result.output.startswith("first\n1\n")
    assert result.output.endswith("100000\nlast\n")
    assert "bytes left out" in result.output


async def test_a_later_attempt_gets_the_same_path_and_shuts_out_the_earlier(workspaces: Workspaces) -> None:
    first = await workspaces.open("run/rollout-0", {"a.txt": "1"})
    running = asyncio.create_task(first.bash("echo 2 > a.txt; sleep 985", timeout_s=PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        while (first.folder / "a.txt").read_text() != "2\n":
            await asyncio.sleep(0.01)
    second = await workspaces.open("run/rollout-0", {"a.txt": "1"})
    assert second.folder == first.folder
    assert (second.folder / "a.txt").read_text() == "1"
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(WorkspaceClosed, match="session_lost"):
        await first.bash("ls", timeout_s=1)
    await workspaces.close(first)
    assert second.folder.exists()
    await workspaces.close(second)
    assert not second.folder.exists()


async def test_outputs_are_the_same_in_another_attempt(workspaces: Workspaces) -> None:
    command = "python -c \"print(object(), {'b', 'a'})\"; pwd; python -m unittest 2>&1"
    outputs = []
    for _ in range(2):
        workspace = await workspaces.open("run/rollout-0", {"a.py": ""})
        outputs.append((await workspace.bash(command, timeout_s=PATIENCE_S)).output)
    assert outputs[0] == outputs[1]
    assert "object object at 0x0" in outputs[0]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "."])
def test_a_repository_file_stays_in_the_repository(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not inside"):
        inside(tmp_path, name)


async def test_a_rollout_id_that_is_no_folder_name_is_refused(workspaces: Workspaces) -> None:
    with pytest.raises(ValueError, match="not a usable folder name"):
        await workspaces.open("../../etc", {"a": ""})
