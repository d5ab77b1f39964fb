"""What the trainer never calls is not imported with Megatron-core, and is there for everybody else."""

import importlib
import sys

import pytest
import torch

from activities.training.lean_import import lean_import


def double(value: int) -> int:
    return value * 2


def test_where_cuda_is_present_everything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    real = torch.compile
    with lean_import():
        assert torch.compile is real


def test_functions_stay_as_they_are_written() -> None:
    real = torch.compile
    with lean_import():
        assert torch.compile(double) is double
        assert torch.compile(dynamic=True)(double) is double
    assert torch.compile is real


def test_the_client_that_is_not_used_is_missing_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with lean_import(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("wandb")
    assert "wandb" not in sys.modules


def test_a_client_that_is_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", sys)
    with lean_import():
        assert importlib.import_module("wandb") is sys
    assert sys.modules["wandb"] is sys
