"""Which chat templates conversations can be continued with, and what is said about those that cannot."""

from typing import Any

import pytest

from tests.gym.byte_language import rendered
from tests.gym.exact.conftest import turns_the_dial
from tests.gym.exact.http_endpoint import HttpEndpoint
from tests.gym.sampling_vllm import Refuse, Render, SamplingVllm
from tests.gym.stub_model import Message
from workers.gym.policy_model.errors import GenerationUnavailable, TemplateUnfit
from workers.gym.policy_model.template import Template

Tools = list[dict[str, Any]] | None

USER: Message = {"role": "user", "content": "And now?"}
TOOL: Message = {"role": "tool", "tool_call_id": "c", "content": "done"}
ASSISTANT: Message = {"role": "assistant", "content": "1"}


async def check(render: Render, **server: Any) -> Template:
    with SamplingVllm(turns_the_dial, render=render, **server) as vllm:
        async with HttpEndpoint(vllm.url) as endpoint:
            return await Template.check(endpoint)


def turn(role: str, text: str, end: str = "<|im_end|>\n") -> str:
    return f"<|im_start|>{role}\n{text}{end}"


def prompt(open_turn: bool) -> str:
    return "<|im_start|>assistant\n" if open_turn else ""


def said(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return (message.get("content") or "") + "".join(f"<call>{call['name']} {call['arguments']}" for call in calls)


def forgets_thoughts(messages: list[Message], tools: Tools, open_turn: bool) -> str:
    """As the template of Qwen3: thoughts are shown behind the newest user turn only, an empty one if it is the last."""
    newest = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    text = turn("system", f"{len(tools)} tools") if tools else ""
    for at, message in enumerate(messages):
        thought = message.get("reasoning") or ""
        shown = message["role"] == "assistant" and at > newest and (thought or at == len(messages) - 1)
        text += turn(message["role"], (f"<think>\n{thought}\n</think>\n\n" if shown else "") + said(message))
    return text + prompt(open_turn)


async def test_a_template_of_separate_turns_fits() -> None:
    template = await check(rendered)
    assert (template.end_of_turn, template.rewrites_user_turn) == (256, False)
    assert template.new_segment_reason({"messages": [USER, ASSISTANT, USER]}) is None


async def test_a_template_that_forgets_thoughts_when_the_user_speaks_fits_and_is_marked() -> None:
    template = await check(forgets_thoughts)
    assert template.rewrites_user_turn


@pytest.mark.parametrize(
    ("new", "reason"),
    [([TOOL], None), ([USER], "template_rewrites_user_turn"), ([TOOL, USER], "template_rewrites_user_turn")],
    ids=["tool", "user", "tool and user"],
)
async def test_with_such_a_template_a_user_turn_starts_a_segment_and_a_tool_turn_does_not(
    new: list[Message], reason: str | None
) -> None:
    template = Template(end_of_turn=256, rewrites_user_turn=True, contract="c")
    assert template.new_segment_reason({"messages": [USER, ASSISTANT, *new]}) == reason


def no_end(messages: list[Message], tools: Tools, open_turn: bool) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{said(m)}" for m in messages) + prompt(open_turn)


def ends_with_text(messages: list[Message], tools: Tools, open_turn: bool) -> str:
    return "".join(turn(m["role"], said(m), "\n##\n") for m in messages) + prompt(open_turn)


def hides_answers(messages: list[Message], tools: Tools, open_turn: bool) -> str:
    return "".join(turn(m["role"], said(m) if m["role"] != "assistant" else "...") for m in messages) + prompt(
        open_turn
    )


def repeats_calls(messages: list[Message], tools: Tools, open_turn: bool) -> str:
    text, called = "", ""
    for message in messages:
        called = said(message) if message["role"] == "assistant" else called
        text += turn(message["role"], said(message) + (f" to {called}" if message["role"] == "tool" else ""))
    return text + prompt(open_turn)


def numbers_turns(messages: list[Message], tools: Tools, open_turn: bool) -> str:
    users = 0
    text = ""
    for message in messages:
        users += message["role"] == "user"
        text += turn(message["role"], said(message) + (f" ({users})" if message["role"] == "user" else ""))
    return text + prompt(open_turn)


def marks_the_newest(messages: list[Message], tools: Tools, open_turn: bool) -> str:
    last = len(messages) - 1
    return "".join(
        turn(m["role"], said(m) + (" (newest)" if at == last and m["role"] == "assistant" else ""))
        for at, m in enumerate(messages)
    ) + prompt(open_turn)


def leaves_calls_open(messages: list[Message], tools: Tools, open_turn: bool) -> str:
    """A turn that calls a tool, and every other turn but an answer, ends with text."""
    return "".join(
        turn(m["role"], said(m), "<|im_end|>\n" if m["role"] == "assistant" and not m.get("tool_calls") else "\n")
        for m in messages
    ) + prompt(open_turn)


@pytest.mark.parametrize(
    ("render", "fault"),
    [
        (no_end, "has no end-of-turn token"),
        (ends_with_text, "stops at none of them"),
        (hides_answers, "leaves out what the assistant says"),
        (repeats_calls, "tool turn differs"),
        (numbers_turns, "user turn differs"),
        (marks_the_newest, "rewrites earlier turns when a tool answers"),
        (leaves_calls_open, "not a turn that calls a tool"),
    ],
)
async def test_an_unfit_template_is_refused_and_its_fault_named(render: Render, fault: str) -> None:
    with pytest.raises(TemplateUnfit, match=fault):
        await check(render)


async def test_a_template_without_tools_is_checked_with_what_it_knows() -> None:
    def no_tools(messages: list[Message], tools: Tools, open_turn: bool) -> str:
        if tools or any(message["role"] == "tool" for message in messages):
            raise Refuse(400, "this model has no tools")
        return numbers_turns(messages, tools, open_turn)

    with pytest.raises(TemplateUnfit, match="user turn differs"):
        await check(no_tools)


async def test_a_template_that_renders_nothing_is_refused_with_the_servers_words() -> None:
    def broken(messages: list[Message], tools: Tools, open_turn: bool) -> str:
        raise Refuse(400, "expected a poem")

    with pytest.raises(TemplateUnfit, match="expected a poem"):
        await check(broken)


async def test_a_context_too_small_for_a_conversation_is_refused() -> None:
    with pytest.raises(TemplateUnfit, match="maximum context length"):
        await check(rendered, max_model_len=40)


async def test_a_server_that_is_away_is_not_a_fault_of_its_template(vllm: SamplingVllm, endpoint: HttpEndpoint) -> None:
    vllm.fail_next(503, path="/v1/chat/completions/render")
    with pytest.raises(GenerationUnavailable):
        await Template.check(endpoint)


async def test_the_contract_is_that_of_model_tokenizer_and_template() -> None:
    first, again, other = await check(rendered), await check(rendered), await check(forgets_thoughts)
    assert first.contract == again.contract != other.contract
