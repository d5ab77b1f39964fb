"""Resuming runs from the ledger alone, on a real ledger and Temporal service; no worker runs, so nothing moves on."""

import dataclasses
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.load import dump_recipe, override_recipe
from storage.errors import QueueBusy, UnknownRun
from workers.cli.exits import CommandError
from workers.cli.levers import Request, refusing
from workers.cli.resume_rules import Difference
from workers.cli.resuming import Wanted, resume_run
from workers.cli.session import Session
from workers.cli.starting import start_run
from workers.cli.temporal_runs import is_open, known
from workflows.requests import (
    LeverDone,
)

pytestmark = pytest.mark.integration


async def resume(
    session: Session, run_id: str, *overrides: str, file: Path | None = None, dry_run: bool = False
) -> tuple[LeverDone, list[Difference]]:
    asked = Request(run_id, "resume", "ada", "the machine is back", {"overrides": list(overrides)}, dry_run)
    wanted = Wanted(None if file is None else str(file), overrides)
    return await refusing(session, asked, resume_run(session, asked, wanted))


def named(session: Session) -> Session:
    """The session with a name for its run that no other test has: they share one Temporal service."""
    name = f"run.id=run-{uuid.uuid4().hex[:12]}"
    return dataclasses.replace(session, recipe=override_recipe(session.recipe, [name]))


async def ended(session: Session, state: str = "failed", steps: int = 1) -> str:
    """A run that has ended after so many steps."""
    run_id = await start_run(named(session), "demo")
    await session.client.get_workflow_handle(run_id).terminate()
    for step in range(steps):
        await session.ledger.steps.record_metrics(run_id, step, {"train/reward": 0.5})
    if state != "running":
        await session.ledger.runs.set_state(
            run_id, "failed" if state == "failed" else "completed", "a budget is used up"
        )
    return run_id


async def started_with(session: Session, run_id: str) -> dict[str, Any]:
    """The input of the run's newest execution."""
    event = await anext(aiter(session.client.get_workflow_handle(run_id).fetch_history_events()))
    return json.loads(event.workflow_execution_started_event_attributes.input.payloads[0].data)


async def test_a_run_goes_on_with_its_first_unrecorded_step_and_what_may_change(session: Session) -> None:
    run_id = await ended(session)

    done, changes = await resume(session, run_id, "failure.max_skipped_prompts=9", "training.output_dir=/elsewhere")

    assert done.detail == f"Run {run_id} goes on with step 1."
    assert [(one.key, one.wanted) for one in changes] == [
        ("failure.max_skipped_prompts", 9),
        ("training.output_dir", "/elsewhere"),
    ]
    started = await started_with(session, run_id)
    assert (started["next_step"], started["policy"]["failure"]["max_skipped_prompts"]) == (1, 9)
    record = await session.ledger.runs.get(run_id)
    assert record.state == "running"
    training, storage = record.recipe["training"], record.recipe["storage"]
    assert isinstance(training, dict)
    assert isinstance(storage, dict)
    assert (training["output_dir"], storage["dsn"]) == ("/elsewhere", None)
    (action,) = await session.ledger.actions.list(run_id)
    assert (action.verb, action.outcome, action.reason) == ("resume", "done", "the machine is back")


@pytest.mark.parametrize("known_to_temporal", ["closed", "unknown"])
async def test_the_ledger_is_enough_when_temporal_lost_the_run(session: Session, known_to_temporal: str) -> None:
    run_id = await ended(session, state="running")
    if known_to_temporal == "unknown":
        run_id = f"lost-{uuid.uuid4().hex[:12]}"
        record = (await session.ledger.runs.list())[0]
        await session.ledger.runs.set_state(record.run_id, "failed", "it makes room")
        await session.ledger.runs.create(
            run_id, record.task_queue, record.recipe, record.dataset_digest, 1, record.model_digest
        )
    assert await known(session, run_id) == known_to_temporal

    done, changes = await resume(session, run_id)

    assert (done.changed, changes) == (True, [])
    assert await is_open(session, run_id)


async def test_a_dry_run_lists_the_changes_and_starts_nothing(session: Session) -> None:
    run_id = await ended(session)
    done, changes = await resume(session, run_id, "grpo.max_num_steps=7", dry_run=True)
    assert done.detail == f"Run {run_id} would go on with step 1."
    assert [(one.key, one.stored, one.wanted) for one in changes] == [("grpo.max_num_steps", 3, 7)]
    assert (await session.ledger.runs.get(run_id)).state == "failed"
    assert not await is_open(session, run_id)
    assert await session.ledger.actions.list(run_id) == []


