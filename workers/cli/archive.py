"""Everything that is known of one group, as files of an archive: for a report, or for somebody without access.

Read from the ledger and from Temporal; secrets are taken out of every file. Nothing is changed.
"""

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from configs.recipe import Recipe
from storage.errors import StorageError
from storage.ledger import Ledger
from storage.records import ActionRecord, GroupRecord
from workers.cli.redaction import Redactor
from workers.cli.session import Session

_FORMAT = 1


@dataclass(frozen=True)
class Archive:
    """File name to content, without secrets."""

    files: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """A .zip file."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
            for name, text in self.files.items():
                file.writestr(name, text)
        return buffer.getvalue()


async def archive_of(session: Session, group_id: str) -> Archive:
    """Collect a group; UnknownGroup when there is none."""
    ledger = session.ledger
    group = await ledger.groups.get(group_id)
    run = await ledger.runs.get(group.run_id)
    redactor = Redactor([session.recipe, Recipe.model_validate(run.recipe)])
    files: dict[str, Any] = {
        "group.json": group.model_dump(mode="json"),
        "run.json": run.model_dump(mode="json"),
        "audit.json": [action.model_dump(mode="json") for action in await _actions(ledger, group)],
        "errors.json": _errors(group),
    }
    notes: list[str] = []
    files |= await _transcripts(ledger, group, notes)
    files |= await _histories(session.client, group_id, notes)
    cleaned = {
        name: json.dumps(redactor.value(content), indent=1, ensure_ascii=False) for name, content in files.items()
    }
    return Archive({"README.md": redactor.text(_readme(group, sorted(cleaned), notes)), **cleaned})


async def _actions(ledger: Ledger, group: GroupRecord) -> list[ActionRecord]:
    """Requests about this group, also those that went to its step."""
    actions = await ledger.actions.list(group.run_id)
    return [
        action
        for action in actions
        if action.target == group.group_id
        or action.target.startswith(f"{group.group_id}/")
        or action.arguments.get("group_id") == group.group_id
    ]


def _errors(group: GroupRecord) -> list[dict[str, Any]]:
    return [
        attempt.model_dump(mode="json", include=_ERROR_FIELDS)
        for rollout in group.rollouts
        for attempt in rollout.attempts
        if attempt.failure_class is not None
    ]


_ERROR_FIELDS = {"rollout_id", "attempt", "worker", "boundary", "bucket", "failure_class", "cause", "ended_at"}


async def _transcripts(ledger: Ledger, group: GroupRecord, notes: list[str]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for rollout in group.rollouts:
        for attempt in rollout.attempts:
            try:
                transcript = await ledger.transcripts.of(rollout.rollout_id, attempt.attempt)
            except StorageError as error:  # a blob that is gone or corrupt costs its transcript, not the archive
                notes.append(f"No transcript of rollout {rollout.index}, attempt {attempt.attempt}: {error}")
                continue
            name = f"transcripts/rollout-{rollout.index}/attempt-{attempt.attempt}.json"
            files[name] = transcript.model_dump(mode="json", exclude={"rollout"})
    return files


async def _histories(client: Client, group_id: str, notes: list[str]) -> dict[str, Any]:
    """Every execution of the group's workflow that Temporal still has."""
    executions: dict[str, datetime] = {}
    try:
        described = await client.get_workflow_handle(group_id).describe()
        executions[described.run_id] = described.start_time
        quoted = group_id.replace('"', '\\"')
        async for listed in client.list_workflows(f'WorkflowId = "{quoted}"'):
            executions[listed.run_id] = listed.start_time
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            notes.append(f"Temporal's history could not be read: {error.message}")
    files: dict[str, Any] = {}
    for number, execution in enumerate(sorted(executions, key=lambda run_id: executions[run_id])):
        try:
            history = await client.get_workflow_handle(group_id, run_id=execution).fetch_history()
        except RPCError as error:
            notes.append(f"The history of execution {execution} could not be read: {error.message}")
            continue
        files[f"history/execution-{number}-{execution}.json"] = history.to_json_dict()
    if not files:
        notes.append("Temporal has no history of this group: it never ran there, or the retention has passed.")
    return files


def _readme(group: GroupRecord, names: list[str], notes: list[str]) -> str:
    lines = [
        f"# Group {group.group_id}",
        "",
        f"Prompt {group.prompt_id}, step {group.step}, {group.state}" + (f": {group.reason}" if group.reason else "."),
        f"Exported {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, format {_FORMAT}.",
        "",
        "* `group.json`: the group, its rollouts and all their attempts, as the ledger has them.",
        "* `run.json`: the run and its recipe, as it was last started, resumed or changed.",
        "* `errors.json`: every failed attempt: boundary, class, cause.",
        "* `transcripts/rollout-I/attempt-K.json`: the model calls of an attempt in order; `outcome` says whether a "
        "response was generated, replayed, failed or abandoned, token ids are those of the policy's tokenizer.",
        "* `audit.json`: what operators asked for, why, and what became of it.",
        "* `history/execution-N-ID.json`: Temporal's history of the group's workflow, oldest execution first; "
        "`temporalio.client.WorkflowHistory.from_json` reads it.",
        "",
        "Secrets of the recipe, user information in URLs and authorization headers are replaced by `[removed]`.",
        "",
        *(["What is missing:", "", *(f"* {note}" for note in notes), ""] if notes else []),
        "Files:",
        "",
        *(f"* {name}" for name in names),
    ]
    return "\n".join(lines) + "\n"
