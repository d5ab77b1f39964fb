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


def only(**sections: Any) -> list[str]:
    """What is told of a recipe that is otherwise plain."""
    return warnings_of(Recipe.model_validate({"run": {"model": "m", "dataset": "d"}, **sections}))


def test_a_plain_recipe_does_not_surprise() -> None:
    assert only() == []


def test_a_group_of_one_is_told_to_learn_nothing() -> None:
    (told,) = only(grpo={"num_generations_per_prompt": 1}, rollouts={"min_valid_rollouts_per_group": 1})
    assert "grpo.num_generations_per_prompt is 1" in told
    assert "every advantage is 0" in told


def test_dynamic_sampling_that_never_samples_again_is_told() -> None:
    (told,) = only(grpo={"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 1})
    assert "the first group whose rewards are all equal ends the run" in told
    assert only(grpo={"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 2}) == []
    assert only(grpo={"dynamic_sampling_max_gen_batches": 1}) == []


def test_a_cut_distribution_is_told() -> None:
    (told,) = only(rollouts={"top_p": 0.95})
    assert "rollouts.top_p is 0.95" in told
    assert "Set it to 1" in told


def test_a_filter_that_sees_older_versions_is_told() -> None:
    corrected = {"loss_fn": {"use_importance_sampling_correction": True}}
    ahead = {"max_lookahead_versions": 1}
    (told,) = only(grpo={**corrected, "seq_logprob_error_threshold": 1.5}, rollouts=ahead)
    assert "grpo.seq_logprob_error_threshold (1.5) with rollouts.max_lookahead_versions (1)" in told
    assert only(grpo=corrected, rollouts=ahead) == only(grpo={"seq_logprob_error_threshold": 1.5}) == []


def test_weights_of_rows_without_a_bound_are_told() -> None:
    loss = {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
    }
    (told,) = only(grpo={"loss_fn": loss})
    assert "Bound it with truncated_importance_sampling_type tis or icepop" in told
    bounded = {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0}
    assert only(grpo={"loss_fn": loss | bounded}) == []


def test_another_model_server_at_another_temperature_is_told() -> None:
    (told,) = only(rollouts={"evidence": "response", "temperature": 0.7})
    assert "processed_logprobs" in told
    assert only(rollouts={"evidence": "response"}) == only(rollouts={"temperature": 0.7}) == []


def test_rows_that_do_not_fit_a_pass_are_told() -> None:
    (told,) = only(training={"train_micro_batch_tokens": 100, "max_row_tokens": 101})
    assert "training.train_micro_batch_tokens (100) is below training.max_row_tokens (101)" in told
    assert only(training={"train_micro_batch_tokens": 101, "max_row_tokens": 101}) == []


@pytest.mark.parametrize(("every", "period", "kept"), [(15, 10, 30), (4, 6, 12)])
def test_checkpoints_that_are_kept_and_never_written_are_told(every: int, period: int, kept: int) -> None:
    (told,) = only(training={"keep_every": every, "save_period": period})
    assert f"only those of versions that {kept} divides" in told


@pytest.mark.parametrize(("every", "period"), [(0, 10), (20, 10), (5, 10), (10, 10)])
def test_checkpoints_on_the_schedule_are_not_told(every: int, period: int) -> None:
    assert only(training={"keep_every": every, "save_period": period}) == []


def test_a_lone_endpoint_in_quarantine_is_told() -> None:
    (told,) = only(generation={"on_failed_endpoint": "quarantine", "endpoints": ["http://a"]})
    assert "there is only one endpoint" in told
    assert only(generation={"on_failed_endpoint": "quarantine", "endpoints": ["http://a", "http://b"]}) == []
