"""What lies between a chat completion of vLLM and the same tokens through its render, generate and derender routes.

Before the call: everything that makes vLLM mask tokens with a grammar is taken out, because the log-probabilities would
be those of the masked distribution. After it: message, finish reason and log-probabilities as the chat route has them.
"""

from collections.abc import Sequence
from typing import Any

from workers.gym.policy_model.errors import GenerationRefused

Body = dict[str, Any]

# What only NeMo-Gym knows, and what asks for another form of the answer.
_NOT_UPSTREAM = ("required_prefix_token_ids", "stream", "stream_options", "parallel_tool_calls")
_TEXT_BEHIND_STOP = 16  # characters of the token that completed a stop string


def without_grammar(body: Body) -> Body:
    """The request as vLLM gets it, without what would make it follow a grammar for tools.

    A forced `tool_choice` becomes vLLM's "auto" and `strict` tools become ordinary ones, as in the request that starts
    a rollout; `parallel_tool_calls: false` is honoured afterwards (`one_call`).
    """
    request = {key: value for key, value in body.items() if key not in _NOT_UPSTREAM}
    if request.get("tool_choice") not in ("auto", "none"):
        request.pop("tool_choice", None)
    if request.get("tools"):
        request["tools"] = [_not_strict(tool) for tool in request["tools"]]
    return request


def refuse_unfaithful(rendered: Body) -> None:
    """Raise for a request whose log-probabilities or tokens would not be those of the policy alone.

    `rendered` is vLLM's own reading of the request, so that no way of asking for a grammar is missed.
    """
    if rendered["sampling_params"].get("structured_outputs") is not None:
        raise GenerationRefused(
            "The request asks for structured output (response_format or structured_outputs). vLLM then masks tokens "
            "with a grammar, and the log-probabilities would not be those of the policy. Take it out of the agent's "
            "request."
        )
    if rendered.get("features") is not None:
        raise GenerationRefused(
            "The request holds images, audio or video. Exact tokens cover text only. Use a text-only environment."
        )


def text_tokens(choice: Body, body: Body) -> list[int]:
    """The sampled tokens that are text: without the token that ended the turn, as in vLLM's own detokenizer."""
    ended_by_token = choice["finish_reason"] == "stop" and not isinstance(choice.get("stop_reason"), str)
    if ended_by_token and not body.get("include_stop_str_in_output"):
        return choice["token_ids"][:-1]
    return choice["token_ids"]


def without_stop_string(message: Body, stop_reason: Any, body: Body) -> Body:
    """Derendering keeps a stop string, and whatever its last token has behind it; the chat route does not."""
    if not isinstance(stop_reason, str) or body.get("include_stop_str_in_output"):
        return message
    for field in ("content", "reasoning"):
        text = message.get(field) or ""
        if stop_reason in text[-len(stop_reason) - _TEXT_BEHIND_STOP :]:
            return message | {field: text[: text.rindex(stop_reason)]}
    return message


def one_call(message: Body, body: Body) -> Body:
    """`parallel_tool_calls: false`: only the first call, as vLLM's chat route does."""
    if body.get("parallel_tool_calls") is False and message.get("tool_calls"):
        return message | {"tool_calls": message["tool_calls"][:1]}
    return message


def with_call_ids(message: Body) -> Body:
    """Ids of tool calls in the form of the chat route."""
    if not message.get("tool_calls"):
        return message
    calls = [call | {"id": f"chatcmpl-tool-{call['id']}"} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def finish_reason(choice: Body, message: Body, body: Body) -> str | None:
    """`tool_calls` for a turn with calls, even if it was cut behind them; but not where the request named the tool."""
    named = isinstance(body.get("tool_choice"), dict)
    return "tool_calls" if message.get("tool_calls") and not named else choice["finish_reason"]


def token_id_log_probs(token_ids: Sequence[int], log_probs: Sequence[float]) -> Body:
    """Log-probabilities as with `return_tokens_as_token_ids`."""
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
            for token, log_prob in zip(token_ids, log_probs, strict=True)
        ]
    }


def _not_strict(tool: Body) -> Body:
    if "function" not in tool:
        return tool
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return tool | {"function": function}
