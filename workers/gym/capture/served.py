"""The recorded response that the request in progress is answered with: how the sink knows that a call is in the ledger.

Set by the model server's client in the task that serves the request, and read by NeMo-Gym's capture in the same task.
"""

from contextvars import ContextVar
from typing import NamedTuple

from storage.records import RecordedResponse


class Served(NamedTuple):
    """A response of the ledger, on its way to the agent."""

    rollout_id: str
    response: RecordedResponse


_SERVED: ContextVar[Served | None] = ContextVar("onbelay_served_response", default=None)


def now_serving(rollout_id: str, response: RecordedResponse) -> None:
    """This request is answered with a recorded response."""
    _SERVED.set(Served(rollout_id, response))


def serving() -> Served | None:
    """The response of this request; None where it did not come from the ledger."""
    return _SERVED.get()
