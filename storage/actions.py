"""The audit: what operators asked for, who and why, and what became of it.

Refusals are in it, too; nothing is ever changed or removed.
"""

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from storage.constraints import broken_constraint
from storage.database import Database
from storage.errors import UnknownRun
from storage.models.operations import OperatorAction
from storage.records import ActionRecord


class Actions:
    """Record and list."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, action: ActionRecord) -> ActionRecord:
        """Write what became of a request; the same `action_id` again returns what is stored. ValueError when actor,
        reason, verb or target is blank."""
        new_action = insert(OperatorAction).values(**action.model_dump(exclude={"at"}))
        try:
            async with self._database.transaction() as session:
                await session.execute(new_action.on_conflict_do_nothing())
                return ActionRecord.model_validate(await session.get_one(OperatorAction, action.action_id))
        except IntegrityError as error:
            if broken_constraint(error) == "operator_actions_run_id_fkey":
                raise UnknownRun(action.run_id) from None
            if broken_constraint(error) == "operator_actions_not_blank_check":
                raise ValueError(f"action {action.action_id!r} needs an actor, a reason, a verb and a target") from None
            raise

    async def list(self, run_id: str, target: str | None = None) -> list[ActionRecord]:
        """The actions of a run, or on one target of it, oldest first."""
        wanted = select(OperatorAction).where(OperatorAction.run_id == run_id)
        if target is not None:
            wanted = wanted.where(OperatorAction.target == target)
        async with self._database.transaction() as session:
            rows = await session.scalars(wanted.order_by(OperatorAction.at, OperatorAction.action_id))
            return [ActionRecord.model_validate(row) for row in rows]
