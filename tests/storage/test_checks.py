"""The checks of a run: none of an honest run's rows is violated, and each kind of forged row is named.

Every forgery is made by the owner with triggers and constraints out of the way, in a transaction that is rolled back.
"""

import pytest
from sqlalchemy import text

from storage.checks import INVARIANTS, Violation, violations
from storage.database import Database
from storage.errors import UnknownRun
from storage.ledger import Ledger
from tests.storage.building import Story, selecting, start_run

pytestmark = pytest.mark.integration

ENDINGS = "a train group that has ended has its place among the endings, and no other has one"
SET_ASIDE = "a group that was set aside has valid rollouts, all with the same reward, and is in no batch"
FORGERIES = {
    "a call carries the sample of its attempt": "UPDATE model_calls SET sample = 7 WHERE {second} AND ordinal = 3",
    "a response is generated once in a sample": "INSERT INTO model_calls SELECT (jsonb_populate_record("
    "model_calls, '{{\"ordinal\": 9}}')).* FROM model_calls WHERE {first} AND ordinal = 0",
    "a replayed call points to the generated one of its request": "UPDATE model_calls SET replayed_ordinal = 1 "
    "WHERE {second} AND ordinal = 0",
    "the parent of a call is a generated call of its sample": "UPDATE model_calls SET parent_attempt = 1, "
    "parent_ordinal = 0 WHERE {second} AND ordinal = 2",
    "a call that appends starts with all tokens of its parent": "UPDATE model_calls SET prefix_tokens = 4, "
    "tokens = tokens || '\\x00000000' WHERE {first} AND ordinal = 1",
    "weight spans cover the sampled tokens without gaps": "UPDATE model_calls SET weight_versions = "
    '\'[{{"version": "policy-0", "start": 1, "end": 2}}]\' WHERE {first} AND ordinal = 1',
    "a payload has its digest": "UPDATE model_calls SET body = 'forged' WHERE {first} AND ordinal = 0",
    "a chain digest follows from the parent's and the call's own": "UPDATE model_calls SET chain_digest = 'forged' "
    "WHERE {second} AND ordinal = 2",
    "an answered call holds its lease, a failed one has given it back": "UPDATE model_call_leases "
    "SET released_at = now() WHERE {first} AND ordinal = 1",
    "no attempt records a call after a later one began": "UPDATE model_calls SET ended_at = now() WHERE {first} "
    "AND ordinal = 0",
    "a sample begins with a reason, and only then": "UPDATE attempts SET fresh_reason = 'forged' WHERE {second}",
    "a settled attempt has a seal": "DELETE FROM seals WHERE {second}",
    "a seal is of the attempt that settled": "UPDATE seals SET attempt = 0 WHERE {second}",
    "selected responses are of the attempt that settled": "INSERT INTO selected_responses "
    "(rollout_id, attempt, position, ordinal, segment) VALUES (:rollout_id, 0, 0, 0, 0)",
    "a selected response is a response": "UPDATE selected_responses SET ordinal = 3 WHERE {second} AND position = 2",
    "positions of selected responses have no gaps": "UPDATE selected_responses SET position = 5 WHERE {second} "
    "AND position = 2",
    "segments follow one another, and boundaries are where they start": "UPDATE selected_responses "
    "SET segment = 2 WHERE {second} AND position = 2",
    "a valid rollout has evidence: a digest, and a selected response in each segment": "UPDATE rollouts "
    "SET evidence_digest = NULL WHERE {rollout}",
    "a group has the rollouts it was opened with": "UPDATE groups SET num_rollouts = 5 WHERE group_id = :group_id",
    SET_ASIDE: "UPDATE rollouts SET reward = 0.5 WHERE rollout_id = :aside_id || '/rollout-0'",
    "a group that ended well has no open rollout": "UPDATE groups SET state = 'sealed' WHERE group_id = :other_id",
    "the attempt that settled a rollout is settled, and no other": "UPDATE attempts "
    "SET state = 'settled' WHERE {first}",
    "an applied step has the batch it was applied with": "UPDATE batches SET digest = 'forged' WHERE run_id = :run_id",
    "a group is trained if an applied step has it in its batch, and only then": "DELETE FROM batch_groups "
    "WHERE group_id = :group_id",
    ENDINGS: "UPDATE groups SET ended_order = NULL WHERE group_id = :group_id",
    "a group whose place was taken is dropped or set aside, or trains in another step": "UPDATE groups "
    "SET state = 'sealed' WHERE group_id = :dropped_id",
    "a group takes a place in the step that trains it": "UPDATE groups "
    "SET replaces = :dropped_id WHERE group_id = :other_id",
    "a batch has only groups that train in its step": "UPDATE groups SET train_step = 4 WHERE group_id = :group_id",
    "an evaluation and a diagnostic copy are in no batch": "UPDATE groups SET purpose = 'diagnostic' "
    "WHERE group_id = :group_id",
}
# What else a forged row breaks.
CONSEQUENCES = {
    "a call carries the sample of its attempt": {"an answered call holds its lease, a failed one has given it back"},
    "a response is generated once in a sample": {"an answered call holds its lease, a failed one has given it back"},
    "the parent of a call is a generated call of its sample": {
        "a call that appends starts with all tokens of its parent",
        "a chain digest follows from the parent's and the call's own",
    },
    "a call that appends starts with all tokens of its parent": {"a payload has its digest"},
    "a seal is of the attempt that settled": {"a settled attempt has a seal"},
    "a group that ended well has no open rollout": {ENDINGS},
    "an evaluation and a diagnostic copy are in no batch": {ENDINGS},
    "segments follow one another, and boundaries are where they start": {
        "a valid rollout has evidence: a digest, and a selected response in each segment"
    },
}
MISSING = {
    "DELETE FROM model_calls WHERE {first} AND ordinal = 0": {
        "a replayed call points to the generated one of its request",
        "the parent of a call is a generated call of its sample",
        "a chain digest follows from the parent's and the call's own",
    },
    "DELETE FROM model_calls WHERE {second} AND ordinal = 2": {"a selected response is a response"},
    "DELETE FROM selected_responses WHERE {second}": {
        "a valid rollout has evidence: a digest, and a selected response in each segment"
    },
    "DELETE FROM model_call_leases WHERE {first} AND ordinal = 0": {
        "an answered call holds its lease, a failed one has given it back"
    },
    "DELETE FROM optimizer_steps WHERE run_id = :run_id": {
        "a group is trained if an applied step has it in its batch, and only then"
    },
    "UPDATE groups SET ended_order = 9 WHERE group_id = :other_id": {ENDINGS},
    "UPDATE groups SET replaces = 'gone' WHERE group_id = :successor_id": {
        "a group takes a place in the step that trains it"
    },
    "UPDATE rollouts SET state = 'masked', reward = NULL, reason = 'forged' WHERE rollout_id LIKE :aside_id || '/%'": {
        SET_ASIDE
    },
    "DELETE FROM batches WHERE run_id = :run_id": {"an applied step has the batch it was applied with"},
    "UPDATE model_calls SET cumulative_digest = 'forged' WHERE {first} AND ordinal = 0": {"a payload has its digest"},
    "UPDATE rollouts SET segments = 2 WHERE {rollout}": {
        "a valid rollout has evidence: a digest, and a selected response in each segment"
    },
}
PLACES = {
    "rollout": "rollout_id = :rollout_id",
    "first": "rollout_id = :rollout_id AND attempt = 0",
    "second": "rollout_id = :rollout_id AND attempt = 1",
}


