"""What a stack consists of: one service for each address that the recipe leaves open, and the workers.

PostgreSQL, Temporal, vLLM and the Gym servers start side by side. Workers start when all of them are ready and the
ledger's schema is at its newest revision; the trainer, whose imports take the longest, does not wait for vLLM and Gym.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

from storage.migrate import migrate
from workers.environments.paths import child_environment, environment_python
from workers.gym.addresses import server_urls
from workers.stack.postgres import EmbeddedPostgres
from workers.stack.probes import gym_answers, temporal_has_attributes, vllm_answers
from workers.stack.recipes import StackRecipes, recipe_path
from workers.stack.service import Action, Launch, Service
from workers.stack.temporal import EmbeddedTemporal
from workers.stack.vllm import EmbeddedVllm

MIGRATION_TIMEOUT_S = 660.0
CHECK_TIMEOUT_S = 60.0
GYM_READY_TIMEOUT_S = 900.0  # a policy model that records waits for vLLM first
WORKER_READY_TIMEOUT_S = 240.0  # includes their patience with Temporal and PostgreSQL
WORKER_STOP_TIMEOUT_S = 40.0  # above the grace period of running activities
HANDING_OVER_S = 15.0  # after a rollout worker's grace period


def stack_members(recipes: StackRecipes, state_dir: Path) -> list[Service | Action]:
    """All services and actions of the stack."""
    servers = [_postgres(recipes, state_dir), _temporal(recipes, state_dir), _vllm(recipes), _gym(recipes, state_dir)]
    needs_postgres = ("postgres",) if recipes.asked.storage.dsn is None else ()
    ledger = Action("ledger", lambda: migrate(recipes.stack.storage), MIGRATION_TIMEOUT_S, needs_postgres)
    after = (ledger.name, *(server.name for server in servers))
    return [
        *servers,
        ledger,
        _worker(
            "rollout-worker",
            state_dir,
            after,
            ("-m", "workers.rollout_worker"),
            stop_timeout_s=max(WORKER_STOP_TIMEOUT_S, recipes.stack.rollouts.shutdown_grace_s + HANDING_OVER_S),
        ),
        _worker("generation-worker", state_dir, after, ("-m", "workers.generation_worker")),
        _trainer(recipes, state_dir, (ledger.name, "temporal")),
    ]


def _postgres(recipes: StackRecipes, state_dir: Path) -> Service | Action:
    if recipes.asked.storage.dsn is None:
        return EmbeddedPostgres(state_dir, recipes.stack.storage.embedded_port).service()
    return Action("postgres", _nothing, CHECK_TIMEOUT_S)  # the ledger's migration says whether it answers


def _temporal(recipes: StackRecipes, state_dir: Path) -> Service | Action:
    config = recipes.stack.temporal
    if recipes.asked.temporal.address is not None:
        return Action("temporal", lambda: temporal_has_attributes(config), CHECK_TIMEOUT_S)
    return EmbeddedTemporal(
        config.embedded_port,
        config.embedded_ui_port,
        config.namespace,
        timedelta(days=config.retention_days),
        state_dir.resolve() / "temporal.db",
    ).service()


def _vllm(recipes: StackRecipes) -> Service | Action:
    if not recipes.asked.generation.endpoints:
        return EmbeddedVllm(recipes.stack).service()
    urls = [str(url) for url in recipes.stack.generation.endpoints]
    return Action("vllm", _all_answer([lambda url=url: vllm_answers(url) for url in urls]), CHECK_TIMEOUT_S)


def _gym(recipes: StackRecipes, state_dir: Path) -> Service | Action:
    asked = recipes.asked.gym
    embedded = not (asked.agents or asked.environments)
    given = {name: str(url) for name, url in (asked.agents | asked.environments).items()}
    urls = server_urls(recipes.stack.gym) if embedded else given
    ready = _all_answer([lambda name=name, url=url: gym_answers(name, url) for name, url in urls.items()])
    if not embedded:
        return Action("gym", ready, CHECK_TIMEOUT_S)
    argv = (str(environment_python("gym")), "-m", "workers.gym.serve", "--recipe", str(recipe_path(state_dir, "stack")))
    return Service(
        name="gym",
        launch=_always(Launch(argv, {**child_environment(), "OMP_NUM_THREADS": "1"})),
        ready=ready,
        ready_timeout_s=GYM_READY_TIMEOUT_S,
        address=" ".join(f"{name}={url}" for name, url in urls.items()),
    )


def _trainer(recipes: StackRecipes, state_dir: Path, after: tuple[str, ...]) -> Service:
    training = recipes.stack.training
    threads = training.threads or max(1, (os.cpu_count() or 1) // training.world_size)

    module = (
        "-m",
        "workers.stack.torchrun",
        "--nproc-per-node",
        str(training.world_size),
        "-m",
        "workers.trainer_worker",
    )
    return _worker("trainer-worker", state_dir, after, module, threads)


def _worker(
    name: str,
    state_dir: Path,
    after: tuple[str, ...],
    module: tuple[str, ...],
    threads: int = 1,
    stop_timeout_s: float = WORKER_STOP_TIMEOUT_S,
) -> Service:
    """A worker process; it says that it polls by writing `ready/<name>`, which is removed before each start."""
    sign = state_dir.resolve() / "ready" / name
    argv = (sys.executable, *module, "--recipe", str(recipe_path(state_dir, "recipe")))

    async def launch() -> Launch:
        sign.unlink(missing_ok=True)
        # Threads that spin while they wait make a step ten times slower when other processes want the cores.
        return Launch(argv, {**child_environment(), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"})

    async def ready() -> None:
        if not sign.exists():
            raise FileNotFoundError(f"{name} does not poll yet ({sign} does not exist)")

    return Service(
        name=name,
        launch=launch,
        ready=ready,
        ready_timeout_s=WORKER_READY_TIMEOUT_S,
        after=after,
        stop_timeout_s=stop_timeout_s,
    )


def _always(launch: Launch) -> Callable[[], Awaitable[Launch]]:
    async def same() -> Launch:
        return launch

    return same


def _all_answer(probes: list[Callable[[], Awaitable[None]]]) -> Callable[[], Awaitable[None]]:
    async def ask() -> None:
        await asyncio.gather(*(probe() for probe in probes))

    return ask


async def _nothing() -> None:
    return None
