"""What makes two model calls equal: everything that can change the tokens, and nothing else.

The served model, tokenizer and chat template are part of it (`contract`), so that a response is never replayed for
another policy family. Names, labels and transport options of the request are not.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

TRANSPORT_FIELDS = frozenset(
    {"model", "metadata", "user", "stream", "stream_options", "conversation_params", "ng_capture"}
)


def fingerprint(body: Mapping[str, Any], contract: str) -> str:
    """sha256 of the canonical chat body and the contract."""
    counted = {key: value for key, value in body.items() if key not in TRANSPORT_FIELDS}
    canonical = json.dumps([contract, counted], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
