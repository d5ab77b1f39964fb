"""`onbelay config validate | show | schema`. Reads files only, starts nothing; exit code 2 for a wrong recipe."""

import json
from typing import Annotated

import typer

from configs.document import markdown
from configs.errors import ConfigError
from configs.load import dump_recipe, load_recipe
from configs.recipe import Recipe
from configs.warnings import warnings_of

USAGE_ERROR = 2

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or a packaged recipe such as demo.")
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the recipe.")
]


def register(app: typer.Typer) -> None:
    """Add the `config` commands."""
    config = typer.Typer(no_args_is_help=True, help="Check and show recipes.")
    config.command("validate")(validate)
    config.command("show")(show)
    config.command("schema")(schema)
    app.add_typer(config, name="config")


def validate(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Say whether a recipe is valid; list everything that is wrong, or that may surprise."""
    loaded = _load(recipe, overrides)
    for warning in warnings_of(loaded):
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{recipe}: valid")


def show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="JSON in place of YAML.")] = False,
) -> None:
    """Print every key with its value, defaults included. Secrets are hidden."""
    loaded = _load(recipe, overrides)
    typer.echo(loaded.model_dump_json(indent=2) if as_json else dump_recipe(loaded), nl=as_json)


def schema(
    *, as_markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/configuration.md.")] = False
) -> None:
    """Print the JSON schema of a recipe."""
    typer.echo(markdown() if as_markdown else json.dumps(Recipe.model_json_schema(), indent=2), nl=not as_markdown)


def _load(recipe: str, overrides: list[str] | None) -> Recipe:
    try:
        return load_recipe(recipe, overrides or ())
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USAGE_ERROR) from error
