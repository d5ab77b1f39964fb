"""The activities of the default queue behind an operator's requests: the audit, the drop counters, the live recipe."""

import copy
from typing import Any

from pydantic import JsonValue, ValidationError
from temporalio import activity

from activities.errors import RecipeRefused, surfaced
from configs import keys, overrides, problems
from configs.overrides import Override
from configs.recipe import Recipe
from storage.ledger import Ledger
from storage.records import ActionRecord
from workflows.messages import BudgetState, ChangeRecipe, ReadBudgets, RecordAction


class OperatorActivities:
    """Thin functions over actions, budgets and the recipe of a run."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @activity.defn
    async def record_action(self, request: RecordAction) -> None:
        """Write an operator's request and what became of it."""
        with surfaced(boundary="ledger", run_id=request.run_id):
            await self._ledger.actions.record(ActionRecord(**request.model_dump()))

    @activity.defn
    async def read_budgets(self, request: ReadBudgets) -> BudgetState:
        """The drop counters as they are."""
        with surfaced(boundary="ledger", run_id=request.run_id):
            counts = await self._ledger.budgets.of(request.run_id)
            return BudgetState(consecutive_drops=counts.consecutive_drops, skipped_prompts=counts.skipped_prompts)

    @activity.defn
    async def change_recipe(self, request: ChangeRecipe) -> None:
        """Write new values into the recipe of the run, which stays valid as a whole."""
        with surfaced(boundary="ledger", run_id=request.run_id):
            run = await self._ledger.runs.get(request.run_id)
            changed = _changed(run.recipe, request.changes)
            await self._ledger.runs.change_recipe(request.run_id, changed.model_dump(mode="json"))


def _changed(stored: dict[str, JsonValue], changes: dict[str, JsonValue]) -> Recipe:
    """The recipe with the changes, or RecipeRefused."""
    settings: dict[str, Any] = copy.deepcopy(stored)
    for path, value in changes.items():
        if keys.find(path) is None and not keys.is_free(path):
            raise RecipeRefused(f"The recipe of the run was not changed: {overrides.unknown(path)}")
        overrides.apply(Override(path, value, f"{path}={value}"), settings)
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        found = " ".join(problems.describe(error, lambda _: "The changed recipe"))
        raise RecipeRefused(f"{', '.join(changes)}: the recipe of the run was not changed. {found}") from error
