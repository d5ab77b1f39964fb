"""A sampling server and a client of the exact-token route on it."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gym.exact.http_endpoint import HttpEndpoint
from tests.gym.exact.requests import TEMPLATE
from tests.gym.sampling_vllm import SamplingVllm
from tests.gym.stub_model import Message, Reply
from workers.gym.policy_model.exact import ExactClient


def turns_the_dial(messages: list[Message]) -> Reply:
    """Three tool calls, then an answer."""
    turns = sum(message["role"] == "tool" for message in messages)
    if turns == 3:
        return Reply("all open", answer="The safe is open.")
    return Reply("next", "turn", {"dial": turns + 1})


@pytest.fixture
def vllm() -> Iterator[SamplingVllm]:
    with SamplingVllm(turns_the_dial) as server:
        yield server


@pytest.fixture
async def endpoint(vllm: SamplingVllm) -> AsyncIterator[HttpEndpoint]:
    async with HttpEndpoint(vllm.url) as client:
        yield client


@pytest.fixture
def exact(endpoint: HttpEndpoint) -> ExactClient:
    return ExactClient(endpoint, TEMPLATE)
