"""Recorded responses read back: tokens rebuilt from the deltas of a call and its ancestors, then checked.

Whatever does not equal its digest is `EvidenceCorrupt`, never returned. Blobs are fetched after the transaction.
"""

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import RowMapping, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from storage.blobs import BlobStore
from storage.call_payloads import Payload, chained, tokens_digest, unpack_log_probs, unpack_tokens, unpacked
from storage.errors import BlobCorrupt, BlobMissing, EvidenceCorrupt
from storage.records import CallPosition, ParentCall, RecordedResponse, WeightSpan

Narrowing = Literal["all", "ordinal", "conversation", "cumulative_digest"]
NARROWED: dict[Narrowing, str] = {
    "all": "",
    "ordinal": "AND call.ordinal = :ordinal",
    "conversation": "AND source.conversation = :conversation",
    "cumulative_digest": "AND source.cumulative_digest = :cumulative_digest",
}

# The wanted calls (generated ones, which the attempt made or replayed) and all their ancestors, in one statement.
# Of an ancestor only the tokens are needed.
LINEAGE = """
WITH RECURSIVE wanted AS (
    SELECT DISTINCT source.attempt, source.ordinal, source.parent_attempt, source.parent_ordinal
    FROM model_calls AS call JOIN model_calls AS source
        ON source.rollout_id = call.rollout_id
        AND source.attempt = coalesce(call.replayed_from, call.attempt)
        AND source.ordinal = coalesce(call.replayed_ordinal, call.ordinal)
    WHERE call.rollout_id = :rollout_id AND call.attempt = :attempt AND call.outcome IN ('generated', 'replayed')
        AND source.outcome = 'generated' {narrowed}
), lineage AS (
    SELECT * FROM wanted
    UNION
    SELECT parent.attempt, parent.ordinal, parent.parent_attempt, parent.parent_ordinal
    FROM lineage JOIN model_calls AS parent
        ON parent.rollout_id = :rollout_id AND parent.attempt = lineage.parent_attempt
        AND parent.ordinal = lineage.parent_ordinal
), marked AS (
    SELECT attempt, ordinal, wanted.attempt IS NOT NULL AS wanted
    FROM lineage LEFT JOIN wanted USING (attempt, ordinal)
)
SELECT marked.wanted, model_calls.attempt, model_calls.ordinal, sample, fingerprint, occurrence,
    parent_attempt, parent_ordinal, continuity, continuity_reason, prompt_tokens, prefix_tokens, generated_tokens,
    tokens, blob, CASE WHEN marked.wanted THEN log_probs END AS log_probs,
    CASE WHEN marked.wanted THEN body END AS body, finish_reason, response_id, weight_versions, conversation,
    cumulative_digest, digest, chain_digest, started_at, ended_at
FROM marked JOIN model_calls
    ON rollout_id = :rollout_id AND model_calls.attempt = marked.attempt AND model_calls.ordinal = marked.ordinal
ORDER BY model_calls.attempt, model_calls.ordinal
"""
STATEMENTS = {
    narrowing: text(LINEAGE.format(narrowed=condition)).columns(weight_versions=JSONB)
    for narrowing, condition in NARROWED.items()
}


async def read_lineage(
    session: AsyncSession | AsyncConnection, rollout_id: str, attempt: int, narrowing: Narrowing, **wanted: int | str
) -> "Lineage":
    """The responses that an attempt generated or replayed (all, or those narrowed down to) and what they continue."""
    parameters = {"rollout_id": rollout_id, "attempt": attempt, **wanted}
    rows = (await session.execute(STATEMENTS[narrowing], parameters)).mappings().all()
    return Lineage(rollout_id, rows)


