"""A response in the ledger and the same response towards NeMo-Gym: `released(record)` is what every attempt gets.

The ledger keeps token ids and log-probabilities as arrays and the rest of the chat completion as bytes. Live calls are
answered through the same two functions, so that a replayed answer equals the first one byte by byte.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from workers.gym.policy_model.repairs import token_id_log_probs


class Recorded(Protocol):
    """The part of a recorded response that is released."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def sampled_token_ids(self) -> Sequence[int]: ...
    @property
    def log_probs(self) -> Sequence[float]: ...
    @property
    def body(self) -> bytes: ...


def body_without_tokens(response: Mapping[str, Any]) -> bytes:
    """The chat completion without its token arrays."""
    body = {key: value for key, value in response.items() if key != "prompt_token_ids"}
    (choice,) = body["choices"]
    body["choices"] = [{key: value for key, value in choice.items() if key not in ("token_ids", "logprobs")}]
    return json.dumps(body, separators=(",", ":")).encode()


def released(record: Recorded) -> dict[str, Any]:
    """The chat completion as vLLM writes it with `return_token_ids` and `return_tokens_as_token_ids`."""
    response = json.loads(record.body)
    response["prompt_token_ids"] = list(record.prompt_token_ids)
    (choice,) = response["choices"]
    choice["token_ids"] = list(record.sampled_token_ids)
    choice["logprobs"] = token_id_log_probs(record.sampled_token_ids, record.log_probs)
    return response
