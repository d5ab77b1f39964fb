"""`onbelay up | down | status | logs`: the embedded stack of this folder."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from temporalio.service import RPCError

from configs.load import load_recipe, override_recipe
from configs.recipe import Recipe
from storage.errors import StorageError
from storage.runs import LIVE
from workers.cli import exits
from workers.cli.config import OverridesArgument
from workers.cli.demo import RECIPE, prepare
from workers.cli.session import session_of, state_dir
from workers.cli.temporal_runs import is_open
from workers.stack import control
from workers.stack.logs import follow, tail
from workers.stack.recipes import last_asked
from workers.stack.state import ServiceStatus
from workers.temporal_client import TemporalUnavailable

MIB = 2**20
GIB = 2**30
NOT_UP = 1


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)
    app.command("logs")(logs)


def up(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="A YAML file, or a packaged recipe; without one, that of the last stack here, or the demo's.",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArgument = None,
) -> None:
    """Start the servers and workers of a recipe; those whose address it gives are used as they are."""
    console = Console()
    source, settings = _told_apart(recipe, overrides or [])

    async def command() -> list[str]:
        last = last_asked(state_dir()) if source is None else None
        if last is not None:
            _say("starting the last stack of this folder again")
            loaded = override_recipe(last, settings)
        else:
            loaded = load_recipe(source or RECIPE, settings)
            if source in (None, RECIPE):
                prepare(loaded, console)
        return await lost_runs(await control.up(loaded, state_dir(), _say))

    lost = exits.run(command())
    _show(console)
    for line in lost:
        _say(line)


def _told_apart(recipe: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """The recipe may be left out before overrides."""
    if recipe is not None and "=" in recipe and not Path(recipe).is_file():
        return None, [recipe, *overrides]
    return recipe, overrides


async def lost_runs(recipe: Recipe) -> list[str]:
    """A line for each run that the ledger has as live and Temporal does not run. What cannot be asked is no error."""
    try:
        async with session_of(recipe) as opened:
            live = [
                run
                for run in await opened.ledger.runs.list()
                if run.state in LIVE and run.task_queue == recipe.temporal.task_queue
            ]
            return [
                f"run {run.run_id} is {run.state} in the ledger, but Temporal does not run it. Go on with it: "
                f"`onbelay run resume {run.run_id} --reason TEXT`"
                for run in live
                if not await is_open(opened, run.run_id)
            ]
    except (StorageError, TemporalUnavailable, RPCError) as error:
        return [f"The runs could not be looked at: {error}"]


def down() -> None:
    """Stop everything that `up` started. The ledger and the Temporal database stay."""
    folder = state_dir()
    if control.phase(folder) in ("down", "failed"):
        typer.echo(f"no stack is up in {folder}")
        return
    exits.run(control.down(folder, _say))
    typer.echo("the stack is down")


def status(as_json: Annotated[bool, typer.Option("--json", help="JSON in place of a table.")] = False) -> None:
    """Show each service: state, process, restarts, memory, address. Exit code 1 unless all is up."""
    folder = state_dir()
    phase, services = control.phase(folder), control.status(folder)
    if as_json:
        answer = {
            "phase": phase,
            "resident_bytes": _resident(services),
            "services": [service.model_dump(mode="json") for service in services],
        }
        typer.echo(json.dumps(answer, indent=2))
    elif not services:
        typer.echo(f"no stack was started in {folder}")
    else:
        _show(Console())
    if phase != "up" or any(service.state == "failed" for service in services):
        raise typer.Exit(NOT_UP)


def logs(
    name: Annotated[str, typer.Argument(help="A service, or `supervisor`.")],
    lines: Annotated[int, typer.Option("-n", min=0, help="Lines from the end.")] = 50,
    keep_on: Annotated[bool, typer.Option("-f", help="Print what is added, until interrupted.")] = False,
) -> None:
    """Print the log of a service."""
    folder = state_dir() / "logs"
    path = folder / f"{name}.log"
    if not path.is_file():
        names = sorted(file.stem for file in folder.glob("*.log"))
        known = f"Logs exist for: {', '.join(names)}." if names else f"There are no logs in {folder}: run `onbelay up`."
        exits.fail(f"{name}: there is no such log. {known}", exits.USAGE)
    typer.echo(tail(path, lines))
    if keep_on:
        asyncio.run(_follow(path))


async def _follow(path: Path) -> None:
    async for text in follow(path):
        typer.echo(text, nl=False)


def _show(console: Console) -> None:
    folder = state_dir()
    services = control.status(folder)
    table = Table("service", "state", "process", "restarts", "memory", "address", box=None, pad_edge=False)
    for service in services:
        detail = service.reason if service.state in ("failed", "restarting") else service.address
        table.add_row(
            service.name,
            service.state,
            str(service.process.pid) if service.process else "",
            str(service.restarts) if service.process else "",
            f"{service.resident_bytes / MIB:,.0f} MiB" if service.resident_bytes else "",
            (detail or "").splitlines()[0] if detail else "",
        )
    console.print(table, soft_wrap=True, markup=False) if console.is_terminal else typer.echo(_plain(services))
    typer.echo(f"{control.phase(folder)}; {_resident(services) / GIB:.2f} GiB resident; state in {folder}")


def _plain(services: list[ServiceStatus]) -> str:
    """The table as lines of words, for a pipe."""
    return "\n".join(
        f"{control.describe(service)}"
        + (f" process {service.process.pid}, {service.restarts} restarts" if service.process else "")
        + (f", {service.resident_bytes / MIB:,.0f} MiB" if service.resident_bytes else "")
        for service in services
    )


def _resident(services: list[ServiceStatus]) -> int:
    return sum(service.resident_bytes or 0 for service in services)


def _say(line: str) -> None:
    typer.echo(line)