@pytest.fixture(scope="module")
async def honest_run(ledger: Ledger) -> Story:
    """A trained group whose rollout failed once, replayed, failed a call, went on; a copy of it; a group that is open,
    one that was dropped, one in the place of that, and one that was set aside."""
    story = Story(ledger, (await start_run(ledger)).run_id)
    rollout_id = await story.open_rollout()
    calls = story.ledger.calls
    await story.begin(rollout_id)
    first = await story.generate(rollout_id, 0, (1, 2, 3), (4, 5), fingerprint="first")
    await story.generate(rollout_id, 0, (1, 2, 3, 4, 5, 6), (7, 8), after=first, fingerprint="second")
    await story.ledger.rollouts.fail_attempt(rollout_id, 0, "agent", "infra", "http_500", "the agent said 500")
    await story.begin(rollout_id)
    for fingerprint in ("first", "second"):
        second = (await calls.claim(rollout_id, 1, fingerprint)).recorded
    await story.generate(rollout_id, 1, (1, 2, 3, 4, 5, 6, 7, 8, 9), (10,), after=second, fingerprint="third")
    await calls.fail(await calls.claim(rollout_id, 1, "fourth"), "GenerationUnavailable", "connection refused")
    await calls.measure(rollout_id, 1, 11)
    await story.ledger.rollouts.settle(selecting(rollout_id, 1, [0, 1, 2]))
    group_id = rollout_id.rsplit("/", 1)[0]
    await story.ledger.groups.set_state(group_id, "sealed")
    await story.train([group_id])
    await story.ledger.copies.open(group_id)
    await story.group(step=1)
    lost = await story.dropped_group(step=2)
    await story.group(step=2, slot=1, replaces=lost.group_id)
    await story.set_aside_group(step=3)
    return story


