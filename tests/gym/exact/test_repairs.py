"""What separates the exact route from the chat route of vLLM, difference by difference."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.gym.byte_language import encode
from tests.gym.exact.http_endpoint import HttpEndpoint, Spoiled
from tests.gym.exact.requests import TEMPLATE, TOOLS, message_of, request
from tests.gym.sampling_vllm import SamplingVllm
from tests.gym.stub_model import Reply
from workers.gym.policy_model.endpoint import DERENDER, GENERATE, RENDER
from workers.gym.policy_model.errors import (
    ContinuityBroken,
    GenerationRefused,
    ModelCallFailed,
    NoGeneration,
    UnknownWeightVersion,
)
from workers.gym.policy_model.exact import ExactClient
from workers.gym.policy_model.repairs import refuse_unfaithful, without_stop_string

Body = dict[str, Any]


def sent(endpoint: HttpEndpoint, path: str) -> Body:
    return next(body for of, body in endpoint.sent if of == path)


def answers(vllm: SamplingVllm, text: str) -> None:
    vllm.policy = lambda messages: Reply("hm", answer=text)


async def test_a_stop_string_is_not_in_the_content(vllm: SamplingVllm, exact: ExactClient) -> None:
    answers(vllm, "abc def STOP ghi")
    completion = await exact.complete(request(stop=["STOP"]), None)
    assert message_of(completion)["content"] == "abc def "
    assert completion.response["choices"][0]["stop_reason"] == "STOP"
    assert completion.sampled_token_ids[-4:] == encode("STOP")


async def test_a_stop_string_stays_if_the_request_wants_it(vllm: SamplingVllm, exact: ExactClient) -> None:
    answers(vllm, "abc def STOP ghi")
    completion = await exact.complete(request(stop=["STOP"], include_stop_str_in_output=True), None)
    assert message_of(completion)["content"] == "abc def STOP"


def test_text_of_the_token_behind_a_stop_string_goes_with_it() -> None:
    assert without_stop_string({"content": "abc STOP gh"}, "STOP", {})["content"] == "abc "


def test_a_stop_string_within_a_thought_is_taken_from_the_thought() -> None:
    message = {"content": None, "reasoning": "so STOP"}
    assert without_stop_string(message, "STOP", {}) == {"content": None, "reasoning": "so "}


async def test_the_text_of_a_stop_token_is_not_in_the_content(vllm: SamplingVllm, exact: ExactClient) -> None:
    answers(vllm, "abcZdef")
    completion = await exact.complete(request(stop_token_ids=[ord("Z")]), None)
    assert message_of(completion)["content"] == "abc"
    assert completion.sampled_token_ids[-1] == ord("Z")


async def test_the_text_of_the_end_of_turn_token_is_not_in_the_content(vllm: SamplingVllm, exact: ExactClient) -> None:
    answers(vllm, "abc")
    assert message_of(await exact.complete(request(), None))["content"] == "abc"


async def test_a_turn_of_nothing_but_its_end_is_an_empty_message(vllm: SamplingVllm, exact: ExactClient) -> None:
    completion = await exact.complete(request(stop_token_ids=[ord("<")]), None)
    assert completion.sampled_token_ids == [ord("<")]
    assert message_of(completion) == {"role": "assistant", "content": None}


async def test_a_turn_that_calls_a_tool_finishes_with_tool_calls(exact: ExactClient) -> None:
    assert (await exact.complete(request(), None)).finish_reason == "tool_calls"


async def test_a_turn_that_is_cut_behind_its_call_finishes_with_tool_calls_too(exact: ExactClient) -> None:
    whole = await exact.complete(request(), None)
    cut = await exact.complete(request(max_completion_tokens=len(whole.sampled_token_ids) - 1), None)
    assert cut.sampled_token_ids[-1:] == encode(">")
    assert cut.finish_reason == "tool_calls"


async def test_a_turn_that_calls_a_named_tool_finishes_with_stop(exact: ExactClient) -> None:
    named = {"type": "function", "function": {"name": "turn"}}
    completion = await exact.complete(request(tool_choice=named), None)
    assert message_of(completion)["tool_calls"]
    assert completion.response["choices"][0]["finish_reason"] == completion.finish_reason == "stop"


async def test_log_probabilities_name_token_ids(vllm: SamplingVllm, exact: ExactClient) -> None:
    completion = await exact.complete(request(), None)
    entries = completion.response["choices"][0]["logprobs"]["content"]
    (generation,) = vllm.generations
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in generation.sampled_token_ids]
    assert [entry["logprob"] for entry in entries] == completion.log_probs == generation.log_probs


async def test_ids_and_usage_are_those_of_the_generation(endpoint: HttpEndpoint, exact: ExactClient) -> None:
    completion = await exact.complete(request(), None)
    assert completion.response_id == completion.response["id"] == sent(endpoint, GENERATE)["request_id"]
    assert completion.response["usage"]["prompt_tokens"] == len(completion.prompt_token_ids)
    assert completion.response["usage"]["completion_tokens"] == len(completion.sampled_token_ids)
    assert message_of(completion)["tool_calls"][0]["id"].startswith("chatcmpl-tool-")


async def test_tokens_are_kept_where_the_request_does_not_want_the_thought(exact: ExactClient) -> None:
    completion = await exact.complete(request(include_reasoning=False), None)
    assert message_of(completion)["reasoning"] is None
    choice = completion.response["choices"][0]
    assert choice["token_ids"] == completion.sampled_token_ids != []
    assert len(choice["logprobs"]["content"]) == len(completion.sampled_token_ids)
    assert completion.response["prompt_token_ids"] == completion.prompt_token_ids


async def test_a_request_for_one_tool_call_gets_the_first_and_no_grammar(
    endpoint: HttpEndpoint, vllm: SamplingVllm, exact: ExactClient
) -> None:
    second = '<tool_call>{"name": "turn", "arguments": {"dial": 2}}</tool_call>'
    vllm.policy = lambda messages: Reply("both", "turn", {"dial": 1}, answer=second)
    both = await exact.complete(request(), None)
    one = await exact.complete(request(parallel_tool_calls=False), None)
    assert [len(message_of(completion)["tool_calls"]) for completion in (both, one)] == [2, 1]
    assert message_of(one)["tool_calls"][0]["function"] == message_of(both)["tool_calls"][0]["function"]
    assert all("parallel_tool_calls" not in body for _, body in endpoint.sent)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "turn"}}])
async def test_a_forced_tool_choice_becomes_a_free_one(endpoint: HttpEndpoint, exact: ExactClient, choice: Any) -> None:
    await exact.complete(request(tool_choice=choice), None)
    assert "tool_choice" not in sent(endpoint, RENDER)
    assert "tool_choice" not in sent(endpoint, DERENDER)["chat_request"]


async def test_a_request_for_no_tool_calls_is_kept(endpoint: HttpEndpoint, exact: ExactClient) -> None:
    await exact.complete(request(tool_choice="none"), None)
    assert sent(endpoint, RENDER)["tool_choice"] == "none"


async def test_strict_tools_become_ordinary_ones(endpoint: HttpEndpoint, exact: ExactClient) -> None:
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    await exact.complete(request(tools=strict), None)
    assert sent(endpoint, RENDER)["tools"] == TOOLS


async def test_structured_output_is_refused_because_of_its_log_probabilities(exact: ExactClient) -> None:
    with pytest.raises(GenerationRefused, match="structured output"):
        await exact.complete(request(response_format={"type": "json_object"}), None)


def test_images_are_refused() -> None:
    with pytest.raises(GenerationRefused, match="text only"):
        refuse_unfaithful({"sampling_params": {}, "features": {"mm_hashes": {"image": ["a"]}}})


def another_prompt(answer: Body) -> None:
    answer["prompt_token_ids"][3] += 1


def no_prompt(answer: Body) -> None:
    answer["prompt_token_ids"] = None


def no_tokens(answer: Body) -> None:
    answer["choices"][0] |= {"token_ids": [], "logprobs": {"content": []}, "finish_reason": "length"}


def foreign_log_probs(answer: Body) -> None:
    answer["choices"][0]["logprobs"]["content"][0]["token_id"] += 1


def fewer_log_probs(answer: Body) -> None:
    answer["choices"][0]["logprobs"]["content"].pop()


def no_log_probs(answer: Body) -> None:
    answer["choices"][0]["logprobs"] = None


def no_versions(answer: Body) -> None:
    answer["choices"][0]["weight_versions"] = None


def late_version(answer: Body) -> None:
    answer["choices"][0]["weight_versions"][0]["start"] = 1


def short_version(answer: Body) -> None:
    answer["choices"][0]["weight_versions"][0]["end"] -= 1


@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (another_prompt, ContinuityBroken),
        (no_prompt, ContinuityBroken),
        (no_tokens, NoGeneration),
        (foreign_log_probs, ContinuityBroken),
        (fewer_log_probs, ContinuityBroken),
        (no_log_probs, ContinuityBroken),
        (no_versions, UnknownWeightVersion),
        (late_version, UnknownWeightVersion),
        (short_version, UnknownWeightVersion),
    ],
)
async def test_an_answer_that_does_not_hold_together_is_a_failure(
    endpoint: HttpEndpoint, spoil: Callable[[Body], None], failure: type[ModelCallFailed]
) -> None:
    with pytest.raises(failure):
        await ExactClient(Spoiled(endpoint, spoil), TEMPLATE).complete(request(), None)
