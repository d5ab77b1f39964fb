"""NeMo-Gym's token capture of recorded calls: its entries point to the ledger for their tokens, and come back whole."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from storage.capture_ids import capture_id
from tests.gym.forks import Forks
from tests.gym.orchestrator import Orchestrator
from tests.gym.policies import dying_at, splitting
from tests.gym.recording_servers import AGENTS
from tests.gym.sampling_vllm import SamplingVllm

pytestmark = pytest.mark.integration


Freeze = Callable[[str, int], Awaitable[dict[str, Any]]]


@pytest.fixture
def frozen(forks: Forks, storage: dict[str, Any], tmp_path: Path) -> Freeze:
    """What a consumer in NeMo-Gym's environment is given of the capture of an attempt."""

    async def freeze(rollout: str, attempt: int) -> dict[str, Any]:
        arguments = (json.dumps(storage), capture_id(rollout, attempt))
        output = await asyncio.to_thread(forks.output, "tests.gym.freezing", *arguments, folder=tmp_path)
        return json.loads(output.splitlines()[-1])

    return freeze


@pytest.mark.parametrize("agent", AGENTS)
async def test_tokens_are_stored_once_and_come_back_whole(
    play: Orchestrator,
    servers: dict[str, str],
    vllm: SamplingVllm,
    storage: dict[str, Any],
    frozen: Freeze,
    agent: str,
) -> None:
    rollout = await play.rollout()
    vllm.policy = dying_at(3)
    await play.run(servers[agent], rollout, (await play.begin(rollout)).attempt)
    vllm.policy = splitting
    await play.run(servers[agent], rollout, (await play.begin(rollout)).attempt)
    calls = await play.calls(rollout, 1)

    connection = await asyncpg.connect(storage["dsn"])
    query = "SELECT entry, attempt FROM captured_calls WHERE capture_id = $1 AND entry IS NOT NULL ORDER BY begun_at"
    stored = await connection.fetch(query, capture_id(rollout, 1))
    await connection.close()
    assert [row["attempt"] for row in stored] == [0, 0] + [1] * (len(calls) - 2)
    assert not any(b"token_ids" in row["entry"].replace(b"token_item_index", b"") for row in stored)

    capture = await frozen(rollout, 1)
    assert (capture["incomplete"], capture["retired"]) == (False, True)
    entries = sorted(capture["entries"], key=lambda entry: [call.response_id for call in calls].index(entry[4]))
    assert [entry[:3] for entry in entries] == [
        [list(call.prompt_token_ids), list(call.sampled_token_ids), list(call.log_probs)] for call in calls
    ]
    # What NeMo-Gym makes of the lineage itself: it sees an unknown parent where history was rewritten.
    known = {"root": "root", "append": "resolved", "new_segment": "unresolved"}
    assert [entry[3] for entry in entries] == [known[str(call.continuity)] for call in calls]


async def test_a_capture_with_a_call_that_never_ended_is_incomplete(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, frozen: Freeze
) -> None:
    rollout = await play.rollout()
    vllm.policy = dying_at(2)
    await play.run(servers["plain_agent"], rollout, (await play.begin(rollout)).attempt)
    capture = await frozen(rollout, 0)
    assert (capture["incomplete"], len(capture["entries"])) == (True, 1)
