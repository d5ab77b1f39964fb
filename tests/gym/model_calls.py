"""Single model calls to a policy model, as agents make them: in the path of an attempt, in each dialect."""

from typing import Any

import httpx

from storage.capture_ids import capture_id
from workers.gym.safe.game import TURN_TOOL

TEXT = "You see a safe."
PARAMETERS = TURN_TOOL["parameters"]
CHAT = {
    "messages": [{"role": "user", "content": TEXT}],
    "tools": [{"type": "function", "function": {"name": TURN_TOOL["name"], "parameters": PARAMETERS}}],
}
RESPONSES = {"input": [{"role": "user", "content": TEXT}], "tools": [TURN_TOOL]}
MESSAGES = {
    "model": "policy",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": TEXT}],
    "tools": [{"name": TURN_TOOL["name"], "description": "", "input_schema": PARAMETERS}],
}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "responses": ("/v1/responses", RESPONSES),
    "responses stream": ("/v1/responses", {**RESPONSES, "stream": True}),
    "messages": ("/v1/messages", MESSAGES),
    "messages stream": ("/v1/messages", {**MESSAGES, "stream": True}),
}
TIMEOUT_S = 120.0


async def call(
    model_url: str, rollout_id: str | None, attempt: int = 0, path: str = "/v1/chat/completions", body: Any = CHAT
) -> httpx.Response:
    """One call of an attempt; of nobody without a rollout."""
    prefix = f"/ng-rollout/{capture_id(rollout_id, attempt)}/training-token-capture" if rollout_id else ""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        return await client.post(f"{model_url}{prefix}{path}", json=body)
