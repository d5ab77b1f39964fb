"""Evidence is append-only: the application's role lacks the right, and a trigger refuses the owner too."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, ProgrammingError

from storage.constraints import APPEND_ONLY, broken_constraint
from storage.database import Database
from storage.errors import APPLICATION_ROLE
from storage.models.tables import METADATA
from tests.storage.building import Story

pytestmark = pytest.mark.integration

EVIDENCE = [table.name for table in METADATA.sorted_tables if table.info.get("append_only")]
LASTING = ("trainer_leases",)
CHANGES = {
    "update": "UPDATE {table} SET attempt = attempt WHERE rollout_id = :id",
    "delete": "DELETE FROM {table} WHERE rollout_id = :id",
    "truncate": "TRUNCATE {table} CASCADE",
}


def test_evidence_is_calls_selection_and_seals_and_what_operators_asked_for() -> None:
    assert set(EVIDENCE) == {"model_calls", "selected_responses", "seals", "operator_actions", "late_refusals"}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("table", ["model_calls", "selected_responses", "seals"])
async def test_settled_evidence_is_not_changed_by_anyone(
    story: Story, database: Database, owner: Database, table: str, change: str
) -> None:
    rollout_id = await story.open_rollout()
    await story.settle(rollout_id, 1.0)
    await refuse_change(database, owner, table, CHANGES[change].format(table=table), rollout_id)


@pytest.mark.parametrize("change", ["UPDATE {table} SET at = now()", "DELETE FROM {table}", "TRUNCATE {table}"])
@pytest.mark.parametrize("table", ["operator_actions", "late_refusals"])
async def test_audit_is_not_changed_by_anyone(
    story: Story, database: Database, owner: Database, table: str, change: str
) -> None:
    await refuse_change(database, owner, table, change.format(table=table))


async def refuse_change(
    database: Database, owner: Database, table: str, change: str, rollout_id: str | None = None
) -> None:
    statement = text(change)
    parameters = {"id": rollout_id} if ":id" in change else {}

    async with database.transaction() as session:
        with pytest.raises(ProgrammingError, match=f"permission denied for table {table}"):
            await session.execute(statement, parameters)
        await session.rollback()
    async with owner.transaction() as session:
        with pytest.raises(IntegrityError, match="evidence is append-only") as refused:
            await session.execute(statement, parameters)
        await session.rollback()

    assert broken_constraint(refused.value) == APPEND_ONLY


@pytest.mark.parametrize("table", [table.name for table in METADATA.sorted_tables])
async def test_application_has_the_rights_that_each_table_is_for(database: Database, table: str) -> None:
    ask = text("SELECT has_table_privilege(:role, :table, :right)")
    async with database.transaction() as session:
        granted = {
            right
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE")
            if await session.scalar(ask, {"role": APPLICATION_ROLE, "table": table, "right": right})
        }
        assert await session.scalar(text("SELECT current_user")) == APPLICATION_ROLE

    kept = {"DELETE"} if table in LASTING else {"UPDATE", "DELETE"} if table in EVIDENCE else set[str]()
    assert granted == {"SELECT", "INSERT", "UPDATE", "DELETE"} - kept


async def test_application_can_read_the_schema_revision_but_not_forge_it(database: Database) -> None:
    async with database.transaction() as session:
        assert await session.scalar(text("SELECT count(*) FROM alembic_version")) == 1
        with pytest.raises(ProgrammingError, match="permission denied"):
            await session.execute(text("DELETE FROM alembic_version"))
        await session.rollback()
