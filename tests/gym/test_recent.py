"""The shortcut to tokens of recorded responses: bounded, and forgetting is never wrong, only slower."""

from datetime import UTC, datetime

from storage.records import CallPosition, RecordedResponse, WeightSpan
from workers.gym.capture.recent import RecentResponses
from workers.gym.capture.served import Served

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def served(ordinal: int, tokens: int = 10) -> Served:
    response = RecordedResponse(
        parent=None,
        continuity="root",
        continuity_reason=None,
        prompt_token_ids=tuple(range(tokens - 1)),
        sampled_token_ids=(7,),
        log_probs=(-0.5,),
        finish_reason="stop",
        response_id=f"response-{ordinal}",
        body=b"{}",
        weight_versions=(WeightSpan(version="policy-0", start=0, end=1),),
        conversation=None,
        started_at=NOW,
        position=CallPosition(attempt=0, ordinal=ordinal),
        sample=0,
        fingerprint="f",
        occurrence=ordinal,
        digest="d",
        chain_digest="c",
        cumulative_digest="t",
        ended_at=NOW,
    )
    return Served("rollout", response)


def kept(recent: RecentResponses) -> list[int]:
    return [ordinal for ordinal in range(10) if recent.get("rollout", 0, ordinal) is not None]


def test_what_was_not_used_for_longest_goes_first() -> None:
    recent = RecentResponses(max_tokens=30)
    for ordinal in range(3):
        recent.add(served(ordinal))
    recent.get("rollout", 0, 0)
    recent.add(served(3))
    assert kept(recent) == [0, 2, 3]


def test_the_same_response_counts_once() -> None:
    recent = RecentResponses(max_tokens=30)
    for ordinal in (0, 1, 0, 0, 2, 0):
        recent.add(served(ordinal))
    assert kept(recent) == [0, 1, 2]


def test_a_response_that_is_too_large_is_not_kept() -> None:
    recent = RecentResponses(max_tokens=30)
    recent.add(served(0))
    recent.add(served(1, tokens=31))
    assert kept(recent) == []
