"""`onbelay group export`: one archive that tells everything of a group and no secret."""

import base64
import json
import zipfile
from pathlib import Path

import pytest
from pydantic import SecretStr
from temporalio.client import WorkflowHistory

from tests.cli.operating import WHY, Operated

pytestmark = pytest.mark.integration


async def test_an_archive_has_history_records_transcripts_errors_and_audit(run: Operated, tmp_path: Path) -> None:
    run.broken = {0, 1}
    await run.start_group()
    parked = await run.group("parked")
    await run.refused("group", "mask", parked.group_id, "--rollout", "2", *WHY)
    file = tmp_path / "group.zip"

    told = await run.json("group", "export", parked.group_id, "--to", str(file))

    with zipfile.ZipFile(file) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert told == {"file": str(file), "entries": list(files)}
    assert json.loads(files["group.json"])["group_id"] == parked.group_id
    assert [error["failure_class"] for error in json.loads(files["errors.json"])] == ["AgentFailed"] * 2
    assert [action["outcome"] for action in json.loads(files["audit.json"])] == ["refused"]
    assert json.loads(files["run.json"])["run_id"] == run.id
    turns = json.loads(files["transcripts/rollout-2/attempt-0.json"])["turns"]
    assert [turn["outcome"] for turn in turns] == ["generated"]
    (history,) = [text for name, text in files.items() if name.startswith("history/")]
    assert len(WorkflowHistory.from_json(parked.group_id, history).events) > 10
    for name in set(files) - {"README.md"}:
        assert name in files["README.md"]
    dsn = run.recipe.storage.dsn
    assert isinstance(dsn, SecretStr)
    plain = "\n".join([*files.values(), *_payloads(json.loads(history))])
    assert "pw-9" not in plain  # in the cause of the failure
    assert "HTTP 500 from http://[removed]@agent" in plain
    assert dsn.get_secret_value() not in plain


async def test_an_archive_of_a_group_that_temporal_forgot_says_so(run: Operated, tmp_path: Path) -> None:
    ledger = run.session.ledger
    group = await ledger.groups.open(f"{run.id}/step-0/group-0", run.id, 0, 0, "train", "p", 0, 1)
    file = tmp_path / "group.zip"
    said = await run.ok("group", "export", group.group_id, "--to", str(file))
    assert f"{file}: " in said
    with zipfile.ZipFile(file) as archive:
        assert "Temporal has no history of this group" in archive.read("README.md").decode()


async def test_a_file_that_exists_is_not_overwritten(run: Operated, tmp_path: Path) -> None:
    file = tmp_path / "group.zip"
    file.write_text("mine")
    result = await run.onbelay("group", "export", f"{run.id}/step-0/group-0", "--to", str(file))
    assert (result.exit_code, "exists already" in result.output) == (2, True)
    assert "no group" in await run.refused("group", "export", f"{run.id}/x", "--to", str(tmp_path / "other.zip"))
    assert file.read_text() == "mine"


def _payloads(value: object) -> list[str]:
    """The text of every payload of a history."""
    if isinstance(value, dict):
        inner = [text for each in value.values() for text in _payloads(each)]
        data = value.get("data")
        return [base64.b64decode(data).decode(errors="replace"), *inner] if isinstance(data, str) else inner
    return [text for each in value for text in _payloads(each)] if isinstance(value, list) else []
