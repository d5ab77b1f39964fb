"""The command `onbelay`: one verb, one module."""

from typing import NoReturn

import typer

from workers.cli import config, demo, doctor, group, ledger, rollout, run, stack
from workers.cli.exits import FAILURE, leave

app = typer.Typer(
    name="onbelay",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Durable reinforcement learning for language-model agents.",
)
for module in (run, group, rollout, ledger, demo, stack, config, doctor):
    module.register(app)


def entry() -> NoReturn:
    """Run the command line; leave with its exit code."""
    try:
        app()
    except SystemExit as ended:
        leave(ended.code if isinstance(ended.code, int) else FAILURE)
    leave(0)


if __name__ == "__main__":
    entry()
