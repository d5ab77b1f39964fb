"""What an operator's request comes to: done, unchanged or refused, with the text that says so. Pure.

A decision looks only at the present state. Asking for what is so already is `unchanged` and succeeds; a refusal names
the present state and what to do instead, and nothing changes.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar

from pydantic import ValidationError

from workflows.messages import (
    Message,
)
from workflows.requests import (
    Lever,
    LeverPreview,
)

MAX_ACTOR_CHARS = 200
MAX_REASON_CHARS = 2000

LEVER_REFUSED = "LeverRefused"

_Request = TypeVar("_Request", bound=Lever)


class Decision(Message):
    """`state` is what the target is in once the request is applied; where it is refused, what it is in now. `detail` is
    one sentence in the present tense, so that it reads as a preview, too."""

    outcome: Literal["done", "unchanged", "refused"]
    state: str
    detail: str


def done(state: str, detail: str) -> Decision:
    """The request changes something."""
    return Decision(outcome="done", state=state, detail=detail)


def unchanged(state: str, detail: str) -> Decision:
    """It is so already."""
    return Decision(outcome="unchanged", state=state, detail=detail)


def refused(state: str, detail: str) -> Decision:
    """The request would corrupt something, or makes no sense in this state."""
    return Decision(outcome="refused", state=state, detail=detail)


def check_shape(request: Lever) -> None:
    """Who asks and why must be said, and fit the audit. ValueError names the key."""
    for key, text, most in (("actor", request.actor, MAX_ACTOR_CHARS), ("reason", request.reason, MAX_REASON_CHARS)):
        if not text.strip():
            raise ValueError(f"{key} is blank: say {'who asks' if key == 'actor' else 'why; it is kept in the audit'}")
        if len(text) > most:
            raise ValueError(f"{key} has {len(text)} characters; at most {most} are kept")
    for key, value in request.model_dump().items():
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{key} has a NUL character, which the audit cannot keep")


def previewed(request: LeverPreview, verbs: Mapping[str, type[_Request]]) -> _Request:
    """The request that is previewed; it needs neither actor nor reason. ValueError names the verbs or the key."""
    kind = verbs.get(request.verb)
    if kind is None:
        raise ValueError(f"no verb {request.verb!r} here; there are: {', '.join(sorted(verbs))}")
    try:
        return kind.model_validate({"actor": "preview", "reason": "preview", **request.arguments})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ValueError(f"{request.verb}: {wrong}") from None
