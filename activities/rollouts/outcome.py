"""From evidence to the settlement of an attempt: valid with rows, or masked whole with a reason."""

import numpy as np

from activities.rollouts.evidence import Evidence
from activities.rollouts.segments import Segment, cut
from activities.training.batch import TrainingBatch, TrainingRow
from storage.records import SelectedResponse, Settlement
from workflows.messages import RunRollout


def rows_of(rollout: RunRollout, segments: list[Segment]) -> TrainingBatch:
    """The rows of one rollout in the form of a batch; advantages are 0 until its group is scored."""
    return TrainingBatch(
        run_id=rollout.run_id,
        step=rollout.step,
        rows=tuple(
            TrainingRow(
                rollout_id=rollout.rollout_id,
                segment=index,
                tokens=np.asarray(segment.tokens, dtype=np.int32),
                loss_mask=np.asarray(segment.loss_mask, dtype=np.uint8),
                log_probs=np.asarray(segment.log_probs, dtype=np.float32),
                advantage=0.0,
            )
            for index, segment in enumerate(segments)
        ),
    )


def judge(
    rollout: RunRollout, attempt: int, evidence: Evidence, *, max_row_tokens: int, overlong_filtering: bool
) -> tuple[Settlement, TrainingBatch | None]:
    """The settlement of an attempt (without the digest of its rows) and the rows of a valid one.

    Raises:
        IntegrityError: the calls do not form segments.
    """
    segments, places = cut(evidence.calls)
    longest = max((len(segment.tokens) for segment in segments), default=0)
    reason = evidence.reason
    if reason is None and evidence.truncated and overlong_filtering:
        reason = "overlong: the last reply was cut off by a token limit, and grpo.overlong_filtering is on"
    if reason is None and longest > max_row_tokens:
        reason = f"row_too_long: {longest} tokens, training.max_row_tokens is {max_row_tokens}"
    settlement = Settlement(
        rollout_id=rollout.rollout_id,
        attempt=attempt,
        state="valid" if reason is None else "masked",
        reward=evidence.reward,
        truncated=evidence.truncated,
        reason=reason,
        policy_version_min=evidence.policy_versions[0],
        policy_version_max=evidence.policy_versions[1],
        segments=len(segments),
        selected=_selected(evidence, segments, places),
        reported=evidence.reported,
    )
    return settlement, rows_of(rollout, segments) if reason is None else None


def _selected(evidence: Evidence, segments: list[Segment], places: list[int]) -> tuple[SelectedResponse, ...]:
    """Where each call went; the first one of a segment names why that starts."""
    starts = {place: index for index, place in reversed(list(enumerate(places)))}
    return tuple(
        SelectedResponse(
            ordinal=call.ordinal,
            segment=place,
            boundary=segments[place].boundary if starts[place] == index else None,
        )
        for index, (call, place) in enumerate(zip(evidence.calls, places, strict=True))
    )
