"""The policy is made once, appears complete or not at all, and is the same each time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.demo import model, policy, tokenizer, warm_start


@pytest.fixture
def short_warm_start(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One step instead of hundreds; the list grows with each warm start."""
    runs: list[int] = []
    train = warm_start.warm_start

    def short(*arguments: Any) -> None:
        runs.append(1)
        train(*arguments, steps=1)

    monkeypatch.setattr(warm_start, "warm_start", short)
    return runs


def test_the_folder_is_a_model_with_its_tokenizer_and_is_not_made_again(
    tmp_path: Path, short_warm_start: list[int]
) -> None:
    lines: list[str] = []
    policy.make_policy(tmp_path / "policy", lines.append)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    words = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert loaded.config.vocab_size == len(words)
    assert words.chat_template == tokenizer.build_tokenizer().chat_template
    assert any("100 %" in line and "s left" in line for line in lines)

    policy.make_policy(tmp_path / "policy", lines.append)
    assert short_warm_start == [1]
    assert "up to date" in lines[-1]


def test_a_policy_of_an_older_recipe_is_replaced(tmp_path: Path, short_warm_start: list[int]) -> None:
    older = tmp_path / "policy"
    older.mkdir()
    (older / "onbelay_policy.json").write_text('{"digest": "another"}\n')
    (older / "weights.of.then").touch()
    policy.make_policy(older, lambda line: None)
    assert short_warm_start == [1]
    assert (older / "model.safetensors").is_file()
    assert not (older / "weights.of.then").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_failed_warm_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(warm_start, "warm_start", fail)
    with pytest.raises(MemoryError):
        policy.make_policy(tmp_path / "policy", lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(policy.FolderTaken, match="not empty"):
        policy.make_policy(tmp_path, lambda line: None)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_the_warm_start_is_reproducible() -> None:
    words = tokenizer.build_tokenizer()
    networks = [model.build_model(words, seed=0) for _ in range(2)]
    for network in networks:
        warm_start.warm_start(network, words, lambda line: None, steps=2)
    first, second = (torch.cat([p.flatten() for p in network.parameters()]) for network in networks)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.cat([p.flatten() for p in model.build_model(words, seed=0).parameters()]))
