"""`onbelay config`: what it prints, and its exit codes."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from configs.load import load_recipe, packaged_recipes
from tests.configs.conftest import WriteRecipe
from workers.cli.config import register


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    """The command with `config` alone."""
    app = typer.Typer()
    register(app)
    return app


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipe_is_valid(app: typer.Typer, name: str) -> None:
    secrets = {"ONBELAY_DSN": "postgresql://onbelay:hush@db/onbelay", "TEMPORAL_API_KEY": "hush"}

    result = CliRunner().invoke(app, ["config", "validate", name], env=secrets)

    assert (result.exit_code, result.output) == (0, f"{name}: valid\n")


def test_a_wrong_recipe_exits_with_2_and_says_why_on_standard_error(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["config", "validate", "demo", "grpo.sed=1", "grpo.max_num_steps=0"])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Did you mean `grpo.seed`?" in result.stderr
    assert "`grpo.max_num_steps` is 0, but must be an integer, at least 1." in result.stderr


def test_show_prints_a_recipe_that_reads_back(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["config", "show", "demo", "grpo.seed=7"])
    (tmp_path / "shown.yaml").write_text(result.stdout)

    assert load_recipe(tmp_path / "shown.yaml") == load_recipe("demo", ["grpo.seed=7"])


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_show_hides_secrets(app: typer.Typer, write_recipe: WriteRecipe, options: list[str]) -> None:
    recipe = str(write_recipe("temporal: {api_key: hush}\n"))

    result = CliRunner().invoke(app, ["config", "show", recipe, *options])

    assert result.exit_code == 0
    assert "hush" not in result.output


def test_schema_is_json(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["config", "schema"])

    assert "grpo" in json.loads(result.stdout)["properties"]


def test_schema_as_markdown_is_the_documentation(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["config", "schema", "--markdown"])

    assert result.stdout.startswith("# Configuration\n")
