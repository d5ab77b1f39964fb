"""What a `/run` answer says is consistent, or a named error."""

import copy
import math
from typing import Any

import pytest

from activities.errors import MAX_CAUSE_CHARS, EnvironmentFailed, IntegrityError
from activities.rollouts import answer as answers
from activities.rollouts.answer import Answer
from activities.rollouts.answer_evidence import content_failure, evidence
from activities.rollouts.segments import cut
from storage.capture_ids import capture_id
from tests.rollouts.building import answer, item, real_answer, request

GYM_ID = capture_id(request().rollout_id)


def parse(made: dict[str, Any]) -> Answer:
    return answers.parse(made, GYM_ID)


def test_real_answer_of_the_compaction_agent() -> None:
    evidence = parse(real_answer("compaction"))
    assert [call.declared and call.declared.segment for call in evidence.calls] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert evidence.reward == pytest.approx(2 / 3)
    assert (evidence.truncated, evidence.masked) == (False, None)
    assert evidence.calls[0].response_id == "request-4c60e6ddd8b07d8b48ace52f"
    segments, places = cut(evidence.calls)
    assert (len(segments), places) == (3, [0, 0, 0, 0, 1, 1, 1, 1, 2])
    assert sum(sum(segment.loss_mask) for segment in segments) == 143  # usage.output_tokens of the answer


def test_real_answer_of_the_simple_agent_is_one_segment_without_declarations() -> None:
    evidence = parse(real_answer("simple"))
    assert {call.declared for call in evidence.calls} == {None}
    assert evidence.reward == pytest.approx(1 / 3)
    segments, _ = cut(evidence.calls)
    assert len(segments) == 1
    assert sum(segments[0].loss_mask) == 143


def test_real_context_overflow_masks_the_rollout() -> None:
    overflowed = parse(real_answer("context_overflow"))
    assert (overflowed.calls, overflowed.truncated, content_failure(overflowed)) == ((), True, "context_overflow")
    assert evidence(overflowed, 0, truncate=False).reason == "context_overflow"


def test_context_overflow_in_a_later_turn_masks_and_keeps_the_calls_before_it() -> None:
    later = real_answer("simple")
    overflow = real_answer("context_overflow")["response"]
    later["response"]["output"] += overflow["output"]
    later["response"]["status"] = overflow["status"]
    overflowed = parse(later)
    assert (len(overflowed.calls), content_failure(overflowed)) == (9, "context_overflow")


def test_real_reply_that_was_cut_off_while_thinking_is_truncated_and_trains() -> None:
    cut_off = parse(real_answer("reply_cut_off"))
    assert (len(cut_off.calls), cut_off.truncated, content_failure(cut_off)) == (1, True, None)
    assert cut_off.calls[0].finish_reason == "max_output_tokens"


def test_empty_generation_is_skipped_and_breaks_nothing() -> None:
    evidence = parse(answer(item([1, 2], [3]), item([1, 2, 3], []), item([1, 2, 3, 4], [5])))
    assert [call.sampled_tokens for call in evidence.calls] == [[3], [5]]
    assert len(cut(evidence.calls)[0]) == 1


def test_finish_reason_and_id_fall_back_to_the_output_item() -> None:
    evidence = parse(answer(item([1, 2], [3])))
    assert (evidence.calls[0].response_id, evidence.calls[0].finish_reason) == ("item-2", None)


@pytest.mark.parametrize(
    "flag", [{"mask_sample": True}, {"instance_config": {"mask_sample": True}}], ids=["answer", "instance_config"]
)
def test_environment_that_masks_says_why(flag: dict[str, Any]) -> None:
    made = answer(item([1], [2]), reward=0.0, failure_reason="sandbox did not start", **flag)
    assert parse(made).masked == "sandbox did not start"


def test_environment_that_masks_without_a_reason_gets_a_named_one() -> None:
    assert parse(answer(item([1], [2]), mask_sample=True)).masked == "environment_masked"


