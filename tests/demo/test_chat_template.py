"""The chat template writes exactly what the transcripts taught, and each prompt extends the one before it."""

import random
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerFast

from workers.demo.tokenizer import build_tokenizer
from workers.demo.transcripts import GENERATION_PROMPT, Turn, episode, views
from workers.gym.safe.game import TURN_TOOL, prompt_of

TOOLS = [{"type": "function", "function": {key: TURN_TOOL[key] for key in ("name", "description", "parameters")}}]
SEEDS = range(0, 729, 13)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], *, reply_next: bool = False) -> str:
    text = tokenizer.apply_chat_template(
        cast(Any, messages),
        tools=cast(Any, TOOLS),
        tokenize=False,
        add_generation_prompt=reply_next,
    )
    assert isinstance(text, str)
    return text


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def messages_of(seed: int, turns: list[Turn]) -> list[dict[str, Any]]:
    """The conversation as a chat completion request has it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt_of(seed)}]
    for turn in turns:
        calls = [{"id": "1", "type": "function", "function": {"name": "turn", "arguments": turn.arguments}}]
        messages.append(
            {
                "role": "assistant",
                "content": None if turn.arguments else "done",
                "reasoning": turn.thought,
                "tool_calls": calls if turn.arguments else None,
            }
        )
        if turn.output:
            messages.append({"role": "tool", "content": turn.output, "tool_call_id": "1"})
    return messages


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rendered_conversation_is_the_transcript(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    turns = episode(seed, 0.5, random.Random(seed))
    transcript = "".join(piece.text for piece in views(seed, turns, len(turns))[0])
    assert rendered(tokenizer, messages_of(seed, turns)) == transcript + "\n"
    assert tokenizer.unk_token_id not in encoded(tokenizer, transcript)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_prompt_extends_the_one_before_and_its_reply(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    turns = episode(seed, 0.5, random.Random(seed))
    before: list[int] = []
    for count, turn in enumerate(turns):
        prompt = encoded(tokenizer, rendered(tokenizer, messages_of(seed, turns[:count]), reply_next=True))
        assert prompt[: len(before)] == before
        closed = rendered(tokenizer, messages_of(seed, [*turns[:count], turn]))
        reply = closed.rpartition(GENERATION_PROMPT)[2].partition("<|im_end|>")[0] + "<|im_end|>"
        before = prompt + encoded(tokenizer, reply)


def test_a_dropped_thought_leaves_no_trace(tokenizer: PreTrainedTokenizerFast) -> None:
    seed = 3
    turns = episode(seed, 0.0, random.Random(seed))
    messages = messages_of(seed, turns[:6])
    for message in messages[1:9]:
        message.pop("reasoning", None)  # four turns; the agent keeps the thought of the last
    messages[7]["reasoning"] = turns[3].thought
    compacted = "".join(piece.text for piece in views(seed, turns, 4)[1])
    assert compacted.startswith(rendered(tokenizer, messages))


def test_a_system_message_is_rendered_before_the_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Open the safe"}, {"role": "user", "content": "x"}]
    head = "<|im_start|>system\nOpen the safe\nTools:\nturn(dial/digit)<|im_end|>\n<|im_start|>user\n"
    assert rendered(tokenizer, messages).startswith(head)
