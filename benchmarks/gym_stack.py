"""What the benchmarks run against: PostgreSQL, vLLM with the demo policy behind a fault proxy, the demo's Gym servers.

All real, on free loopback ports, in a scratch folder, gone when the block ends. The policy is the demo's, made if it is
not there.
"""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from activities.generation.refit import refit
from activities.generation.vllm import VllmServer
from activities.generation.weights import weights_digest
from activities.rollout_activities import RolloutActivities
from activities.rollouts.dataset import scan
from activities.rollouts.gym_agent import GymAgents
from activities.run_context import RunContexts
from benchmarks.fault_proxy import FaultProxy
from configs.load import dump_recipe, load_recipe
from configs.recipe import Recipe
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from storage.migrate import migrate
from workers.demo.dataset import write_datasets
from workers.demo.policy import make_policy
from workers.environments.paths import child_environment, environment_python
from workers.gym.addresses import server_urls
from workers.stack.child import Child, running
from workers.stack.ports import free_port, free_ports
from workers.stack.postgres import EmbeddedPostgres
from workers.stack.probes import gym_answers
from workers.stack.service import Launch, Service
from workers.stack.vllm import EmbeddedVllm
from workflows.messages import WeightsRef

READY_TIMEOUT_S = 300.0
REFIT_TIMEOUT_S = 60.0


@dataclass
class GymStack:
    """The servers, and the activities of a rollout worker in this process."""

    folder: Path
    recipe: Recipe
    database: Database
    ledger: Ledger
    blobs: BlobStore
    agents: GymAgents
    vllm: VllmServer
    proxy: FaultProxy
    gym: Child | None = field(default=None)

    def activities(self) -> RolloutActivities:
        """As a rollout worker that has just started has them."""
        return RolloutActivities(self.ledger, self.blobs, RunContexts(self.ledger), self.agents, (self.vllm,))

    async def start_run(self, run_id: str, rollout_timeout_s: float) -> None:
        """A run of the demo's rows with this deadline of one attempt."""
        sections = self.recipe.model_dump(mode="json")
        sections["rollouts"] |= {"rollout_timeout_s": rollout_timeout_s, "heartbeat_timeout_s": rollout_timeout_s}
        rows = scan(self.recipe.run.dataset)
        await self.ledger.runs.create(run_id, f"queue-{run_id}", sections, rows.digest, len(rows), self.policy.digest)

    @property
    def policy(self) -> WeightsRef:
        """Version 0: the policy after its warm start."""
        path = self.recipe.run.model
        return WeightsRef(version=0, path=str(path), digest=weights_digest(path))

    async def start_gym(self) -> None:
        """Start the Gym servers; returns when they answer."""
        self.gym = await Child.start(_gym_service(self.recipe, self.folder / "recipe.yaml"), self.folder / "gym.log")
        await self.gym.wait_ready()

    async def kill_gym(self) -> None:
        """SIGKILL to the process of every Gym server."""
        assert self.gym is not None
        os.killpg(self.gym.identity.pid, signal.SIGKILL)
        await self.gym.wait()
        self.gym = None

    async def stop_gym(self) -> None:
        """SIGTERM, if it runs."""
        if self.gym is not None:
            await self.gym.stop()


@asynccontextmanager
async def gym_stack(folder: Path) -> AsyncIterator[GymStack]:
    """All servers ready, and policy version 0 stamped."""
    async with AsyncExitStack() as stack:
        demo = load_recipe("demo")
        make_policy(demo.run.model, print)
        write_datasets(demo.run.dataset.parent)
        postgres = EmbeddedPostgres(folder, free_port())
        stack.callback(postgres.delete)
        await stack.enter_async_context(running(postgres.service(), folder / "postgres.log"))
        asked = load_recipe(
            "demo",
            [
                f"storage.dsn={postgres.dsn}",
                f"storage.blobs_url={folder / 'blobs'}",
                f"generation.embedded.port={free_port()}",
            ],
        )
        embedded = EmbeddedVllm(asked)
        await stack.enter_async_context(running(embedded.service(), folder / "vllm.log"))
        vllm = VllmServer(embedded.url, refit_timeout_s=REFIT_TIMEOUT_S)
        stack.push_async_callback(vllm.close)
        proxy = stack.enter_context(FaultProxy(embedded.url))
        recipe = load_recipe_with(asked, proxy.url, free_ports(len(asked.gym.servers)))
        (folder / "recipe.yaml").write_text(dump_recipe(recipe, reveal_secrets=True))
        await migrate(recipe.storage)
        database = Database(recipe.storage)
        stack.push_async_callback(database.close)
        blobs = BlobStore(recipe.storage.blobs_url)
        agents = GymAgents(server_urls(recipe.gym), max_connections=16)
        stack.push_async_callback(agents.close)
        built = GymStack(folder, recipe, database, Ledger(database, blobs), blobs, agents, vllm, proxy)
        await refit([vllm], built.policy, "wait")
        stack.push_async_callback(built.stop_gym)
        await built.start_gym()
        yield built


def load_recipe_with(recipe: Recipe, endpoint: str, gym_port: int) -> Recipe:
    """The recipe with the proxy as its vLLM endpoint."""
    sections = recipe.model_dump(mode="json") | {}
    sections["storage"]["dsn"] = recipe.storage.dsn.get_secret_value() if recipe.storage.dsn else None
    sections["generation"]["endpoints"] = [endpoint]
    sections["gym"]["port"] = gym_port
    return Recipe.model_validate(sections)


def _gym_service(recipe: Recipe, file: Path) -> Service:
    argv = (str(environment_python("gym")), "-m", "workers.gym.serve", "--recipe", str(file))

    async def launch() -> Launch:
        return Launch(argv, {**child_environment(), "OMP_NUM_THREADS": "1"})

    async def ready() -> None:
        for name, url in server_urls(recipe.gym).items():
            await gym_answers(name, url)

    return Service("gym", launch, ready, READY_TIMEOUT_S)