class Lineage:
    """Generated calls of one rollout by position."""

    def __init__(self, rollout_id: str, rows: Sequence[RowMapping]) -> None:
        self._rollout_id = rollout_id
        self._rows = {CallPosition(attempt=row["attempt"], ordinal=row["ordinal"]): row for row in rows}
        self._payloads: dict[CallPosition, Payload] = {}
        self._tokens: dict[CallPosition, bytes] = {}

    @property
    def wanted(self) -> list[CallPosition]:
        """The calls asked for, oldest first."""
        return [position for position, row in self._rows.items() if row["wanted"]]

    async def load(self, blobs: BlobStore) -> None:
        """Fetch the payloads; those in the blob store one after the other."""
        for position, row in self._rows.items():
            if row["blob"] is None:
                self._payloads[position] = Payload(row["tokens"], row["log_probs"] or b"", row["body"] or b"")
                continue
            new_tokens = row["prompt_tokens"] - row["prefix_tokens"] + row["generated_tokens"]
            try:
                packed = await blobs.get(row["blob"])
                self._payloads[position] = unpacked(packed, new_tokens, row["generated_tokens"])
            except (BlobMissing, BlobCorrupt, ValueError) as error:
                raise self._corrupt(position, str(error)) from error

    def parent(self, position: CallPosition) -> ParentCall:
        """The tokens that a call would be continued with."""
        return ParentCall(position=position, token_ids=unpack_tokens(self._verified_tokens(position)))

    def response(self, position: CallPosition) -> RecordedResponse:
        """A wanted call, whole and verified."""
        row, payload = self._rows[position], self._payloads[position]
        if payload.digest() != row["digest"]:
            raise self._corrupt(position, f"its payload does not have the digest {row['digest']}")
        parent = _parent(row)
        before = None if parent is None else self._row(position, parent)["chain_digest"]
        if chained(before, row["digest"]) != row["chain_digest"]:
            raise self._corrupt(position, "its chain digest does not follow from its parent's")
        token_ids = unpack_tokens(self._verified_tokens(position))
        prompt_tokens = row["prompt_tokens"]
        return RecordedResponse(
            position=position,
            parent=parent,
            prompt_token_ids=token_ids[:prompt_tokens],
            sampled_token_ids=token_ids[prompt_tokens:],
            log_probs=unpack_log_probs(payload.log_probs),
            body=payload.body,
            weight_versions=tuple(WeightSpan(**span) for span in row["weight_versions"]),
            **{name: row[name] for name in _AS_STORED},
        )

    def _verified_tokens(self, position: CallPosition) -> bytes:
        tokens = self._all_tokens(position)
        if tokens_digest(tokens) != self._rows[position]["cumulative_digest"]:
            raise self._corrupt(position, "its tokens do not have its cumulative digest")
        return tokens

    def _all_tokens(self, position: CallPosition) -> bytes:
        """Prompt and sampled tokens, packed. Every token was stored once, with the call that was first to have it."""
        branch: list[CallPosition] = []
        current: CallPosition | None = position
        while current is not None and current not in self._tokens:
            branch.append(current)
            row = self._row(position, current)
            current = _parent(row) if row["continuity"] == "append" else None
        for link in reversed(branch):
            row = self._rows[link]
            parent = _parent(row) if row["continuity"] == "append" else None
            prefix = b"" if parent is None else self._tokens[parent]
            self._tokens[link] = prefix + self._payloads[link].tokens
        return self._tokens[position]

    def _row(self, position: CallPosition, ancestor: CallPosition) -> RowMapping:
        row = self._rows.get(ancestor)
        if row is None:
            raise self._corrupt(position, f"call {ancestor.ordinal} of attempt {ancestor.attempt} before it is gone")
        return row

    def _corrupt(self, position: CallPosition, cause: str) -> EvidenceCorrupt:
        return EvidenceCorrupt(self._rollout_id, position.attempt, position.ordinal, cause)


_AS_STORED = (
    "continuity",
    "continuity_reason",
    "finish_reason",
    "response_id",
    "conversation",
    "started_at",
    "ended_at",
    "sample",
    "fingerprint",
    "occurrence",
    "digest",
    "chain_digest",
    "cumulative_digest",
)


def _parent(row: RowMapping) -> CallPosition | None:
    attempt: Any = row["parent_attempt"]
    return None if attempt is None else CallPosition(attempt=attempt, ordinal=row["parent_ordinal"])
