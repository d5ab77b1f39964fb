"""Imports go one way, and what must stay light stays light."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run_lint_imports(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """lint-imports on the packages in `folder`, without its cache."""
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    command = [sys.executable, "-c", program, "--config", str(ROOT / "pyproject.toml"), "--no-cache", *arguments]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, check=False, text=True, timeout=120
    )


def test_import_contracts_hold() -> None:
    result = run_lint_imports(ROOT)

    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken." in result.stdout


def test_a_workflow_that_imports_storage_is_found(tmp_path: Path) -> None:
    for package in ("configs", "workflows", "activities", "storage", "workers"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "workflows" / "training_run.py").write_text("import storage\n")

    result = run_lint_imports(tmp_path, "--contract", "layers")

    assert result.returncode != 0
    assert "workflows.training_run -> storage" in result.stdout


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in memory after a statement in a fresh interpreter."""
    program = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_configuration_loads_neither_torch_nor_vllm_nor_temporal() -> None:
    loaded = loaded_by("from configs.load import load_recipe; load_recipe('demo')")

    assert "configs" in loaded
    assert not loaded & {"torch", "vllm", "temporalio", "sqlalchemy", "numpy", "httpx"}


def test_command_line_starts_without_torch() -> None:
    loaded = loaded_by("import workers.cli.main")

    assert not loaded & {"torch", "vllm", "megatron", "transformers", "matplotlib"}


def test_metrics_are_written_without_torch() -> None:
    assert not loaded_by("import activities.metrics.tensorboard") & {"torch", "tensorflow"}


def test_client_of_wandb_is_in_no_worker() -> None:
    assert "wandb" not in loaded_by("import workers.rollout_worker")
