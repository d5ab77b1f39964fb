"""Refits of several endpoints: all or none, never unpaused, repeatable after any interruption."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from activities.generation.errors import (
    RefitIncomplete,
    ServerUnreachable,
    WeightsMissing,
    WeightsUnfit,
    WeightsUnknown,
)
from activities.generation.refit import refit
from activities.generation.vllm import VllmServer, policy_version
from activities.generation.weights import weights_digest
from tests.generation.fake_vllm import FakeVllm, serving
from workflows.messages import WeightsRef

DEADLINE_S = 60.0


@pytest.fixture
def fakes() -> Iterator[tuple[FakeVllm, FakeVllm]]:
    events: list[str] = []
    with ExitStack() as stack:
        first, second = (stack.enter_context(serving(FakeVllm(name, events))) for name in ("a", "b"))
        yield first, second


@pytest.fixture
async def servers(fakes: tuple[FakeVllm, FakeVllm]) -> AsyncIterator[tuple[VllmServer, ...]]:
    servers = tuple(VllmServer(fake.url, refit_timeout_s=DEADLINE_S) for fake in fakes)
    yield servers
    for server in servers:
        await server.close()


def export(folder: Path, version: int) -> WeightsRef:
    """Weights on disk; their content does not matter to a fake."""
    path = folder / f"policy-{version}"
    path.mkdir()
    (path / "model.safetensors").write_bytes(f"weights {version}".encode())
    return WeightsRef(version=version, path=str(path), digest=weights_digest(path))


async def test_no_endpoint_loads_before_all_are_paused_and_none_resumes_before_all_have_loaded(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    done = await refit(servers, export(tmp_path, 1), "wait")
    assert [endpoint.url for endpoint in done.endpoints] == [fake.url for fake in fakes]
    steps = [event.split()[1] for event in fakes[0].events]
    last_pause = max(i for i, step in enumerate(steps) if step == "pause")
    assert last_pause < steps.index("start_weight_update")
    last_finish = max(i for i, step in enumerate(steps) if step == "finish_weight_update")
    assert last_finish < steps.index("resume")
    assert await policy_version(servers) == await policy_version(servers)
    assert (await policy_version(servers)).min == (await policy_version(servers)).max == 1


async def test_one_endpoint_that_fails_keeps_all_paused_until_the_repetition_succeeds(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    weights = export(tmp_path, 1)
    fakes[1].fail_next_update = True
    with pytest.raises(RefitIncomplete, match=f"1 of 2 vLLM endpoints did not load.*{fakes[1].url}"):
        await refit(servers, weights, "wait")
    assert all(fake.paused for fake in fakes)
    assert fakes[1].model_gone
    loads_of_a = fakes[0].events.count("a update_weights")
    await refit(servers, weights, "wait")
    assert [fake.generate() for fake in fakes] == ["policy-1", "policy-1"]
    assert not any(fake.paused for fake in fakes)
    assert fakes[0].events.count("a update_weights") == loads_of_a, "what is loaded is not loaded again"


async def test_repeating_a_refit_that_is_done_touches_nothing(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    weights = export(tmp_path, 1)
    await refit(servers, weights, "wait")
    fakes[0].events.clear()
    done = await refit(servers, weights, "wait")
    assert fakes[0].events == []
    assert [endpoint.seconds for endpoint in done.endpoints] == [0.0, 0.0]


async def test_an_endpoint_that_was_started_again_is_loaded_again(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    weights = export(tmp_path, 3)
    await refit(servers, weights, "wait")
    before = await policy_version(servers)
    fakes[1].restart()
    with pytest.raises(WeightsUnknown, match=fakes[1].url):
        await policy_version(servers)
    await refit(servers, weights, "wait")
    after = await policy_version(servers)
    assert (before.min, before.max) == (after.min, after.max) == (3, 3)
    assert before.processes[0] == after.processes[0]
    assert before.processes[1] != after.processes[1]


async def test_the_same_label_of_another_run_is_not_mistaken_for_the_weights(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    await refit(servers, export(tmp_path / "other", 0), "wait")
    path = tmp_path / "policy-0"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights of this run")
    weights = WeightsRef(version=0, path=str(path), digest=weights_digest(path))
    await refit(servers, weights, "wait")
    assert [fake.digest for fake in fakes] == [weights.digest, weights.digest]


async def test_endpoints_left_paused_after_loading_are_resumed(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    weights = export(tmp_path, 1)
    await refit(servers, weights, "wait")
    for fake in fakes:
        fake.paused = True
    await refit(servers, weights, "wait")
    assert not any(fake.paused for fake in fakes)
    assert fakes[0].events.count("a update_weights") == 1


@pytest.mark.parametrize("reached", ["start_weight_update", "update_weights"])
async def test_an_update_that_a_killed_client_left_open_is_started_over(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path, reached: str
) -> None:
    weights = export(tmp_path, 1)
    fakes[0].answer("POST", "/pause", {})
    fakes[0].answer("POST", "/start_weight_update", {})
    if reached == "update_weights":
        fakes[0].answer("POST", "/update_weights", {"update_info": {"path": weights.path, "digest": "of another"}})
    await refit(servers, weights, "wait")
    assert [fake.generate() for fake in fakes] == ["policy-1", "policy-1"]
    assert fakes[0].digest == weights.digest


async def test_missing_or_changed_files_are_found_before_anything_is_paused(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    weights = export(tmp_path, 1)
    (Path(weights.path) / "model.safetensors").write_bytes(b"half wri")
    with pytest.raises(WeightsMissing, match="their record says"):
        await refit(servers, weights, "wait")
    (Path(weights.path) / "model.safetensors").unlink()
    with pytest.raises(WeightsMissing, match=r"holds no \.safetensors file"):
        await refit(servers, weights, "wait")
    assert fakes[0].events == []


async def test_a_server_that_cannot_see_the_files_is_named_before_anything_is_paused(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    fakes[1].blind = True
    with pytest.raises(RefitIncomplete, match=f"{fakes[1].url} cannot load") as failed:
        await refit(servers, export(tmp_path, 1), "wait")
    assert isinstance(failed.value.__cause__, WeightsUnfit)
    assert fakes[0].events == []


async def test_an_endpoint_that_is_down_is_named_and_retried(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    weights = export(tmp_path, 1)
    fakes[1].dead = True
    with pytest.raises(RefitIncomplete, match=f"{fakes[1].url} answered POST /collective_rpc with 500"):
        await refit(servers, weights, "wait")
    fakes[1].restart()
    await refit(servers, weights, "wait")
    assert fakes[1].generate() == "policy-1"


async def test_an_update_that_never_answers_ends_at_the_deadline(
    fakes: tuple[FakeVllm, FakeVllm], servers: tuple[VllmServer, ...], tmp_path: Path
) -> None:
    weights = export(tmp_path, 1)
    fakes[0].running_requests = 1  # and nobody paused it: the real server hangs for ever
    await servers[0].start_update()
    async with VllmServer(fakes[0].url, refit_timeout_s=0.2) as hurried:
        with pytest.raises(ServerUnreachable, match="did not answer POST /update_weights"):
            await hurried.update({"path": weights.path, "digest": weights.digest})
