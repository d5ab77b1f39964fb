"""How weights travel: which requests a server gets in which order, and what is refused before anything travels."""

import asyncio
import os
import subprocess
import sysconfig
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from temporalio.client import Client

from activities.generation.errors import ServerFailed, ServerUnreachable, WeightsMissing
from activities.generation.refit import refit
from activities.generation.transports.chosen import transport_of
from activities.generation.transports.file import FileTransport
from activities.generation.transports.folder import FolderSource
from activities.generation.transports.nccl import NcclTransport, Rendezvous, RoutesOfUpdate, nccl_problem
from activities.generation.transports.transport import TransportUnavailable
from activities.generation.vllm import VllmServer
from activities.generation.weights import weights_digest
from configs.generation import GenerationConfig
from configs.recipe import Recipe
from storage.database import Database
from tests.generation.fake_vllm import FakeVllm, serving
from workers.environments.paths import environment_python, repository_root
from workers.generation_worker import build
from workers.worker_process import Resources
from workflows.messages import WeightsRef

UPDATE = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
DEADLINE_S = 60.0


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with serving(FakeVllm(world_size=4, paused=True)) as fake:
        yield fake


@pytest.fixture
async def server(fake: FakeVllm) -> AsyncIterator[VllmServer]:
    async with VllmServer(fake.url, refit_timeout_s=DEADLINE_S) as server:
        yield server


@pytest.fixture
def weights(tmp_path: Path) -> WeightsRef:
    """Two files, in two types."""
    save_file({"b": torch.ones(2, 3), "a": torch.zeros(4)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model-00002-of-00002.safetensors")
    return WeightsRef(version=3, path=str(tmp_path), digest=weights_digest(tmp_path))


class Broadcast:
    """In the place of vLLM's sender: the same requests in the same order, from a thread of its own; no NCCL."""

    def __init__(self, rendezvous: Rendezvous, client: RoutesOfUpdate, source: FolderSource) -> None:
        self.rendezvous = rendezvous
        self.sent: list[str] = []
        self.closed = False
        self._client = client
        self._source = source
        client.init_weight_transfer_engine({"master_port": rendezvous.port, "world_size": rendezvous.world_size})

    def send_weights(self) -> None:
        meta = self._source.metadata()
        self._client.start_weight_update()
        self._client.update_weights({"names": [parameter.name for parameter in meta]})
        self.sent = [name for name, _ in self._source]
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        self.closed = True


async def test_file_names_the_folder_and_its_digest(fake: FakeVllm, server: VllmServer, weights: WeightsRef) -> None:
    await FileTransport().load(server, weights)
    assert [event.split()[1] for event in fake.events] == [*UPDATE, "reset_prefix_cache"]
    assert fake.bodies[2] == {"update_info": {"path": weights.path, "digest": weights.digest}}
    assert (fake.label, fake.digest) == ("policy-3", weights.digest)


async def test_nccl_makes_a_group_of_all_workers_sends_every_tensor_and_closes_it(
    fake: FakeVllm, server: VllmServer, weights: WeightsRef
) -> None:
    senders: list[Broadcast] = []

    def sender(*parts: Any) -> Broadcast:
        senders.append(Broadcast(*parts))
        return senders[-1]

    await NcclTransport(DEADLINE_S, sender, device="cpu").load(server, weights)
    assert [event.split()[1] for event in fake.events] == [
        *UPDATE,
        "reset_prefix_cache",
        "shutdown_weight_transfer_engine",
    ]
    (sent,) = senders
    assert (sent.rendezvous.address, sent.rendezvous.world_size) == ("127.0.0.1", 5)
    assert fake.bodies[2] == {"update_info": {"names": ["a", "b", "c"], "digest": weights.digest}}
    assert (sent.sent, sent.closed) == (["a", "b", "c"], True)
    assert (fake.label, fake.digest) == ("policy-3", weights.digest)


async def test_a_refit_over_nccl_pauses_before_and_resumes_after(
    fake: FakeVllm, server: VllmServer, weights: WeightsRef
) -> None:
    fake.paused = False
    transport = NcclTransport(DEADLINE_S, Broadcast, device="cpu")
    done = await refit([server], weights, "wait", transport=transport)
    assert [endpoint.url for endpoint in done.endpoints] == [fake.url]
    steps = [event.split()[1] for event in fake.events]
    assert (steps[0], steps[-1]) == ("pause", "resume")
    assert fake.generate() == "policy-3"


async def test_an_update_that_the_server_refuses_ends_the_sending(
    fake: FakeVllm, server: VllmServer, weights: WeightsRef
) -> None:
    fake.fails_updates = True
    senders: list[Broadcast] = []

    def sender(*parts: Any) -> Broadcast:
        senders.append(Broadcast(*parts))
        return senders[-1]

    with pytest.raises(ServerFailed, match="POST /update_weights with 500"):
        await NcclTransport(DEADLINE_S, sender, device="cpu").load(server, weights)
    assert senders[0].closed
    assert fake.digest is None


async def test_a_rank_that_never_joins_ends_at_the_deadline_and_the_next_load_works(
    fake: FakeVllm, server: VllmServer, weights: WeightsRef
) -> None:
    never = threading.Event()
    joins = False

    def sender(*parts: Any) -> Broadcast:
        if not joins:
            never.wait()
        return Broadcast(*parts)

    transport = NcclTransport(0.2, sender, device="cpu")
    with pytest.raises(ServerUnreachable, match=r"did not take policy-3 over NCCL within 0\.2 s"):
        await transport.load(server, weights)
    joins = True
    transport = NcclTransport(DEADLINE_S, sender, device="cpu")
    await transport.load(server, weights)
    never.set()
    assert fake.label == "policy-3"


async def test_servers_take_turns(weights: WeightsRef) -> None:
    events: list[str] = []
    with serving(FakeVllm("a", events, paused=True)) as one, serving(FakeVllm("b", events, paused=True)) as other:
        transport = NcclTransport(DEADLINE_S, Broadcast, device="cpu")
        async with (
            VllmServer(one.url, refit_timeout_s=DEADLINE_S) as first,
            VllmServer(other.url, refit_timeout_s=DEADLINE_S) as second,
        ):
            await asyncio.gather(transport.load(first, weights), transport.load(second, weights))
    names = [event.split()[0] for event in events]
    assert names == sorted(names)
    assert len(names) == 12


def test_a_folder_yields_what_it_declares(weights: WeightsRef) -> None:
    source = FolderSource(Path(weights.path), "cpu")
    declared = [(parameter.name, parameter.dtype, parameter.shape) for parameter in source.metadata()]
    assert declared == [("a", torch.float32, (4,)), ("b", torch.float32, (2, 3)), ("c", torch.bfloat16, (2,))]
    for _ in range(2):  # a fresh pass each time
        assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source] == declared
    stored = load_file(Path(weights.path) / "model-00001-of-00002.safetensors")
    assert torch.equal(dict(source)["b"], stored["b"])


def test_a_folder_with_an_index_yields_what_the_index_names(weights: WeightsRef) -> None:
    folder = Path(weights.path)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"c": "model-00002-of-00002.safetensors"}}')
    assert [parameter.name for parameter in FolderSource(folder, "cpu").metadata()] == ["c"]


