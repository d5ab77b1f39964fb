"""Tokens, chat template and parsers of the sampling fake: one token per byte, and two special tokens around a turn.

What is written reads back as the same messages, so that a policy can be a function of the prompt's messages.
"""

import json
import re
import secrets
from typing import Any

from tests.gym.stub_model import Message, Reply

SPECIAL = {"<|im_end|>": 256, "<|im_start|>": 257}
END_OF_TURN = SPECIAL["<|im_end|>"]
VOCABULARY = 258

_TOOLS = "Tools: "
_SPECIAL_TEXT = re.compile("|".join(map(re.escape, SPECIAL)))
_NAMES = {token: text for text, token in SPECIAL.items()}
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
_THOUGHT = re.compile(r"^<think>(.*?)</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def encode(text: str) -> list[int]:
    """Text to tokens."""
    tokens: list[int] = []
    at = 0
    for match in _SPECIAL_TEXT.finditer(text):
        tokens += [*text[at : match.start()].encode(), SPECIAL[match.group()]]
        at = match.end()
    return [*tokens, *text[at:].encode()]


def decode(tokens: list[int]) -> str:
    """Tokens to text."""
    return b"".join(_NAMES[token].encode() if token in _NAMES else bytes([token]) for token in tokens).decode(
        errors="replace"
    )


def rendered(messages: list[Message], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
    """The chat template: every message is a turn of its own, thoughts and calls included."""
    names = [tool["function"]["name"] for tool in tools or []]
    header = f"<|im_start|>system\n{_TOOLS}{', '.join(names)}<|im_end|>\n" if names else ""
    turns = "".join(f"<|im_start|>{message['role']}\n{_content(message)}<|im_end|>\n" for message in messages)
    return header + turns + ("<|im_start|>assistant\n" if generation_prompt else "")


def messages_of(prompt: str) -> list[Message]:
    """The messages that a prompt was rendered from; tools are not one."""
    return [
        parsed(content) if role == "assistant" else {"role": role, "content": content}
        for role, content in _TURN.findall(prompt)
        if not content.startswith(_TOOLS)
    ]


def written(reply: Reply, nonce: str = "") -> str:
    """What the policy says as text. The nonce makes two samples of the same reply differ."""
    call = "" if reply.tool is None else _call(reply.tool, reply.arguments or {})
    return f"<think>{reply.thought}{nonce}</think>{reply.answer or ''}{call}"


def parsed(text: str) -> Message:
    """The assistant message that a text spells, as vLLM's parsers write it."""
    thought = _THOUGHT.match(text)
    rest = text[thought.end() :] if thought else text
    message: Message = {"role": "assistant", "reasoning": thought.group(1) if thought else None}
    calls = [json.loads(call) for call in _CALL.findall(rest)]
    message["content"] = _CALL.sub("", rest) or None
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
