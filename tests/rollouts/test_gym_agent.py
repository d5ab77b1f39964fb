"""One `/run` call always ends: with an answer, or with a typed error within its deadline."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from activities.errors import AgentFailed, AgentRefused, AgentUnavailable, IntegrityError, RolloutTimeout
from activities.rollouts.gym_agent import GymAgents
from tests.rollouts.agent_server import PATIENCE_S, AgentServer, Exchange, Reply, answering, silence

MIB = 2**20


@asynccontextmanager
async def agent(reply: Reply) -> AsyncIterator[tuple[AgentServer, GymAgents]]:
    async with AgentServer(reply) as server:
        agents = GymAgents({"safe_agent": server.url}, max_connections=4)
        try:
            yield server, agents
        finally:
            await agents.close()


async def run(agents: GymAgents, body: dict[str, Any] | None = None, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    return await agents.run("safe_agent", body or {}, timeout_s=timeout_s, max_bytes=MIB)


async def test_answer_of_the_agent_comes_back() -> None:
    async with agent(answering(200, {"reward": 1.0})) as (server, agents):
        assert await run(agents, {"text": "ü😀"}) == {"reward": 1.0}
        assert server.exchanges[0].body == {"text": "ü😀"}


@pytest.mark.parametrize("status", [500, 502, 503, 408, 429])
async def test_failing_agent_may_be_tried_again(status: int) -> None:
    async with agent(answering(status, "model server is away")) as (_, agents):
        with pytest.raises(
            AgentFailed, match=rf'NeMo-Gym /run failed with HTTP {status}: "model server is away"'
        ) as failed:
            await run(agents)
        assert failed.value.status == status


@pytest.mark.parametrize("status", [400, 404, 409, 422, 302])
async def test_row_that_the_agent_refuses_is_the_rows_fault(status: int) -> None:
    async with agent(answering(status, "no such field")) as (_, agents):
        with pytest.raises(AgentRefused, match=f"HTTP {status}"):
            await run(agents)


@pytest.mark.parametrize("size_bytes", [1025, 2 * MIB])
async def test_long_error_is_read_to_a_bound_and_keeps_its_class(size_bytes: int) -> None:
    async with agent(answering(500, b"x" * size_bytes)) as (_, agents):
        with pytest.raises(AgentFailed) as failed:
            await agents.run("safe_agent", {}, timeout_s=PATIENCE_S, max_bytes=1024)
        assert len(str(failed.value)) < 4100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "malformed JSON"),
        (b"", "malformed JSON"),
        (b"\xff\xfe\xfa", "malformed JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b"[]", "with list, expected an object"),
        (b"null", "with NoneType, expected an object"),
    ],
)
async def test_answer_that_is_no_object_is_invalid(content: bytes, message: str) -> None:
    async with agent(answering(200, content)) as (_, agents):
        with pytest.raises(IntegrityError, match=message):
            await run(agents)


async def test_answer_of_the_largest_size_is_read() -> None:
    largest = b'{"a": "' + b"x" * (MIB - 9) + b'"}'
    assert len(largest) == MIB
    async with agent(answering(200, largest)) as (_, agents):
        assert len((await run(agents))["a"]) == MIB - 9


async def test_endless_answer_is_dropped_at_the_bound() -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.send_head(200, 2**40)
        while True:
            await exchange.send(b" " * 65_536)

    async with agent(endless) as (_, agents):
        with pytest.raises(IntegrityError, match=r"more than rollouts\.max_response_bytes \(1048576\)"):
            await run(agents)


async def test_silent_agent_runs_into_the_deadline_and_sees_the_connection_close() -> None:
    async with agent(silence) as (server, agents):
        while not server.exchanges:  # on a busy machine the deadline may come before the request
            with pytest.raises(RolloutTimeout, match=r"did not answer within 0\.2 s"):
                await run(agents, timeout_s=0.2)
        async with asyncio.timeout(PATIENCE_S):
            await server.exchanges[0].dropped.wait()


async def test_deadline_is_for_the_whole_answer_and_not_for_each_piece() -> None:
    async def drip(exchange: Exchange) -> None:
        await exchange.send_head(200, 1_000_000)
        while True:
            await exchange.send(b" ")
            await asyncio.sleep(0.01)

    async with agent(drip) as (_, agents):
        with pytest.raises(RolloutTimeout):
            await run(agents, timeout_s=0.2)


async def test_refused_connection_is_unavailable() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        agents = GymAgents({"safe_agent": f"http://127.0.0.1:{closed.getsockname()[1]}"}, max_connections=1)
        with pytest.raises(AgentUnavailable, match="ConnectError") as refused:
            await run(agents)
        assert refused.value.kind == "transport_unreachable"
        await agents.close()


@pytest.mark.parametrize("sent_bytes", [None, 0, 7], ids=["before the head", "after the head", "in the body"])
async def test_connection_that_breaks_is_unavailable(sent_bytes: int | None) -> None:
    async def broken(exchange: Exchange) -> None:
        if sent_bytes is not None:
            await exchange.send_head(200, 100)
            await exchange.send(b"{" * sent_bytes)
        exchange.reset()

    async with agent(broken) as (_, agents):
        with pytest.raises(AgentUnavailable, match="/run: ") as broken_off:
            await run(agents)
        assert broken_off.value.kind == "transport_peer_drop"


async def test_answer_that_ends_too_early_is_unavailable_and_not_half_an_answer() -> None:
    async def short(exchange: Exchange) -> None:
        await exchange.send_head(200, 100)
        await exchange.send(b"{}")
        exchange.writer.close()

    async with agent(short) as (_, agents):
        with pytest.raises(AgentUnavailable):
            await run(agents)


async def test_cancelled_call_closes_the_connection() -> None:
    async with agent(silence) as (server, agents):
        running = asyncio.create_task(run(agents))
        exchange = await server.asked(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(PATIENCE_S):
            await exchange.dropped.wait()


async def test_no_rollout_starts_on_a_used_connection() -> None:
    async with agent(answering(200, {})) as (server, agents):
        await run(agents)
        await run(agents)
        assert server.connections == 2


async def test_more_calls_than_connections_wait_their_turn() -> None:
    async with agent(answering(200, {"reward": 0.0})) as (server, agents):
        answers = await asyncio.gather(*(run(agents, {"number": number}) for number in range(12)))
        assert len(answers) == 12
        assert {exchange.body["number"] for exchange in server.exchanges} == set(range(12))


async def test_unknown_agent_is_refused_with_the_names_there_are() -> None:
    agents = GymAgents({"safe_agent": "http://127.0.0.1:9/", "other": "http://127.0.0.1:9"}, max_connections=1)
    with pytest.raises(AgentRefused, match=r"asks for agent 'nobody', but gym\.agents has: other, safe_agent"):
        await agents.run("nobody", {}, timeout_s=1.0, max_bytes=MIB)
    await agents.close()


async def test_environments_are_asked_as_agents_are_and_known_by_their_names() -> None:
    async with AgentServer(answering(200, {"failure": None})) as server:
        agents = GymAgents({"agent": "http://127.0.0.1:9"}, 1, {"episodes": f"{server.url}/"})
        assert [agents.runs_episodes(name) for name in ("agent", "episodes", "nobody")] == [False, True, False]
        assert await agents.run("episodes", {"task": 1}, timeout_s=PATIENCE_S, max_bytes=MIB) == {"failure": None}
        with pytest.raises(AgentRefused, match=r"gym\.agents and gym\.environments have: agent, episodes"):
            await agents.run("nobody", {}, timeout_s=1.0, max_bytes=MIB)
        await agents.close()


async def test_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with agent(answering(200, {"reward": 0.5})) as (_, agents):
        assert await run(agents) == {"reward": 0.5}
