"""What an answer of vLLM that is not 200 means, in the words that NeMo-Gym's model server looks for."""

import json

import pytest

from workers.gym.policy_model.errors import (
    ContextOverflow,
    GenerationRefused,
    GenerationUnavailable,
    ModelCallFailed,
    failure_of,
)

PATH = "/inference/v1/generate"


def answer(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "code": 400}}).encode()


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input tokens.",
        "Input length (8423) exceeds model's maximum context length (8192).",
        "The decoder prompt (length 1025) is longer than the maximum model length of 1024.",
        "The decoder prompt (length 1024) plus the number of requested output tokens (at least 1) is longer than the "
        "maximum model length of 1024.",
        "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
    ],
)
def test_every_wording_of_a_prompt_that_is_too_long_is_one_that_nemo_gym_recognises(message: str) -> None:
    failure = failure_of(400, answer(message), PATH)
    assert isinstance(failure, ContextOverflow)
    assert failure.status == 400
    assert b"context length" in failure.content
    assert message in failure.cause


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "Token id 5000 is out of vocabulary"),
        (400, "max_completion_tokens=5000 cannot be greater than max_model_len=1024."),
        (401, "Unauthorized"),
        (404, "The model `nope` does not exist."),
        (422, "maximum context length"),
    ],
)
def test_any_other_4xx_is_a_refusal_with_its_own_status(status: int, message: str) -> None:
    failure = failure_of(status, answer(message), PATH)
    assert isinstance(failure, GenerationRefused)
    assert failure.status == status


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_that_cannot_answer_now_is_unavailable(status: int) -> None:
    assert isinstance(failure_of(status, b"", PATH), GenerationUnavailable)


def test_a_failure_is_answered_in_the_form_of_vllm() -> None:
    failure = failure_of(400, answer("Token id 5000 is out of vocabulary"), PATH)
    error = json.loads(failure.content)["error"]
    assert (error["type"], error["code"]) == ("GenerationRefused", 400)
    assert PATH in error["message"]


def test_a_long_answer_is_quoted_in_part() -> None:
    assert len(failure_of(500, b"x" * 100_000, PATH).cause) < 1000


def test_every_failure_has_a_class_of_its_own() -> None:
    kinds = ModelCallFailed.__subclasses__()
    assert len({kind.failure_class for kind in kinds}) == len(kinds) == 7
