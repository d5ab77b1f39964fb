"""The bytes of a recorded response: exact, and the same on every machine.

A payload is tokens (int32), log-probabilities (float64), then the body, little-endian and without gaps; the counts of
the row say where each part ends. Its sha256 is the call's digest, and its name when it is kept in the blob store.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TOKEN_BYTES = 4
LOG_PROB_BYTES = 8
POLICY_VERSION = re.compile(r"policy-(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Payload:
    """What one call adds to the evidence: prompt delta and sampled tokens, their log-probabilities, the body."""

    tokens: bytes
    log_probs: bytes
    body: bytes

    def packed(self) -> bytes:
        """All parts in one piece."""
        return self.tokens + self.log_probs + self.body

    @property
    def size_bytes(self) -> int:
        """Length of the packed payload."""
        return len(self.tokens) + len(self.log_probs) + len(self.body)

    def digest(self) -> str:
        """sha256 of the packed payload."""
        digest = hashlib.sha256(self.tokens)
        digest.update(self.log_probs)
        digest.update(self.body)
        return digest.hexdigest()


def unpacked(packed: bytes, tokens: int, log_probs: int) -> Payload:
    """The parts of a packed payload with so many tokens and log-probabilities. ValueError when it is too short."""
    end_of_tokens = tokens * TOKEN_BYTES
    end_of_log_probs = end_of_tokens + log_probs * LOG_PROB_BYTES
    if len(packed) < end_of_log_probs:
        raise ValueError(f"{len(packed)} bytes cannot hold {tokens} tokens and {log_probs} log-probabilities")
    return Payload(packed[:end_of_tokens], packed[end_of_tokens:end_of_log_probs], packed[end_of_log_probs:])


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """int32, little-endian."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The inverse of pack_tokens."""
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}i", packed)


def pack_log_probs(log_probs: Sequence[float]) -> bytes:
    """float64, little-endian: no digit is lost."""
    return struct.pack(f"<{len(log_probs)}d", *log_probs)


def unpack_log_probs(packed: bytes) -> tuple[float, ...]:
    """The inverse of pack_log_probs."""
    return struct.unpack(f"<{len(packed) // LOG_PROB_BYTES}d", packed)


def tokens_digest(packed_tokens: bytes) -> str:
    """The cumulative digest of a call: sha256 of its packed prompt and sampled tokens."""
    return hashlib.sha256(packed_tokens).hexdigest()


def chained(parent_chain_digest: str | None, digest: str) -> str:
    """The digest of a call and of everything before it; over the hexadecimal texts, so that SQL computes the same."""
    return hashlib.sha256(((parent_chain_digest or "") + digest).encode()).hexdigest()


def version_range(versions: Iterable[str]) -> tuple[int, int] | tuple[None, None]:
    """Oldest and newest policy version of the labels `policy-<t>`; nothing is known if one has another form."""
    matches = [POLICY_VERSION.fullmatch(version) for version in versions]
    numbers = [int(match[1]) for match in matches if match is not None]
    return (min(numbers), max(numbers)) if numbers and len(numbers) == len(matches) else (None, None)
