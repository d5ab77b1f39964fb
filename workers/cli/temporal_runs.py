"""What Temporal knows of a workflow: whether it is there at all, and whether it is open."""

from typing import Literal

from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from workers.cli.session import Session

Known = Literal["open", "closed", "unknown"]


async def known(session: Session, workflow_id: str) -> Known:
    """How the newest execution of a workflow id stands."""
    try:
        description = await session.client.get_workflow_handle(workflow_id).describe()
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return "unknown"
        raise
    return "open" if description.status == WorkflowExecutionStatus.RUNNING else "closed"


async def is_open(session: Session, workflow_id: str) -> bool:
    """Whether a workflow is open in Temporal."""
    return await known(session, workflow_id) == "open"
