"""Child workflows after a reset of their parent: what the parent left running ends first, then they start again.

What a child settled is in the ledger, so it loses nothing but the attempts that were in flight.
"""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import FailureError, WorkflowAlreadyStartedError, is_cancelled_exception

_Handle = TypeVar("_Handle")

_LONGEST_WAIT_S = 30
_MAX_WAITS = 200


async def started(workflow_id: str, start: Callable[[], Awaitable[_Handle]]) -> _Handle:
    """The handle of a child that `start` starts. Raises WorkflowAlreadyStartedError when the other one never ends."""
    for wait in range(_MAX_WAITS):
        try:
            return await start()
        except WorkflowAlreadyStartedError:
            await _cancel(workflow_id)
        await workflow.sleep(timedelta(seconds=min(2**wait, _LONGEST_WAIT_S)))
    return await start()


async def _cancel(workflow_id: str) -> None:
    """It may have ended by now."""
    try:
        await workflow.get_external_workflow_handle(workflow_id).cancel()
    except FailureError as error:
        if is_cancelled_exception(error):
            raise
