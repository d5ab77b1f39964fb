"""Arguments and options that several commands share."""

import getpass
import os
import socket
from typing import Annotated

import typer

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run id.")]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="Group id, for instance RUN/step-3/group-0.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Dotted overrides.")]
Where = Annotated[
    str | None, typer.Option("--recipe", help="Recipe that names the servers; without one, the running stack's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept in the audit.")]
Actor = Annotated[
    str | None,
    typer.Option("--actor", envvar="ONBELAY_ACTOR", metavar="NAME", help="Who asks; without one, user@host."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change and record nothing.")]


def named(actor: str | None) -> str:
    """Who asks."""
    if actor is not None:
        return actor
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
