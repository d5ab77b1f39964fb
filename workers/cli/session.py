"""What a command works with: the ledger and Temporal, at the addresses of a recipe or of the running stack."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from temporalio.client import Client

from configs.load import load_recipe
from configs.recipe import Recipe
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from storage.migrate import check_schema
from workers.cli.exits import CommandError
from workers.stack.control import resolved_recipe
from workers.temporal_client import connect


def state_dir() -> Path:
    """The folder of the embedded stack's state."""
    return Path(os.environ.get("ONBELAY_STATE_DIR", ".onbelay"))


@dataclass(frozen=True)
class Session:
    """An open connection to both systems; `recipe` has every address filled in."""

    recipe: Recipe
    ledger: Ledger
    client: Client

    def ui_link(self, workflow_id: str) -> str | None:
        """Link to a workflow in the Temporal UI."""
        base = self.recipe.temporal.ui_url
        if base is None:
            return None
        quoted = workflow_id.replace("/", "%2F")
        return f"{base.rstrip('/')}/namespaces/{self.recipe.temporal.namespace}/workflows/{quoted}"


def deployment(source: str | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with addresses: those it names, or those of the running stack."""
    if source is not None:
        return addressed(load_recipe(source, overrides), source)
    running = resolved_recipe(state_dir())
    if running is None:
        raise CommandError(
            "No stack is up here. Start it: `onbelay up RECIPE`, or name a recipe with addresses: --recipe FILE."
        )
    return running


def addressed(recipe: Recipe, source: str) -> Recipe:
    """`recipe` as it is where it names every address, else with those of the running stack."""
    if _is_addressed(recipe):
        return recipe
    running = resolved_recipe(state_dir())
    if running is None:
        raise CommandError(
            f"{source} leaves servers to the embedded stack, and no stack is up here. Start it: `onbelay up {source}`."
        )
    if running.run.model != recipe.run.model:
        raise CommandError(
            f"The stack serves {running.run.model}, but {source} trains {recipe.run.model}. Restart the stack: "
            f"`onbelay down`, then `onbelay up {source}`."
        )
    return recipe.model_copy(
        update={
            "storage": running.storage,
            "temporal": running.temporal,
            "generation": running.generation,
            "gym": running.gym,
        }
    )


def with_addresses(recipe: Recipe, running: Recipe) -> Recipe:
    """`recipe` with the servers of `running`; what its policy samples stays its own."""
    port = running.generation.embedded.port
    generation = recipe.generation.model_copy(
        update={
            "endpoints": running.generation.endpoints,
            "embedded": recipe.generation.embedded.model_copy(update={"port": port}),
        }
    )
    return recipe.model_copy(
        update={
            "storage": running.storage,
            "temporal": running.temporal,
            "generation": generation,
            "gym": running.gym,
        }
    )


def _is_addressed(recipe: Recipe) -> bool:
    gym = recipe.gym.agents or recipe.gym.environments
    return all((recipe.storage.dsn, recipe.temporal.address, recipe.generation.endpoints, gym))


@asynccontextmanager
async def session(source: str | None, overrides: Sequence[str] = ()) -> AsyncIterator[Session]:
    """Open both systems; clear errors when one does not answer."""
    async with session_of(deployment(source, overrides)) as opened:
        yield opened


@asynccontextmanager
async def session_of(recipe: Recipe) -> AsyncIterator[Session]:
    """Open both systems at the addresses of `recipe`."""
    database = Database(recipe.storage)
    try:
        await database.ping()
        await check_schema(database)
        yield Session(recipe, Ledger(database, BlobStore(recipe.storage.blobs_url)), await connect(recipe.temporal))
    finally:
        await database.close()
