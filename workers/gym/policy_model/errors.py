"""How a model call fails. The failure class is what the ledger records; the status is what the agent is answered.

1. A failed call has no response: nothing of it may be trained, and the agent never sees half of it.
2. Every class says what happened at the model server, never what somebody should do about it.
3. Content classes (`ContextOverflow`, `NoGeneration`) would fail again on replay; all others are infrastructure.
4. Statuses follow what agents do with them: 400 for a prompt that is too long, in words that NeMo-Gym recognises.
"""

import json
from http import HTTPStatus
from typing import ClassVar

_MAX_QUOTED = 600
_RECOGNISED = "maximum context length"
_TOO_LONG = (_RECOGNISED, "maximum model length", "max_tokens must be at least 1")


class TemplateUnfit(Exception):
    """The served chat template does not let a conversation go on token by token. Found before the first call."""


class ModelCallFailed(Exception):
    """One model call failed. `failure_class` names it in the ledger, `status` is the HTTP status of the answer."""

    failure_class: ClassVar[str]
    status: int = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause

    @property
    def content(self) -> bytes:
        """The body of the answer, in vLLM's form."""
        error = {"message": self.cause, "type": self.failure_class, "code": int(self.status)}
        return json.dumps({"error": error}).encode()


class ContextOverflow(ModelCallFailed):
    """The prompt does not fit the served model's context."""

    failure_class = "ContextOverflow"
    status = HTTPStatus.BAD_REQUEST


class NoGeneration(ModelCallFailed):
    """The server answered without a single sampled token."""

    failure_class = "NoGeneration"


class GenerationAborted(ModelCallFailed):
    """The server gave up in the middle of the answer, for example because generation was paused to load weights."""

    failure_class = "GenerationAborted"
    status = HTTPStatus.SERVICE_UNAVAILABLE


class ContinuityBroken(ModelCallFailed):
    """The tokens that the server reports are not those that it was sent, or do not belong together."""

    failure_class = "ContinuityBroken"


class UnknownWeightVersion(ModelCallFailed):
    """The server does not say which policy version sampled every token."""

    failure_class = "UnknownWeightVersion"


class GenerationRefused(ModelCallFailed):
    """The server, or this one on its behalf, will not run the request as it is."""

    failure_class = "GenerationRefused"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self, cause: str, status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(cause)
        self.status = status


class GenerationUnavailable(ModelCallFailed):
    """The server cannot answer now: connection, 408, 429 or 5xx."""

    failure_class = "GenerationUnavailable"
    status = HTTPStatus.SERVICE_UNAVAILABLE


def failure_of(status: int, content: bytes, path: str) -> ModelCallFailed:
    """What an answer of vLLM that is not 200 means. `path` names the route that answered."""
    text = content.decode(errors="replace")[:_MAX_QUOTED]
    if status == HTTPStatus.BAD_REQUEST and any(words in text for words in _TOO_LONG):
        reworded = text if _RECOGNISED in text else f"it exceeds the {_RECOGNISED}: {text}"
        return ContextOverflow(f"vLLM refused the prompt ({path}): {reworded}")
    if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500:
        return GenerationUnavailable(f"vLLM answered {path} with status {status}: {text}")
    return GenerationRefused(f"vLLM refused {path} with status {status}: {text}", status)
