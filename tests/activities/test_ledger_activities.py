"""Steps, batches and runs: written once however often they are asked, and read back as they were written."""

import socket
from pathlib import Path

import pytest
from pydantic import SecretStr
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from activities.rollouts.prompt_order import row_of_position
from activities.training.batch import TrainingBatch
from configs.storage import StorageConfig
from storage.database import Database
from storage.ledger import Ledger
from tests.activities.world import World, call, failing, start_run
from tests.rollouts.agent_server import answering
from tests.rollouts.building import answer, item, real_answer
from workflows.messages import AssembleBatch, ClaimPrompts, FindBatch, RecordEvaluation, SetRunState
from workflows.training_messages import RecordStep

pytestmark = pytest.mark.integration


def claim(world: World, count: int, step: int = 0, first_slot: int = 0, purpose: str = "train") -> ClaimPrompts:
    return ClaimPrompts.model_validate(
        {"run_id": world.run_id, "step": step, "purpose": purpose, "first_slot": first_slot, "count": count}
    )


async def use_validation_dataset(world: World, rows: int) -> None:
    """Go on with a run that has the first rows of the dataset for validation."""
    validation = world.folder / "validation.jsonl"
    validation.write_text("".join(world.dataset.read_text().splitlines(keepends=True)[:rows]))
    run = {"model": world.folder / "model", "dataset": world.dataset, "validation_dataset": validation}
    world.run_id = await start_run(world.ledger, world.dataset, world.folder, run=run)


async def test_claims_follow_the_order_of_the_run_and_never_repeat(world: World) -> None:
    first = await call(world.writing.claim_prompts, claim(world, 2))
    second = await call(world.writing.claim_prompts, claim(world, 4, step=1))
    rows = [made.row_index for made in first.claims + second.claims]
    assert rows == [row_of_position(position, 6, 42) for position in range(6)]
    assert sorted(rows) == list(range(6))
    assert [made.prompt_id for made in first.claims] == [f"safe-{row}" for row in rows[:2]]
    assert [made.slot for made in second.claims] == [0, 1, 2, 3]


async def test_repeated_claim_gets_the_same_prompts(world: World) -> None:
    first = await call(world.writing.claim_prompts, claim(world, 3))
    assert await call(world.writing.claim_prompts, claim(world, 3)) == first
    assert (await call(world.writing.claim_prompts, claim(world, 4))).claims[:3] == first.claims


@pytest.mark.parametrize(
    ("first_slot", "count", "rows"), [(0, 3, [0, 1, 2]), (0, 64, [0, 1, 2, 3]), (3, 9, [3]), (4, 2, [])]
)
async def test_validation_prompts_are_those_of_the_file_and_end_with_it(
    world: World, first_slot: int, count: int, rows: list[int]
) -> None:
    await use_validation_dataset(world, rows=4)
    request = claim(world, count, first_slot=first_slot, purpose="validation")
    for _ in range(2):
        claims = (await call(world.writing.claim_prompts, request)).claims
        assert [made.row_index for made in claims] == rows


async def test_claim_of_an_unknown_run_names_it_and_is_not_retried(world: World) -> None:
    world.run_id = "nobody"
    failure, error = await failing(world.writing.claim_prompts, claim(world, 1))
    assert (failure.run_id, failure.failure_class, error.non_retryable) == ("nobody", "UnknownRun", True)


async def test_claim_on_a_changed_dataset_is_refused(world: World) -> None:
    world.dataset.write_text(world.dataset.read_text() + "\n")
    failure, _ = await failing(world.writing.claim_prompts, claim(world, 1))
    assert (failure.failure_class, failure.bucket) == ("DatasetError", "data")


