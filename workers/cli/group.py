"""`onbelay group list | show`: what happened to prompt groups, attempt by attempt."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from storage.records import GroupRecord, GroupState, Purpose
from workers.cli import exits, export, group_levers, replay
from workers.cli.exits import USAGE, CommandError
from workers.cli.explaining import commands_of
from workers.cli.options import AsJson, GroupArgument, RunArgument, Where
from workers.cli.session import session
from workers.cli.tables import new_console, new_table, print_table

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def register(app: typer.Typer) -> None:
    """Add the `group` commands."""
    group = typer.Typer(no_args_is_help=True, help="Look into prompt groups, and decide about failed ones.")
    group.command("list")(list_)
    group.command("show")(show)
    for module in (group_levers, replay, export):
        module.register(group)
    app.add_typer(group, name="group")


def list_(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    state: Annotated[GroupState | None, typer.Option(help="Only groups in this state.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Groups that are parked or dropped.")] = False,
    parked: Annotated[bool, typer.Option("--parked", help="Groups that wait for an operator.")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="Groups that were given up.")] = False,
    failure_class: Annotated[
        str | None, typer.Option("--class", metavar="CLASS", help="Groups with an attempt that failed so.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="2h|ISO", help="Changed in the last 30m, 2h, 1d, or since a moment.")
    ] = None,
    purpose: Annotated[Purpose, typer.Option(help="Groups that train, those of evaluations, or copies.")] = "train",
    recipe: Where = None,
    as_json: AsJson = False,
) -> None:
    """List the groups of a run."""
    wanted: set[GroupState] = set()
    wanted |= {state} if state else set()
    wanted |= {"parked", "dropped"} if failed else set()
    wanted |= {"parked"} if parked else set()
    wanted |= {"dropped"} if dropped else set()

    async def command() -> None:
        moment = None if since is None else moment_of(since, datetime.now(UTC))
        async with session(recipe) as opened:
            await opened.ledger.runs.get(run)
            groups = await opened.ledger.groups.list(
                run,
                step=step,
                purpose=purpose,
                states=tuple(sorted(wanted)) or None,
                failure_class=failure_class,
                since=moment,
            )
        if as_json:
            typer.echo("[" + ",\n".join(group.model_dump_json() for group in groups) + "]")
            return
        console = new_console()
        headers = ("prompt", "state", "valid / masked / lost", "mean reward", "failures", "changed (UTC)")
        table = new_table("group", *headers, *(() if console.is_terminal else ("reason",)))
        for group in groups:
            reason = () if console.is_terminal else (group.reason or "",)
            counts = " / ".join(str(_count(group, name)) for name in ("valid", "masked", "lost"))
            table.add_row(
                group.group_id,
                group.prompt_id,
                _state(group),
                counts,
                _mean(group),
                ", ".join(_classes(group)),
                f"{group.updated_at:%m-%d %H:%M:%S}",
                *reason,
            )
        print_table(console, table)
        for group in groups:
            if group.reason and console.is_terminal:  # a sentence has no room in a column
                console.print(f"{group.group_id}: {group.reason}", soft_wrap=True, highlight=False, markup=False)

    exits.run(command())


def moment_of(text: str, now: datetime) -> datetime:
    """`2h` before now, or a moment in ISO 8601 (UTC where it names no zone)."""
    span = _SPAN.fullmatch(text.strip())
    if span is not None:
        return now - timedelta(**{_UNITS[span.group(2)]: float(span.group(1))})
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise CommandError(
            f"--since {text}: give a span (30m, 2h, 1d) or a moment (2026-01-31T12:00).", USAGE
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def show(
    group_id: GroupArgument,
    recipe: Where = None,
    as_json: AsJson = False,
) -> None:
    """Show a group's rollouts and all their attempts."""

    async def command() -> None:
        async with session(recipe) as opened:
            group = await opened.ledger.groups.get(group_id)
            link = opened.ui_link(group_id)
        if as_json:
            typer.echo(group.model_dump_json(indent=2))
            return
        console = new_console()
        head = f"{group.group_id}  prompt {group.prompt_id}  {_state(group)}"
        for line in filter(None, (head, group.reason, *_links(group))):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        table = new_table("rollout", "attempt", "state", "reward", "segments", "boundary", "reason")
        for rollout in group.rollouts:
            for attempt in rollout.attempts:
                settled = attempt.attempt == rollout.settled_attempt
                reward = f"{rollout.reward:.3f}" if settled and rollout.reward is not None else ""
                why = rollout.reason if settled else f"{attempt.failure_class}: {attempt.cause}"
                table.add_row(
                    str(rollout.index),
                    str(attempt.attempt),
                    rollout.state if settled else attempt.state,
                    reward,
                    str(rollout.segments) if settled else "",
                    attempt.boundary or "",
                    (why or "") if settled or attempt.failure_class else "",
                )
            if not rollout.attempts:
                table.add_row(str(rollout.index), "", rollout.state, "", "", "", rollout.reason or "")
        print_table(console, table)
        for line in commands_of(group) if group.state == "parked" else ():
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        if link:
            console.print(f"Temporal UI: {link}", soft_wrap=True, highlight=False)

    exits.run(command())


def _state(group: GroupRecord) -> str:
    return group.state if group.train_step == group.step else f"{group.state} (moved to step {group.train_step})"


def _links(group: GroupRecord) -> list[str]:
    """Other groups that have to do with this one."""
    lines = [f"takes the place of {group.replaces}"] if group.replaces else []
    return lines + ([f"diagnostic copy of {group.copy_of}"] if group.copy_of else [])


def _classes(group: GroupRecord) -> list[str]:
    attempts = [attempt for rollout in group.rollouts for attempt in rollout.attempts]
    return sorted({attempt.failure_class for attempt in attempts if attempt.failure_class})


def _count(group: GroupRecord, state: str) -> int:
    return sum(rollout.state == state for rollout in group.rollouts)


def _mean(group: GroupRecord) -> str:
    rewards = [r.reward for r in group.rollouts if r.state == "valid" and r.reward is not None]
    return f"{sum(rewards) / len(rewards):.3f}" if rewards else ""
