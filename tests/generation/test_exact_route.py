"""The exact-token route on a real vLLM: against the server's own chat route and its own log-probabilities."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from activities.generation.refit import refit
from activities.generation.vllm import VllmServer
from tests.generation.served import CONTEXT_TOKENS, PATIENCE_S, ServedPolicy
from tests.generation.under_way import while_under_way
from tests.gym.exact.http_endpoint import HttpEndpoint
from tests.gym.exact.requests import message_of, returned, tokens_of
from tests.gym.stub_model import Message
from workers.demo.tokenizer import build_tokenizer
from workers.gym.policy_model.endpoint import GENERATE
from workers.gym.policy_model.errors import ContextOverflow, GenerationAborted, GenerationRefused
from workers.gym.policy_model.exact import Completion, ExactClient, VersionSpan
from workers.gym.policy_model.template import Template

pytestmark = pytest.mark.integration

Body = dict[str, Any]

OPENING: Message = {"role": "user", "content": "Open Ada safe of 3 parts and 9 turns."}
HINT = '{"hint": "higher", "left": 8}'
DIGITS = {"type": "object", "properties": {"dial": {"type": "integer"}, "digit": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "turn", "description": "Turns.", "parameters": DIGITS}}]
TOLERANCE = 1e-3  # the server computes a prompt in other pieces than a continuation


def request(*messages: Message, **fields: Any) -> Body:
    return {"model": "policy", "tools": TOOLS, "messages": [OPENING, *messages], "max_tokens": 48, **fields}


def answer_to(completion: Completion) -> list[Message]:
    """What the agent appends: the turn without its thought, and the tool's answers or another request."""
    calls = message_of(completion).get("tool_calls") or []
    tools = [{"role": "tool", "tool_call_id": call["id"], "content": HINT} for call in calls]
    return [returned(completion), *(tools or [OPENING])]


@pytest.fixture(scope="module")
async def server(vllm_server: ServedPolicy) -> AsyncIterator[VllmServer]:
    """Serves the policy that opens safes; the version that it has for that matters only to tests which load it."""
    async with VllmServer(vllm_server.url, refit_timeout_s=PATIENCE_S) as server:
        await refit([server], vllm_server.opener, "wait")
        yield server


@pytest.fixture
async def endpoint(server: VllmServer) -> AsyncIterator[HttpEndpoint]:
    async with HttpEndpoint(server.url) as client:
        yield client


@pytest.fixture(scope="module")
async def template(vllm_server: ServedPolicy) -> Template:
    async with HttpEndpoint(vllm_server.url) as endpoint:
        return await Template.check(endpoint)


@pytest.fixture
def exact(endpoint: HttpEndpoint, template: Template) -> ExactClient:
    return ExactClient(endpoint, template)


async def log_probs_of(endpoint: HttpEndpoint, prompt: list[int], sampled: list[int]) -> list[float]:
    """The server's log-probabilities of the sampled tokens, computed as a prompt."""
    body = {"model": "policy", "prompt": [*prompt, *sampled], "max_tokens": 1, "prompt_logprobs": 0}
    answer = await endpoint.post("/v1/completions", body)
    behind = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
    return [entry[str(token)]["logprob"] for entry, token in zip(behind, sampled, strict=True)]


async def test_the_demo_template_fits(template: Template) -> None:
    assert template.end_of_turn == build_tokenizer().eos_token_id
    assert not template.rewrites_user_turn


async def test_a_tool_conversation_is_one_growing_sequence_with_the_servers_log_probabilities(
    endpoint: HttpEndpoint, exact: ExactClient
) -> None:
    messages: list[Message] = []
    prefix: list[int] | None = None
    calls = 0
    for turn in range(8):
        measured = await exact.measure({"model": "policy", "tools": TOOLS, "messages": [OPENING, *messages]}, prefix)
        completion = await exact.complete(request(*messages, seed=turn), prefix)
        assert completion.prompt_token_ids == measured
        assert completion.prompt_token_ids[: len(prefix or ())] == (prefix or [])
        expected = await log_probs_of(endpoint, completion.prompt_token_ids, completion.sampled_token_ids)
        assert completion.log_probs == pytest.approx(expected, abs=TOLERANCE)
        prefix = tokens_of(completion)
        messages += answer_to(completion)
        calls += completion.finish_reason == "tool_calls"
    assert calls >= 4


async def test_a_request_for_one_tool_call_has_unmasked_log_probabilities(
    endpoint: HttpEndpoint, exact: ExactClient
) -> None:
    completion = await exact.complete(request(parallel_tool_calls=False, seed=1), None)
    expected = await log_probs_of(endpoint, completion.prompt_token_ids, completion.sampled_token_ids)
    assert completion.log_probs == pytest.approx(expected, abs=TOLERANCE)


