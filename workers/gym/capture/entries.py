"""A token entry of NeMo-Gym as it is stored, and back, equal in every field.

The digest covers the whole entry. Token ids and log-probabilities of a call that is in the ledger are left out and read
from there again.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import hashlib
from typing import Any

import orjson
from nemo_gym.token_id_capture.records import TokenEntry

from storage.captures import CapturedEntry
from storage.records import AttemptCall, RecordedResponse
from workers.gym.capture.served import Served

ARRAYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def stored(entry: TokenEntry, served: Served | None) -> CapturedEntry:
    """An entry on its way into the database."""
    fields: dict[str, Any] = entry.model_dump(mode="json")
    whole = _encoded(fields)
    captured = CapturedEntry(
        model_call_id=entry.model_call_id,
        entry=whole,
        digest=hashlib.sha256(whole).hexdigest(),
        continuation=entry.continuation_fingerprint,
    )
    if served is None or not _has_its_tokens(entry, served.response):
        return captured
    return captured.model_copy(
        update={
            "entry": _encoded({key: value for key, value in fields.items() if key not in ARRAYS}),
            "rollout_id": served.rollout_id,
            "call": served.response.position,
        }
    )


def whole(captured: CapturedEntry, call: AttemptCall | RecordedResponse | None) -> TokenEntry:
    """The entry, with the tokens of the call that it points to."""
    fields: dict[str, Any] = orjson.loads(captured.entry)
    if call is not None:
        arrays = (call.prompt_token_ids, call.sampled_token_ids, call.log_probs)
        fields |= {key: list(values) for key, values in zip(ARRAYS, arrays, strict=True)}
    return TokenEntry.model_validate(fields)


def _has_its_tokens(entry: TokenEntry, response: RecordedResponse) -> bool:
    return (
        not entry.prompt_is_delta
        and tuple(entry.prompt_token_ids) == response.prompt_token_ids
        and tuple(entry.generation_token_ids) == response.sampled_token_ids
        and tuple(entry.generation_log_probs) == response.log_probs
    )


def _encoded(fields: dict[str, Any]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
