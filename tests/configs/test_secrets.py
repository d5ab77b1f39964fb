"""Secrets come from the environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.load import load_recipe
from configs.secrets import escape, expand
from tests.configs.conftest import Problems, WriteRecipe


def test_a_variable_is_put_into_a_secret(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_PASSWORD", "hush")

    recipe = load_recipe(write_recipe("storage: {dsn: 'postgresql://u:${PG_PASSWORD}@h/d'}\n"))

    assert recipe.storage.dsn is not None
    assert recipe.storage.dsn.get_secret_value() == "postgresql://u:hush@h/d"


def test_a_variable_that_is_not_set_is_named(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)

    [problem] = problems("temporal: {api_key: '${NO_SUCH_KEY}'}\n")

    assert "`temporal.api_key` refers to the environment variable NO_SUCH_KEY, which is not set" in problem


def test_an_override_can_refer_to_a_variable(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "hush")

    recipe = load_recipe(write_recipe(), ["temporal.api_key=${KEY}"])

    assert recipe.temporal.api_key is not None
    assert recipe.temporal.api_key.get_secret_value() == "hush"


def test_other_keys_are_taken_as_they_stand(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "hush")

    assert load_recipe(write_recipe(), ["generation.model_name=${KEY}"]).generation.model_name == "${KEY}"


def test_the_production_recipe_asks_for_its_two_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONBELAY_DSN", "TEMPORAL_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(ConfigError) as caught:
        load_recipe("swebench_30b")

    assert len(caught.value.problems) == 2


@given(st.text())
def test_an_escaped_text_expands_to_itself(text: str) -> None:
    assert expand(escape(text), {}) == text
