"""The checks of `onbelay doctor`: each says what it found, or what to do. A check never raises and changes nothing."""

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client

from activities.generation.vllm import servers_of
from configs.recipe import Recipe
from storage.database import Database
from storage.migrate import check_schema
from workers.environments.paths import EnvironmentName, environment_python
from workers.stack.probes import gym_answers, registration_command
from workers.stack.search_attributes import missing_search_attributes
from workers.temporal_client import connect

CHECK_TIMEOUT_S = 60.0
OLDEST_PYTHON = (3, 11)
PACKAGES: dict[EnvironmentName, str] = {"onbelay": "temporalio", "vllm": "vllm", "gym": "nemo_gym"}
NEED_A_STACK = "No stack is up here: run `onbelay up`, or name a recipe with addresses: `onbelay doctor RECIPE`."


@dataclass(frozen=True)
class Finding:
    """The result of one check; `text` is what was found, or why it failed and what to do."""

    name: str
    ok: bool
    text: str


class CheckFailed(Exception):
    """A check did not pass; the text says what to do."""


async def check_all(recipe: Recipe | None) -> list[Finding]:
    """This machine, then the five systems at the addresses of the recipe."""
    checks: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        ("Python", _python),
        ("C++ compiler", _compiler),
        *((f"{name} environment", lambda name=name, package=package: _environment(name, package))
          for name, package in PACKAGES.items()),
        ("PostgreSQL", lambda: _postgres(_needed(recipe))),
        ("Temporal", lambda: _temporal(_needed(recipe))),
        ("vLLM", lambda: _vllm(_needed(recipe))),
        ("NeMo-Gym", lambda: _gym(_needed(recipe))),
        ("Megatron-core", _megatron),
        ("workers", lambda: _workers(_needed(recipe))),
    ]  # fmt: skip
    return [await _finding(name, check) for name, check in checks]


async def _finding(name: str, check: Callable[[], Awaitable[str]]) -> Finding:
    try:
        return Finding(name, True, await asyncio.wait_for(check(), CHECK_TIMEOUT_S))
    except TimeoutError:
        return Finding(name, False, f"No answer within {CHECK_TIMEOUT_S:g} s.")
    except Exception as error:  # the text of any error is the finding
        return Finding(name, False, str(error) or type(error).__name__)


def _needed(recipe: Recipe | None) -> Recipe:
    if recipe is None:
        raise CheckFailed(NEED_A_STACK)
    return recipe


async def _python() -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        raise CheckFailed(f"Python {version} is too old: install 3.11 or later and run `make setup`.")
    return f"{version} at {sys.executable}"


async def _compiler() -> str:
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise CheckFailed("Not found: install one (Debian, Ubuntu: `apt install build-essential`).")
    return found


async def _environment(name: EnvironmentName, package: str) -> str:
    python = environment_python(name)
    code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('{package}', 'workers', 'configs'))))"
    await _run(python, code, f"It lacks {package} or this project: remove {python.parents[1]} and run `make setup`.")
    return str(python.parents[1])


async def _postgres(recipe: Recipe) -> str:
    database = Database(recipe.storage)
    try:
        await database.ping()
        await check_schema(database)
    finally:
        await database.close()
    return f"{database.address}, schema at the newest revision"


async def _temporal(recipe: Recipe) -> str:
    client = await connect(recipe.temporal)
    missing = await missing_search_attributes(client)
    if missing:
        command = registration_command(client.namespace, missing)
        raise CheckFailed(f"Search attributes are missing: `onbelay up` registers them, or type `{command}`.")
    return f"{recipe.temporal.address}, namespace {client.namespace}, search attributes registered"


async def _vllm(recipe: Recipe) -> str:
    answers: list[str] = []
    for server in servers_of(recipe.generation):
        async with server:
            await server.health()
            paused = " (paused)" if await server.is_paused() else ""
            answers.append(f"{server.url} serves {await server.weight_version()}{paused}")
    if not answers:
        raise CheckFailed(NEED_A_STACK)
    return "; ".join(answers)


async def _gym(recipe: Recipe) -> str:
    servers = recipe.gym.agents | recipe.gym.environments
    if not servers:
        raise CheckFailed(NEED_A_STACK)
    for name, url in servers.items():
        await gym_answers(name, str(url))
    return ", ".join(f"{name} at {url}" for name, url in servers.items())


async def _megatron() -> str:
    code = "import torch, megatron.core as m; print(torch.__version__, m.__version__, torch.cuda.device_count())"
    python = environment_python("onbelay")
    answer = await _run(python, code, f"torch or megatron.core cannot be imported by {python}: run `make setup` again.")
    torch_version, megatron_version, devices = answer.split()
    return f"megatron-core {megatron_version}, torch {torch_version}, {devices} CUDA devices"


async def _workers(recipe: Recipe) -> str:
    client = await connect(recipe.temporal)
    queue = recipe.temporal.task_queue
    queues = [f"{queue}{suffix}" for suffix in ("", "-rollouts", "-trainer", "-generation")]
    unpolled = [name for name in queues if not await _is_polled(client, name)]
    if unpolled:
        raise CheckFailed(f"Nobody polls {', '.join(unpolled)}: see `onbelay status` and `onbelay logs NAME`.")
    return f"every task queue is polled: {', '.join(queues)}"


async def _is_polled(client: Client, queue: str) -> bool:
    """Pollers that were seen in the last minutes, as Temporal reports them."""
    kinds: Sequence[TaskQueueType.ValueType] = (
        TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
    )
    for kind in kinds:
        described = await client.workflow_service.describe_task_queue(
            DescribeTaskQueueRequest(namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind)
        )
        if described.pollers:
            return True
    return False


async def _run(python: Path, code: str, advice: str) -> str:
    process = await asyncio.create_subprocess_exec(
        str(python), "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise CheckFailed(" ".join([advice, *lines[-1:]]))
    return output.decode().strip()