async def test_changes_that_would_corrupt_the_run_are_all_named_and_nothing_is_changed(session: Session) -> None:
    run_id = await ended(session)
    before = await session.ledger.runs.get(run_id)

    with pytest.raises(CommandError) as refusal:
        await resume(session, run_id, "training.lr=1", "grpo.seed=7", "failure.max_skipped_prompts=9")

    said = str(refusal.value)
    assert "training.lr: 0.0002 -> 1.0: steps that are applied again" in said
    assert "grpo.seed: 42 -> 7: it is the order of the prompts" in said
    assert "max_skipped_prompts" not in said
    assert await session.ledger.runs.get(run_id) == before
    assert [action.outcome for action in await session.ledger.actions.list(run_id)] == ["refused"]


async def test_files_may_move_with_the_run_but_not_change(session: Session, tmp_path: Path) -> None:
    run_id = await ended(session)
    moved = tmp_path / "moved"
    shutil.copytree(session.recipe.run.model, moved / "model")
    for file in (session.recipe.run.dataset, session.recipe.run.validation_dataset):
        assert file is not None
        shutil.move(file, moved / file.name)
    paths = [
        f"run.model={moved / 'model'}",
        f"run.dataset={moved / 'train.jsonl'}",
        f"run.validation_dataset={moved / 'validation.jsonl'}",
    ]

    with pytest.raises(CommandError, match=r"train\.jsonl"):
        await resume(session, run_id)
    _, changes = await resume(session, run_id, *paths, dry_run=True)
    assert [one.key for one in changes] == ["run.model", "run.dataset", "run.validation_dataset"]

    (moved / "train.jsonl").write_text((moved / "train.jsonl").read_text() * 2)
    with pytest.raises(CommandError, match=r"run\.dataset: .*rows of the old file"):
        await resume(session, run_id, *paths)
    shutil.copy(moved / "validation.jsonl", moved / "train.jsonl")
    (moved / "model" / "config.json").write_text('{"other": 1}')
    with pytest.raises(CommandError, match=r"run\.model: .*another model"):
        await resume(session, run_id, *paths)


async def test_another_machine_gives_other_addresses(session: Session) -> None:
    run_id = await ended(session)
    there = dataclasses.replace(
        session,
        recipe=override_recipe(
            session.recipe,
            ['generation.endpoints=["http://10.0.0.7:8000"]', 'gym={"agents": {"safe_agent": "http://10.0.0.7:1"}}'],
        ),
    )
    _, changes = await resume(there, run_id, dry_run=True)
    assert [one.key for one in changes] == ["generation.endpoints", "gym.agents"]

    elsewhere = dataclasses.replace(session, recipe=override_recipe(session.recipe, ["temporal.task_queue=other"]))
    with pytest.raises(CommandError, match=r"temporal\.task_queue: .* bound to its task queue"):
        await resume(elsewhere, run_id)


async def test_a_recipe_file_takes_the_place_of_the_runs_own(session: Session, tmp_path: Path) -> None:
    run_id = await ended(session)
    file = tmp_path / "wanted.yaml"
    wanted = override_recipe(session.recipe, ["failure.max_skipped_prompts=11"])
    file.write_text(dump_recipe(wanted, reveal_secrets=True))
    _, changes = await resume(session, run_id, "grpo.max_num_steps=8", file=file)
    assert [(one.key, one.wanted) for one in changes] == [
        ("grpo.max_num_steps", 8),
        ("failure.max_skipped_prompts", 11),
    ]


async def test_what_cannot_be_resumed_says_why(session: Session) -> None:
    with pytest.raises(CommandError, match="nope"):
        await resume(session, "nope")
    with pytest.raises(UnknownRun):
        await session.ledger.runs.get("nope")
    run_id = await ended(session, "completed", steps=3)
    with pytest.raises(CommandError, match=r"complete with 3 steps.*grpo\.max_num_steps"):
        await resume(session, run_id)
    with pytest.raises(CommandError, match="complete with 3 steps"):
        await resume(session, run_id, "grpo.max_num_steps=3")
    with pytest.raises(ConfigError, match="max_num_steps"):
        await resume(session, run_id, "grpo.max_num_steps=none")
    other = await start_run(named(session), "demo")
    with pytest.raises(CommandError, match=f"in use by run '{other}'") as busy:
        await resume(session, run_id, "grpo.max_num_steps=9")
    assert isinstance(busy.value.__context__, QueueBusy)
    with pytest.raises(CommandError, match="a run in flight keeps its settings"):
        await resume(session, other, "grpo.max_num_steps=9")
    await session.client.get_workflow_handle(other).terminate()
