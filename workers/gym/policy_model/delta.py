"""What a chat template puts after a sampled turn: rendered from a stub, so that old turns are never tokenised again.

The stub is one user turn, the newest assistant turn with its text left out, and the messages after it. The tokens
behind the stub's end-of-turn token are the delta. `Template.check` proves for a served template that they do not depend
on what was left out.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from workers.gym.policy_model.endpoint import RENDER, TOKENIZE, Endpoint
from workers.gym.policy_model.errors import ContinuityBroken

_HEAD_FIELDS = ("model", "tools", "chat_template_kwargs", "reasoning_effort", "documents", "chat_template")
_REMEMBERED_HEADS = 256

Body = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """`token_ids` follow the end-of-turn token; `request` is vLLM's generate request for the stub."""

    token_ids: list[int]
    request: Body


class Deltas:
    """Renders deltas on one server. `heads` remembers, for all users of a template, how many turns a head ends."""

    def __init__(self, endpoint: Endpoint, end_of_turn: int, heads: dict[str, int]) -> None:
        self._endpoint = endpoint
        self._end_of_turn = end_of_turn
        self._heads = heads

    async def render(self, body: Body, last: int) -> Rendered:
        """The delta of a request whose newest assistant turn is `messages[last]`."""
        stub, turns = await self._stub(body, last)
        request = await self._endpoint.post(RENDER, stub)
        return Rendered(self._behind(request["token_ids"], turns), request)

    async def tokens(self, body: Body, last: int) -> list[int]:
        """The delta alone, however long it is: of a request with the fields of /tokenize."""
        stub, turns = await self._stub(body, last)
        return self._behind((await self._endpoint.post(TOKENIZE, stub))["tokens"], turns)

    async def _stub(self, body: Body, last: int) -> tuple[Body, int]:
        """The stub's request, and how many turns its head ends."""
        head = [{"role": "user", "content": "x"}, _blank(body["messages"][last])]
        return body | {"messages": [*head, *body["messages"][last + 1 :]]}, await self._turns_of(body, head)

    async def _turns_of(self, body: Body, head: list[Body]) -> int:
        fields = {field: body[field] for field in _HEAD_FIELDS if field in body}
        names = [call["function"]["name"] for call in head[1].get("tool_calls", ())]
        key = hashlib.sha256(json.dumps([fields, names], sort_keys=True).encode()).hexdigest()
        if key not in self._heads:
            request = fields | {"messages": head, "add_generation_prompt": False}
            rendered = await self._endpoint.post(RENDER, request)
            if len(self._heads) >= _REMEMBERED_HEADS:
                del self._heads[next(iter(self._heads))]
            self._heads[key] = rendered["token_ids"].count(self._end_of_turn)
        return self._heads[key]

    def _behind(self, token_ids: list[int], turns: int) -> list[int]:
        at = -1
        try:
            for _ in range(turns):
                at = token_ids.index(self._end_of_turn, at + 1)
        except ValueError:
            raise ContinuityBroken(
                f"The chat template ends {turns} turns of a conversation with token {self._end_of_turn}, but not once "
                "more messages follow: what it puts after the sampled turn cannot be told."
            ) from None
        return token_ids[at + 1 :]


def _blank(message: Body) -> Body:
    """The turn without what was sampled. Ids and names stay: templates repeat them in the tools' answers."""
    calls = message.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": "x"}
    blank = [call | {"function": call["function"] | {"arguments": "{}"}} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": blank}
