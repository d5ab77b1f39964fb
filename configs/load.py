"""From a YAML file and dotted overrides to a Recipe, or a ConfigError that lists everything that is wrong.

Relative paths stay relative to the working folder; nothing but the recipe file and the environment is read.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import SecretStr, ValidationError

from configs import keys, overrides, problems, secrets, yaml_text
from configs.errors import ConfigError
from configs.recipe import Recipe

RECIPES = Path(__file__).parent / "recipes"


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a packaged recipe by its name (`demo`), and apply `key=value` overrides in order."""
    file = _find(source)
    return _build(_read(file), overrides, str(file))


def override_recipe(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The same recipe with `key=value` overrides."""
    return _build(_plain(recipe, reveal_secrets=True), overrides, "The recipe of the run")


def dump_recipe(recipe: Recipe, reveal_secrets: bool = False) -> str:
    """YAML with every key. With `reveal_secrets`, `load_recipe` reads the same recipe back."""
    return yaml_text.dump(_plain(recipe, reveal_secrets=reveal_secrets))


def packaged_recipes() -> list[str]:
    """Names of the recipes that come with Onbelay."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _build(settings: dict[str, Any], texts: Sequence[str], source: str) -> Recipe:
    parsed, mistakes = _apply_overrides(texts, settings)
    origin = _origins(source, parsed)
    mistakes += _expand_secrets(settings, origin)
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as error:
        raise ConfigError([*mistakes, *problems.describe(error, origin)]) from error
    if mistakes:
        raise ConfigError(mistakes)
    return recipe


def _plain(recipe: Recipe, *, reveal_secrets: bool) -> dict[str, Any]:
    """The recipe as YAML's types."""

    def plain(value: Any) -> Any:
        if isinstance(value, SecretStr):
            return secrets.escape(value.get_secret_value()) if reveal_secrets else "**********"
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in cast(dict[str, Any], value).items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in cast(Sequence[Any], value)]
        return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)

    return plain(recipe.model_dump())


def _find(source: str | Path) -> Path:
    file = Path(source)
    if file.is_file():
        return file
    packaged = RECIPES / f"{file.name.removesuffix('.yaml')}.yaml"
    if file.name == str(source) and packaged.is_file():
        return packaged
    state = "is a folder" if file.is_dir() else "does not exist"
    names = ", ".join(packaged_recipes())
    raise ConfigError([f"{source}: this recipe {state}. Give a YAML file, or the name of a packaged recipe: {names}."])


def _read(file: Path) -> dict[str, Any]:
    try:
        settings = yaml_text.parse(file.read_text(encoding="utf-8"))
    except yaml_text.YamlMistake as mistake:
        raise ConfigError([f"{file}: not a valid YAML file: {mistake}."]) from mistake
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: not a text file in UTF-8 ({error.reason} at byte {error.start})."]) from error
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}."]) from error
    if not isinstance(settings, dict):
        found = "empty" if settings is None else "something else"
        raise ConfigError([f"{file}: a recipe is a block of sections (run:, grpo:, ...), but this file is {found}."])
    return cast(dict[str, Any], settings)


def _apply_overrides(texts: Sequence[str], settings: dict[str, Any]) -> tuple[list[overrides.Override], list[str]]:
    parsed: list[overrides.Override] = []
    mistakes: list[str] = []
    for text in texts:
        try:
            parsed.append(overrides.parse(text))
            overrides.apply(parsed[-1], settings)
        except overrides.OverrideMistake as mistake:
            mistakes.append(str(mistake))
    return parsed, mistakes


def _origins(source: str, parsed: Sequence[overrides.Override]) -> Callable[[str], str]:
    def origin(path: str) -> str:
        texts = [override.text for override in parsed if override.covers(path)]
        if texts:
            return f"Override `{texts[-1]}`"
        return f"{source} with overrides" if any(override.is_within(path) for override in parsed) else source

    return origin


def _expand_secrets(settings: dict[str, Any], origin: Callable[[str], str]) -> list[str]:
    mistakes: list[str] = []
    for path in (key.path for key in keys.all_keys() if key.is_secret):
        section, _, name = path.partition(".")
        block = settings.get(section)
        if not isinstance(block, dict) or not isinstance(value := cast(dict[str, Any], block).get(name), str):
            continue
        try:
            block[name] = secrets.expand(value, os.environ)
        except secrets.MissingVariable as missing:
            mistakes.append(
                f"{origin(path)}: `{path}` refers to the environment variable {missing}, which is not set. "
                f"Set it, or give `{path}` another value."
            )
    return mistakes
