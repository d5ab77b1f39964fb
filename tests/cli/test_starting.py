"""Starting runs against a real ledger and Temporal service; no worker runs, so nothing moves on."""

import dataclasses
from pathlib import Path

import pytest

from activities.rollouts.dataset import DatasetError
from configs.load import override_recipe
from storage.errors import QueueBusy, RunExists
from workers.cli.model_files import model_digest
from workers.cli.session import Session
from workers.cli.starting import start_run
from workers.cli.temporal_runs import is_open
from workers.stack.errors import StackError

pytestmark = pytest.mark.integration


def with_overrides(session: Session, *overrides: str) -> Session:
    return dataclasses.replace(session, recipe=override_recipe(session.recipe, overrides))


async def close(session: Session, run_id: str) -> None:
    await session.client.get_workflow_handle(run_id).terminate()


async def test_a_started_run_is_in_the_ledger_without_secrets_and_its_workflow_is_open(session: Session) -> None:
    run_id = await start_run(session, "demo")

    record = await session.ledger.runs.get(run_id)
    assert run_id.startswith("demo-")
    assert (record.state, record.dataset_rows) == ("running", 1)
    assert isinstance(record.recipe["storage"], dict)
    assert record.recipe["storage"]["dsn"] is None
    assert await is_open(session, run_id)
    await close(session, run_id)


async def test_a_bad_dataset_or_model_starts_nothing(session: Session, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"responses_create_params": {"input": []}, "agent_ref": {"name": "a"}}\n{oops\n')
    empty = tmp_path / "empty"
    empty.mkdir()

    with pytest.raises(DatasetError, match=r"bad\.jsonl, line 2"):
        await start_run(with_overrides(session, f"run.dataset={bad}"), "demo")
    with pytest.raises(StackError, match=r"no config\.json and no tokenizer_config\.json"):
        await start_run(with_overrides(session, f"run.model={empty}"), "demo")

    assert await session.ledger.runs.list() == []


async def test_one_run_at_a_time_uses_a_task_queue(session: Session) -> None:
    first = await start_run(session, "demo")

    with pytest.raises(QueueBusy, match=first):
        await start_run(with_overrides(session, "run.id=second"), "demo")
    await close(session, first)


async def test_a_run_that_was_terminated_from_outside_gives_its_queue_free(session: Session) -> None:
    first = await start_run(session, "demo")
    await close(session, first)

    second = await start_run(with_overrides(session, "run.id=second"), "demo")

    assert (await session.ledger.runs.get(first)).state == "terminated"
    assert (await session.ledger.runs.get(second)).state == "running"
    await close(session, second)


async def test_a_run_id_is_used_once(session: Session) -> None:
    named = with_overrides(session, "run.id=mine")
    await start_run(named, "demo")
    await close(session, "mine")

    with pytest.raises(RunExists, match="mine"):
        await start_run(named, "demo")


def test_links_lead_to_the_workflow_in_the_temporal_ui(session: Session) -> None:
    link = session.ui_link("demo-1/step-2/group-0")
    assert link == "http://127.0.0.1:8233/namespaces/default/workflows/demo-1%2Fstep-2%2Fgroup-0"


def test_a_model_with_other_weights_is_another_model(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 1000)
    first = model_digest(tmp_path)
    assert model_digest(tmp_path) == first
    weights.write_bytes(b"a" * 999 + b"b")
    assert model_digest(tmp_path) != first
