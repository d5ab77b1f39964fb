"""The generation worker as a process: it says when it is ready, outlives its Temporal service, and leaves cleanly."""

import asyncio
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.generation.weights import weights_digest
from configs.recipe import Recipe
from configs.storage import StorageConfig
from configs.temporal import TemporalConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.generation.fake_vllm import FakeVllm, serving
from tests.generation.worker_processes import PATIENCE_S, worker_process
from tests.gym.ports import reserved_port
from workers.environments.paths import child_environment
from workers.stack.child import running
from workers.stack.ports import distinct_free_ports
from workers.stack.temporal import EmbeddedTemporal
from workers.temporal_client import TemporalUnavailable, connect
from workflows.messages import WeightsRef
from workflows.training_messages import Refit, RefitDone


@workflow.defn
class OneRefit:
    """Ask the generation queue for a refit."""

    @workflow.run
    async def run(self, request: Refit) -> RefitDone:
        return await workflow.execute_activity(
            "refit",
            request,
            result_type=RefitDone,
            task_queue="fleet-generation",
            start_to_close_timeout=timedelta(seconds=60),
            heartbeat_timeout=timedelta(seconds=30),
            retry_policy=RetryPolicy(maximum_attempts=5),
        )


@pytest.mark.integration
async def test_the_worker_goes_on_after_its_temporal_service_was_killed_and_leaves_with_zero(
    migrated_dsn: str, tmp_path: Path
) -> None:
    storage = StorageConfig(dsn=SecretStr(migrated_dsn), blobs_url=str(tmp_path / "blobs"))
    database = Database(storage)
    ledger = Ledger(database, BlobStore(storage.blobs_url))
    await ledger.runs.create("run", "fleet", {}, "d" * 64, 1, "m" * 64)
    port, ui_port = distinct_free_ports(2)
    embedded = EmbeddedTemporal(port, ui_port, "default", timedelta(days=1), database=tmp_path / "temporal.db")
    temporal = embedded.service()
    with serving(FakeVllm()) as vllm:
        recipe = Recipe.model_validate(
            {
                "run": {"model": "model", "dataset": "rows.jsonl"},
                "generation": {"endpoints": [vllm.url]},
                "temporal": {"address": embedded.address, "task_queue": "fleet"},
                "storage": {"dsn": migrated_dsn},
            }
        )

        async def refit(version: int) -> RefitDone:
            folder = tmp_path / f"policy-{version}"
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"weights %d" % version)
            weights = WeightsRef(version=version, path=str(folder), digest=weights_digest(folder))
            lease = await ledger.trainer_leases.acquire("run", "trainer", 600)
            await ledger.weights.publish(lease, version, weights.path, weights.digest)
            client = await connect(recipe.temporal, PATIENCE_S)
            runner = UnsandboxedWorkflowRunner()
            async with Worker(client, task_queue="test", workflows=[OneRefit], workflow_runner=runner):
                request = Refit(run_id="run", weights=weights)
                return await client.execute_workflow(OneRefit.run, request, id=f"refit-{version}", task_queue="test")

        log = tmp_path / "temporal.log"
        async with running(temporal, log) as first, worker_process("generation-worker", tmp_path, recipe) as process:
            assert (await refit(0)).endpoints == 1
            os.kill(first.identity.pid, signal.SIGKILL)
            await first.wait()
            async with running(temporal, log):
                assert (await refit(1)).version == 1
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENCE_S):
                    assert await process.wait() == 0
        assert vllm.label == "policy-1"
        assert not (tmp_path / "ready" / "generation-worker").exists()
    summary = await ledger.summaries.of("run")
    assert (summary.refits, summary.policy_version) == (2, 1)
    await database.close()


async def test_a_temporal_service_that_is_not_there_is_named() -> None:
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        message = f"service at {address} .temporal.address, namespace default. cannot"
        with pytest.raises(TemporalUnavailable, match=message):
            await connect(TemporalConfig(address=address))


async def test_what_is_not_an_address_is_refused_at_once() -> None:
    with pytest.raises(TemporalUnavailable, match="invalid target URL"):
        await connect(TemporalConfig(address="no address"), patience_s=PATIENCE_S)


async def test_an_unreadable_certificate_is_named(tmp_path: Path) -> None:
    config = TemporalConfig.model_validate({"address": "h:1", "tls": {"client_cert": str(tmp_path / "missing.pem")}})
    with pytest.raises(TemporalUnavailable, match=r"temporal\.tls\.client_cert: cannot read .*missing\.pem"):
        await connect(config)


async def test_a_recipe_with_an_unknown_key_ends_the_process_with_two(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("run: {model: m, dataset: d}\ngrpoo: {}\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.generation_worker", "--recipe", str(tmp_path / "recipe.yaml")),
        env={**os.environ, **child_environment()},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 2
    assert b"grpoo" in output
