"""The vocabulary is uniquely decodable: what is rendered as text reads back as the tokens it was made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from workers.demo import vocabulary
from workers.demo.tokenizer import build_tokenizer

ids = st.lists(st.integers(0, vocabulary.SIZE - 1), max_size=40)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def text_of(tokenizer: PreTrainedTokenizerFast, sampled: list[int]) -> str:
    text = tokenizer.decode(sampled)
    assert isinstance(text, str)
    return text


def test_no_token_begins_with_another() -> None:
    pairs = [(a, b) for a in vocabulary.TOKENS for b in vocabulary.TOKENS if a != b and b.startswith(a)]
    assert pairs == []


def test_the_model_cannot_sample_an_id_that_the_tokenizer_lacks(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == len(set(vocabulary.TOKENS)) == vocabulary.SIZE


@given(sampled=ids)
def test_any_sampled_sequence_reads_back_unchanged(tokenizer: PreTrainedTokenizerFast, sampled: list[int]) -> None:
    assert tokenizer.encode(text_of(tokenizer, sampled), add_special_tokens=False) == sampled


@given(first=ids, second=ids)
def test_texts_are_tokenized_the_same_apart_and_together(
    tokenizer: PreTrainedTokenizerFast, first: list[int], second: list[int]
) -> None:
    together = text_of(tokenizer, first) + text_of(tokenizer, second)
    assert tokenizer.encode(together, add_special_tokens=False) == first + second
