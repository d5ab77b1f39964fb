"""Whose call is this? Every model call names its rollout and attempt in its path; one that does not is refused.

An unrecorded call would be lost evidence, so nothing runs without an identity.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import re
from typing import Any

from fastapi import HTTPException, status
from nemo_gym.config_types import ROLLOUT_PATH_PREFIX
from nemo_gym.rollout_correlation import current_rollout_id, rollout_context

from storage.capture_ids import parse_capture_id
from workers.gym.policy_model.caller import Caller

_PREFIX = re.compile(rf"^/{re.escape(ROLLOUT_PATH_PREFIX)}/(?P<capture_id>[^/]+)/")


def calling_attempt() -> Caller:
    """The attempt of the request that is being served."""
    capture_id = current_rollout_id()
    if capture_id is None:
        raise HTTPException(
            status.HTTP_400_BAD_REQUEST,
            "rollout_unknown: this call names no rollout, so it cannot be recorded and is not run. Send the /run "
            "request with `_ng_rollout_id` and `_ng_attempt_index`, and let the agent use the model server's address "
            f"with its /{ROLLOUT_PATH_PREFIX}/ prefix.",
        )
    try:
        return Caller(*parse_capture_id(capture_id))
    except ValueError as error:
        raise HTTPException(status.HTTP_400_BAD_REQUEST, f"rollout_unknown: {error}") from error


class IdentityMiddleware:
    """Keeps the rollout of the path for every route. NeMo-Gym does so for generating routes only, not for /tokenize."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        found = _PREFIX.match(scope["path"]) if scope["type"] == "http" else None
        with rollout_context(found["capture_id"] if found else None):
            await self._app(scope, receive, send)