async def test_batch_has_one_advantage_per_rollout_and_a_placeholder_for_the_lost(world: World) -> None:
    groups = (await world.run_group(1.0, 0.0, slot=0), await world.run_group(0.5, None, 0.5, slot=1))
    request = AssembleBatch(run_id=world.run_id, step=0, group_ids=groups)
    batch = await call(world.writing.assemble_batch, request)
    assert (batch.step, batch.groups, batch.rows, batch.rollouts, batch.trained_tokens) == (0, 2, 4, 5, 12)
    assert batch.mean_reward == 0.5
    rows = TrainingBatch.from_bytes(await world.blobs.get(batch.digest)).rows
    assert [(row.rollout_id, row.advantage) for row in rows] == [
        (f"{groups[0]}/rollout-0", 1.0),
        (f"{groups[0]}/rollout-1", -1.0),
        (f"{groups[1]}/rollout-0", 0.0),
        (f"{groups[1]}/rollout-1", 0.0),
        (f"{groups[1]}/rollout-2", 0.0),
    ]
    assert [row.is_placeholder for row in rows] == [False, False, False, True, False]
    assert rows[0].tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert rows[0].loss_mask.tolist() == [0, 0, 1, 1, 0, 1]


async def test_batch_assembled_twice_is_the_same_batch(world: World) -> None:
    request = AssembleBatch(run_id=world.run_id, step=0, group_ids=(await world.run_group(1.0, 0.0),))
    first = await call(world.writing.assemble_batch, request)
    assert await call(world.writing.assemble_batch, request) == first


async def test_batch_of_a_step_is_found_once_it_is_stored(world: World) -> None:
    find = FindBatch(run_id=world.run_id, step=0)
    assert (await call(world.writing.find_batch, find)).batch is None
    request = AssembleBatch(run_id=world.run_id, step=0, group_ids=(await world.run_group(1.0, 0.0),))
    batch = await call(world.writing.assemble_batch, request)
    assert (await call(world.writing.find_batch, find)).batch == batch


async def test_step_that_has_a_batch_gets_no_other_one(world: World) -> None:
    groups = (await world.run_group(1.0, 0.0, slot=0), await world.run_group(0.0, 1.0, slot=1))
    await call(world.writing.assemble_batch, AssembleBatch(run_id=world.run_id, step=0, group_ids=groups))
    other = AssembleBatch(run_id=world.run_id, step=0, group_ids=groups[:1])
    failure, _ = await failing(world.writing.assemble_batch, other)
    assert (failure.failure_class, failure.bucket) == ("BatchConflict", "data")


async def test_rollout_in_segments_keeps_all_of_them_in_the_batch(world: World) -> None:
    group = await world.open_group(num_rollouts=2)
    for index, name in enumerate(("compaction", "simple")):
        world.agent.reply = world.model.serving(real_answer(name))
        await call(world.rollouts.run_rollout, world.rollout(group, index))
    await world.seal(group)
    batch = await call(world.writing.assemble_batch, AssembleBatch(run_id=world.run_id, step=0, group_ids=(group,)))
    assert (batch.rows, batch.rollouts, batch.trained_tokens) == (4, 2, 286)
    stored = await world.ledger.batches.get(world.run_id, 0)
    assert stored is not None
    assert stored.segments_max == 3


async def test_lost_evidence_is_named_and_not_trained_around(world: World) -> None:
    group = await world.run_group(1.0, 0.0)
    digest = (await world.ledger.groups.get(group)).rollouts[0].evidence_digest
    assert digest is not None
    Path(world.blobs.path_of(digest)).unlink()
    request = AssembleBatch(run_id=world.run_id, step=0, group_ids=(group,))
    failure, _ = await failing(world.writing.assemble_batch, request)
    assert failure.failure_class == "BlobMissing"
    assert digest in failure.cause
    assert await world.ledger.batches.get(world.run_id, 0) is None


async def test_metrics_are_in_the_ledger_and_in_tensorboard(world: World) -> None:
    group = await world.run_group(1.0, 0.0)
    batch = await call(world.writing.assemble_batch, AssembleBatch(run_id=world.run_id, step=0, group_ids=(group,)))
    await world.ledger.steps.apply(await world.lease(), 0, batch.digest, {"loss": 0.5}, 0)
    writing = world.writing
    for _ in range(2):
        await call(writing.record_step, RecordStep(run_id=world.run_id, step=0, metrics={"reward": 0.25}))
    stored = (await world.ledger.steps.metrics(world.run_id))[0]
    assert stored["reward"] == 0.25
    (events,) = (world.folder / "training" / world.run_id / "tensorboard").iterdir()
    tags = [value.tag for event in EventFileLoader(str(events)).Load() for value in event.summary.value]
    assert set(tags) == stored.keys()


