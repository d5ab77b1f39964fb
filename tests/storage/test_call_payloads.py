"""The bytes of a payload: what goes in comes out, to the last bit."""

import hashlib
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.call_payloads import (
    Payload,
    chained,
    pack_log_probs,
    pack_tokens,
    tokens_digest,
    unpack_log_probs,
    unpack_tokens,
    unpacked,
    version_range,
)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=50)
log_probs = st.lists(st.floats(allow_nan=False), max_size=50)


@given(token_ids)
def test_tokens_come_back_equal(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tuple(tokens)


@given(log_probs)
def test_log_probabilities_come_back_to_the_last_bit(values: list[float]) -> None:
    back = unpack_log_probs(pack_log_probs(values))
    assert [struct.pack("d", value) for value in back] == [struct.pack("d", value) for value in values]


@given(token_ids, log_probs, st.binary(max_size=200))
def test_packed_payload_comes_apart_again_and_is_named_by_its_digest(
    tokens: list[int], values: list[float], body: bytes
) -> None:
    payload = Payload(pack_tokens(tokens), pack_log_probs(values), body)

    assert unpacked(payload.packed(), len(tokens), len(values)) == payload
    assert payload.digest() == hashlib.sha256(payload.packed()).hexdigest()
    assert payload.size_bytes == len(payload.packed())


def test_bytes_are_little_endian_int32_and_float64() -> None:
    assert pack_tokens([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert pack_log_probs([-0.5]) == b"\x00\x00\x00\x00\x00\x00\xe0\xbf"
    assert tokens_digest(pack_tokens([1])) == hashlib.sha256(b"\x01\x00\x00\x00").hexdigest()


def test_minus_infinity_is_a_log_probability() -> None:
    assert unpack_log_probs(pack_log_probs([-math.inf])) == (-math.inf,)


def test_token_that_is_no_int32_is_refused() -> None:
    with pytest.raises(struct.error):
        pack_tokens([2**31])


def test_payload_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="11 bytes cannot hold 1 tokens and 1 log-probabilities"):
        unpacked(b"x" * 11, 1, 1)


@given(st.lists(st.text(alphabet="0123456789abcdef", min_size=64, max_size=64), min_size=1, max_size=6))
def test_chain_digest_stands_for_all_calls_before_it(digests: list[str]) -> None:
    chain: list[str] = []
    for digest in digests:
        chain.append(chained(chain[-1] if chain else None, digest))

    forged = "f" * 64 if digests[0] != "f" * 64 else "0" * 64
    other = None
    for digest in [forged, *digests[1:]]:
        other = chained(other, digest)
    assert other != chain[-1]


@pytest.mark.parametrize(
    ("versions", "known"),
    [
        (["policy-3"], (3, 3)),
        (["policy-4", "policy-10", "policy-5"], (4, 10)),
        (["default"], (None, None)),
        (["policy-3", "v1"], (None, None)),
        (["policy-03"], (None, None)),
        ([], (None, None)),
    ],
)
def test_policy_versions_are_read_from_their_labels(versions: list[str], known: tuple[int | None, int | None]) -> None:
    assert version_range(versions) == known
