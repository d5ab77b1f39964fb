"""Recipe files for tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.load import load_recipe

WriteRecipe = Callable[..., Path]
Problems = Callable[..., list[str]]

REQUIRED = "run: {model: models/policy, dataset: rows.jsonl}\n"


@pytest.fixture
def write_recipe(tmp_path: Path) -> WriteRecipe:
    """Write a recipe with the required keys and the given text after them."""

    def write(text: str = "") -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(REQUIRED + text)
        return path

    return write


@pytest.fixture
def problems(write_recipe: WriteRecipe) -> Problems:
    """What is wrong with a recipe of the given text and overrides."""

    def find(text: str = "", *overrides: str) -> list[str]:
        path = write_recipe(text)
        with pytest.raises(ConfigError) as caught:
            load_recipe(path, overrides)
        return [problem.replace(str(path), "recipe.yaml") for problem in caught.value.problems]

    return find
