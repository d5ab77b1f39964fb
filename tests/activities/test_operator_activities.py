"""What stands behind an operator's request: the audit, the counters, and a recipe that stays valid as a whole."""

from typing import Any

import pytest

from configs.recipe import Recipe
from tests.activities.world import World, call, failing
from workflows.messages import BudgetState, ChangeRecipe, ReadBudgets, RecordAction

pytestmark = pytest.mark.integration


async def recipe_of(world: World) -> Recipe:
    return Recipe.model_validate((await world.ledger.runs.get(world.run_id)).recipe)


def change(world: World, changes: dict[str, Any]) -> ChangeRecipe:
    return ChangeRecipe(run_id=world.run_id, changes=changes)


async def test_request_is_in_the_audit_once_however_often_it_is_written(world: World) -> None:
    request = RecordAction(
        action_id=f"{world.run_id}#update-1",
        run_id=world.run_id,
        target=world.run_id,
        verb="set_budget",
        actor="ada",
        reason="the cluster was down",
        arguments={"max_skipped_prompts": 3},
        outcome="done",
        detail="max_skipped_prompts 0 -> 3",
    )
    for _ in range(2):
        await call(world.operating.record_action, request)
    (stored,) = await world.ledger.actions.list(world.run_id)
    assert stored.model_dump(exclude={"at"}) == request.model_dump()
    assert stored.at is not None


async def test_counters_are_read_as_they_are(world: World) -> None:
    request = ReadBudgets(run_id=world.run_id)
    assert await call(world.operating.read_budgets, request) == BudgetState()
    await world.drop_group("infra", slot=0)
    await world.drop_group("data", slot=1)
    assert await call(world.operating.read_budgets, request) == BudgetState(consecutive_drops=1, skipped_prompts=1)


async def test_changed_keys_are_in_the_recipe_and_the_others_stay(world: World) -> None:
    before = await recipe_of(world)
    changes = {"failure.max_skipped_prompts": 3, "failure.min_step_batch_fraction": 0.5}
    for _ in range(2):
        await call(world.operating.change_recipe, change(world, changes))
    after = await recipe_of(world)
    assert (after.failure.max_skipped_prompts, after.failure.min_step_batch_fraction) == (3, 0.5)
    assert after.model_copy(update={"failure": before.failure}) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failure.max_skiped_prompts": 3}, "Did you mean `failure.max_skipped_prompts`?"),
        ({"failure.min_step_batch_fraction": 1.5}, "`failure.min_step_batch_fraction` is 1.5, but must be"),
        ({"failure.max_skipped_prompts": "many"}, "`failure.max_skipped_prompts` is 'many', but must be"),
        ({"rollouts.min_valid_rollouts_per_group": 999}, "exceeds grpo.num_generations_per_prompt"),
        ({"failure.park_timeout_s": 5, "grpo.seed.deep": 1}, "unknown key `grpo.seed.deep`"),
    ],
    ids=["unknown key", "out of range", "not a number", "sections disagree", "one of two"],
)
async def test_recipe_that_would_not_be_valid_is_refused_with_its_key_and_stays(
    world: World, changes: dict[str, Any], said: str
) -> None:
    before = (await world.ledger.runs.get(world.run_id)).recipe
    failure, error = await failing(world.operating.change_recipe, change(world, changes))
    assert (failure.failure_class, failure.bucket, error.non_retryable) == ("RecipeRefused", "data", True)
    assert said in failure.cause
    assert (await world.ledger.runs.get(world.run_id)).recipe == before


async def test_recipe_of_an_unknown_run_is_not_changed(world: World) -> None:
    world.run_id = "nobody"
    failure, _ = await failing(world.operating.change_recipe, change(world, {"grpo.seed": 1}))
    assert failure.failure_class == "UnknownRun"
