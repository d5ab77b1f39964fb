"""One real vLLM server for the session: a tiny random model with the project's command line."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.recipe import Recipe
from tests.generation.models import write_policy
from workers.stack.child import running
from workers.stack.ports import free_port
from workers.stack.vllm import EmbeddedVllm
from workflows.messages import WeightsRef


@dataclass(frozen=True)
class ServedPolicy:
    """A server that was started with `weights[0]`; the others have the same shape. `log` is the server's output."""

    url: str
    weights: tuple[WeightsRef, ...]
    log: Path


@pytest.fixture(scope="session")
async def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedPolicy]:
    folder = tmp_path_factory.mktemp("vllm")
    weights = tuple(write_policy(folder / f"policy-{version}", version) for version in range(3))
    recipe = Recipe.model_validate(
        {
            "run": {"model": weights[0].path, "dataset": "rows.jsonl"},
            "generation": {"embedded": {"port": free_port(), "max_model_len": 2048}},
        }
    )
    vllm = EmbeddedVllm(recipe)
    async with running(vllm.service(), folder / "vllm.log"):
        yield ServedPolicy(vllm.url, weights, folder / "vllm.log")
