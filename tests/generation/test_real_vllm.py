"""Refits of a real vLLM server: what it samples afterwards is what the weights say, through every trap."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from activities.generation.errors import RefitIncomplete, ServerFailed
from activities.generation.refit import refit
from activities.generation.transports.file import FileTransport
from activities.generation.vllm import PauseMode, VllmServer, policy_version
from activities.generation.weights import weights_digest
from tests.generation.models import greedy
from tests.generation.served import PATIENCE_S, ServedPolicy
from tests.generation.under_way import while_under_way, works
from workflows.messages import WeightsRef

pytestmark = pytest.mark.integration

PROMPT = tuple(10 + 7 * i % 100 for i in range(200))  # several cache blocks, so that a stale prefix cache would show
LONG = 1500  # seconds of work, so that a refit meets it


@pytest.fixture
async def server(vllm_server: ServedPolicy) -> AsyncIterator[VllmServer]:
    async with VllmServer(vllm_server.url, refit_timeout_s=PATIENCE_S) as server:
        yield server


def client_of(url: str) -> httpx.AsyncClient:
    """Made at once: reading certificates takes a while."""
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False)


async def sample(url: str, tokens: int) -> dict[str, Any]:
    """Greedy continuation of the prompt: `token_ids`, `weight_versions`, `finish_reason`."""
    async with client_of(url) as client:
        answer = await client.post("/inference/v1/generate", json=_request(tokens))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def _request(tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling}


class InFlight:
    """A long sample that is known to be under way: its first tokens have arrived. `rest` waits for the others."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], first: dict[str, Any]) -> None:
        self._chunks = chunks
        self._choices = [first]

    async def rest(self) -> dict[str, Any]:
        """All `token_ids`; `weight_versions` and `finish_reason` as the last chunk has them."""
        async for choice in self._chunks:
            self._choices.append(choice)
        return self._choices[-1] | {"token_ids": [token for choice in self._choices for token in choice["token_ids"]]}


@asynccontextmanager
async def in_flight(url: str) -> AsyncIterator[InFlight]:
    """Start the long sample. The server does not wait for its reader, so the sample goes on meanwhile."""
    async with client_of(url) as client:
        request = client.stream("POST", "/inference/v1/generate", json=_request(LONG) | {"stream": True})
        async with request as answer:
            chunks = _choices_of(answer)
            yield InFlight(chunks, await anext(chunks))


async def _choices_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                yield choice


async def freeze(url: str) -> None:
    """Schedule nothing; what has begun keeps its place, and its keys and values."""
    async with client_of(url) as client:
        frozen = await client.post("/pause", params={"mode": "keep", "clear_cache": False})
    assert frozen.status_code == 200, frozen.text


async def refit_in_flight(server: VllmServer, before: WeightsRef, after: WeightsRef, mode: PauseMode) -> dict[str, Any]:
    """The long sample that a refit met. It is frozen at once, and the refit's own pause comes then: what is before that
    in a refit may take a busy machine longer than the sample."""

    async def attempt() -> dict[str, Any] | None:
        await refit([server], before, "wait")
        async with in_flight(server.url) as asked:
            await freeze(server.url)
            met = await works(server.url)
            await server.pause(mode)  # applies to what is frozen as to what runs
            await refit([server], after, mode)
            choice = await asked.rest()
        return choice if met else None

    return await while_under_way(attempt)


async def assert_serves(server: VllmServer, weights: WeightsRef) -> None:
    choice = await sample(server.url, 12)
    assert choice["token_ids"] == greedy(weights.path, PROMPT, 12)
    assert [span["version"] for span in choice["weight_versions"]] == [f"policy-{weights.version}"]


async def test_a_refit_changes_what_is_sampled_and_stamps_the_version(
    server: VllmServer, vllm_server: ServedPolicy
) -> None:
    assert len({tuple(greedy(weights.path, PROMPT, 12)) for weights in vllm_server.weights}) == 3
    for weights in (vllm_server.weights[1], vllm_server.weights[2], vllm_server.weights[0]):
        await refit([server], weights, "wait")
        await assert_serves(server, weights)
        versions = await policy_version([server])
        assert (versions.min, versions.max) == (weights.version, weights.version)


