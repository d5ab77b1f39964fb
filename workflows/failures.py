"""What a workflow reads out of an activity error: the Failure that the activity attached, or the missed deadline."""

from contextlib import suppress

from pydantic import ValidationError
from temporalio import exceptions
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutType

from workflows.messages import Boundary, Failure

POLICY_MISMATCH = "PolicyMismatch"
# A worker that stops gave the rollout back: nobody's failure, no budget.
HANDED_OVER = "HandedOver"
# The ledger refuses to change a group of a step that has its batch.
STEP_CLOSED = "StepClosed"


def failure_of(
    error: ActivityError, *, boundary: Boundary, run_id: str, group_id: str | None = None, rollout_id: str | None = None
) -> Failure:
    """The Failure behind an activity error. A missed deadline or heartbeat is an infrastructure failure."""
    cause = error.cause
    if isinstance(cause, ApplicationError) and cause.details:
        with suppress(ValidationError):  # an error of another origin, with details of its own
            return Failure.model_validate(cause.details[0])
    if isinstance(cause, exceptions.TimeoutError):
        kind = "" if cause.type is None else TimeoutType(cause.type).name
        name = "".join(part.capitalize() for part in kind.split("_")) + "Timeout"
        text = f"the activity missed its {kind.lower().replace('_', '-')} deadline (worker dead or stuck)"
    else:
        name, text = type(cause or error).__name__, str(cause or error)
    return Failure(
        run_id=run_id,
        group_id=group_id,
        rollout_id=rollout_id,
        boundary=boundary,
        bucket="infra" if isinstance(cause, exceptions.TimeoutError) else "data",
        failure_class=name,
        cause=text,
    )
