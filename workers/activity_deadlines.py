"""An interceptor that ends an activity shortly before its start_to_close, so that a slow one fails with a class.

Every wait inside an activity has a bound of its own; this one is for their sum, and for what cannot be bounded (a file
system, a database behind a dead network). Without it Temporal gives the activity up, and the worker never hears of it.
"""

import asyncio
from datetime import timedelta
from typing import Any

from temporalio import activity
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from activities.errors import DeadlinePassed, failure_error, failure_of
from workflows.messages import Boundary, Failure

_REPORT_S = 5.0
_REPORT_SHARE = 0.1


class ActivityDeadlines(Interceptor):
    """Ends the activities of one worker in time; `boundary` is what they cross."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary: Boundary = boundary

    def intercept_activity(
        self,
        next: ActivityInboundInterceptor,  # noqa: A002 (the SDK's name)
    ) -> ActivityInboundInterceptor:
        """Called by the SDK for every activity."""
        return _Deadline(next, self._boundary)


class _Deadline(ActivityInboundInterceptor):
    def __init__(self, inner: ActivityInboundInterceptor, boundary: Boundary) -> None:
        super().__init__(inner)
        self._boundary: Boundary = boundary

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:  # noqa: A002 (the SDK's name)
        """Run the activity; DeadlinePassed when it is still at work near its start_to_close."""
        info = activity.info()
        limit_s = _limit_s(info.start_to_close_timeout)
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return await super().execute_activity(input)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            passed = DeadlinePassed(f"{info.activity_type} was still at work after {limit_s:g} s")
            raise failure_error(_failure(passed, self._boundary, input)) from error


def _limit_s(timeout: timedelta | None) -> float | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds()
    return seconds - min(_REPORT_S, seconds * _REPORT_SHARE)


def _failure(error: DeadlinePassed, boundary: Boundary, call: ExecuteActivityInput) -> Failure:
    """The failure, with the ids of the request."""
    request = call.args[0] if call.args else None
    failure = failure_of(
        error,
        boundary=boundary,
        run_id=getattr(request, "run_id", "unknown"),
        group_id=getattr(request, "group_id", None),
        rollout_id=getattr(request, "rollout_id", None),
    )
    return failure.model_copy(update={"retries": activity.info().attempt - 1})
