"""The shape of the repository: its folders, and the length of its files."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CODE_FOLDERS = {"workflows", "activities", "workers", "storage", "configs", "tests"}
OTHER_FOLDERS = {"docs", "benchmarks", ".ci"}
MAX_LINES = 500


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """Files of the repository, without what git ignores; relative to its root."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_top_level_folders_are_the_agreed_ones(files: list[Path]) -> None:
    folders = {file.parts[0] for file in files if len(file.parts) > 1}

    assert folders >= CODE_FOLDERS
    assert folders <= CODE_FOLDERS | OTHER_FOLDERS


def test_no_python_file_is_too_long(files: list[Path]) -> None:
    lengths = {str(file): len((ROOT / file).read_text().splitlines()) for file in files if file.suffix == ".py"}

    assert lengths
    assert {file: length for file, length in lengths.items() if length > MAX_LINES} == {}


def test_every_module_says_what_it_promises(files: list[Path]) -> None:
    modules = [file for file in files if file.suffix == ".py" and file.parts[0] in CODE_FOLDERS - {"tests"}]
    trees = {str(file): ast.parse((ROOT / file).read_text()) for file in modules}
    silent = [file for file, tree in trees.items() if tree.body and not ast.get_docstring(tree)]

    assert silent == []


def test_package_markers_are_empty(files: list[Path]) -> None:
    """They are imported inside the environments of vLLM and NeMo-Gym too."""
    markers = [file for file in files if file.name == "__init__.py"]

    assert markers
    assert [str(file) for file in markers if (ROOT / file).read_text()] == []