def test_folders_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsMissing, match=f"{tmp_path} holds no .safetensors file"):
        FolderSource(tmp_path, "cpu")
    save_file({"counts": torch.ones(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMissing, match="holds counts as I64"):
        FolderSource(tmp_path, "cpu").metadata()


def test_the_transport_is_the_one_of_the_configuration() -> None:
    assert isinstance(transport_of(GenerationConfig()), FileTransport)


@pytest.mark.skipif(nccl_problem() is None, reason="this process can send over NCCL")
def test_nccl_is_refused_where_vllm_or_a_gpu_is_missing() -> None:
    with pytest.raises(TransportUnavailable, match=r"generation\.weight_transport is nccl.*set generation"):
        transport_of(GenerationConfig(weight_transport="nccl"))


@pytest.mark.skipif(nccl_problem() is None, reason="this process can send over NCCL")
async def test_the_generation_worker_does_not_start_with_a_transport_that_it_cannot_have(tmp_path: Path) -> None:
    storage = {"dsn": "postgresql://nobody@127.0.0.1:9/none", "blobs_url": str(tmp_path)}
    recipe = Recipe.model_validate(
        {
            "run": {"model": "model", "dataset": "rows.jsonl"},
            "generation": {"endpoints": ["http://127.0.0.1:9"], "weight_transport": "nccl"},
            "storage": storage,
        }
    )
    async with AsyncExitStack() as closing:
        database = Database(recipe.storage)
        closing.push_async_callback(database.close)
        no_client = cast(Client, None)
        with pytest.raises(TransportUnavailable, match=r"generation\.weight_transport is nccl"):
            await build(Resources(no_client, recipe, database, closing))


@pytest.mark.integration
def test_vllms_own_sender_leads_the_handshake_with_what_the_folder_declares(
    fake: FakeVllm, weights: WeightsRef
) -> None:
    """vLLM's trainer engine as it is, with its communicator replaced; in the vLLM environment."""
    answer = subprocess.run(
        [str(environment_python("vllm")), "-m", "tests.generation.nccl_handshake", fake.url, weights.model_dump_json()],
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(repository_root()),
            "ONBELAY_PACKAGES": sysconfig.get_path("purelib"),
            "VLLM_NO_USAGE_STATS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split()[-3:] == ["a", "b", "c"]
    assert [event.split()[1] for event in fake.events][:4] == UPDATE
    assert fake.bodies[0]["init_info"]["world_size"] == 5
    assert fake.bodies[2]["update_info"] == {
        "names": ["a", "b", "c"],
        "dtype_names": ["float32", "float32", "bfloat16"],
        "shapes": [[4], [2, 3], [2]],
        "digest": weights.digest,
    }
    assert (fake.label, fake.digest) == ("policy-3", weights.digest)
