"""The calls of one attempt in their order, as evidence and transcripts need them."""

from collections.abc import Mapping
from typing import Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncSession

from storage.errors import EvidenceCorrupt
from storage.records import AttemptCall, CallPosition, RecordedResponse

EVENTS: Final = text("""
SELECT rollout_id, attempt, ordinal, outcome, fingerprint, occurrence, prompt_tokens, generated_tokens, finish_reason,
    response_id, replayed_from, replayed_ordinal, failure_class, cause, started_at, ended_at
FROM model_calls WHERE rollout_id = :rollout_id AND attempt = :attempt ORDER BY ordinal
""")

OF_THE_EVENT: Final = (
    "ordinal",
    "outcome",
    "fingerprint",
    "occurrence",
    "replayed_from",
    "prompt_tokens",
    "generated_tokens",
    "failure_class",
    "cause",
    "started_at",
    "ended_at",
)
OF_THE_RESPONSE: Final = (
    "position",
    "parent",
    "continuity",
    "continuity_reason",
    "prompt_token_ids",
    "sampled_token_ids",
    "log_probs",
    "finish_reason",
    "response_id",
    "weight_versions",
    "body",
    "digest",
    "chain_digest",
    "cumulative_digest",
)


async def read_events(session: AsyncSession, rollout_id: str, attempt: int) -> list[RowMapping]:
    """The rows of an attempt by ordinal, without payloads."""
    place = {"rollout_id": rollout_id, "attempt": attempt}
    return list((await session.execute(EVENTS, place)).mappings())


def call_of(event: RowMapping, responses: Mapping[CallPosition, RecordedResponse]) -> AttemptCall:
    """One call, with what it was answered with."""
    happened = {name: event[name] for name in OF_THE_EVENT}
    if event["outcome"] not in ("generated", "replayed"):
        return AttemptCall(
            **happened,
            position=None,
            parent=None,
            continuity=None,
            continuity_reason=None,
            prompt_token_ids=(),
            sampled_token_ids=(),
            log_probs=(),
            finish_reason=event["finish_reason"],
            response_id=event["response_id"],
            weight_versions=(),
            body=None,
            digest=None,
            chain_digest=None,
            cumulative_digest=None,
        )
    replayed = event["outcome"] == "replayed"
    position = CallPosition(
        attempt=event["replayed_from"] if replayed else event["attempt"],
        ordinal=event["replayed_ordinal"] if replayed else event["ordinal"],
    )
    response = responses.get(position)
    if response is None:
        raise EvidenceCorrupt(
            event["rollout_id"], event["attempt"], event["ordinal"], "the response that it points to is gone"
        )
    return AttemptCall(**happened, **{name: getattr(response, name) for name in OF_THE_RESPONSE})
