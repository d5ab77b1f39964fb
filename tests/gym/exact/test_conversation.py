"""Keys of conversations: equal for what NeMo-Gym's conversions return, different for every other history."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.gym.policy_model.conversation import own_key, parent_key

Body = dict[str, Any]
Message = dict[str, Any]

USER: Message = {"role": "user", "content": "Open the safe."}
TOOLS = [{"type": "function", "function": {"name": "turn", "parameters": {}}}]


def call(call_id: str = "call-1", digit: int = 5) -> Body:
    return {"id": call_id, "type": "function", "function": {"name": "turn", "arguments": json.dumps({"digit": digit})}}


def request(*messages: Message, **fields: Any) -> Body:
    return {"model": "policy", "tools": TOOLS, "messages": list(messages), **fields}


SAMPLED: Message = {"role": "assistant", "content": None, "reasoning": "split dial 1", "tool_calls": [call()]}
TOOL: Message = {"role": "tool", "tool_call_id": "call-1", "content": '{"hint": "higher"}'}


@pytest.mark.parametrize(
    "returned",
    [
        {"role": "assistant", "content": "", "tool_calls": [call()]},
        {"role": "assistant", "content": "<think>split dial 1</think>", "tool_calls": [call()]},
        {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": [call()]},
        {"role": "assistant", "content": None, "reasoning": "split dial 1", "tool_calls": [call()]},
        {"role": "assistant", "tool_calls": [call()]},
    ],
    ids=["thought dropped", "thought in tags", "content in parts", "thought in its field", "no content"],
)
def test_a_response_is_found_whatever_became_of_its_thought(returned: Message) -> None:
    assert parent_key(request(USER, returned, TOOL)) == own_key(request(USER), SAMPLED)


def test_text_of_a_server_without_a_reasoning_parser_is_found_without_its_thought() -> None:
    sampled: Message = {"role": "assistant", "content": "<think>\nplan\n</think>\n\nHello."}
    assert parent_key(request(USER, {"role": "assistant", "content": "Hello."}, USER)) == own_key(
        request(USER), sampled
    )


def test_a_request_without_an_assistant_turn_is_a_root() -> None:
    assert parent_key(request(USER)) is None


def test_a_request_that_ends_with_an_assistant_turn_is_a_root() -> None:
    assert parent_key(request(USER, SAMPLED)) is None


@pytest.mark.parametrize(
    "other",
    [
        request(USER, SAMPLED | {"tool_calls": [call(digit=6)]}, TOOL),
        request(USER, SAMPLED | {"tool_calls": [call("call-2")]}, TOOL),
        request(USER, SAMPLED | {"content": "Hm."}, TOOL),
        request(USER, SAMPLED | {"tool_calls": []}, TOOL),
        request(USER | {"content": "Close the safe."}, SAMPLED, TOOL),
        request(USER, USER, SAMPLED, TOOL),
        request(USER, SAMPLED, TOOL, tools=[]),
        request(USER, SAMPLED, TOOL, chat_template_kwargs={"enable_thinking": False}),
    ],
    ids=["arguments", "call id", "text", "no call", "question", "longer", "tools", "template settings"],
)
def test_another_history_is_another_conversation(other: Body) -> None:
    assert parent_key(other) != own_key(request(USER), SAMPLED)


def test_a_thought_that_was_dropped_from_an_older_turn_is_another_conversation() -> None:
    first: Message = {"role": "assistant", "content": "", "reasoning": "one", "tool_calls": [call("a")]}
    answer: Message = {"role": "tool", "tool_call_id": "a", "content": "ok"}
    compacted = {key: value for key, value in first.items() if key != "reasoning"}
    recorded = own_key(request(USER, first, answer), SAMPLED)
    assert parent_key(request(USER, first, answer, SAMPLED, TOOL)) == recorded
    assert parent_key(request(USER, compacted, answer, SAMPLED, TOOL)) != recorded


def test_sampling_parameters_do_not_change_the_conversation() -> None:
    warm = request(USER, SAMPLED, TOOL, temperature=0.7, max_tokens=5)
    assert parent_key(warm) == own_key(request(USER, temperature=1.0), SAMPLED)


def test_calls_of_custom_tools_have_an_identity_too() -> None:
    custom: Message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "custom"}]}
    assert parent_key(request(USER, custom, TOOL)) == own_key(request(USER), custom)


_TEXT = st.text("ab </>think", max_size=12)
_PLAIN = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), _TEXT)
_ASSISTANT = st.builds(
    lambda text, thought, calls: {"role": "assistant", "content": text, "reasoning": thought, "tool_calls": calls},
    _TEXT,
    st.none() | _TEXT,
    st.lists(st.builds(call, st.sampled_from(["c1", "c2"]), st.integers(0, 3)), max_size=2),
)


@given(history=st.lists(_PLAIN | _ASSISTANT, min_size=1, max_size=5), sampled=_ASSISTANT, new=_PLAIN)
def test_whoever_appends_to_a_response_finds_it(history: list[Message], sampled: Message, new: Message) -> None:
    before = copy.deepcopy(history)
    assert parent_key(request(*history, sampled, new)) == own_key(request(*history), sampled)
    assert history == before


@given(
    history=st.lists(_PLAIN | _ASSISTANT, min_size=2, max_size=5), sampled=_ASSISTANT, new=_PLAIN, at=st.integers(0, 4)
)
def test_whoever_leaves_out_a_message_does_not_find_it(
    history: list[Message], sampled: Message, new: Message, at: int
) -> None:
    shorter = [message for index, message in enumerate(history) if index != at % len(history)]
    assert parent_key(request(*shorter, sampled, new)) != own_key(request(*history), sampled)
