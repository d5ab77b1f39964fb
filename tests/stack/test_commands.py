"""The commands of the stack where none is up: what they say, and their exit codes."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from workers.cli.main import app


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder without a stack, and without environments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONBELAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("ONBELAY_VENVS", str(tmp_path))


def onbelay(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_status_without_a_stack_says_so_and_exits_with_1() -> None:
    result = onbelay("status")
    assert (result.exit_code, "no stack was started in" in result.output) == (1, True)
    assert json.loads(onbelay("status", "--json").output) == {"phase": "down", "resident_bytes": 0, "services": []}


def test_down_without_a_stack_is_no_error() -> None:
    result = onbelay("down")
    assert (result.exit_code, "no stack is up" in result.output) == (0, True)


def test_logs_of_an_unknown_service_name_the_known_ones(tmp_path: Path) -> None:
    logs = tmp_path / "state" / "logs"
    logs.mkdir(parents=True)
    (logs / "gym.log").write_text("first\nsecond\n")
    assert onbelay("logs", "gym", "-n", "1").output == "second\n"
    result = onbelay("logs", "gmy")
    assert (result.exit_code, "gmy: there is no such log. Logs exist for: gym." in result.output) == (2, True)


def test_up_names_a_port_in_use_and_the_key_and_starts_nothing(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {model: model, dataset: rows.jsonl}\nstorage: {dsn: postgresql://u:p@127.0.0.1:1/ledger}\n")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = onbelay("up", str(recipe), f"temporal.embedded_port={port}")
    assert result.exit_code == 1
    assert f"Port {port} on 127.0.0.1 is in use by process" in result.output
    assert "temporal.embedded_port" in result.output
    assert not (tmp_path / "state" / "state.json").exists()


def test_up_with_a_wrong_key_exits_with_2() -> None:
    result = onbelay("up", "demo", "storage.embeded_port=1")
    assert (result.exit_code, "embedded_port" in result.output) == (2, True)


def test_doctor_without_a_stack_says_what_to_do_and_exits_with_1() -> None:
    result = onbelay("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(result.output)}
    assert result.exit_code == 1
    assert findings["Python"]["ok"]
    assert "make setup" in findings["gym environment"]["text"]
    for name in ("PostgreSQL", "Temporal", "vLLM", "NeMo-Gym", "workers"):
        assert not findings[name]["ok"]
        assert "onbelay up" in findings[name]["text"]


def test_doctor_names_a_server_of_the_recipe_that_does_not_answer(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {model: model, dataset: rows.jsonl}\nstorage: {dsn: postgresql://u:p@127.0.0.1:1/ledger}\n")
    result = onbelay("doctor", str(recipe))
    assert result.exit_code == 1
    assert "FAIL PostgreSQL: The ledger (PostgreSQL at 127.0.0.1:1/ledger) is not available" in result.output
