"""Exit codes and texts of commands that need no server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workers.cli.main import app


def onbelay(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an empty folder."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "workers.cli.main", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [(["run", "list"], 1, "onbelay up RECIPE"), (["config", "validate", "demo"], 0, "valid")],
)
def test_a_command_is_a_process_that_ends_with_its_exit_code(
    tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    ended = onbelay(tmp_path, *arguments)
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr
    assert text in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nonsense"], 2, "No such command"),
        (["run", "start"], 2, "Missing argument"),
        (["run", "start", "demo", "grpo.num_prompt_per_step=4"], 2, "Did you mean `grpo.num_prompts_per_step`"),
        (["run", "start", "no_such_recipe"], 2, "does not exist"),
        (["run", "start", "demo"], 1, "onbelay up demo"),
        (["demo", "--json", "missing/summary.json"], 2, "the folder missing does not exist"),
        (["config", "validate", "demo", "failure.min_step_batch_fraction=1"], 0, "warning: failure.max_consecutive"),
    ],
)
def test_a_command_ends_with_its_exit_code_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, arguments)
    assert (ended.exit_code, type(ended.exception) in (SystemExit, type(None))) == (code, True), ended.output
    assert text in ended.output


def test_servers_that_do_not_answer_are_named(tmp_path: Path) -> None:
    recipe = {
        "run": {"model": "m", "dataset": "d"},
        "storage": {"dsn": "postgresql://a:b@127.0.0.1:1/x"},
        "temporal": {"address": "127.0.0.1:2"},
        "generation": {"endpoints": ["http://127.0.0.1:3"]},
        "gym": {"agents": {"a": "http://127.0.0.1:4"}},
    }
    file = tmp_path / "there.yaml"
    file.write_text(json.dumps(recipe))
    ended = CliRunner().invoke(app, ["run", "list", "--recipe", str(file)])
    assert (ended.exit_code, type(ended.exception)) == (1, SystemExit), ended.output
    assert "127.0.0.1:1" in ended.stderr
    assert "storage.dsn" in ended.stderr
