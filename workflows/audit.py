"""Operators' requests in a workflow: decided, applied and recorded, in this order and without a gap.

Nothing is awaited between the decision and its application, so that of two operators the second sees the state after
the first. Every request is recorded, a refused one, too; what follows from one waits for `all_recorded`.
"""

from collections.abc import Callable

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from workflows.calls import Calls
    from workflows.levers import LEVER_REFUSED, Decision
    from workflows.messages import (
        RecordAction,
    )
    from workflows.requests import (
        Lever,
        LeverDone,
    )


class Audit:
    """The requests of one workflow."""

    def __init__(self, calls: Calls, run_id: str) -> None:
        self._calls = calls
        self._run_id = run_id
        self._open = 0

    async def acted(
        self,
        verb: str,
        request: Lever,
        decision: Decision,
        apply: Callable[[], None] | None = None,
        *,
        target: str | None = None,
    ) -> LeverDone:
        """Apply a decision that was just made (only a `done` one), record it, and answer.

        The target is the workflow, unless one is named. Raises ApplicationError `LeverRefused` when it is refused.
        """
        if decision.outcome == "done" and apply is not None:
            apply()
        workflow_id, update = workflow.info().workflow_id, workflow.current_update_info()
        if update is None:
            raise RuntimeError("only an update can be recorded")
        chosen = target or workflow_id
        self._open += 1
        try:
            await self._calls.record_action(
                RecordAction(
                    action_id=f"{workflow_id}#{update.id}",
                    run_id=self._run_id,
                    target=chosen,
                    verb=verb,
                    actor=request.actor.strip(),
                    reason=request.reason.strip(),
                    arguments=request.model_dump(mode="json", exclude={"actor", "reason"}),
                    outcome=decision.outcome,
                    detail=decision.detail,
                )
            )
        finally:
            self._open -= 1
        if decision.outcome == "refused":
            raise refusal(decision)
        changed = decision.outcome == "done"
        return LeverDone(target=chosen, verb=verb, changed=changed, state=decision.state, detail=decision.detail)

    async def all_recorded(self) -> None:
        """Wait until every request so far is in the audit; what a request asked for follows after that."""
        await workflow.wait_condition(lambda: self._open == 0)


def preview(decision: Decision) -> str:
    """What a request would do, or the error that it would end with."""
    if decision.outcome == "refused":
        raise refusal(decision)
    return decision.detail


def refusal(decision: Decision) -> ApplicationError:
    """The error of a refused request."""
    return ApplicationError(decision.detail, type=LEVER_REFUSED, non_retryable=True)
