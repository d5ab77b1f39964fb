"""`onbelay doctor`: what this machine and the five systems lack, and what to do about it. Exit code 1 if anything."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from configs.load import load_recipe
from configs.recipe import Recipe
from workers.cli import exits
from workers.cli.checks import Finding, check_all
from workers.cli.session import addressed, state_dir
from workers.stack.control import resolved_recipe


def register(app: typer.Typer) -> None:
    """Add the `doctor` command."""
    app.command("doctor")(doctor)


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe with addresses; without one, the stack that is up."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON in place of lines.")] = False,
) -> None:
    """Check Python, the environments, PostgreSQL, Temporal, vLLM, NeMo-Gym, the trainer and the workers."""

    async def command() -> list[Finding]:
        return await check_all(_recipe(recipe))

    findings = exits.run(command())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(f"{'ok  ' if finding.ok else 'FAIL'} {finding.name}: {finding.text}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(exits.FAILURE)


def _recipe(source: str | None) -> Recipe | None:
    """The recipe with the addresses that are known; None when there is none to check."""
    if source is None:
        return resolved_recipe(state_dir())
    recipe = load_recipe(source)
    try:
        return addressed(recipe, source)
    except exits.CommandError:
        return recipe
