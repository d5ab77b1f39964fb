"""Tokens, chat template and parser of the sampling model: one token per byte, and two special ones around a turn."""

import json
import re
import secrets
from typing import Any

Message = dict[str, Any]

END_OF_TURN, START_OF_TURN = 256, 257
VOCABULARY = 258
_SPECIAL = {"<|end|>": END_OF_TURN, "<|start|>": START_OF_TURN}
_NAMES = {token: text.encode() for text, token in _SPECIAL.items()}
_SPECIAL_TEXT = re.compile("|".join(map(re.escape, _SPECIAL)))
_THOUGHT = re.compile(r"^<think>(.*?)</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def encode(text: str) -> list[int]:
    """Text to tokens."""
    tokens: list[int] = []
    at = 0
    for match in _SPECIAL_TEXT.finditer(text):
        tokens += [*text[at : match.start()].encode(), _SPECIAL[match.group()]]
        at = match.end()
    return [*tokens, *text[at:].encode()]


def decode(tokens: list[int]) -> str:
    """Tokens to text."""
    return b"".join(_NAMES.get(token) or bytes([token]) for token in tokens).decode(errors="replace")


def rendered(messages: list[Message], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str:
    """The chat template: every message is a turn of its own; `prompt` opens the assistant's next one."""
    names = ", ".join(tool["function"]["name"] for tool in tools or [])
    header = f"<|start|>system\nTools: {names}<|end|>\n" if names else ""
    turns = "".join(f"<|start|>{message['role']}\n{_content(message)}<|end|>\n" for message in messages)
    return header + turns + ("<|start|>assistant\n" if prompt else "")


def spoken(thought: str, answer: str, tool: str | None) -> str:
    """What the policy says: a thought, then an answer or a tool call."""
    return f"<think>{thought}</think>{answer}{'' if tool is None else _call(tool, {})}"


def parsed(text: str) -> Message:
    """The assistant message that a text spells, as vLLM's parsers write it."""
    thought = _THOUGHT.match(text)
    rest = text[thought.end() :] if thought else text
    message: Message = {
        "role": "assistant",
        "reasoning": thought.group(1) if thought else None,
        "content": _CALL.sub("", rest) or None,
    }
    calls = [json.loads(call) for call in _CALL.findall(rest)]
    if calls:
        message["tool_calls"] = [
            {
                "id": secrets.token_hex(8),
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in calls
        ]
    return message


def _content(message: Message) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if message["role"] != "assistant":
        return text
    thought = message.get("reasoning") or message.get("reasoning_content")
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [_call(function["name"], json.loads(function["arguments"])) for function in functions]
    return f"{f'<think>{thought}</think>' if thought else ''}{text}{''.join(calls)}"


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
