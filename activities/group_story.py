"""What a dropped, parked or set aside group has to say, as one line of the log: prompt, attempts, classes, reasons."""

from activities.errors import one_line
from storage.records import AttemptRecord, GroupRecord, RolloutRecord

_MAX_CAUSE_CHARS = 200


def story_of(group: GroupRecord) -> str:
    """The group, its prompt and why it ended so; then each rollout with the attempts that failed, by id."""
    bucket = f" ({group.bucket})" if group.bucket else ""
    reason = one_line(group.reason or "no reason was given")
    rollouts = "; ".join(_rollout(rollout) for rollout in group.rollouts)
    return f"group {group.group_id} of prompt {group.prompt_id} is {group.state}{bucket}: {reason} | {rollouts}"


def _rollout(rollout: RolloutRecord) -> str:
    failed = ", ".join(_attempt(attempt) for attempt in rollout.attempts if attempt.state == "failed")
    return f"rollout-{rollout.index} {rollout.state}" + (f" [{failed}]" if failed else "")


def _attempt(attempt: AttemptRecord) -> str:
    cause = one_line(attempt.cause or "")
    short = cause if len(cause) <= _MAX_CAUSE_CHARS else cause[: _MAX_CAUSE_CHARS - 1] + "…"
    return f"{attempt.rollout_id}/attempt-{attempt.attempt} {attempt.failure_class} ({attempt.boundary}): {short}"
