"""`onbelay run start | list | status | summary`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from storage.summaries import RunSummary
from workers.cli import audit, exits, explain, run_levers
from workers.cli.exits import CommandError
from workers.cli.options import AsJson, Overrides, RunArgument, Where
from workers.cli.progress import read, screen, watch
from workers.cli.session import session
from workers.cli.starting import start_run
from workers.cli.tables import new_console, new_table, print_table


def register(app: typer.Typer) -> None:
    """Add the `run` commands."""
    group = typer.Typer(no_args_is_help=True, help="Start, watch and control runs.")
    for command in (start, list_, status, summary):
        group.command(command.__name__.rstrip("_"))(command)
    for module in (run_levers, explain, audit):
        module.register(group)
    app.add_typer(group, name="run")


def start(
    recipe: Annotated[str, typer.Argument(help="Recipe file, or the name of a packaged recipe.")],
    overrides: Overrides = None,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch until the run is over.")] = False,
) -> None:
    """Start a run. The stack, or workers at the recipe's addresses, must be up."""

    async def command() -> None:
        async with session(recipe, overrides or ()) as opened:
            run_id = await start_run(opened, Path(recipe).stem)
            typer.echo(run_id)
            if not follow:
                link = opened.ui_link(run_id)
                typer.echo(
                    f"Watch it: onbelay run status {run_id} --watch" + (f", or {link}" if link else ""), err=True
                )
                return
            view = await watch(opened, run_id, new_console())
            if view.summary.state != "completed":
                raise CommandError(f"Run {run_id} {view.summary.state}: {view.reason}")

    exits.run(command())


def list_(recipe: Where = None, as_json: AsJson = False) -> None:
    """List runs, newest first."""

    async def command() -> None:
        async with session(recipe) as opened:
            records = await opened.ledger.runs.list()
            rows = [(record, await opened.ledger.summaries.of(record.run_id)) for record in records]
        if as_json:
            typer.echo("[" + ",\n".join(row.model_dump_json() for _, row in rows) + "]")
            return
        table = new_table("run", "state", "steps", "policy", "valid / masked / lost", "started")
        for record, row in rows:
            counts = row.rollouts
            table.add_row(
                record.run_id,
                record.state if record.reason is None else f"{record.state}: {record.reason}",
                str(row.steps_applied),
                f"policy-{row.policy_version}",
                f"{counts.valid} / {counts.masked} / {counts.lost}",
                f"{record.created_at:%Y-%m-%d %H:%M}",
            )
        print_table(new_console(), table)

    exits.run(command())


def status(
    run: RunArgument,
    recipe: Where = None,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch until the run is over.")] = False,
) -> None:
    """Show how a run stands."""

    async def command() -> None:
        async with session(recipe) as opened:
            console = new_console()
            if follow:
                await watch(opened, run, console)
            else:
                console.print(screen(await read(opened, run)))
                link = opened.ui_link(run)
                if link:
                    console.print(f"Temporal UI: {link}", soft_wrap=True, highlight=False)

    exits.run(command())


def summary(run: RunArgument, recipe: Where = None, as_json: AsJson = False) -> None:
    """Print the accounts of a run, computed from the ledger."""

    async def command() -> None:
        async with session(recipe) as opened:
            accounts = await opened.ledger.summaries.of(run)
        if as_json:
            typer.echo(accounts.model_dump_json(indent=2))
        else:
            print_table(new_console(), summary_table(accounts))

    exits.run(command())


def summary_table(accounts: RunSummary) -> Table:
    """The accounts as a table."""
    table = new_table("account", "value", title=accounts.run_id)
    for name, value in accounts.model_dump(exclude={"run_id"}).items():
        if isinstance(value, dict):
            text = "  ".join(f"{key} {count}" for key, count in value.items())
        elif isinstance(value, list):
            text = " ".join("-" if number is None else f"{number:.3f}" for number in value)
        else:
            text = str(value)
        table.add_row(name, text)
    return table
