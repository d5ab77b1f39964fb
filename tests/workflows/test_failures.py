"""What a workflow reads out of an activity error."""

import pytest
from temporalio.exceptions import ActivityError, ApplicationError, RetryState, ServerError, TimeoutError, TimeoutType

from workflows.failures import failure_of
from workflows.messages import Failure

FAILURE = Failure(
    run_id="r",
    group_id="r/step-0/group-1",
    rollout_id="r/step-0/group-1/rollout-2",
    attempt=3,
    boundary="environment",
    bucket="data",
    failure_class="IntegrityError",
    cause="tokens contradict themselves",
    retries=2,
)


def activity_error(cause: BaseException | None) -> ActivityError:
    """An activity error as the SDK makes it."""
    error = ActivityError(
        "Activity task failed",
        scheduled_event_id=5,
        started_event_id=6,
        identity="onbelay",
        activity_type="run_rollout",
        activity_id="1",
        retry_state=RetryState.NON_RETRYABLE_FAILURE,
    )
    error.__cause__ = cause
    return error


def read(cause: BaseException | None) -> Failure:
    """The failure of rollout `r`."""
    return failure_of(activity_error(cause), boundary="agent", run_id="r", rollout_id="r/0")


@pytest.mark.parametrize("detail", [FAILURE, FAILURE.model_dump(mode="json")])
def test_the_failure_that_the_activity_attached_is_taken_as_it_is(detail: object) -> None:
    assert read(ApplicationError("failed", detail, type="IntegrityError")) == FAILURE


def test_a_dead_worker_is_an_infrastructure_failure() -> None:
    failure = read(TimeoutError("timed out", type=TimeoutType.HEARTBEAT, last_heartbeat_details=[]))
    assert (failure.bucket, failure.failure_class, failure.boundary) == ("infra", "HeartbeatTimeout", "agent")
    assert failure.rollout_id == "r/0"
    assert "heartbeat" in failure.cause


def test_a_missed_deadline_is_an_infrastructure_failure() -> None:
    failure = read(TimeoutError("timed out", type=TimeoutType.START_TO_CLOSE, last_heartbeat_details=[]))
    assert (failure.bucket, failure.failure_class) == ("infra", "StartToCloseTimeout")
    assert "start-to-close" in failure.cause


@pytest.mark.parametrize(
    "cause",
    [
        ApplicationError("no details"),
        ApplicationError("details of another origin", {"code": 7}, type="SomethingElse"),
        ApplicationError("details of another origin", "text"),
        ServerError("the service refused it", non_retryable=True),
        None,
    ],
)
def test_what_nobody_recognises_is_a_data_failure_with_its_text(cause: BaseException | None) -> None:
    failure = read(cause)
    assert (failure.bucket, failure.retries, failure.run_id) == ("data", 0, "r")
    assert failure.cause
