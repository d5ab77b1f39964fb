"""Claims on the dataset: positions 0, 1, 2... of a run, each claimed once, none skipped, whoever asks and how often."""

from collections.abc import Callable
from typing import Final

from sqlalchemy import func, insert, select, text

from storage.database import Database
from storage.errors import UnknownRun
from storage.models.runs import PromptClaim, Run
from storage.records import Claim, Purpose

NEXT_SLOT: Final = text("""
WITH claimed AS (SELECT slot FROM prompt_claims WHERE run_id = :run_id AND purpose = 'train' AND step = :step)
SELECT min(free.slot) FROM generate_series(0, (SELECT count(*)::int FROM claimed)) AS free (slot)
WHERE NOT EXISTS (SELECT FROM claimed WHERE claimed.slot = free.slot)
""")


class Prompts:
    """Reserve rows of the dataset for slots of steps."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(
        self,
        run_id: str,
        step: int,
        purpose: Purpose,
        first_slot: int,
        count: int,
        pick: Callable[[int], tuple[int, str]],
    ) -> tuple[Claim, ...]:
        """The claims of slots [first_slot, first_slot + count), in order; those there already as they are stored.

        A new claim for training takes the run's next position, for validation the position of its slot;
        `pick(position)` names the row and the prompt there. One claimer of a run at a time, by an advisory lock.
        """
        if purpose == "diagnostic":
            raise ValueError("a diagnostic copy has the prompt of its original and claims none")
        wanted = range(first_slot, first_slot + count)
        async with self._database.transaction() as session:
            await session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"claims/{run_id}", 0))))
            if await session.scalar(select(Run.run_id).where(Run.run_id == run_id)) is None:
                raise UnknownRun(run_id)
            of_purpose = (PromptClaim.run_id == run_id, PromptClaim.purpose == purpose)
            stored = await session.scalars(
                select(PromptClaim).where(*of_purpose, PromptClaim.step == step, PromptClaim.slot.in_(wanted))
            )
            claims = {claim.slot: Claim.model_validate(claim) for claim in stored}
            position = await session.scalar(select(func.count()).select_from(PromptClaim).where(*of_purpose)) or 0
            for slot in wanted:
                if slot in claims:
                    continue
                at = position if purpose == "train" else slot
                row_index, prompt_id = pick(at)
                claims[slot] = Claim(step=step, slot=slot, position=at, row_index=row_index, prompt_id=prompt_id)
                await session.execute(
                    insert(PromptClaim).values(run_id=run_id, purpose=purpose, **claims[slot].model_dump())
                )
                position += 1
        return tuple(claims[slot] for slot in wanted)

    async def next_slot(self, run_id: str, step: int) -> int:
        """The first slot of a step that no training prompt is claimed for."""
        async with self._database.statement() as connection:
            return (await connection.execute(NEXT_SLOT, {"run_id": run_id, "step": step})).scalar_one()
