"""What the benchmark runs against: PostgreSQL, the sampling model, a process of NeMo-Gym servers, and the fault gate.

All on free loopback ports, in a scratch folder, gone when the block ends.
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import SecretStr

from activities.generation.vllm import VllmServer
from activities.ledger_activities import LedgerActivities
from activities.rollout_activities import RolloutActivities
from activities.rollouts.dataset import Dataset, scan
from activities.rollouts.gym_agent import GymAgents
from activities.run_context import RunContexts
from benchmarks.goodput.gate import Gate
from benchmarks.goodput.settings import Settings
from configs.load import dump_recipe
from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from storage.migrate import migrate
from workers.environments.paths import child_environment, environment_python
from workers.gym.addresses import server_urls
from workers.stack.child import running
from workers.stack.ports import free_port, free_ports
from workers.stack.postgres import EmbeddedPostgres
from workers.stack.probes import gym_answers, vllm_answers
from workers.stack.service import Launch, Service

AGENT, MODEL, ENVIRONMENT = "agent", "policy_model", "environment"
READY_TIMEOUT_S = 300.0
REFIT_TIMEOUT_S = 60.0
TOOL = {
    "type": "function",
    "name": "use",
    "description": "Use it until nothing is left.",
    "strict": False,
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}


@dataclass(frozen=True)
class GoodputStack:
    """The servers, and the activities of the workers in this process."""

    recipe: Recipe
    rows: Dataset
    ledger: Ledger
    blobs: BlobStore
    rollouts: RolloutActivities
    writing: LedgerActivities
    gate: Gate
    model_url: str

    async def sampled_tokens(self) -> int:
        """Tokens that the model has sampled since it was started, for whomever."""
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"{self.model_url}/sampled")).json()["tokens"]


@asynccontextmanager
async def goodput_stack(folder: Path, settings: Settings) -> AsyncIterator[GoodputStack]:
    """All servers ready."""
    async with AsyncExitStack() as stack:
        postgres = EmbeddedPostgres(folder, free_port())
        stack.callback(postgres.delete)
        await stack.enter_async_context(running(postgres.service(), folder / "postgres.log"))
        sampler = f"http://127.0.0.1:{(port := free_port())}"
        await stack.enter_async_context(running(_sampler(sampler, port, settings), folder / "sampler.log"))
        gate = await stack.enter_async_context(Gate())
        recipe = _recipe(folder, postgres.dsn, sampler, gate.model_port, settings)
        await migrate(recipe.storage)
        database = Database(recipe.storage)
        stack.push_async_callback(database.close)
        file = folder / "recipe.yaml"
        file.write_text(dump_recipe(recipe, reveal_secrets=True))
        await stack.enter_async_context(running(_gym(recipe, file), folder / "gym.log"))
        urls = server_urls(recipe.gym)
        gate.lead_to(agent=urls[AGENT], model=urls[MODEL])
        agents = GymAgents({AGENT: gate.agent_url}, max_connections=settings.concurrent)
        stack.push_async_callback(agents.close)
        vllm = VllmServer(sampler, refit_timeout_s=REFIT_TIMEOUT_S)
        stack.push_async_callback(vllm.close)
        blobs = BlobStore(recipe.storage.blobs_url)
        ledger = Ledger(database, blobs)
        contexts = RunContexts(ledger)
        yield GoodputStack(
            recipe,
            scan(recipe.run.dataset),
            ledger,
            blobs,
            RolloutActivities(ledger, blobs, contexts, agents, (vllm,)),
            LedgerActivities(ledger, blobs, contexts),
            gate,
            sampler,
        )


def _recipe(folder: Path, dsn: str, sampler: str, gate_port: int, settings: Settings) -> Recipe:
    """One row for each prompt of the run; the product's defaults where nothing else is said."""
    dataset = folder / "rows.jsonl"
    rows = (
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": f"Task {row}: use the tool until nothing is left."}],
                "tools": [TOOL],
            },
            "agent_ref": {"type": "responses_api_agents", "name": AGENT},
            "episode_seed": settings.seed,
        }
        for row in range(settings.prompts)
    )
    dataset.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    servers = {
        MODEL: {"type": "responses_api_models", "implementation": "workers.gym.policy_model.app"},
        ENVIRONMENT: {"type": "resources_servers", "implementation": "benchmarks.goodput.environment"},
        AGENT: {
            "type": "responses_api_agents",
            "implementation": "benchmarks.goodput.agent",
            "config": {
                "model_server": {"type": "responses_api_models", "name": MODEL},
                "resources_server": {"type": "resources_servers", "name": ENVIRONMENT},
                "gate_port": gate_port,
            },
        },
    }
    return Recipe.model_validate(
        {
            "run": {"model": folder, "dataset": dataset},
            "grpo": {"num_prompts_per_step": settings.groups, "num_generations_per_prompt": settings.rollouts},
            "rollouts": {
                "rollout_timeout_s": settings.rollout_timeout_s,
                "heartbeat_timeout_s": settings.rollout_timeout_s,
                "max_concurrent_rollouts": settings.concurrent,
            },
            "generation": {"endpoints": [sampler], "embedded": {"reasoning_parser": "deepseek_r1"}},
            "training": {"output_dir": folder / "training"},
            "storage": StorageConfig(dsn=SecretStr(dsn), blobs_url=str(folder / "blobs")),
            "gym": {"port": free_ports(len(servers)), "servers": servers},
        }
    )


def _sampler(url: str, port: int, settings: Settings) -> Service:
    options = ("--port", str(port), "--seed", str(settings.seed), "--token-ms", str(settings.token_ms))
    argv = (sys.executable, "-m", "benchmarks.goodput.sampler", *options)

    async def launch() -> Launch:
        return Launch(argv, child_environment())

    async def ready() -> None:
        await vllm_answers(url)

    return Service("sampler", launch, ready, READY_TIMEOUT_S)


def _gym(recipe: Recipe, file: Path) -> Service:
    argv = (str(environment_python("gym")), "-m", "workers.gym.serve", "--recipe", str(file))

    async def launch() -> Launch:
        return Launch(argv, {**child_environment(), "OMP_NUM_THREADS": "1"})

    async def ready() -> None:
        for name, url in server_urls(recipe.gym).items():
            await gym_answers(name, url)

    return Service("gym", launch, ready, READY_TIMEOUT_S)
