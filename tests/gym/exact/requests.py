"""Requests of an agent that opens a safe, and what it sends back."""

from typing import Any

from tests.gym.byte_language import END_OF_TURN
from tests.gym.stub_model import Message
from workers.gym.policy_model.exact import Completion
from workers.gym.policy_model.template import Template

Body = dict[str, Any]

TOOLS = [{"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = Template(end_of_turn=END_OF_TURN, rewrites_user_turn=False, contract="bytes")


def request(*messages: Message, **fields: Any) -> Body:
    """A chat completion request."""
    opening = {"role": "user", "content": "Open the safe."}
    return {"model": "policy", "tools": TOOLS, "messages": [opening, *messages], **fields}


def message_of(completion: Completion) -> Message:
    """The assistant message."""
    return completion.response["choices"][0]["message"]


def tokens_of(completion: Completion) -> list[int]:
    """What the next call of the conversation goes on from."""
    return [*completion.prompt_token_ids, *completion.sampled_token_ids]


def returned(completion: Completion) -> Message:
    """The assistant turn as an agent sends it back: without its thought."""
    return {key: value for key, value in message_of(completion).items() if key != "reasoning"}


def tool(completion: Completion) -> Message:
    """The tool's answer to the completion's call."""
    return {"role": "tool", "tool_call_id": message_of(completion)["tool_calls"][0]["id"], "content": "higher"}
