"""One model call on exact tokens: prompts that only grow, and answers as the chat route gives them."""

import asyncio
import dataclasses

import pytest

from tests.gym.byte_language import END_OF_TURN, decode, encode, rendered
from tests.gym.exact.http_endpoint import HttpEndpoint
from tests.gym.exact.requests import TOOLS, message_of, request, returned, tokens_of, tool
from tests.gym.sampling_vllm import SamplingVllm
from tests.gym.stub_model import Message, Reply
from workers.gym.policy_model.endpoint import DERENDER, GENERATE, RENDER
from workers.gym.policy_model.errors import (
    ContextOverflow,
    GenerationAborted,
    GenerationRefused,
    GenerationUnavailable,
)
from workers.gym.policy_model.exact import ExactClient
from workers.gym.policy_model.seeding import CallSeed
from workers.gym.policy_model.template import Template


async def test_every_prompt_extends_the_tokens_before_it(vllm: SamplingVllm, exact: ExactClient) -> None:
    messages: list[Message] = []
    prefix: list[int] = []
    while not messages or messages[-1]["role"] == "tool":
        completion = await exact.complete(request(*messages), prefix or None)
        assert completion.prompt_token_ids[: len(prefix)] == prefix
        prefix = tokens_of(completion)
        turn = returned(completion)
        messages += [turn, tool(completion)] if "tool_calls" in turn else [turn]
    assert messages[-1]["content"] == "The safe is open."
    assert len(vllm.generations) == 4
    assert prefix == [*vllm.generations[-1].prompt_token_ids, *vllm.generations[-1].sampled_token_ids]


async def test_the_thought_stays_in_the_prompt_although_the_agent_dropped_it(exact: ExactClient) -> None:
    first = await exact.complete(request(), None)
    second = await exact.complete(request(returned(first), tool(first)), tokens_of(first))
    assert message_of(first)["reasoning"] in decode(second.prompt_token_ids)


async def test_without_a_parent_the_whole_conversation_is_rendered(exact: ExactClient) -> None:
    messages = request(*[{"role": "assistant", "content": "No."}, {"role": "user", "content": "Do."}])["messages"]
    completion = await exact.complete(request(*messages[1:]), None)
    assert completion.prompt_token_ids == encode(rendered(messages, TOOLS, True))


async def test_a_turn_that_was_cut_short_gets_the_end_of_every_turn(exact: ExactClient) -> None:
    first = await exact.complete(request(max_completion_tokens=8), None)
    assert (first.finish_reason, len(first.sampled_token_ids)) == ("length", 8)
    second = await exact.complete(request(returned(first), {"role": "user", "content": "Go on."}), tokens_of(first))
    behind = second.prompt_token_ids[len(tokens_of(first)) :]
    assert behind == encode("<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")


async def test_an_ended_turn_is_not_ended_twice(exact: ExactClient) -> None:
    first = await exact.complete(request(), None)
    second = await exact.complete(request(returned(first), tool(first)), tokens_of(first))
    behind = second.prompt_token_ids[len(tokens_of(first)) :]
    assert behind == encode("\n<|im_start|>tool\nhigher<|im_end|>\n<|im_start|>assistant\n")


async def test_two_calls_of_one_tool_set_render_the_head_of_the_stub_once(
    endpoint: HttpEndpoint, exact: ExactClient
) -> None:
    template = Template(end_of_turn=END_OF_TURN, rewrites_user_turn=False, contract="bytes")
    first = await exact.complete(request(), None)
    requests: list[int] = []
    for _ in range(2):
        before = len(endpoint.sent)
        await ExactClient(endpoint, template).complete(request(returned(first), tool(first)), tokens_of(first))
        requests.append(len(endpoint.sent) - before)
    assert requests == [4, 3]


async def test_what_is_measured_is_what_is_sent(exact: ExactClient) -> None:
    first = await exact.complete(request(), None)
    assert await exact.measure(request(), None) == first.prompt_token_ids
    body = request(returned(first), tool(first))
    measured = await exact.measure(body, tokens_of(first))
    assert measured == (await exact.complete(body, tokens_of(first))).prompt_token_ids


async def test_a_prompt_that_is_too_long_is_measured_and_refused(vllm: SamplingVllm, exact: ExactClient) -> None:
    first = await exact.complete(request(), None)
    body = request(returned(first), tool(first) | {"content": "x" * vllm.max_model_len})
    assert len(await exact.measure(body, tokens_of(first))) > vllm.max_model_len
    with pytest.raises(ContextOverflow, match="maximum context length"):
        await exact.complete(body, tokens_of(first))


async def test_exact_tokens_that_fill_the_window_are_too_long_although_their_delta_is_short(
    vllm: SamplingVllm, exact: ExactClient
) -> None:
    first = await exact.complete(request(), None)
    vllm.max_model_len = len(tokens_of(first)) + 20
    with pytest.raises(ContextOverflow, match="maximum context length") as failure:
        await exact.complete(request(returned(first), tool(first)), tokens_of(first))
    assert failure.value.status == 400


