"""What really ended an attempt, read from its recorded model calls and never from the text of an error.

The rollout's own content ends it when its prompt is too long, when a context guard refuses the prompt, or when a reply
has no tokens: a replay would end the same way. Everything else is the infrastructure's and may be tried again.
"""

from collections.abc import Sequence
from typing import Literal

import httpx

from activities.errors import AgentFailed
from storage.records import AttemptCall

Content = Literal["context_overflow", "no_generation", "guard_refused"]

_CONTENT: dict[str | None, Content] = {"ContextOverflow": "context_overflow", "NoGeneration": "no_generation"}
# The model would refuse the same request again, and the agent may have gone on without it on purpose.
_REFUSED = "GenerationRefused"


def content_failure(calls: Sequence[AttemptCall], ended: Exception | None, *, in_flight: bool) -> Content | None:
    """The content failure that ended an attempt. `ended`: the error of `/run`, None where it answered; `in_flight`:
    whether a call of the attempt has neither an outcome nor was it given back.

    A guard's refusal is not recorded: the agent measures a prompt, sends nothing, and answers 500. A gateway's 502, 503
    or 504 is a lost connection.
    """
    last = _last(calls)
    if last is None:
        return None
    if last.outcome == "failed":
        return _CONTENT.get(last.failure_class)
    answered_500 = isinstance(ended, AgentFailed) and ended.status == httpx.codes.INTERNAL_SERVER_ERROR
    return "guard_refused" if last.outcome == "measured" and answered_500 and not in_flight else None


def failed_last_call(calls: Sequence[AttemptCall]) -> AttemptCall | None:
    """The last call, where the infrastructure failed it: an answer after that is of an episode that was cut short."""
    last = _last(calls)
    failed = last is not None and last.outcome == "failed" and last.failure_class not in (*_CONTENT, _REFUSED)
    return last if failed else None


def _last(calls: Sequence[AttemptCall]) -> AttemptCall | None:
    return max(calls, key=lambda call: call.ordinal, default=None)
