"""`onbelay rollout show`: what a person reads of an attempt."""

import io
from datetime import UTC, datetime

from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from storage.records import AttemptRecord, RolloutRecord
from storage.transcripts import Transcript, TranscriptTurn
from workers.cli.rollout import MAX_TEXT_CHARS, print_transcript

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WORDS = ("<user>", "open", "[bold]", "turn", "left")


def turn(ordinal: int, **changes: object) -> TranscriptTurn:
    fields = {
        "ordinal": ordinal,
        "outcome": "generated",
        "selected": True,
        "segment": 0,
        "boundary": None,
        "replayed_from": None,
        "prompt_tokens": 3,
        "generated_tokens": 2,
        "new_token_ids": (0, 1, 2),
        "sampled_token_ids": (3, 4),
        "versions": ("policy-4",),
        "finish_reason": "tool_calls",
        "response_id": "a",
        "failure": None,
        "message": {"content": "turn left"},
        "seconds": 0.5,
    }
    return TranscriptTurn.model_validate(fields | changes)


def transcript(*turns: TranscriptTurn) -> Transcript:
    attempt = AttemptRecord(
        rollout_id="r/step-0/group-0/rollout-0",
        attempt=1,
        state="settled",
        worker="w",
        sample=1,
        fresh_reason="recovery: fresh",
        boundary=None,
        bucket=None,
        failure_class=None,
        cause=None,
        started_at=NOW,
        ended_at=NOW,
    )
    rollout = RolloutRecord(
        rollout_id=attempt.rollout_id,
        group_id="r/step-0/group-0",
        index=0,
        state="valid",
        current_attempt=1,
        settled_attempt=1,
        reward=0.5,
        truncated=False,
        reason=None,
        policy_version_min=4,
        policy_version_max=4,
        evidence_digest="e",
        segments=2,
        settled_at=NOW,
        attempts=(attempt.model_copy(update={"attempt": 0}), attempt),
    )
    return Transcript(rollout=rollout, attempt=attempt, turns=turns)


def printed(shown: Transcript, tokenizer: Tokenizer | None) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_transcript(console, shown, tokenizer)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<user>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


def test_every_turn_says_where_it_came_from_and_where_segments_start() -> None:
    text = printed(
        transcript(
            turn(0, outcome="replayed", replayed_from=0),
            turn(1, segment=1, boundary="history_policy_rewrite"),
            turn(2, outcome="failed", selected=False, segment=None, failure="GenerationUnavailable: HTTP 500"),
        ),
        words(),
    )
    assert "r/step-0/group-0/rollout-0  valid  reward 0.500" in text
    assert "attempt 1 of 2  settled  fresh: recovery: fresh" in text
    assert "#0  replayed from attempt 0  selected  3 prompt + 2 sampled tokens  policy-4  tool_calls" in text
    assert "── segment 1: history_policy_rewrite ──" in text
    assert "#2  failed  not selected" in text
    assert "GenerationUnavailable: HTTP 500" in text


def test_prompts_and_replies_are_read_as_text_and_never_as_markup() -> None:
    text = printed(transcript(turn(0)), words())
    assert "read  <user> open [bold]" in text
    assert "said  turn left" in text


def test_without_a_tokenizer_the_message_is_shown() -> None:
    text = printed(transcript(turn(0)), None)
    assert 'said  {"content": "turn left"}' in text
    assert "read" not in text


def test_a_long_text_is_cut_and_says_how_long_it_is() -> None:
    text = printed(transcript(turn(0, message={"content": "x" * 5000})), None)
    assert "(5015 characters)" in text
    assert "x" * MAX_TEXT_CHARS not in text
