"""`onbelay run audit`: what operators asked of a run, why, and what became of it."""

from collections.abc import Iterator

import typer

from storage.records import ActionRecord
from workers.cli import exits
from workers.cli.options import AsJson, RunArgument, Where
from workers.cli.session import session
from workers.cli.tables import new_console, new_table, print_table


def register(run: typer.Typer) -> None:
    """Add the command."""
    run.command("audit")(audit)


def audit(run: RunArgument, recipe: Where = None, as_json: AsJson = False) -> None:
    """List every request about a run and its groups, oldest first, also the refused ones."""

    async def command() -> None:
        async with session(recipe) as opened:
            await opened.ledger.runs.get(run)
            actions = await opened.ledger.actions.list(run)
        if as_json:
            typer.echo("[" + ",\n".join(action.model_dump_json() for action in actions) + "]")
            return
        if not actions:
            typer.echo(f"{run}: nobody has asked for anything.")
            return
        console = new_console()
        if console.is_terminal:
            for action in actions:
                for line in _block(action):
                    console.print(line, soft_wrap=True, highlight=False, markup=False)
            return
        table = new_table("target", "when (UTC)", "actor", "verb", "outcome", "reason", "what became of it")
        for action in actions:
            table.add_row(
                action.target,
                _when(action),
                action.actor,
                _verb(action),
                action.outcome,
                _line(action.reason),
                _line(action.detail),
            )
        print_table(console, table)

    exits.run(command())


def _block(action: ActionRecord) -> Iterator[str]:
    """An action in the lines of a terminal: its sentences have no room in columns."""
    yield f"{_when(action)}  {action.actor}  {_verb(action)}  {action.outcome}  {action.target}"
    yield f"    why: {_line(action.reason)}"
    yield f"    {_line(action.detail)}"


def _when(action: ActionRecord) -> str:
    return f"{action.at:%Y-%m-%d %H:%M:%S}" if action.at else ""


def _verb(action: ActionRecord) -> str:
    given = [f"{name}={value}" for name, value in action.arguments.items() if value not in (None, False, [])]
    return " ".join([action.verb, *given])


def _line(text: str) -> str:
    return " ".join(text.split())
