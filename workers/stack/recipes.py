"""The three recipes of a stack, kept in its state folder: as asked, as run, and as the workers get it.

* `asked.yaml`: what the user gave; a missing address means that the stack starts that server.
* `stack.yaml`: every port chosen and every address filled in; `gym.servers` still says what to serve.
* `recipe.yaml`: the same for workers and commands: `gym.agents` and `gym.environments` hold the addresses instead.

All have mode 0600: they contain passwords. `folder` names the folder in which the stack was started.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import HttpUrl, SecretStr

from configs.errors import ConfigError
from configs.load import dump_recipe, load_recipe
from configs.recipe import Recipe
from workers.gym.addresses import agent_urls, environment_urls
from workers.stack.errors import StackError
from workers.stack.ports import LOOPBACK, choose_port
from workers.stack.postgres import EmbeddedPostgres

MODEL_FILES = ("config.json", "tokenizer_config.json")


@dataclass(frozen=True)
class StackRecipes:
    """What one stack runs."""

    asked: Recipe
    stack: Recipe
    workers: Recipe

    @classmethod
    def resolve(cls, asked: Recipe, state_dir: Path) -> "StackRecipes":
        """Choose ports and fill in addresses; PortTaken names the key of a port that is in use."""
        storage, temporal, generation, gym = asked.storage, asked.temporal, asked.generation, asked.gym
        if storage.dsn is None:
            port = choose_port(storage.embedded_port, "storage.embedded_port")
            dsn = SecretStr(EmbeddedPostgres(state_dir, port).dsn)
            storage = storage.model_copy(update={"dsn": dsn, "embedded_port": port})
        if temporal.address is None:
            port = choose_port(temporal.embedded_port, "temporal.embedded_port")
            ui_port = choose_port(temporal.embedded_ui_port, "temporal.embedded_ui_port")
            temporal = temporal.model_copy(
                update={
                    "address": f"{LOOPBACK}:{port}",
                    "ui_url": f"http://{LOOPBACK}:{ui_port}",
                    "embedded_port": port,
                    "embedded_ui_port": ui_port,
                }
            )
        if not generation.endpoints:
            check_model(asked.run.model)
            port = choose_port(generation.embedded.port, "generation.embedded.port")
            embedded = generation.embedded.model_copy(update={"port": port})
            endpoints = (HttpUrl(f"http://{LOOPBACK}:{port}"),)
            generation = generation.model_copy(update={"endpoints": endpoints, "embedded": embedded})
        running = {"agents": gym.agents, "environments": gym.environments}
        if not (gym.agents or gym.environments):
            if not gym.servers:
                raise StackError(
                    "The recipe has no Gym: give gym.agents or gym.environments (running servers), or gym.servers (to "
                    "be started)."
                )
            gym = gym.model_copy(update={"port": choose_port(gym.port, "gym.port", count=len(gym.servers))})
            running = {
                "agents": {name: HttpUrl(url) for name, url in agent_urls(gym).items()},
                "environments": {name: HttpUrl(url) for name, url in environment_urls(gym).items()},
            }
        sections = {"storage": storage, "temporal": temporal, "generation": generation, "gym": gym}
        stack = asked.model_copy(update=sections)
        workers = stack.model_copy(update={"gym": gym.model_copy(update={**running, "servers": {}})})
        return cls(asked, stack, workers)

    def save(self, state_dir: Path) -> None:
        """Write all three."""
        state_dir.mkdir(parents=True, exist_ok=True)
        for name, recipe in (("asked", self.asked), ("stack", self.stack), ("recipe", self.workers)):
            path = recipe_path(state_dir, name)
            scratch = path.with_name(f"{path.name}.{os.getpid()}")
            scratch.touch(mode=0o600)
            with scratch.open("w", encoding="utf-8") as file:
                file.write(dump_recipe(recipe, reveal_secrets=True))
                file.flush()
                os.fsync(file.fileno())  # a stack is started again from them after a power cut
            scratch.replace(path)
        (state_dir / "folder").write_text(f"{Path.cwd()}\n", encoding="utf-8")

    @classmethod
    def load(cls, state_dir: Path) -> "StackRecipes | None":
        """What was saved last; None when there is nothing that this version can read."""
        try:
            return cls(*(load_recipe(recipe_path(state_dir, name)) for name in ("asked", "stack", "recipe")))
        except ConfigError:
            return None


def last_asked(state_dir: Path) -> Recipe | None:
    """The recipe of the last stack of this folder; None when there was none.

    StackError when it cannot be used: paths in it are relative to the folder where it was started.
    """
    asked = recipe_path(state_dir, "asked")
    if not asked.exists():
        return None
    try:
        recipe = load_recipe(asked)
    except ConfigError as error:
        raise StackError(
            f"{error} It is the recipe of the last stack of {state_dir}; name one: `onbelay up RECIPE`."
        ) from error
    folder = (state_dir / "folder").read_text(encoding="utf-8").strip() if (state_dir / "folder").exists() else None
    if folder not in (None, str(Path.cwd())):
        raise StackError(
            f"The last stack of {state_dir} was started in {folder}, and the paths of its recipe start there: run the "
            "command there, or name a recipe."
        )
    return recipe


def recipe_path(state_dir: Path, name: str) -> Path:
    """Path of one of the recipes."""
    return state_dir.resolve() / f"{name}.yaml"


def check_model(folder: Path) -> None:
    """The embedded vLLM needs a model with its tokenizer."""
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    if missing:
        state = f"has no {' and no '.join(missing)}" if folder.is_dir() else "does not exist"
        raise StackError(
            f"run.model: {folder} {state}. Give the folder of a Hugging Face model with its tokenizer "
            "(`onbelay demo` makes the demo's)."
        )
