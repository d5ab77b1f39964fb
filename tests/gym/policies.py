"""Scripted policies for the demo's environment, as functions of the messages of a prompt."""

import json

from tests.gym.sampling_vllm import Refuse, SamplingVllm
from tests.gym.stub_model import Message, Policy, Reply


def splitting(messages: list[Message]) -> Reply:
    """Plays the safe by halving the range, from nothing but the messages."""
    hints = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
    calls = [json.loads(m["tool_calls"][0]["function"]["arguments"]) for m in messages if m.get("tool_calls")]
    dial, low, high = 1, 1, 9
    for call, hint in zip(calls, hints, strict=True):
        if hint["hint"] == "open":
            dial, low, high = dial + 1, 1, 9
        elif hint["hint"] == "higher":
            low = call["digit"] + 1
        else:
            high = call["digit"] - 1
    if dial > 3 or (hints and hints[-1].get("left") == 0):
        return Reply("the end", answer="done")
    return Reply(f"dial {dial} is {low} to {high}", "turn", {"dial": dial, "digit": (low + high) // 2})


def hanging_after(call: int, vllm: SamplingVllm, policy: Policy = splitting) -> Policy:
    """The server hangs in the call of an episode that follows this one, the first being 1."""

    def hanging(messages: list[Message]) -> Reply:
        if sum(message["role"] == "assistant" for message in messages) + 1 == call:
            vllm.hang_next()
        return policy(messages)

    return hanging


def dying_at(call: int, policy: Policy = splitting) -> Policy:
    """The server fails from this call of an episode on, the first being 1."""

    def dying(messages: list[Message]) -> Reply:
        if sum(message["role"] == "assistant" for message in messages) + 1 >= call:
            raise Refuse(500, "the engine is dead")
        return policy(messages)

    return dying
