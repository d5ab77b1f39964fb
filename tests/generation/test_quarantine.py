"""Refits that go on without an endpoint: who is quarantined, who comes back, and what nobody has to wait for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from activities.generation.errors import RefitIncomplete
from activities.generation.quarantine import is_tolerant
from activities.generation.refit import refit
from activities.generation.vllm import VllmServer
from tests.generation.fake_vllm import FakeVllm, serving
from tests.generation.test_refit import export

DEADLINE_S = 60.0
PATIENCE_S = 120.0


class Notes:
    """A quarantine without a ledger; `events` is that of the servers."""

    def __init__(self, events: list[str], *held: FakeVllm, tolerant: bool = True) -> None:
        self.held = frozenset(fake.url for fake in held)
        self.tolerant = tolerant
        self.reasons: dict[str, str] = {}
        self.released: list[str] = []
        self._events = events

    async def begin(self, url: str, reason: str) -> None:
        self._events.append(f"quarantine {url}")
        self.reasons[url] = reason

    async def release(self, url: str) -> None:
        self._events.append(f"release {url}")
        self.released.append(url)


@pytest.fixture
def fakes() -> Iterator[tuple[FakeVllm, ...]]:
    events: list[str] = []
    with ExitStack() as stack:
        yield tuple(stack.enter_context(serving(FakeVllm(name, events))) for name in "abc")


@pytest.fixture
async def servers(fakes: tuple[FakeVllm, ...]) -> AsyncIterator[tuple[VllmServer, ...]]:
    servers = tuple(VllmServer(fake.url, refit_timeout_s=DEADLINE_S) for fake in fakes)
    yield servers
    for server in servers:
        await server.close()


def dies(fake: FakeVllm) -> None:
    fake.dead = True


def fails_to_load(fake: FakeVllm) -> None:
    fake.fails_updates = True


def lies(fake: FakeVllm) -> None:
    fake.lies = True


def sees_nothing(fake: FakeVllm) -> None:
    fake.blind = True


FAULTS = [
    (dies, "answered POST /collective_rpc with 500"),
    (fails_to_load, "answered POST /update_weights with 500"),
    (lies, "says it serves 'default' with digest None"),
    (sees_nothing, "cannot load"),
]
Fakes = tuple[FakeVllm, ...]
Servers = tuple[VllmServer, ...]


@pytest.mark.parametrize(("fault", "reason"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
async def test_an_endpoint_that_fails_is_quarantined_before_the_others_sample_again(
    fakes: Fakes, servers: Servers, tmp_path: Path, fault: Callable[[FakeVllm], None], reason: str
) -> None:
    fault(fakes[1])
    notes = Notes(fakes[0].events)
    done = await refit(servers, export(tmp_path, 1), "wait", quarantine=notes)
    assert [endpoint.url for endpoint in done.endpoints] == [fakes[0].url, fakes[2].url]
    assert done.quarantined == (fakes[1].url,)
    assert list(notes.reasons) == [fakes[1].url]
    assert reason in notes.reasons[fakes[1].url]
    assert [fake.generate() for fake in (fakes[0], fakes[2])] == ["policy-1", "policy-1"]
    assert not fakes[0].paused
    assert not fakes[2].paused
    assert fakes[1].paused or fakes[1].dead
    events = fakes[0].events
    resumed = [index for index, event in enumerate(events) if event.endswith("resume")]
    assert events.index(f"quarantine {fakes[1].url}") < min(resumed)
    assert len(resumed) == 2


async def test_calls_that_a_quarantined_endpoint_holds_are_ended(
    fakes: Fakes, servers: Servers, tmp_path: Path
) -> None:
    fakes[1].fails_updates = True
    await refit(servers, export(tmp_path, 1), "keep", quarantine=Notes(fakes[0].events))
    assert fakes[1].pauses() == ["keep", "abort"]
    assert fakes[0].pauses() == ["keep"]


@pytest.mark.parametrize(("fault", "reason"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
async def test_no_endpoint_is_resumed_with_the_new_version_while_another_is_behind(
    fakes: Fakes, servers: Servers, tmp_path: Path, fault: Callable[[FakeVllm], None], reason: str
) -> None:
    fault(fakes[1])
    with pytest.raises(RefitIncomplete, match=f"1 of 3 vLLM endpoints did not .*{fakes[1].url}"):
        await refit(servers, export(tmp_path, 1), "wait")
    assert not [event for event in fakes[0].events if event.endswith("resume")]
    for fake in fakes:
        assert fake.paused or fake.label == "default"


async def test_with_none_left_the_refit_fails_and_nobody_is_quarantined(
    fakes: Fakes, servers: Servers, tmp_path: Path
) -> None:
    for fake in fakes:
        fake.fails_updates = True
    notes = Notes(fakes[0].events)
    with pytest.raises(RefitIncomplete, match="3 of 3 vLLM endpoints did not load"):
        await refit(servers, export(tmp_path, 1), "wait", quarantine=notes)
    assert notes.reasons == {}
    assert all(fake.paused for fake in fakes)


async def test_an_endpoint_that_takes_the_weights_again_comes_back_after_the_others(
    fakes: Fakes, servers: Servers, tmp_path: Path
) -> None:
    notes = Notes(fakes[0].events, fakes[1], tolerant=False)
    done = await refit(servers, export(tmp_path, 2), "wait", quarantine=notes)
    assert done.quarantined == ()
    assert [fake.generate() for fake in fakes] == ["policy-2"] * 3
    assert not any(fake.paused for fake in fakes)
    events = fakes[0].events
    assert events.index("b resume") > max(events.index("a resume"), events.index("c resume"))
    assert events.index(f"release {fakes[1].url}") > events.index("b resume")


async def test_an_endpoint_of_the_quarantine_that_fails_again_does_not_fail_the_refit(
    fakes: Fakes, servers: Servers, tmp_path: Path
) -> None:
    fakes[1].fails_updates = True
    notes = Notes(fakes[0].events, fakes[1], tolerant=False)
    done = await refit(servers, export(tmp_path, 2), "wait", quarantine=notes)
    assert done.quarantined == (fakes[1].url,)
    assert notes.reasons == {}, "it is in quarantine already"
    assert fakes[1].url not in notes.released
    assert fakes[1].paused


async def test_endpoints_in_quarantine_hold_nobody_up(fakes: Fakes, servers: Servers, tmp_path: Path) -> None:
    fakes[1].hangs = True
    refitting = asyncio.create_task(
        refit(servers, export(tmp_path, 2), "wait", quarantine=Notes(fakes[0].events, fakes[1], tolerant=False))
    )
    async with asyncio.timeout(PATIENCE_S):
        while not {"a resume", "c resume"} <= set(fakes[0].events):
            await asyncio.sleep(0.02)
    assert not refitting.done(), "it waits for the endpoint in quarantine, with the others resumed"
    fakes[1].stopped.set()
    assert (await refitting).quarantined == ()


async def test_what_is_not_done_in_time_is_left_for_the_next_refit(
    fakes: Fakes, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.generation.refit.RETURN_GRACE_S", 0.2)
    fakes[1].hangs = True
    done = await refit(servers, export(tmp_path, 2), "wait", quarantine=Notes(fakes[0].events, fakes[1]))
    assert done.quarantined == (fakes[1].url,)
    assert [fakes[0].label, fakes[2].label] == ["policy-2", "policy-2"]


async def test_endpoint_that_was_resumed_and_not_yet_released_is_not_loaded_again(
    fakes: Fakes, servers: Servers, tmp_path: Path
) -> None:
    weights = export(tmp_path, 1)
    await refit(servers, weights, "wait")
    fakes[0].events.clear()
    notes = Notes(fakes[0].events, fakes[1])
    await refit(servers, weights, "wait", quarantine=notes)
    assert fakes[1].url in notes.released
    assert not [event for event in fakes[0].events if event.endswith("update_weights")]


async def test_when_all_are_in_quarantine_all_are_needed(fakes: Fakes, servers: Servers, tmp_path: Path) -> None:
    weights = export(tmp_path, 1)
    fakes[2].fails_updates = True
    with pytest.raises(RefitIncomplete, match="1 of 3"):
        await refit(servers, weights, "wait", quarantine=Notes(fakes[0].events, *fakes, tolerant=False))
    fakes[2].fails_updates = False
    notes = Notes(fakes[0].events, *fakes, tolerant=False)
    await refit(servers, weights, "wait", quarantine=notes)
    assert sorted(notes.released) == sorted(fake.url for fake in fakes)


async def test_the_last_endpoint_may_fail_when_another_comes_back(
    fakes: Fakes, servers: Servers, tmp_path: Path
) -> None:
    fakes[0].fails_updates = fakes[2].fails_updates = True
    notes = Notes(fakes[0].events, fakes[1])
    done = await refit(servers, export(tmp_path, 1), "wait", quarantine=notes)
    assert [endpoint.url for endpoint in done.endpoints] == [fakes[1].url]
    assert sorted(notes.reasons) == sorted((fakes[0].url, fakes[2].url))
    assert fakes[1].generate() == "policy-1"
    assert not fakes[1].paused


@pytest.mark.parametrize(
    ("attempt", "most", "tolerant"), [(1, 20, False), (2, 20, True), (20, 20, True), (1, 1, True), (1, 2, False)]
)
def test_the_first_try_is_patient_unless_it_is_the_only_one(attempt: int, most: int, tolerant: bool) -> None:
    assert is_tolerant(attempt, most) == tolerant
