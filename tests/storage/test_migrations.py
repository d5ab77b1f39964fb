"""Migrations: applied once whoever comes first, equal to the models, and back again."""

import asyncio

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from pydantic import SecretStr
from sqlalchemy import Connection, inspect, text

from configs.storage import StorageConfig
from storage.checks import violations
from storage.database import Database
from storage.errors import SchemaOutdated
from storage.migrate import alembic_config, check_schema, migrate
from storage.models.tables import METADATA
from tests.storage.building import migrating_process

pytestmark = pytest.mark.integration

CONSTRAINTS = """
SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'alembic_version'
UNION ALL SELECT tablename, indexname, indexdef FROM pg_indexes
WHERE schemaname = 'public' AND tablename <> 'alembic_version'
"""
FIRST_RELEASE = (
    "INSERT INTO runs (run_id, task_queue, recipe, dataset_digest, dataset_rows, model_digest) "
    "VALUES ('run', 'queue', '{}', 'd', 1, 'm')",
    "INSERT INTO groups (group_id, run_id, step, slot, purpose, prompt_id, row_index, num_rollouts) "
    "VALUES ('run/g', 'run', 0, 0, 'train', 'p', 0, 1)",
    "INSERT INTO rollouts (rollout_id, group_id, index) VALUES ('run/g/rollout-0', 'run/g', 0)",
    "INSERT INTO attempts (rollout_id, attempt, worker, state, ended_at) "
    "VALUES ('run/g/rollout-0', 0, 'w', 'settled', now())",
    "UPDATE rollouts SET current_attempt = 0, settled_attempt = 0, settled_at = now(), state = 'valid', reward = 1, "
    "evidence_digest = 'e', segments = 2",
    "INSERT INTO model_calls (rollout_id, attempt, ordinal, segment, prompt_tokens, generated_tokens) "
    "VALUES ('run/g/rollout-0', 0, 0, 0, 10, 1), ('run/g/rollout-0', 0, 1, 1, 5, 1)",
)


@pytest.fixture
def empty_config(database_dsn: str) -> StorageConfig:
    """The configuration of an empty database."""
    return StorageConfig(dsn=SecretStr(database_dsn))


def rules(connection: Connection) -> set[tuple[str, ...]]:
    """Every constraint and index, as PostgreSQL writes it."""
    return {tuple(row) for row in connection.execute(text(CONSTRAINTS))}


async def test_schema_is_that_of_the_models(database: Database) -> None:
    def differences(connection: Connection) -> list[object]:
        return compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), METADATA)

    async with database.snapshot() as session:
        assert await (await session.connection()).run_sync(differences) == []


async def test_constraints_are_those_of_the_models(database: Database, empty_config: StorageConfig) -> None:
    async with database.snapshot() as session:
        migrated = await (await session.connection()).run_sync(rules)
    created_database = Database(empty_config, role=None)
    async with created_database.transaction() as session:
        connection = await session.connection()
        await connection.run_sync(METADATA.create_all)
        created = await connection.run_sync(rules)
    await created_database.close()

    assert migrated == created


async def test_migrating_again_changes_nothing(storage_config: StorageConfig, database: Database) -> None:
    await migrate(storage_config)
    await check_schema(database)


async def test_downgrade_leaves_no_table_and_upgrade_comes_back(empty_config: StorageConfig) -> None:
    await migrate(empty_config)
    database = Database(empty_config, role=None)
    async with database.transaction() as session:
        connection = await session.connection()
        await connection.run_sync(lambda sync: command.downgrade(alembic_config(sync), "base"))
        assert await connection.run_sync(lambda sync: inspect(sync).get_table_names()) == ["alembic_version"]

    with pytest.raises(SchemaOutdated, match="revision none"):
        await check_schema(database)
    await migrate(empty_config)
    await check_schema(database)
    await database.close()


async def test_calls_of_the_first_release_become_reported_and_selected_ones(empty_config: StorageConfig) -> None:
    owner = Database(empty_config, role=None)
    async with owner.transaction() as session:
        connection = await session.connection()
        await connection.run_sync(lambda sync: command.upgrade(alembic_config(sync), "0001"))
        for statement in FIRST_RELEASE:
            await session.execute(text(statement))

    await migrate(empty_config)

    async with owner.transaction() as session:
        calls = await session.execute(text("SELECT ordinal, outcome, prompt_tokens FROM model_calls ORDER BY ordinal"))
        selected = await session.execute(
            text("SELECT position, ordinal, segment, boundary FROM selected_responses ORDER BY position")
        )
        assert [tuple(row) for row in calls] == [(0, "reported", 10), (1, "reported", 5)]
        assert [tuple(row) for row in selected] == [(0, 0, 0, None), (1, 1, 1, "not recorded")]
        assert await violations(session, "run") == []
    await owner.close()


async def test_groups_of_an_earlier_release_get_their_step_and_the_order_in_which_they_ended(
    empty_config: StorageConfig,
) -> None:
    owner = Database(empty_config, role=None)
    new_group = text(
        "INSERT INTO groups (group_id, run_id, step, slot, purpose, prompt_id, row_index, num_rollouts, state, reason, "
        "updated_at) VALUES (:id, 'run', :step, :slot, :purpose, 'p', 0, 1, :state, 'r', now() + :at * interval '1 s')"
    )
    async with owner.transaction() as session:
        connection = await session.connection()
        await connection.run_sync(lambda sync: command.upgrade(alembic_config(sync), "0003"))
        await session.execute(text(FIRST_RELEASE[0]))
        ended = [(0, "train", "trained", 3), (0, "train", "dropped", 1), (1, "train", "sealed", 2)]
        others = [(1, "train", "open", 0), (1, "validation", "sealed", 0)]
        for number, (step, purpose, state, at) in enumerate(ended + others):
            asked = {"id": f"g{number}", "step": step, "slot": number, "purpose": purpose, "state": state, "at": at}
            await session.execute(new_group, asked)

    await migrate(empty_config)

    async with owner.transaction() as session:
        groups = await session.execute(text("SELECT train_step, ended_order FROM groups ORDER BY group_id"))
        assert [tuple(row) for row in groups] == [(0, 3), (0, 1), (1, 2), (1, None), (1, None)]
    await owner.close()


async def test_schema_of_a_newer_release_is_refused(empty_config: StorageConfig) -> None:
    await migrate(empty_config)
    database = Database(empty_config, role=None)
    async with database.transaction() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = 'from_the_future'"))

    with pytest.raises(SchemaOutdated, match="from_the_future"):
        await check_schema(database)
    with pytest.raises(SchemaOutdated, match="from_the_future"):
        await migrate(empty_config)
    await database.close()


async def test_two_processes_that_migrate_at_once_both_succeed(database_dsn: str, empty_config: StorageConfig) -> None:
    assert await asyncio.gather(*(migrating_process(database_dsn) for _ in range(2))) == [(0, "")] * 2

    database = Database(empty_config)
    await check_schema(database)
    await database.close()