async def test_a_request_in_flight_is_frozen_and_goes_on_with_the_new_weights(
    server: VllmServer, vllm_server: ServedPolicy
) -> None:
    choice = await refit_in_flight(server, vllm_server.weights[0], vllm_server.weights[1], "keep")
    assert [span["version"] for span in choice["weight_versions"]] == ["policy-0", "policy-1"]
    assert len(choice["token_ids"]) == LONG
    await assert_serves(server, vllm_server.weights[1])


async def test_a_request_in_flight_is_finished_first_with_its_own_weights(
    server: VllmServer, vllm_server: ServedPolicy
) -> None:
    choice = await refit_in_flight(server, vllm_server.weights[0], vllm_server.weights[1], "wait")
    assert [span["version"] for span in choice["weight_versions"]] == ["policy-0"]
    assert len(choice["token_ids"]) == LONG
    await assert_serves(server, vllm_server.weights[1])


async def test_a_request_in_flight_is_ended_early(server: VllmServer, vllm_server: ServedPolicy) -> None:
    choice = await refit_in_flight(server, vllm_server.weights[0], vllm_server.weights[1], "abort")
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < LONG
    await assert_serves(server, vllm_server.weights[1])


async def test_a_failed_load_stays_paused_and_a_good_one_recovers(
    server: VllmServer, vllm_server: ServedPolicy, tmp_path: Path
) -> None:
    await server.pause("wait")
    missing = WeightsRef(version=9, path=str(tmp_path / "missing"), digest="digest")
    with pytest.raises(ServerFailed, match=r"holds no \.safetensors file that this server can see"):
        await FileTransport().load(server, missing)
    state = await server.state()
    assert state.paused
    assert state.digest is None
    waiting = asyncio.create_task(sample(server.url, 4))
    await refit([server], vllm_server.weights[2], "wait")
    assert (await waiting)["token_ids"] == greedy(vllm_server.weights[2].path, PROMPT, 12)[:4]
    await assert_serves(server, vllm_server.weights[2])


@pytest.mark.parametrize("loaded", [False, True], ids=["started", "loaded"])
async def test_an_update_that_a_killed_client_left_open_is_started_over(
    server: VllmServer, vllm_server: ServedPolicy, loaded: bool
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        await client.post("/pause", params={"mode": "wait"})
        assert (await client.post("/start_weight_update")).status_code == 200
        if loaded:
            update = {"path": vllm_server.weights[1].path, "digest": "of a client that was killed"}
            assert (await client.post("/update_weights", json={"update_info": update})).status_code == 200
    await refit([server], vllm_server.weights[2], "wait")
    await assert_serves(server, vllm_server.weights[2])


async def test_weights_of_another_shape_are_refused_before_anything_is_paused(
    server: VllmServer, vllm_server: ServedPolicy, tmp_path: Path
) -> None:
    await refit([server], vllm_server.weights[0], "wait")
    unfit = Path(shutil.copytree(vllm_server.weights[1].path, tmp_path / "unfit"))
    tensors = load_file(unfit / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, unfit / "model.safetensors", metadata={"format": "pt"})
    weights = WeightsRef(version=7, path=str(unfit), digest=weights_digest(unfit))
    with pytest.raises(RefitIncomplete, match=r"lacks 1 tensors .* model\.layers\.1\.mlp\.up_proj\.weight"):
        await refit([server], weights, "wait")
    assert not await server.is_paused()
    await assert_serves(server, vllm_server.weights[0])


async def test_weights_in_several_files_are_found_by_their_index(
    server: VllmServer, vllm_server: ServedPolicy, tmp_path: Path
) -> None:
    await refit([server], vllm_server.weights[0], "wait")
    tensors = sorted(load_file(Path(vllm_server.weights[1].path) / "model.safetensors").items())
    parts = {
        "model-00001-of-00002.safetensors": dict(tensors[:9]),
        "model-00002-of-00002.safetensors": dict(tensors[9:]),
    }
    for file, part in parts.items():
        save_file(part, tmp_path / file)
    places = ", ".join(f'"{name}": "{file}"' for file, part in parts.items() for name in part)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{places}}}}}')
    (tmp_path / "consolidated.safetensors").write_bytes(b"of another format, and not in the index")
    weights = WeightsRef(version=1, path=str(tmp_path), digest=weights_digest(tmp_path))
    await refit([server], weights, "wait")
    await assert_serves(server, vllm_server.weights[1])
