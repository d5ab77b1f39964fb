"""State of the rollouts in progress of an environment server, by the session that NeMo-Gym puts into a cookie.

A session that is not here (its server was restarted, or it is far too old) is an error of the infrastructure: the
request fails, so the attempt is tried again, and no reward is made up for it.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

from collections import OrderedDict
from typing import Generic, TypeVar

from fastapi import Request
from nemo_gym.server_utils import SESSION_ID_KEY

State = TypeVar("State")
MAX_SESSIONS = 10_000  # clients that went away leave theirs behind; the oldest go first


class SessionLost(Exception):
    """Becomes a 500 answer."""


class Sessions(Generic[State]):
    """At most MAX_SESSIONS states."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, State] = OrderedDict()

    def open(self, request: Request, state: State) -> None:
        """Keep the state of a session, in place of an older one."""
        self._states.pop(request.session[SESSION_ID_KEY], None)
        self._states[request.session[SESSION_ID_KEY]] = state
        if len(self._states) > MAX_SESSIONS:
            self._states.popitem(last=False)

    def get(self, request: Request) -> State:
        """The state of the session of this request."""
        session = request.session[SESSION_ID_KEY]
        if session not in self._states:
            raise SessionLost(
                f"session_lost: this environment server does not know session {session}; it was restarted, "
                "or the session was closed. Run the rollout again from its start."
            )
        return self._states[session]

    def close(self, request: Request) -> State:
        """The state of the session of this request, which is forgotten."""
        state = self.get(request)
        del self._states[request.session[SESSION_ID_KEY]]
        return state
