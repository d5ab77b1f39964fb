"""One model call on exact tokens: the prompt is the parent's tokens plus what the template puts after them.

Old turns are never rendered again, so what was sampled stays in the prompt as it was sampled. The route is vLLM's own:
render, generate by ids, derender. Every answer is compared with what was sent; nothing uncertain is returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.gym.policy_model import repairs
from workers.gym.policy_model.conversation import last_assistant
from workers.gym.policy_model.delta import Deltas
from workers.gym.policy_model.endpoint import DERENDER, GENERATE, RENDER, TOKENIZE, Endpoint
from workers.gym.policy_model.errors import (
    ContinuityBroken,
    GenerationAborted,
    GenerationRefused,
    NoGeneration,
    UnknownWeightVersion,
)
from workers.gym.policy_model.seeding import CallSeed, seeded, with_seeded_ids
from workers.gym.policy_model.template import Template

Body = dict[str, Any]


@dataclass(frozen=True)
class VersionSpan:
    """Sampled tokens [start, end) come from weights with the label `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """A generated response. `response` is the chat completion for NeMo-Gym: with `prompt_token_ids`, and in choice 0
    `token_ids` and log-probabilities whose tokens are written `token_id:N`."""

    response: Body
    prompt_token_ids: list[int]
    sampled_token_ids: list[int]
    log_probs: list[float]
    finish_reason: str | None
    response_id: str
    weight_versions: list[VersionSpan]


class ExactClient:
    """Calls of one vLLM server. `body` is a chat completion request; it is not changed."""

    def __init__(self, endpoint: Endpoint, template: Template) -> None:
        self._endpoint = endpoint
        self._end_of_turn = template.end_of_turn
        self._deltas = Deltas(endpoint, template.end_of_turn, template.heads)

    async def complete(self, body: Body, prefix: Sequence[int] | None, seed: CallSeed | None = None) -> Completion:
        """Generate. `prefix` is the parent's prompt and sampled tokens; without one the whole prompt is rendered.
        `seed` is what the call is sampled with, unless the request says so itself.

        Raises a `ModelCallFailed` when there is no answer that may be recorded.
        """
        if body.get("n") not in (None, 1):
            raise GenerationRefused(f"The request asks for n={body['n']} answers; a recorded call has one.")
        request = repairs.without_grammar(body) | {"logprobs": True, "top_logprobs": 0}
        rendered = await self._rendered(request, prefix)
        repairs.refuse_unfaithful(rendered)
        number = None if seed is None else seed.of(rendered)
        asked = seeded(rendered, number) | {"return_token_ids": True, "stream": False}
        generated = await self._endpoint.post(GENERATE, asked)
        choice = generated["choices"][0]
        log_probs = _checked(rendered["token_ids"], generated, choice)
        message = await self._message(request, generated, choice)
        message = repairs.without_stop_string(message, choice.get("stop_reason"), body)
        message = with_seeded_ids(repairs.one_call(repairs.with_call_ids(message), body), number)
        return _completion(body, generated, choice, message, log_probs)

    async def measure(self, body: Body, prefix: Sequence[int] | None) -> list[int]:
        """The prompt that `complete` would send, also where it would be too long. `body` may be a /tokenize request."""
        request = repairs.without_grammar(body)
        if prefix is None:
            return (await self._endpoint.post(TOKENIZE, request))["tokens"]
        delta = await self._deltas.tokens(request, _continued_turn(body))
        return self._joined(prefix, delta)

    async def _rendered(self, request: Body, prefix: Sequence[int] | None) -> Body:
        """vLLM's generate request for the exact prompt."""
        if prefix is None:
            return await self._endpoint.post(RENDER, request)
        delta = await self._deltas.render(request, _continued_turn(request))
        return delta.request | {"token_ids": self._joined(prefix, delta.token_ids)}

    def _joined(self, prefix: Sequence[int], delta: Sequence[int]) -> list[int]:
        """A turn that was cut short gets the end that the template gives every turn."""
        end = [] if prefix[-1] == self._end_of_turn else [self._end_of_turn]
        return [*prefix, *end, *delta]

    async def _message(self, request: Body, generated: Body, choice: Body) -> Body:
        """The assistant message that the sampled tokens spell."""
        tokens = repairs.text_tokens(choice, request)
        if not tokens:
            return {"role": "assistant", "content": None}
        slim = {key: value for key, value in choice.items() if key != "logprobs"} | {"token_ids": tokens}
        derendered = await self._endpoint.post(
            DERENDER,
            {
                "model": request.get("model"),
                "generate_response": generated | {"choices": [slim]},
                "prompt_token_ids": generated["prompt_token_ids"],
                "prompt_tokens": len(generated["prompt_token_ids"]),
                "chat_request": request,
            },
        )
        return derendered["choices"][0]["message"]


def _continued_turn(body: Body) -> int:
    """Where the assistant turn stands that the prefix ends with."""
    last = last_assistant(body)
    if last is None or last == len(body["messages"]) - 1:
        raise GenerationRefused(
            "The request names the tokens that it continues, but its messages do not go on after an assistant turn: "
            "send the new messages after that turn, or no tokens."
        )
    return last


def _checked(sent: list[int], generated: Body, choice: Body) -> list[float]:
    """The log-probabilities of the sampled tokens, if the answer is whole and belongs to the prompt."""
    if choice["finish_reason"] == "abort":
        raise GenerationAborted(
            f"vLLM aborted the answer after {len(choice['token_ids'] or [])} tokens, as it does when generation is "
            "paused with mode=abort. The call can be made again."
        )
    if generated["prompt_token_ids"] != sent:
        raise ContinuityBroken(
            f"vLLM answered for a prompt of {len(generated['prompt_token_ids'] or [])} tokens that is not the prompt "
            f"of {len(sent)} tokens that it was sent."
        )
    if not choice["token_ids"]:
        raise NoGeneration(f"vLLM ended the answer ({choice['finish_reason']}) without a sampled token.")
    entries = (choice.get("logprobs") or {}).get("content") or []
    if [entry["token_id"] for entry in entries] != choice["token_ids"]:
        raise ContinuityBroken(
            f"vLLM sampled {len(choice['token_ids'])} tokens and gave {len(entries)} log-probabilities that do not "
            "belong to them."
        )
    return [entry["logprob"] for entry in entries]


def _completion(body: Body, generated: Body, choice: Body, message: Body, log_probs: list[float]) -> Completion:
    sampled: list[int] = choice["token_ids"]
    finish_reason = repairs.finish_reason(choice, message, body)
    response_id = generated["request_id"].removeprefix("generate-tokens-")
    response = {
        "id": response_id,
        "object": "chat.completion",
        "created": generated["created"],
        "model": generated["model"],
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": repairs.token_id_log_probs(sampled, log_probs),
                "finish_reason": finish_reason,
                "stop_reason": choice.get("stop_reason"),
                "token_ids": sampled,
            }
        ],
        "usage": generated["usage"],
        "prompt_token_ids": generated["prompt_token_ids"],
    }
    return Completion(
        response=response,
        prompt_token_ids=generated["prompt_token_ids"],
        sampled_token_ids=sampled,
        log_probs=log_probs,
        finish_reason=finish_reason,
        response_id=response_id,
        weight_versions=_spans(choice.get("weight_versions") or [], len(sampled)),
    )


def _spans(versions: list[Body], sampled: int) -> list[VersionSpan]:
    """The versions of all sampled tokens, in order and without a gap."""
    spans = [VersionSpan(span["version"], span["start"], span["end"]) for span in versions]
    edges = [0, *(span.end for span in spans)]
    if not spans or edges[-1] != sampled or edges[:-1] != [span.start for span in spans]:
        raise UnknownWeightVersion(
            f"vLLM names the weights of tokens {[(span.start, span.end) for span in spans]}, which is not all "
            f"{sampled} sampled tokens in order. The server must be a vLLM that reports weight_versions."
        )
    return spans
