"""Tables and JSON of commands: ids are never cut, and what goes into a pipe is plain: one line a row, no frames."""

import json

import typer
from pydantic import JsonValue
from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 10_000


def new_console() -> Console:
    """A console for standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def new_table(identity: str, *headers: str, title: str | None = None) -> Table:
    """A table whose first column is an id."""
    frame = box.HEAVY_HEAD if Console().is_terminal else None
    table = Table(title=title, title_justify="left", box=frame, pad_edge=frame is not None)
    table.add_column(identity, no_wrap=True, overflow="fold")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table; in a pipe, without blanks at the ends of lines."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def print_json(value: JsonValue) -> None:
    """JSON on standard output."""
    typer.echo(json.dumps(value, indent=2))
