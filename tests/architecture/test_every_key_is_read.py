"""A key of the configuration that no code reads is a promise that nobody keeps."""

import ast
from pathlib import Path

import pytest

from configs.keys import PLACEHOLDER, all_keys

ROOT = Path(__file__).parent.parent.parent
READERS = ("workflows", "activities", "storage", "workers")

LEAVES = [key.path for key in all_keys() if not key.is_block and key.name != PLACEHOLDER]


def attributes_read(source: str) -> set[str]:
    """Names that appear as `something.name` in a source text."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.ctx, ast.Load)}


def attributes_read_by_properties(source: str) -> set[str]:
    """The same within `@property` functions: a section may derive one value from several keys."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    properties = (node for node in functions if any(ast.unparse(mark) == "property" for mark in node.decorator_list))
    return {name for node in properties for name in attributes_read(ast.unparse(node))}


@pytest.fixture(scope="module")
def names_read() -> set[str]:
    """Attribute names that the code reads."""
    sources = [file.read_text() for folder in READERS for file in (ROOT / folder).rglob("*.py")]
    sections = [file.read_text() for file in (ROOT / "configs").glob("*.py")]
    return set().union(*map(attributes_read, sources), *map(attributes_read_by_properties, sections))


@pytest.mark.parametrize("path", LEAVES)
def test_key_is_read(path: str, names_read: set[str]) -> None:
    assert path.rpartition(".")[2] in names_read


def test_a_key_that_nothing_reads_is_found() -> None:
    assert "lr" not in attributes_read("training.lr_warmup_steps; lr = 3; config.lr = 4")
    assert "lr" in attributes_read("training.lr * 2")
