"""Evaluations: one mean reward per policy version, over rollouts that never train."""

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from storage.constraints import broken_constraint
from storage.database import Database
from storage.errors import UnknownRun
from storage.models.weights import Evaluation
from storage.records import EvaluationRecord


class Evaluations:
    """Record and list."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, run_id: str, version: int, mean_reward: float | None, rollouts: int) -> EvaluationRecord:
        """Write a version's result; None when none of its rollouts was valid. A repeated write keeps the first."""
        new_evaluation = insert(Evaluation).values(
            run_id=run_id, version=version, mean_reward=mean_reward, rollouts=rollouts
        )
        try:
            async with self._database.transaction() as session:
                await session.execute(new_evaluation.on_conflict_do_nothing())
                return EvaluationRecord.model_validate(await session.get_one(Evaluation, (run_id, version)))
        except IntegrityError as error:
            if broken_constraint(error) == "evaluations_run_id_fkey":
                raise UnknownRun(run_id) from None
            raise

    async def list(self, run_id: str) -> list[EvaluationRecord]:
        """The evaluations of a run, by version."""
        wanted = select(Evaluation).where(Evaluation.run_id == run_id).order_by(Evaluation.version)
        async with self._database.transaction() as session:
            return [EvaluationRecord.model_validate(stored) for stored in await session.scalars(wanted)]