async def test_rows_of_an_honest_run_violate_nothing(honest_run: Story) -> None:
    assert await honest_run.ledger.checks.of(honest_run.run_id) == []


@pytest.mark.parametrize("invariant", INVARIANTS)
async def test_forged_row_is_named(honest_run: Story, owner: Database, invariant: str) -> None:
    found = await forged(honest_run, owner, FORGERIES[invariant])

    assert {violation.invariant for violation in found} == {invariant} | CONSEQUENCES.get(invariant, set())
    assert all(violation.row.startswith(honest_run.run_id) for violation in found)


@pytest.mark.parametrize(("forgery", "invariants"), MISSING.items())
async def test_row_that_is_gone_or_wrong_breaks_what_points_to_it(
    honest_run: Story, owner: Database, forgery: str, invariants: set[str]
) -> None:
    found = await forged(honest_run, owner, forgery)
    assert {violation.invariant for violation in found} == invariants


async def forged(story: Story, owner: Database, forgery: str) -> list[Violation]:
    """The violations of an honest run of which some rows were forged."""
    known = {
        "run_id": story.run_id,
        "rollout_id": f"{story.group_id(0, 0)}/rollout-0",
        "group_id": story.group_id(0, 0),
        "other_id": story.group_id(1, 0),
        "dropped_id": story.group_id(2, 0),
        "successor_id": story.group_id(2, 1),
        "aside_id": story.group_id(3, 0),
    }
    forgery = forgery.format(**PLACES)
    async with owner.transaction() as session:
        await session.execute(text("SET LOCAL session_replication_role = replica"))
        await session.execute(text("ALTER TABLE groups DROP CONSTRAINT groups_replaces_key"))
        for guard in ("model_calls_generated_once", "model_call_leases_held_once", "attempts_one_running_per_rollout"):
            await session.execute(text(f"DROP INDEX {guard}"))
        for table, check in (
            ("model_calls", "payload_size"),
            ("model_calls", "lineage"),
            ("attempts", "fresh_begins_a_sample"),
            ("rollouts", "valid_has_evidence"),
            ("attempts", "failed_with_cause"),
            *(("groups", rule) for rule in ("ended_order", "train_step", "promoted_takes_a_place")),
            *(("groups", rule) for rule in ("diagnostic_is_a_copy", "validation_never_trains", "replaces")),
        ):
            await session.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT {table}_{check}_check"))
        await session.execute(text(forgery), {name: value for name, value in known.items() if f":{name}" in forgery})
        found = await violations(session, story.run_id)
        await session.rollback()
    return found


def test_every_invariant_has_a_forgery() -> None:
    assert set(FORGERIES) == set(INVARIANTS)


async def test_unknown_run_is_not_checked(ledger: Ledger) -> None:
    with pytest.raises(UnknownRun, match="nowhere"):
        await ledger.checks.of("nowhere")
