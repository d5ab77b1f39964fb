"""A run is read with the recipe that the ledger has now, and only with the dataset that it was started with."""

from pathlib import Path
from typing import Any

import pytest

from activities.rollouts.dataset import DatasetError
from activities.run_context import RunContexts
from storage.errors import UnknownRun
from storage.ledger import Ledger
from tests.activities.world import start_run

pytestmark = pytest.mark.integration


async def test_context_has_the_recipe_and_rows_of_the_run(ledger: Ledger, dataset: Path, tmp_path: Path) -> None:
    run_id = await start_run(ledger, dataset, tmp_path, grpo={"seed": 7})
    context = await RunContexts(ledger).of(run_id)
    assert context.recipe.grpo.seed == 7
    assert context.row("train", 2)["prompt_id"] == "safe-2"


async def test_context_is_loaded_once(ledger: Ledger, dataset: Path, tmp_path: Path) -> None:
    contexts = RunContexts(ledger)
    run_id = await start_run(ledger, dataset, tmp_path)
    first = await contexts.of(run_id)
    dataset.write_text("")
    assert await contexts.of(run_id) is first


async def change(ledger: Ledger, run_id: str, section: str, **changes: Any) -> None:
    """Write other values into a section of the stored recipe."""
    recipe = dict((await ledger.runs.get(run_id)).recipe)
    stored = recipe[section]
    assert isinstance(stored, dict)
    await ledger.runs.change_recipe(run_id, recipe | {section: stored | changes})


async def test_changed_recipe_is_noticed_and_the_dataset_is_not_scanned_again(
    ledger: Ledger, dataset: Path, tmp_path: Path
) -> None:
    contexts = RunContexts(ledger)
    run_id = await start_run(ledger, dataset, tmp_path)
    before = await contexts.of(run_id)
    dataset.write_text("")
    await change(ledger, run_id, "failure", max_skipped_prompts=7)
    after = await contexts.of(run_id)
    assert (before.recipe.failure.max_skipped_prompts, after.recipe.failure.max_skipped_prompts) == (0, 7)
    assert after.train is before.train
    assert await contexts.of(run_id) is after


async def test_recipe_with_another_path_for_the_same_dataset_has_it_scanned(
    ledger: Ledger, dataset: Path, tmp_path: Path
) -> None:
    contexts = RunContexts(ledger)
    run_id = await start_run(ledger, dataset, tmp_path)
    await contexts.of(run_id)
    moved = dataset.rename(tmp_path / "moved.jsonl")
    await change(ledger, run_id, "run", dataset=str(moved))
    assert (await contexts.of(run_id)).row("train", 0)["prompt_id"] == "safe-0"
    moved.write_text(moved.read_text().replace("climb", "fall!", 1))
    other = moved.rename(tmp_path / "other.jsonl")
    await change(ledger, run_id, "run", dataset=str(other))
    with pytest.raises(DatasetError, match=r"other\.jsonl: the file changed since"):
        await contexts.of(run_id)


async def test_changed_dataset_is_refused(ledger: Ledger, dataset: Path, tmp_path: Path) -> None:
    run_id = await start_run(ledger, dataset, tmp_path)
    before = dataset.read_text()
    dataset.write_text(before.replace("climb", "fall!", 1))
    contexts = RunContexts(ledger)
    with pytest.raises(DatasetError, match=f"changed since run {run_id} was started"):
        await contexts.of(run_id)
    dataset.write_text(before)
    assert (await contexts.of(run_id)).row("train", 0)["prompt_id"] == "safe-0"


async def test_unknown_run_is_refused(ledger: Ledger) -> None:
    with pytest.raises(UnknownRun):
        await RunContexts(ledger).of("nobody")


async def test_run_without_a_validation_dataset_evaluates_nothing(
    ledger: Ledger, dataset: Path, tmp_path: Path
) -> None:
    context = await RunContexts(ledger).of(await start_run(ledger, dataset, tmp_path))
    with pytest.raises(DatasetError, match=r"run\.validation_dataset is not set"):
        context.dataset("validation")


async def test_validation_rows_are_those_of_their_own_file(ledger: Ledger, dataset: Path, tmp_path: Path) -> None:
    validation = tmp_path / "validation.jsonl"
    validation.write_text(dataset.read_text().replace("safe-0", "held-out"))
    run = {"model": tmp_path / "model", "dataset": dataset, "validation_dataset": validation}
    context = await RunContexts(ledger).of(await start_run(ledger, dataset, tmp_path, run=run))
    assert context.row("validation", 0)["prompt_id"] == "held-out"
    assert context.row("train", 0)["prompt_id"] == "safe-0"
