"""The class of an attempt's end is read from its last recorded call, never from the text of an error."""

import pytest

from activities.errors import AgentFailed, AgentRefused, AgentUnavailable, RolloutTimeout
from activities.rollouts.content import Content, content_failure, failed_last_call
from storage.records import AttemptCall
from tests.rollouts.building import failed, measured, recorded

HTTP_500 = AgentFailed("NeMo-Gym /run failed with HTTP 500", 500)
GENERATED = recorded(0)

ENDS: dict[str, tuple[list[AttemptCall], Exception | None, Content | None]] = {
    "prompt too long, empty message": ([GENERATED, failed(1, "ContextOverflow")], None, "context_overflow"),
    "prompt too long, agent raises": ([GENERATED, failed(1, "ContextOverflow")], HTTP_500, "context_overflow"),
    "prompt too long, agent refuses": ([failed(0, "ContextOverflow")], AgentRefused("HTTP 422"), "context_overflow"),
    "reply without tokens": ([failed(0, "NoGeneration")], HTTP_500, "no_generation"),
    "context guard refuses": ([GENERATED, measured(1)], HTTP_500, "guard_refused"),
    "context guard refuses the first prompt": ([measured(0)], HTTP_500, "guard_refused"),
    "agent goes on after a long prompt": ([failed(0, "ContextOverflow"), recorded(1)], HTTP_500, None),
    "early compaction rescues the call": ([measured(0), measured(1), recorded(2)], None, None),
    "deadline after a measurement": ([measured(0)], RolloutTimeout("no answer"), None),
    "killed after a measurement": ([measured(0)], AgentUnavailable("reset"), None),
    "gateway lost the agent after a measurement": ([measured(0)], AgentFailed("bad gateway", 502), None),
    "measured last and answered": ([GENERATED, measured(1)], None, None),
    "agent's own bug": ([GENERATED], HTTP_500, None),
    "verifier's bug without any call": ([], HTTP_500, None),
    "vLLM away": ([GENERATED, failed(1, "GenerationUnavailable", "HTTP 503")], HTTP_500, None),
    "vLLM aborted the call": ([failed(0, "GenerationAborted")], HTTP_500, None),
    "returned prompt is another": ([failed(0, "ContinuityBroken")], HTTP_500, None),
    "weights unknown": ([failed(0, "UnknownWeightVersion")], HTTP_500, None),
    "request refused": ([failed(0, "GenerationRefused")], HTTP_500, None),
}


@pytest.mark.parametrize(("calls", "ended", "expected"), ENDS.values(), ids=list(ENDS))
def test_what_ended_the_attempt(calls: list[AttemptCall], ended: Exception | None, expected: Content | None) -> None:
    assert content_failure(calls, ended, in_flight=False) == expected


def test_text_of_the_error_does_not_decide() -> None:
    text = AgentFailed("This model's maximum context length is 8192 tokens; context guard rejected", 500)
    assert content_failure([GENERATED], text, in_flight=False) is None


def test_call_that_was_measured_and_then_lost_in_flight_is_no_refusal() -> None:
    assert content_failure([measured(0)], HTTP_500, in_flight=True) is None


def test_order_is_that_of_the_ordinals() -> None:
    calls = [failed(1, "ContextOverflow"), GENERATED]
    assert content_failure(calls, None, in_flight=False) == "context_overflow"


@pytest.mark.parametrize(
    "failure_class", ["GenerationUnavailable", "GenerationAborted", "ContinuityBroken", "UnknownWeightVersion"]
)
def test_answer_after_a_call_that_the_infrastructure_failed_is_of_a_cut_episode(failure_class: str) -> None:
    last = failed(1, failure_class)
    assert failed_last_call([GENERATED, last]) is last
    assert failed_last_call([last, recorded(2)]) is None


@pytest.mark.parametrize("failure_class", ["ContextOverflow", "NoGeneration", "GenerationRefused"])
def test_answer_after_another_failed_call_may_be_whole(failure_class: str) -> None:
    assert failed_last_call([GENERATED, failed(1, failure_class)]) is None
    assert failed_last_call([GENERATED]) is None
    assert failed_last_call([]) is None
