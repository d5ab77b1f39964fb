"""`onbelay group export`: one archive with everything that is known of a group, secrets removed."""

import os
from pathlib import Path
from typing import Annotated

import typer

from workers.cli import exits
from workers.cli.archive import archive_of
from workers.cli.exits import USAGE, CommandError
from workers.cli.options import AsJson, GroupArgument, Where
from workers.cli.session import session
from workers.cli.tables import print_json


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("export")(export)


def export(
    group_id: GroupArgument,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The archive; without one, named after the group.")
    ] = None,
    recipe: Where = None,
    as_json: AsJson = False,
) -> None:
    """Write a .zip: history, ledger rows, transcripts, errors and audit of a group. Secrets are removed."""
    file = to or Path(f"{group_id.replace('/', '_')}.zip")

    async def command() -> None:
        if file.exists():
            raise CommandError(f"{file} exists already; name another file with --to.", USAGE)
        if not file.parent.is_dir():
            raise CommandError(f"{file}: the folder {file.parent} does not exist; create it first.", USAGE)
        async with session(recipe) as opened:
            archive = await archive_of(opened, group_id)
        scratch = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            scratch.write_bytes(archive.to_bytes())
            scratch.replace(file)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise CommandError(f"{file} cannot be written: {error.strerror}.") from error
        if as_json:
            print_json({"file": str(file), "entries": list(archive.files)})
        else:
            typer.echo(f"{file}: {len(archive.files)} files, {file.stat().st_size} bytes")

    exits.run(command())
