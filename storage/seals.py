"""Seals: an attempt is settled with one outcome, for ever.

The receipt is the sha256 of the settlement as canonical JSON, together with the chain digests of what it selected; so
it stands for every token that trains. It is written with the outcome, in the transaction that settles the rollout.
"""

import hashlib
import json

from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from storage.errors import SealConflict, SelectionInvalid
from storage.models.model_calls import ModelCall, Seal, SelectedResponse
from storage.records import Settlement

# The responses of an attempt: ordinal, and the digests of the generated calls behind them.
CHAIN = text("""
SELECT call.ordinal, source.attempt AS generated_by, source.ordinal AS generated_as, source.chain_digest
FROM model_calls AS call JOIN model_calls AS source
    ON source.rollout_id = call.rollout_id
    AND source.attempt = coalesce(call.replayed_from, call.attempt)
    AND source.ordinal = coalesce(call.replayed_ordinal, call.ordinal)
WHERE call.rollout_id = :rollout_id AND call.attempt = :attempt AND call.outcome IN ('generated', 'replayed')
""")


async def seal(session: AsyncSession, settlement: Settlement, sample: int) -> None:
    """Write the reported calls, the selected responses and the seal. Raises SelectionInvalid."""
    place = {"rollout_id": settlement.rollout_id, "attempt": settlement.attempt}
    receipt = await _receipt(session, settlement)
    if settlement.reported:
        reported = [
            {**place, "ordinal": ordinal, "outcome": "reported", "sample": sample, **call.model_dump()}
            for ordinal, call in enumerate(settlement.reported)
        ]
        await session.execute(insert(ModelCall), reported)
    if settlement.selected:
        selected = [
            {**place, "position": position, **response.model_dump()}
            for position, response in enumerate(settlement.selected)
        ]
        await session.execute(insert(SelectedResponse), selected)
    await session.execute(insert(Seal).values(**place, receipt=receipt))


async def check_seal(session: AsyncSession, settlement: Settlement) -> None:
    """Raise SealConflict unless the attempt is sealed with exactly this settlement."""
    wanted = (Seal.rollout_id == settlement.rollout_id, Seal.attempt == settlement.attempt)
    stored = await session.scalar(select(Seal.receipt).where(*wanted))
    receipt = await _receipt(session, settlement)
    if stored != receipt:
        raise SealConflict(settlement.rollout_id, settlement.attempt, str(stored), receipt)


async def _receipt(session: AsyncSession, settlement: Settlement) -> str:
    place = {"rollout_id": settlement.rollout_id, "attempt": settlement.attempt}
    responses = {row.ordinal: tuple(row)[1:] for row in await session.execute(CHAIN, place)}
    if settlement.reported and responses:
        raise _invalid(settlement, f"it reports calls, but {len(responses)} responses of it are recorded in the ledger")
    segment = -1
    unselected = set(responses) | set(range(len(settlement.reported)))
    for selected in settlement.selected:
        if selected.ordinal not in unselected:
            raise _invalid(settlement, f"call {selected.ordinal} is no response of it, or is selected twice")
        unselected.remove(selected.ordinal)
        if selected.segment not in (segment, segment + 1):
            raise _invalid(settlement, f"segment {selected.segment} follows segment {segment}")
        segment = selected.segment
    chain = [responses[selected.ordinal] for selected in settlement.selected if not settlement.reported]
    stands_for = {"settlement": settlement.model_dump(mode="json"), "chain": chain}
    return hashlib.sha256(json.dumps(stands_for, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _invalid(settlement: Settlement, cause: str) -> SelectionInvalid:
    return SelectionInvalid(settlement.rollout_id, settlement.attempt, cause)
