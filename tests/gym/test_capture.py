"""NeMo-Gym's token capture of recorded calls: its entries point to the ledger for their tokens, and come back whole."""

import asyncio
import json
import os
from typing import Any

import asyncpg
import pytest

from storage.capture_ids import capture_id
from tests.gym.orchestrator import Orchestrator
from tests.gym.policies import dying_at, splitting
from tests.gym.recording_servers import AGENTS
from tests.gym.sampling_vllm import SamplingVllm
from workers.environments.paths import child_environment, environment_python

pytestmark = pytest.mark.integration

# A consumer in NeMo-Gym's environment: reads a frozen capture and prints the tokens of its calls.
FREEZE = """
import asyncio, json, sys
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.captures import Captures
from storage.database import Database
from storage.model_calls import ModelCalls
from workers.gym.capture.backend import CaptureBackend, install
from workers.gym.capture.source import LedgerTokenSource

async def main(storage, capture):
    database = Database(storage)
    install(CaptureBackend(Captures(database), ModelCalls(database, BlobStore(storage.blobs_url)), 30.0))
    frozen = await LedgerTokenSource().freeze(capture)
    entries = [
        [e.prompt_token_ids, e.generation_token_ids, e.generation_log_probs, e.parent_resolution, e.response_id]
        for e in frozen.entries
    ]
    retired = await LedgerTokenSource().drop(capture, snapshot_id=frozen.snapshot_id, version=frozen.version)
    await database.close()
    print(json.dumps({"incomplete": frozen.incomplete, "entries": entries, "retired": retired}))

section, capture = json.load(sys.stdin)
asyncio.run(main(StorageConfig.model_validate(section), capture))
"""


async def frozen(storage: dict[str, Any], rollout: str, attempt: int) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        environment_python("gym"),
        "-c",
        FREEZE,
        env={**os.environ, **child_environment()},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    given = json.dumps([storage, capture_id(rollout, attempt)]).encode()
    return json.loads((await process.communicate(given))[0])


@pytest.mark.parametrize("agent", AGENTS)
async def test_tokens_are_stored_once_and_come_back_whole(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, storage: dict[str, Any], agent: str
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

    capture = await frozen(storage, rollout, 1)
    assert (capture["incomplete"], capture["retired"]) == (False, True)
    entries = sorted(capture["entries"], key=lambda entry: [call.response_id for call in calls].index(entry[4]))
    assert [entry[:3] for entry in entries] == [
        [list(call.prompt_token_ids), list(call.sampled_token_ids), list(call.log_probs)] for call in calls
    ]
    # What NeMo-Gym makes of the lineage itself: it sees an unknown parent where history was rewritten.
    known = {"root": "root", "append": "resolved", "new_segment": "unresolved"}
    assert [entry[3] for entry in entries] == [known[str(call.continuity)] for call in calls]


async def test_a_capture_with_a_call_that_never_ended_is_incomplete(
    play: Orchestrator, servers: dict[str, str], vllm: SamplingVllm, storage: dict[str, Any]
) -> None:
    rollout = await play.rollout()
    vllm.policy = dying_at(2)
    await play.run(servers["plain_agent"], rollout, (await play.begin(rollout)).attempt)
    capture = await frozen(storage, rollout, 0)
    assert (capture["incomplete"], len(capture["entries"])) == (True, 1)
