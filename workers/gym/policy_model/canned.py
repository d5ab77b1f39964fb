"""Conversations that a chat template is checked with: words, numbers and thoughts, as agents and tools write them."""

from typing import Any

Message = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "The word."}},
                "required": ["word"],
            },
        },
    }
]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str, thought: str, *call_ids: str) -> Message:
    message: Message = {"role": "assistant", "content": text, "reasoning": thought}
    if call_ids:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": "look_up", "arguments": '{"word": "belay"}'}}
            for call_id in call_ids
        ]
    return message


def _tool(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": f'{{"found": "{call_id}",\n "lines": 1}}'}


def answered(text: str) -> list[Message]:
    """A question and its answer."""
    return [_user("What is 1 + 1?"), {"role": "assistant", "content": text}]


_SYSTEM: Message = {"role": "system", "content": "Answer briefly."}
_FIRST = [_SYSTEM, _user("Which word is it?"), _assistant("I look.", "Which one?", "abcdefgh1"), _tool("abcdefgh1")]

# Each ends with the messages that arrive after the newest assistant turn.
TURNS = (
    [*_FIRST, _assistant("", "One more.", "abcdefgh2"), _tool("abcdefgh2")],
    [
        *_FIRST,
        _assistant("I look twice.", "Two more.", "abcdefgh2", "abcdefgh3"),
        _tool("abcdefgh2"),
        _tool("abcdefgh3"),
    ],
    [*_FIRST, _assistant("", "One more.", "abcdefgh2"), _tool("abcdefgh2"), _user("Hurry.")],
    [*_FIRST, _assistant("It is 3.", "That was it."), _user("And the next?\n\nPlease.")],
    [_user("1"), {"role": "assistant", "content": "<think>\nTwo.\n</think>\n\n2"}, _user("3")],
    [_user("1"), _assistant("2", "Two."), _user("3"), _assistant("4", "Four."), _user("5")],
)
