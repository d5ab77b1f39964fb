"""`onbelay group retry | mask | drop`: an operator's decisions about one group.

A parked or running group decides itself; one that was dropped is taken up again by its step, while that is open.
"""

from typing import Annotated

import typer

from storage.records import GroupRecord
from workers.cli.exits import USAGE, CommandError
from workers.cli.levers import Request, finish, need_open, pull, refuse, request, update
from workers.cli.options import Actor, AsJson, DryRun, GroupArgument, Reason, Where
from workers.cli.session import Session
from workers.cli.temporal_runs import is_open
from workflows.requests import (
    DropGroup,
    LeverDone,
    MaskRollouts,
    RetryDroppedGroup,
    RetryGroup,
)


def register(group: typer.Typer) -> None:
    """Add the commands."""
    group.command("retry")(retry)
    group.command("mask")(mask)
    group.command("drop")(drop)


def retry(
    group_id: GroupArgument,
    reason: Reason,
    fresh: Annotated[bool, typer.Option("--fresh", help="Sample everything again, replay nothing.")] = False,
    actor: Actor = None,
    recipe: Where = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run the lost rollouts of a parked group again, or a dropped group while its step is open."""

    def make() -> Request:
        return request(group_id, "retry", actor=actor, reason=reason, dry_run=dry_run, fresh=fresh)

    async def act(opened: Session, asked: Request) -> LeverDone:
        group = await opened.ledger.groups.get(group_id)
        if group.state == "dropped":
            step = f"{group.run_id}/step-{group.train_step}"
            otherwise = f"{_stands(group)}, and its step is not in flight any more. {_ELSEWHERE.format(group_id)}"
            await need_open(opened, asked, step, otherwise)
            message = RetryDroppedGroup(**asked.by, fresh=fresh, group_id=group_id)
            return await update(opened, asked, step, "retry_group", message)
        await need_open(opened, asked, group_id, _not_running(group))
        return await update(opened, asked, group_id, "retry", RetryGroup(**asked.by, fresh=fresh))

    pull(recipe, make, act, as_json=as_json)


def mask(
    group_id: GroupArgument,
    reason: Reason,
    rollout: Annotated[list[int] | None, typer.Option(min=0, help="Index of a rollout; repeat for several.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every rollout that is not valid.")] = False,
    actor: Actor = None,
    recipe: Where = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let rollouts keep their place in the group without a gradient or a vote in the baseline."""
    indices = tuple(sorted(set(rollout or ())))

    def make() -> Request:
        if bool(indices) == every:
            raise CommandError("Say which rollouts: --rollout INDEX (several times), or --all.", USAGE)
        return request(group_id, "mask", actor=actor, reason=reason, dry_run=dry_run, rollouts=list(indices))

    async def act(opened: Session, asked: Request) -> LeverDone:
        running = await is_open(opened, group_id)
        group = await opened.ledger.groups.get(group_id)
        if running:
            return await update(opened, asked, group_id, "mask", MaskRollouts(**asked.by, rollouts=indices))
        masked = {one.index for one in group.rollouts if one.state == "masked"}
        if indices and masked.issuperset(indices):
            detail = f"masked already: rollout {', '.join(map(str, indices))}"
            return await finish(opened, asked, "unchanged", group.state, detail)
        return await refuse(opened, asked, _not_running(group))

    pull(recipe, make, act, as_json=as_json)


def drop(
    group_id: GroupArgument,
    reason: Reason,
    actor: Actor = None,
    recipe: Where = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give a group up; no drop budget counts it."""

    def make() -> Request:
        return request(group_id, "drop", actor=actor, reason=reason, dry_run=dry_run)

    async def act(opened: Session, asked: Request) -> LeverDone:
        running = await is_open(opened, group_id)
        group = await opened.ledger.groups.get(group_id)
        if running:
            return await update(opened, asked, group_id, "drop", DropGroup(**asked.by))
        if group.state == "dropped":
            return await finish(opened, asked, "unchanged", group.state, "dropped already")
        return await refuse(opened, asked, _not_running(group))

    pull(recipe, make, act, as_json=as_json)


_ELSEWHERE = "A diagnostic copy can be run: `onbelay group replay {} --reason TEXT`."


def _stands(group: GroupRecord) -> str:
    why = f" ({group.reason})" if group.reason else ""
    return f"group {group.group_id} of step {group.train_step} is {group.state}{why}"


def _not_running(group: GroupRecord) -> str:
    """Why a request cannot reach the group, and what to do."""
    if group.state in ("open", "parked"):
        return (
            f"{_stands(group)}, but Temporal does not run it: its run has ended or was lost. Go on with the run first: "
            f"`onbelay run resume {group.run_id} --reason TEXT`."
        )
    return f"{_stands(group)} and cannot be changed any more. {_ELSEWHERE.format(group.group_id)}"
