"""A real vLLM with a small policy that opens safes, started with the project's command line."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from activities.generation.refit import refit
from activities.generation.vllm import VllmServer
from activities.generation.weights import weights_digest
from configs.recipe import Recipe
from tests.gym.exact.http_endpoint import HttpEndpoint
from workers.demo.model import build_model
from workers.demo.tokenizer import build_tokenizer
from workers.demo.warm_start import warm_start
from workers.gym.policy_model.endpoint import GENERATE
from workers.stack.child import running
from workers.stack.ports import free_port
from workers.stack.vllm import EmbeddedVllm
from workflows.messages import WeightsRef

T = TypeVar("T")

CONTEXT_TOKENS = 1024
PATIENCE_S = 60.0
_WARM_START_STEPS = 60  # enough for calls of the tool that can be parsed


@dataclass(frozen=True)
class RealVllm:
    """The server and the weights that it serves, which are version 0."""

    url: str
    weights: WeightsRef

    async def begun(self, endpoint: HttpEndpoint, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a call of the endpoint; returns when its generation is under way, or is over already. Requests are
        decoded together: it has begun when a request that was sent after it has its first token."""
        sampling = {"max_tokens": 2, "ignore_eos": True}
        later = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": sampling, "stream": True}
        endpoint.generating.clear()
        task = asyncio.create_task(call)
        async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S) as client:
            await endpoint.generating.wait()
            async with client.stream("POST", GENERATE, json=later) as answer:
                await anext(answer.aiter_lines())
        return task


@asynccontextmanager
async def serving_policy(folder: Path) -> AsyncIterator[RealVllm]:
    """Start the server with untrained weights, make the policy meanwhile, and load it."""
    words = build_tokenizer()
    network = build_model(words, 0)
    network.save_pretrained(folder / "untrained")
    words.save_pretrained(folder / "untrained")
    training = asyncio.create_task(asyncio.to_thread(_trained, network, words, folder / "policy"))
    embedded = {
        "port": free_port(),
        "max_model_len": CONTEXT_TOKENS,
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_r1",
    }
    recipe = Recipe.model_validate(
        {"run": {"model": str(folder / "untrained"), "dataset": "rows.jsonl"}, "generation": {"embedded": embedded}}
    )
    vllm = EmbeddedVllm(recipe)
    async with running(vllm.service(), folder / "vllm.log"):
        weights = await training
        async with VllmServer(vllm.url, refit_timeout_s=PATIENCE_S) as server:
            await refit([server], weights, "wait")
        yield RealVllm(vllm.url, weights)


def _trained(network: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, folder: Path) -> WeightsRef:
    warm_start(network, words, lambda line: None, steps=_WARM_START_STEPS)
    network.save_pretrained(folder)
    return WeightsRef(version=0, path=str(folder), digest=weights_digest(folder))
