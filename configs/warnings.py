"""Combinations of keys that are valid and do not do what one would expect. Pure; `config validate` prints them."""

import math

from configs.failure import floor_of
from configs.recipe import Recipe

_DAY_S = 86_400


def warnings_of(recipe: Recipe) -> list[str]:
    """One paragraph for each combination: the keys, what happens, and what to do."""
    return [*_floor_beats_budget(recipe), *_nothing_is_replaced(recipe), *_parked_longer_than_kept(recipe)]


def _floor_beats_budget(recipe: Recipe) -> list[str]:
    failure, prompts = recipe.failure, recipe.grpo.num_prompts_per_step
    floor = floor_of(prompts, failure.min_step_batch_fraction)
    budgets = {
        "max_consecutive_dropped_prompts": failure.max_consecutive_dropped_prompts,
        "max_skipped_prompts": failure.max_skipped_prompts,
    }
    allowed = [f"failure.{name} ({limit})" for name, limit in budgets.items() if limit]
    if failure.on_dropped_prompt != "shrink" or floor < prompts or not allowed:
        return []
    if prompts == 1:
        return [
            f"{' and '.join(allowed)} cannot be used: grpo.num_prompts_per_step is 1, and a step without a group does "
            "not train, so the first dropped group ends the run. Set failure.on_dropped_prompt to replace or park."
        ]
    highest = math.floor((prompts - 1) / prompts * 1000) / 1000
    return [
        f"{' and '.join(allowed)} cannot be used: a step needs {floor} of its {prompts} groups "
        f"(failure.min_step_batch_fraction {failure.min_step_batch_fraction:g}), so the first dropped group ends the "
        f"run. Lower the fraction to {highest:g} or less, or set failure.on_dropped_prompt to replace or park."
    ]


def _nothing_is_replaced(recipe: Recipe) -> list[str]:
    failure = recipe.failure
    if failure.on_dropped_prompt != "replace":
        return []
    kinds = {
        "max_consecutive_dropped_prompts": ("infrastructure", failure.max_consecutive_dropped_prompts),
        "max_skipped_prompts": ("data", failure.max_skipped_prompts),
    }
    return [
        f"failure.on_dropped_prompt is replace, but failure.{name} is 0: a group that is dropped for {kind} failures "
        "ends the run before it is replaced. Raise it."
        for name, (kind, limit) in kinds.items()
        if limit == 0
    ]


def _parked_longer_than_kept(recipe: Recipe) -> list[str]:
    failure, temporal = recipe.failure, recipe.temporal
    if failure.on_dropped_prompt != "park" or temporal.address is not None:
        return []
    if failure.park_timeout_s <= temporal.retention_days * _DAY_S:
        return []
    return [
        f"failure.park_timeout_s ({failure.park_timeout_s:g}, {failure.park_timeout_s / _DAY_S:.1f} days) exceeds "
        f"temporal.retention_days ({temporal.retention_days}): while a group waits, the histories of the groups that "
        "ended beside it are forgotten. Raise the retention, or park for a shorter time."
    ]
