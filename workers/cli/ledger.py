"""`onbelay ledger check`: every invariant of a run's records, asked of the database itself."""

import typer

from workers.cli import exits
from workers.cli.exits import CommandError
from workers.cli.options import AsJson, RunArgument, Where
from workers.cli.session import session
from workers.cli.tables import new_console, new_table, print_table


def register(app: typer.Typer) -> None:
    """Add the `ledger` commands."""
    group = typer.Typer(no_args_is_help=True, help="Check the ledger.")
    group.command("check")(check)
    app.add_typer(group, name="ledger")


def check(run: RunArgument, recipe: Where = None, as_json: AsJson = False) -> None:
    """Check every invariant of a run; name each row that breaks one, and exit with 1 if there is any."""

    async def command() -> None:
        async with session(recipe) as opened:
            await opened.ledger.runs.get(run)
            violations = await opened.ledger.checks.of(run)
        if as_json:
            typer.echo("[" + ",\n".join(violation.model_dump_json() for violation in violations) + "]")
        elif violations:
            table = new_table("row", "invariant", "detail")
            for violation in violations:
                table.add_row(violation.row, violation.invariant, violation.detail)
            print_table(new_console(), table)
        else:
            typer.echo(f"{run}: every invariant holds.")
        if violations:
            raise CommandError(f"{len(violations)} rows of run {run} break an invariant of the ledger.")

    exits.run(command())
