"""Going on with a run that Temporal does not run: the ledger alone is enough.

Everything is checked first: the run, the recipe it would go on with, its files, its task queue. The next step is the
first one without recorded metrics; what of it is settled, stored or applied already is used again by the step itself.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from activities.rollouts.dataset import DatasetError, scan
from configs.load import load_recipe, override_recipe
from configs.recipe import Recipe
from storage.records import RunRecord
from workers.cli.levers import Request, finish, refuse, update
from workers.cli.model_files import model_digest
from workers.cli.resume_rules import Difference, differences
from workers.cli.session import Session, addressed, with_addresses
from workers.cli.starting import free_queue, policy_of, start_workflow, without_secrets
from workers.cli.temporal_runs import is_open
from workers.stack.errors import StackError
from workflows.messages import (
    RunInput,
)
from workflows.requests import (
    LeverDone,
    ResumeRun,
)


@dataclass(frozen=True)
class Wanted:
    """What a run is to go on with: a recipe file in place of its own, and overrides."""

    file: str | None
    overrides: Sequence[str]

    @property
    def changes_anything(self) -> bool:
        """Whether another recipe than the run's own may come out."""
        return self.file is not None or bool(self.overrides)


async def resume_run(session: Session, asked: Request, wanted: Wanted) -> tuple[LeverDone, list[Difference]]:
    """Go on with a paused, stopped, failed or lost run; what was done, and what changed in its recipe."""
    run_id = asked.target
    record = await session.ledger.runs.get(run_id)
    if await is_open(session, run_id):
        if wanted.overrides:
            await refuse(
                session,
                asked,
                f"Run {run_id} is {record.state}, and a run in flight keeps its settings (`{wanted.overrides[0]}`): "
                f"stop it first, or see `onbelay run set-budget` and `set-floor`.",
            )
        return await update(session, asked, run_id, "resume", ResumeRun(**asked.by)), []
    recipe = wanted_recipe(session, record, wanted)
    stored = Recipe.model_validate(record.recipe)
    found = differences(stored, recipe, await _same_content(record, stored, recipe))
    next_step = await first_open_step(session, run_id)
    await _refuse_unless_possible(session, asked, record, recipe, found, next_step)
    if asked.dry_run:
        detail = f"Run {run_id} would go on with step {next_step}."
        return await finish(session, asked, "done", record.state, detail), found
    if found:
        await session.ledger.runs.change_recipe(run_id, without_secrets(recipe).model_dump(mode="json"))
    await session.ledger.runs.set_state(run_id, "running")
    await start_workflow(
        session,
        RunInput(run_id=run_id, policy=policy_of(recipe), task_queue=record.task_queue, next_step=next_step),
    )
    return await finish(session, asked, "done", "running", f"Run {run_id} goes on with step {next_step}."), found


async def first_open_step(session: Session, run_id: str) -> int:
    """The first step without recorded metrics."""
    recorded = await session.ledger.steps.metrics(run_id)
    return next(step for step in range(len(recorded) + 1) if step not in recorded)


def wanted_recipe(session: Session, record: RunRecord, wanted: Wanted) -> Recipe:
    """The recipe to go on with, at the addresses of this session."""
    stored = Recipe.model_validate(record.recipe)
    if wanted.file is None:
        return with_addresses(override_recipe(stored, wanted.overrides), session.recipe)
    recipe = addressed(load_recipe(wanted.file, wanted.overrides), wanted.file)
    if recipe.run.id in (None, record.run_id):  # a run whose name was made has none in its recipe
        return recipe.model_copy(update={"run": recipe.run.model_copy(update={"id": stored.run.id})})
    return recipe


async def _refuse_unless_possible(
    session: Session, asked: Request, record: RunRecord, recipe: Recipe, found: Sequence[Difference], next_step: int
) -> None:
    run_id = record.run_id
    refused = [difference for difference in found if difference.refusal is not None]
    if refused:
        reasons = [f"  {one.key}: {one.stored!r} -> {one.wanted!r}: {one.refusal}" for one in refused]
        await refuse(
            session,
            asked,
            "\n".join([f"Run {run_id} ({record.state}) cannot go on with these changes:", *reasons, _NEW_RUN]),
        )
    if record.state == "completed" and recipe.grpo.max_num_steps <= next_step:
        await refuse(
            session,
            asked,
            f"Run {run_id} is complete with {next_step} steps. Give it more steps to go on: grpo.max_num_steps=N.",
        )
    try:
        await asyncio.to_thread(_check_files, record, recipe)
    except (DatasetError, StackError) as error:
        await refuse(session, asked, f"Run {run_id} ({record.state}) cannot go on: {error}")
    await free_queue(session, record.task_queue, but=run_id, dry_run=asked.dry_run)


_NEW_RUN = "Nothing was changed. Start a new run for them, or leave them out."


def _check_files(record: RunRecord, recipe: Recipe) -> None:
    """The files that the run was started with are where its recipe says, unchanged."""
    if scan(recipe.run.dataset).digest != record.dataset_digest:
        raise DatasetError(
            f"run.dataset: {recipe.run.dataset} is not the file that the run was started with, whose rows its prompts "
            "are"
        )
    if model_digest(recipe.run.model) != record.model_digest:
        raise StackError(f"run.model: {recipe.run.model} is not the model that the run was started with.")
    if recipe.run.validation_dataset is not None:
        scan(recipe.run.validation_dataset)


async def _same_content(record: RunRecord, stored: Recipe, wanted: Recipe) -> frozenset[str]:
    """Those paths of the wanted recipe that lead to what the run was started with."""

    def compared() -> frozenset[str]:
        same: set[str] = set()
        if _digest_of(wanted.run.dataset) == record.dataset_digest:
            same.add("run.dataset")
        try:
            if model_digest(wanted.run.model) == record.model_digest:
                same.add("run.model")
        except StackError:
            pass
        # No digest of it is stored: it is not trained on. A file that is gone here may have moved with the run.
        old, new = stored.run.validation_dataset, wanted.run.validation_dataset
        if new is not None and (old is None or _digest_of(old) in (None, _digest_of(new))):
            same.add("run.validation_dataset")
        return frozenset(same)

    return await asyncio.to_thread(compared)


def _digest_of(dataset: Path) -> str | None:
    try:
        return scan(dataset).digest
    except DatasetError:
        return None