def test_masked_rollout_needs_no_generation_data() -> None:
    assert parse(answer(mask_sample=True)).calls == ()


def test_masked_rollout_needs_no_reward_and_none_is_made_up() -> None:
    masked = parse(answer(item([1], [2]), mask_sample=True, reward=None))
    assert (masked.reward, evidence(masked, 0, truncate=False).reward) == (None, None)


def test_failure_that_the_answer_tells_of_is_raised_before_its_tokens_are_read() -> None:
    with pytest.raises(EnvironmentFailed, match="judge is away"):
        parse({"reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "judge is away"})


def test_failure_in_spite_of_which_the_answer_counts_is_kept() -> None:
    made = parse(answer(item([1], [2]), failure_kind="transport_timeout", failure_reason="a retry helped"))
    assert (made.reward, made.masked, made.remark) == (1.0, None, "transport_timeout: a retry helped")


def test_foreign_reasons_become_bounded_lines_that_the_ledger_takes() -> None:
    reason = parse(answer(mask_sample=True, failure_reason="a\0b\n" + "x" * 10_000)).masked
    assert reason is not None
    assert reason.startswith("a�b xxx")
    assert len(reason) == MAX_CAUSE_CHARS


@pytest.mark.parametrize("reward", [None, "1.0", True, math.nan, math.inf, 10**400, [1.0]])
def test_reward_must_be_a_finite_number(reward: Any) -> None:
    with pytest.raises(IntegrityError, match="reward"):
        parse(answer(item([1], [2]), reward=reward))


def test_missing_reward_is_never_taken_for_zero() -> None:
    without = answer(item([1], [2]))
    del without["reward"]
    with pytest.raises(IntegrityError, match="reward is None"):
        parse(without)


@pytest.mark.parametrize("response", [None, {}, {"output": None}, {"output": {}}, "text"])
def test_answer_without_an_output_list_is_refused(response: Any) -> None:
    with pytest.raises(IntegrityError, match=r"no response\.output list"):
        parse({"reward": 1.0, "response": response})


@pytest.mark.parametrize("items", [[], [{"type": "message", "content": []}], ["text"], [item([1], [])]])
def test_result_without_generation_data_is_refused(items: list[Any]) -> None:
    with pytest.raises(IntegrityError, match="no generation data"):
        evidence(parse(answer(*items)), 0, truncate=False)


BROKEN = {
    "prompt is empty": ({"prompt_token_ids": []}, "lacks prompt_token_ids"),
    "prompt is missing": ({"prompt_token_ids": None}, "lacks prompt_token_ids"),
    "log-probabilities are missing": ({"generation_log_probs": None}, "lacks prompt_token_ids or generation_log_probs"),
    "log-probabilities are fewer": ({"generation_log_probs": [-1.0]}, "2 tokens but 1 log-probabilities"),
    "a log-probability is NaN": ({"generation_log_probs": [-1.0, math.nan]}, "not a finite number"),
    "a log-probability is infinite": ({"generation_log_probs": [-math.inf, -1.0]}, "not a finite number"),
    "a log-probability is text": ({"generation_log_probs": ["-1.0", -1.0]}, "not a finite number"),
    "a token is text": ({"generation_token_ids": ["3", 4]}, "a token id is not an integer"),
    "a token is a fraction": ({"generation_token_ids": [3.5, 4]}, "a token id is not an integer"),
    "a token is negative": ({"prompt_token_ids": [1, -2]}, "a token id is not an integer"),
    "a token is too large": ({"prompt_token_ids": [2**31]}, "a token id is not an integer"),
    "tokens are no list": ({"generation_token_ids": "34"}, "lacks"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=list(BROKEN))
def test_tokens_that_contradict_themselves_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        parse(answer(item([1, 2], [3, 4]) | change))


def test_parsing_leaves_the_answer_as_it_was() -> None:
    made = real_answer("compaction")
    before = copy.deepcopy(made)
    parse(made)
    assert made == before
