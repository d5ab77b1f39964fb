"""Which earlier response a request goes on from: two keys agree exactly when the history agrees.

A response's key covers the request that it answers and the message itself. NeMo-Gym returns the message converted (chat
to Responses and back): thoughts leave their field or vanish, so they are not part of the newest message's identity.
Older messages are compared as requests carry them, so a history that was cut or rewritten is never joined to the old
tokens.
"""

import hashlib
import json
from typing import Any

Body = dict[str, Any]
Message = dict[str, Any]

_END_OF_THOUGHT = "</think>"
# What the server renders besides the messages: other values make another prompt of the same conversation.
_PROMPT_FIELDS = (
    "model",
    "tools",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
    "chat_template",
    "mm_processor_kwargs",
)


def own_key(body: Body, message: Message) -> str:
    """The key under which a response is found: the request that it answers, and its message as it was recorded."""
    return _key(body, body["messages"], message)


def parent_key(body: Body) -> str | None:
    """The key of the response that this request continues.

    None for a root: no assistant turn yet, or one at the end, which the request wants to be written on.
    """
    last = last_assistant(body)
    if last is None or last == len(body["messages"]) - 1:
        return None
    return _key(body, body["messages"][:last], body["messages"][last])


def last_assistant(body: Body) -> int | None:
    """Where the newest assistant turn stands among the messages."""
    messages = body["messages"]
    return next((at for at in range(len(messages) - 1, -1, -1) if messages[at]["role"] == "assistant"), None)


def _key(body: Body, history: list[Message], message: Message) -> str:
    context = {field: body[field] for field in _PROMPT_FIELDS if body.get(field) is not None}
    identity = [context, [_normalised(earlier) for earlier in history], _without_thought(message)]
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _without_thought(message: Message) -> list[Any]:
    return [_text(message.get("content")).split(_END_OF_THOUGHT)[-1].strip(), _calls(message)]


def _normalised(message: Message) -> list[Any]:
    thought = message.get("reasoning") or message.get("reasoning_content") or ""
    return [message["role"], thought, _text(message.get("content")), _calls(message), message.get("tool_call_id")]


def _calls(message: Message) -> list[list[Any]]:
    return [
        [call.get("id"), *(call.get("function", {}).get(part) for part in ("name", "arguments"))]
        for call in message.get("tool_calls") or []
    ]


def _text(content: Any) -> str:
    """The same text for a string, for the parts that it may come in, and for nothing at all."""
    if isinstance(content, list):
        return "".join(part["text"] if part.get("type") == "text" else json.dumps(part) for part in content)
    return content or ""
