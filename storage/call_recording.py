"""What a generated response becomes in the ledger: only the tokens that its parent does not have, and the digests."""

import json
from collections import OrderedDict
from dataclasses import dataclass

from storage.call_payloads import (
    TOKEN_BYTES,
    Payload,
    chained,
    pack_log_probs,
    pack_tokens,
    tokens_digest,
    version_range,
)
from storage.call_statements import PARENT, RECORD_VALUES
from storage.database import Database
from storage.errors import LineageBroken
from storage.records import CallLease, CallPosition, GeneratedResponse

PARENTS_KEPT = 4096


@dataclass(frozen=True)
class Parent:
    """What is to be known of a call to continue it; a recorded call never changes, so neither does this."""

    sample: int
    tokens: int
    cumulative_digest: str
    chain_digest: str


@dataclass(frozen=True)
class Recording:
    """A response, ready to be written."""

    payload: Payload
    prefix_tokens: int
    digest: str
    chain_digest: str
    cumulative_digest: str

    def as_parent(self, sample: int, response: GeneratedResponse) -> Parent:
        """The call as the parent of the next one."""
        tokens = len(response.prompt_token_ids) + len(response.sampled_token_ids)
        return Parent(sample, tokens, self.cumulative_digest, self.chain_digest)


class Parents:
    """The recorded calls that may be continued soon: most were recorded by this process a moment ago."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: OrderedDict[tuple[str, CallPosition], Parent] = OrderedDict()

    async def of(self, lease: CallLease, response: GeneratedResponse) -> Parent | None:
        """The call that a response continues, or LineageBroken when it is not there."""
        if response.parent is None:
            return None
        known = self._known.get((lease.rollout_id, response.parent))
        if known is not None:
            return known
        place = {"rollout_id": lease.rollout_id, **response.parent.model_dump()}
        async with self._database.statement() as connection:
            row = (await connection.execute(PARENT, place)).mappings().one_or_none()
        if row is None:
            at = f"call {response.parent.ordinal} of attempt {response.parent.attempt}"
            raise _broken(lease, f"its parent, {at}, is no generated response")
        return self.keep(lease.rollout_id, response.parent, Parent(**row))

    def keep(self, rollout_id: str, position: CallPosition, parent: Parent) -> Parent:
        """Remember a call that was recorded or read."""
        self._known[rollout_id, position] = parent
        if len(self._known) > PARENTS_KEPT:
            self._known.popitem(last=False)
        return parent


def recording(lease: CallLease, response: GeneratedResponse, parent: Parent | None) -> Recording:
    """Split the tokens at the end of the parent's, or LineageBroken when the prompt does not start with those."""
    if parent is not None and parent.sample != lease.sample:
        raise _broken(lease, f"its parent is of sample {parent.sample}, the call of sample {lease.sample}")
    packed = pack_tokens(response.prompt_token_ids + response.sampled_token_ids)
    prefix_tokens = parent.tokens if parent is not None and response.continuity == "append" else 0
    prefix_bytes = prefix_tokens * TOKEN_BYTES
    if parent is not None and response.continuity == "append":
        if prefix_tokens > len(response.prompt_token_ids):
            raise _broken(lease, f"its prompt is shorter than the {prefix_tokens} tokens of its parent")
        if tokens_digest(packed[:prefix_bytes]) != parent.cumulative_digest:
            raise _broken(lease, f"its prompt does not start with the {prefix_tokens} tokens of its parent")
    payload = Payload(packed[prefix_bytes:], pack_log_probs(response.log_probs), response.body)
    digest = payload.digest()
    chain_digest = chained(None if parent is None else parent.chain_digest, digest)
    return Recording(payload, prefix_tokens, digest, chain_digest, tokens_digest(packed))


def values_of(
    lease: CallLease, response: GeneratedResponse, recording: Recording, blob: str | None
) -> tuple[object, ...]:
    """The values of the insert."""
    oldest, newest = version_range(span.version for span in response.weight_versions)
    parent, payload = response.parent, recording.payload
    values: dict[str, object] = {
        "rollout_id": lease.rollout_id,
        "attempt": lease.attempt,
        "ordinal": lease.ordinal,
        "parent_attempt": None if parent is None else parent.attempt,
        "parent_ordinal": None if parent is None else parent.ordinal,
        "continuity": response.continuity,
        "continuity_reason": response.continuity_reason,
        "prompt_tokens": len(response.prompt_token_ids),
        "prefix_tokens": recording.prefix_tokens,
        "generated_tokens": len(response.sampled_token_ids),
        "tokens": payload.tokens if blob is None else None,
        "log_probs": payload.log_probs if blob is None else None,
        "body": payload.body if blob is None else None,
        "blob": blob,
        "finish_reason": response.finish_reason,
        "response_id": response.response_id,
        "weight_versions": json.dumps([span.model_dump() for span in response.weight_versions]),
        "weight_version_min": oldest,
        "weight_version_max": newest,
        "conversation": response.conversation,
        "cumulative_digest": recording.cumulative_digest,
        "digest": recording.digest,
        "chain_digest": recording.chain_digest,
        "started_at": response.started_at,
    }
    return tuple(values[name] for name in RECORD_VALUES)


def _broken(lease: CallLease, cause: str) -> LineageBroken:
    return LineageBroken(lease.rollout_id, lease.attempt, lease.ordinal, cause)