async def test_step_says_how_many_episodes_of_each_agent_were_cut_short(world: World) -> None:
    await world.use(rollouts={"evidence": "response", "truncate_noncontiguous_episodes": True})
    group = await world.open_group(num_rollouts=4)
    whole, rewritten = answer(item([1], [2])), answer(item([1], [2]), item([1, 9], [3]), reward=0.0)
    for index, made in enumerate((whole, rewritten, whole, whole)):
        world.agent.reply = answering(200, made)
        await call(world.rollouts.run_rollout, world.rollout(group, index))
    await world.seal(group)
    batch = await call(world.writing.assemble_batch, AssembleBatch(run_id=world.run_id, step=0, group_ids=(group,)))
    await world.ledger.steps.apply(await world.lease(), 0, batch.digest, {}, 0)
    await call(world.writing.record_step, RecordStep(run_id=world.run_id, step=0, metrics={"reward": 0.25}))
    metrics = (await world.ledger.steps.metrics(world.run_id))[0]
    cut = {name: value for name, value in metrics.items() if "noncontiguous_truncated" in name}
    assert cut == {
        "safe_agent/noncontiguous_truncated/mean": 0.25,
        "safe_agent/noncontiguous_truncated/max": 1.0,
        "safe_agent/noncontiguous_truncated/min": 0.0,
        "safe_agent/noncontiguous_truncated/median": 0.0,
        "safe_agent/noncontiguous_truncated/stddev": 0.5,
    }


async def test_evaluation_is_the_mean_over_valid_rollouts(world: World) -> None:
    await use_validation_dataset(world, rows=3)
    groups = [await world.open_group(slot, 1, "validation") for slot in range(3)]
    for group, reward in zip(groups, (1.0, 0.0), strict=False):
        world.agent.reply = world.model.serving(answer(item([1], [2]), reward=reward))
        await call(world.rollouts.run_rollout, world.rollout(group))
    await world.lose(groups[2], 0)
    request = RecordEvaluation(run_id=world.run_id, version=0, group_ids=tuple(groups))
    result = await call(world.writing.record_evaluation, request)
    assert (result.version, result.mean_reward, result.rollouts) == (0, 0.5, 2)
    (stored,) = await world.ledger.evaluations.list(world.run_id)
    assert (stored.mean_reward, stored.rollouts) == (0.5, 2)


async def test_evaluation_without_a_valid_rollout_has_no_mean(world: World) -> None:
    group = await world.open_group(0, 1, "validation")
    await world.lose(group, 0)
    request = RecordEvaluation(run_id=world.run_id, version=0, group_ids=(group,))
    result = await call(world.writing.record_evaluation, request)
    assert (result.mean_reward, result.rollouts) == (None, 0)
    assert (await world.ledger.evaluations.list(world.run_id))[0].mean_reward is None


async def test_state_of_the_run_is_written_with_its_reason(world: World) -> None:
    await call(world.writing.set_run_state, SetRunState(run_id=world.run_id, state="failed", reason="floor"))
    stored = await world.ledger.runs.get(world.run_id)
    assert (stored.state, stored.reason) == ("failed", "floor")


async def test_ledger_that_is_away_may_be_asked_again(world: World) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        database = Database(StorageConfig(dsn=SecretStr(f"postgresql://127.0.0.1:{closed.getsockname()[1]}/onbelay")))
        world.ledger = Ledger(database, world.blobs)
        failure, error = await failing(world.writing.set_run_state, SetRunState(run_id=world.run_id, state="running"))
        await database.close()
    assert (failure.failure_class, failure.boundary, failure.bucket) == ("LedgerUnavailable", "ledger", "infra")
    assert not error.non_retryable
