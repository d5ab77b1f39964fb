"""What the activities of a run share: its recipe as the ledger has it now, and its dataset, unchanged since the start.

The recipe of the run decides what is done; the recipe of the worker says where the servers are.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from activities.rollouts.dataset import Dataset, DatasetError, scan
from configs.recipe import Recipe
from storage.ledger import Ledger
from storage.records import RunRecord
from workflows.messages import Purpose


@dataclass(frozen=True)
class RunContext:
    """One run: its recipe and scanned datasets."""

    recipe: Recipe
    train: Dataset
    validation: Dataset | None

    def dataset(self, purpose: Purpose) -> Dataset:
        """The dataset of a purpose; DatasetError when the run has none."""
        if purpose != "validation":
            return self.train
        if self.validation is None:
            raise DatasetError("run.validation_dataset is not set, so there is nothing to evaluate")
        return self.validation

    def row(self, purpose: Purpose, index: int) -> dict[str, Any]:
        """Row `index` of a dataset."""
        return self.dataset(purpose).row(index)


@dataclass(frozen=True)
class _Loaded:
    """A context, and the stored recipe that it was made of."""

    stored: Mapping[str, JsonValue]
    context: RunContext


class RunContexts:
    """Contexts by run. A dataset is scanned once in a process; a recipe is read again when the ledger has another."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._loaded: dict[str, _Loaded] = {}
        self._lock = asyncio.Lock()

    async def of(self, run_id: str) -> RunContext:
        """The context of a run.

        Raises:
            UnknownRun: the ledger does not know the run.
            DatasetError: the dataset is unreadable, or not the one the run was started with.
        """
        record = await self._ledger.runs.get(run_id)
        async with self._lock:
            loaded = self._loaded.get(run_id)
            if loaded is None or loaded.stored != record.recipe:
                context = await _load(record, None if loaded is None else loaded.context)
                loaded = self._loaded[run_id] = _Loaded(record.recipe, context)
            return loaded.context


async def _load(record: RunRecord, before: RunContext | None) -> RunContext:
    recipe = Recipe.model_validate(record.recipe)
    train = await _scanned(recipe.run.dataset, before and before.train)
    if train.digest != record.dataset_digest:
        raise DatasetError(
            f"{recipe.run.dataset}: the file changed since run {record.run_id} was started; put the old one back, "
            "or start a new run"
        )
    path: Path | None = recipe.run.validation_dataset
    validation = await _scanned(path, before and before.validation) if path else None
    return RunContext(recipe, train, validation)


async def _scanned(path: Path, before: Dataset | None) -> Dataset:
    """The dataset at `path`; the one before, if it is that."""
    return before if before is not None and before.path == path else await asyncio.to_thread(scan, path)
