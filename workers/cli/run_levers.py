"""`onbelay run pause | resume | stop | set-budget | set-floor`: an operator's decisions about a run."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from workers.cli import exits
from workers.cli.exits import USAGE, CommandError
from workers.cli.levers import Request, finish, need_open, pull, refusing, request, say, update
from workers.cli.options import Actor, AsJson, DryRun, Overrides, Reason, RunArgument, Where
from workers.cli.resume_rules import Difference
from workers.cli.resuming import Wanted, resume_run
from workers.cli.session import Session, session
from workers.cli.tables import new_console, new_table, print_json, print_table
from workers.cli.temporal_runs import is_open
from workflows.requests import (
    Lever,
    LeverDone,
    PauseRun,
    SetBudget,
    SetFloor,
    StopRun,
)


def register(run: typer.Typer) -> None:
    """Add the commands."""
    run.command("pause")(pause)
    run.command("resume")(resume)
    run.command("stop")(stop)
    run.command("set-budget")(set_budget)
    run.command("set-floor")(set_floor)


def pause(
    run: RunArgument,
    reason: Reason,
    actor: Actor = None,
    recipe: Where = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Finish the step that trains, then wait for `onbelay run resume`."""

    def make() -> Request:
        return request(run, "pause", actor=actor, reason=reason, dry_run=dry_run)

    async def act(opened: Session, asked: Request) -> LeverDone:
        return await _to_run(opened, asked, "pause", PauseRun(**asked.by), _NOTHING_TO_PAUSE)

    pull(recipe, make, act, as_json=as_json)


def stop(
    run: RunArgument,
    reason: Reason,
    after: Annotated[int | None, typer.Option("--after", min=0, metavar="STEP", help="The last step.")] = None,
    now: Annotated[bool, typer.Option("--now", help="Cancel the steps in flight instead of finishing them.")] = False,
    actor: Actor = None,
    recipe: Where = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """End a run after the step that trains (or another one, or now). Everything is kept for `onbelay run resume`."""

    def make() -> Request:
        if now and after is not None:
            raise CommandError("--now and --after exclude each other.", USAGE)
        return request(run, "stop", actor=actor, reason=reason, dry_run=dry_run, after_step=after, now=now)

    async def act(opened: Session, asked: Request) -> LeverDone:
        record = await opened.ledger.runs.get(run)
        if record.state == "stopped" and not await is_open(opened, run):
            return await finish(opened, asked, "unchanged", record.state, "stopped already")
        if not now:
            return await _to_run(opened, asked, "stop", StopRun(**asked.by, after_step=after), _NOTHING_TO_STOP)
        await need_open(opened, asked, run, f"Run {run} is {record.state}. {_NOTHING_TO_STOP}")
        if not dry_run:
            await opened.client.get_workflow_handle(run).cancel()
        return await finish(opened, asked, "done", record.state, "its steps in flight are cancelled; it stops now")

    pull(recipe, make, act, as_json=as_json)


def set_budget(
    run: RunArgument,
    reason: Reason,
    consecutive: Annotated[
        int | None,
        typer.Option("--max-consecutive-dropped-prompts", metavar="N", help="Drops for infrastructure in a row."),
    ] = None,
    skipped: Annotated[
        int | None, typer.Option("--max-skipped-prompts", metavar="N", help="Drops for data in the life of the run.")
    ] = None,
    actor: Actor = None,
    recipe: Where = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Change how many groups a run may drop."""
    budgets = {"max_consecutive_dropped_prompts": consecutive, "max_skipped_prompts": skipped}

    def make() -> Request:
        if consecutive is None and skipped is None:
            raise CommandError("Say which: --max-consecutive-dropped-prompts N, --max-skipped-prompts N.", USAGE)
        return request(run, "set_budget", actor=actor, reason=reason, dry_run=dry_run, **budgets)

    async def act(opened: Session, asked: Request) -> LeverDone:
        given = " ".join(f"failure.{name}={value}" for name, value in budgets.items() if value is not None)
        message = SetBudget(**asked.by, max_consecutive_dropped_prompts=consecutive, max_skipped_prompts=skipped)
        return await _to_run(opened, asked, "set_budget", message, _WHEN_RESUMED.format(run, given))

    pull(recipe, make, act, as_json=as_json)


def set_floor(
    run: RunArgument,
    fraction: Annotated[float, typer.Argument(metavar="FRACTION", help="failure.min_step_batch_fraction: 0.75.")],
    reason: Reason,
    actor: Actor = None,
    recipe: Where = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Change how many groups make a step: ceil(grpo.num_prompts_per_step * FRACTION)."""

    def make() -> Request:
        if not math.isfinite(fraction):
            raise CommandError(f"FRACTION must be a number, not {fraction}.", USAGE)
        return request(run, "set_floor", actor=actor, reason=reason, dry_run=dry_run, min_step_batch_fraction=fraction)

    async def act(opened: Session, asked: Request) -> LeverDone:
        message = SetFloor(**asked.by, min_step_batch_fraction=fraction)
        otherwise = _WHEN_RESUMED.format(run, f"failure.min_step_batch_fraction={fraction:g}")
        return await _to_run(opened, asked, "set_floor", message, otherwise)

    pull(recipe, make, act, as_json=as_json)


def resume(
    run: RunArgument,
    reason: Reason,
    overrides: Overrides = None,
    actor: Actor = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Recipe to go on with; without one, the run's own, on the running stack."),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a paused, stopped, failed or lost run; settled rollouts and stored batches are used again.

    Changes of its recipe are listed; those that would corrupt the run are refused.
    """

    async def command() -> None:
        asked = request(run, "resume", actor=actor, reason=reason, dry_run=dry_run, overrides=list(overrides or ()))
        async with session(recipe) as opened:
            done, found = await refusing(
                opened, asked, resume_run(opened, asked, Wanted(recipe, tuple(overrides or ())))
            )
        if as_json:
            print_json({**done.model_dump(mode="json"), "dry_run": dry_run, "changes": list(map(asdict, found))})
            return
        if found:
            print_table(new_console(), _table(found))
        say(done, dry_run, as_json=False)

    exits.run(command())


def _table(found: Sequence[Difference]) -> Table:
    table = new_table("key", "the run's", "from now on")
    for one in found:
        table.add_row(one.key, str(one.stored), str(one.wanted))
    return table


async def _to_run(opened: Session, asked: Request, name: str, message: Lever, otherwise: str) -> LeverDone:
    record = await opened.ledger.runs.get(asked.target)
    why = f" ({record.reason})" if record.reason else ""
    if record.state in ("running", "paused"):
        otherwise = (
            "Temporal does not run it: its workflow was lost. Go on with it first: "
            f"`onbelay run resume {asked.target} --reason TEXT`."
        )
    await need_open(opened, asked, asked.target, f"Run {asked.target} is {record.state}{why}. {otherwise}")
    return await update(opened, asked, asked.target, name, message)


_NOTHING_TO_PAUSE = "There is nothing to pause."
_NOTHING_TO_STOP = "There is nothing to stop."
_WHEN_RESUMED = "A run that has ended is changed when it goes on: `onbelay run resume {} {} --reason TEXT`."
