"""How a step gets a group of a later one: it asks with a signal, and the later step answers with one.

Each question has one answer; a later step that does not run is a no.
"""

from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows.messages import GroupResult, LendGroup, Lent, Message
    from workflows.tasks import raise_if_cancelled


class Lending:
    """The questions of one step. `answer_within` bounds the wait for a step that runs and is silent."""

    def __init__(self, run_id: str, answer_within: timedelta) -> None:
        self._run_id = run_id
        self._answer_within = answer_within
        self._answers: dict[tuple[int, str], Lent] = {}

    async def ask(self, later_step: int, question: LendGroup) -> GroupResult | None:
        """A group of a later step that is promoted into this one already, or None."""
        key = (later_step, question.lost)
        self._answers.pop(key, None)
        if not await tell(f"{self._run_id}/step-{later_step}", "lend", question):
            return None
        raise_if_cancelled()
        try:
            await workflow.wait_condition(lambda: key in self._answers, timeout=self._answer_within)
        except TimeoutError:
            raise ApplicationError(
                f"step {later_step} did not say within {self._answer_within} whether it gives a group for "
                f"{question.lost}",
                type="LenderSilent",
                non_retryable=True,
            ) from None
        raise_if_cancelled()
        return self._answers.pop(key).group

    def answered(self, answer: Lent) -> None:
        """A later step answered."""
        self._answers[answer.lender, answer.lost] = answer


async def tell(workflow_id: str, signal: str, message: Message) -> bool:
    """Send a signal to another step; False when it does not run."""
    try:
        await workflow.get_external_workflow_handle(workflow_id).signal(signal, message)
    except FailureError as error:
        if is_cancelled_exception(error):
            raise
        return False
    return True