async def test_tokens_to_continue_without_messages_after_them_are_refused(exact: ExactClient) -> None:
    with pytest.raises(GenerationRefused, match="do not go on after an assistant turn"):
        await exact.complete(request(), [1, 2, 3])
    with pytest.raises(GenerationRefused, match="do not go on after an assistant turn"):
        await exact.complete(request({"role": "assistant", "content": "Well"}), [1, 2, 3])


async def test_only_one_answer_can_be_asked_for(exact: ExactClient) -> None:
    with pytest.raises(GenerationRefused, match="n=2"):
        await exact.complete(request(n=2), None)


async def test_weights_that_change_within_a_call_are_reported_span_by_span(
    vllm: SamplingVllm, exact: ExactClient
) -> None:
    vllm.refit_in_next("policy-1")
    completion = await exact.complete(request(), None)
    spans = [(span.version, span.start, span.end) for span in completion.weight_versions]
    sampled = len(completion.sampled_token_ids)
    assert spans == [("policy-0", 0, sampled // 2), ("policy-1", sampled // 2, sampled)]


async def test_an_aborted_answer_is_a_failure(vllm: SamplingVllm, exact: ExactClient) -> None:
    vllm.abort_next()
    with pytest.raises(GenerationAborted):
        await exact.complete(request(), None)


async def test_a_server_that_fails_or_hangs_up_is_unavailable(vllm: SamplingVllm, exact: ExactClient) -> None:
    vllm.fail_next(500)
    with pytest.raises(GenerationUnavailable, match="status 500"):
        await exact.complete(request(), None)
    vllm.drop_next(path=DERENDER)
    with pytest.raises(GenerationUnavailable):
        await exact.complete(request(), None)


async def test_a_call_that_is_cancelled_ends_the_generation(vllm: SamplingVllm, exact: ExactClient) -> None:
    vllm.hang_next()
    call = asyncio.create_task(exact.complete(request(), None))
    await asyncio.to_thread(vllm.wait_until_hanging)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(vllm.wait_until_hanging, 0)
    assert vllm.generations == []


async def test_the_request_is_not_changed(exact: ExactClient) -> None:
    body = request(parallel_tool_calls=False, tool_choice="required", required_prefix_token_ids=None)
    before = repr(body)
    await exact.complete(body, None)
    assert repr(body) == before


async def test_no_request_names_what_only_nemo_gym_knows(endpoint: HttpEndpoint, exact: ExactClient) -> None:
    first = await exact.complete(request(required_prefix_token_ids=None), None)
    prefix = tokens_of(first)
    await exact.complete(request(returned(first), tool(first), required_prefix_token_ids=prefix, stream=True), prefix)
    for path, sent in endpoint.sent:
        if path in (RENDER, GENERATE, DERENDER):
            assert "required_prefix_token_ids" not in repr(sent)


async def test_two_samples_of_one_prompt_differ(exact: ExactClient) -> None:
    first, second = await exact.complete(request(), None), await exact.complete(request(), None)
    assert first.sampled_token_ids != second.sampled_token_ids


async def test_an_answer_without_a_tool_call_is_text(vllm: SamplingVllm, exact: ExactClient) -> None:
    vllm.policy = lambda messages: Reply("hm", answer="No.")
    completion = await exact.complete(request(), None)
    assert (message_of(completion)["content"], completion.finish_reason) == ("No.", "stop")


async def test_a_seeded_call_has_the_same_tokens_and_ids_again_and_another_sample_has_others(
    exact: ExactClient,
) -> None:
    seed = CallSeed(5, "run/step-0/group-0/rollout-0", sample=0, occurrence=0)
    first = await exact.complete(request(), None, seed)
    again = await exact.complete(
        request(), None, dataclasses.replace(seed, rollout_id="other/step-0/group-0/rollout-0")
    )
    fresh = await exact.complete(request(), None, dataclasses.replace(seed, sample=1))
    assert (message_of(again), again.log_probs, again.sampled_token_ids) == (
        message_of(first),
        first.log_probs,
        first.sampled_token_ids,
    )
    assert fresh.sampled_token_ids != first.sampled_token_ids
    assert message_of(fresh)["tool_calls"][0]["id"] != message_of(first)["tool_calls"][0]["id"]


async def test_an_agent_s_own_seed_counts_over_the_run_s(vllm: SamplingVllm, exact: ExactClient) -> None:
    seed = CallSeed(5, "run/step-0/group-0/rollout-0", sample=0, occurrence=0)
    await exact.complete(request(seed=3), None, seed)
    await exact.complete(request(), None, seed)
    sent = [body["sampling_params"]["seed"] for path, body in vllm.requests if path == GENERATE]
    assert sent == [3, seed.after(vllm.generations[1].prompt_token_ids)]