THINK, END_THINK, GUESS, DIAL = 4, 5, 45, 46


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.3},
        {"temperature": 1.5},
        {"temperature": 0.0},
        {"top_p": 0.7, "top_k": 20},
        {"max_tokens": 3},
        {"max_tokens": 14},
        {"stop": [" to"]},
        {"stop": [" to"], "include_stop_str_in_output": True},
        {"stop_token_ids": [END_THINK]},
        {"stop_token_ids": [DIAL]},
        {"allowed_token_ids": [2]},
        {"allowed_token_ids": [GUESS], "stop_token_ids": [GUESS]},
        {"allowed_token_ids": [THINK, END_THINK, GUESS, DIAL], "max_tokens": 20},
        {"ignore_eos": True, "max_tokens": 30},
        {"tool_choice": "none"},
        {"max_tokens": CONTEXT_TOKENS - 48},
    ],
    ids=str,
)
async def test_the_same_prompt_and_seed_give_the_same_answer_as_the_chat_route(
    endpoint: HttpEndpoint, exact: ExactClient, fields: Body
) -> None:
    first = await exact.complete(request(seed=3, temperature=0.3), None)
    body = request(*answer_to(first), seed=7, **fields)
    ours = await exact.complete(body, tokens_of(first))
    chat = await endpoint.post(
        "/v1/chat/completions",
        body
        | {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        | {"kv_transfer_params": {"prompt_token_ids": ours.prompt_token_ids}},
    )
    assert seen(ours.response) == seen(chat)
    entries = chat["choices"][0]["logprobs"]["content"]
    assert ours.log_probs == pytest.approx([entry["logprob"] for entry in entries], abs=TOLERANCE)


def seen(response: Body) -> Body:
    """What an agent or the trainer sees of a response; ids of tool calls are random."""
    choice = response["choices"][0]
    message = choice["message"]
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "calls": [call["function"] for call in message.get("tool_calls") or []],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "tokens": choice["token_ids"],
        "prompt": response["prompt_token_ids"],
        "names": [entry["token"] for entry in choice["logprobs"]["content"]],
        "usage": [response["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")],
    }


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "turn"}}], ids=str)
async def test_a_forced_tool_choice_is_sampled_freely(endpoint: HttpEndpoint, exact: ExactClient, choice: Any) -> None:
    completion = await exact.complete(request(tool_choice=choice), None)
    expected = await log_probs_of(endpoint, completion.prompt_token_ids, completion.sampled_token_ids)
    assert completion.log_probs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"choice": ["yes", "no"]}}],
    ids=["response_format", "structured_outputs"],
)
async def test_every_way_to_ask_for_a_grammar_is_refused(exact: ExactClient, fields: Body) -> None:
    with pytest.raises(GenerationRefused, match="structured output"):
        await exact.complete(request(**fields), None)


async def test_the_window_is_filled_to_its_last_token_and_not_beyond(
    endpoint: HttpEndpoint, exact: ExactClient
) -> None:
    first = await exact.complete(request(seed=3), None)
    body = request(*answer_to(first))
    delta = len((await exact.complete(body, tokens_of(first))).prompt_token_ids) - len(tokens_of(first))
    filler = [GUESS] * (CONTEXT_TOKENS - 1 - delta - len(tokens_of(first)))
    filled = [*filler, *tokens_of(first)]
    last = await exact.complete(body, filled)
    assert (last.finish_reason, len(last.sampled_token_ids)) == ("length", 1)
    for more in (1, 2):
        with pytest.raises(ContextOverflow, match="maximum context length"):
            await exact.complete(body, [GUESS] * more + filled)
    assert len(await exact.measure(body, [GUESS, *filled])) == CONTEXT_TOKENS
    whole = {"role": "user", "content": "1" * CONTEXT_TOKENS}
    with pytest.raises(ContextOverflow, match="maximum context length"):
        await exact.complete(request(whole), None)
    assert len(await exact.measure(request(whole), None)) > CONTEXT_TOKENS


LONG = {"ignore_eos": True, "max_tokens": 1500}


async def test_a_call_that_meets_a_refit_has_a_span_for_each_version(
    vllm_server: ServedPolicy, server: VllmServer, endpoint: HttpEndpoint, exact: ExactClient
) -> None:
    async def attempt() -> Completion | None:
        await refit([server], vllm_server.opener, "wait")
        call = await vllm_server.begun(endpoint, exact.complete(request(**LONG), None))
        await server.pause("keep")  # at once: a busy machine may take long over what comes first in a refit
        await refit([server], vllm_server.opener.model_copy(update={"version": 1}), "keep")
        completion = await call
        return None if completion.weight_versions == [VersionSpan("policy-0", 0, LONG["max_tokens"])] else completion

    completion = await while_under_way(attempt)
    old, new = completion.weight_versions
    assert (old.version, new.version) == ("policy-0", "policy-1")
    assert (old.start, old.end, new.end) == (0, new.start, len(completion.sampled_token_ids))
    after = await exact.complete(request(), None)
    assert after.weight_versions == [VersionSpan("policy-1", 0, len(after.sampled_token_ids))]


async def test_a_call_that_the_server_aborts_is_a_failure(
    vllm_server: ServedPolicy, server: VllmServer, endpoint: HttpEndpoint, exact: ExactClient
) -> None:
    async def attempt() -> BaseException | None:
        call = await vllm_server.begun(endpoint, exact.complete(request(**LONG), None))
        await server.pause("abort")
        await server.resume()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        return outcome if isinstance(outcome, BaseException) else None  # it was answered: all tokens were there

    assert isinstance(await while_under_way(attempt), GenerationAborted)


async def test_tokens_that_the_model_does_not_have_are_refused(exact: ExactClient) -> None:
    with pytest.raises(GenerationRefused, match="out of vocabulary") as failure:
        await exact.complete(request({"role": "assistant", "content": "no"}, OPENING), [1, 5000])
    assert failure.value.status == httpx.codes.BAD_REQUEST
    assert GENERATE in str(failure.value)
