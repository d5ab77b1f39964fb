"""Which tokens a model call goes on from. It is joined to an earlier one only when exactly one sequence can be meant.

1. The agent names the tokens (`required_prefix_token_ids`): they are the prefix, whatever the ledger knows of them.
2. The agent says that there are none (null): it has rewritten its history.
3. Otherwise the conversation is looked up among the responses that this attempt was given.

Whatever stays unclear is a new segment with a reason. The database is asked each time: it is the only place that all
model servers, and a restarted one, agree on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from storage.call_payloads import pack_tokens, tokens_digest
from storage.records import CallPosition, Continuity, ParentCall
from workers.gym.policy_model.caller import Caller
from workers.gym.policy_model.conversation import parent_key

REQUIRED_PREFIX = "required_prefix_token_ids"


@dataclass(frozen=True)
class Continuation:
    """`prefix`: the tokens before the new messages; None where the whole prompt is rendered."""

    continuity: Continuity
    reason: str | None
    parent: CallPosition | None
    prefix: Sequence[int] | None


class Parents(Protocol):
    """The calls that an attempt generated or replayed."""

    async def parents_by_tokens(self, rollout_id: str, attempt: int, cumulative_digest: str) -> list[ParentCall]: ...

    async def parents_by_conversation(self, rollout_id: str, attempt: int, key: str) -> list[ParentCall]: ...


class SegmentRule(Protocol):
    """What the served chat template says about a request that continues a known response."""

    def new_segment_reason(self, body: dict[str, Any]) -> str | None: ...


async def continuation(
    body: Mapping[str, Any], caller: Caller, parents: Parents, template: SegmentRule
) -> Continuation:
    """What a request continues."""
    request = {key: value for key, value in body.items() if key != REQUIRED_PREFIX}
    required = body.get(REQUIRED_PREFIX)
    if required:
        found = await parents.parents_by_tokens(caller.rollout_id, caller.attempt, tokens_digest(pack_tokens(required)))
        if found:
            return Continuation("append", None, found[0].position, required)
        return Continuation("new_segment", "required_prefix_unknown", None, required)
    key = parent_key(request)
    if key is None:
        return Continuation("root", None, None, None)
    if REQUIRED_PREFIX in body:
        return Continuation("new_segment", "history_rewritten", None, None)
    found = await parents.parents_by_conversation(caller.rollout_id, caller.attempt, key)
    if not found:
        return Continuation("new_segment", "parent_unknown", None, None)
    if len({parent.token_ids for parent in found}) > 1:
        return Continuation("new_segment", "parent_ambiguous", None, None)
    parent = found[0]
    reason = template.new_segment_reason(request)
    if reason is not None:
        return Continuation("new_segment", reason, parent.position, None)
    return Continuation("append", None, parent.position, parent.token_ids)
