"""From evidence to a settlement: the counts that are stored are those of the rows."""

import pytest

from activities.errors import IntegrityError
from activities.rollouts.answer import parse
from activities.rollouts.answer_evidence import evidence
from activities.rollouts.evidence import Evidence
from activities.rollouts.outcome import judge
from activities.training.batch import TrainingBatch
from storage.capture_ids import capture_id
from storage.records import Settlement
from tests.rollouts.building import answer, call, item, real_answer, request

GYM_ID = capture_id(request().rollout_id)


def judged(
    made: dict[str, object], attempt: int = 0, max_row_tokens: int = 32_768, overlong_filtering: bool = False
) -> tuple[Settlement, TrainingBatch | None]:
    """The outcome of an answer whose tokens policy-3 sampled."""
    ended = evidence(parse(made, GYM_ID), 3, truncate=False)
    return judge(request(), attempt, ended, max_row_tokens=max_row_tokens, overlong_filtering=overlong_filtering)


def test_valid_rollout_gets_one_row_for_each_segment() -> None:
    settlement, rows = judged(real_answer("compaction"), attempt=4)
    assert rows is not None
    assert (settlement.state, settlement.reward, settlement.attempt) == ("valid", pytest.approx(2 / 3), 4)
    assert (settlement.policy_version_min, settlement.policy_version_max) == (3, 3)
    assert settlement.segments == len(rows.rows) == 3
    assert [row.segment for row in rows.rows] == [0, 1, 2]
    assert {row.rollout_id for row in rows.rows} == {request().rollout_id}
    assert [selected.segment for selected in settlement.selected] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert [selected.ordinal for selected in settlement.selected] == list(range(9))
    assert [place for place, selected in enumerate(settlement.selected) if selected.boundary] == [4, 8]
    generated = sum(reported.generated_tokens for reported in settlement.reported)
    assert generated == rows.trained_tokens == 143


def test_rows_survive_their_byte_form() -> None:
    _, rows = judged(real_answer("simple"))
    assert rows is not None
    assert TrainingBatch.from_bytes(rows.to_bytes()).to_bytes() == rows.to_bytes()


def test_row_of_exactly_the_limit_trains_and_a_longer_one_masks_its_rollout() -> None:
    made = answer(item([1, 2, 3], [4, 5]))
    assert judged(made, max_row_tokens=5)[0].state == "valid"
    settlement, rows = judged(made, max_row_tokens=4)
    assert rows is None
    assert settlement.state == "masked"
    assert settlement.reason == "row_too_long: 5 tokens, training.max_row_tokens is 4"
    assert len(settlement.selected) == 1


def test_rollout_with_one_bad_segment_is_masked_whole() -> None:
    """One of its three segments is too long for a row: none of them trains."""
    longest = max(len(row.tokens) for row in whole.rows) if (whole := judged(real_answer("compaction"))[1]) else 0
    settlement, rows = judged(real_answer("compaction"), max_row_tokens=longest - 1)
    assert rows is None
    assert (settlement.state, settlement.segments, len(settlement.selected)) == ("masked", 3, 9)


def test_masked_rollout_keeps_its_reward_and_its_calls_but_has_no_rows() -> None:
    settlement, rows = judged(answer(item([1], [2]), reward=0.25, mask_sample=True))
    assert rows is None
    assert (settlement.state, settlement.reason, settlement.reward) == ("masked", "environment_masked", 0.25)
    assert len(settlement.selected) == 1


def test_truncated_rollout_trains_unless_overlong_filtering_masks_it_whole() -> None:
    made = real_answer("reply_cut_off")
    settlement, rows = judged(made)
    assert rows is not None
    assert (settlement.state, settlement.truncated) == ("valid", True)
    settlement, rows = judged(made, overlong_filtering=True)
    assert rows is None
    assert (settlement.state, settlement.truncated) == ("masked", True)
    assert settlement.reason is not None
    assert settlement.reason.startswith("overlong: ")


def test_overlong_filtering_leaves_whole_rollouts_alone() -> None:
    assert judged(real_answer("simple"), overlong_filtering=True)[0].state == "valid"


def test_undeclared_rewrite_is_an_error_and_no_mask() -> None:
    with pytest.raises(IntegrityError):
        judged(answer(item([1], [2]), item([1, 2, 3], [4]), item([7], [8])))


def test_rollout_whose_content_ended_it_is_masked_without_a_reward() -> None:
    ended = Evidence((), (), None, False, "guard_refused", (2, 2))
    settlement, rows = judge(request(), 1, ended, max_row_tokens=9, overlong_filtering=True)
    assert rows is None
    assert (settlement.state, settlement.reason, settlement.reward) == ("masked", "guard_refused", None)
    assert (settlement.segments, settlement.selected, settlement.policy_version_min) == (0, (), 2)


def test_boundary_is_kept_with_the_first_call_of_its_segment() -> None:
    calls = (
        call([1], [2]),
        call([9], [8], new_segment="two calls may be meant", ordinal=3),
        call([9, 8], [7], ordinal=4),
    )
    settlement, _ = judge(
        request(), 0, Evidence(calls, (), 1.0, False, None, (3, 4)), max_row_tokens=9, overlong_filtering=False
    )
    assert [(made.ordinal, made.segment, made.boundary) for made in settlement.selected] == [
        (0, 0, None),
        (3, 1, "two calls may be meant"),
        (4, 1, None),
    ]
    assert (settlement.policy_version_min, settlement.policy_version_max) == (3, 4)
