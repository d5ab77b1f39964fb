"""Rows are what NeMo-Gym takes; nothing that is evaluated was trained on."""

import json
from pathlib import Path

import pytest

from workers.demo.dataset import AGENT_NAME, write_datasets
from workers.gym.safe.game import CODES, code_of


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], list[dict]]:
    train, validation = write_datasets(tmp_path_factory.mktemp("data"))
    return _rows(train), _rows(validation)


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_validation_codes_never_occur_in_training(datasets: tuple[list[dict], list[dict]]) -> None:
    train, validation = ({code_of(row["safe_seed"]) for row in rows} for rows in datasets)
    assert not train & validation
    assert len(train | validation) == CODES


def test_prompts_differ_by_row(datasets: tuple[list[dict], list[dict]]) -> None:
    prompts = {row["responses_create_params"]["input"][0]["content"] for row in datasets[0]}
    assert len(prompts) > len(datasets[0]) / 2


def test_no_row_makes_vllm_mask_tokens_by_a_grammar(datasets: tuple[list[dict], list[dict]]) -> None:
    for row in datasets[0] + datasets[1]:
        assert row["agent_ref"] == {"type": "responses_api_agents", "name": AGENT_NAME}
        assert "parallel_tool_calls" not in row["responses_create_params"]
        assert [tool["strict"] for tool in row["responses_create_params"]["tools"]] == [False]


def test_writing_again_gives_the_same_files(tmp_path: Path) -> None:
    before = [path.read_bytes() for path in write_datasets(tmp_path)]
    assert [path.read_bytes() for path in write_datasets(tmp_path)] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.jsonl", "validation.jsonl"]
