"""What the exact-token route needs of a client of one vLLM server: JSON to a path and back, failures typed."""

from typing import Any, Protocol

RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"
DERENDER = "/v1/chat/completions/derender"
TOKENIZE = "/tokenize"


class Endpoint(Protocol):
    """One vLLM server. Paths start at its root. Whatever is not a 200 raises a `ModelCallFailed`."""

    async def get(self, path: str) -> dict[str, Any]: ...

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...
