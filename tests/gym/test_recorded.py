"""What is released of a recorded response: the same object and the same bytes each time, tokens and floats exact."""

import json
import struct
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers.gym.policy_model.recorded import body_without_tokens, released

token_ids = st.integers(0, 2**31 - 1)
log_probs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec=None), max_size=20)


@dataclass(frozen=True)
class Kept:
    prompt_token_ids: tuple[int, ...]
    sampled_token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    body: bytes


@st.composite
def responses(draw: st.DrawFn) -> dict[str, Any]:
    """Chat completions as vLLM writes them."""
    sampled = draw(st.lists(st.tuples(token_ids, log_probs), min_size=1, max_size=8))
    call = {"id": "call", "type": "function", "function": {"name": "turn", "arguments": draw(texts)}}
    return {
        "id": draw(texts),
        "created": draw(st.integers(0, 2**40)),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": draw(texts | st.none()), "tool_calls": [call]},
                "finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls"])),
                "token_ids": [token for token, _ in sampled],
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
                        for token, log_prob in sampled
                    ]
                },
            }
        ],
        "prompt_token_ids": draw(st.lists(token_ids, min_size=1, max_size=8)),
    }


def kept(response: dict[str, Any]) -> Kept:
    """What the ledger keeps: token ids as int32, log-probabilities as float64, the rest as bytes."""
    (choice,) = response["choices"]
    log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    packed = struct.pack(f"<{len(log_probs)}d", *log_probs)
    return Kept(
        tuple(response["prompt_token_ids"]),
        tuple(choice["token_ids"]),
        struct.unpack(f"<{len(log_probs)}d", packed),
        body_without_tokens(response),
    )


@given(response=responses())
def test_a_recorded_response_is_released_as_it_came(response: dict[str, Any]) -> None:
    assert released(kept(response)) == response


@given(response=responses())
def test_the_first_release_and_every_replay_are_the_same_bytes(response: dict[str, Any]) -> None:
    first = json.dumps(released(kept(response)))
    assert json.dumps(released(kept(json.loads(first)))) == first


@given(response=responses())
def test_the_body_has_no_token_arrays(response: dict[str, Any]) -> None:
    body = json.loads(body_without_tokens(response))
    assert not {"prompt_token_ids", "token_ids", "logprobs"} & {*body, *body["choices"][0]}
