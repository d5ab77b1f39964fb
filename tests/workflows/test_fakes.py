"""The fakes stand for the real activities: same names, same messages."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workflows import fakes

ROOT = Path(__file__).parents[2]
REAL = ("ledger", "group", "operator", "rollout", "training", "generation")

Signature = tuple[str, str, str]


def activities_in(file: Path) -> Iterator[Signature]:
    """Name, type of the argument, type of the result of every activity in a file (read, so that torch stays out)."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.AsyncFunctionDef) and any(
            ast.unparse(mark) == "activity.defn" for mark in node.decorator_list
        ):
            (argument,) = node.args.args[1:]
            assert argument.annotation
            assert node.returns
            yield node.name, ast.unparse(argument.annotation), ast.unparse(node.returns)


FAKE = set(activities_in(Path(fakes.__file__)))


@pytest.mark.parametrize("part", REAL)
def test_every_activity_has_a_fake_with_the_same_messages(part: str) -> None:
    real = set(activities_in(ROOT / "activities" / f"{part}_activities.py"))
    assert real
    assert real <= FAKE


def test_no_fake_stands_for_nothing() -> None:
    real = {found for part in REAL for found in activities_in(ROOT / "activities" / f"{part}_activities.py")}
    assert real == FAKE


def test_workflows_call_no_activity_that_does_not_exist() -> None:
    """Calls are by name, so nothing else would notice."""
    called = {
        argument.value
        for node in ast.walk(ast.parse((ROOT / "workflows" / "calls.py").read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("workflow.execute_activity", "self._ledger", "self._trainer", "self._generation")
        for argument in node.args[:1]
        if isinstance(argument, ast.Constant)
    }
    assert called == {name for name, _, _ in FAKE}
