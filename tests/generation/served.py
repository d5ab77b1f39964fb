"""One real vLLM server for all tests that need one, started with the project's command line."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from configs.recipe import Recipe
from tests.generation.models import random_policy, safe_opener
from tests.gym.exact.http_endpoint import HttpEndpoint
from workers.gym.policy_model.endpoint import GENERATE
from workers.stack.child import running
from workers.stack.ports import free_port
from workers.stack.vllm import EmbeddedVllm
from workflows.messages import WeightsRef

T = TypeVar("T")

CONTEXT_TOKENS = 2048
PATIENCE_S = 120.0


@dataclass(frozen=True)
class ServedPolicy:
    """A server that was started with `weights[0]`. The others have the same shape: two more random policies, and
    `opener`, which opens safes. Every test loads what it needs."""

    url: str
    weights: tuple[WeightsRef, ...]
    opener: WeightsRef

    async def begun(self, endpoint: HttpEndpoint, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a call of the endpoint; returns when its generation is under way, or is over already. Requests are
        decoded together: it has begun when a request that was sent after it has its first token."""
        sampling = {"max_tokens": 2, "ignore_eos": True}
        later = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": sampling, "stream": True}
        async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S) as client:
            endpoint.generating.clear()
            task = asyncio.create_task(call)
            await endpoint.generating.wait()
            async with client.stream("POST", GENERATE, json=later) as answer:
                await anext(answer.aiter_lines())
        return task


@asynccontextmanager
async def serving_policy(folder: Path) -> AsyncIterator[ServedPolicy]:
    """Start the server, and train the policy that opens safes meanwhile."""
    weights = tuple(random_policy(folder / f"policy-{version}", version) for version in range(3))
    training = asyncio.create_task(asyncio.to_thread(safe_opener, folder / "opener"))
    embedded = {
        "port": free_port(),
        "max_model_len": CONTEXT_TOKENS,
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_r1",
    }
    recipe = Recipe.model_validate(
        {"run": {"model": weights[0].path, "dataset": "rows.jsonl"}, "generation": {"embedded": embedded}}
    )
    vllm = EmbeddedVllm(recipe)
    async with running(vllm.service(), folder / "vllm.log"):
        yield ServedPolicy(vllm.url, weights, await training)
