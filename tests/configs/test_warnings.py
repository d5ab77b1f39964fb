"""Combinations that are valid and surprise are told; the recipes that come with Onbelay have none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import load_recipe, packaged_recipes
from configs.recipe import Recipe
from configs.warnings import warnings_of


def recipe(failure: dict[str, Any], prompts: int = 4, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"model": "m", "dataset": "d"},
            "grpo": {"num_prompts_per_step": prompts},
            "failure": failure,
            **sections,
        }
    )


@pytest.mark.parametrize("name", packaged_recipes())
def test_recipes_that_come_with_onbelay_do_not_surprise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ONBELAY_DSN", "TEMPORAL_API_KEY"):
        monkeypatch.setenv(variable, "postgresql://u:p@db/ledger")
    assert warnings_of(load_recipe(name)) == []


def test_a_floor_that_makes_a_drop_budget_useless_is_told_with_the_fraction_that_helps() -> None:
    (told,) = warnings_of(recipe({"max_consecutive_dropped_prompts": 5, "min_step_batch_fraction": 1.0}))
    assert "failure.max_consecutive_dropped_prompts (5) cannot be used" in told
    assert "the first dropped group ends the run" in told
    assert "to 0.75 or less" in told
    assert warnings_of(recipe({"max_consecutive_dropped_prompts": 5, "min_step_batch_fraction": 0.75})) == []
    assert warnings_of(recipe({"min_step_batch_fraction": 1.0})) == []


@given(prompts=st.integers(2, 600), fraction=st.floats(0.001, 1.0))
def test_the_fraction_that_is_named_lets_a_group_go(prompts: int, fraction: float) -> None:
    failure = {"max_skipped_prompts": 1, "min_step_batch_fraction": fraction}
    for told in warnings_of(recipe(failure, prompts)):
        named = float(told.partition("Lower the fraction to ")[2].partition(" ")[0])
        assert 0 < named < 1
        assert warnings_of(recipe({**failure, "min_step_batch_fraction": named}, prompts)) == []


def test_a_step_of_one_group_cannot_shrink() -> None:
    (told,) = warnings_of(recipe({"max_skipped_prompts": 1, "min_step_batch_fraction": 0.1}, prompts=1))
    assert "num_prompts_per_step is 1" in told


def test_replacing_without_a_budget_is_told_for_each_kind_of_failure() -> None:
    replace = {"on_dropped_prompt": "replace"}
    assert len(warnings_of(recipe(replace))) == 2
    (told,) = warnings_of(recipe({**replace, "max_consecutive_dropped_prompts": 3}))
    assert "failure.max_skipped_prompts is 0" in told
    assert warnings_of(recipe({**replace, "max_consecutive_dropped_prompts": 3, "max_skipped_prompts": 3})) == []


def test_parking_longer_than_histories_are_kept_is_told_for_the_embedded_service_only() -> None:
    park = {"on_dropped_prompt": "park", "park_timeout_s": 2 * 86_400 + 1}
    (told,) = warnings_of(recipe(park, temporal={"retention_days": 2}))
    assert "temporal.retention_days (2)" in told
    assert warnings_of(recipe(park, temporal={"retention_days": 3})) == []
    assert warnings_of(recipe(park, temporal={"retention_days": 2, "address": "t:7233"})) == []
