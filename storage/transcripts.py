"""What an attempt did, call by call: every event of the ledger, and what became of it. Reads, and changes nothing."""

from typing import Literal

from pydantic import JsonValue, TypeAdapter
from sqlalchemy import select

from storage.database import Database
from storage.errors import UnknownAttempt, UnknownRollout
from storage.groups import Groups
from storage.model_calls import ModelCalls
from storage.models.model_calls import SelectedResponse as SelectedRow
from storage.models.rollouts import Rollout
from storage.records import (
    AttemptCall,
    AttemptRecord,
    CallOutcome,
    CallPosition,
    LeaseRecord,
    Record,
    RolloutRecord,
    SelectedResponse,
)

# A call without an outcome: `in_flight` while its attempt runs, `abandoned` once the attempt has ended.
TurnOutcome = CallOutcome | Literal["in_flight", "abandoned"]
_BODY = TypeAdapter(dict[str, JsonValue])


class TranscriptTurn(Record):
    """One call. `new_token_ids`: what its prompt adds to the tokens before it; the whole prompt where a segment starts.

    `segment` and `boundary` (why the segment starts) are those of a selected response.
    """

    ordinal: int
    outcome: TurnOutcome
    selected: bool
    segment: int | None
    boundary: str | None
    replayed_from: int | None
    prompt_tokens: int
    generated_tokens: int
    new_token_ids: tuple[int, ...]
    sampled_token_ids: tuple[int, ...]
    versions: tuple[str, ...]
    finish_reason: str | None
    response_id: str | None
    failure: str | None
    message: JsonValue
    seconds: float | None


class Transcript(Record):
    """One attempt at a rollout, and its turns by ordinal."""

    rollout: RolloutRecord
    attempt: AttemptRecord
    turns: tuple[TranscriptTurn, ...]


class Transcripts:
    """Read attempts."""

    def __init__(self, database: Database, groups: Groups, calls: ModelCalls) -> None:
        self._database = database
        self._groups = groups
        self._calls = calls

    async def of(self, rollout_id: str, attempt: int | None = None) -> Transcript:
        """The transcript of an attempt; without a number, of the one that settled the rollout, else of the last one.

        Raises:
            UnknownRollout, UnknownAttempt: there is none, or not yet.
            EvidenceCorrupt: the stored tokens are not what their digests say.
        """
        rollout = await self._rollout(rollout_id)
        number = attempt
        if number is None:
            number = rollout.current_attempt if rollout.settled_attempt is None else rollout.settled_attempt
        record = next((one for one in rollout.attempts if one.attempt == number), None)
        if record is None or number is None:
            raise UnknownAttempt(rollout_id, number or 0)
        calls = await self._calls.of_attempt(rollout_id, number)
        leases = await self._calls.leases(rollout_id, number)
        selected = await self._selected(rollout_id, number)
        lengths = {call.position: call.prompt_tokens + call.generated_tokens for call in calls if call.position}
        turns = [_answered(call, selected.get(call.ordinal), lengths) for call in calls]
        told = {call.ordinal for call in calls}
        outcome = "in_flight" if record.state == "running" else "abandoned"
        turns += [
            _unanswered(lease, outcome) for lease in leases if lease.released_at is None and lease.ordinal not in told
        ]
        return Transcript(rollout=rollout, attempt=record, turns=tuple(sorted(turns, key=lambda turn: turn.ordinal)))

    async def _rollout(self, rollout_id: str) -> RolloutRecord:
        async with self._database.transaction() as session:
            group_id = await session.scalar(select(Rollout.group_id).where(Rollout.rollout_id == rollout_id))
        if group_id is None:
            raise UnknownRollout(rollout_id)
        group = await self._groups.get(group_id)
        return next(rollout for rollout in group.rollouts if rollout.rollout_id == rollout_id)

    async def _selected(self, rollout_id: str, attempt: int) -> dict[int, SelectedResponse]:
        this = (SelectedRow.rollout_id == rollout_id, SelectedRow.attempt == attempt)
        async with self._database.transaction() as session:
            rows = await session.execute(
                select(SelectedRow.ordinal, SelectedRow.segment, SelectedRow.boundary).where(*this)
            )
            return {row.ordinal: SelectedResponse.model_validate(row) for row in rows}


def _answered(call: AttemptCall, selected: SelectedResponse | None, lengths: dict[CallPosition, int]) -> TranscriptTurn:
    before = lengths.get(call.parent, 0) if call.parent and call.continuity == "append" else 0
    return TranscriptTurn(
        ordinal=call.ordinal,
        outcome=call.outcome,
        selected=selected is not None,
        segment=selected.segment if selected else None,
        boundary=selected.boundary if selected else None,
        replayed_from=call.replayed_from,
        prompt_tokens=call.prompt_tokens,
        generated_tokens=call.generated_tokens,
        new_token_ids=call.prompt_token_ids[before:],
        sampled_token_ids=call.sampled_token_ids,
        versions=tuple(span.version for span in call.weight_versions),
        finish_reason=call.finish_reason,
        response_id=call.response_id,
        failure=f"{call.failure_class}: {call.cause}" if call.failure_class else None,
        message=_message(call.body),
        seconds=(call.ended_at - call.started_at).total_seconds(),
    )


def _unanswered(lease: LeaseRecord, outcome: Literal["in_flight", "abandoned"]) -> TranscriptTurn:
    return TranscriptTurn(
        ordinal=lease.ordinal,
        outcome=outcome,
        selected=False,
        segment=None,
        boundary=None,
        replayed_from=None,
        prompt_tokens=0,
        generated_tokens=0,
        new_token_ids=(),
        sampled_token_ids=(),
        versions=(),
        finish_reason=None,
        response_id=None,
        failure=None,
        message=None,
        seconds=None,
    )


def _message(body: bytes | None) -> JsonValue:
    """The assistant's message of a recorded chat completion."""
    if body is None:
        return None
    choices = _BODY.validate_json(body).get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first.get("message") if isinstance(first, dict) else None
