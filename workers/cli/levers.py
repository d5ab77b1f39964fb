"""An operator's levers: a request goes to the workflow that it changes, as an update with an id of its own.

The workflow decides, records the request in the audit, and answers. A request that reaches no workflow is recorded
here, refused or not. A dry run asks the workflow what it would do; it changes and records nothing. Every answer comes
within `ANSWER_TIMEOUT_S`, or the command says that nobody answered.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

import typer
from temporalio.client import RPCTimeoutOrCancelledError, WorkflowQueryFailedError, WorkflowUpdateFailedError
from temporalio.exceptions import FailureError
from temporalio.service import RPCError, RPCStatusCode

from storage.errors import LedgerUnavailable, StorageError
from storage.records import ActionRecord
from workers.cli import exits
from workers.cli.exits import USAGE, CommandError
from workers.cli.options import named
from workers.cli.session import Session, session
from workers.cli.temporal_runs import is_open
from workflows.levers import MAX_ACTOR_CHARS, MAX_REASON_CHARS
from workflows.requests import (
    Lever,
    LeverDone,
    LeverPreview,
)

ANSWER_TIMEOUT_S = 60.0
Outcome = Literal["done", "unchanged", "refused"]

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Request:
    """One request of an operator: `target` is the group or run that it is about."""

    target: str
    verb: str
    actor: str
    reason: str
    arguments: dict[str, Any]
    dry_run: bool

    @property
    def run_id(self) -> str:
        """The run of the target."""
        return self.target.split("/")[0]

    @property
    def by(self) -> dict[str, str]:
        """The fields of every lever's message."""
        return {"actor": self.actor, "reason": self.reason}


def request(target: str, verb: str, *, actor: str | None, reason: str, dry_run: bool, **arguments: object) -> Request:
    """A request, its texts checked; CommandError for a blank or too long one."""
    asked = Request(target, verb, named(actor).strip(), reason.strip(), arguments, dry_run)
    for option, text, most in (
        ("--actor", asked.actor, MAX_ACTOR_CHARS),
        ("--reason", asked.reason, MAX_REASON_CHARS),
    ):
        if not text or len(text) > most:
            raise CommandError(f"{option} must have 1 to {most} characters; it has {len(text)}.", USAGE)
    return asked


def pull(
    recipe: str | None,
    make: Callable[[], Request],
    act: Callable[[Session, Request], Awaitable[LeverDone]],
    *,
    as_json: bool,
) -> None:
    """Carry a request out and say what it did: the body of every command of a lever."""

    async def command() -> None:
        asked = make()
        async with session(recipe) as opened:
            say(await refusing(opened, asked, act(opened, asked)), asked.dry_run, as_json=as_json)

    exits.run(command())


async def refusing(session: Session, asked: Request, acting: Awaitable[_Answer]) -> _Answer:
    """What the ledger does not know or does not allow is a refusal: no workflow was asked."""
    try:
        return await acting
    except LedgerUnavailable:
        raise
    except StorageError as error:
        await refuse(session, asked, str(error))


def say(done: LeverDone, dry_run: bool, *, as_json: bool) -> None:
    """Print what a request did, or would do."""
    if as_json:
        typer.echo(json.dumps({**done.model_dump(mode="json"), "dry_run": dry_run}, indent=2))
    else:
        named = "" if done.target in done.detail else f"{done.target}: "
        typer.echo(f"{'dry run, nothing is changed: ' if dry_run else ''}{named}{done.detail}")


async def update(session: Session, asked: Request, workflow_id: str, name: str, message: Lever) -> LeverDone:
    """Send a request to an open workflow; a refusal is a CommandError with the present state."""
    handle = session.client.get_workflow_handle(workflow_id)
    if asked.dry_run:
        preview = LeverPreview(verb=name, arguments=message.model_dump(mode="json", exclude={"actor", "reason"}))
        detail = await _answered(
            session,
            asked,
            handle.query("preview", preview, result_type=str, rpc_timeout=timedelta(seconds=ANSWER_TIMEOUT_S)),
        )
        return LeverDone(target=asked.target, verb=asked.verb, changed=False, state="", detail=detail)
    return await _answered(
        session, asked, handle.execute_update(name, message, id=uuid.uuid4().hex, result_type=LeverDone)
    )


async def _answered(session: Session, asked: Request, asking: Coroutine[Any, Any, _Answer]) -> _Answer:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await asking
    except WorkflowUpdateFailedError as error:
        raise CommandError(error.cause.message if isinstance(error.cause, FailureError) else str(error)) from error
    except WorkflowQueryFailedError as error:
        raise CommandError(str(error)) from error
    except (TimeoutError, RPCTimeoutOrCancelledError) as error:
        raise _unanswered(asked) from error
    except RPCError as error:
        if error.status in _NO_ANSWER:
            raise _unanswered(asked) from error
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        await refuse(session, asked, f"{asked.target} has just ended: look at it again")


# A query of a workflow that no worker polls for ends in one of these.
_NO_ANSWER = (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED, RPCStatusCode.FAILED_PRECONDITION)


def _unanswered(asked: Request) -> CommandError:
    later = f" The request may still be carried out: `onbelay run audit {asked.run_id}` says so."
    return CommandError(
        f"No worker answered for {asked.target} within {ANSWER_TIMEOUT_S:g} s; see `onbelay doctor`."
        + ("" if asked.dry_run else later)
    )


async def finish(session: Session, asked: Request, outcome: Outcome, state: str, detail: str) -> LeverDone:
    """A request that needs no workflow is recorded here."""
    if not asked.dry_run:
        await _record(session, asked, outcome, detail)
    return LeverDone(
        target=asked.target,
        verb=asked.verb,
        changed=outcome == "done" and not asked.dry_run,
        state=state,
        detail=detail,
    )


async def refuse(session: Session, asked: Request, detail: str) -> NoReturn:
    """Refuse a request; that is recorded, too, where the run is known."""
    if not asked.dry_run:
        try:
            await session.ledger.runs.get(asked.run_id)
        except StorageError:
            raise CommandError(detail) from None
        await _record(session, asked, "refused", detail)
    raise CommandError(detail)


async def need_open(session: Session, asked: Request, workflow_id: str, otherwise: str) -> None:
    """Refuse a request whose workflow is not open; `otherwise` says how things stand, and what to do."""
    if not await is_open(session, workflow_id):
        await refuse(session, asked, otherwise)


async def _record(session: Session, asked: Request, outcome: Outcome, detail: str) -> None:
    await session.ledger.actions.record(
        ActionRecord(
            action_id=f"{asked.target}#{uuid.uuid4().hex}",
            run_id=asked.run_id,
            target=asked.target,
            verb=asked.verb,
            actor=asked.actor,
            reason=asked.reason,
            arguments=asked.arguments,
            outcome=outcome,
            detail=detail,
        )
    )
