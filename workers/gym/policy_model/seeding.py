"""What a seeded run gives vLLM to sample with: one number for each model call, and ids that follow from it.

1. Two runs with the same `rollouts.sampling_seed` give the same number to the same call: it follows from the seed, the
   rollout's place in its run, and the tokens that the call goes on from. Neither attempts, nor the order in which calls
   come, nor the calls that failed before it change it.
2. Two calls of one run get different numbers, also when they have the same prompt: a call that is asked again for
   another sample, and a rollout that begins a fresh sample, count up.
3. A request that has a seed of its own keeps it. The seed is no part of what makes two calls equal (see `fingerprint`).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from storage.call_payloads import pack_tokens, tokens_digest

Body = dict[str, Any]

_BITS = 63  # vLLM takes a signed 64-bit number and reads -1 as none


@dataclass(frozen=True)
class CallSeed:
    """Of one model call. `sample` counts the fresh samples of its rollout, `occurrence` the calls with equal requests
    before it."""

    sampling_seed: int
    rollout_id: str
    sample: int
    occurrence: int

    def after(self, prompt_token_ids: Sequence[int]) -> int:
        """The number for the call with this prompt: 63 bits of a SHA-256."""
        # Without the run's id, so that another run with this seed samples the same.
        _, _, place = self.rollout_id.partition("/")
        prompt = tokens_digest(pack_tokens(prompt_token_ids))
        identity = json.dumps([self.sampling_seed, place, self.sample, self.occurrence, prompt])
        return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8]) >> (64 - _BITS)

    def of(self, rendered: Body) -> int | None:
        """The number for vLLM's generate request; None where the agent gave one."""
        own = rendered["sampling_params"].get("seed")
        return self.after(rendered["token_ids"]) if own is None else None


def seeded(rendered: Body, seed: int | None) -> Body:
    """vLLM's generate request, with the number if there is one."""
    if seed is None:
        return rendered
    return rendered | {"sampling_params": rendered["sampling_params"] | {"seed": seed}}


def with_seeded_ids(message: Body, seed: int | None) -> Body:
    """The assistant message with ids of tool calls that follow from the number: some chat templates show them."""
    if seed is None or not message.get("tool_calls"):
        return message
    calls = [
        call | {"id": f"chatcmpl-tool-{hashlib.sha256(f'{seed}/{index}'.encode()).hexdigest()[:16]}"}
        for index, call in enumerate(message["tool_calls"])
    ]
    return message | {"tool_calls": calls}
